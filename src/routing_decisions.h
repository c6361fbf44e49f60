/* The arithmetic of every routing decision, for the host (C11) and the device (CUDA). Both backends use it,
 * so their decisions are the same, bit for bit. It consists of ordered keys, one exp polynomial, fixed-point
 * sums whose order does not matter, Philox4x32-10, and the rounding rules.
 *
 * Float operations go through moe_add, moe_mul and moe_div, which round once each and are never contracted
 * to a fused multiply-add: by intrinsics on the device, by -ffp-contract=off on the host. */
#ifndef MOE_ROUTING_DECISIONS_H
#define MOE_ROUTING_DECISIONS_H

#include "scores.h"

#include <string.h>

/* ---- Float operations ---- */

MOE_HOST_DEVICE float moe_add(float a, float b)
{
#ifdef __CUDA_ARCH__
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}

MOE_HOST_DEVICE float moe_mul(float a, float b)
{
#ifdef __CUDA_ARCH__
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

MOE_HOST_DEVICE float moe_div(float a, float b)
{
#ifdef __CUDA_ARCH__
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

MOE_HOST_DEVICE uint32_t moe_bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

MOE_HOST_DEVICE float moe_float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* condition ? a : b by masks. Compilers turn the usual form into branches, and loops with branches are not
 * vectorised.
 */
MOE_HOST_DEVICE float moe_select(int condition, float a, float b)
{
    const uint32_t mask = 0u - (uint32_t)condition;
    return moe_float_of((moe_bits_of(a) & mask) | (moe_bits_of(b) & ~mask));
}

MOE_HOST_DEVICE int moe_is_nan(float x)
{
    return (moe_bits_of(x) & 0x7fffffffu) > 0x7f800000u;
}

/* ---- Keys ---- */

/* x as an unsigned integer of the same order. NaN becomes 0 and so ranks below -inf. 0 and -0 have the same
 * key. */
MOE_HOST_DEVICE uint32_t moe_rank_key(float x)
{
    const uint32_t given = moe_bits_of(x), bits = given == 0x80000000u ? 0u : given;
    const uint32_t ordered = bits ^ ((0u - (bits >> 31)) | 0x80000000u);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0u : ordered;
}

/* The x of a key; NaN for 0. */
MOE_HOST_DEVICE float moe_rank_value(uint32_t key)
{
    return moe_float_of(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

/* x rounded to bf16, nearest even, as an f32; NaN stays NaN. */
MOE_HOST_DEVICE float moe_round_to_bf16(float x)
{
    const uint32_t bits = moe_bits_of(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    return moe_is_nan(x) ? moe_float_of(0x7fc00000u) : moe_float_of(rounded);
}

/* ---- What follows from an enumerator. No switch has a default: an enumerator of smoe.h that one of them
 * lacks is an error in every C file that includes this. ---- */

#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Wswitch"

/* The key that ranks a token inside an expert. With bf16 logits the score is rounded to bf16 first. The low
 * 16 bits of the key are then the same for all scores of one sign (0 for positive scores), so the high 16
 * bits suffice. For a type that logits cannot have, the result is the lowest key, 0. */
MOE_HOST_DEVICE uint32_t moe_score_key(float score, smoe_type logits_type)
{
    switch (logits_type) {
    case SMOE_TYPE_F32: return moe_rank_key(score);
    case SMOE_TYPE_BF16: return moe_rank_key(moe_round_to_bf16(score));
    case SMOE_TYPE_F16:
    case SMOE_TYPE_I32:
    case SMOE_TYPE_I64: break;
    }
    return 0;
}

#pragma GCC diagnostic pop

/* ---- exp, softmax, sigmoid ---- */

/* exp(d) for d <= 0, exactly 1 at 0, 0 below -87 (exp(-87) = 1.6e-38 is still normal) and for NaN. Relative
 * error below 1e-7. d = i ln 2 + r with |r| <= ln 2 / 2; ln 2 in two parts, of which the first has 9 bits,
 * so that i times it is exact; exp(r) = 1 + r + r^2 q(r), q of degree 4 through the Chebyshev nodes. */
MOE_HOST_DEVICE float moe_exp(float d)
{
    const float shift = 12582912.0f; /* 1.5 2^23: adding it leaves the nearest integer in the low bits */
    const float shifted = moe_add(moe_mul(d, 1.44269504f), shift);
    const float i = moe_add(shifted, -shift);
    float r = moe_add(d, moe_mul(i, -0.693359375f));
    r = moe_add(r, moe_mul(i, 0.000212194442f));
    float q = 0.00139262504f;
    q = moe_add(moe_mul(q, r), 0.00836323295f);
    q = moe_add(moe_mul(q, r), 0.0416665524f);
    q = moe_add(moe_mul(q, r), 0.166665763f);
    q = moe_add(moe_mul(q, r), 0.5f);
    const float e = moe_add(1.0f, moe_add(r, moe_mul(moe_mul(r, r), q)));
    const uint32_t power = (moe_bits_of(shifted) - 0x4b400000u + 127u) << 23;
    return moe_select(d >= -87.0f, moe_mul(e, moe_float_of(power)), 0.0f);
}

/* exp(logit - max): 1 where the logit is the maximum (infinite ones too), 0 for NaN. */
MOE_HOST_DEVICE float moe_softmax_term(float logit, float max)
{
    const float term = moe_exp(moe_add(logit, -max));
    return moe_select(logit == max, 1.0f, term);
}

/* A term (0..1) in fixed point. Sums of up to 4096 terms are exact, so their order does not matter. */
MOE_HOST_DEVICE uint64_t moe_softmax_fixed(float term)
{
    return (uint64_t)(int64_t)moe_mul(term, 4294967296.0f);
}

/* The sum of a softmax's terms. p = moe_div(term, sum). */
MOE_HOST_DEVICE float moe_softmax_sum(uint64_t fixed)
{
    return moe_mul((float)fixed, 2.3283064365386963e-10f);
}

/* 1 / (1 + exp(-logit)); NaN for NaN. */
MOE_HOST_DEVICE float moe_sigmoid(float logit)
{
    const float e = moe_exp(logit < 0.0f ? logit : -logit);
    const float s = moe_div(logit < 0.0f ? e : 1.0f, moe_add(1.0f, e));
    return moe_is_nan(logit) ? logit : s;
}

/* ---- Scores with a curve: MOE_VALUE_CURVE for each of scores.h ---- */

#define MOE_VALUE_softmax break
#define MOE_VALUE_sigmoid return moe_sigmoid(logit)

#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Wswitch"

/* f of a logit. Not asked of a softmax. */
MOE_HOST_DEVICE float moe_score_value(smoe_score score, float logit)
{
    switch (score) {
#define MOE_CASE(enumerator, name, key, value, over, selection)                                              \
    case enumerator: MOE_VALUE_##value;
        MOE_SCORES(MOE_CASE)
#undef MOE_CASE
    }
    return moe_sigmoid(logit);
}

#define MOE_RAW_all  return moe_div(moe_softmax_term(logit, max), sum)
#define MOE_RAW_kept return moe_softmax_term(logit, first)
#define MOE_RAW_none break

/* A kept pair's weight before it is divided. first: the logit of the token's best expert; max and sum: of the
 * softmax over all E. */
MOE_HOST_DEVICE float moe_raw_weight(smoe_score score, float logit, float first, float max, float sum)
{
    switch (score) {
#define MOE_CASE(enumerator, name, key, value, over, selection)                                              \
    case enumerator: MOE_RAW_##over;
        MOE_SCORES(MOE_CASE)
#undef MOE_CASE
    }
    return moe_score_value(score, logit);
}

#pragma GCC diagnostic pop

/* ---- Rounding rules: c an expert's count under plain top-K, M the tile, T the tokens ---- */

/* M floor(c / M). */
MOE_HOST_DEVICE int64_t moe_round_lo(int64_t c, int64_t tile)
{
    return c / tile * tile;
}

/* M ceil(c / M), or lo where that is past T. */
MOE_HOST_DEVICE int64_t moe_round_hi(int64_t c, int64_t tile, int64_t tokens)
{
    const int64_t lo = moe_round_lo(c, tile);
    return c == lo || lo + tile > tokens ? lo : lo + tile;
}

/* One of the ten rounds of Philox4x32 (Salmon et al., SC 2011). */
MOE_HOST_DEVICE void moe_philox_round(uint32_t x[4], uint32_t key0, uint32_t key1)
{
    const uint64_t a = (uint64_t)0xd2511f53u * x[0], b = (uint64_t)0xcd9e8d57u * x[2];
    const uint32_t x1 = x[1], x3 = x[3];
    x[0] = (uint32_t)(b >> 32) ^ x1 ^ key0;
    x[1] = (uint32_t)b;
    x[2] = (uint32_t)(a >> 32) ^ x3 ^ key1;
    x[3] = (uint32_t)a;
}

/* Philox4x32-10: the counter x becomes the random words. */
MOE_HOST_DEVICE void moe_philox(uint32_t x[4], uint32_t key0, uint32_t key1)
{
    for (int i = 0; i < 10; i++) {
        moe_philox_round(x, key0, key1);
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
}

/* u 2^32 of SR-f: the first word at key seed, counter (step, expert, 0), low words first. */
MOE_HOST_DEVICE uint32_t moe_round_draw(uint64_t seed, uint64_t step, int64_t expert)
{
    uint32_t x[4] = {(uint32_t)step, (uint32_t)(step >> 32), (uint32_t)expert, 0};
    moe_philox(x, (uint32_t)seed, (uint32_t)(seed >> 32));
    return x[0];
}

/* One function for each rule: does it take hi rather than lo? */

MOE_HOST_DEVICE int moe_nr_f_picks_hi(int64_t c, int64_t lo, int64_t tile)
{
    return 2 * (c - lo) > tile;
}

MOE_HOST_DEVICE int moe_sr_f_picks_hi(int64_t c, int64_t lo, int64_t tile, uint32_t draw)
{
    return (uint64_t)draw * (uint64_t)tile < (uint64_t)(c - lo) << 32;
}

MOE_HOST_DEVICE int moe_nr_s_picks_hi(int64_t added_score, int64_t dropped_score)
{
    return added_score < dropped_score;
}

MOE_HOST_DEVICE int moe_balance_f_picks_hi(int64_t c, int64_t lo, int64_t tile, int64_t residual)
{
    return 2 * (c + residual - lo) > tile;
}

/* A score in the signed fixed point of NR-s, from its key: the score times 2^32, rounded towards zero. It is
 * limited to +-2^16, so that sums of fewer than 4096 scores fit. NaN becomes 0. */
MOE_HOST_DEVICE int64_t moe_score_fixed(uint32_t key)
{
    const float score = moe_rank_value(key);
    if (moe_is_nan(score)) return 0;
    const float held = score > 65536.0f ? 65536.0f : score < -65536.0f ? -65536.0f : score;
    return (int64_t)moe_mul(held, 4294967296.0f);
}

#endif
