/* Compares the activations and their slopes with libm in fp64: accuracy on a fine grid of arguments, special
 * values, the limits of swiglu_clamped, and rows of every length. Also tested: the dot product of a row, and
 * the conversion of rows for all bf16 values. */
#include "activations.h"
#include "cpu/activation.h"
#include "cpu/convert.h"

#include <assert.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

typedef struct activation_case {
    smoe_activation activation;
    int gated;
    double (*curve)(double);
    double (*slope)(double);
    double relative; /* bound of the value's relative error at any argument */
} activation_case;

static double sigmoid(double x)
{
    return x < 0.0 ? exp(x) / (1.0 + exp(x)) : 1.0 / (1.0 + exp(-x));
}

static double silu(double x)
{
    return x * sigmoid(x);
}

static double silu_slope(double x)
{
    return sigmoid(x) * (1.0 + x * sigmoid(-x));
}

static double oai(double x)
{
    return x * sigmoid(1.702 * x);
}

static double oai_slope(double x)
{
    return sigmoid(1.702 * x) * (1.0 + 1.702 * x * sigmoid(-1.702 * x));
}

static double gelu(double x)
{
    return 0.5 * x * erfc(-x / sqrt(2.0));
}

static double gelu_slope(double x)
{
    return 0.5 * erfc(-x / sqrt(2.0)) + x * exp(-0.5 * x * x) / sqrt(2.0 * acos(-1.0));
}

static double tanh_argument(double x)
{
    return sqrt(2.0 / acos(-1.0)) * (x + 0.044715 * x * x * x);
}

/* 1 + tanh(z) is computed as 2 sigmoid(2z), so that the expected value has no cancellation. */
static double gelu_tanh(double x)
{
    return x * sigmoid(2.0 * tanh_argument(x));
}

static double gelu_tanh_slope(double x)
{
    const double z = 2.0 * tanh_argument(x);
    const double dz = 2.0 * sqrt(2.0 / acos(-1.0)) * (1.0 + 3.0 * 0.044715 * x * x);
    return sigmoid(z) + x * sigmoid(z) * sigmoid(-z) * dz;
}

static double relu(double x)
{
    return x > 0.0 ? x : 0.0;
}

static double relu_slope(double x)
{
    return x > 0.0 ? 1.0 : 0.0;
}

static double relu2(double x)
{
    return x > 0.0 ? x * x : 0.0;
}

static double relu2_slope(double x)
{
    return x > 0.0 ? 2.0 * x : 0.0;
}

/* cg tanh(x/cg) sigmoid(x) with cg = 4; the up half is capped at 25 and has no offset. */
static double capped(double x)
{
    return 4.0 * tanh(x / 4.0) * sigmoid(x);
}

static double capped_slope(double x)
{
    const double c = cosh(x / 4.0);
    return sigmoid(x) * (1.0 / (c * c) + 4.0 * tanh(x / 4.0) * sigmoid(-x));
}

/* The bound is looser for geglu_tanh and swiglu_clamped, where the sigmoid's argument is itself rounded. This
 * costs |argument| units in the last place. The error is largest at large |argument|, where the value is
 * tiny. */
static const activation_case cases[] = {
    {SMOE_ACTIVATION_SWIGLU, 1, silu, silu_slope, 6e-7},
    {SMOE_ACTIVATION_GEGLU, 1, gelu, gelu_slope, 8e-7},
    {SMOE_ACTIVATION_GEGLU_TANH, 1, gelu_tanh, gelu_tanh_slope, 3e-5},
    {SMOE_ACTIVATION_REGLU, 1, relu, relu_slope, 1e-7},
    {SMOE_ACTIVATION_SWIGLU_CLAMPED, 1, oai, oai_slope, 1e-5},
    {SMOE_ACTIVATION_SWIGLU_CAPPED, 1, capped, capped_slope, 1e-6},
    {SMOE_ACTIVATION_SILU, 0, silu, silu_slope, 6e-7},
    {SMOE_ACTIVATION_GELU, 0, gelu, gelu_slope, 8e-7},
    {SMOE_ACTIVATION_RELU, 0, relu, relu_slope, 1e-7},
    {SMOE_ACTIVATION_RELU2, 0, relu2, relu2_slope, 2e-7},
};
enum { CASES = sizeof cases / sizeof cases[0] };
static_assert((int)CASES == (int)MOE_ACTIVATION_COUNT, "an activation of the list has no reference here");

