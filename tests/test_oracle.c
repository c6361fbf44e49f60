/* Tests of the oracle: storage types are compared with known values, tiny layers with values worked out by
 * hand, and every gradient with finite differences of the oracle's own forward, in fp64. */
#include "oracle/compare.h"
#include "oracle/draw.h"
#include "oracle/number.h"

#include "src/activations.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static void assert_close(double got, double want, double limit)
{
    if (!(fabs(got - want) <= limit)) fail_msg("got %.17g, want %.17g within %g", got, want, limit);
}

/* ---- Numbers ---- */

static uint64_t bits_of(double value, smoe_type type)
{
    uint64_t bits = 0;
    oracle_store(&bits, type, &value, 1); /* little endian */
    return bits;
}

static void known_values_have_known_bits(void **state)
{
    (void)state;
    assert_int_equal(bits_of(1.0, SMOE_TYPE_BF16), 0x3f80);
    assert_int_equal(bits_of(-2.5, SMOE_TYPE_BF16), 0xc020);
    assert_int_equal(bits_of(1.0 + 0x1p-8, SMOE_TYPE_BF16), 0x3f80);           /* a tie goes to even */
    assert_int_equal(bits_of(1.0 + 0x3p-8, SMOE_TYPE_BF16), 0x3f82);           /* this tie goes up */
    assert_int_equal(bits_of(1.0 + 0x1p-8 + 0x1p-30, SMOE_TYPE_BF16), 0x3f81); /* past the tie */
    assert_int_equal(bits_of(65504.0, SMOE_TYPE_F16), 0x7bff);
    assert_int_equal(bits_of(65519.9, SMOE_TYPE_F16), 0x7bff);
    assert_int_equal(bits_of(65520.0, SMOE_TYPE_F16), 0x7c00);
    assert_true(isinf(oracle_round_to(65520.0, SMOE_TYPE_F16)));
    assert_int_equal(bits_of(0x1p-24, SMOE_TYPE_F16), 0x0001);
    assert_int_equal(bits_of(0x1p-25, SMOE_TYPE_F16), 0x0000);
    assert_int_equal(bits_of(0x3p-25, SMOE_TYPE_F16), 0x0002);
    assert_int_equal(bits_of(-0.0, SMOE_TYPE_F16), 0x8000);
    assert_int_equal(bits_of(NAN, SMOE_TYPE_BF16) & 0x7fff, 0x7fc0);
    assert_int_equal(bits_of(-INFINITY, SMOE_TYPE_BF16), 0xff80);
}

static void f32_is_the_compilers(void **state)
{
    (void)state;
    oracle_random random = {1};
    for (int i = 0; i < 100000; i++) {
        const double value =
            oracle_random_normal(&random) * ldexp(1.0, (int)oracle_random_integer(&random, -150, 128));
        const float cast = (float)value;
        uint32_t bits;
        memcpy(&bits, &cast, sizeof bits);
        assert_int_equal(bits_of(value, SMOE_TYPE_F32), bits);
        assert_true(oracle_round_to(value, SMOE_TYPE_F32) == (double)cast);
    }
}

static void every_16_bit_value_survives(void **state)
{
    (void)state;
    const smoe_type types[] = {SMOE_TYPE_BF16, SMOE_TYPE_F16};
    for (size_t i = 0; i < COUNT(types); i++) {
        for (unsigned bits = 0; bits < 65536; bits++) {
            const uint16_t stored = (uint16_t)bits;
            double value;
            oracle_load(&value, types[i], &stored, 1);
            if (!isnan(value)) assert_int_equal(bits_of(value, types[i]), stored);
        }
    }
}

static void errors_are_seen(void **state)
{
    (void)state;
    const double want[] = {3.0, 4.0}, off[] = {3.0, 4.5}, broken[] = {3.0, NAN}, zero[] = {0.0, 0.0};
    assert_close(oracle_relative_error(off, want, 2), 0.1, 1e-15);
    assert_true(isinf(oracle_relative_error(broken, want, 2)));
    assert_true(isinf(oracle_relative_error(want, broken, 2)));
    assert_true(isinf(oracle_relative_error(want, zero, 2)));
    assert_true(oracle_relative_error(broken, broken, 2) == 0.0);
    assert_int_equal(oracle_differing(off, want, 2), 1);
    assert_int_equal(oracle_differing(broken, want, 2), 1);
    assert_int_equal(oracle_differing(broken, broken, 2), 0);
}

