/* The forward: forward.c. */
#ifndef MOE_CUDA_FORWARD_H
#define MOE_CUDA_FORWARD_H

#include "host/device.h"
#include "host/routing.h"

/* What the stages share. */
typedef struct forward_call {
    const moe_problem *problem;
    const smoe_forward_args *args;
    const moe_plan_arrays *plan;
    const device_state *state;
    void *work;               /* of the plan from given top-K */
    moe_cuda_routing routing; /* FROM_LOGITS, for route, round and plan */
    moe_cuda_lists lists;
    char *a, *y;
    const int32_t *block_offsets; /* as in moe_up: the plan's */
    int32_t block_stride;
    int64_t rows; /* whole blocks of the padded rows */
    int few_rows; /* the kernels for few rows run */
    /* with fp8: X8 and its scales, the scales of A8, which is in `a` */
    uint8_t *x8;
    float *x_scale, *a_scale;
    moe_launch on;
} forward_call;

void moe_cuda_lay_out_forward(const device_state *state, const moe_problem *problem, moe_layout *layout);
forward_call moe_cuda_forward_call(const device_state *state, const moe_problem *problem,
                                   const moe_layout *layout, const moe_plan_arrays *plan,
                                   const smoe_forward_args *args, char *scratch, void *stream);
smoe_status moe_cuda_quantize_weights(smoe_context *context, const moe_problem *problem,
                                      const smoe_quantize_args *args, void *stream);
cudaError_t moe_cuda_up_f8(forward_call *call, const moe_up *up);
cudaError_t moe_cuda_down_f8(forward_call *call, const moe_down *down);
cudaError_t moe_cuda_up(forward_call *call);
cudaError_t moe_cuda_down(forward_call *call, int64_t first_column, int64_t columns);
smoe_status moe_cuda_forward(smoe_context *context, const moe_call *call, const smoe_forward_args *args,
                             int stages);

#endif
