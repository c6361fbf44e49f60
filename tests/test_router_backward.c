/* router_bwd through the public API: dlogits against central differences in double of the weights and losses,
 * with the dS that the same call reports; dWr and dbr against plain sums; NaN; accumulation; equal bits for
 * any threads. */
#include "routing_case.h"

#include <math.h>

enum { HIDDEN = 24, INTERMEDIATE = 8, MAX_EXPERTS = 64 };

/* Everything a layer with a router reads and writes. */
typedef struct backward_case {
    routing_case c;
    smoe_backward_args args;
    float *logits;  /* (T, E) as the library sees them */
    float *x;       /* (T, d) likewise */
    float *dlogits; /* (T, E) read back */
    float *dwr;     /* (E, d) */
    float *dbr;     /* (E) */
    void *owned[24];
    int count;
} backward_case;

static void *own(backward_case *b, uint64_t bytes)
{
    assert_true(b->count < 24);
    return b->owned[b->count++] = poisoned(bytes);
}

/* Random values in storage of `type`; *values gets what they are in f32. */
static void *make_tensor(backward_case *b, int64_t count, smoe_type type, float scale, uint64_t *random,
                         float **values)
{
    float *wide = own(b, 4 * (uint64_t)count);
    uint16_t *narrow = type == SMOE_TYPE_BF16 ? own(b, 2 * (uint64_t)count) : NULL;
    for (int64_t i = 0; i < count; i++) {
        wide[i] = scale * draw_float(random);
        if (narrow) narrow[i] = bf16_of_float(wide[i]);
        if (narrow) wide[i] = float_of_bf16(narrow[i]);
    }
    if (values) *values = wide;
    return narrow ? (void *)narrow : wide;
}

static backward_case open_backward(smoe_layer layer, int threads)
{
    layer.hidden = HIDDEN;
    layer.intermediate = INTERMEDIATE;
    layer.gradient_type = SMOE_TYPE_F32;
    backward_case b = {.c = open_case(&layer, threads), .args = SMOE_BACKWARD_ARGS_INIT};
    const int64_t tokens = layer.tokens, experts = layer.experts;
    const int64_t w1 = experts * 2 * INTERMEDIATE * HIDDEN, w2 = experts * INTERMEDIATE * HIDDEN;
    const smoe_type type = layer.dtype;
    uint64_t random = 31;
    smoe_forward_args *f = &b.c.args;
    f->x = make_tensor(&b, tokens * HIDDEN, type, 1.0f, &random, &b.x);
    f->logits = make_tensor(&b, tokens * experts, layer.logits_type, 2.0f, &random, &b.logits);
    f->w1 = make_tensor(&b, w1, type, 0.5f, &random, NULL);
    f->w2 = make_tensor(&b, w2, type, 0.5f, &random, NULL);
    f->out = own(&b, 4 * (uint64_t)(tokens * HIDDEN));
    b.args.dout = make_tensor(&b, tokens * HIDDEN, type, 1.0f, &random, NULL);
    b.args.dx = own(&b, 4 * (uint64_t)(tokens * HIDDEN));
    b.args.dw1 = own(&b, 4 * (uint64_t)w1);
    b.args.dw2 = own(&b, 4 * (uint64_t)w2);
    b.args.dlogits = own(&b, 4 * (uint64_t)(tokens * experts));
    b.args.drow_weights = own(&b, 4 * (uint64_t)b.c.sizes.padded_rows);
    b.dlogits = calloc((size_t)(tokens * experts), sizeof(float));
    return b;
}

static void run_backward(backward_case *b)
{
    const smoe_layer *l = &b->c.layer;
    const smoe_forward_args *f = &b->c.args;
    smoe_backward_args *a = &b->args;
    if (smoe_layer_forward(b->c.context, l, f, NULL) != SMOE_OK)
        fail_msg("%s", smoe_last_error(b->c.context));
    assert_int_equal(smoe_view_plan(b->c.context, l, f, &b->c.plan), SMOE_OK);
    a->x = f->x;
    a->router_weight = f->router_weight;
    a->logits = f->logits;
    a->w1 = f->w1;
    a->w2 = f->w2;
    a->saved = f->saved;
    a->saved_size = f->saved_size;
    a->scratch_size = b->c.sizes.scratch_backward_bytes;
    a->scratch = poisoned(a->scratch_size);
    if (smoe_layer_backward(b->c.context, l, a, NULL) != SMOE_OK)
        fail_msg("%s", smoe_last_error(b->c.context));
    check_canary(a->scratch, a->scratch_size);
    free(a->scratch);
    const int64_t cells = l->tokens * l->experts;
    check_canary(a->dlogits, (uint64_t)cells * 4);
    for (int64_t i = 0; i < cells; i++)
        b->dlogits[i] = l->logits_type == SMOE_TYPE_BF16 ? float_of_bf16(((uint16_t *)a->dlogits)[i])
                                                         : ((float *)a->dlogits)[i];
}

