/* f8.h: all 256 codes of e4m3, rounding and saturation around each of them, scales over every exponent, and
 * where the parts of weights_f8 are. Python's test_f8.py compares the codes with torch. */
#include "f8.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>

/* The definition of the format, in doubles. */
static double value_of(int byte)
{
    const int exponent = byte >> 3 & 15, fraction = byte & 7;
    if ((byte & 0x7f) == 0x7f) return NAN;
    const double magnitude = exponent ? ldexp(8.0 + fraction, exponent - 10) : ldexp(fraction, -9);
    return byte & 0x80 ? -magnitude : magnitude;
}

static void every_code_is_right(void **state)
{
    (void)state;
    for (int byte = 0; byte < 256; byte++) {
        const float value = moe_f8_value((uint8_t)byte);
        const double want = value_of(byte);
        assert_true(isnan(want) ? isnan(value) : (double)value == want && !signbit(value) == !signbit(want));
        assert_int_equal(moe_f8_of(value), isnan(want) ? MOE_F8_NAN : byte);
    }
}

/* Between two codes the midpoint goes to the even one, and its neighbours to the nearer one. */
static void rounds_to_nearest_even(void **state)
{
    (void)state;
    for (int byte = 0; byte < MOE_F8_MAX; byte++) {
        const float low = (float)value_of(byte), high = (float)value_of(byte + 1), middle = (low + high) / 2;
        assert_int_equal(moe_f8_of(middle), byte + (byte & 1));
        assert_int_equal(moe_f8_of(nextafterf(middle, 0.0f)), byte);
        assert_int_equal(moe_f8_of(nextafterf(middle, INFINITY)), byte + 1);
        assert_int_equal(moe_f8_of(-middle), 0x80 | (byte + (byte & 1)));
    }
}

static void saturates(void **state)
{
    (void)state;
    const float beyond[] = {448.0f, nextafterf(448.0f, INFINITY), 464.0f, 465.0f, 1e30f, INFINITY};
    for (size_t i = 0; i < sizeof beyond / sizeof *beyond; i++) {
        assert_int_equal(moe_f8_of(beyond[i]), MOE_F8_MAX);
        assert_int_equal(moe_f8_of(-beyond[i]), 0x80 | MOE_F8_MAX);
    }
    assert_int_equal(moe_f8_of(NAN), MOE_F8_NAN);
    assert_int_equal(moe_f8_of(-NAN), MOE_F8_NAN);
    assert_int_equal(moe_f8_of(1e-45f), 0);
    assert_int_equal(moe_f8_of(-0.0f), 0x80);
}

/* Every bf16 magnitude, and floats around the fraction at which the exponent changes. */
static void check_scale(float amax)
{
    const uint32_t bits = moe_f8_amax(0, amax);
    const float scale = moe_f8_scale(bits), factor = moe_f8_factor(bits);
    int exponent;
    assert_true(frexp((double)scale, &exponent) == 0.5 && (double)scale * (double)factor == 1.0);
    const double largest = (double)amax / (double)scale;
    assert_true(largest <= 448.0 && (largest > 224.0 || scale == 0x1p-126f));
    assert_true(fabs((double)moe_f8_value(moe_f8_quantize(amax, factor)) - largest) <=
                largest / 16 + 0x1p-10);
}

static void a_scale_fits_the_largest_value(void **state)
{
    (void)state;
    for (uint32_t bf16 = 1; bf16 < 0x7f80u; bf16++) check_scale(moe_float_of(bf16 << 16));
    for (int exponent = -140; exponent < 128; exponent++) {
        const float edge = ldexpf(1.75f, exponent);
        check_scale(edge);
        check_scale(nextafterf(edge, 0.0f));
        check_scale(nextafterf(edge, INFINITY));
    }
}

static void zeros_nan_and_inf_are_kept(void **state)
{
    (void)state;
    assert_true(moe_f8_scale(0) == 0x1p-126f && moe_f8_factor(0) == 0x1p126f);
    const float broken[] = {INFINITY, -INFINITY, NAN, -NAN};
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        const uint32_t amax = moe_f8_amax(moe_f8_amax(moe_f8_amax(0, 3e38f), broken[i]), 1.0f);
        assert_true(moe_f8_scale(amax) == 1.0f);
        assert_int_equal(moe_f8_quantize(0.0f, moe_f8_factor(amax)), MOE_F8_NAN);
        assert_int_equal(moe_f8_quantize(-2.0f, moe_f8_factor(amax)), MOE_F8_NAN);
    }
}

/* Small integers survive: up to 16 they are e4m3 numbers, and scales are powers of two. */
static void integers_are_exact(void **state)
{
    (void)state;
    for (int largest = 1; largest <= 16; largest++) {
        const uint32_t amax = moe_f8_amax(0, (float)largest);
        for (int i = -largest; i <= largest; i++) {
            const uint8_t byte = moe_f8_quantize((float)i, moe_f8_factor(amax));
            assert_true(moe_f8_value(byte) * moe_f8_scale(amax) == (float)i);
        }
    }
}

/* All bytes times 2^0 to 2^-20 against rounding in doubles. */
static void bytes_are_shifted(void **state)
{
    (void)state;
    for (int byte = 0; byte < 256; byte++)
        for (int k = 0; k >= -20; k--) {
            const double exact = ldexp(value_of(byte), k);
            const uint8_t got = moe_f8_shifted((uint8_t)byte, k);
            if (isnan(exact)) {
                assert_int_equal(got, MOE_F8_NAN);
                continue;
            }
            const double unit = fabs(exact) < 0x1p-6 ? 0x1p-9 : ldexp(1.0, ilogb(exact) - 3);
            assert_true(value_of(got) == nearbyint(exact / unit) * unit);
        }
    assert_int_equal(moe_f8_shifted(MOE_F8_MAX, -200), 0);
}

