/* The arithmetic of the routing kernels that also compiles for the host (src/cuda/routing/route_math.h),
 * checked by brute force: sorting networks by the 0-1 principle, packed keys compared with
 * routing_decisions.h for all bf16 values, the fixed-point term, 16-bit keys, the order of added and dropped
 * tokens compared with a sort, and balance rounding compared with a loop over the experts. */
#include "cuda/routing/route_math.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

static uint32_t next_random(uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(*state >> 32);
}

static int falls(const int32_t *a, int count)
{
    for (int i = 0; i + 1 < count; i++)
        if (a[i] < a[i + 1]) return 0;
    return 1;
}

/* The 0-1 principle: a network that sorts every sequence of zeros and ones sorts every sequence. */
static void networks_sort(void **state)
{
    (void)state;
    for (int count = 4; count <= 16; count *= 2)
        for (uint32_t bits = 0; bits < UINT32_C(1) << count; bits++) {
            int32_t a[16], ones = 0;
            for (int i = 0; i < count; i++) ones += a[i] = bits >> i & 1;
            moe_sort_falling(a, count);
            assert_true(falls(a, count));
            for (int i = 0; i < count; i++) ones -= a[i];
            assert_int_equal(ones, 0);
        }
}

static int compare_falling(const void *a, const void *b)
{
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x < y) - (x > y);
}

static void merges_keep_the_best(void **state)
{
    (void)state;
    uint64_t random = 1;
    for (int count = 4; count <= 16; count *= 2)
        for (int round = 0; round < 20000; round++) {
            int32_t best[16], batch[16], all[32], excluded = INT32_MIN;
            const uint32_t spread = 1 + next_random(&random) % 40;
            for (int i = 0; i < count; i++) {
                all[i] = best[i] = (int32_t)(next_random(&random) % spread) - 10;
                all[count + i] = batch[i] = (int32_t)(next_random(&random) % spread) - 10;
            }
            moe_sort_falling(best, count);
            moe_sort_falling(batch, count);
            moe_merge_best(best, batch, count, &excluded);
            qsort(all, (size_t)(2 * count), sizeof *all, compare_falling);
            for (int i = 0; i < count; i++) assert_int_equal(best[i], all[i]);
            assert_int_equal(excluded, all[count]);
        }
}

static float bf16_value(uint32_t bits)
{
    return moe_float_of(bits << 16);
}

/* Rank keys and packed keys must order all neighbouring bf16 values alike; ties go to the lower expert. */
static void packed_bf16_keys_rank(void **state)
{
    (void)state;
    uint64_t random = 2;
    for (int i = 0; i < 4000000; i++) {
        const uint32_t draw = next_random(&random), a = draw & 0xffff, near = a ^ (draw >> 30),
                       b = i % 2 ? near : draw >> 16;
        if (moe_is_nan(bf16_value(a)) || moe_is_nan(bf16_value(b)) || a == 0x8000 || b == 0x8000) continue;
        const uint32_t e = next_random(&random) % 512, f = next_random(&random) % 512;
        if (e == f) continue;
        const uint32_t x = moe_rank_key(bf16_value(a)), y = moe_rank_key(bf16_value(b));
        const int better = x > y || (x == y && e < f);
        const int32_t p = moe_packed_bf16(a << 16, e), q = moe_packed_bf16(b << 16, f);
        assert_int_equal(p > q, better);
        assert_int_equal(0xffffu - ((uint32_t)p & 0xffffu), e);
    }
}