/* ---- By hand ---- */

static smoe_layer make_layer(int64_t tokens, int64_t hidden, int64_t intermediate, int64_t experts,
                             int64_t topk)
{
    smoe_layer layer = SMOE_LAYER_INIT;
    layer.tokens = tokens;
    layer.hidden = hidden;
    layer.intermediate = intermediate;
    layer.experts = experts;
    layer.topk = topk;
    layer.dtype = SMOE_TYPE_F32;
    return layer;
}

/* x = 2, h = 3 x + 1 = 7, y = 0.5 h + 0.25 = 3.75, the only weight is 1; dO = 2. */
static void one_relu_is_right_by_hand(void **state)
{
    (void)state;
    smoe_layer layer = make_layer(1, 1, 1, 1, 1);
    layer.activation = SMOE_ACTIVATION_RELU;
    const double x = 2, w1 = 3, b1 = 1, w2 = 0.5, b2 = 0.25, logit = 0.3, dout = 2;
    const oracle_input input = {
        .x = &x, .logits = &logit, .w1 = &w1, .b1 = &b1, .w2 = &w2, .b2 = &b2, .dout = &dout};
    oracle_forward f;
    oracle_backward b;
    oracle_forward_run(&layer, &input, &f);
    oracle_backward_run(&layer, &input, &f, true, &b);
    assert_close(f.h[0], 7, 1e-15);
    assert_close(f.out[0], 3.75, 1e-15);
    assert_close(f.losses[0], 1.0, 1e-15);
    assert_close(f.losses[1], 0.09, 1e-15);
    assert_close(b.ds[0], 7.5, 1e-15);
    assert_close(b.dw2[0], 14, 1e-15);
    assert_close(b.db2[0], 2, 1e-15);
    assert_close(b.dw1[0], 2, 1e-15);
    assert_close(b.db1[0], 1, 1e-15);
    assert_close(b.dx[0], 3, 1e-15);
    assert_close(b.dlogits[0], 0, 1e-15);
    oracle_backward_free(&b);
    oracle_forward_free(&f);
}

/* x = 1 and rows 1, 2, 3, 4 of W1. H has the gate columns first with both layouts of W1. The output is
 * max(g, 0) u times W2 = (1, 10). */
static void layouts_are_right_by_hand(void **state)
{
    (void)state;
    const double x = 1, w1[] = {1, 2, 3, 4}, w2[] = {1, 10}, logit = 0;
    const double h[2][4] = {{1, 2, 3, 4}, {1, 3, 2, 4}}, out[] = {3 + 80, 2 + 120};
    for (int layout = 0; layout < 2; layout++) {
        smoe_layer layer = make_layer(1, 1, 2, 1, 1);
        layer.activation = SMOE_ACTIVATION_REGLU;
        layer.layout = (smoe_layout)layout;
        const oracle_input input = {.x = &x, .logits = &logit, .w1 = w1, .w2 = w2};
        oracle_forward f;
        oracle_forward_run(&layer, &input, &f);
        assert_memory_equal(f.h, h[layout], sizeof h[layout]);
        assert_close(f.out[0], out[layout], 1e-15);
        oracle_forward_free(&f);
    }
}

