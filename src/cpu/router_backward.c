/* router_bwd: from dS to dlogits through the score function, and from there to the router's gradients.
 *
 * Here c is the route scale, p the softmax over E, and w the weights before c. g = c dS of a pair; for a kept
 * pair that rounding dropped g is 0, but the pair stays in the normaliser.
 *
 *   SOFTMAX_TOPK, added pairs of both softmax scores, losses:
 *       dl_e = p_e (v_e - sum_j v_j p_j),  v_e the sum of g_e, balance E count_e / C^2 and z 2 logsumexp / C
 *       with C the number of tokens that token_mask counts; other tokens have no part of the losses
 *   SOFTMAX_TOPK renormalised, TOPK_SOFTMAX:
 *       dl_e = w_e (g_e - sum_kept g_j w_j)
 *   SIGMOID, added pairs:
 *       dl_e = g_e sigma_e (1 - sigma_e)
 *   SIGMOID renormalised:
 *       the same with (g_e - sum_kept g_j w_j) / sum_kept sigma_j in the place of g_e
 *
 * If a row of a token belongs to a pair with NaN weight, all dlogits of this token are NaN. No other token
 * changes.
 *
 *   dWr (E, d) = dlogits^T X,  dbr (E) = sum_t dlogits[t]
 *
 * each column is summed over the tokens in order. */
#include "blas.h"
#include "convert.h"
#include "routing.h"
#include "wanted.h"

#include <math.h>
#include <omp.h>

enum { COLUMNS = 64 }; /* of dWr, and experts of dbr, that one thread sums at a time */

typedef struct gradient_call {
    const moe_problem *problem;
    const smoe_backward_args *args;
    const moe_plan_arrays *plan;
    float balance, z; /* coefficients of the losses, with loss_gradients */
    float tokens;     /* how many the losses count */
    const float *ds;  /* (padded_rows) */
    float *dlogits;   /* (T, E) */
    float *thread_x;  /* (threads, 256, 64); bf16 */
    float *thread_w;  /* (threads, E, 64) */
} gradient_call;

/* The current token. */
typedef struct token_work {
    float logits[MOE_MAX_EXPERTS];
    float p[MOE_MAX_EXPERTS];
    float v[MOE_MAX_EXPERTS];    /* dL/dp */
    float kept[MOE_MAX_TOPK];    /* c dS by k, 0 for dropped pairs */
    float weights[MOE_MAX_TOPK]; /* w by k */
    int kept_rows;
    int added_rows;
} token_work;

/* ---- dlogits ---- */

static int64_t find_k(const int32_t *ids, int64_t topk, int64_t expert)
{
    int64_t k = 0;
    while (k < topk && ids[k] != expert) k++;
    return k;
}

/* Writes c dS of the token's rows to w->kept (kept pairs, by k) and to w->v (added pairs, by expert; zero for
 * all other experts). */
static void gather_rows(const gradient_call *c, const int32_t *ids, int64_t t, token_work *w)
{
    const smoe_layer *l = &c->problem->layer;
    const moe_plan_arrays *plan = c->plan;
    w->kept_rows = w->added_rows = 0;
    memset(w->kept, 0, sizeof w->kept);
    memset(w->v, 0, sizeof *w->v * (size_t)l->experts);
    int64_t expert = 0;
    for (int32_t i = plan->token_offsets[t]; i < plan->token_offsets[t + 1]; i++) {
        const int32_t row = plan->token_rows[i];
        while (row >= MOE_BLOCK_ROWS * plan->block_offsets[expert + 1]) expert++;
        const float g = moe_mul(l->route_scale, c->ds[row]);
        const int64_t k = find_k(ids, l->topk, expert);
        if (k < l->topk) {
            w->kept[k] = g;
            w->kept_rows++;
        } else {
            w->v[expert] = g;
            w->added_rows++;
        }
    }
}

/* Gradient through the softmax over all experts: p (v - sum v p), with v from pairs and, if `losses`, from
 * the losses. Like the functions below, it adds to out (E). */
