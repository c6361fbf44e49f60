/* The scratch that route, round and plan share, and the softmax and kept weights of one token, forward and
 * back. */
#include "routing.h"

/* The next `bytes` of the scratch (none: NULL); with no scratch only counts. */
static void *take(smoe_routing_scratch *s, char *scratch, int64_t bytes)
{
    const int64_t at = s->bytes;
    s->bytes += (int64_t)smoe_align_up((uint64_t)bytes);
    return scratch && bytes ? scratch + at : NULL;
}

smoe_routing_scratch smoe_routing_scratch_at(const smoe_context *context, const smoe_problem *problem,
                                             void *scratch)
{
    const smoe_layer *l = &problem->layer;
    smoe_routing_scratch s = {0};
    s.panels = (l->tokens + SMOE_TOKEN_PANEL - 1) / SMOE_TOKEN_PANEL;
    /* Columns start a cache line apart modulo 4 KiB, so that writing one token's keys does not hit one cache
     * set. */
    s.key_stride = (l->tokens + 15) / 16 * 16 + 16;
    const int64_t cells = s.panels * l->experts;
    s.targets = take(&s, scratch, 4 * l->experts);
    if (l->entry == SMOE_FROM_ROWS) return s;
    s.mask = take(&s, scratch, 8 * SMOE_PANEL_WORDS * cells);
    s.panel_counts = take(&s, scratch, 4 * cells);
    s.panel_rows = take(&s, scratch, 4 * s.panels);
    if (l->entry == SMOE_FROM_TOPK) return s;
    const int rounded = l->rounding != SMOE_ROUND_NONE;
    s.keys = take(&s, scratch, rounded ? 4 * l->experts * s.key_stride : 0);
    s.token_max = take(&s, scratch, rounded ? 4 * l->tokens : 0);
    s.token_sum = take(&s, scratch, rounded ? 4 * l->tokens : 0);
    s.panel_probability = take(&s, scratch, 8 * cells);
    s.panel_z = take(&s, scratch, 8 * s.panels);
    const int64_t panels_at_once = 4 * SMOE_TOKEN_PANEL * context->threads;
    const int f32_router = l->dtype == SMOE_F32;
    s.router_weight = take(&s, scratch, f32_router ? 0 : 4 * l->experts * l->hidden);
    s.thread_x = take(&s, scratch, f32_router ? 0 : panels_at_once * l->hidden);
    s.thread_logits = take(&s, scratch, l->logits_type == SMOE_F32 ? 0 : panels_at_once * l->experts);
    return s;
}

uint64_t smoe_cpu_routing_scratch(const smoe_context *context, const smoe_problem *problem)
{
    return (uint64_t)smoe_routing_scratch_at(context, problem, NULL).bytes;
}

void smoe_softmax_of(const float *logits, int64_t experts, float *terms, float *max, float *sum)
{
    float largest = smoe_float_of(0xff800000u); /* -inf */
    for (int64_t e = 0; e < experts; e++) largest = logits[e] > largest ? logits[e] : largest;
    uint64_t fixed = 0;
    for (int64_t e = 0; e < experts; e++) terms[e] = smoe_softmax_term(logits[e], largest);
    for (int64_t e = 0; e < experts; e++) fixed += smoe_softmax_fixed(terms[e]);
    *max = largest;
    *sum = smoe_softmax_sum(fixed);
}

static float renormalize(float *weights, int64_t topk)
{
    float sum = 0.0f;
    for (int64_t k = 0; k < topk; k++) sum = smoe_add(sum, weights[k]);
    for (int64_t k = 0; k < topk; k++) weights[k] = sum == 0.0f ? 0.0f : smoe_div(weights[k], sum);
    return sum;
}

float smoe_kept_weights(const smoe_layer *layer, const float *logits, float max, float sum,
                        const int32_t *ids, float *weights)
{
    const int64_t topk = layer->topk;
    int nan = 0;
    for (int64_t k = 0; k < topk; k++) {
        const float logit = logits[ids[k]];
        nan |= smoe_is_nan(logit);
        switch (layer->score) {
        case SMOE_SOFTMAX_TOPK: weights[k] = smoe_div(smoe_softmax_term(logit, max), sum); break;
        case SMOE_TOPK_SOFTMAX: weights[k] = smoe_softmax_term(logit, logits[ids[0]]); break;
        case SMOE_SIGMOID: weights[k] = smoe_sigmoid(logit); break;
        }
    }
    const int divided = layer->score == SMOE_TOPK_SOFTMAX || layer->renormalize;
    const float divisor = divided ? renormalize(weights, topk) : 1.0f;
    for (int64_t k = 0; k < topk && nan; k++) weights[k] = smoe_float_of(0x7fc00000u);
    return divisor;
}