/* Weights of one token with logits 0, ln 2, ln 3, ln 4: p = 0.1, 0.2, 0.3, 0.4. */
static void scores_are_right_by_hand(void **state)
{
    (void)state;
    const double logits[] = {0.0, log(2.0), log(3.0), log(4.0)};
    const struct {
        smoe_score score;
        int renormalize;
        double first, second;
    } cases[] = {
        {SMOE_SCORE_SOFTMAX_TOPK, 0, 0.4, 0.3},           {SMOE_SCORE_SOFTMAX_TOPK, 1, 4.0 / 7, 3.0 / 7},
        {SMOE_SCORE_TOPK_SOFTMAX, 0, 4.0 / 7, 3.0 / 7},   {SMOE_SCORE_SIGMOID, 0, 0.8, 0.75},
        {SMOE_SCORE_SIGMOID, 1, 0.8 / 1.55, 0.75 / 1.55},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        smoe_layer layer = make_layer(1, 1, 1, 4, 2);
        layer.score = cases[i].score;
        layer.renormalize = cases[i].renormalize;
        layer.route_scale = 2.5f;
        oracle_forward f = {0};
        const oracle_input input = {.logits = logits};
        oracle_logits(&layer, &input, &f);
        oracle_route(&layer, &input, &f);
        assert_int_equal(f.topk_ids[0], 3);
        assert_int_equal(f.topk_ids[1], 2);
        assert_close(f.topk_weights[0], 2.5 * cases[i].first, 1e-15);
        assert_close(f.topk_weights[1], 2.5 * cases[i].second, 1e-15);
        assert_close(f.losses[0], 4 * (0.3 + 0.4), 1e-15);
        assert_close(f.losses[1], log(10.0) * log(10.0), 1e-14);
        oracle_forward_free(&f);
    }
}

/* Groups {0, 1}, {2, 3}, {4, 5}, of which one is kept. The middle group has the largest sum of two scores,
 * although expert 0 has the best score of all. The bias puts expert 3 before expert 2 and does not change the
 * weights. */
static void groups_and_biases_choose_experts(void **state)
{
    (void)state;
    const double sigma[] = {0.9, 0.1, 0.7, 0.6, 0.5, 0.5}, bias[] = {0, 0, 0, 0.15, 0, 0};
    double logits[6];
    for (int e = 0; e < 6; e++) logits[e] = log(sigma[e] / (1 - sigma[e]));
    smoe_layer layer = make_layer(1, 1, 1, 6, 2);
    layer.score = SMOE_SCORE_SIGMOID;
    layer.groups = 3;
    layer.groups_kept = 1;
    oracle_forward f = {0};
    const oracle_input input = {.logits = logits, .selection_bias = bias};
    oracle_logits(&layer, &input, &f);
    oracle_route(&layer, &input, &f);
    assert_int_equal(f.topk_ids[0], 3);
    assert_int_equal(f.topk_ids[1], 2);
    assert_close(f.topk_weights[0], 0.6, 1e-15);
    assert_close(f.topk_weights[1], 0.7, 1e-15);
    oracle_forward_free(&f);
}

/* All groups tie: the lowest are kept. */
static void tied_groups_keep_the_lowest(void **state)
{
    (void)state;
    const double logits[6] = {0};
    smoe_layer layer = make_layer(1, 1, 1, 6, 2);
    layer.score = SMOE_SCORE_SIGMOID;
    layer.groups = 3;
    layer.groups_kept = 1;
    oracle_forward f = {0};
    const oracle_input input = {.logits = logits};
    oracle_logits(&layer, &input, &f);
    oracle_route(&layer, &input, &f);
    assert_int_equal(f.topk_ids[0], 0);
    assert_int_equal(f.topk_ids[1], 1);
    oracle_forward_free(&f);
}

static void ties_and_nan_are_ordered(void **state)
{
    (void)state;
    const double logits[] = {1, 1, 1, NAN, 2, -INFINITY, NAN, NAN, NAN};
    smoe_layer layer = make_layer(3, 1, 1, 3, 2);
    oracle_forward f = {0};
    const oracle_input input = {.logits = logits};
    oracle_logits(&layer, &input, &f);
    oracle_route(&layer, &input, &f);
    const int64_t want[] = {0, 1, 1, 2, 0, 1};
    for (int i = 0; i < 6; i++) assert_int_equal(f.topk_ids[i], want[i]);
    assert_close(f.topk_weights[2], 1, 0); /* -inf ranks before NaN */
    assert_close(f.topk_weights[3], 0, 0);
    assert_true(isnan(f.topk_weights[4]) && isnan(f.topk_weights[5]));
    oracle_forward_free(&f);
}