static void softmax_gradient(const gradient_call *c, int losses, float max, float sum, token_work *w,
                             float *out)
{
    const smoe_layer *l = &c->problem->layer;
    const float tokens = c->tokens, z_coefficient = losses ? c->z : 0.0f;
    const float balance = losses ? c->balance * (float)l->experts / tokens / tokens : 0.0f;
    const float z = z_coefficient == 0.0f ? 0.0f : 2.0f * z_coefficient * (max + logf(sum)) / tokens;
    double inner = 0.0;
    for (int64_t e = 0; e < l->experts; e++) {
        w->p[e] = moe_div(w->p[e], sum);
        w->v[e] += balance * (float)c->plan->topk_counts[e];
    }
    for (int64_t e = 0; e < l->experts; e++) inner += (double)w->v[e] * (double)w->p[e];
    for (int64_t e = 0; e < l->experts; e++) out[e] += w->p[e] * (w->v[e] - (float)inner + z);
}

/* Gradient through the softmax over the kept logits: w (g - sum g w). */
static void kept_softmax_gradient(const token_work *w, const int32_t *ids, int64_t topk, float *out)
{
    float inner = 0.0f;
    for (int64_t k = 0; k < topk; k++) inner += w->kept[k] * w->weights[k];
    for (int64_t k = 0; k < topk; k++) out[ids[k]] += w->weights[k] * (w->kept[k] - inner);
}

/* ---- MOE_SLOPE_CURVE for each curve of scores.h ---- */

static float sigmoid_slope(float logit)
{
    const float sigma = moe_sigmoid(logit);
    return sigma * (1.0f - sigma);
}

#define MOE_SLOPE_softmax break
#define MOE_SLOPE_sigmoid return sigmoid_slope(logit)

static float slope_of(smoe_score score, float logit)
{
    switch (score) {
#define MOE_CASE(enumerator, name, key, value, over, selection)                                              \
    case enumerator: MOE_SLOPE_##value;
        MOE_SCORES(MOE_CASE)
#undef MOE_CASE
    }
    return sigmoid_slope(logit);
}

/* Gradient through the curve at the kept pairs (if they were renormalised, `divisor` is their sum), ... */
static void kept_curve_gradient(const token_work *w, const float *logits, const int32_t *ids,
                                const smoe_layer *l, float divisor, float *out)
{
    float inner = 0.0f;
    for (int64_t k = 0; k < l->topk && l->renormalize; k++) inner += w->kept[k] * w->weights[k];
    for (int64_t k = 0; k < l->topk && divisor != 0.0f; k++)
        out[ids[k]] += (w->kept[k] - inner) / divisor * slope_of(l->score, logits[ids[k]]);
}

/* ... and of the added ones. */
static void added_curve_gradient(token_work *w, const float *logits, const smoe_layer *l, float *out)
{
    for (int64_t e = 0; e < l->experts; e++)
        if (w->v[e] != 0.0f) out[e] += w->v[e] * slope_of(l->score, logits[e]);
    memset(w->v, 0, sizeof *w->v * (size_t)l->experts);
}

static int keeps_nan(const float *logits, const int32_t *ids, int64_t topk)
{
    int nan = 0;
    for (int64_t k = 0; k < topk; k++) nan |= moe_is_nan(logits[ids[k]]);
    return nan;
}

static void fill_nan(float *out, int64_t experts)
{
    for (int64_t e = 0; e < experts; e++) out[e] = moe_float_of(0x7fc00000u);
}

/* The kept weights of the plan before route_scale, in w->weights. */
static void weights_of_plan(const gradient_call *c, int64_t t, token_work *w)
{
    const smoe_layer *l = &c->problem->layer;
    const float *weights = c->plan->topk_weights + t * l->topk;
    for (int64_t k = 0; k < l->topk; k++)
        w->weights[k] = l->route_scale == 1.0f ? weights[k] : moe_div(weights[k], l->route_scale);
}

/* From the weights of the plan, without the logits: sparse dlogits of a softmax. If one weight is NaN, all of
 * the token's are. */
