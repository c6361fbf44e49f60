/* The scratch that route, round and plan share, and the softmax and kept weights of one token,
 * forward and back. */
#include "routing.h"

#include <assert.h>

static_assert((int64_t)MOE_MAX_EXPERTS * 65536 <= INT32_MAX, "halves of a softmax sum stay below 2^31");

/* The next `bytes` of the scratch; NULL for none. Without a scratch it only counts. */
static void *take(moe_routing_scratch *s, char *scratch, int64_t bytes)
{
    const int64_t at = s->bytes;
    s->bytes += (int64_t)moe_align_up((uint64_t)bytes);
    return scratch && bytes ? scratch + at : NULL;
}

moe_routing_scratch moe_routing_scratch_at(const smoe_context *context, const moe_problem *problem,
                                           void *scratch)
{
    const smoe_layer *l = &problem->layer;
    moe_routing_scratch s = {0};
    s.panels = (l->tokens + MOE_TOKEN_PANEL - 1) / MOE_TOKEN_PANEL;
    if (s.panels == 0) s.panels = 1; /* a rank without tokens; the panel is empty */
    /* The distance between columns is a cache line modulo 4 KiB. So the keys of one token, which are in
     * different columns, fall into different cache sets. */
    s.key_stride = (l->tokens + 15) / 16 * 16 + 16;
    const int64_t cells = s.panels * l->experts;
    s.targets = take(&s, scratch, 4 * l->experts);
    if (l->entry == SMOE_ENTRY_FROM_ROWS) return s;
    s.mask = take(&s, scratch, 8 * MOE_PANEL_WORDS * cells);
    s.panel_counts = take(&s, scratch, 4 * cells);
    s.panel_rows = take(&s, scratch, 4 * s.panels);
    if (l->entry == SMOE_ENTRY_FROM_TOPK) return s;
    const int rounded = l->rounding != SMOE_ROUNDING_NONE;
    s.keys = take(&s, scratch, rounded ? 4 * l->experts * s.key_stride : 0);
    s.token_max = take(&s, scratch, rounded ? 4 * l->tokens : 0);
    s.token_sum = take(&s, scratch, rounded ? 4 * l->tokens : 0);
    s.panel_probability = take(&s, scratch, 8 * cells);
    s.panel_z = take(&s, scratch, 8 * s.panels);
    const int64_t panels_at_once = 4 * MOE_TOKEN_PANEL * context->threads;
    const int f32_router = l->dtype == SMOE_TYPE_F32;
    s.router_weight = take(&s, scratch, f32_router ? 0 : 4 * l->experts * l->hidden);
    s.thread_x = take(&s, scratch, f32_router ? 0 : panels_at_once * l->hidden);
    s.thread_logits = take(&s, scratch, l->logits_type == SMOE_TYPE_F32 ? 0 : panels_at_once * l->experts);
    return s;
}

uint64_t moe_cpu_routing_scratch(const smoe_context *context, const moe_problem *problem)
{
    return (uint64_t)moe_routing_scratch_at(context, problem, NULL).bytes;
}

void moe_softmax_of(const float *logits, int64_t experts, float *terms, float *max, float *sum)
{
    uint32_t largest = 0x007fffffu; /* the key of -inf */
    for (int64_t e = 0; e < experts; e++) {
        const uint32_t key = moe_rank_key(logits[e]);
        largest = key > largest ? key : largest;
    }
    *max = moe_rank_value(largest);
    const float m = *max; /* a copy, so that the loop does not reload it and vectorises */
    for (int64_t e = 0; e < experts; e++) terms[e] = moe_softmax_term(logits[e], m);
    /* The sum of moe_softmax_fixed. The low and high 16 bits of the terms are summed apart, so that each sum
     * of up to 4096 terms fits a 32-bit lane. */
    int32_t high = 0, low = 0;
    for (int64_t e = 0; e < experts; e++) {
        const float scaled = moe_mul(terms[e], 65536.0f);
        const int32_t whole = (int32_t)scaled;
        high += whole;
        low += (int32_t)moe_mul(moe_add(scaled, -(float)whole), 65536.0f);
    }
    *sum = moe_softmax_sum(((uint64_t)high << 16) + (uint64_t)low);
}

static float renormalize(float *weights, int64_t topk)
{
    float sum = 0.0f;
    for (int64_t k = 0; k < topk; k++) sum = moe_add(sum, weights[k]);
    for (int64_t k = 0; k < topk; k++) weights[k] = sum == 0.0f ? 0.0f : moe_div(weights[k], sum);
    return sum;
}

float moe_kept_weights(const smoe_layer *layer, const float *logits, float max, float sum, const int32_t *ids,
                       float *weights)
{
    const int64_t topk = layer->topk;
    int nan = 0;
    for (int64_t k = 0; k < topk; k++) {
        const float logit = logits[ids[k]];
        nan |= moe_is_nan(logit);
        weights[k] = moe_raw_weight(layer->score, logit, logits[ids[0]], max, sum);
    }
    const int divided = moe_weights_are_divided(layer);
    const float divisor = divided ? renormalize(weights, topk) : 1.0f;
    for (int64_t k = 0; k < topk && nan; k++) weights[k] = moe_float_of(0x7fc00000u);
    return divisor;
}
