/* Checks how far a NaN spreads: no further than its expert and the tokens of this expert, or the token whose
 * logit it is. */
#include "cli/verify/checks.h"

#include "harness/check.h"
#include "harness/expect.h"
#include "oracle/compare.h"
#include "oracle/number.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Have the values the same bits, or an error within the limit? Limit 0: only the same bits count. */
static bool same_row(const tensor *a, const tensor *b, int64_t row, int64_t width, double limit)
{
    const size_t bytes = (size_t)width * oracle_type_bytes(a->type), at = (size_t)row * bytes;
    if (memcmp((const char *)a->bits + at, (const char *)b->bits + at, bytes) == 0) return true;
    return limit > 0.0 &&
           oracle_relative_error(a->values + row * width, b->values + row * width, (size_t)width) <= limit;
}

/* The number of rows of `width` elements that differ. Rows with skip[row] true are left out. */
static int64_t differing_rows(const tensor *a, const tensor *b, int64_t width, const bool *skip, double limit)
{
    if (!a->bits || !b->bits || a->count != b->count) return -1;
    int64_t differing = 0;
    for (int64_t row = 0; row < a->count / width; row++)
        differing += !skip[row] && !same_row(a, b, row, width, limit);
    return differing;
}

/* The number of rows with marked[row] true that have no NaN. */
static int64_t clean_rows(const tensor *t, int64_t width, const bool *marked)
{
    int64_t clean = 0;
    for (int64_t row = 0; row < t->count / width; row++) {
        bool any = false;
        for (int64_t i = 0; i < width; i++) any = any || isnan(t->values[row * width + i]);
        if (marked[row] && !any) clean++;
    }
    return clean;
}

/* The only expert of a token: by offsets, or given as ids. A row after the last expert's has none; then it is
 * the number of experts. */
static int64_t expert_of(const smoe_layer *layer, const oracle_drawn *drawn, int64_t token)
{
    if (layer->entry != SMOE_ENTRY_FROM_ROWS) return drawn->topk_ids[token];
    int64_t expert = 0;
    while (expert < layer->experts && token >= drawn->offsets[expert + 1]) expert++;
    return expert;
}

/* The expert that gets NaN: token 0's. A gather that reads a row for padding reads that of token 0. */
static int64_t victim_of(const smoe_layer *layer, const oracle_drawn *drawn)
{
    return expert_of(layer, drawn, 0);
}

static void compare_others(verify *v, const smoe_layer *layer, const oracle_drawn *drawn,
                           const tensors *clean, const tensors *dirty)
{
    const int64_t hidden = layer->hidden, n = layer->intermediate, width = oracle_h_width(layer);
    bool *tokens = oracle_alloc((size_t)layer->tokens, sizeof *tokens);
    bool *experts = oracle_alloc((size_t)layer->experts, sizeof *experts);
    const int64_t victim = victim_of(layer, drawn);
    for (int64_t t = 0; t < layer->tokens; t++) tokens[t] = expert_of(layer, drawn, t) == victim;
    experts[victim] = true;
    const struct {
        tensor_id id;
        int64_t width;
        const bool *skip;
    } parts[] = {
        {TENSOR_OUT, hidden, tokens},          {TENSOR_DX, hidden, tokens},
        {TENSOR_DW1, width * hidden, experts}, {TENSOR_DW2, hidden * n, experts},
        {TENSOR_DB1, width, experts},          {TENSOR_DB2, hidden, experts},
    };
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        check_zero(v, tensor_names[parts[i].id],
                   differing_rows(&clean->at[parts[i].id], &dirty->at[parts[i].id], parts[i].width,
                                  parts[i].skip, 0.0),
                   "rows that a NaN elsewhere changed");
    check_zero(v, "out", clean_rows(&dirty->at[TENSOR_OUT], hidden, tokens), "rows that should be NaN");
    check_zero(v, "dw1", clean_rows(&dirty->at[TENSOR_DW1], width * hidden, experts),
               "experts that should be NaN");
    free(tokens);
    free(experts);
}

/* X and dO of one expert's tokens are NaN, and its weights have infinity. */
void check_isolation(verify *v, const layer_case *c, const smoe_layer *layer)
{
    const run_options options = {0};
    const int64_t w1_size = oracle_h_width(layer) * layer->hidden;
    oracle_drawn drawn;
    tensors clean, dirty;
    oracle_draw_inputs(layer, &c->draw, v->seed, &drawn);
    if (check_run(v, NULL, layer, &drawn, &options, &clean)) {
        const int64_t victim = victim_of(layer, &drawn);
        for (int64_t i = 0; i < layer->tokens * layer->hidden; i++)
            if (expert_of(layer, &drawn, i / layer->hidden) == victim) drawn.x[i] = drawn.dout[i] = NAN;
        drawn.w1[victim * w1_size] = INFINITY;
        if (check_run(v, NULL, layer, &drawn, &options, &dirty)) {
            compare_others(v, layer, &drawn, &clean, &dirty);
            tensors_free(&dirty);
        }
        tensors_free(&clean);
    }
    oracle_drawn_free(&drawn);
}

