/* See dense.h. With s = sigmoid(gate): dup = da silu(gate), dgate = da up s (1 + gate (1 - s)). */
#include "train/dense.h"

#include "train/linear.h"
#include "train/math.h"

static void swiglu_forward(float *a, const float *h, int64_t rows, int64_t width)
{
#pragma omp parallel for schedule(dynamic, 64)
    for (int64_t r = 0; r < rows; r++) {
        const float *restrict gate = h + r * 2 * width, *restrict up = gate + width;
        float *restrict out = a + r * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) out[i] = gate[i] * sigmoid_poly(gate[i]) * up[i];
    }
}

static void swiglu_backward(float *h, const float *da, int64_t rows, int64_t width)
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

void dense_forward(float *out, float *h, float *a, const float *x, const float *w1, const float *w2,
                   int64_t rows, int64_t d, int64_t width, bool add)
{
    linear_forward(h, x, w1, rows, d, 2 * width, false);
    swiglu_forward(a, h, rows, width);
    linear_forward(out, a, w2, rows, width, d, add);
}

void dense_backward(float *dx, float *dw1, float *dw2, const float *dout, float *h, const float *a,
                    const float *x, const float *w1, const float *w2, int64_t rows, int64_t d, int64_t width,
                    bool add, float *da)
{
    linear_backward_input(da, dout, w2, rows, width, d, false);
    linear_backward_weight(dw2, dout, a, rows, width, d);
    swiglu_backward(h, da, rows, width);
    linear_backward_input(dx, h, w1, rows, d, 2 * width, add);
    linear_backward_weight(dw1, h, x, rows, d, 2 * width);
}