static void close_backward(backward_case *b)
{
    for (int i = 0; i < b->count; i++) free(b->owned[i]);
    free(b->dlogits);
    close_case(&b->c);
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
    const smoe_plan_view *p = &b->c.plan;
    const int64_t topk = b->c.layer.topk;
    token_rows rows = {.topk = topk, .experts = b->c.layer.experts};
    for (int64_t k = 0; k < topk; k++) rows.ids[k] = p->topk_ids[t * topk + k];
    for (int64_t e = 0; e < rows.experts; e++) {
        const int64_t first = 64 * (int64_t)p->block_offsets[e];
        for (int64_t row = first; row < first + p->counts[e]; row++) {
            if (p->row_token[row] != t) continue;
            const double ds = (double)b->args.drow_weights[row];
            int64_t k = 0;
            while (k < topk && rows.ids[k] != e) k++;
            *(k < topk ? &rows.kept[k] : &rows.added[e]) = ds;
        }
    }
    return rows;
}

static double token_loss(const backward_case *b, const token_rows *rows, const double *l)
{
    const smoe_layer *layer = &b->c.layer;
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
        balance += (double)rows->experts * b->c.plan.topk_counts[e] / tokens * p[e] / tokens;
    return (double)layer->route_scale * weighted + (double)b->args.balance_coefficient * balance +
           (double)b->args.z_coefficient * log(sum) * log(sum) / tokens;
}

/* The relative Frobenius error of dlogits against central differences. */
static double dlogits_error(const backward_case *b)
{
    const int64_t experts = b->c.layer.experts;
    double error = 0.0, norm = 0.0;
    for (int64_t t = 0; t < b->c.layer.tokens; t++) {
        const token_rows rows = rows_of(b, t);
        double l[MAX_EXPERTS];
        for (int64_t e = 0; e < experts; e++) l[e] = (double)b->logits[t * experts + e];
        for (int64_t e = 0; e < experts; e++) {
            const double at = l[e], step = 1e-5;
            l[e] = at + step;
            const double up = token_loss(b, &rows, l);
            l[e] = at - step;
            const double want = (up - token_loss(b, &rows, l)) / (2 * step);
            l[e] = at;
            error += pow((double)b->dlogits[t * experts + e] - want, 2);
            norm += want * want;
        }
    }
    assert_true(norm > 0.0);
    return sqrt(error / norm);
}

static smoe_layer layer_with(smoe_score score, int renormalize, smoe_rounding rounding)
{
    smoe_layer layer = routing_layer(300, 6, 2);
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
                backward_case b = open_backward(
                    layer_with(functions[f].score, functions[f].renormalize, roundings[rounding]), 2);
                b.args.balance_coefficient = losses & 1 ? 30.0f : 0.0f; /* large, so that they are seen */
                b.args.z_coefficient = losses & 2 ? 20.0f : 0.0f;
                run_backward(&b);
                worst = fmax(worst, dlogits_error(&b));
                close_backward(&b);
            }
        }
    }
    print_message("dlogits: largest relative error %.3g\n", worst);
    assert_true(worst < 1e-6);
}

static void bf16_logits_round_once(void **state)
{
    (void)state;
    for (int f = 0; f < 5; f++) {
        smoe_layer layer = layer_with(functions[f].score, functions[f].renormalize, SMOE_ROUNDING_NR_F);
        layer.dtype = layer.logits_type = SMOE_TYPE_BF16;
        backward_case b = open_backward(layer, 2);
        run_backward(&b);
        assert_true(dlogits_error(&b) < 4e-3);
        close_backward(&b);
    }
}

/* A sparse score function leaves exact zeros outside the kept experts. */
static void sparse_is_sparse(void **state)
{
    (void)state;
    backward_case b = open_backward(layer_with(SMOE_SCORE_TOPK_SOFTMAX, 0, SMOE_ROUNDING_NONE), 1);
    run_backward(&b);
    for (int64_t t = 0; t < 300; t++) {
        int nonzero = 0;
        for (int64_t e = 0; e < 6; e++) nonzero += b.dlogits[t * 6 + e] != 0.0f;
        assert_true(nonzero <= 2);
    }
    close_backward(&b);
}

