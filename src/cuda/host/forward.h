/* The forward: forward.c. */
#ifndef SMOE_CUDA_FORWARD_H
#define SMOE_CUDA_FORWARD_H

#include "host/device.h"

void moe_cuda_lay_out_forward(const device_state *state, const moe_problem *problem, moe_layout *layout);
smoe_status moe_cuda_forward(smoe_context *context, const moe_call *call, const smoe_forward_args *args,
                             int stages);

#endif