static double clamp(double x, double low, double high)
{
    return x < low ? low : x > high ? high : x;
}

/* The expected results of the row functions for one feature: a, and the gradients of a times da. */
typedef struct reference {
    double a, dgate, dup;
} reference;

static reference refer(const activation_case *c, double gate, double up, double da)
{
    if (!c->gated) return (reference){c->curve(gate), da * c->slope(gate), 0.0};
    if (c->activation == SMOE_ACTIVATION_SWIGLU_CAPPED) {
        const double t = tanh(up / 25.0);
        return (reference){c->curve(gate) * 25.0 * t, da * 25.0 * t * c->slope(gate),
                           da * c->curve(gate) * (1.0 - t * t)};
    }
    if (c->activation != SMOE_ACTIVATION_SWIGLU_CLAMPED)
        return (reference){c->curve(gate) * up, da * up * c->slope(gate), da * c->curve(gate)};
    const double g = clamp(gate, -INFINITY, 7.0), factor = clamp(up, -7.0, 7.0) + 1.0;
    return (reference){c->curve(g) * factor, gate > 7.0 ? 0.0 : da * factor * c->slope(g),
                       fabs(up) > 7.0 ? 0.0 : da * c->curve(g)};
}

/* One row of gates (and ups). The results, of the forward alone and of forward and backward, are poisoned
 * before. */
typedef struct row_results {
    float *h, *da, *forward, *a, *dh;
} row_results;

static void poison(float *row, int64_t count)
{
    memset(row, 0xff, (size_t)count * sizeof *row);
}

static float *row_of(int64_t count)
{
    float *row = malloc((size_t)count * sizeof *row);
    assert_non_null(row);
    poison(row, count);
    return row;
}

static row_results make_rows(int64_t n)
{
    return (row_results){row_of(2 * n), row_of(n), row_of(n + 1), row_of(n + 1), row_of(2 * n + 1)};
}

static void free_rows(row_results *r)
{
    free(r->h), free(r->da), free(r->forward), free(r->a), free(r->dh);
}

static int same_bits(float x, float y)
{
    return memcmp(&x, &y, sizeof x) == 0 || (isnan(x) && isnan(y));
}

/* gpt-oss's values for the clamped activation, Kimi-K3's for the capped one */
static smoe_layer layer_of(const activation_case *c)
{
    smoe_layer layer = SMOE_LAYER_INIT;
    layer.activation = c->activation;
    if (c->activation != SMOE_ACTIVATION_SWIGLU_CAPPED) return layer;
    layer.gate_limit = 4.0f, layer.up_limit = 25.0f, layer.gate_alpha = 1.0f, layer.up_offset = 0.0f;
    return layer;
}

static void run_rows(const activation_case *c, int64_t n, row_results *r, float weight)
{
    const smoe_layer layer = layer_of(c);
    poison(r->forward, n + 1), poison(r->a, n + 1), poison(r->dh, 2 * n + 1);
    moe_activate(&layer, n, r->h, r->forward);
    moe_activate_backward(&layer, n, r->h, r->da, weight, r->a, r->dh);
    for (int64_t j = 0; j < n; j++) assert_true(same_bits(r->forward[j], r->a[j]));
    assert_true(isnan(r->forward[n]) && isnan(r->a[n]) && isnan(r->dh[c->gated ? 2 * n : n]));
}

static double sum_of_squares(double x, double y)
{
    return x + y * y;
}

/* |x| up to 13 in steps of 2^-10. At 13 the tails are close to the smallest normal number. The ups and da
 * vary too. */
