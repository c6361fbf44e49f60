/* route, round and plan of layers from logits: the layout of their scratch, and which kernels are
 * launched. */
#include "host/routing.h"
#include "schedule/plan_size.h"

/* The next `bytes` of the scratch; NULL for none. Without a scratch it only counts. */
static void *take(moe_cuda_routing *r, char *scratch, int64_t bytes)
{
    const uint64_t at = r->bytes;
    r->bytes += moe_align_up((uint64_t)bytes);
    return scratch && bytes ? scratch + at : NULL;
}

/* Can the plan use the segments of top-K? If so, the top-K kernel counts the pairs of each segment. */
static int topk_counts_segments(const moe_device *device, const smoe_layer *l)
{
    const int32_t segment = moe_cuda_topk_segment(device, l), experts = (int32_t)l->experts;
    return segment && moe_plan_segment_fits(segment, experts, (int32_t)l->topk, device->shared_bytes) &&
           moe_plan_is_summed(l->tokens, experts, segment);
}

/* Sizes never depend on the call's arguments. */
static moe_cuda_routing routing_at(const moe_device *device, const moe_problem *problem, void *scratch)
{
    const smoe_layer *l = &problem->layer;
    const int rounded = l->rounding != SMOE_ROUNDING_NONE;
    moe_cuda_routing r = {.layer = *l};
    r.panels = (l->tokens + SMOE_ROUTE_PANEL - 1) / SMOE_ROUTE_PANEL;
    r.words = r.panels * SMOE_ROUTE_PANEL_WORDS;
    const int64_t cells = r.panels * l->experts;
    const int64_t key = moe_type_bytes(l->logits_type); /* bytes of a key; 16 bits suffice for bf16 logits */
    r.mask = take(&r, scratch, 4 * l->experts * r.words);
    r.all_counts = take(&r, scratch, rounded ? 4 * l->experts : 0);
    r.word_rows = take(&r, scratch, rounded ? 4 * l->experts * r.words : 0);
    r.keys = take(&r, scratch, rounded ? key * cells * SMOE_ROUTE_PANEL : 0);
    r.softmax = take(&r, scratch, (int64_t)sizeof(moe_token_softmax) * l->tokens);
    r.panel_probability = take(&r, scratch, 8 * cells);
    r.panel_z = take(&r, scratch, 8 * r.panels);
    r.expert_balance = take(&r, scratch, 8 * l->experts);
    r.plan_segment = moe_plan_segment(l->tokens, (int32_t)l->experts, (int32_t)l->topk, device->shared_bytes);
    const int handed_over = !rounded && topk_counts_segments(device, l);
    if (handed_over) r.plan_segment = moe_cuda_topk_segment(device, l);
    r.plan_work = take(
        &r, scratch, rounded ? 0 : (int64_t)moe_cuda_plan_work_bytes(l->tokens, l->experts, r.plan_segment));
    if (handed_over) r.segment_counts = r.plan_work;
    return r;
}

moe_cuda_routing moe_cuda_routing_of(const moe_device *device, const moe_problem *problem,
                                     const smoe_forward_args *args, const moe_plan_arrays *plan,
                                     void *scratch)
{
    moe_cuda_routing r = routing_at(device, problem, scratch);
    r.logits = args->logits;
    r.selection_bias = args->selection_bias;
    r.losses = args->losses;
    r.token_mask = args->token_mask;
    r.step = args->step;
    r.topk_ids = plan->topk_ids;
    r.topk_weights = plan->topk_weights;
    r.topk_counts = plan->topk_counts;
    r.counts = plan->counts;
    if (r.all_counts && !r.token_mask) r.all_counts = r.topk_counts;
    if (!moe_routing_needs_softmax(&r)) r.softmax = NULL;
    if (!moe_routing_rounded(&r) && !r.losses && !r.token_mask) r.mask = NULL;
    return r;
}

