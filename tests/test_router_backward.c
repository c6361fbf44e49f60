/* The stage router_bwd through the public API. dlogits is compared with central differences in double of
 * weights and losses, with the dS that the same call returns; dWr and dbr with plain sums. Also NaN,
 * accumulation, and equal bits for any number of threads. */
#include "harness/run.h"
#include "oracle/number.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { HIDDEN = 24, INTERMEDIATE = 8, MAX_EXPERTS = 64 };

/* A layer with a router: given logits, or with dWr and dbr. Inputs may be changed until run_both. */
typedef struct backward_case {
    smoe_context *context;
    oracle_drawn drawn;
    run r;
    smoe_plan_view plan;
    double *logits;  /* (T, E) as the library sees them; those below after run_both */
    double *dlogits; /* (T, E) */
    double *dwr;     /* (E, d) or NULL */
    double *dbr;     /* (E) or NULL */
} backward_case;

static backward_case *open_drawn(smoe_layer layer, oracle_draw draw, int threads)
{
    const run_options options = {0};
    bool wanted[SLOTS];
    backward_case *b = calloc(1, sizeof *b);
    assert_non_null(b);
    smoe_context_options context = SMOE_CONTEXT_OPTIONS_INIT;
    context.threads = threads;
    assert_int_equal(smoe_create(&b->context, &context), SMOE_OK);
    oracle_draw_inputs(&layer, &draw, 31, &b->drawn);
    run_wanted(&layer, &b->drawn, &options, wanted);
    if (!run_open(&b->r, device_find("cpu"), b->context, &layer, wanted) || !run_make(&b->r))
        fail_msg("%s", b->r.text);
    return b;
}

static backward_case *open_backward(smoe_layer layer, bool router, int threads)
{
    const oracle_draw draw = {.router = router, .router_bias = router};
    return open_drawn(layer, draw, threads);
}

static double *values_of(const run *r, slot_id id, smoe_type type)
{
    const size_t count = r->slots[id].memory.bytes / oracle_type_bytes(type);
    double *values = oracle_alloc(count, sizeof *values);
    oracle_load(values, type, slot_data(r, id), count);
    return values;
}

static void run_both(backward_case *b)
{
    const run_options options = {0};
    run *r = &b->r;
    b->plan = (smoe_plan_view)SMOE_PLAN_VIEW_INIT;
    if (!run_inputs(r, &b->drawn) || !run_forward(r, &options) || !run_check(r) ||
        !run_backward(r, &options) || !run_check(r))
        fail_msg("%s", r->text);
    assert_int_equal(smoe_view_plan(b->context, &r->layer, &r->forward, &b->plan), SMOE_OK);
    b->logits = values_of(r, SLOT_LOGITS, r->layer.logits_type);
    b->dlogits = values_of(r, SLOT_DLOGITS, r->layer.logits_type);
    b->dwr = values_of(r, SLOT_DROUTER_WEIGHT, r->layer.gradient_type);
    b->dbr = values_of(r, SLOT_DROUTER_BIAS, r->layer.gradient_type);
}

static void close_backward(backward_case *b)
{
    free(b->logits), free(b->dlogits), free(b->dwr), free(b->dbr);
    run_close(&b->r);
    oracle_drawn_free(&b->drawn);
    smoe_destroy(b->context);
    free(b);
}

/* ---- the loss of one token, as a function of its logits, in double ---- */

typedef struct token_rows {
    int64_t topk, experts;
    int32_t ids[MAX_EXPERTS];
    double kept[MAX_EXPERTS];  /* dS by k, 0 when dropped */
    double added[MAX_EXPERTS]; /* dS by expert */
} token_rows;

static token_rows rows_of(const backward_case *b, int64_t t)
{
    const smoe_plan_view *p = &b->plan;
    const float *drow_weights = slot_data(&b->r, SLOT_DROW_WEIGHTS);
    const int64_t topk = b->r.layer.topk;
    token_rows rows = {.topk = topk, .experts = b->r.layer.experts};
    for (int64_t k = 0; k < topk; k++) rows.ids[k] = p->topk_ids[t * topk + k];
    for (int64_t e = 0; e < rows.experts; e++) {
        const int64_t first = 64 * (int64_t)p->block_offsets[e];
        for (int64_t row = first; row < first + p->counts[e]; row++) {
            if (p->row_token[row] != t) continue;
            const double ds = (double)drow_weights[row];
            int64_t k = 0;
            while (k < topk && rows.ids[k] != e) k++;
            *(k < topk ? &rows.kept[k] : &rows.added[e]) = ds;
        }
    }
    return rows;
}