static void activations_are_accurate(void **state)
{
    (void)state;
    enum { N = 26 * 1024 + 1 };
    row_results r = make_rows(N);
    for (int64_t j = 0; j < N; j++) {
        r.h[j] = (float)(j - N / 2) / 1024.0f;
        r.h[N + j] = (float)(j % 31 - 15) / 2.0f + 0.25f;
        r.da[j] = (float)(j % 7 - 3) / 2.0f + 0.125f;
    }
    for (int k = 0; k < CASES; k++) {
        const activation_case *c = &cases[k];
        double error = 0, size = 0, slope_error = 0, slope_size = 0;
        run_rows(c, N, &r, 0.75f);
        for (int64_t j = 0; j < N; j++) {
            const reference want = refer(c, r.h[j], r.h[N + j], 0.75 * r.da[j]);
            const double off = fabs(r.a[j] - want.a);
            if (off > c->relative * fabs(want.a) + 1e-35)
                fail_msg("activation %d at %g: %.9g, not %.9g (relative %.2g)", (int)c->activation, r.h[j],
                         r.a[j], want.a, off / fabs(want.a));
            error = sum_of_squares(error, off), size = sum_of_squares(size, want.a);
            slope_error = sum_of_squares(slope_error, r.dh[j] - want.dgate);
            slope_size = sum_of_squares(slope_size, want.dgate);
            const double slope_bound =
                8e-7 * fabs(r.da[j]) * (c->gated ? 8.0 : 1.0) * (1.0 + fabs(want.dgate));
            if (fabs(r.dh[j] - want.dgate) > slope_bound)
                fail_msg("slope of %d at %g: %.9g, not %.9g", (int)c->activation, r.h[j], r.dh[j],
                         want.dgate);
            if (!c->gated) continue;
            slope_error = sum_of_squares(slope_error, r.dh[N + j] - want.dup);
            slope_size = sum_of_squares(slope_size, want.dup);
        }
        assert_true(sqrt(error / size) < 1.5e-7);
        assert_true(sqrt(slope_error / slope_size) < 2e-7);
    }
    free_rows(&r);
}

static void assert_close(const activation_case *c, const char *what, double at, double got, double want)
{
    if (fabs(got - want) <= 1e-6 * fabs(want) + 1e-30) return;
    fail_msg("activation %d, %s at %g: %.9g, not %.9g", (int)c->activation, what, at, got, want);
}

/* Zeros, tiny and huge numbers: finite arguments must not give NaN, and the limits must be right. */
static void extreme_arguments_give_the_limits(void **state)
{
    (void)state;
    static const float gates[] = {0.0f,   -0.0f,  1e-30f,  -1e-30f, 1e-45f, 86.9f, -86.9f, 87.5f,
                                  -87.5f, 100.0f, -100.0f, 1e10f,   -1e10f, 1e18f, -1e18f, -1e38f};
    enum { N = sizeof gates / sizeof gates[0] };
    row_results r = make_rows(N);
    for (int64_t j = 0; j < N; j++) r.h[j] = gates[j], r.h[N + j] = 1.5f, r.da[j] = 1.0f;
    for (int k = 0; k < CASES; k++) {
        run_rows(&cases[k], N, &r, 1.0f);
        for (int64_t j = 0; j < N; j++) {
            const reference want = refer(&cases[k], r.h[j], r.h[N + j], 1.0);
            assert_close(&cases[k], "value", gates[j], r.a[j], want.a);
            assert_close(&cases[k], "gate slope", gates[j], r.dh[j], want.dgate);
            if (cases[k].gated) assert_close(&cases[k], "up slope", gates[j], r.dh[N + j], want.dup);
        }
    }
    free_rows(&r);
}

/* The gate +inf gives +inf, or the limit for the two activations that have one. A NaN gives NaN, in its own
 * feature alone. */
