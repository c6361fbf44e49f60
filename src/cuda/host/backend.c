/* The CUDA backend's table: what it supports, and what its other files do. */
#include "check.h"
#include "host/backward.h"
#include "host/ep_host.h"
#include "host/forward.h"
#include "host/routing.h"
#include "schedule/plan_size.h"

/* The plan from top-K ids needs shared memory for all experts. */
static smoe_status plan_fits(smoe_context *context, const smoe_layer *layer)
{
    enum { LEAST_SEGMENT = 32 };
    const moe_device *device = &((const device_state *)context->state)->device;
    const int32_t experts = (int32_t)layer->experts, topk = (int32_t)layer->topk;
    if (layer->entry == SMOE_ENTRY_FROM_ROWS || layer->rounding != SMOE_ROUNDING_NONE ||
        moe_plan_segment_fits(LEAST_SEGMENT, experts, topk, device->shared_bytes))
        return SMOE_OK;
    return moe_fail(
        context, SMOE_ERROR_UNSUPPORTED,
        "%s: experts is %d and topk %d, for which the plan needs %u bytes of shared memory; a CTA of "
        "device %d has at most %d",
        context->function, experts, topk, moe_plan_shared_of(LEAST_SEGMENT, experts, topk).end,
        device->number, device->shared_bytes);
}

static smoe_status rows_fit(smoe_context *context, const moe_problem *problem)
{
    const smoe_layer *layer = &problem->layer;
    const device_state *state = context->state;
    if (!state->kernels->stores(layer->dtype))
        return moe_fail(context, SMOE_ERROR_UNSUPPORTED,
                        "%s: dtype is %s, the cuda backend stores SMOE_TYPE_BF16 or SMOE_TYPE_F16",
                        context->function, moe_type_name(layer->dtype));
    if (problem->padded_rows > INT32_MAX - 256 || layer->tokens > INT32_MAX - 256)
        return moe_fail(context, SMOE_ERROR_UNSUPPORTED,
                        "%s: %lld padded rows, the limit is %d: the plan's indices are int32",
                        context->function, (long long)problem->padded_rows, INT32_MAX - 256);
    if (layer->hidden * layer->experts > INT32_MAX || layer->intermediate > (1 << 24) ||
        layer->hidden > (1 << 24))
        return moe_fail(context, SMOE_ERROR_UNSUPPORTED,
                        "%s: hidden is %lld and experts %lld, their product must be below 2^31: rows of W2 "
                        "are counted in int32",
                        context->function, (long long)layer->hidden, (long long)layer->experts);
    const int64_t gathered = state->kernels->gathered_bytes, x_bytes = layer->tokens * layer->hidden * 2;
    if (gathered && x_bytes > gathered)
        return moe_fail(context, SMOE_ERROR_UNSUPPORTED,
                        "%s: x has %lld bytes, the portable kernels gather at most %lld", context->function,
                        (long long)x_bytes, (long long)gathered);
    return SMOE_OK;
}

static smoe_status f8_fits(smoe_context *context, const moe_problem *problem)
{
    const device_state *state = context->state;
    if (problem->layer.compute == SMOE_COMPUTE_STORAGE) return SMOE_OK;
    if (!state->kernels->f8)
        return moe_fail(context, SMOE_ERROR_UNSUPPORTED,
                        "%s: compute is fp8, which only the kernels for compute capability 9.0 have; the "
                        "context's are for %s",
                        context->function, state->kernels->devices);
    if (problem->layer.dtype != SMOE_TYPE_BF16)
        return moe_fail(context, SMOE_ERROR_UNSUPPORTED,
                        "%s: dtype is %s, the cuda backend has fp8 for SMOE_TYPE_BF16", context->function,
                        moe_type_name(problem->layer.dtype));
    return SMOE_OK;
}

static smoe_status supports(smoe_context *context, const moe_problem *problem)
{
    smoe_status status = rows_fit(context, problem);
    if (status == SMOE_OK) status = f8_fits(context, problem);
    if (status == SMOE_OK && problem->layer.ranks) {
        moe_ep_problem ep;
        moe_ep_problem_init(&ep, &problem->layer);
        status = rows_fit(context, &ep.received);
    }
    return status == SMOE_OK ? plan_fits(context, &problem->layer) : status;
}

static smoe_status begin(smoe_context *context)
{
    (void)context;
    return SMOE_OK;
}

static void lay_out(const smoe_context *context, const moe_problem *problem, moe_layout *forward,
                    moe_layout *backward)
{
    if (forward) moe_cuda_lay_out_forward(context->state, problem, forward);
    if (backward) moe_cuda_lay_out_backward(context->state, problem, backward);
    if (problem->layer.ranks) moe_cuda_ep_add_scratch(context->state, problem, forward, backward);
}

static smoe_status update_selection_bias(smoe_context *context, const moe_problem *problem,
                                         const int32_t *counts, float *bias, float gamma, void *stream)
{
    const device_state *state = context->state;
    int before;
    cudaError_t status = enter_device(state, &before);
    if (status != cudaSuccess) return device_error(context, status);
    const moe_launch on = launch_on(state, problem->layer.dtype, stream);
    status = moe_cuda_selection_bias(&on, counts, bias, problem->layer.experts, gamma);
    leave_device(state, before);
    return status == cudaSuccess ? SMOE_OK : device_error(context, status);
}

const moe_backend_table moe_cuda_backend = {
    .id = SMOE_BACKEND_CUDA,
    .name = "cuda",
    .create = moe_cuda_create,
    .destroy = moe_cuda_destroy,
    .supports = supports,
    .begin = begin,
    .lay_out = lay_out,
    .forward = moe_cuda_forward,
    .backward = moe_cuda_backward,
    .update_selection_bias = update_selection_bias,
    .ep = &moe_cuda_ep,
    .quantize_weights = moe_cuda_quantize_weights,
};