static int64_t rounded(smoe_rounding rule, int64_t c, int64_t residual, double added, double dropped)
{
    smoe_layer layer = make_layer(100, 1, 1, 1, 1);
    layer.rounding = rule;
    layer.tile = 8;
    const oracle_round_facts facts = {.residual = residual, .added = added, .dropped = dropped};
    return oracle_round_count(&layer, c, &facts);
}

static void rounded_counts_are_multiples(void **state)
{
    (void)state;
    assert_int_equal(rounded(SMOE_ROUNDING_NONE, 13, 0, 0, 0), 13);
    assert_int_equal(rounded(SMOE_ROUNDING_NR_F, 12, 0, 0, 0), 8); /* a tie goes down */
    assert_int_equal(rounded(SMOE_ROUNDING_NR_F, 13, 0, 0, 0), 16);
    assert_int_equal(rounded(SMOE_ROUNDING_NR_F, 16, 0, 0, 0), 16);
    assert_int_equal(rounded(SMOE_ROUNDING_NR_F, 0, 0, 0, 0), 0);
    assert_int_equal(rounded(SMOE_ROUNDING_UP, 1, 0, 0, 0), 8);
    assert_int_equal(rounded(SMOE_ROUNDING_UP, 97, 0, 0, 0), 96); /* 104 is past T */
    assert_int_equal(rounded(SMOE_ROUNDING_DOWN, 15, 0, 0, 0), 8);
    assert_int_equal(rounded(SMOE_ROUNDING_NR_S, 9, 0, 1.0, 1.5), 16);
    assert_int_equal(rounded(SMOE_ROUNDING_NR_S, 9, 0, 1.5, 1.5), 8);
    assert_int_equal(rounded(SMOE_ROUNDING_BALANCE_F, 11, 1, 0, 0), 8);
    assert_int_equal(rounded(SMOE_ROUNDING_BALANCE_F, 11, 2, 0, 0), 16);
    assert_int_equal(rounded(SMOE_ROUNDING_BALANCE_F, 15, -4, 0, 0), 8);
}

/* The first words of Random123's known answers for Philox4x32-10 (kat_vectors). With M = 2^20 the decision
 * u < (c - lo) / M is tested just below and just above the expected u. */
static void stochastic_rounding_draws_philox(void **state)
{
    (void)state;
    const struct {
        uint64_t seed, step, expert;
        uint32_t first;
    } known[] = {
        {0, 0, 0, 0x6627e8d5u},
        {UINT64_MAX, UINT64_MAX, UINT64_MAX, 0x408f276du},
        {0x299f31d0a4093822u, 0x85a308d3243f6a88u, 0x0370734413198a2eu, 0xd16cfe09u},
    };
    for (size_t i = 0; i < COUNT(known); i++) {
        smoe_layer layer = make_layer(1 << 22, 1, 1, 1, 1);
        layer.rounding = SMOE_ROUNDING_SR_F;
        layer.tile = 1 << 20;
        layer.seed = known[i].seed;
        const oracle_round_facts facts = {.step = known[i].step, .expert = known[i].expert};
        const int64_t below = known[i].first >> 12;
        assert_int_equal(oracle_round_count(&layer, below, &facts), 0);
        assert_int_equal(oracle_round_count(&layer, below + 1, &facts), 1 << 20);
    }
}

/* Two experts, four tokens, tile 2. Expert 0 has tokens 0, 1, 2 (p 0.9, 0.6, 0.7), expert 1 token 3 (0.8).
 * DOWN drops token 1 of expert 0 and token 3 of expert 1; UP adds token 3 (0.2) and token 1 (0.4). */
