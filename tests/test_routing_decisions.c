/* routing_decisions.h: the exp polynomial and the sigmoid compared with libm in double, ordered keys, sums
 * that do not depend on the order, Philox4x32-10 compared with the known answers published with Random123,
 * and the counts of the rounding rules compared with plain arithmetic. */
#include "routing_decisions.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>

static double relative_error(double got, double want)
{
    return fabs(got - want) / fabs(want);
}

static void exp_is_accurate(void **state)
{
    (void)state;
    double worst = 0.0;
    for (int64_t i = 1; i <= 4000000; i++) {
        const float d = (float)(-87.0 * (double)i / 4000000.0);
        worst = fmax(worst, relative_error((double)moe_exp(d), exp((double)d)));
    }
    for (float d = -1e-30f; d > -87.0f; d *= 1.01f)
        worst = fmax(worst, relative_error((double)moe_exp(d), exp((double)d)));
    print_message("exp: largest relative error %.3g\n", worst);
    assert_true(worst < 1e-7);
}

static void exp_is_right_at_the_edges(void **state)
{
    (void)state;
    assert_true(moe_exp(0.0f) == 1.0f);
    assert_true(moe_exp(-0.0f) == 1.0f);
    assert_true(moe_exp(-87.0f) > 1.17549435e-38f);
    assert_true(moe_exp(nextafterf(-87.0f, -100.0f)) == 0.0f);
    assert_true(moe_exp(-1e30f) == 0.0f);
    assert_true(moe_exp(-INFINITY) == 0.0f);
    assert_true(moe_exp(NAN) == 0.0f);
}

static void sigmoid_is_accurate(void **state)
{
    (void)state;
    double worst = 0.0;
    for (int64_t i = -870000; i <= 870000; i++) {
        const float l = (float)i * 1e-4f;
        worst = fmax(worst, relative_error((double)moe_sigmoid(l), 1.0 / (1.0 + exp(-(double)l))));
    }
    print_message("sigmoid: largest relative error %.3g\n", worst);
    assert_true(worst < 3e-7);
    assert_true(moe_sigmoid(0.0f) == 0.5f);
    assert_true(moe_sigmoid(INFINITY) == 1.0f);
    assert_true(moe_sigmoid(-INFINITY) == 0.0f);
    assert_true(isnan(moe_sigmoid(NAN)));
    assert_true(isnan(moe_sigmoid(-NAN)));
}

static void softmax_terms_and_sums_are_right(void **state)
{
    (void)state;
    assert_true(moe_softmax_term(INFINITY, INFINITY) == 1.0f);
    assert_true(moe_softmax_term(-INFINITY, -INFINITY) == 1.0f);
    assert_true(moe_softmax_term(3.0f, INFINITY) == 0.0f);
    assert_true(moe_softmax_term(-INFINITY, 3.0f) == 0.0f);
    assert_true(moe_softmax_term(NAN, 3.0f) == 0.0f);
    assert_true(moe_softmax_term(3.0f, 3.0f) == 1.0f);
    uint64_t rising = 0, falling = 0;
    double want = 0.0;
    for (int i = 0; i < 4096; i++) {
        rising += moe_softmax_fixed(moe_softmax_term(-(float)i * 0.004f, 0.0f));
        falling += moe_softmax_fixed(moe_softmax_term(-(float)(4095 - i) * 0.004f, 0.0f));
        want += exp(-(double)((float)i * 0.004f));
    }
    assert_int_equal(rising, falling);
    assert_true(relative_error((double)moe_softmax_sum(rising), want) < 2e-7);
    assert_true(moe_softmax_sum(4096 * moe_softmax_fixed(1.0f)) == 4096.0f);
}

static void keys_keep_the_order(void **state)
{
    (void)state;
    const float rising[] = {-INFINITY, -3e38f, -2.0f, -1.0f,  -1e-30f, -1e-45f, 0.0f,
                            1e-45f,    1e-38f, 0.5f,  0.625f, 1.0f,    3e38f,   INFINITY};
    const int count = sizeof rising / sizeof *rising;
    for (int i = 0; i < count; i++) {
        for (int j = 0; j < count; j++)
            assert_int_equal(moe_rank_key(rising[i]) < moe_rank_key(rising[j]), i < j);
        assert_true(moe_rank_value(moe_rank_key(rising[i])) == rising[i]);
        assert_true(moe_rank_key(NAN) < moe_rank_key(rising[i]));
        assert_true(moe_rank_key(-NAN) < moe_rank_key(rising[i]));
    }
    assert_int_equal(moe_rank_key(-0.0f), moe_rank_key(0.0f));
    assert_int_equal(moe_rank_key(NAN), 0);
    assert_true(isnan(moe_rank_value(0)));
}

