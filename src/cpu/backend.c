/* The CPU backend's table: what it supports, and its scratch as the sum of what its stages ask for. */
#include "convert.h"
#include "cpu.h"

#include <omp.h>

static smoe_status create(smoe_context *context, const smoe_context_options *options)
{
    context->threads = options->threads > 0 ? options->threads : omp_get_max_threads();
    return SMOE_OK;
}

static void destroy(smoe_context *context)
{
    (void)context;
}

static smoe_status supports(smoe_context *context, const smoe_problem *problem)
{
    if (!moe_cpu_stores(problem->layer.dtype))
        return smoe_fail(context, SMOE_ERROR_UNSUPPORTED,
                         "smoe_supports: dtype F16 needs the cuda backend; the cpu "
                         "backend stores F32 or BF16");
    return SMOE_OK;
}

static void scratch(const smoe_context *context, const smoe_problem *problem, uint64_t *forward,
                    uint64_t *backward)
{
    const uint64_t routing = smoe_cpu_routing_scratch(context, problem);
    const uint64_t experts = smoe_cpu_experts_forward_scratch(context, problem);
    *forward = (problem->layer.inference ? problem->plan_bytes : 0) + (routing > experts ? routing : experts);
    *backward = problem->layer.inference ? 0 : smoe_cpu_backward_scratch(context, problem);
}

const smoe_backend_table smoe_cpu_backend = {
    .id = SMOE_BACKEND_CPU,
    .name = "cpu",
    .create = create,
    .destroy = destroy,
    .supports = supports,
    .scratch = scratch,
    .route = smoe_cpu_route,
    .round = smoe_cpu_round,
    .plan = smoe_cpu_plan,
    .experts_forward = smoe_cpu_experts_forward,
    .backward = smoe_cpu_backward,
    .update_selection_bias = smoe_cpu_update_selection_bias,
};