static void rounding_picks_by_rank(void **state)
{
    (void)state;
    const double p[] = {0.9, 0.1, 0.6, 0.4, 0.7, 0.3, 0.2, 0.8};
    double logits[8];
    for (int i = 0; i < 8; i++) logits[i] = log(p[i]);
    smoe_layer layer = make_layer(4, 1, 1, 2, 1);
    layer.tile = 2;
    layer.route_scale = 2.0f;
    const struct {
        smoe_rounding rule;
        unsigned char pair[8];
    } cases[] = {
        {SMOE_ROUNDING_DOWN, {1, 0, 0, 0, 1, 0, 0, 0}},
        {SMOE_ROUNDING_UP, {1, 0, 1, 2, 1, 0, 2, 1}},
        /* added 0.2 against dropped 0.6: up; 0.4 against 0.8: up */
        {SMOE_ROUNDING_NR_S, {1, 0, 1, 2, 1, 0, 2, 1}},
        /* 3 - 2 = M/2 goes down, residual 1; 1 + 1 - 0 > 1 goes up */
        {SMOE_ROUNDING_BALANCE_F, {1, 0, 0, 2, 1, 0, 0, 1}},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        layer.rounding = cases[i].rule;
        oracle_forward f = {0};
        const oracle_input input = {.logits = logits};
        oracle_logits(&layer, &input, &f);
        oracle_route(&layer, &input, &f);
        oracle_round(&layer, &input, &f);
        assert_memory_equal(f.pair, cases[i].pair, 8);
        for (int k = 0; k < 8; k++) assert_close(f.pair_weight[k], f.pair[k] ? 2 * p[k] : 0, 1e-15);
        oracle_forward_free(&f);
    }
}

/* Expert 0 has only token 0 (0.4) and could add token 1 (0.45). Adding would change the sum of scores by more
 * than dropping. */
static void nearest_by_score_goes_down(void **state)
{
    (void)state;
    const double p[] = {0.4, 0.3, 0.3, 0.45, 0.5, 0.05};
    double logits[6];
    for (int i = 0; i < 6; i++) logits[i] = log(p[i]);
    smoe_layer layer = make_layer(2, 1, 1, 3, 1);
    layer.tile = 2;
    layer.rounding = SMOE_ROUNDING_NR_S;
    oracle_forward f = {0};
    const oracle_input input = {.logits = logits};
    oracle_logits(&layer, &input, &f);
    oracle_route(&layer, &input, &f);
    oracle_round(&layer, &input, &f);
    assert_int_equal(f.pair[0], ORACLE_OUT);
    assert_int_equal(f.pair[3], ORACLE_OUT);
    assert_int_equal(f.pair[1], ORACLE_ADDED); /* 0.3 against 0.5 */
    assert_int_equal(f.pair[4], ORACLE_KEPT);
    oracle_forward_free(&f);
}

static void a_plan_is_right_by_hand(void **state)
{
    (void)state;
    smoe_layer layer = make_layer(3, 1, 1, 3, 2);
    layer.entry = SMOE_ENTRY_FROM_TOPK;
    const int64_t ids[] = {2, 0, 2, 2, 3, -1}; /* a repeated id, and two out of range */
    const double weights[] = {1, 2, 3, 4, 5, 6}, zeros[8] = {0};
    const oracle_input input = {
        .x = zeros, .topk_ids = ids, .topk_weights = weights, .w1 = zeros, .w2 = zeros};
    oracle_forward f;
    oracle_forward_run(&layer, &input, &f);
    const int64_t counts[] = {1, 0, 2}, blocks[] = {0, 1, 1, 2}, order[] = {2, 0, 1}, token[] = {0, 0, 1};
    const int64_t padded[] = {0, 64, 65}, token_offsets[] = {0, 2, 3, 3}, token_rows[] = {0, 64, 65};
    const double s[] = {2, 1, 3};
    assert_int_equal(f.rows, 3);
    assert_memory_equal(f.counts, counts, sizeof counts);
    assert_memory_equal(f.block_offsets, blocks, sizeof blocks);
    assert_memory_equal(f.order, order, sizeof order);
    assert_memory_equal(f.row_token, token, sizeof token);
    assert_memory_equal(f.row_padded, padded, sizeof padded);
    assert_memory_equal(f.row_weight, s, sizeof s);
    assert_memory_equal(f.token_offsets, token_offsets, sizeof token_offsets);
    assert_memory_equal(f.token_rows, token_rows, sizeof token_rows);
    oracle_forward_free(&f);
}

