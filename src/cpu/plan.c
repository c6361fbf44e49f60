/* plan: sorts the rows by expert, with the tokens of an expert ascending, pads every expert to blocks of 64
 * rows, and makes the map from tokens to rows.
 *
 * With FROM_LOGITS and FROM_TOPK the routing is given as selection bits (routing.h). There are two passes
 * over the panels of tokens. The first counts the rows of each (panel, expert) and of each token. Sums of
 * these counts over the panels give the places of the rows. The second pass writes the rows. FROM_ROWS copies
 * the offsets. */
#include "check.h"
#include "convert.h"
#include "routing.h"

typedef struct plan_call {
    smoe_context *context;
    const moe_problem *problem;
    const smoe_forward_args *args;
    const moe_plan_arrays *plan;
    moe_routing_scratch s;
} plan_call;

/* ---- the first pass: counts ---- */

/* FROM_TOPK: sets the bits of one panel. An id outside 0..E-1 sets no bit. A repeated id sets the same bit
 * again. */
static void select_given(const plan_call *c, int64_t panel)
{
    const smoe_layer *l = &c->problem->layer;
    const int64_t first = panel * MOE_TOKEN_PANEL, end = moe_min(l->tokens, first + MOE_TOKEN_PANEL);
    memset(moe_mask_words(&c->s, panel, 0, l->experts), 0,
           sizeof(uint64_t) * MOE_PANEL_WORDS * (size_t)l->experts);
    for (int64_t t = first; t < end; t++) {
        for (int64_t k = 0; k < l->topk; k++) {
            const int64_t e = moe_load_index(c->args->topk_ids, l->index_type, t * l->topk + k);
            if (e < 0 || e >= l->experts) continue;
            moe_mask_words(&c->s, panel, e, l->experts)[(t - first) / 64] |= UINT64_C(1) << (t - first) % 64;
        }
    }
}

/* Fills panel_counts (P, E) and panel_rows (P), and sets token_offsets[t] to the number of rows of token t.
 * Bits past the last token, which no route sets, count as too many rows. */
static void count_panel(const plan_call *c, int64_t panel)
{
    const smoe_layer *l = &c->problem->layer;
    const int64_t first = panel * MOE_TOKEN_PANEL, count = moe_min(MOE_TOKEN_PANEL, l->tokens - first);
    int32_t token_count[MOE_TOKEN_PANEL] = {0}, rows = 0;
    for (int64_t e = 0; e < l->experts; e++) {
        const uint64_t *words = moe_mask_words(&c->s, panel, e, l->experts);
        const int32_t before = rows;
        for (int w = 0; w < MOE_PANEL_WORDS; w++) {
            for (uint64_t word = words[w]; word; rows++) token_count[64 * w + moe_next_bit(&word)]++;
        }
        c->s.panel_counts[panel * l->experts + e] = rows - before;
    }
    int32_t past = 0;
    for (int64_t i = count; i < MOE_TOKEN_PANEL; i++) past += token_count[i];
    c->s.panel_rows[panel] = past ? INT32_MAX : rows;
    memcpy(c->plan->token_offsets + first, token_count, sizeof *token_count * (size_t)count);
}

/* ---- between the passes: sums ---- */

/* Replaces each value by the sum of the values before it. Returns the sum of all. */
static int32_t sum_before(int32_t *values, int64_t count, int64_t stride)
{
    int32_t sum = 0;
    for (int64_t i = 0; i < count; i++) {
        const int32_t value = values[i * stride];
        values[i * stride] = sum;
        sum += value;
    }
    return sum;
}

void moe_place_experts(const moe_plan_arrays *plan, int64_t experts)
{
    plan->offsets[0] = plan->block_offsets[0] = 0;
    for (int64_t e = 0; e < experts; e++) {
        const int32_t blocks = (plan->counts[e] + MOE_BLOCK_ROWS - 1) / MOE_BLOCK_ROWS;
        plan->offsets[e + 1] = plan->offsets[e] + plan->counts[e];
        plan->block_offsets[e + 1] = plan->block_offsets[e] + blocks;
    }
}

