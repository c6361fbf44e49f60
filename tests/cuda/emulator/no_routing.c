/* Routing is not emulated: its stages fail, the entries with given routing never come here. */
#include "routing.h"

cudaError_t smoe_cuda_routing_init(void)
{
    return cudaSuccess;
}

uint64_t smoe_cuda_routing_scratch(const smoe_problem *problem)
{
    (void)problem;
    return 0;
}

cudaError_t smoe_cuda_route(const smoe_context *context, const smoe_problem *problem,
                            const smoe_forward_args *args, const smoe_plan_arrays *plan, void *scratch,
                            cudaStream_t stream)
{
    (void)context, (void)problem, (void)args, (void)plan, (void)scratch, (void)stream;
    return cudaErrorNotSupported;
}

cudaError_t smoe_cuda_round(const smoe_problem *problem, const smoe_forward_args *args,
                            const smoe_plan_arrays *plan, void *scratch, cudaStream_t stream)
{
    (void)problem, (void)args, (void)plan, (void)scratch, (void)stream;
    return cudaErrorNotSupported;
}

cudaError_t smoe_cuda_plan_from_logits(const smoe_problem *problem, const smoe_forward_args *args,
                                       const smoe_plan_arrays *plan, const smoe_cuda_lists *lists,
                                       void *scratch, cudaStream_t stream)
{
    (void)problem, (void)args, (void)plan, (void)lists, (void)scratch, (void)stream;
    return cudaErrorNotSupported;
}

cudaError_t smoe_cuda_selection_bias(const int32_t *counts, float *bias, int64_t experts, float gamma,
                                     cudaStream_t stream)
{
    (void)counts, (void)bias, (void)experts, (void)gamma, (void)stream;
    return cudaErrorNotSupported;
}
