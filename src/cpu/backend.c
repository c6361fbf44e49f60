/* The CPU backend's table of functions: what the backend supports, and the size of its scratch, which is the
 * sum over its stages. */
#define _DEFAULT_SOURCE /* getpid */
#include "blas.h"
#include "convert.h"
#include "cpu.h"
#include "ep_cpu.h"

#include <omp.h>
#include <unistd.h>

static smoe_status create(smoe_context *context, const smoe_context_options *options)
{
    context->threads = options->threads > 0 ? options->threads : omp_get_max_threads();
    if (context->threads > MOE_MAX_THREADS) context->threads = MOE_MAX_THREADS;
    if (!moe_blas_reserve(context->threads))
        return moe_fail(
            context, SMOE_ERROR_MEMORY,
            "smoe_create: no address space for the buffers of OpenBLAS, %d MiB for each of %d threads",
            MOE_BLAS_BUFFER_MIB, (int)context->threads);
    return SMOE_OK;
}

static void destroy(smoe_context *context)
{
    moe_blas_release(context->threads);
}

/* After a fork the child has only the thread that forked. If that thread has used OpenMP threads before, the
 * OpenMP runtime still counts them, although the child does not have them, and the next parallel region waits
 * for them forever. So every thread notes in which process it first started OpenMP threads. */
static smoe_status begin(smoe_context *context)
{
    static _Thread_local pid_t team_process;
    if (context->threads == 1) return SMOE_OK;
    const pid_t process = getpid();
    if (!team_process) team_process = process;
    if (team_process == process) return SMOE_OK;
    return moe_fail(context, SMOE_ERROR_UNSUPPORTED,
                    "%s: process %ld was forked from process %ld by a thread that had run an OpenMP team "
                    "there, so its next team would never end: create a context with threads = 1, call from a "
                    "new thread, or fork before the first call",
                    context->function, (long)process, (long)team_process);
}

static smoe_status supports(smoe_context *context, const moe_problem *problem)
{
    if (!moe_cpu_stores(problem->layer.dtype))
        return moe_fail(context, SMOE_ERROR_UNSUPPORTED,
                        "%s: dtype is SMOE_TYPE_F16, which needs the cuda backend; the cpu backend stores "
                        "SMOE_TYPE_F32 or SMOE_TYPE_BF16",
                        context->function);
    return SMOE_OK;
}

/* The stages themselves find the parts of their scratch. */
static void lay_out(const smoe_context *context, const moe_problem *problem, moe_layout *forward,
                    moe_layout *backward)
{
    const int inference = problem->layer.inference, ranks = problem->layer.ranks > 0;
    if (forward) {
        const uint64_t routing = moe_cpu_routing_scratch(context, problem);
        const uint64_t experts = ranks ? moe_cpu_ep_forward_scratch(context, problem)
                                       : moe_cpu_experts_forward_scratch(context, problem);
        forward->bytes = (inference ? problem->plan_bytes : 0) + (routing > experts ? routing : experts);
    }
    if (backward)
        backward->bytes = inference ? 0
                          : ranks   ? moe_cpu_ep_backward_scratch(context, problem)
                                    : moe_cpu_backward_scratch(context, problem);
}

typedef smoe_status (*routing_stage)(smoe_context *context, const moe_problem *problem,
                                     const smoe_forward_args *args, const moe_plan_arrays *plan,
                                     void *scratch, void *stream);

static smoe_status forward(smoe_context *context, const moe_call *call, const smoe_forward_args *args,
                           int stages)
{
    static const struct {
        int stage;
        routing_stage run;
    } all[] = {{MOE_ROUTE, moe_cpu_route}, {MOE_ROUND, moe_cpu_round}, {MOE_PLAN, moe_cpu_plan}};
    smoe_status status = SMOE_OK;
    for (size_t i = 0; i < sizeof all / sizeof *all && status == SMOE_OK; i++)
        if (stages & all[i].stage)
            status = all[i].run(context, &call->problem, args, &call->plan, call->scratch, call->stream);
    if (status == SMOE_OK && stages & MOE_EXPERTS)
        status =
            moe_cpu_experts_forward(context, &call->problem, args, &call->plan, call->scratch, call->stream);
    return status;
}

static smoe_status backward(smoe_context *context, const moe_call *call, const smoe_backward_args *args,
                            int with_router)
{
    return moe_cpu_backward(context, &call->problem, args, &call->plan, with_router, call->stream);
}

const moe_backend_table moe_cpu_backend = {
    .id = SMOE_BACKEND_CPU,
    .name = "cpu",
    .create = create,
    .destroy = destroy,
    .supports = supports,
    .begin = begin,
    .lay_out = lay_out,
    .check_plan = moe_cpu_check_plan,
    .forward = forward,
    .backward = backward,
    .update_selection_bias = moe_cpu_update_selection_bias,
    .ep = &moe_cpu_ep,
    .quantize_weights = moe_cpu_quantize_weights,
};
