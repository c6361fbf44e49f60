/* fp8 in the forward: weights are quantised by a call of their own, X by up, A in up's epilogue (f8.h). */
#include "f8.h"
#include "host/f8_table.h"
#include "host/forward.h"

smoe_status moe_cuda_quantize_weights(smoe_context *context, const moe_problem *problem,
                                      const smoe_quantize_args *args, void *stream)
{
    const device_state *state = context->state;
    const smoe_layer *layer = &problem->layer;
    const moe_launch on = launch_on(state, layer->dtype, stream);
    const moe_f8_quantized weights = {
        .w1 = args->w1,
        .w2 = args->w2,
        .type = args->weight_type,
        .to = moe_f8_weights_at(problem, args->weights_f8),
        .first = args->first_expert,
        .count = args->experts,
        .hidden = layer->hidden,
        .intermediate = layer->intermediate,
        .h_width = problem->h_width,
        .interleaved = problem->gated && layer->layout == SMOE_LAYOUT_INTERLEAVED,
    };
    int before;
    cudaError_t status = enter_device(state, &before);
    if (status == cudaSuccess) status = state->kernels->f8->weights(&on, &weights);
    leave_device(state, before);
    return launch_result(context, &on, status);
}

/* up: of the layer in dtype. */
cudaError_t moe_cuda_up_f8(forward_call *c, const moe_up *up)
{
    const moe_f8_kernels *f8 = c->state->kernels->f8;
    const smoe_layer *layer = &c->problem->layer;
    const moe_f8_weights weights = moe_f8_weights_at(c->problem, c->args->weights_f8);
    const moe_f8_rows rows = {up->x, c->x8, c->x_scale, layer->tokens, layer->hidden};
    moe_f8_up call = {*up, c->x_scale, weights.scale1, c->a_scale};
    call.up.x = c->x8;
    call.up.w1 = weights.w1;
    const cudaError_t status = f8->rows(&c->on, &rows);
    return status == cudaSuccess ? f8->up(&c->on, &call) : status;
}

cudaError_t moe_cuda_down_f8(forward_call *c, const moe_down *down)
{
    const moe_f8_weights weights = moe_f8_weights_at(c->problem, c->args->weights_f8);
    moe_f8_down call = {*down, c->a_scale, weights.scale2};
    call.down.w2 = weights.w2;
    return c->state->kernels->f8->down(&c->on, &call);
}