/* ---- Finite differences ---- */

typedef struct objective {
    smoe_layer layer;
    oracle_drawn drawn;
    oracle_forward base; /* the routing, which must not change between the points */
} objective;

/* <dO, O> + balance losses[0] + z losses[1] */
static double evaluate(const objective *o)
{
    const oracle_input *input = &o->drawn.input;
    oracle_forward f;
    oracle_forward_run(&o->layer, input, &f);
    assert_int_equal(f.rows, o->base.rows);
    assert_memory_equal(f.row_token, o->base.row_token, (size_t)f.rows * sizeof(int64_t));
    double sum = input->balance_coefficient * f.losses[0] + input->z_coefficient * f.losses[1];
    for (int64_t i = 0; i < o->layer.tokens * o->layer.hidden; i++) sum += input->dout[i] * f.out[i];
    oracle_forward_free(&f);
    return sum;
}

/* Compares a gradient with central differences along random directions. The objective reads `values`. */
static void check_gradient(const objective *o, const char *name, double *values, const double *gradient,
                           int64_t count)
{
    oracle_random random = {42};
    const double step = 1e-5;
    double *direction = oracle_alloc((size_t)count, sizeof *direction);
    double *kept = oracle_alloc((size_t)count, sizeof *kept);
    memcpy(kept, values, (size_t)count * sizeof *kept);
    for (int trial = 0; trial < 3; trial++) {
        double along = 0.0, norm = 0.0, sides[2];
        for (int64_t i = 0; i < count; i++) {
            direction[i] = oracle_random_normal(&random);
            along += gradient[i] * direction[i];
            norm += gradient[i] * gradient[i];
        }
        for (int side = 0; side < 2; side++) {
            for (int64_t i = 0; i < count; i++) values[i] = kept[i] + (side ? step : -step) * direction[i];
            sides[side] = evaluate(o);
        }
        memcpy(values, kept, (size_t)count * sizeof *kept);
        const double measured = (sides[1] - sides[0]) / (2 * step);
        if (!(norm > 0.0) || !(fabs(measured - along) <= 2e-7 * sqrt(norm)))
            fail_msg("%s (score %d, renormalize %d, rounding %d, activation %d, layout %d, entry %d): along "
                     "a direction "
                     "%.12g, measured %.12g, norm %.3g",
                     name, (int)o->layer.score, o->layer.renormalize, (int)o->layer.rounding,
                     (int)o->layer.activation, (int)o->layer.layout, (int)o->layer.entry, along, measured,
                     sqrt(norm));
    }
    free(direction);
    free(kept);
}

static void check_all_gradients(const smoe_layer *layer, const oracle_draw *draw, uint64_t seed)
{
    objective o = {.layer = *layer};
    oracle_draw_inputs(layer, draw, seed, &o.drawn);
    oracle_forward_run(layer, &o.drawn.input, &o.base);
    oracle_backward b;
    oracle_backward_run(layer, &o.drawn.input, &o.base, true, &b);
    const int64_t experts = layer->experts, width = oracle_h_width(layer), pairs = layer->tokens * experts;
    const struct {
        const char *name;
        double *values;
        const double *gradient;
        int64_t count;
    } tensors[] = {
        {"dx", o.drawn.x, b.dx, layer->tokens * layer->hidden},
        {"dw1", o.drawn.w1, b.dw1, experts * width * layer->hidden},
        {"db1", o.drawn.b1, b.db1, experts * width},
        {"dw2", o.drawn.w2, b.dw2, experts * layer->hidden * layer->intermediate},
        {"db2", o.drawn.b2, b.db2, experts * layer->hidden},
        {"drouter_weight", o.drawn.router_weight, b.drouter_weight, experts * layer->hidden},
        {"drouter_bias", o.drawn.router_bias, b.drouter_bias, experts},
        {"dlogits", o.drawn.logits, b.dlogits, pairs},
        {"dtopk_weights", o.drawn.topk_weights, b.dtopk_weights, layer->tokens * layer->topk},
        {"drow_weights", o.drawn.row_weights, b.drow_weights, layer->tokens},
    };
    for (size_t i = 0; i < COUNT(tensors); i++)
        if (tensors[i].values)
            check_gradient(&o, tensors[i].name, tensors[i].values, tensors[i].gradient, tensors[i].count);
    oracle_backward_free(&b);
    oracle_forward_free(&o.base);
    oracle_drawn_free(&o.drawn);
}

