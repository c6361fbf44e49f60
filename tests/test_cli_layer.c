/* Compares forward and backward of the whole layer on the CPU with the oracle: every activation with every
 * layout, score, rounding rule, storage type and entry. run_library poisons outputs, saved and scratch before
 * the forward. Before the backward it poisons everything but X, the weights, the logits and saved. All
 * buffers lie between canaries. */
#include "harness/check.h"

#include "src/activations.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

#define VALUE(enumerator, name, shape, curve) enumerator,
static const smoe_activation activations[] = {MOE_ACTIVATIONS(VALUE)};
#undef VALUE

static const struct {
    smoe_score score;
    int32_t renormalize, groups, groups_kept;
} scores[] = {
    {SMOE_SCORE_SOFTMAX_TOPK, 0, 1, 1}, {SMOE_SCORE_SOFTMAX_TOPK, 1, 1, 1},
    {SMOE_SCORE_TOPK_SOFTMAX, 0, 1, 1}, {SMOE_SCORE_SIGMOID, 0, 1, 1},
    {SMOE_SCORE_SIGMOID, 1, 3, 2},
};

static int setup(void **state)
{
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.threads = 2;
    smoe_context *context;
    if (smoe_create(&context, &options) != SMOE_OK) return -1;
    *state = context;
    return 0;
}

static int teardown(void **state)
{
    smoe_destroy(*state);
    return 0;
}

static smoe_layer small_layer(void)
{
    smoe_layer layer = SMOE_LAYER_INIT;
    layer.tokens = 37;
    layer.hidden = 24;
    layer.intermediate = 8;
    layer.experts = 6;
    layer.topk = 2;
    layer.tile = 8;
    layer.seed = 5;
    layer.route_scale = 1.25f;
    return layer;
}

static void describe(const smoe_layer *l, char text[256])
{
    snprintf(text, 256, "dtype %d, activation %d, layout %d, entry %d, score %d, renormalize %d, rounding %d",
             (int)l->dtype, (int)l->activation, (int)l->layout, (int)l->entry, (int)l->score,
             (int)l->renormalize, (int)l->rounding);
}

static void run_or_fail(smoe_context *context, const smoe_layer *layer, const oracle_drawn *drawn,
                        const run_options *options, tensors *got)
{
    char text[RUN_TEXT] = "", what[256];
    if (run_library(device_find("cpu"), context, layer, drawn, options, got, text) == RUN_OK) return;
    describe(layer, what);
    fail_msg("%s: %s", what, text);
}

static void assert_ok(void *user, tensor_id id, const verdict *judged)
{
    char what[256];
    if (judged->ok) return;
    describe(user, what);
    fail_msg("%s: %s is off by %g, the limit is %g", what, tensor_names[id], judged->error, judged->limit);
}

/* For bf16 the largest allowed error (check_cap) is doubled: in shapes this small a tensor may be the sum of
 * a few terms, so rounding errors of storage do not average out. The other limit, 1.5 times the error that
 * storage makes, is unchanged. */
static void check(smoe_context *context, const smoe_layer *layer, const oracle_draw *draw, uint64_t seed)
{
    const check_options options = {.run.backwards = layer->accumulate ? 2 : 1,
                                   .looser = check_cap(layer) > 1e-3 ? 2.0 : 1.0,
                                   .seed = seed};
    smoe_layer described = *layer;
    char text[RUN_TEXT] = "", what[256];
    if (check_layer(device_find("cpu"), context, layer, draw, &options, assert_ok, &described, text) ==
        RUN_OK)
        return;
    describe(layer, what);
    fail_msg("%s: %s", what, text);
}

/* Checks every STRIDE-th pair of score and rounding rule. Each activation and layout begins at another pair,
 * so that every combination of two choices is checked. */
static void check_scores(smoe_context *context, smoe_layer layer, uint64_t *seed)
{
    enum { STRIDE = 4 };
    for (size_t s = 0; s < COUNT(scores); s++) {
        for (int rounding = SMOE_ROUNDING_NONE; rounding <= SMOE_ROUNDING_DOWN; rounding++) {
            if (++*seed % STRIDE) continue;
            layer.score = scores[s].score;
            layer.renormalize = scores[s].renormalize;
            layer.groups = scores[s].groups;
            layer.groups_kept = scores[s].groups_kept;
            layer.rounding = (smoe_rounding)rounding;
            const uint64_t turn = *seed / STRIDE;
            layer.logits_type = turn % 3 == 0 ? SMOE_TYPE_BF16 : SMOE_TYPE_F32;
            const bool losses = turn % 2;
            const oracle_draw draw = {.router = turn % 4 != 0,
                                      .router_bias = turn % 5 != 0,
                                      .selection_bias = layer.score == SMOE_SCORE_SIGMOID,
                                      .b1 = turn % 3 != 1,
                                      .b2 = turn % 3 != 2,
                                      .balance_coefficient = losses ? 0.25 : 0.0,
                                      .z_coefficient = losses ? 0.125 : 0.0,
                                      .step = *seed};
            check(context, &layer, &draw, *seed);
        }
    }
}

