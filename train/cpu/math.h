/* Elementary functions without tables and branches, so that the compiler can vectorise them. They give the
 * same bits on every call. exp_poly is within 2 units in the last place of expf on [-87, 88]; outside it
 * saturates, NaN stays NaN. */
#ifndef TRAIN_CPU_MATH_H
#define TRAIN_CPU_MATH_H

#include <stdint.h>
#include <string.h>

/* e^x = 2^k e^r, k = round(x / ln 2) taken from the low bits of x / ln 2 + 1.5 * 2^23, |r| <= ln 2 / 2. */
static inline float exp_poly(float x)
{
    const float round = 12582912.0f; // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float t = x * 1.44269504f + round, k = t - round;
    float r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &t, sizeof bits);
    bits = (bits << 23) + 0x3f800000u;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

static inline float sigmoid_poly(float x)
{
    return 1.0f / (1.0f + exp_poly(-x));
}

/* The largest of count >= 1 values, computed in lanes, because compilers do not vectorise a plain loop for
 * the maximum. */
static inline float largest(const float *x, int64_t count)
{
    enum { LANES = 16 };
    float lanes[LANES], top = x[0];
    for (int l = 0; l < LANES; l++) lanes[l] = top;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int l = 0; l < LANES; l++) lanes[l] = x[i + l] > lanes[l] ? x[i + l] : lanes[l];
    for (; i < count; i++) top = x[i] > top ? x[i] : top;
    for (int l = 0; l < LANES; l++) top = lanes[l] > top ? lanes[l] : top;
    return top;
}

#endif
