/* Arithmetic of the routing kernels that compiles for the host (where tests check it by brute force) and for
 * the device: sorting networks on small arrays, packed top-K keys, 16-bit ranking keys, the order of
 * candidates for rounding, the targets of balance rounding in closed form. routing_decisions.h says what each
 * decision means. */
#ifndef MOE_CUDA_ROUTE_MATH_H
#define MOE_CUDA_ROUTE_MATH_H

#include "host_device.h"
#include "routing_decisions.h"
#include <math.h>

#ifdef __CUDA_ARCH__
#define MOE_UNROLL _Pragma("unroll")
#else
#define MOE_UNROLL
#endif

/* ---- Networks. Falling order; every index is known after inlining, so that arrays stay in registers. ----
 */

MOE_HOST_DEVICE int32_t moe_larger(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

MOE_HOST_DEVICE int32_t moe_smaller(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

MOE_HOST_DEVICE void moe_exchange(int32_t *a, int i, int j)
{
    const int32_t high = moe_larger(a[i], a[j]), low = moe_smaller(a[i], a[j]);
    a[i] = high;
    a[j] = low;
}

MOE_HOST_DEVICE void moe_sort4(int32_t *a)
{
    moe_exchange(a, 0, 1), moe_exchange(a, 2, 3);
    moe_exchange(a, 0, 2), moe_exchange(a, 1, 3);
    moe_exchange(a, 1, 2);
}

/* Batcher's odd-even merge: pairs 4 apart, then 2 apart, then neighbours. */
MOE_HOST_DEVICE void moe_sort8(int32_t *a)
{
    moe_sort4(a), moe_sort4(a + 4);
    moe_exchange(a, 0, 4), moe_exchange(a, 1, 5), moe_exchange(a, 2, 6), moe_exchange(a, 3, 7);
    moe_exchange(a, 2, 4), moe_exchange(a, 3, 5);
    moe_exchange(a, 1, 2), moe_exchange(a, 3, 4), moe_exchange(a, 5, 6);
}

MOE_HOST_DEVICE void moe_sort16(int32_t *a)
{
    moe_sort8(a), moe_sort8(a + 8);
    MOE_UNROLL
    for (int i = 0; i < 8; i++) moe_exchange(a, i, i + 8);
    MOE_UNROLL
    for (int i = 4; i < 8; i++) moe_exchange(a, i, i + 4);
    moe_exchange(a, 2, 4), moe_exchange(a, 3, 5), moe_exchange(a, 6, 8);
    moe_exchange(a, 7, 9), moe_exchange(a, 10, 12), moe_exchange(a, 11, 13);
    MOE_UNROLL
    for (int i = 1; i < 15; i += 2) moe_exchange(a, i, i + 1);
}

MOE_HOST_DEVICE void moe_sort_falling(int32_t *a, int count)
{
    if (count == 4) moe_sort4(a);
    if (count == 8) moe_sort8(a);
    if (count == 16) moe_sort16(a);
}

/* Bitonic exchanges `step` apart. */
MOE_HOST_DEVICE void moe_merge_step(int32_t *a, int count, int step)
{
    MOE_UNROLL
    for (int i = 0; i < count; i++)
        if (!(i & step)) moe_exchange(a, i, i + step);
}

/* best and batch (count each, falling) -> best = the largest `count` of both, falling. The largest key that
 * is left out goes to *excluded if it is larger than what is there. */
MOE_HOST_DEVICE void moe_merge_best(int32_t *best, const int32_t *batch, int count, int32_t *excluded)
{
    MOE_UNROLL
    for (int i = 0; i < count; i++) {
        const int32_t other = batch[count - 1 - i];
        *excluded = moe_larger(*excluded, moe_smaller(best[i], other));
        best[i] = moe_larger(best[i], other);
    }
    if (count >= 16) moe_merge_step(best, count, 8);
    if (count >= 8) moe_merge_step(best, count, 4);
    moe_merge_step(best, count, 2);
    moe_merge_step(best, count, 1);
}

/* ---- Packed keys: the high bits order the value, the low bits are the complement of the expert's id. So the
 * larger key is the better expert, and ties go to the lower id. Not for NaN, and not for -0 (add 0 first).
 * ---- */

/* f32 bits as a signed integer of the same order; its own inverse. */
MOE_HOST_DEVICE int32_t moe_signed_order(uint32_t bits)
{
    return (int32_t)(bits ^ ((uint32_t)((int32_t)bits >> 31) & 0x7fffffffu));
}

/* bf16 in the high half: exact. For negative values the other bits are inverted, which reverses their order.
 */
MOE_HOST_DEVICE int32_t moe_packed_bf16(uint32_t bits_high, uint32_t expert)
{
    const uint32_t packed = bits_high | (0xffffu - expert);
    return (int32_t)(packed ^ ((uint32_t)((int32_t)packed >> 31) & 0x7fff0000u));
}

/* f32: the id replaces the low bits (`mask`) of the order. */
MOE_HOST_DEVICE int32_t moe_packed_f32(uint32_t bits, uint32_t expert, uint32_t mask)
{
    return (int32_t)(((uint32_t)moe_signed_order(bits) & ~mask) | (mask - expert));
}

MOE_HOST_DEVICE int moe_packed_collide(int32_t a, int32_t b, uint32_t mask)
{
    return (((uint32_t)a ^ (uint32_t)b) & ~mask) == 0;
}

/* The mask that holds ids below `experts`. */
MOE_HOST_DEVICE uint32_t moe_packed_mask(int64_t experts)
{
    uint32_t mask = 0;
    while ((int64_t)mask + 1 < experts) mask = 2 * mask + 1;
    return mask;
}

/* ---- moe_softmax_fixed in 32 bits and a carry: what to add to the sum. The device converts to 32-bit
 * integers four times as fast, and 2^32 (a term of exactly 1) is the one value past them. ---- */

MOE_HOST_DEVICE uint64_t moe_softmax_fixed_fast(float term)
{
    if (term >= 1.0f) return UINT64_C(1) << 32;
    return (uint32_t)moe_mul(term, 4294967296.0f);
}

/* ---- x / d for many x and one d: the quotient from the reciprocal, corrected twice by the exact remainder,
 * is the correctly rounded one (Markstein 1990) while nothing on the way is subnormal: x >= 2^-90 and 1 <= d
 * <= 4096 ---- */

MOE_HOST_DEVICE float moe_fused(float a, float b, float c)
{
#ifdef __CUDA_ARCH__
    return __fmaf_rn(a, b, c);
#else
    return fmaf(a, b, c);
#endif
}

MOE_HOST_DEVICE float moe_quotient(float x, float d, float reciprocal)
{
    float q = moe_mul(x, reciprocal);
    q = moe_fused(moe_fused(-q, d, x), reciprocal, q);
    q = moe_fused(moe_fused(-q, d, x), reciprocal, q);
    return q;
}

MOE_HOST_DEVICE int moe_quotient_is_exact(float x)
{
    return x >= 8.0779357e-28f; /* 2^-90 */
}

/* ---- Bounds of a score: moe_div(moe_softmax_term(logit, max), sum) lies between them, and they cost a
 * quarter of it. Relative errors: exp2 of the hardware 2^-22, the reciprocal and two products 2^-24 each,
 * moe_exp 10^-7, the division 2^-24, in all below 6.5 10^-7; |t| times the half ulp of t and the error of
 * log2 e, 5.2 10^-8. Not known where the score or a step towards it may be subnormal, infinite or NaN. ----
 */

typedef struct moe_score_bounds {
    float low, high;
    int known;
} moe_score_bounds;

MOE_HOST_DEVICE float moe_exp2_fast(float t)
{
#ifdef __CUDA_ARCH__
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(t));
    return e;
#else
    return exp2f(t);
#endif
}

MOE_HOST_DEVICE moe_score_bounds moe_bound_score(float logit, float max, float reciprocal)
{
    const float t = moe_mul(moe_add(logit, -max), 1.44269504f);
    const float score = moe_mul(moe_exp2_fast(t), reciprocal);
    const float error = moe_fused(t, -8e-8f, 1e-6f);
    const moe_score_bounds bounds = {moe_fused(-error, score, score), moe_fused(error, score, score),
                                     t >= -100.0f};
    return bounds;
}

/* ---- 16-bit keys: the high half of a key whose score was rounded to bf16 says it all ---- */

MOE_HOST_DEVICE uint32_t moe_key_to_16(uint32_t key)
{
    return key >> 16;
}

MOE_HOST_DEVICE uint32_t moe_key_from_16(uint32_t key16)
{
    if (key16 == 0) return 0; /* NaN */
    return key16 << 16 | (key16 & 0x8000u ? 0u : 0xffffu);
}

/* ---- Rounding an expert's count: candidates in the order in which they move. Adding takes unselected tokens
 * by falling key, then rising token; dropping takes selected tokens by rising key, then falling token. The
 * rank is never 0 (no key reaches largest_key, 0xffff or 0xffffffff), and larger moves first. ---- */

MOE_HOST_DEVICE uint32_t moe_move_rank(int adds, uint32_t key, uint32_t largest_key)
{
    return adds ? key + 1u : largest_key - key;
}

MOE_HOST_DEVICE uint64_t moe_move_order(int adds, uint32_t rank, uint32_t token)
{
    return (uint64_t)rank << 32 | (adds ? ~token : token);
}

/* ---- Balance rounding without the walk over experts: while no expert's hi is past T, the residual before
 * expert e is the sum of all c mod M before it, wrapped into (-M/2, M/2]. ---- */

MOE_HOST_DEVICE int64_t moe_balance_residual(uint64_t sum_before, int64_t tile)
{
    const int64_t r = (int64_t)(sum_before % (uint64_t)tile);
    return 2 * r > tile ? r - tile : r;
}

#endif
