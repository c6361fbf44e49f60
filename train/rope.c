/* See rope.h. */
#include "train/rope.h"

#include <math.h>

void rope_table(float *table, int64_t context, int64_t head_size, double theta)
{
    int64_t half = head_size / 2;
    for (int64_t p = 0; p < context; p++)
        for (int64_t i = 0; i < half; i++) {
            double angle = (double)p * pow(theta, -2.0 * (double)i / (double)head_size);
            table[p * head_size + i] = (float)cos(angle);
            table[p * head_size + half + i] = (float)sin(angle);
        }
}

static void turn(float *restrict x, const float *restrict cosine, const float *restrict sine, int64_t half,
                 float sign)
{
    float *restrict low = x, *restrict high = x + half;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float a = low[i], b = high[i], s = sign * sine[i];
        low[i] = a * cosine[i] - b * s;
        high[i] = b * cosine[i] + a * s;
    }
}

void rope_apply(float *x, const float *table, int64_t rows, int64_t length, int64_t heads, int64_t head_size,
                bool inverse)
{
#pragma omp parallel for schedule(dynamic, 64)
    for (int64_t r = 0; r < rows; r++) {
        const float *row = table + (r % length) * head_size;
        for (int64_t h = 0; h < heads; h++)
            turn(x + (r * heads + h) * head_size, row, row + head_size / 2, head_size / 2,
                 inverse ? -1.0f : 1.0f);
    }
}