static void token_dlogits_of_weights(const gradient_call *c, int64_t t, token_work *w, float *out)
{
    const smoe_layer *l = &c->problem->layer;
    const int32_t *ids = c->plan->topk_ids + t * l->topk;
    gather_rows(c, ids, t, w);
    memset(out, 0, sizeof *out * (size_t)l->experts);
    weights_of_plan(c, t, w);
    kept_softmax_gradient(w, ids, l->topk, out);
    if (moe_is_nan(c->plan->topk_weights[t * l->topk])) fill_nan(out, l->experts);
}

static void token_dlogits(const gradient_call *c, int64_t t, token_work *w, float *out)
{
    const smoe_layer *l = &c->problem->layer;
    const int64_t experts = l->experts;
    const int32_t *ids = c->plan->topk_ids + t * l->topk;
    const int losses = (c->balance != 0.0f || c->z != 0.0f) && moe_token_counts(c->args->token_mask, t);
    const int curve = moe_score_has_curve(l->score), plain_softmax = moe_weights_are_p(l);
    const float *logits = w->logits;
    if (l->logits_type == SMOE_TYPE_F32)
        logits = (const float *)c->args->logits + t * experts;
    else
        moe_load_row(w->logits, c->args->logits, t * experts, experts, l->logits_type);

    gather_rows(c, ids, t, w);
    memset(out, 0, sizeof *out * (size_t)experts);
    if (w->added_rows && curve) added_curve_gradient(w, logits, l, out);
    const int all_p = losses || (w->added_rows && !curve) || (w->kept_rows && plain_softmax);
    float max = 0.0f, sum = 1.0f;
    if (all_p) {
        for (int64_t k = 0; k < l->topk && plain_softmax; k++) w->v[ids[k]] += w->kept[k];
        moe_softmax_of(logits, experts, w->p, &max, &sum);
        softmax_gradient(c, losses, max, sum, w, out);
    }
    if (!w->kept_rows) return;
    if (curve) {
        const float divisor = moe_kept_weights(l, logits, max, sum, ids, w->weights);
        kept_curve_gradient(w, logits, ids, l, divisor, out);
    } else if (!plain_softmax) {
        weights_of_plan(c, t, w);
        kept_softmax_gradient(w, ids, l->topk, out);
    }
    if (keeps_nan(logits, ids, l->topk)) fill_nan(out, experts);
}

static void panel_dlogits(const gradient_call *c, int64_t panel)
{
    const smoe_layer *l = &c->problem->layer;
    const int64_t first = panel * MOE_TOKEN_PANEL, count = moe_min(MOE_TOKEN_PANEL, l->tokens - first);
    float *out = c->dlogits + first * l->experts;
    token_work work;
    void (*const each)(const gradient_call *c, int64_t t, token_work *w, float *out) =
        moe_reads_logits(l, c->args) ? token_dlogits : token_dlogits_of_weights;
    for (int64_t i = 0; i < count; i++) each(c, first + i, &work, out + i * l->experts);
    if (c->args->dlogits)
        moe_store_row(c->args->dlogits, first * l->experts, out, count * l->experts, l->logits_type);
}

/* ---- dWr, dbr ---- */

static void give_row(const smoe_layer *l, void *gradient, int64_t first, const float *row, int64_t count)
{
    if (l->accumulate)
        moe_add_row(gradient, first, row, count, l->gradient_type);
    else
        moe_store_row(gradient, first, row, count, l->gradient_type);
}

/* Columns first..first+count-1 of dWr (E, d). */
static void weight_columns(const gradient_call *c, int64_t first, int64_t count)
{
    const smoe_layer *l = &c->problem->layer;
    const int64_t experts = l->experts, hidden = l->hidden, thread = omp_get_thread_num();
    float *w = c->thread_w + thread * experts * COLUMNS; /* (E, count) */
    if (l->dtype == SMOE_TYPE_F32) {
        moe_sgemm(1, 0, experts, count, l->tokens, c->dlogits, experts, (const float *)c->args->x + first,
                  hidden, 0.0f, w, count);
    } else {
        float *x = c->thread_x + thread * MOE_TOKEN_PANEL * COLUMNS;             /* (256, count) */
        if (l->tokens == 0) memset(w, 0, (size_t)(experts * count) * sizeof *w); /* a rank without tokens */
        for (int64_t t = 0; t < l->tokens; t += MOE_TOKEN_PANEL) {
            const int64_t tokens = moe_min(MOE_TOKEN_PANEL, l->tokens - t);
            for (int64_t i = 0; i < tokens; i++)
                moe_load_row(x + i * count, c->args->x, (t + i) * hidden + first, count, l->dtype);
            moe_sgemm(1, 0, experts, count, tokens, c->dlogits + t * experts, experts, x, count,
                      t > 0 ? 1.0f : 0.0f, w, count);
        }
    }
    for (int64_t e = 0; e < experts; e++)
        give_row(l, c->args->drouter_weight, e * hidden + first, w + e * count, count);
}