static double token_loss(const backward_case *b, const token_rows *rows, const double *l)
{
    const smoe_layer *layer = &b->r.layer;
    const int sigmoid = layer->score == SMOE_SCORE_SIGMOID;
    double sum = 0.0, kept = 0.0, p[MAX_EXPERTS], s[MAX_EXPERTS], weighted = 0.0, balance = 0.0;
    for (int64_t e = 0; e < rows->experts; e++) sum += exp(l[e]);
    for (int64_t e = 0; e < rows->experts; e++) p[e] = exp(l[e]) / sum;
    for (int64_t e = 0; e < rows->experts; e++) s[e] = sigmoid ? 1.0 / (1.0 + exp(-l[e])) : p[e];
    for (int64_t k = 0; k < rows->topk; k++) kept += s[rows->ids[k]];
    if (!layer->renormalize && layer->score != SMOE_SCORE_TOPK_SOFTMAX) kept = 1.0;
    for (int64_t k = 0; k < rows->topk; k++) weighted += rows->kept[k] * s[rows->ids[k]] / kept;
    for (int64_t e = 0; e < rows->experts; e++) weighted += rows->added[e] * s[e];
    const double tokens = (double)layer->tokens;
    for (int64_t e = 0; e < rows->experts; e++)
        balance += (double)rows->experts * b->plan.topk_counts[e] / tokens * p[e] / tokens;
    return (double)layer->route_scale * weighted + b->drawn.input.balance_coefficient * balance +
           b->drawn.input.z_coefficient * log(sum) * log(sum) / tokens;
}

/* The relative Frobenius error of dlogits against central differences. */
static double dlogits_error(const backward_case *b)
{
    const int64_t experts = b->r.layer.experts;
    double error = 0.0, norm = 0.0;
    for (int64_t t = 0; t < b->r.layer.tokens; t++) {
        const token_rows rows = rows_of(b, t);
        double l[MAX_EXPERTS];
        for (int64_t e = 0; e < experts; e++) l[e] = b->logits[t * experts + e];
        for (int64_t e = 0; e < experts; e++) {
            const double at = l[e], step = 1e-5;
            l[e] = at + step;
            const double up = token_loss(b, &rows, l);
            l[e] = at - step;
            const double want = (up - token_loss(b, &rows, l)) / (2 * step);
            l[e] = at;
            error += pow(b->dlogits[t * experts + e] - want, 2);
            norm += want * want;
        }
    }
    assert_true(norm > 0.0);
    return sqrt(error / norm);
}

static smoe_layer layer_with(smoe_score score, int renormalize, smoe_rounding rounding)
{
    smoe_layer layer = SMOE_LAYER_INIT;
    layer.tokens = 300;
    layer.hidden = HIDDEN;
    layer.intermediate = INTERMEDIATE;
    layer.experts = 6;
    layer.topk = 2;
    layer.dtype = SMOE_TYPE_F32;
    layer.score = score;
    layer.renormalize = renormalize;
    layer.rounding = rounding;
    layer.tile = 16;
    layer.route_scale = 1.5f;
    return layer;
}

static const struct {
    smoe_score score;
    int renormalize;
} functions[] = {{SMOE_SCORE_SOFTMAX_TOPK, 0},
                 {SMOE_SCORE_SOFTMAX_TOPK, 1},
                 {SMOE_SCORE_TOPK_SOFTMAX, 0},
                 {SMOE_SCORE_SIGMOID, 0},
                 {SMOE_SCORE_SIGMOID, 1}};

static void gradients_match_differences(void **state)
{
    (void)state;
    static const smoe_rounding roundings[] = {SMOE_ROUNDING_NONE, SMOE_ROUNDING_NR_F, SMOE_ROUNDING_UP,
                                              SMOE_ROUNDING_DOWN};
    double worst = 0.0;
    for (int f = 0; f < 5; f++) {
        for (int rounding = 0; rounding < 4; rounding++) {
            for (int losses = 0; losses < 4; losses++) {
                const oracle_draw draw = {.loss_gradients = losses == 3 && rounding % 2 == 0};
                backward_case *b = open_drawn(
                    layer_with(functions[f].score, functions[f].renormalize, roundings[rounding]), draw, 2);
                b->drawn.input.balance_coefficient =
                    losses & 1 ? 30.0 : 0.0; /* so large that a missing loss changes the result */
                b->drawn.input.z_coefficient = losses & 2 ? 20.0 : 0.0;
                run_both(b);
                worst = fmax(worst, dlogits_error(b));
                close_backward(b);
            }
        }
    }
    print_message("dlogits: largest relative error %.3g\n", worst);
    assert_true(worst < 1e-6);
}

/* The logits are so low that exp of them is 0 in f32; exp of their difference to the token's largest logit is
 * not. */
static void low_logits_have_gradients(void **state)
{
    (void)state;
    for (int f = 0; f < 3; f++) {
        for (int rounding = 0; rounding < 2; rounding++) {
            backward_case *b = open_backward(layer_with(functions[f].score, functions[f].renormalize,
                                                        rounding ? SMOE_ROUNDING_NR_F : SMOE_ROUNDING_NONE),
                                             false, 2);
            for (int64_t i = 0; i < 300 * 6; i++) b->drawn.logits[i] -= 128.0;
            run_both(b);
            assert_true(dlogits_error(b) < 1e-5);
            close_backward(b);
        }
    }
}

