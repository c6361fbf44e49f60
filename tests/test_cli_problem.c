/* What the program computes without running a layer: parsing, shapes, costs, expected tile waste. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "cli/support/costs.h"
#include "cli/support/problem.h"
#include "cli/support/tile_waste.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void thiek_gives_five_sizes(void **state)
{
    (void)state;
    bench_shape shape = {0};
    error err = {0};
    assert_true(problem_parse_thiek("4096,768,256,32,4", &shape, &err));
    assert_int_equal(shape.tokens, 4096);
    assert_int_equal(shape.hidden, 768);
    assert_int_equal(shape.intermediate, 256);
    assert_int_equal(shape.experts, 32);
    assert_int_equal(shape.topk, 4);
}

/* The numbers that --steps of smoe train accepts. */
static void whole_numbers_are_read(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int64_t value;
    } good[] = {{"1e9", 1000000000},
                {"4.096e3", 4096},
                {"2.50E+2", 250},
                {"-1e3", -1000},
                {"12.0", 12},
                {"+7", 7},
                {"9e18", 9000000000000000000},
                {"9223372036854775807", INT64_MAX}};
    static const struct {
        const char *text, *message;
    } bad[] = {{"1e", "'1e' is not a whole number"},    {"1.5", "'1.5' is not a whole number"},
               {"1e-3", "is not a whole number"},       {"0x10", "'0x10' is not a whole number"},
               {"inf", "is not a whole number"},        {"nan", "is not a whole number"},
               {"", "'' is not a whole number"},        {"1e3x", "is not a whole number"},
               {"9223372036854775808", "is outside -"}, {"9.223372036854775808e18", "is outside -"},
               {"1e400", "1e400 is outside -"},         {"-1e19", "is outside -"}};
    error err = {0};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        int64_t value = 0;
        if (!parse_integer("--n", good[i].text, INT64_MIN, INT64_MAX, &value, &err)) fail_msg("%s", err.text);
        assert_true(value == good[i].value);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        int64_t value = 0;
        assert_false(parse_integer("--n", bad[i].text, INT64_MIN, INT64_MAX, &value, &err));
        if (!strstr(err.text, bad[i].message)) fail_msg("'%s' lacks '%s'", err.text, bad[i].message);
    }
    bench_shape shape = {0};
    assert_true(problem_parse_thiek("1e9,1.024e3,256,1e2,4", &shape, &err));
    assert_true(shape.tokens == 1000000000 && shape.hidden == 1024 && shape.experts == 100);
}