/* A radix sort by the bytes of the complemented count, lowest byte first. It is stable, so equal counts stay
 * in the order of their ids. After four passes the result is in the array from which the first pass started.
 */
void moe_order_experts(const moe_plan_arrays *plan, int32_t *work, int64_t experts)
{
    int32_t *from = plan->order, *to = work;
    for (int64_t e = 0; e < experts; e++) from[e] = (int32_t)e;
    for (int shift = 0; shift < 32; shift += 8) {
        int32_t starts[256] = {0};
        for (int64_t e = 0; e < experts; e++) starts[~(uint32_t)plan->counts[e] >> shift & 255]++;
        sum_before(starts, 256, 1);
        for (int64_t i = 0; i < experts; i++) {
            const int32_t e = from[i];
            to[starts[~(uint32_t)plan->counts[e] >> shift & 255]++] = e;
        }
        int32_t *swap = from;
        from = to;
        to = swap;
    }
}

/* ---- the second pass: rows ---- */

/* Weight of a (token, expert) pair. A kept pair has its top-K weight (at the lowest k if the id is repeated).
 * An added pair has p, or the value of the curve, times the route scale. */
static float pair_weight(const plan_call *c, int64_t t, int64_t expert)
{
    const smoe_layer *l = &c->problem->layer;
    const int64_t first = t * l->topk;
    if (l->entry == SMOE_ENTRY_FROM_TOPK) {
        for (int64_t k = 0; k < l->topk; k++)
            if (moe_load_index(c->args->topk_ids, l->index_type, first + k) == expert)
                return c->args->topk_weights[first + k];
        return 0.0f; /* not reached: the bit was set by one of the ids */
    }
    for (int64_t k = 0; k < l->topk; k++)
        if (c->plan->topk_ids[first + k] == expert) return c->plan->topk_weights[first + k];
    float logit;
    moe_load_row(&logit, c->args->logits, t * l->experts + expert, 1, l->logits_type);
    const float score = moe_score_has_curve(l->score)
                            ? moe_score_value(l->score, logit)
                            : moe_div(moe_softmax_term(logit, c->s.token_max[t]), c->s.token_sum[t]);
    return moe_mul(score, l->route_scale);
}

/* Writes the rows of one panel's tokens, and the map from these tokens to their rows. Experts are visited in
 * ascending order, so the rows of a token are ascending too. */
static void write_panel(const plan_call *c, int64_t panel)
{
    const smoe_layer *l = &c->problem->layer;
    const moe_plan_arrays *plan = c->plan;
    const int64_t first = panel * MOE_TOKEN_PANEL, count = moe_min(MOE_TOKEN_PANEL, l->tokens - first);
    int32_t next[MOE_TOKEN_PANEL];
    sum_before(plan->token_offsets + first, count, 1);
    for (int64_t i = 0; i < count; i++) next[i] = plan->token_offsets[first + i] += c->s.panel_rows[panel];
    for (int64_t e = 0; e < l->experts; e++) {
        const uint64_t *words = moe_mask_words(&c->s, panel, e, l->experts);
        int32_t row = MOE_BLOCK_ROWS * plan->block_offsets[e] + c->s.panel_counts[panel * l->experts + e];
        for (int w = 0; w < MOE_PANEL_WORDS; w++) {
            for (uint64_t word = words[w]; word; row++) {
                const int64_t i = 64 * w + moe_next_bit(&word);
                plan->row_token[row] = (int32_t)(first + i);
                plan->row_weight[row] = pair_weight(c, first + i, e);
                plan->token_rows[next[i]++] = row;
            }
        }
    }
}

static void write_pads(const moe_plan_arrays *plan, int64_t first, int64_t end)
{
    for (int64_t row = first; row < end; row++) {
        plan->row_token[row] = -1;
        plan->row_weight[row] = 0.0f;
    }
}

