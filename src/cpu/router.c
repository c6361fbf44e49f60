/* route: computes logits = X Wr^T + br (T, E) on fixed panels of tokens. Then it finds the K best experts of
 * every token and their weights. It also writes what later stages read: the selection bits, and for rounding
 * the ranking keys and the softmax's max and sum. The arithmetic of scores is in routing_decisions.h. */
#include "blas.h"
#include "convert.h"
#include "routing.h"

#include <math.h>
#include <omp.h>

/* ---- logits ---- */

static void add_bias(float *logits, int64_t tokens, int64_t experts, const float *bias)
{
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t e = 0; e < experts; e++) logits[t * experts + e] += bias[e];
}

/* One panel of tokens; weight (E, d) and bias (E, or NULL) in f32. */
static void panel_logits(const moe_problem *problem, const smoe_forward_args *args,
                         const moe_routing_scratch *s, int64_t panel, const float *weight, const float *bias)
{
    const smoe_layer *l = &problem->layer;
    const int64_t first = panel * MOE_TOKEN_PANEL, count = moe_min(MOE_TOKEN_PANEL, l->tokens - first);
    const int thread = omp_get_thread_num();
    const float *x = (const float *)args->x + first * l->hidden;
    if (l->dtype != SMOE_TYPE_F32) {
        float *converted = s->thread_x + thread * MOE_TOKEN_PANEL * l->hidden;
        moe_load_row(converted, args->x, first * l->hidden, count * l->hidden, l->dtype);
        x = converted;
    }
    const int direct = l->logits_type == SMOE_TYPE_F32;
    float *logits = direct ? (float *)args->logits + first * l->experts
                           : s->thread_logits + thread * MOE_TOKEN_PANEL * l->experts;
    moe_sgemm(0, 1, count, l->experts, l->hidden, x, l->hidden, weight, l->hidden, 0.0f, logits, l->experts);
    if (bias) add_bias(logits, count, l->experts, bias);
    if (!direct) moe_store_row(args->logits, first * l->experts, logits, count * l->experts, l->logits_type);
}

static void compute_logits(const smoe_context *context, const moe_problem *problem,
                           const smoe_forward_args *args, const moe_routing_scratch *s)
{
    const smoe_layer *l = &problem->layer;
    float bias[MOE_MAX_EXPERTS];
    if (args->router_bias) moe_load_row(bias, args->router_bias, 0, l->experts, l->dtype);
    const float *weight = args->router_weight;
    if (l->dtype != SMOE_TYPE_F32) {
        moe_load_row(s->router_weight, args->router_weight, 0, l->experts * l->hidden, l->dtype);
        weight = s->router_weight;
    }
    moe_blas_enter();
#pragma omp parallel for schedule(dynamic) num_threads(context->threads)
    for (int64_t panel = 0; panel < s->panels; panel++)
        panel_logits(problem, args, s, panel, weight, args->router_bias ? bias : NULL);
    moe_blas_leave();
}

/* ---- top-K of one token ---- */

/* The K best experts so far, by descending key; equal keys by ascending expert. */
typedef struct best_experts {
    int64_t filled;
    uint32_t keys[MOE_MAX_TOPK];
    int32_t *ids; /* (K) */
} best_experts;

/* Offers experts first..end-1 as candidates. Over all calls experts must come in ascending order. */
static void offer_experts(best_experts *best, int64_t topk, const uint32_t *keys, int64_t first, int64_t end)
{
    for (int64_t e = first; e < end; e++) {
        const uint32_t key = keys[e];
        if (best->filled == topk && key <= best->keys[topk - 1]) continue;
        int64_t at = best->filled < topk ? best->filled++ : topk - 1;
        for (; at > 0 && best->keys[at - 1] < key; at--) {
            best->keys[at] = best->keys[at - 1];
            best->ids[at] = best->ids[at - 1];
        }
        best->keys[at] = key;
        best->ids[at] = (int32_t)e;
    }
}

/* The sum of a group's two best selection scores. */
static float group_score(const uint32_t *keys, int64_t size)
{
    uint32_t first = 0, second = 0;
    for (int64_t i = 0; i < size; i++) {
        const uint32_t lower = keys[i] < first ? keys[i] : first;
        if (keys[i] > first) first = keys[i];
        if (lower > second) second = lower;
    }
    return moe_add(moe_rank_value(first), moe_rank_value(second));
}