/* Logits. Token 3: all NaN. Token 7: one NaN, which top-K does not select. Token 11: fewer than K numbers, so
 * top-K must select a NaN. */
static void break_logits(const smoe_layer *layer, oracle_drawn *drawn, bool *broken)
{
    const int64_t experts = layer->experts;
    double *logits = drawn->logits;
    for (int64_t e = 0; e < experts; e++) logits[3 * experts + e] = NAN;
    logits[7 * experts + 1] = NAN;
    for (int64_t e = 0; e < experts - layer->topk + 1; e++) logits[11 * experts + e] = NAN;
    broken[3] = broken[7] = broken[11] = true;
}

static void judge_broken(verify *v, const smoe_layer *layer, const oracle_drawn *drawn, const tensors *dirty)
{
    const run_options options = {.forward_only = true};
    const tensor_id ids[] = {TENSOR_TOPK_IDS, TENSOR_TOPK_WEIGHTS, TENSOR_TOPK_COUNTS, TENSOR_ROW_TOKEN,
                             TENSOR_OUT};
    tensors want, stored;
    expect_tensors(v->on, layer, drawn, &options, dirty, &want, &stored);
    for (size_t i = 0; i < sizeof ids / sizeof ids[0]; i++) {
        const tensor_id id = ids[i];
        const verdict judged =
            check_judge(layer, id, &dirty->at[id], &want.at[id], &stored.at[id], check_cap(layer));
        report_line(&v->report, (verify_line){tensor_names[id], judged.error, judged.limit, judged.ok, NULL});
    }
    tensors_free(&want);
    tensors_free(&stored);
}

/* The outputs and gradients of broken tokens are NaN, those of all other tokens do not change. A broken token
 * goes to other experts, so the rows of other tokens move inside an expert. On the GPU they still have the
 * same bits. On the CPU the order in which a BLAS sums a row may depend on the place of the row (OpenBLAS on
 * Haswell, Zen and Prescott). */
static void judge_others(verify *v, const smoe_layer *layer, const tensors *clean, const tensors *dirty,
                         const bool *broken)
{
    const struct {
        tensor_id id;
        int64_t width;
    } parts[] = {{TENSOR_OUT, layer->hidden}, {TENSOR_DX, layer->hidden}, {TENSOR_DLOGITS, layer->experts}};
    const double limit = v->on->backend == SMOE_BACKEND_CPU ? check_cap(layer) : 0.0;
    bool *poisoned = oracle_alloc((size_t)layer->tokens, sizeof *poisoned);
    bool *one_unkept = oracle_alloc((size_t)layer->tokens, sizeof *one_unkept);
    poisoned[3] = poisoned[11] = one_unkept[7] = true;
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        const tensor *before = &clean->at[parts[i].id], *after = &dirty->at[parts[i].id];
        check_zero(v, tensor_names[parts[i].id], differing_rows(before, after, parts[i].width, broken, limit),
                   "rows that a NaN elsewhere changed");
        check_zero(v, tensor_names[parts[i].id], clean_rows(after, parts[i].width, poisoned),
                   "rows that should be NaN");
        check_zero(v, tensor_names[parts[i].id], 1 - clean_rows(after, parts[i].width, one_unkept),
                   "rows that should not be NaN");
    }
    free(poisoned);
    free(one_unkept);
}

void check_nan_logits(verify *v, const layer_case *c, const smoe_layer *layer)
{
    const run_options options = {0};
    oracle_drawn drawn;
    tensors clean, dirty;
    oracle_draw_inputs(layer, &c->draw, v->seed, &drawn);
    if (check_run(v, NULL, layer, &drawn, &options, &clean)) {
        bool *broken = oracle_alloc((size_t)layer->tokens, sizeof *broken);
        break_logits(layer, &drawn, broken);
        if (check_run(v, NULL, layer, &drawn, &options, &dirty)) {
            judge_broken(v, layer, &drawn, &dirty);
            judge_others(v, layer, &clean, &dirty, broken);
            tensors_free(&dirty);
        }
        free(broken);
        tensors_free(&clean);
    }
    oracle_drawn_free(&drawn);
}
