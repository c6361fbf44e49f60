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
 * and dO in dtype, db2 takes dO in dtype, db1 the quantised dH (with F8_DGRAD, where dH is stored in dtype
 * too: that).
 *
 * A NaN or an inf makes every byte of its group NaN, with the scale 1, so that it shows in every element
 * that depends on the group. A group of zeros has the least scale, 2^-126, so that its scale never counts
 * where the largest of several is taken.
 *
 * What dw reads. dW1[e] and dW2[e] are sums over the rows of an expert, so there no scale of a row can be
 * taken out of the sum. dw reads the bytes of X and dO as they are, with the scale of their token, and copies
 * of dH and A' that are written for dw alone and that make up for it. Per row r and group g of 256 features:
 *
 *   dH_w (padded_rows, h_width) = e4m3 of dH[r] 2^(ex(t) - w1(r, g));  2^ex is the scale of X[t]
 *   A'_w (padded_rows, n)       = e4m3 of A'[r] 2^(eo(t) - w2(r, g));  2^eo is the scale of dO[t]
 *   dW1[e, g] = 2^C1(e, g) sum_r dH_w[r, g]^T (X8[t] 2^(w1(r, g) - C1(e, g)))
 *   dW2[e, g] = 2^C2(e, g) sum_r (dO8[t] 2^(w2(r, g) - C2(e, g)))^T A'_w[r, g]
 *
 * On CUDA both copies are in groups of 16 rows, so that dw loads them as wgmma's K-major matrices without
 * swizzle: (padded_rows / 16, columns, 16), in the order of moe_f8_dw_byte. A block of 64 rows belongs to one
 * expert, so a group does too. Bytes of pad rows are 0.
 *
 * The products in brackets are rounded to e4m3 (moe_f8_shifted). C is the largest w of the expert's rows. w
 * is a number that is the same for all rows of the expert, moe_f8_expected of the group, except for rows
 * whose values are too large for it. If there is no such row, every factor in brackets is 1, and dw needs
 * none.
 *
 * The expected exponent follows from scales that are known before dh runs. It may be up to 6 more than is
 * needed, since e4m3 has its full precision from 2^-6 to 2^8: dW1's error grows from 6.8 to 6.9 % with 6,
 * to 8.2 % with 8, to 16 % with 10 (studies/fp8). */
#ifndef MOE_F8_H
#define MOE_F8_H

#include "problem.h"
#include "routing_decisions.h"

#include <assert.h>

enum {
    MOE_F8_MULTIPLE = 16, /* of d and n: TMA takes row strides that are multiples of 16 bytes */
    MOE_F8_A_FEATURES = 128,
    MOE_F8_DH_FEATURES = 256,
    MOE_F8_WORK_BYTES = 32,
    MOE_F8_NAN = 0x7f,
    MOE_F8_MAX = 0x7e /* 448 */
};

/* ---- e4m3: a sign, 4 bits of exponent (bias 7), 3 bits of fraction; no infinity, NaN is 0x7f or 0xff ----
 */

/* The byte of x, rounded to the nearest, ties to even. Beyond 448, and for infinities, +-448; NaN gives 0x7f.
 * The instruction cvt.rn.satfinite.e4m3x2.f32 gives the same bytes. */
MOE_HOST_DEVICE uint8_t moe_f8_of(float x)
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

MOE_HOST_DEVICE float moe_f8_value(uint8_t byte)
{
    const uint32_t magnitude = byte & 0x7fu, sign = (uint32_t)(byte & 0x80u) << 24;
    if (magnitude == MOE_F8_NAN) return moe_float_of(0x7fc00000u);
    if (magnitude < 8) return moe_mul((float)(int32_t)magnitude, sign ? -0x1p-9f : 0x1p-9f);
    return moe_float_of(sign | ((magnitude << 20) + ((127u - 7u) << 23)));
}

/* ---- Scales. amax: the bits of the largest magnitude of a group, as moe_f8_amax gathers them from 0 on.
 * Integers, so the order of the elements does not matter, and a NaN or an inf exceeds every number. ---- */

MOE_HOST_DEVICE uint32_t moe_f8_amax(uint32_t amax, float x)
{
    const uint32_t magnitude = moe_bits_of(x) & 0x7fffffffu;
    return magnitude > amax ? magnitude : amax;
}

/* 2^k with amax / 2^k in (224, 448], but at least 2^-126; 1 if amax is not finite. 448 is 1.75 2^8, so
 * the exponent is that of amax less 8, and one more if amax's fraction exceeds 1.75. */