/* Offers the experts of the groups_kept best groups; ties go to the lower group. */
static void offer_groups(best_experts *best, const smoe_layer *l, const uint32_t *keys)
{
    const int64_t size = l->experts / l->groups;
    uint32_t group_keys[MOE_MAX_EXPERTS / 2];
    for (int64_t g = 0; g < l->groups; g++) group_keys[g] = moe_rank_key(group_score(keys + g * size, size));
    for (int64_t g = 0; g < l->groups; g++) {
        int64_t better = 0;
        for (int64_t h = 0; h < l->groups; h++)
            better += group_keys[h] > group_keys[g] || (group_keys[h] == group_keys[g] && h < g);
        if (better < l->groups_kept) offer_experts(best, l->topk, keys, g * size, (g + 1) * size);
    }
}

/* What one thread needs for its current token. */
typedef struct token_work {
    float logits[MOE_MAX_EXPERTS];
    float scores[MOE_MAX_EXPERTS]; /* p, or the selection score of a curve */
    uint32_t keys[MOE_MAX_EXPERTS];
} token_work;

typedef struct route_call {
    const moe_problem *problem;
    const smoe_forward_args *args;
    const moe_plan_arrays *plan;
    moe_routing_scratch s;
} route_call;

static void selection_scores(float *scores, const float *logits, const smoe_layer *l, const float *bias)
{
    for (int64_t e = 0; e < l->experts; e++) {
        const float value = moe_score_value(l->score, logits[e]);
        scores[e] = bias ? moe_add(value, bias[e]) : value;
    }
}

/* Writes p of all experts to w->scores, and adds the token's share of the losses to the sums of its panel. */
static void add_losses(const route_call *c, int64_t panel, const float *p, float max, float sum)
{
    const int64_t experts = c->problem->layer.experts;
    double *probability = c->s.panel_probability + panel * experts;
    for (int64_t e = 0; e < experts; e++) probability[e] += (double)p[e];
    const double z = (double)max + log((double)sum);
    c->s.panel_z[panel] += z * z;
}

static void route_token(const route_call *c, token_work *w, int64_t panel, int64_t t)
{
    const smoe_layer *l = &c->problem->layer;
    const int64_t experts = l->experts;
    const int rounded = l->rounding != SMOE_ROUNDING_NONE, curve = moe_score_has_curve(l->score);
    const int all_p = c->args->losses || (rounded && !curve);
    const float *logits = w->logits;
    if (l->logits_type == SMOE_TYPE_F32)
        logits = (const float *)c->args->logits + t * experts;
    else
        moe_load_row(w->logits, c->args->logits, t * experts, experts, l->logits_type);

    float max = 0.0f, sum = 1.0f;
    if (all_p || moe_score_over_all(l->score)) moe_softmax_of(logits, experts, w->scores, &max, &sum);
    for (int64_t e = 0; e < experts && all_p; e++) w->scores[e] = moe_div(w->scores[e], sum);
    const int counted = moe_token_counts(c->args->token_mask, t);
    if (c->args->losses && counted) add_losses(c, panel, w->scores, max, sum);
    if (curve) selection_scores(w->scores, logits, l, c->args->selection_bias);

    int32_t *ids = c->plan->topk_ids + t * l->topk;
    float *weights = c->plan->topk_weights + t * l->topk;
    best_experts best = {.ids = ids};
    const float *ranked = curve ? w->scores : logits;
    for (int64_t e = 0; e < experts; e++) w->keys[e] = moe_rank_key(ranked[e]);
    if (l->groups > 1)
        offer_groups(&best, l, w->keys);
    else
        offer_experts(&best, l->topk, w->keys, 0, experts);
    moe_kept_weights(l, logits, max, sum, ids, weights);
    for (int64_t k = 0; k < l->topk; k++) weights[k] = moe_mul(weights[k], l->route_scale);

    const int64_t in_panel = t % MOE_TOKEN_PANEL;
    for (int64_t k = 0; k < l->topk; k++) {
        moe_mask_words(&c->s, panel, ids[k], experts)[in_panel / 64] |= UINT64_C(1) << in_panel % 64;
        c->s.panel_counts[panel * experts + ids[k]] += counted;
    }
    if (!rounded) return;
    c->s.token_max[t] = max;
    c->s.token_sum[t] = sum;
    for (int64_t e = 0; e < experts; e++)
        c->s.keys[e * c->s.key_stride + t] = moe_score_key(w->scores[e], l->logits_type);
}