static void nan_stays_in_its_token(void **state)
{
    (void)state;
    for (int f = 0; f < 5; f++) {
        for (int losses = 0; losses < 2; losses++) {
            smoe_layer layer = layer_with(functions[f].score, functions[f].renormalize, SMOE_ROUNDING_NONE);
            backward_case b = open_backward(layer, 2);
            b.args.balance_coefficient = (float)losses;
            for (int64_t e = 0; e < 5; e++) b.logits[7 * 6 + e] = NAN; /* keeps one */
            b.logits[9 * 6 + 3] = NAN;                                 /* need not keep it */
            run_backward(&b);
            for (int64_t i = 0; i < 300 * 6; i++) assert_int_equal(isnan(b.dlogits[i]) != 0, i / 6 == 7);
            close_backward(&b);
        }
    }
}

/* ---- dWr, dbr ---- */

/* dWr (E, d) and dbr (E) in double from the reported dlogits (f32) and X. */
static void check_router_gradients(const backward_case *b, const float *dwr, const float *dbr, float before,
                                   double limit)
{
    const int64_t experts = b->c.layer.experts, tokens = b->c.layer.tokens;
    double error = 0.0, norm = 0.0;
    for (int64_t e = 0; e < experts; e++) {
        double bias = 0.0;
        for (int64_t t = 0; t < tokens; t++) bias += (double)b->dlogits[t * experts + e];
        assert_true(fabs((double)(dbr[e] - before) - bias) < 1e-5 * (1.0 + fabs(bias)));
        for (int64_t j = 0; j < HIDDEN; j++) {
            double want = 0.0;
            for (int64_t t = 0; t < tokens; t++)
                want += (double)b->dlogits[t * experts + e] * (double)b->x[t * HIDDEN + j];
            error += pow((double)(dwr[e * HIDDEN + j] - before) - want, 2);
            norm += want * want;
        }
    }
    assert_true(sqrt(error / norm) < limit);
}

static void give_router(backward_case *b)
{
    const smoe_layer *l = &b->c.layer;
    uint64_t random = 53;
    b->c.args.router_weight = make_tensor(b, l->experts * HIDDEN, l->dtype, 0.3f, &random, NULL);
    b->args.drouter_weight = b->dwr = own(b, 4 * (uint64_t)(l->experts * HIDDEN));
    b->args.drouter_bias = b->dbr = own(b, 4 * (uint64_t)l->experts);
}

static void router_gradients(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        smoe_layer layer = layer_with(SMOE_SCORE_SOFTMAX_TOPK, 0, SMOE_ROUNDING_NR_F);
        layer.tokens = 600;
        layer.dtype = i & 1 ? SMOE_TYPE_BF16 : SMOE_TYPE_F32;
        layer.accumulate = i >> 1;
        backward_case b = open_backward(layer, 2);
        give_router(&b);
        if (layer.accumulate) {
            for (int64_t j = 0; j < 6 * HIDDEN; j++) b.dwr[j] = 1.0f;
            for (int64_t j = 0; j < 6; j++) b.dbr[j] = 1.0f;
            memset(b.args.dw1, 0, 4 * 6 * 2 * INTERMEDIATE * HIDDEN);
            memset(b.args.dw2, 0, 4 * 6 * INTERMEDIATE * HIDDEN);
        }
        run_backward(&b);
        check_canary(b.dwr, 4 * 6 * HIDDEN);
        check_canary(b.dbr, 4 * 6);
        check_router_gradients(&b, b.dwr, b.dbr, layer.accumulate ? 1.0f : 0.0f, 5e-6);
        close_backward(&b);
    }
}

static void threads_do_not_matter(void **state)
{
    (void)state;
    for (int dtype = 0; dtype < 2; dtype++) {
        backward_case b[3];
        for (int i = 0; i < 3; i++) {
            smoe_layer layer = layer_with(SMOE_SCORE_SOFTMAX_TOPK, 0, SMOE_ROUNDING_NR_F);
            layer.tokens = 900;
            layer.dtype = dtype ? SMOE_TYPE_BF16 : SMOE_TYPE_F32;
            b[i] = open_backward(layer, i + 1);
            give_router(&b[i]);
            b[i].args.balance_coefficient = 0.5f;
            run_backward(&b[i]);
            assert_memory_equal(b[0].dlogits, b[i].dlogits, 4 * 900 * 6);
            assert_memory_equal(b[0].dwr, b[i].dwr, 4 * 6 * HIDDEN);
            assert_memory_equal(b[0].dbr, b[i].dbr, 4 * 6);
        }
        for (int i = 0; i < 3; i++) close_backward(&b[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_match_differences),
        cmocka_unit_test(bf16_logits_round_once),
        cmocka_unit_test(sparse_is_sparse),
        cmocka_unit_test(nan_stays_in_its_token),
        cmocka_unit_test(router_gradients),
        cmocka_unit_test(threads_do_not_matter),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