static void bf16_logits_round_once(void **state)
{
    (void)state;
    for (int f = 0; f < 5; f++) {
        smoe_layer layer = layer_with(functions[f].score, functions[f].renormalize, SMOE_ROUNDING_NR_F);
        layer.dtype = layer.logits_type = SMOE_TYPE_BF16;
        backward_case *b = open_backward(layer, false, 2);
        run_both(b);
        assert_true(dlogits_error(b) < 4e-3);
        close_backward(b);
    }
}

/* With a sparse score function dlogits must be exactly zero for all experts but the token's own. */
static void sparse_is_sparse(void **state)
{
    (void)state;
    backward_case *b = open_backward(layer_with(SMOE_SCORE_TOPK_SOFTMAX, 0, SMOE_ROUNDING_NONE), false, 1);
    run_both(b);
    for (int64_t t = 0; t < 300; t++) {
        int nonzero = 0;
        for (int64_t e = 0; e < 6; e++) nonzero += b->dlogits[t * 6 + e] != 0.0;
        assert_true(nonzero <= 2);
    }
    close_backward(b);
}

static void nan_stays_in_its_token(void **state)
{
    (void)state;
    for (int f = 0; f < 5; f++) {
        for (int losses = 0; losses < 2; losses++) {
            smoe_layer layer = layer_with(functions[f].score, functions[f].renormalize, SMOE_ROUNDING_NONE);
            backward_case *b = open_backward(layer, false, 2);
            b->drawn.input.balance_coefficient = losses;
            for (int64_t e = 0; e < 5; e++) b->drawn.logits[7 * 6 + e] = (double)NAN; /* one is selected */
            b->drawn.logits[9 * 6 + 3] = (double)NAN; /* need not be selected */
            run_both(b);
            for (int64_t i = 0; i < 300 * 6; i++) assert_int_equal(isnan(b->dlogits[i]) != 0, i / 6 == 7);
            close_backward(b);
        }
    }
}

/* ---- dWr, dbr ---- */

/* dWr (E, d) and dbr (E) in double from the reported dlogits (f32) and X. */
static void check_router_gradients(const backward_case *b, double limit)
{
    const smoe_layer *l = &b->r.layer;
    const int64_t experts = l->experts, tokens = l->tokens;
    double error = 0.0, norm = 0.0;
    for (int64_t e = 0; e < experts; e++) {
        double bias = l->accumulate ? run_initial_gradient(e) : 0.0;
        for (int64_t t = 0; t < tokens; t++) bias += b->dlogits[t * experts + e];
        assert_true(fabs(b->dbr[e] - bias) < 1e-5 * (1.0 + fabs(bias)));
        for (int64_t j = 0; j < HIDDEN; j++) {
            const double before = l->accumulate ? run_initial_gradient(e * HIDDEN + j) : 0.0;
            double want = 0.0;
            for (int64_t t = 0; t < tokens; t++)
                want += b->dlogits[t * experts + e] * b->drawn.x[t * HIDDEN + j];
            error += pow(b->dwr[e * HIDDEN + j] - before - want, 2);
            norm += want * want;
        }
    }
    assert_true(sqrt(error / norm) < limit);
}

static void router_gradients(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        smoe_layer layer = layer_with(SMOE_SCORE_SOFTMAX_TOPK, 0, SMOE_ROUNDING_NR_F);
        layer.tokens = 600;
        layer.dtype = i & 1 ? SMOE_TYPE_BF16 : SMOE_TYPE_F32;
        layer.accumulate = i >> 1;
        backward_case *b = open_backward(layer, true, 2);
        run_both(b);
        check_router_gradients(b, 5e-6);
        close_backward(b);
    }
}

static void threads_do_not_matter(void **state)
{
    (void)state;
    for (int dtype = 0; dtype < 2; dtype++) {
        backward_case *b[3];
        for (int i = 0; i < 3; i++) {
            smoe_layer layer = layer_with(SMOE_SCORE_SOFTMAX_TOPK, 0, SMOE_ROUNDING_NR_F);
            layer.tokens = 900;
            layer.dtype = dtype ? SMOE_TYPE_BF16 : SMOE_TYPE_F32;
            b[i] = open_backward(layer, true, i + 1);
            b[i]->drawn.input.balance_coefficient = 0.5;
            run_both(b[i]);
            assert_memory_equal(b[0]->dlogits, b[i]->dlogits, 8 * 900 * 6);
            assert_memory_equal(b[0]->dwr, b[i]->dwr, 8 * 6 * HIDDEN);
            assert_memory_equal(b[0]->dbr, b[i]->dbr, 8 * 6);
        }
        for (int i = 0; i < 3; i++) close_backward(b[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_match_differences), cmocka_unit_test(low_logits_have_gradients),
        cmocka_unit_test(bf16_logits_round_once),      cmocka_unit_test(sparse_is_sparse),
        cmocka_unit_test(nan_stays_in_its_token),      cmocka_unit_test(router_gradients),
        cmocka_unit_test(threads_do_not_matter),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
