/* See swiglu.h. With s = sigmoid(gate): dup = da silu(gate), dgate = da up s (1 + gate (1 - s)). */
#include "train/cpu/swiglu.h"

#include "train/cpu/math.h"

void swiglu_forward(float *a, const float *h, int64_t rows, int64_t width)
{
#pragma omp parallel for schedule(dynamic, 64)
    for (int64_t r = 0; r < rows; r++) {
        const float *restrict gate = h + r * 2 * width, *restrict up = gate + width;
        float *restrict out = a + r * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) out[i] = gate[i] * sigmoid_poly(gate[i]) * up[i];
    }
}

void swiglu_backward(float *h, const float *da, int64_t rows, int64_t width)
{
#pragma omp parallel for schedule(dynamic, 64)
    for (int64_t r = 0; r < rows; r++) {
        float *restrict gate = h + r * 2 * width, *restrict up = gate + width;
        const float *restrict in = da + r * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float g = gate[i], s = sigmoid_poly(g);
            gate[i] = in[i] * up[i] * s * (1.0f + g * (1.0f - s));
            up[i] = in[i] * g * s;
        }
    }
}