MOE_HOST_DEVICE float moe_f8_scale(uint32_t amax)
{
    if (amax >= 0x7f800000u) return 1.0f;
    const uint32_t exponent = (amax + 0x1fffffu) >> 23;
    return moe_float_of((exponent > 9 ? exponent - 8 : 1) << 23);
}

/* What multiplies an element before moe_f8_of: 1 / scale, or NaN for a group that is not finite. The product
 * is exact, or below 2^-126. */
MOE_HOST_DEVICE float moe_f8_factor(uint32_t amax)
{
    if (amax >= 0x7f800000u) return moe_float_of(0x7fc00000u);
    return moe_float_of((254u << 23) - moe_bits_of(moe_f8_scale(amax)));
}

MOE_HOST_DEVICE uint8_t moe_f8_quantize(float x, float factor)
{
    return moe_f8_of(moe_mul(x, factor));
}

/* ---- dw ---- */

enum { MOE_F8_LEAST = -126, MOE_F8_MOST = 127 /* of w, and of every exponent of a normal float */ };

/* k of a float 2^k (1 + f); -127 for 0. */
MOE_HOST_DEVICE int32_t moe_f8_exponent(float x)
{
    return (int32_t)(moe_bits_of(x) >> 23 & 255u) - 127;
}

/* 2^k; 0 below 2^-126, 2^127 above it. */
MOE_HOST_DEVICE float moe_f8_power(int32_t k)
{
    if (k < MOE_F8_LEAST) return 0.0f;
    return moe_float_of((uint32_t)((k > MOE_F8_MOST ? MOE_F8_MOST : k) + 127) << 23);
}

/* byte 2^k for k <= 0, rounded to e4m3. */
MOE_HOST_DEVICE uint8_t moe_f8_shifted(uint8_t byte, int32_t k)
{
    return moe_f8_of(moe_mul(moe_f8_value(byte), moe_f8_power(k)));
}

/* What a row adds to the size of its expert, which is the largest of its rows' (MOE_F8_NO_ROWS without rows).
 * degree: A grows with this power of H, and dH with one less. */
enum { MOE_F8_NO_ROWS = -10000 };
MOE_HOST_DEVICE int32_t moe_f8_row_size(float scale_x, float scale_do, float weight, int degree)
{
    return moe_f8_exponent(scale_do) + moe_f8_exponent(weight) + degree * moe_f8_exponent(scale_x);
}

static inline int moe_f8_degree(const moe_problem *problem)
{
    return problem->gated || problem->layer.activation == SMOE_ACTIVATION_RELU2 ? 2 : 1;
}

/* The part of the expected exponent that depends on d: log2(448^3 d) - 7 for degree 2, log2(448^2 d^(1/2)) -
 * 10 for degree 1. 7 and 10 are measured: studies/fp8 compares what is expected with what the largest row
 * needs. For degree 2 that leaves 0 to 5 to spare, -1 (so factors are needed) in some tiles of widely
 * different tokens, 5 to 9 for outliers in channels of X or in features that W2 makes small. */
static inline int32_t moe_f8_expected_of_size(const moe_problem *problem)
{
    const int degree = moe_f8_degree(problem);
    int32_t log2_d = 0;
    while ((int64_t)1 << log2_d < problem->layer.hidden) log2_d++;
    return degree == 2 ? log2_d + 19 : (log2_d + 1) / 2 + 8;
}

/* The expected exponent of a group of features: size is the expert's, group1 and group2 are in weights_f8.
 * for_dw1: of dH_w, else of A'_w. */
MOE_HOST_DEVICE int32_t moe_f8_expected(int32_t size, float group1, float group2, int degree, int32_t of_size,
                                        int for_dw1)
{
    const int32_t e1 = moe_f8_exponent(group1), e2 = moe_f8_exponent(group2);
    const int32_t weights = degree * e1 + (for_dw1 ? e2 - e1 : 0), exponent = size + weights + of_size;
    return exponent < MOE_F8_LEAST ? MOE_F8_LEAST : exponent > MOE_F8_MOST ? MOE_F8_MOST : exponent;
}

/* w of a group of dH (or A') with this amax; token_scale: of X[t] (or dO[t]). */
MOE_HOST_DEVICE int32_t moe_f8_row_exponent(int32_t expected, uint32_t amax, float token_scale)
{
    const int32_t own = moe_f8_exponent(moe_f8_scale(amax)) + moe_f8_exponent(token_scale);
    return own <= expected ? expected : own > MOE_F8_MOST ? MOE_F8_MOST : own;
}

/* What multiplies an element of dH or A' before moe_f8_of: 2^(ex - w), or NaN for a group that is not finite.
 */