/* A row is stored with the expected exponent, and if it is too large for that with its own; never does a byte
 * saturate. */
static void no_byte_of_a_row_saturates(void **state)
{
    (void)state;
    const float token = 0x1p-9f;
    for (int expected = -30; expected <= -10; expected++)
        for (int i = 0; i < 200; i++) {
            const float value = ldexpf(1.0f + (float)i / 200.0f, -i / 8);
            const uint32_t amax = moe_f8_amax(0, value);
            const int32_t w = moe_f8_row_exponent(expected, amax, token);
            const double stored = ldexp((double)value, -9 - w);
            assert_true(stored <= 448.0 && w >= expected && (w == expected || stored > 224.0));
            assert_true((double)(value * moe_f8_row_factor(w, amax, token)) == stored);
        }
    assert_int_equal(moe_f8_row_exponent(-40, 0, token), -40); /* a row of zeros */
    assert_true(isnan(moe_f8_row_factor(-40, moe_f8_amax(0, INFINITY), token)));
    assert_true(moe_f8_row_exponent(-40, moe_f8_amax(0, 3e38f), 0x1p100f) == MOE_F8_MOST);
}

static void expected_exponents_are_right(void **state)
{
    (void)state;
    moe_problem problem = {.gated = 1, .layer = {.hidden = 1536}};
    assert_int_equal(moe_f8_degree(&problem), 2);
    assert_int_equal(moe_f8_expected_of_size(&problem), 11 + 19);
    problem.gated = 0;
    problem.layer.activation = SMOE_ACTIVATION_GELU;
    assert_int_equal(moe_f8_degree(&problem), 1);
    assert_int_equal(moe_f8_expected_of_size(&problem), 6 + 8);
    problem.layer.activation = SMOE_ACTIVATION_RELU2;
    assert_int_equal(moe_f8_degree(&problem), 2);
    /* exponents -7 and -20 of the token, -2 of the weight -0.3 */
    assert_int_equal(moe_f8_row_size(0x1p-7f, 0x1p-20f, -0.3f, 2), -20 - 2 - 14);
    assert_int_equal(moe_f8_row_size(0x1p-7f, 0x1p-20f, -0.3f, 1), -20 - 2 - 7);
    assert_true(moe_f8_row_size(0x1p-7f, 0x1p-20f, 0.0f, 2) < -150); /* below every row that counts */
    assert_int_equal(moe_f8_expected(-36, 0x1p-12f, 0x1p-11f, 2, 30, 1), -36 - 12 - 11 + 30);
    assert_int_equal(moe_f8_expected(-36, 0x1p-12f, 0x1p-11f, 2, 30, 0), -36 - 24 + 30);
    assert_int_equal(moe_f8_expected(-29, 0x1p-12f, 0x1p-11f, 1, 14, 1), -29 - 11 + 14);
    assert_int_equal(moe_f8_expected(-29, 0x1p-12f, 0x1p-11f, 1, 14, 0), -29 - 12 + 14);
    assert_int_equal(moe_f8_expected(MOE_F8_NO_ROWS, 1.0f, 1.0f, 2, 30, 1), MOE_F8_LEAST);
    assert_int_equal(moe_f8_expected(300, 1.0f, 1.0f, 2, 30, 1), MOE_F8_MOST);
}

static void parts_of_the_weights_have_their_places(void **state)
{
    (void)state;
    smoe_layer layer = SMOE_LAYER_INIT;
    layer.tokens = 5;
    layer.hidden = 48;
    layer.intermediate = 16;
    layer.experts = 3;
    moe_problem problem;
    moe_problem_init(&problem, &layer);
    _Alignas(MOE_PART_ALIGN) static uint8_t buffer[1 << 15];
    const moe_f8_weights w = moe_f8_weights_at(&problem, buffer);
    assert_int_equal(w.w1 - buffer, 0);
    assert_int_equal(w.w1_t - w.w1, 4608); /* 3 x 32 x 48 */
    assert_int_equal(w.w2 - w.w1_t, 4608);
    assert_int_equal(w.w2_t - w.w2, 2304);
    assert_int_equal((uint8_t *)w.scale1 - w.w2_t, 2304);
    assert_int_equal((uint8_t *)w.scale2 - (uint8_t *)w.scale1, 256);
    assert_int_equal((uint8_t *)w.group1 - (uint8_t *)w.scale2, 256);
    assert_int_equal((uint8_t *)w.group2 - (uint8_t *)w.group1, 256);
    assert_int_equal((uint8_t *)w.work - (uint8_t *)w.group2, 256);
    assert_int_equal(w.bytes, 2 * 4608 + 2 * 2304 + 1024 + 256);
    assert_int_equal(moe_f8_weights_at(&problem, NULL).bytes, w.bytes);
    assert_int_equal(moe_f8_groups(256, MOE_F8_A_FEATURES), 2);
    assert_int_equal(moe_f8_groups(272, MOE_F8_DH_FEATURES), 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_code_is_right),
        cmocka_unit_test(rounds_to_nearest_even),
        cmocka_unit_test(saturates),
        cmocka_unit_test(a_scale_fits_the_largest_value),
        cmocka_unit_test(zeros_nan_and_inf_are_kept),
        cmocka_unit_test(integers_are_exact),
        cmocka_unit_test(bytes_are_shifted),
        cmocka_unit_test(no_byte_of_a_row_saturates),
        cmocka_unit_test(expected_exponents_are_right),
        cmocka_unit_test(parts_of_the_weights_have_their_places),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