static void nan_and_infinity_stay_in_their_feature(void **state)
{
    (void)state;
    enum { N = 40 };
    for (int k = 0; k < CASES; k++) {
        for (int64_t spoiled = 0; spoiled < N; spoiled += 13) {
            row_results r = make_rows(N);
            for (int64_t j = 0; j < N; j++) r.h[j] = r.h[N + j] = r.da[j] = 1.0f;
            r.h[spoiled] = NAN;
            run_rows(&cases[k], N, &r, 1.0f);
            for (int64_t j = 0; j < N; j++) assert_int_equal(isnan(r.a[j]), j == spoiled);
            r.h[spoiled] = INFINITY;
            run_rows(&cases[k], N, &r, 1.0f);
            const reference want = refer(&cases[k], 1e30, 1.0, 1.0);
            const int limited = cases[k].activation == SMOE_ACTIVATION_SWIGLU_CLAMPED ||
                                cases[k].activation == SMOE_ACTIVATION_SWIGLU_CAPPED;
            assert_true(limited ? fabs(r.a[spoiled] - want.a) < 1e-5 : isinf(r.a[spoiled]));
            const int capped = cases[k].activation == SMOE_ACTIVATION_SWIGLU_CAPPED; // its slope needs u
            if (cases[k].gated) {
                r.h[spoiled] = 1.0f;
                r.h[N + spoiled] = NAN;
                run_rows(&cases[k], N, &r, 1.0f);
                for (int64_t j = 0; j < N; j++) {
                    assert_int_equal(isnan(r.a[j]), j == spoiled);
                    assert_int_equal(isnan(r.dh[j]), j == spoiled);
                    assert_int_equal(isnan(r.dh[N + j]), capped && j == spoiled);
                }
            }
            free_rows(&r);
        }
    }
}

/* swiglu_clamped on both sides of its limits, and exactly at them: at 7 itself the slope is not zero. */
static void swiglu_clamped_keeps_its_limits(void **state)
{
    (void)state;
    static const float at[] = {-7.5f, -7.0f, -6.5f, 6.5f, 7.0f, 7.5f};
    row_results r = make_rows(1);
    for (int g = 0; g < 6; g++) {
        for (int u = 0; u < 6; u++) {
            r.h[0] = at[g], r.h[1] = at[u], r.da[0] = 1.0f;
            run_rows(&cases[4], 1, &r, 1.0f);
            const reference want = refer(&cases[4], at[g], at[u], 1.0);
            assert_true(fabs(r.a[0] - want.a) <= 2e-6 * fabs(want.a));
            assert_true(fabs(r.dh[0] - want.dgate) <= 2e-6 * fabs(want.dgate));
            assert_true(fabs(r.dh[1] - want.dup) <= 2e-6 * fabs(want.dup));
        }
    }
    free_rows(&r);
}

/* A feature's bits must depend neither on its place in the row nor on the row's length: the vector loop and
 * the loop for the remainder must agree. */
static void bits_do_not_depend_on_the_length(void **state)
{
    (void)state;
    enum { N = 77 };
    row_results whole = make_rows(N);
    for (int64_t j = 0; j < N; j++) {
        whole.h[j] = (float)sin((double)j) * 5.0f;
        whole.h[N + j] = (float)cos((double)j) * 9.0f;
        whole.da[j] = (float)cos(2.0 * (double)j);
    }
    for (int k = 0; k < CASES; k++) {
        run_rows(&cases[k], N, &whole, 0.3f);
        for (int64_t n = 1; n < N; n++) {
            row_results part = make_rows(n);
            const int64_t from = N - n;
            memcpy(part.h, whole.h + from, (size_t)n * 4);
            memcpy(part.h + n, whole.h + N + from, (size_t)n * 4);
            memcpy(part.da, whole.da + from, (size_t)n * 4);
            run_rows(&cases[k], n, &part, 0.3f);
            assert_memory_equal(part.a, whole.a + from, (size_t)n * 4);
            assert_memory_equal(part.dh, whole.dh + from, (size_t)n * 4);
            if (cases[k].gated) assert_memory_equal(part.dh + n, whole.dh + N + from, (size_t)n * 4);
            free_rows(&part);
        }
    }
    free_rows(&whole);
}