void moe_write_pads(const moe_plan_arrays *plan, int64_t experts, int64_t padded_rows)
{
    for (int64_t e = 0; e < experts; e++) {
        const int64_t first = (int64_t)MOE_BLOCK_ROWS * plan->block_offsets[e];
        write_pads(plan, first + plan->counts[e], (int64_t)MOE_BLOCK_ROWS * plan->block_offsets[e + 1]);
    }
    write_pads(plan, (int64_t)MOE_BLOCK_ROWS * plan->block_offsets[experts], padded_rows);
}

/* smoe_plan may be called without smoe_route before it. */
static smoe_status check_selected(const plan_call *c)
{
    int64_t rows = 0;
    for (int64_t panel = 0; panel < c->s.panels; panel++) rows += c->s.panel_rows[panel];
    if (rows <= c->problem->rows) return SMOE_OK;
    return moe_fail(c->context, SMOE_ERROR_ARGUMENT,
                    "%s: scratch is not as smoe_route left it: it selects %lld pairs, the bound is %lld",
                    c->context->function, (long long)rows, (long long)c->problem->rows);
}

static smoe_status plan_selection(const plan_call *c)
{
    const int64_t experts = c->problem->layer.experts, panels = c->s.panels;
    const int threads = c->context->threads;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t panel = 0; panel < panels; panel++) {
        if (c->problem->layer.entry == SMOE_ENTRY_FROM_TOPK) select_given(c, panel);
        count_panel(c, panel);
    }
    const smoe_status status = check_selected(c);
    if (status != SMOE_OK) return status;
    for (int64_t e = 0; e < experts; e++)
        c->plan->counts[e] = sum_before(c->s.panel_counts + e, panels, experts);
    c->plan->token_offsets[c->problem->layer.tokens] = sum_before(c->s.panel_rows, panels, 1);
    moe_place_experts(c->plan, experts);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t panel = 0; panel < panels; panel++) write_panel(c, panel);
    return SMOE_OK;
}

/* ---- FROM_ROWS ---- */

/* Row r of expert e is token r of the input. */
static smoe_status plan_rows(const plan_call *c)
{
    const smoe_layer *l = &c->problem->layer;
    const moe_plan_arrays *plan = c->plan;
    const smoe_status status = moe_check_offsets(c->context, l, c->args->offsets);
    if (status != SMOE_OK) return status;
    for (int64_t e = 0; e < l->experts; e++)
        plan->counts[e] = (int32_t)(moe_load_index(c->args->offsets, l->index_type, e + 1) -
                                    moe_load_index(c->args->offsets, l->index_type, e));
    moe_place_experts(plan, l->experts);
    for (int64_t e = 0; e < l->experts; e++) {
        const int32_t row = MOE_BLOCK_ROWS * plan->block_offsets[e] - plan->offsets[e];
        for (int32_t t = plan->offsets[e]; t < plan->offsets[e + 1]; t++) {
            plan->row_token[row + t] = t;
            plan->row_weight[row + t] = c->args->row_weights ? c->args->row_weights[t] : 1.0f;
            plan->token_rows[t] = row + t;
        }
    }
    for (int64_t t = 0; t <= l->tokens; t++)
        plan->token_offsets[t] = (int32_t)moe_min(t, plan->offsets[l->experts]);
    return SMOE_OK;
}

smoe_status moe_cpu_plan(smoe_context *context, const moe_problem *problem, const smoe_forward_args *args,
                         const moe_plan_arrays *plan, void *scratch, void *stream)
{
    const plan_call call = {context, problem, args, plan, moe_routing_scratch_at(context, problem, scratch)};
    smoe_status status = SMOE_OK;
    moe_stage_begin(context, SMOE_STAGE_PLAN, stream);
    switch (problem->layer.entry) {
    case SMOE_ENTRY_FROM_LOGITS:
    case SMOE_ENTRY_FROM_TOPK: status = plan_selection(&call); break;
    case SMOE_ENTRY_FROM_ROWS: status = plan_rows(&call); break;
    }
    if (status == SMOE_OK) {
        moe_order_experts(plan, call.s.targets, problem->layer.experts);
        moe_write_pads(plan, problem->layer.experts, problem->padded_rows);
    }
    moe_stage_end(context, SMOE_STAGE_PLAN, stream);
    return status;
}
