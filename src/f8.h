/* fp8: the format e4m3, the scales, and the layout of what is quantised, for the host (C11) and the device
 * (CUDA). Both backends use it, so they produce the same bytes and scales.
 *
 * A quantised tensor has one byte for each element, and one scale for each group of elements. The scale is a
 * power of two, a float that multiplies the decoded bytes: x = decode(byte) scale. It is the least one with
 * which no element of the group exceeds the largest e4m3 number, 448.
 *
 *   tensor   bytes                   scales                             a group
 *   X        (T, d)                  (T)                                a token
 *   dO       (T, d)                  (T)                                a token
 *   W1, W2   moe_f8_weights          (E) each                           a matrix of an expert
 *   A        (padded_rows, n)        (padded_rows, ceil(n / 128))       128 features of a row
 *   dH       (padded_rows, h_width)  (padded_rows, ceil(n / 256))       256 features of a row, their gate and
 *                                                                       up columns together
 *
 * X and dO are quantised as the caller gives them, A as act(H) in f32 of the stored H (it is not rounded to
 * dtype first), dH as it is in f32. Bytes of pad rows are 0 where a sum over rows reads them.
 *
 * What an accumulator holds is a sum of products of decoded bytes. It is multiplied by the scale of the row,
 * then by the scale of the expert, each time in f32; then the bias is added:
 *
 *   H[r]   = (X8[t] W1_8[e]^T) scale_x[t] scale1[e] + b1[e]
 *   Y[r]   = (sum over the groups g of A of (A8[r, g] W2_8[e, g]^T) scale_a[r, g]) scale2[e] + b2[e]
 *   dA'[r] = (dO8[t] W2_8[e]) scale_do[t] scale2[e]
 *   dX~[r] = (sum over the groups g of dH of (dH8[r, g] W1_8[e, g]) scale_dh[r, g]) scale1[e]
 *
 * H, Y, dX~ and everything else stay in dtype or f32, as without fp8. dS = <dA', A> + <dO, b2> takes A in f32
 * and dO in dtype, db2 takes dO in dtype, db1 the quantised dH.
 *
 * A NaN or an inf makes every byte of its group NaN, with the scale 1, so that it shows in every element
 * that depends on the group. A group of zeros has the scale 1. */
#ifndef MOE_F8_H
#define MOE_F8_H

#include "problem.h"
#include "rank.h"

#include <assert.h>

enum {
    MOE_F8_MULTIPLE = 16, /* of d and n: TMA takes row strides that are multiples of 16 bytes */
    MOE_F8_A_FEATURES = 128,
    MOE_F8_DH_FEATURES = 256,
    MOE_F8_NAN = 0x7f,
    MOE_F8_MAX = 0x7e /* 448 */
};

/* ---- e4m3: a sign, 4 bits of exponent (bias 7), 3 bits of fraction; no infinity, NaN is 0x7f or 0xff ----
 */

/* The byte of x, rounded to the nearest, ties to even. Beyond 448, and for infinities, +-448; NaN gives 0x7f.
 * The instruction cvt.rn.satfinite.e4m3x2.f32 gives the same bytes. */
