/* route, round and plan of layers from logits: the layout of their scratch, and which kernels are
 * launched. */
#include "host/routing.h"
#include "schedule/plan_size.h"

#define NO_PART UINT64_MAX

/* The offset of the next `bytes` of the scratch; NO_PART for none. */
static uint64_t take(moe_routing_layout *layout, int64_t bytes)
{
    const uint64_t at = layout->bytes;
    layout->bytes += moe_align_up((uint64_t)bytes);
    return bytes ? at : NO_PART;
}

/* Can the plan use the segments of top-K? If so, the top-K kernel counts the pairs of each segment. */
static int topk_counts_segments(const moe_device *device, const smoe_layer *l)
{
    const int32_t segment = moe_cuda_topk_segment(device, l), experts = (int32_t)l->experts;
    return segment && moe_plan_segment_fits(segment, experts, (int32_t)l->topk, device->shared_bytes) &&
           moe_plan_is_summed(l->tokens, experts, segment);
}

moe_routing_layout moe_cuda_lay_out_routing(const moe_device *device, const moe_problem *problem)
{
    const smoe_layer *l = &problem->layer;
    const int rounded = l->rounding != SMOE_ROUNDING_NONE;
    const int64_t panels = moe_divide_up(l->tokens, MOE_ROUTE_PANEL), words = panels * MOE_ROUTE_PANEL_WORDS;
    const int64_t cells = panels * l->experts;
    const int64_t key = moe_type_bytes(l->logits_type); /* bytes of a key; 16 bits suffice for bf16 logits */
    moe_routing_layout at = {0};
    at.mask = take(&at, 4 * l->experts * words);
    at.all_counts = take(&at, rounded ? 4 * l->experts : 0);
    at.word_rows = take(&at, rounded ? 4 * l->experts * words : 0);
    at.keys = take(&at, rounded ? key * cells * MOE_ROUTE_PANEL : 0);
    at.softmax = take(&at, (int64_t)sizeof(moe_token_softmax) * l->tokens);
    at.panel_probability = take(&at, 8 * cells);
    at.panel_z = take(&at, 8 * panels);
    at.expert_balance = take(&at, 8 * l->experts);
    at.plan_segment =
        moe_plan_segment(l->tokens, (int32_t)l->experts, (int32_t)l->topk, device->shared_bytes);
    at.topk_counts_segments = !rounded && topk_counts_segments(device, l);
    if (at.topk_counts_segments) at.plan_segment = moe_cuda_topk_segment(device, l);
    at.plan_work =
        take(&at, rounded ? 0 : (int64_t)moe_cuda_plan_work_bytes(l->tokens, l->experts, at.plan_segment));
    return at;
}

static void *part(void *scratch, uint64_t at)
{
    return at == NO_PART ? NULL : (char *)scratch + at;
}

moe_cuda_routing moe_cuda_routing_of(const moe_problem *problem, const moe_routing_layout *at,
                                     const smoe_forward_args *args, const moe_plan_arrays *plan,
                                     void *scratch)
{
    moe_cuda_routing r = {.layer = problem->layer};
    r.panels = moe_divide_up(r.layer.tokens, MOE_ROUTE_PANEL);
    r.words = r.panels * MOE_ROUTE_PANEL_WORDS;
    r.mask = part(scratch, at->mask);
    r.all_counts = part(scratch, at->all_counts);
    r.word_rows = part(scratch, at->word_rows);
    r.keys = part(scratch, at->keys);
    r.softmax = part(scratch, at->softmax);
    r.panel_probability = part(scratch, at->panel_probability);
    r.panel_z = part(scratch, at->panel_z);
    r.expert_balance = part(scratch, at->expert_balance);
    r.plan_work = part(scratch, at->plan_work);
    r.plan_segment = at->plan_segment;
    r.bytes = at->bytes;
    if (at->topk_counts_segments) r.segment_counts = r.plan_work;
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

cudaError_t moe_cuda_route(const smoe_context *context, const moe_launch *on, const moe_cuda_routing *routing,
                           const smoe_forward_args *args)
{
    moe_cuda_routing r = *routing;
    cudaError_t status = cudaSuccess;
    if (args->router_weight) {
        moe_stage_begin(context, SMOE_STAGE_ROUTER_GEMM, on->stream);
        status =
            moe_cuda_router_gemm(on, &r.layer, args->x, args->router_weight, args->router_bias, args->logits);
        moe_stage_end(context, SMOE_STAGE_ROUTER_GEMM, on->stream);
    }
    moe_stage_begin(context, SMOE_STAGE_TOPK, on->stream);
    if (status == cudaSuccess) status = moe_cuda_topk(on, &r);
    if (moe_cuda_topk_writes_keys(on->device, &r.layer)) r.keys = NULL;
    if (status == cudaSuccess && (r.losses || r.token_mask || r.layer.rounding == SMOE_ROUNDING_BALANCE_F))
        status = moe_cuda_count(on, &r);
    if (status == cudaSuccess && (r.losses || r.keys)) status = moe_cuda_scores(on, &r);
    if (status == cudaSuccess && r.losses) status = moe_cuda_losses(on, &r);
    moe_stage_end(context, SMOE_STAGE_TOPK, on->stream);
    return status;
}

cudaError_t moe_cuda_plan_from_logits(const moe_launch *on, const moe_problem *problem,
                                      const moe_cuda_routing *r, const moe_plan_arrays *plan,
                                      const moe_cuda_lists *lists)
{
    const smoe_layer *l = &problem->layer;
    const moe_cuda_plan p = {.ids = plan->topk_ids,
                             .weights = plan->topk_weights,
                             .tokens = (int32_t)l->tokens,
                             .experts = (int32_t)l->experts,
                             .topk = (int32_t)l->topk,
                             .padded_rows = (int32_t)problem->padded_rows,
                             .segment = r->plan_segment,
                             .counted = r->segment_counts != NULL,
                             .counts = plan->counts,
                             .row_offsets = plan->offsets,
                             .block_offsets = plan->block_offsets,
                             .order = plan->order,
                             .row_token = plan->row_token,
                             .token_offsets = plan->token_offsets,
                             .token_rows = plan->token_rows,
                             .row_weight = plan->row_weight,
                             .topk_counts =
                                 moe_routing_rounded(r) || r->token_mask ? NULL : plan->topk_counts,
                             .lists = *lists,
                             .work = r->plan_work};
    return moe_routing_rounded(r) ? moe_cuda_plan_rounded(on, r, &p) : moe_cuda_plan_topk(on, &p);
}