static void bf16_rounds_to_nearest_even(void **state)
{
    (void)state;
    srand(1);
    for (int i = 0; i < 200000; i++) {
        const uint32_t tail = i % 4 == 0 ? 0x8000u : (uint32_t)rand() & 0xffffu; /* every fourth a tie */
        const uint32_t head = ((uint32_t)rand() % 0x7f7fu) << 16;
        const float x = moe_float_of(head | tail), rounded = moe_round_to_bf16(x);
        const float below = moe_float_of(head), above = moe_float_of(head + 0x10000u);
        const double down = (double)x - (double)below, up = (double)above - (double)x;
        const int to_below = down < up || (down == up && (head >> 16) % 2 == 0);
        assert_true(rounded == (to_below ? below : above));
        assert_true(moe_round_to_bf16(-x) == -rounded);
    }
    assert_true(isnan(moe_round_to_bf16(moe_float_of(0x7f800001u))));
    assert_true(isnan(moe_round_to_bf16(moe_float_of(0xffffffffu))));
    assert_true(moe_round_to_bf16(INFINITY) == INFINITY);
    assert_int_equal(moe_score_key(0.30000001f, SMOE_TYPE_BF16) & 0xffffu, 0);
    assert_int_equal(moe_score_key(0.30000001f, SMOE_TYPE_BF16), moe_score_key(0.2999f, SMOE_TYPE_BF16));
    assert_true(moe_score_key(0.30000001f, SMOE_TYPE_F32) > moe_score_key(0.2999f, SMOE_TYPE_F32));
}

static void philox_gives_the_known_answers(void **state)
{
    (void)state;
    static const struct {
        uint32_t counter[4], key[2], words[4];
    } known[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (int i = 0; i < 3; i++) {
        uint32_t x[4];
        memcpy(x, known[i].counter, sizeof x);
        moe_philox(x, known[i].key[0], known[i].key[1]);
        assert_memory_equal(x, known[i].words, sizeof x);
    }
    /* The places of seed, step and expert in key and counter. */
    uint32_t x[4] = {0x33334444, 0x11112222, 77, 0};
    moe_philox(x, 0x77778888, 0x55556666);
    assert_int_equal(moe_round_draw(0x5555666677778888u, 0x1111222233334444u, 77), x[0]);
}

static void picks_follow_the_rules(void **state)
{
    (void)state;
    static const int tiles[] = {1, 2, 3, 7, 64, 100, 128, 4096};
    for (int i = 0; i < 8; i++) {
        const int tile = tiles[i];
        for (int tokens = 1; tokens < 300; tokens += 13) {
            for (int c = 0; c <= tokens; c++) {
                const double tiles_full = (double)c / tile;
                const double lo = tile * floor(tiles_full), hi = tile * ceil(tiles_full);
                const int64_t got = moe_round_lo(c, tile);
                assert_true((double)got == lo);
                assert_true((double)moe_round_hi(c, tile, tokens) == (hi > tokens ? lo : hi));
                assert_int_equal(moe_nr_f_picks_hi(c, got, tile), c - lo > tile / 2.0);
                for (int r = -5; r < 5; r++)
                    assert_int_equal(moe_balance_f_picks_hi(c, got, tile, r), c + r - lo > tile / 2.0);
                const uint32_t draw = (uint32_t)rand() << 1;
                assert_int_equal(moe_sr_f_picks_hi(c, got, tile, draw),
                                 draw / 4294967296.0 < (c - lo) / tile);
            }
        }
    }
    assert_false(moe_nr_s_picks_hi(5, 5));
    assert_true(moe_nr_s_picks_hi(-1, 0));
}

static void stochastic_picks_have_the_mean(void **state)
{
    (void)state;
    int picks = 0;
    for (int step = 0; step < 1000; step++)
        for (int e = 0; e < 32; e++)
            picks += moe_sr_f_picks_hi(67, 64, 8, moe_round_draw(7, (uint64_t)step, e));
    const double mean = 32000.0 * 3 / 8, deviation = sqrt(32000.0 * 3 / 8 * 5 / 8);
    assert_true(fabs(picks - mean) < 4 * deviation);
}

static void scores_are_fixed_points(void **state)
{
    (void)state;
    assert_int_equal(moe_score_fixed(moe_rank_key(1.0f)), INT64_C(1) << 32);
    assert_int_equal(moe_score_fixed(moe_rank_key(-0.75f)), -(INT64_C(3) << 30));
    assert_int_equal(moe_score_fixed(moe_rank_key(1e-12f)), 0);
    assert_int_equal(moe_score_fixed(moe_rank_key(NAN)), 0);
    assert_int_equal(moe_score_fixed(moe_rank_key(INFINITY)), INT64_C(1) << 48);
    assert_int_equal(moe_score_fixed(moe_rank_key(-INFINITY)), -(INT64_C(1) << 48));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exp_is_accurate),
        cmocka_unit_test(exp_is_right_at_the_edges),
        cmocka_unit_test(sigmoid_is_accurate),
        cmocka_unit_test(softmax_terms_and_sums_are_right),
        cmocka_unit_test(keys_keep_the_order),
        cmocka_unit_test(bf16_rounds_to_nearest_even),
        cmocka_unit_test(philox_gives_the_known_answers),
        cmocka_unit_test(picks_follow_the_rules),
        cmocka_unit_test(stochastic_picks_have_the_mean),
        cmocka_unit_test(scores_are_fixed_points),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