SMOE_HOST_DEVICE uint8_t moe_f8_of(float x)
{
    const uint32_t bits = moe_bits_of(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return MOE_F8_NAN;
    if (magnitude >= 0x43e00000u) return (uint8_t)(sign | MOE_F8_MAX); /* 448 */
    /* Below 2^-6 numbers are multiples of 2^-9, as floats near 2^14 are. */
    if (magnitude < 0x3c800000u)
        return (uint8_t)(sign | (moe_bits_of(moe_add(moe_float_of(magnitude), 16384.0f)) - 0x46800000u));
    const uint32_t rounded = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
    return (uint8_t)(sign | (rounded - ((127u - 7u) << 3)));
}

SMOE_HOST_DEVICE float moe_f8_value(uint8_t byte)
{
    const uint32_t magnitude = byte & 0x7fu, sign = (uint32_t)(byte & 0x80u) << 24;
    if (magnitude == MOE_F8_NAN) return moe_float_of(0x7fc00000u);
    if (magnitude < 8) return moe_mul((float)(int32_t)magnitude, sign ? -0x1p-9f : 0x1p-9f);
    return moe_float_of(sign | ((magnitude << 20) + ((127u - 7u) << 23)));
}

/* ---- Scales. amax: the bits of the largest magnitude of a group, as moe_f8_amax gathers them from 0 on.
 * Integers, so the order of the elements does not matter, and a NaN or an inf exceeds every number. ---- */

SMOE_HOST_DEVICE uint32_t moe_f8_amax(uint32_t amax, float x)
{
    const uint32_t magnitude = moe_bits_of(x) & 0x7fffffffu;
    return magnitude > amax ? magnitude : amax;
}

/* 2^k with amax / 2^k in (224, 448], but at least 2^-126; 1 if amax is 0 or not finite. 448 is 1.75 2^8, so
 * the exponent is that of amax less 8, and one more if amax's fraction exceeds 1.75. */
SMOE_HOST_DEVICE float moe_f8_scale(uint32_t amax)
{
    if (amax == 0 || amax >= 0x7f800000u) return 1.0f;
    const uint32_t exponent = (amax + 0x1fffffu) >> 23;
    return moe_float_of((exponent > 9 ? exponent - 8 : 1) << 23);
}

/* What multiplies an element before moe_f8_of: 1 / scale, or NaN for a group that is not finite. The product
 * is exact, or below 2^-126. */
SMOE_HOST_DEVICE float moe_f8_factor(uint32_t amax)
{
    if (amax >= 0x7f800000u) return moe_float_of(0x7fc00000u);
    return moe_float_of((254u << 23) - moe_bits_of(moe_f8_scale(amax)));
}

SMOE_HOST_DEVICE uint8_t moe_f8_quantize(float x, float factor)
{
    return moe_f8_of(moe_mul(x, factor));
}

/* ---- Layouts ---- */

/* Groups of a row of n features. */
SMOE_HOST_DEVICE int64_t moe_f8_groups(int64_t n, int64_t features)
{
    return (n + features - 1) / features;
}

/* weights_f8, one buffer a layer: each matrix as W is, and transposed with the same bytes. W1's rows are in
 * the order of H's columns (gate, then up) for both layouts of the caller's W1. */
typedef struct moe_f8_weights {
    uint8_t *w1;   /* (E, h_width, d) */
    uint8_t *w1_t; /* (E, d, h_width) */
    uint8_t *w2;   /* (E, d, n) */
    uint8_t *w2_t; /* (E, n, d) */
    float *scale1; /* (E) */
    float *scale2; /* (E) */
    uint64_t bytes;
} moe_f8_weights;

/* The parts inside a buffer; each begins at a multiple of SMOE_PART_ALIGN. With a NULL buffer only `bytes` is
 * valid. */
static inline moe_f8_weights moe_f8_weights_at(const moe_problem *problem, const void *buffer)
{
    const uint64_t experts = (uint64_t)problem->experts_here, d = (uint64_t)problem->layer.hidden;
    const uint64_t w1 = moe_align_up(experts * d * (uint64_t)problem->h_width);
    const uint64_t w2 = moe_align_up(experts * d * (uint64_t)problem->layer.intermediate);
    const uint64_t scales = moe_align_up(experts * sizeof(float));
    char *at = (char *)(uintptr_t)buffer;
    moe_f8_weights w = {0};
    w.bytes = 2 * w1 + 2 * w2 + 2 * scales;
    if (!buffer) return w;
    w.w1 = (uint8_t *)at;
    w.w1_t = w.w1 + w1;
    w.w2 = w.w1_t + w1;
    w.w2_t = w.w2 + w2;
    w.scale1 = (float *)(at + 2 * w1 + 2 * w2);
    w.scale2 = (float *)(at + 2 * w1 + 2 * w2 + scales);
    return w;
}

static_assert(MOE_F8_DH_FEATURES % MOE_F8_A_FEATURES == 0 && MOE_F8_A_FEATURES % MOE_F8_MULTIPLE == 0,
              "a group of A lies inside one of dH, and groups end at multiples of 16 bytes");
static_assert(SMOE_PART_ALIGN % 128 == 0, "TMA and swizzled tiles want parts aligned to 128 bytes");
static_assert(sizeof(float) == 4, "scales are floats of 4 bytes");

#endif