static void every_combination(smoe_context *context, smoe_type dtype)
{
    uint64_t seed = 1;
    for (size_t a = 0; a < COUNT(activations); a++) {
        for (int layout = 0; layout < 2; layout++) {
            smoe_layer layer = small_layer();
            layer.dtype = dtype;
            layer.activation = activations[a];
            layer.layout = (smoe_layout)layout;
            check_scores(context, layer, &seed);
        }
    }
}

static void test_every_combination_f32(void **state)
{
    every_combination(*state, SMOE_TYPE_F32);
}

static void test_every_combination_bf16(void **state)
{
    every_combination(*state, SMOE_TYPE_BF16);
}

static void test_given_routing(void **state)
{
    for (size_t a = 0; a < COUNT(activations); a++) {
        for (unsigned bits = 0; bits < 32; bits++) {
            smoe_layer layer = small_layer();
            layer.route_scale = 1.0f;
            layer.activation = activations[a];
            layer.layout = bits & 1 ? SMOE_LAYOUT_INTERLEAVED : SMOE_LAYOUT_CONCATENATED;
            layer.dtype = bits & 2 ? SMOE_TYPE_BF16 : SMOE_TYPE_F32;
            layer.entry = bits & 4 ? SMOE_ENTRY_FROM_ROWS : SMOE_ENTRY_FROM_TOPK;
            layer.topk = bits & 4 ? 1 : 3;
            layer.index_type = bits & 8 ? SMOE_TYPE_I64 : SMOE_TYPE_I32;
            layer.accumulate = bits >> 4 & 1;
            layer.gradient_type = bits & 16 ? layer.dtype : SMOE_TYPE_F32;
            if (layer.accumulate) layer.gradient_type = SMOE_TYPE_F32;
            const oracle_draw draw = {
                .b1 = true, .b2 = true, .row_weights = bits & 8, .broken_ids = bits >> 4 & 1};
            check(*state, &layer, &draw, 100 * a + bits);
        }
    }
}

static void test_the_same_bits_again(void **state)
{
    for (int rounding = SMOE_ROUNDING_NONE; rounding <= SMOE_ROUNDING_DOWN; rounding++) {
        smoe_layer layer = small_layer();
        layer.tokens = 300;
        layer.rounding = (smoe_rounding)rounding;
        const oracle_draw draw = {.router = true, .b1 = true, .b2 = true, .z_coefficient = 0.5};
        const run_options options = {0};
        oracle_drawn drawn;
        tensors first, again;
        oracle_draw_inputs(&layer, &draw, 9, &drawn);
        run_or_fail(*state, &layer, &drawn, &options, &first);
        for (int repeat = 0; repeat < 5; repeat++) {
            run_or_fail(*state, &layer, &drawn, &options, &again);
            for (int i = 0; i < TENSORS; i++)
                assert_int_equal(tensor_differing_bits(&first.at[i], &again.at[i]), 0);
            tensors_free(&again);
        }
        tensors_free(&first);
        oracle_drawn_free(&drawn);
    }
}

/* The sizes that smoe_query_sizes states, worked out by hand. T = 100, d = 64, n = 32, E = 8, K = 2, so
 * R = 200. The plan has 3 R numbers for the rows, T + 1 for the tokens, E counts, E numbers of the order, and
 * two arrays of E + 1 offsets; from logits 2 T K + E more. Each number has 4 bytes. */
static void test_saved_bytes(void **state)
{
    const int64_t plan = 4 * (3 * 200 + 101 + 8 + 8 + 9 + 9), router = 4 * (2 * 200 + 8);
    const struct {
        smoe_type dtype;
        smoe_activation activation;
        smoe_entry entry;
        int64_t saved, metadata;
    } cases[] = {
        {SMOE_TYPE_BF16, SMOE_ACTIVATION_SWIGLU, SMOE_ENTRY_FROM_LOGITS, 2 * 100 * 64 + 4 * 32 * 200,
         plan + router},
        {SMOE_TYPE_F32, SMOE_ACTIVATION_SWIGLU, SMOE_ENTRY_FROM_LOGITS, 4 * 100 * 64 + 8 * 32 * 200,
         plan + router},
        {SMOE_TYPE_BF16, SMOE_ACTIVATION_GELU, SMOE_ENTRY_FROM_LOGITS, 2 * 100 * 64 + 2 * 32 * 200,
         plan + router},
        {SMOE_TYPE_BF16, SMOE_ACTIVATION_SWIGLU, SMOE_ENTRY_FROM_TOPK, 2 * 100 * 64 + 4 * 32 * 200, plan},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        smoe_layer layer = small_layer();
        layer.tokens = 100;
        layer.hidden = 64;
        layer.intermediate = 32;
        layer.experts = 8;
        layer.dtype = cases[i].dtype;
        layer.activation = cases[i].activation;
        layer.entry = cases[i].entry;
        layer.route_scale = 1.0f;
        smoe_sizes sizes = SMOE_SIZES_INIT;
        assert_int_equal(smoe_query_sizes(*state, &layer, &sizes), SMOE_OK);
        assert_int_equal(sizes.metadata_bytes, cases[i].metadata);
        assert_int_equal(sizes.saved_bytes, cases[i].saved + cases[i].metadata);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_combination_f32), cmocka_unit_test(test_every_combination_bf16),
        cmocka_unit_test(test_given_routing),         cmocka_unit_test(test_the_same_bits_again),
        cmocka_unit_test(test_saved_bytes),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
