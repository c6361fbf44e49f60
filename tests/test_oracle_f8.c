/* The oracle with quantised operands: numbers and sums of e4m3 against values worked out by hand, and whole
 * layers against the oracle without fp8. With small integers nothing is rounded, so both must agree to the
 * last bit. */
#include "oracle/compare.h"
#include "oracle/draw.h"
#include "oracle/f8.h"
#include "oracle/number.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

static void every_number_is_rounded_right(void **state)
{
    (void)state;
    const struct {
        double x, want;
    } all[] = {{0.0, 0.0},       {1.0, 1.0},     {1.0625, 1.0},      {1.1875, 1.25},       {-1.1874, -1.125},
               {448.0, 448.0},   {431.9, 416.0}, {432.0, 448.0},     {-1e9, -448.0},       {0x1p-6, 0x1p-6},
               {0x1p-9, 0x1p-9}, {0x1p-10, 0.0}, {0x1.8p-9, 0x1p-8}, {0x1.01p-10, 0x1p-9}, {17.0, 16.0}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        assert_true(oracle_f8_round(all[i].x) == all[i].want);
    assert_true(isnan(oracle_f8_round(NAN)));
    assert_true(oracle_f8_scale(448.0) == 1.0 && oracle_f8_scale(449.0) == 2.0);
    assert_true(oracle_f8_scale(224.0) == 0.5 && oracle_f8_scale(0.0) == 0x1p-126);
    assert_true(oracle_f8_scale(INFINITY) == 1.0);
    const double group[] = {1.0, NAN, 2.0};
    double to[3];
    assert_true(oracle_f8_quantize(group, 3, to) == 1.0 && isnan(to[0]) && isnan(to[2]));
}

static double sum(const double *a, const double *b, int64_t count, bool short_sums)
{
    return oracle_f8_sum((oracle_f8_line){a, 1}, (oracle_f8_line){b, 1}, count, short_sums);
}

static void products_are_cut_to_the_largest(void **state)
{
    (void)state;
    /* 448 448 has the exponent 16, so products are cut to multiples of 8; the sum, 3.06 2^16, to 16. */
    double a[64] = {448.0, 3.5}, b[64] = {448.0, 2.0};
    assert_true(sum(a, b, 32, false) == 200711.0 && sum(a, b, 32, true) == 200704.0);
    a[1] = -3.5;
    assert_true(sum(a, b, 32, true) == 200704.0); /* towards zero */
    a[1] = 8.0;
    assert_true(sum(a, b, 32, true) == 200720.0);
    /* The next instruction aligns to the sum, 2^17 and more: a product of 8 is lost. */
    a[1] = 0.0;
    a[32] = 8.0;
    b[32] = 1.0;
    assert_true(sum(a, b, 64, true) == 200704.0 && sum(a, b, 64, false) == 200712.0);
    /* A product's exponent is not normalised: that of 1.75 1.75 is 0, so 2^-13 is kept, and 2^-14 is not. */
    double c[32] = {1.75, 0x1p-6, 0x1p-6, 0x1p-6}, d[32] = {1.75, 0x1p-7, 0x1p-7, 0x1p-8};
    assert_true(sum(c, d, 32, true) == 3.0625 + 0x1p-12);
    /* A zero has no exponent. */
    double e[32] = {0.0, 0x1p-6}, f[32] = {448.0, 0x1p-9};
    assert_true(sum(e, f, 32, true) == 0x1p-15);
}

/* Every product loses half of 2^-13 of the sum on average, so sums of one sign shrink with their length:
 * by 1.4 % after 1024 products of half-normal numbers, by 2.4 % after 1536, after 4096 in parts of 1024
 * by 1.4 % again. */
static void sums_of_one_sign_shrink(void **state)
{
    (void)state;
    static double a[4096], b[4096];
    const int64_t lengths[] = {1024, 1536, 4096};
    double lost[3] = {0.0};
    oracle_random random = {7};
    for (int draw = 0; draw < 50; draw++) {
        for (int i = 0; i < 4096; i++) a[i] = oracle_f8_round(fabs(80.0 * oracle_random_normal(&random)));
        for (int i = 0; i < 4096; i++) b[i] = oracle_f8_round(fabs(80.0 * oracle_random_normal(&random)));
        for (int i = 0; i < 3; i++)
            lost[i] += (1.0 - sum(a, b, lengths[i], true) / sum(a, b, lengths[i], false)) / 50.0;
    }
    print_message("lost: %.2f, %.2f and %.2f %%\n", 100.0 * lost[0], 100.0 * lost[1], 100.0 * lost[2]);
    assert_true(fabs(lost[0] - 0.0135) < 0.001);
    assert_true(fabs(lost[1] - 0.0245) < 0.001);
    assert_true(fabs(lost[2] - 0.0135) < 0.001);
}

static smoe_layer some_layer(smoe_activation activation, smoe_layout layout)
{
    smoe_layer layer = SMOE_LAYER_INIT;
    layer.tokens = 40;
    layer.hidden = 48;
    layer.intermediate = 272; /* three groups of A, two of dH; the last of each is narrow */
    layer.experts = 4;
    layer.topk = 2;
    layer.entry = SMOE_ENTRY_FROM_TOPK;
    layer.dtype = SMOE_TYPE_F32;
    layer.activation = activation;
    layer.layout = layout;
    return layer;
}

typedef struct results {
    oracle_forward forward;
    oracle_backward backward;
} results;

static results run(const smoe_layer *layer, const oracle_input *input)
{
    results r;
    oracle_forward_run(layer, input, &r.forward);
    oracle_backward_run(layer, input, &r.forward, false, &r.backward);
    return r;
}

static void free_results(results *r)
{
    oracle_forward_free(&r->forward);
    oracle_backward_free(&r->backward);
}

typedef void compare(const char *name, const double *got, const double *want, size_t count);

static void compare_results(const smoe_layer *layer, const results *got, const results *want, compare *judge)
{
    const size_t td = (size_t)(layer->tokens * layer->hidden), rows = (size_t)want->forward.rows;
    const size_t width = (size_t)oracle_h_width(layer), ed = (size_t)(layer->experts * layer->hidden);
    judge("h", got->forward.h, want->forward.h, rows * width);
    judge("out", got->forward.out, want->forward.out, td);
    judge("ds", got->backward.ds, want->backward.ds, rows);
    judge("dx", got->backward.dx, want->backward.dx, td);
    judge("dw1", got->backward.dw1, want->backward.dw1, ed * width);
    judge("db1", got->backward.db1, want->backward.db1, (size_t)layer->experts * width);
    judge("dw2", got->backward.dw2, want->backward.dw2, ed * (size_t)layer->intermediate);
    judge("db2", got->backward.db2, want->backward.db2, ed);
}

static void are_equal(const char *name, const double *got, const double *want, size_t count)
{
    if (oracle_differing(got, want, count))
        fail_msg("%s: %zu differ", name, oracle_differing(got, want, count));
}

static void integers_are_exact(void **state)
{
    (void)state;
    const struct {
        smoe_activation activation;
        smoe_layout layout;
    } all[] = {{SMOE_ACTIVATION_REGLU, SMOE_LAYOUT_CONCATENATED},
               {SMOE_ACTIVATION_REGLU, SMOE_LAYOUT_INTERLEAVED},
               {SMOE_ACTIVATION_RELU, SMOE_LAYOUT_CONCATENATED}};
    const oracle_draw draw = {.b1 = true, .b2 = true, .integers = 6, .routing = ORACLE_HALF_EMPTY};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        for (int compute = ORACLE_COMPUTE_F8; compute <= ORACLE_COMPUTE_F8_DGRAD; compute++) {
            const smoe_layer layer = some_layer(all[i].activation, all[i].layout);
            oracle_drawn drawn;
            oracle_draw_inputs(&layer, &draw, 3, &drawn);
            results want = run(&layer, &drawn.input);
            drawn.input.compute = (oracle_compute)compute;
            drawn.input.short_sums = true;
            results got = run(&layer, &drawn.input);
            compare_results(&layer, &got, &want, are_equal);
            free_results(&got);
            free_results(&want);
            oracle_drawn_free(&drawn);
        }
}

static void are_some_percent_apart(const char *name, const double *got, const double *want, size_t count)
{
    const double error = oracle_relative_error(got, want, count);
    print_message("  %-4s %.3f\n", name, error);
    assert_true(name[0] == 'd' && name[1] == 'b' && name[2] == '2' ? error == 0.0
                                                                   : error > 0.02 && error < 0.12);
}

static void results_are_some_percent_apart(void **state)
{
    (void)state;
    const oracle_draw draw = {.b1 = true, .b2 = true};
    const smoe_layer layer = some_layer(SMOE_ACTIVATION_SWIGLU, SMOE_LAYOUT_INTERLEAVED);
    oracle_drawn drawn;
    oracle_draw_inputs(&layer, &draw, 5, &drawn);
    results want = run(&layer, &drawn.input);
    drawn.input.compute = ORACLE_COMPUTE_F8;
    results got = run(&layer, &drawn.input);
    compare_results(&layer, &got, &want, are_some_percent_apart);
    free_results(&got);
    free_results(&want);
    oracle_drawn_free(&drawn);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_number_is_rounded_right),  cmocka_unit_test(products_are_cut_to_the_largest),
        cmocka_unit_test(sums_of_one_sign_shrink),        cmocka_unit_test(integers_are_exact),
        cmocka_unit_test(results_are_some_percent_apart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