/* If two f32 packed keys do not collide, they must be in the order of the values. */
static void packed_f32_keys_rank_or_collide(void **state)
{
    (void)state;
    uint64_t random = 3;
    const uint32_t mask = moe_packed_mask(500);
    assert_int_equal(mask, 511);
    assert_int_equal(moe_packed_mask(512), 511);
    assert_int_equal(moe_packed_mask(8), 7);
    int collisions = 0;
    for (int i = 0; i < 4000000; i++) {
        const uint32_t a = next_random(&random),
                       b = i % 2 ? a ^ (next_random(&random) % 2048) : next_random(&random);
        const float x = moe_float_of(a), y = moe_float_of(b);
        if (moe_is_nan(x) || moe_is_nan(y) || a == 0x80000000u || b == 0x80000000u || a == b) continue;
        const int32_t p = moe_packed_f32(a, 3, mask), q = moe_packed_f32(b, 499, mask);
        collisions += moe_packed_collide(p, q, mask);
        if (!moe_packed_collide(p, q, mask)) assert_int_equal(p > q, moe_rank_key(x) > moe_rank_key(y));
        assert_int_equal(mask - ((uint32_t)p & mask), 3);
    }
    assert_true(collisions > 1000);
}

static void fixed_terms_agree(void **state)
{
    (void)state;
    assert_int_equal(moe_softmax_fixed_fast(1.0f), moe_softmax_fixed(1.0f));
    assert_int_equal(moe_softmax_fixed_fast(0.0f), 0);
    for (uint32_t bits = 0; bits < 0x3f800000u; bits += 257)
        assert_int_equal(moe_softmax_fixed_fast(moe_float_of(bits)), moe_softmax_fixed(moe_float_of(bits)));
}

/* The quotient that is computed from a reciprocal must have the bits of IEEE division. Tested with random
 * terms and sums, sums next to powers of two, sums with all bits set, and the smallest term. */
static void quotients_are_divisions(void **state)
{
    (void)state;
    uint64_t random = 6;
    for (int i = 0; i < 20000000; i++) {
        const uint32_t low = next_random(&random) & 0x7fffffu, exponent = 127 + next_random(&random) % 12;
        const uint32_t tail = i % 4 == 0 ? 0x7fffffu - low % 16 : i % 4 == 1 ? low % 16 : low;
        const float d = moe_float_of(exponent << 23 | tail);
        const uint32_t smallest = 0x12800000u, span = 0x3f800000u - smallest; /* 2^-90 .. 1 */
        const float x = moe_float_of(smallest + next_random(&random) % (span + 1));
        assert_true(moe_quotient_is_exact(x));
        assert_int_equal(moe_bits_of(moe_quotient(x, d, 1.0f / d)), moe_bits_of(x / d));
    }
    assert_false(moe_quotient_is_exact(moe_float_of(0x127fffffu)));
}

static void keys_of_16_bits_lose_nothing(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 65536; bits++) {
        const uint32_t key = moe_score_key(bf16_value(bits), SMOE_TYPE_BF16);
        assert_int_equal(moe_key_from_16(moe_key_to_16(key)), key);
        assert_true(moe_key_to_16(key) < 0xffffu);
    }
}

typedef struct token_key {
    uint32_t key, token;
} token_key;

static int adds_before(const void *a, const void *b)
{
    const token_key *x = a, *y = b;
    if (x->key != y->key) return x->key < y->key ? 1 : -1;
    return x->token < y->token ? -1 : 1;
}

/* Orders must sort tokens as the ranking of an expert does: the best are added first, the worst dropped
 * first. */
static void moves_come_in_order(void **state)
{
    (void)state;
    enum { TOKENS = 100 };
    uint64_t random = 4;
    for (int round = 0; round < 300; round++) {
        const int is_16 = round % 2;
        const uint32_t largest = is_16 ? 0xffffu : 0xffffffffu;
        token_key tokens[TOKENS];
        for (uint32_t t = 0; t < TOKENS; t++) {
            const float score = (float)(next_random(&random) % 7) / 3.0f - 1.0f;
            const uint32_t key =
                moe_score_key(round % 3 ? score : moe_float_of(next_random(&random)), SMOE_TYPE_BF16);
            tokens[t] = (token_key){is_16 ? moe_key_to_16(key) : key, t};
        }
        qsort(tokens, TOKENS, sizeof *tokens, adds_before);
        for (int i = 0; i + 1 < TOKENS; i++) {
            const token_key x = tokens[i], y = tokens[i + 1];
            const uint32_t add_x = moe_move_rank(1, x.key, largest), add_y = moe_move_rank(1, y.key, largest);
            const uint32_t drop_x = moe_move_rank(0, x.key, largest),
                           drop_y = moe_move_rank(0, y.key, largest);
            assert_true(add_x > 0 && drop_x > 0);
            assert_true(moe_move_order(1, add_x, x.token) > moe_move_order(1, add_y, y.token));
            assert_true(moe_move_order(0, drop_x, x.token) < moe_move_order(0, drop_y, y.token));
        }
    }
}

