/* What forward.c and backward.c call for layers with LoRA; lora.c. Without LoRA beside the weight in question
 * each does nothing. */
#ifndef MOE_CUDA_LORA_H
#define MOE_CUDA_LORA_H

#include "host/backward.h"
#include "host/forward.h"

cudaError_t moe_cuda_lora_p1(const forward_call *call);  /* before up */
cudaError_t moe_cuda_lora_p2(const forward_call *call);  /* before down */
cudaError_t moe_cuda_lora_q2(const backward_call *call); /* before dh */

/* After dh: those of dA2 and dB2 that are wanted. After dw1: Q1, and those of dA1 and dB1 that are wanted. */
cudaError_t moe_cuda_lora_gradients2(const backward_call *call);
cudaError_t moe_cuda_lora1(const backward_call *call);
int moe_cuda_wants_lora1(const backward_call *call);

#endif