/* Integers, so that the sum is exact in every order: no element may be missing or counted twice. */
static void a_dot_product_counts_every_element_once(void **state)
{
    (void)state;
    enum { N = 130 };
    float x[N], y[N];
    double sum = 0;
    for (int64_t n = 0; n < N; n++) {
        assert_true(moe_dot(n, x, y) == (float)sum);
        x[n] = (float)(n % 11 + 1), y[n] = (float)(n % 13 - 6);
        sum += (double)x[n] * y[n];
    }
}

/* Every bf16 value must be converted to f32 and back unchanged, halfway values must go to even, and a NaN
 * must stay a NaN, whatever its payload. */
static void bf16_survives_and_halves_go_to_even(void **state)
{
    (void)state;
    uint16_t stored[65536], again[65536];
    float *values = row_of(65536);
    for (int i = 0; i < 65536; i++) stored[i] = (uint16_t)i;
    moe_load_row(values, stored, 0, 65536, SMOE_TYPE_BF16);
    memset(again, 0xff, sizeof again);
    moe_store_row(again, 0, values, 65536, SMOE_TYPE_BF16);
    for (int i = 0; i < 65536; i++) {
        const int is_nan = (i & 0x7fff) > 0x7f80;
        assert_int_equal(isnan(values[i]) != 0, is_nan);
        if (!is_nan) assert_int_equal(again[i], i);
        if (is_nan) assert_true((again[i] & 0x7fff) > 0x7f80);
    }
    const uint32_t patterns[] = {0x3f808000U, 0x3f818000U, 0x3f808001U, 0x3f80ffffU,
                                 0x7f7fffffU, 0x7f800001U, 0xff80ffffU, 0x80000001U};
    const uint16_t wanted[] = {0x3f80U, 0x3f82U, 0x3f81U, 0x3f81U, 0x7f80U, 0x7fc0U, 0xffc0U, 0x8000U};
    memcpy(values, patterns, sizeof patterns);
    moe_store_row(again, 3, values, 8, SMOE_TYPE_BF16);
    assert_memory_equal(again + 3, wanted, sizeof wanted);
    moe_round_row(values, 8, SMOE_TYPE_BF16);
    moe_store_row(again, 100, values, 8, SMOE_TYPE_BF16);
    assert_memory_equal(again + 100, wanted, sizeof wanted);
    free(values);
}

/* Sums must be made in f32 and rounded once. Only the given place may be written. */
static void rows_are_added_in_f32_and_rounded_once(void **state)
{
    (void)state;
    float f32[4] = {1.0f, 2.0f, 3.0f, 4.0f};
    const float more[2] = {0.5f, -5.0f};
    moe_add_row(f32, 1, more, 2, SMOE_TYPE_F32);
    assert_true(f32[0] == 1.0f && f32[1] == 2.5f && f32[2] == -2.0f && f32[3] == 4.0f);
    uint16_t bf16[4] = {0x3f80, 0x4380, 0x4040, 0x4080}; /* 1, 256, 3, 4 */
    const float odd[2] = {1.0f, 3.0f};                   /* 257 is halfway, to even: 256 */
    moe_add_row(bf16, 1, odd, 2, SMOE_TYPE_BF16);
    const uint16_t wanted[4] = {0x3f80, 0x4380, 0x40c0, 0x4080};
    assert_memory_equal(bf16, wanted, sizeof wanted);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(activations_are_accurate),
        cmocka_unit_test(extreme_arguments_give_the_limits),
        cmocka_unit_test(nan_and_infinity_stay_in_their_feature),
        cmocka_unit_test(swiglu_clamped_keeps_its_limits),
        cmocka_unit_test(bits_do_not_depend_on_the_length),
        cmocka_unit_test(a_dot_product_counts_every_element_once),
        cmocka_unit_test(bf16_survives_and_halves_go_to_even),
        cmocka_unit_test(rows_are_added_in_f32_and_rounded_once),
    };
    return cmocka_run_group_tests_name("activation", tests, NULL, NULL);
}