static void route_panel(const route_call *c, int64_t panel)
{
    const int64_t tokens = c->problem->layer.tokens, experts = c->problem->layer.experts;
    memset(moe_mask_words(&c->s, panel, 0, experts), 0, sizeof(uint64_t) * MOE_PANEL_WORDS * (size_t)experts);
    memset(c->s.panel_counts + panel * experts, 0, sizeof(int32_t) * (size_t)experts);
    memset(c->s.panel_probability + panel * experts, 0, sizeof(double) * (size_t)experts);
    c->s.panel_z[panel] = 0.0;
    token_work work;
    const int64_t end = moe_min(tokens, (panel + 1) * MOE_TOKEN_PANEL);
    for (int64_t t = panel * MOE_TOKEN_PANEL; t < end; t++) route_token(c, &work, panel, t);
}

/* Counts of plain top-K, and the losses, as sums over the panels in order. Each counted token has K pairs. */
static void finish_route(const route_call *c)
{
    const smoe_layer *l = &c->problem->layer;
    const int64_t experts = l->experts;
    int32_t *counts = c->plan->topk_counts;
    memset(counts, 0, sizeof *counts * (size_t)experts);
    for (int64_t panel = 0; panel < c->s.panels; panel++)
        for (int64_t e = 0; e < experts; e++) counts[e] += c->s.panel_counts[panel * experts + e];
    if (!c->args->losses) return;

    const double tokens = (double)moe_counted_tokens(l, counts);
    double balance = 0.0, z = 0.0;
    for (int64_t panel = 1; panel < c->s.panels; panel++)
        for (int64_t e = 0; e < experts; e++)
            c->s.panel_probability[e] += c->s.panel_probability[panel * experts + e];
    for (int64_t e = 0; e < experts; e++)
        balance += (double)counts[e] / tokens * (c->s.panel_probability[e] / tokens);
    for (int64_t panel = 0; panel < c->s.panels; panel++) z += c->s.panel_z[panel];
    c->args->losses[0] = tokens == 0.0 ? 0.0f : (float)((double)experts * balance);
    c->args->losses[1] = tokens == 0.0 ? 0.0f : (float)(z / tokens);
}

smoe_status moe_cpu_route(smoe_context *context, const moe_problem *problem, const smoe_forward_args *args,
                          const moe_plan_arrays *plan, void *scratch, void *stream)
{
    const route_call call = {problem, args, plan, moe_routing_scratch_at(context, problem, scratch)};
    if (args->router_weight) {
        moe_stage_begin(context, SMOE_STAGE_ROUTER_GEMM, stream);
        compute_logits(context, problem, args, &call.s);
        moe_stage_end(context, SMOE_STAGE_ROUTER_GEMM, stream);
    }
    moe_stage_begin(context, SMOE_STAGE_TOPK, stream);
#pragma omp parallel for schedule(dynamic) num_threads(context->threads)
    for (int64_t panel = 0; panel < call.s.panels; panel++) route_panel(&call, panel);
    finish_route(&call);
    moe_stage_end(context, SMOE_STAGE_TOPK, stream);
    return SMOE_OK;
}

smoe_status moe_cpu_update_selection_bias(smoe_context *context, const moe_problem *problem,
                                          const int32_t *counts, float *bias, float gamma, void *stream)
{
    (void)context, (void)stream;
    const int64_t experts = problem->layer.experts;
    int64_t total = 0;
    for (int64_t e = 0; e < experts; e++) total += counts[e];
    for (int64_t e = 0; e < experts; e++) {
        const int64_t excess = counts[e] * experts - total; /* E (count - mean) */
        bias[e] += excess < 0 ? gamma : excess > 0 ? -gamma : 0.0f;
    }
    return SMOE_OK;
}