/* With the router's weight the gradient of x has the router's term. With given logits dlogits is tested. */
static void every_score_and_rounding_has_its_gradients(void **state)
{
    (void)state;
    for (int score = SMOE_SCORE_SOFTMAX_TOPK; score <= SMOE_SCORE_SIGMOID; score++) {
        for (int rounding = SMOE_ROUNDING_NONE; rounding <= SMOE_ROUNDING_DOWN; rounding++) {
            for (int variant = 0; variant < 4; variant++) {
                smoe_layer layer = make_layer(13, 6, 4, 8, 3);
                layer.score = (smoe_score)score;
                layer.renormalize = variant & 1;
                layer.rounding = (smoe_rounding)rounding;
                layer.tile = 4;
                layer.seed = 7;
                layer.route_scale = 1.5f;
                if (score == SMOE_SCORE_SIGMOID && variant >= 2) {
                    layer.groups = 4;
                    layer.groups_kept = 2;
                }
                const oracle_draw draw = {.router = variant < 2,
                                          .router_bias = true,
                                          .selection_bias = score == SMOE_SCORE_SIGMOID,
                                          .b1 = true,
                                          .b2 = true,
                                          .balance_coefficient = variant == 1 ? 0.0 : 0.3,
                                          .z_coefficient = variant == 2 ? 0.0 : 0.2,
                                          .masked = variant % 3 ? 0 : 3};
                check_all_gradients(&layer, &draw, (uint64_t)(100 * score + 10 * rounding + variant));
            }
        }
    }
}

static void every_activation_and_entry_has_its_gradients(void **state)
{
    (void)state;
#define VALUE(enumerator, name, shape, curve) enumerator,
    const smoe_activation activations[] = {MOE_ACTIVATIONS(VALUE)};
#undef VALUE
    for (size_t a = 0; a < COUNT(activations); a++) {
        for (int layout = 0; layout < 2; layout++) {
            for (int entry = SMOE_ENTRY_FROM_LOGITS; entry <= SMOE_ENTRY_FROM_ROWS; entry++) {
                smoe_layer layer = make_layer(11, 6, 5, 4, entry == SMOE_ENTRY_FROM_ROWS ? 1 : 2);
                layer.activation = activations[a];
                layer.layout = (smoe_layout)layout;
                layer.entry = (smoe_entry)entry;
                const oracle_draw draw = {
                    .b1 = true, .b2 = true, .row_weights = true, .broken_ids = layout == 1};
                check_all_gradients(&layer, &draw, 1000 + 10 * a + (uint64_t)entry);
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_values_have_known_bits),
        cmocka_unit_test(f32_is_the_compilers),
        cmocka_unit_test(every_16_bit_value_survives),
        cmocka_unit_test(errors_are_seen),
        cmocka_unit_test(one_relu_is_right_by_hand),
        cmocka_unit_test(layouts_are_right_by_hand),
        cmocka_unit_test(tied_groups_keep_the_lowest),
        cmocka_unit_test(nearest_by_score_goes_down),
        cmocka_unit_test(scores_are_right_by_hand),
        cmocka_unit_test(groups_and_biases_choose_experts),
        cmocka_unit_test(ties_and_nan_are_ordered),
        cmocka_unit_test(rounded_counts_are_multiples),
        cmocka_unit_test(stochastic_rounding_draws_philox),
        cmocka_unit_test(rounding_picks_by_rank),
        cmocka_unit_test(a_plan_is_right_by_hand),
        cmocka_unit_test(every_score_and_rounding_has_its_gradients),
        cmocka_unit_test(every_activation_and_entry_has_its_gradients),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