uint64_t moe_cuda_routing_scratch(const moe_device *device, const moe_problem *problem)
{
    return routing_at(device, problem, NULL).bytes;
}

cudaError_t moe_cuda_routing_init(const moe_device *device)
{
    cudaError_t (*const inits[])(const moe_device *) = {moe_cuda_topk_fast_init, moe_cuda_topk_general_init,
                                                        moe_cuda_rounding_init, moe_cuda_plan_rounded_init,
                                                        moe_cuda_router_gemm_init};
    for (size_t i = 0; i < sizeof inits / sizeof *inits; i++) {
        const cudaError_t status = inits[i](device);
        if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
}

cudaError_t moe_cuda_route(const smoe_context *context, const moe_launch *on, const moe_problem *problem,
                           const smoe_forward_args *args, const moe_plan_arrays *plan, void *scratch)
{
    moe_cuda_routing r = moe_cuda_routing_of(on->device, problem, args, plan, scratch);
    cudaError_t status = cudaSuccess;
    if (args->router_weight) {
        moe_stage_begin(context, SMOE_STAGE_ROUTER_GEMM, on->stream);
        status = moe_cuda_router_gemm(on, &problem->layer, args->x, args->router_weight, args->router_bias,
                                      args->logits);
        moe_stage_end(context, SMOE_STAGE_ROUTER_GEMM, on->stream);
    }
    moe_stage_begin(context, SMOE_STAGE_TOPK, on->stream);
    if (status == cudaSuccess) status = moe_cuda_topk(on, &r);
    if (moe_cuda_topk_writes_keys(on->device, &problem->layer)) r.keys = NULL;
    if (status == cudaSuccess && (r.losses || r.token_mask || r.layer.rounding == SMOE_ROUNDING_BALANCE_F))
        status = moe_cuda_count(on, &r);
    if (status == cudaSuccess && (r.losses || r.keys)) status = moe_cuda_scores(on, &r);
    if (status == cudaSuccess && r.losses) status = moe_cuda_losses(on, &r);
    moe_stage_end(context, SMOE_STAGE_TOPK, on->stream);
    return status;
}

cudaError_t moe_cuda_round(const moe_launch *on, const moe_problem *problem, const smoe_forward_args *args,
                           const moe_plan_arrays *plan, void *scratch)
{
    const moe_cuda_routing r = moe_cuda_routing_of(on->device, problem, args, plan, scratch);
    return moe_cuda_rounding(on, &r);
}

cudaError_t moe_cuda_plan_from_logits(const moe_launch *on, const moe_problem *problem,
                                      const smoe_forward_args *args, const moe_plan_arrays *plan,
                                      const moe_cuda_lists *lists, void *scratch)
{
    const smoe_layer *l = &problem->layer;
    const moe_cuda_routing r = moe_cuda_routing_of(on->device, problem, args, plan, scratch);
    const moe_cuda_plan p = {.ids = plan->topk_ids,
                             .weights = plan->topk_weights,
                             .tokens = (int32_t)l->tokens,
                             .experts = (int32_t)l->experts,
                             .topk = (int32_t)l->topk,
                             .padded_rows = (int32_t)problem->padded_rows,
                             .segment = r.plan_segment,
                             .counted = r.segment_counts != NULL,
                             .counts = plan->counts,
                             .row_offsets = plan->offsets,
                             .block_offsets = plan->block_offsets,
                             .order = plan->order,
                             .row_token = plan->row_token,
                             .token_offsets = plan->token_offsets,
                             .token_rows = plan->token_rows,
                             .row_weight = plan->row_weight,
                             .topk_counts =
                                 moe_routing_rounded(&r) || r.token_mask ? NULL : plan->topk_counts,
                             .lists = *lists,
                             .work = r.plan_work};
    return moe_routing_rounded(&r) ? moe_cuda_plan_rounded(on, &r, &p) : moe_cuda_plan_topk(on, &p);
}