MOE_HOST_DEVICE float moe_f8_row_factor(int32_t w, uint32_t amax, float token_scale)
{
    if (amax >= 0x7f800000u) return moe_float_of(0x7fc00000u);
    return moe_f8_power(moe_f8_exponent(token_scale) - w);
}

/* ---- Layouts ---- */

/* Where dH_w (columns: h_width, gate before up) and A'_w (columns: n) have a row's byte of a column. The rows
 * of a group are in the order 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15, in which ldmatrix.trans leaves those
 * of X8 and dO8. */
MOE_HOST_DEVICE int64_t moe_f8_dw_byte(int64_t row, int64_t column, int64_t columns)
{
    const int64_t in = row & 15;
    return (row / 16 * columns + column) * 16 + (in & 7) / 2 * 4 + in / 8 * 2 + (in & 1);
}

/* Groups of a row of n features. */
MOE_HOST_DEVICE int64_t moe_f8_groups(int64_t n, int64_t features)
{
    return (n + features - 1) / features;
}

/* Of an expert's `work`: counters, and a number for each group of W1 and of W2. */
MOE_HOST_DEVICE int64_t moe_f8_work_bytes(int64_t groups)
{
    return MOE_F8_WORK_BYTES + 2 * groups * (int64_t)sizeof(uint32_t);
}

/* weights_f8, one buffer a layer: each matrix as W is, and transposed with the same bytes. W1's rows are in
 * the order of H's columns (gate, then up) for both layouts of the caller's W1. */
typedef struct moe_f8_weights {
    uint8_t *w1;   /* (E, h_width, d): the forward reads w1 and w2, on the CPU the backward too */
    uint8_t *w1_t; /* (E, d, h_width): CUDA's backward reads w1_t and w2_t */
    uint8_t *w2;   /* (E, d, n) */
    uint8_t *w2_t; /* (E, n, d) */
    float *scale1; /* (E) */
    float *scale2; /* (E) */
    float *group1; /* (E, ceil(n / 256)): the scale that W1's rows of 256 features alone would have, and */
    float *group2; /* the same, W2's columns: moe_f8_expected reads them */
    void *work;    /* (E, moe_f8_work_bytes), of the CUDA backend while it quantises */
    uint64_t bytes;
} moe_f8_weights; /* python/smoe/fsdp.py has the same parts, and fills those that are read */

/* The parts inside a buffer; each begins at a multiple of MOE_PART_ALIGN. With a NULL buffer only `bytes` is
 * valid. */
static inline moe_f8_weights moe_f8_weights_at(const moe_problem *problem, const void *buffer)
{
    const uint64_t experts = (uint64_t)problem->experts_here, d = (uint64_t)problem->layer.hidden;
    const uint64_t w1 = moe_align_up(experts * d * (uint64_t)problem->h_width);
    const uint64_t w2 = moe_align_up(experts * d * (uint64_t)problem->layer.intermediate);
    const uint64_t scales = moe_align_up(experts * sizeof(float));
    const int64_t groups = moe_f8_groups(problem->layer.intermediate, MOE_F8_DH_FEATURES);
    const uint64_t of_groups = moe_align_up(experts * (uint64_t)groups * sizeof(float));
    const uint64_t work = moe_align_up(experts * (uint64_t)moe_f8_work_bytes(groups));
    char *at = (char *)(uintptr_t)buffer;
    moe_f8_weights w = {0};
    w.bytes = 2 * w1 + 2 * w2 + 2 * scales + 2 * of_groups + work;
    if (!buffer) return w;
    w.w1 = (uint8_t *)at;
    w.w1_t = w.w1 + w1;
    w.w2 = w.w1_t + w1;
    w.w2_t = w.w2 + w2;
    w.scale1 = (float *)(at + 2 * w1 + 2 * w2);
    w.scale2 = (float *)(at + 2 * w1 + 2 * w2 + scales);
    w.group1 = (float *)(at + 2 * w1 + 2 * w2 + 2 * scales);
    w.group2 = (float *)(at + 2 * w1 + 2 * w2 + 2 * scales + of_groups);
    w.work = at + 2 * w1 + 2 * w2 + 2 * scales + 2 * of_groups;
    return w;
}

static_assert(MOE_F8_DH_FEATURES % MOE_F8_A_FEATURES == 0 && MOE_F8_A_FEATURES % MOE_F8_MULTIPLE == 0,
              "a group of A lies inside one of dH, and groups end at multiples of 16 bytes");
static_assert(MOE_PART_ALIGN % 128 == 0, "TMA and swizzled tiles want parts aligned to 128 bytes");
static_assert(sizeof(float) == 4, "scales are floats of 4 bytes");

#endif