static void a_bad_thiek_is_refused(void **state)
{
    (void)state;
    static const struct {
        const char *text, *message; // the message names value and limit
    } cases[] = {
        {"", "five numbers"},
        {"1,2,3", "five numbers"},
        {"4096,768,256,32,4,1", "five numbers"},
        {"4096,768,256,32,4,", "five numbers"},
        {",768,256,32,4", "five numbers"},
        {"4096,768,x,32,4", "I: 'x' is not a whole number"},
        {"2e9,768,256,32,4", "T: 2e9 is outside 1..1073741824"},
        {"4096,768,256.5,32,4", "I: '256.5' is not a whole number"},
        {"0,768,256,32,4", "T: 0 is outside 1..1073741824"},
        {"-1,768,256,32,4", "T: -1 is outside"},
        {"99999999999999999999,768,256,32,4", "is outside 1..1073741824"},
        {"999999999999999999999999,768,256,32,4", "five numbers"},
        {"4096,770,256,32,4", "H = 770 is not a multiple of 8"},
        {"4096,768,4,32,4", "I = 4 is not a multiple of 8"},
        {"4096,768,256,4097,4", "E: 4097 is outside 1..4096"},
        {"4096,768,256,128,65", "K: 65 is outside 1..64"},
        {"4096,768,256,32,33", "K = 33 is more than E = 32"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        bench_shape shape = {0};
        error err = {0};
        assert_false(problem_parse_thiek(cases[i].text, &shape, &err));
        assert_int_equal(err.code, ERROR_USAGE);
        if (!strstr(err.text, cases[i].message)) fail_msg("'%s' lacks '%s'", err.text, cases[i].message);
    }
}

/* Compares the program's shapes with docs/shapes.csv, line by line. */
static void shapes_are_those_of_the_csv(void **state)
{
    (void)state;
    FILE *file = fopen(SOURCE_FOLDER "/docs/shapes.csv", "r");
    assert_non_null(file);
    char line[256], want[256];
    assert_non_null(fgets(line, sizeof line, file));
    assert_string_equal(line, "suite,name,T,d,n,E,K\n");
    int count;
    const bench_shape *all = shapes_all(&count);
    for (int i = 0; i < count; i++) {
        const bench_shape *s = &all[i];
        snprintf(want, sizeof want, "%s,%s,%lld,%lld,%lld,%lld,%lld\n", s->suite, s->name,
                 (long long)s->tokens, (long long)s->hidden, (long long)s->intermediate,
                 (long long)s->experts, (long long)s->topk);
        assert_non_null(fgets(line, sizeof line, file));
        assert_string_equal(line, want);
    }
    assert_null(fgets(line, sizeof line, file));
    fclose(file);
    assert_true(count >= 40);
}

static smoe_layer paper_7b(void)
{
    problem_options options;
    problem_options_init(&options);
    options.dtype = SMOE_TYPE_BF16;
    const bench_shape shape = {"paper", "7B-n256", 24576, 1536, 256, 128, 8};
    return problem_layer(&options, &shape);
}

/* By hand: R = 24576 * 8 = 196608 rows. */
static void costs_are_those_by_hand(void **state)
{
    (void)state;
    smoe_layer layer = paper_7b();
    assert_true(flops_forward(&layer) == 6.0 * 196608 * 256 * 1536);
    assert_true(flops_backward(&layer) == 12.0 * 196608 * 256 * 1536);
    assert_true(fabs(arithmetic_intensity(&layer) - 3 / (2.0 / 1536 + 2.0 / 256 + 3.0 / 1536)) < 1e-9);
    // X 75497472, H 201326592, A 100663296, Y 603979776, ids and gates 1572864
    assert_true(scatter_bytes(&layer) == 983040000);
    // saved 1000, scratch 20 and 300; O and dX 75497472 each, dW1 + dW2 of 3 n d E = 301989888 bytes, the
    // gradient of the weights (T, K) 786432; the forward alone has more only with a large scratch
    layer.entry = SMOE_ENTRY_FROM_TOPK;
    const pass_bytes peaks = pass_peaks(&layer, false, 1000, 20, 300);
    assert_true(peaks.forward == 1020 + 75497472.0);
    assert_true(peaks.backward == 1300 + 75497472.0 + 301989888.0 + 786432.0);
    assert_true(peaks.layer == 1300 + 2 * 75497472.0 + 301989888.0 + 786432.0);
    assert_true(pass_peaks(&layer, false, 1000, 1e9, 300).layer == 1e9 + 1000 + 75497472.0);
    // given logits: dlogits (T, E)
    layer.entry = SMOE_ENTRY_FROM_LOGITS;
    assert_true(pass_peaks(&layer, false, 0, 0, 0).backward == 75497472.0 + 301989888.0 + 12582912.0);
    // the router adds logits (T, E) to both, dWr (E, d) to the backward
    const pass_bytes routed = pass_peaks(&layer, true, 0, 0, 0);
    assert_true(routed.forward == 75497472.0 + 12582912.0);
    assert_true(routed.backward == 75497472.0 + 301989888.0 + 12582912.0 + 393216.0);
    layer.logits_type = SMOE_TYPE_BF16;
    assert_true(pass_peaks(&layer, true, 0, 0, 0).forward == 75497472.0 + 12582912.0 / 2);
    layer.activation = SMOE_ACTIVATION_RELU;
    assert_true(flops_forward(&layer) == 4.0 * 196608 * 256 * 1536);
    assert_true(flops_backward(&layer) == 8.0 * 196608 * 256 * 1536);
}

/* The six GEMMs of stage_flops make up the model FLOPs. */
static void stages_add_up_to_the_model(void **state)
{
    (void)state;
    const smoe_layer layer = paper_7b();
    double sum = 0;
    for (int stage = SMOE_STAGE_UP; stage <= SMOE_STAGE_DW1; stage += 10) {
        const double flops = stage_flops(&layer, (smoe_stage)stage);
        if (!isnan(flops)) sum += flops;
    }
    assert_true(sum == 18.0 * 196608 * 256 * 1536);
    assert_true(isnan(stage_flops(&layer, SMOE_STAGE_COMBINE)));
}

/* Small enough to sum by hand: T tokens, E = 2, K = 1, counts Binomial(T, 1/2). */
static void tile_waste_is_that_by_hand(void **state)
{
    (void)state;
    smoe_layer layer = SMOE_LAYER_INIT;
    layer.tokens = 1;
    layer.experts = 2;
    layer.topk = 1;
    // c is 0 or 1, each 1/2: rows 1/2, padded 64: waste 127/128
    assert_true(fabs(tile_waste(&layer) - 127.0 / 128) < 1e-12);
    layer.topk = 2; // every expert has every token
    layer.tokens = 96;
    assert_true(fabs(tile_waste(&layer) - 32.0 / 128) < 1e-12);
    layer.tokens = 256;
    assert_true(tile_waste(&layer) == 0);
}

static void rounded_counts_waste_no_tile(void **state)
{
    (void)state;
    smoe_layer layer = paper_7b();
    const double plain = tile_waste(&layer); // about 63.5 rows of padding on 1536 rows
    assert_true(fabs(plain - 63.5 / (1536 + 63.5)) < 2e-3);
    for (int rule = SMOE_ROUNDING_NR_F; rule <= SMOE_ROUNDING_DOWN; rule++) {
        layer.rounding = (smoe_rounding)rule;
        layer.tile = 128;
        assert_true(fabs(tile_waste(&layer)) < 1e-12);
        layer.tile = 64;
        const double half = tile_waste(&layer);
        assert_true(half > 0.01 && half < plain);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(thiek_gives_five_sizes),     cmocka_unit_test(whole_numbers_are_read),
        cmocka_unit_test(a_bad_thiek_is_refused),     cmocka_unit_test(shapes_are_those_of_the_csv),
        cmocka_unit_test(costs_are_those_by_hand),    cmocka_unit_test(stages_add_up_to_the_model),
        cmocka_unit_test(tile_waste_is_that_by_hand), cmocka_unit_test(rounded_counts_waste_no_tile),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