static void balance_needs_no_walk(void **state)
{
    (void)state;
    uint64_t random = 5;
    const int64_t tokens = 1 << 20;
    for (int round = 0; round < 200; round++) {
        const int64_t tile = 1 + next_random(&random) % (round % 2 ? 9 : 4096);
        int64_t residual = 0;
        uint64_t sum = 0;
        for (int e = 0; e < 300; e++) {
            assert_int_equal(moe_balance_residual(sum, tile), residual);
            const int64_t count = next_random(&random) % 20000, lo = moe_round_lo(count, tile);
            const int64_t hi = moe_round_hi(count, tile, tokens);
            residual += count - (hi != lo && moe_balance_f_picks_hi(count, lo, tile, residual) ? hi : lo);
            sum += (uint64_t)(count - lo);
        }
    }
}

/* The exact score must be within the bounds for every error that the hardware's exp2 may have. The bounds
 * must be so close that they decide nearly every key. */
static void bounds_hold_the_score(void **state)
{
    (void)state;
    uint64_t random = 11;
    int undecided = 0;
    const int rounds = 2000000;
    for (int i = 0; i < rounds; i++) {
        const float max = ((float)(next_random(&random) % 4001) - 2000.0f) / 100.0f;
        const float below = (float)(next_random(&random) >> 8) * 0x1p-24f;
        const float range = i % 3 == 0 ? 100.0f : i % 3 == 1 ? 12.0f : 1.0f;
        const float logit = bf16_value(moe_bits_of(max - range * below) >> 16);
        const float top = logit > max ? logit : max;
        const float sum = 1.0f + (float)(next_random(&random) >> 8) * 0x1p-15f;
        const float score = moe_div(moe_softmax_term(logit, top), sum);
        for (int side = -1; side <= 1; side++) {
            const float exp2_error = (float)side * 0x1p-22f;
            const moe_score_bounds b = moe_bound_score(logit, top, moe_mul(1.0f / sum, 1.0f + exp2_error));
            if (!b.known) continue;
            assert_true(b.low <= score && score <= b.high);
            undecided +=
                side == 0 && moe_bits_of(moe_round_to_bf16(b.low)) != moe_bits_of(moe_round_to_bf16(b.high));
        }
    }
    assert_true(undecided > 0 && undecided < rounds / 300);
    assert_false(moe_bound_score(0.0f, 200.0f, 1.0f).known);
    assert_false(moe_bound_score(moe_float_of(0x7fc00000u), 1.0f, 1.0f).known);
    assert_false(moe_bound_score(moe_float_of(0xff800000u), moe_float_of(0xff800000u), 1.0f).known);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(networks_sort),
        cmocka_unit_test(merges_keep_the_best),
        cmocka_unit_test(packed_bf16_keys_rank),
        cmocka_unit_test(packed_f32_keys_rank_or_collide),
        cmocka_unit_test(fixed_terms_agree),
        cmocka_unit_test(quotients_are_divisions),
        cmocka_unit_test(keys_of_16_bits_lose_nothing),
        cmocka_unit_test(moves_come_in_order),
        cmocka_unit_test(balance_needs_no_walk),
        cmocka_unit_test(bounds_hold_the_score),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
