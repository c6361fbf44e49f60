/* See rope.h. */
#include "train/cpu/rope.h"

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

void rope_apply(float *x, const float *table, int64_t rows, const pass_shape *shape, bool inverse)
{
    int64_t heads = shape->heads, head_size = shape->head_size;
#pragma omp parallel for schedule(dynamic, 64)
    for (int64_t r = 0; r < rows; r++) {
        const float *row = table + (shape->first + r % shape->length) * head_size;
        for (int64_t h = 0; h < heads; h++)
            turn(x + (r * heads + h) * head_size, row, row + head_size / 2, head_size / 2,
                 inverse ? -1.0f : 1.0f);
    }
}
