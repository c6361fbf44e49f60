/* See norm.h. With g = dy w and xhat = x rstd: dx = rstd (g - xhat mean(g xhat)), dw = sum over rows
 * of dy xhat. */
#include "train/cpu/norm.h"

#include <math.h>
#include <string.h>

static void scale_row(float *restrict y, const float *restrict x, const float *restrict w, float scale,
                      int64_t size)
{
    for (int64_t i = 0; i < size; i++) y[i] = x[i] * scale * w[i];
}

void norm_forward(float *y, int64_t ldy, float *rstd, const float *x, int64_t ldx, const float *w,
                  int64_t rows, int64_t size, float eps)
{
#pragma omp parallel for schedule(dynamic, 64)
    for (int64_t r = 0; r < rows; r++) {
        const float *restrict in = x + r * ldx;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < size; i++) sum += in[i] * in[i];
        float scale = 1.0f / sqrtf(sum / (float)size + eps);
        rstd[r] = scale;
        scale_row(y + r * ldy, in, w, scale, size);
    }
}

void norm_again(float *y, const float *rstd, const float *x, const float *w, int64_t rows, int64_t size)
{
#pragma omp parallel for schedule(dynamic, 64)
    for (int64_t r = 0; r < rows; r++) scale_row(y + r * size, x + r * size, w, rstd[r], size);
}

static int64_t norm_panels(int64_t rows)
{
    return (rows + NORM_PANEL - 1) / NORM_PANEL;
}

int64_t norm_scratch(int64_t rows, int64_t size)
{
    return norm_panels(rows) * size;
}

static void backward_row(float *dx, float *restrict dw, const float *dy, const float *restrict x,
                         const float *restrict w, float rstd, int64_t size, bool add)
{
    float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < size; i++) dot += dy[i] * w[i] * x[i];
    float mean = dot * rstd * rstd * rstd / (float)size;
#pragma omp simd
    for (int64_t i = 0; i < size; i++) {
        float g = dy[i];
        dw[i] += g * x[i] * rstd;
        // without add the old values of dx must not be read, because they may be anything
        dx[i] = (add ? dx[i] : 0.0f) + (g * w[i] * rstd - x[i] * mean);
    }
}

void norm_backward(float *dx, int64_t lddx, float *dw, const float *dy, int64_t lddy, const float *x,
                   int64_t ldx, const float *rstd, const float *w, int64_t rows, int64_t size, bool add,
                   float *scratch)
{
#pragma omp parallel for schedule(dynamic)
    for (int64_t p = 0; p < norm_panels(rows); p++) {
        int64_t end = (p + 1) * NORM_PANEL < rows ? (p + 1) * NORM_PANEL : rows;
        float *part = scratch + p * size;
        memset(part, 0, (size_t)size * sizeof *part);
        for (int64_t r = p * NORM_PANEL; r < end; r++)
            backward_row(dx + r * lddx, part, dy + r * lddy, x + r * ldx, w, rstd[r], size, add);
    }
    for (int64_t p = 0; p < norm_panels(rows); p++)
        for (int64_t i = 0; i < size; i++) dw[i] += scratch[p * size + i];
}