/* Experts first..first+count-1 of dbr. */
static void bias_columns(const gradient_call *c, int64_t first, int64_t count)
{
    const smoe_layer *l = &c->problem->layer;
    double sums[COLUMNS] = {0};
    float bias[COLUMNS];
    for (int64_t t = 0; t < l->tokens; t++)
        for (int64_t i = 0; i < count; i++) sums[i] += (double)c->dlogits[t * l->experts + first + i];
    for (int64_t i = 0; i < count; i++) bias[i] = (float)sums[i];
    give_row(l, c->args->drouter_bias, first, bias, count);
}

static int64_t cut_columns(int64_t count)
{
    return (count + COLUMNS - 1) / COLUMNS;
}

static gradient_call call_at(const smoe_context *context, const moe_problem *problem, char *scratch,
                             uint64_t *bytes)
{
    const smoe_layer *l = &problem->layer;
    const int64_t threads = context->threads;
    const uint64_t w = moe_align_up((uint64_t)(4 * threads * l->experts * COLUMNS));
    const uint64_t x =
        moe_align_up((uint64_t)(l->dtype == SMOE_TYPE_F32 ? 0 : 4 * threads * MOE_TOKEN_PANEL * COLUMNS));
    gradient_call c = {.problem = problem};
    if (scratch) c.thread_w = (float *)(void *)scratch;
    if (scratch) c.thread_x = (float *)(void *)(scratch + w);
    *bytes = w + x;
    return c;
}

uint64_t moe_cpu_router_backward_scratch(const smoe_context *context, const moe_problem *problem)
{
    uint64_t bytes;
    call_at(context, problem, NULL, &bytes);
    return bytes;
}

void moe_cpu_router_backward(smoe_context *context, const moe_problem *problem,
                             const smoe_backward_args *args, const moe_plan_arrays *plan, const float *ds,
                             float *dlogits, void *scratch, void *stream)
{
    const smoe_layer *l = &problem->layer;
    uint64_t bytes;
    gradient_call call = call_at(context, problem, scratch, &bytes);
    call.args = args;
    call.plan = plan;
    call.ds = ds;
    call.dlogits = dlogits;
    call.balance = args->balance_coefficient + (args->loss_gradients ? args->loss_gradients[0] : 0.0f);
    call.z = args->z_coefficient + (args->loss_gradients ? args->loss_gradients[1] : 0.0f);
    call.tokens = (float)moe_counted_tokens(l, plan->topk_counts);
    moe_stage_begin(context, SMOE_STAGE_ROUTER_BWD, stream);
#pragma omp parallel for schedule(dynamic) num_threads(context->threads)
    for (int64_t panel = 0; panel < (l->tokens + MOE_TOKEN_PANEL - 1) / MOE_TOKEN_PANEL; panel++)
        panel_dlogits(&call, panel);
    moe_blas_enter();
#pragma omp parallel for schedule(dynamic) num_threads(context->threads)
    for (int64_t i = 0; i < (args->drouter_weight ? cut_columns(l->hidden) : 0); i++)
        weight_columns(&call, i * COLUMNS, moe_min(COLUMNS, l->hidden - i * COLUMNS));
    moe_blas_leave();
#pragma omp parallel for schedule(dynamic) num_threads(context->threads)
    for (int64_t i = 0; i < (args->drouter_bias ? cut_columns(l->experts) : 0); i++)
        bias_columns(&call, i * COLUMNS, moe_min(COLUMNS, l->experts - i * COLUMNS));
    moe_stage_end(context, SMOE_STAGE_ROUTER_BWD, stream);
}
