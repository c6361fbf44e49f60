/* See linear.h: y = x w^T and its two gradients on fixed panels. A thread takes the next
 * panel when it is free, so a thread that the system suspends delays no other. Which thread computes a panel
 * does not change its bits. */
#include "train/cpu/linear.h"

#include <cblas.h>

enum {
    ROW_PANEL = 128, // rows of x or dy in one call of sgemm
    OUT_PANEL = 64,  // dw is cut into tiles of 64 x 128, so even a 128 x 128 matrix has work for two threads
    IN_PANEL = 128,
};

static int64_t panels(int64_t size, int64_t panel)
{
    return (size + panel - 1) / panel;
}

static int panel_size(int64_t size, int64_t panel, int64_t index)
{
    int64_t left = size - index * panel;
    return (int)(left < panel ? left : panel);
}

void linear_forward(float *y, const float *x, const float *w, int64_t rows, int64_t in, int64_t out, bool add)
{
#pragma omp parallel for schedule(dynamic)
    for (int64_t p = 0; p < panels(rows, ROW_PANEL); p++) {
        int64_t first = p * ROW_PANEL;
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, panel_size(rows, ROW_PANEL, p), (int)out,
                    (int)in, 1.0f, x + first * in, (int)in, w, (int)in, add ? 1.0f : 0.0f, y + first * out,
                    (int)out);
    }
}

void linear_backward_input(float *dx, const float *dy, const float *w, int64_t rows, int64_t in, int64_t out,
                           bool add)
{
#pragma omp parallel for schedule(dynamic)
    for (int64_t p = 0; p < panels(rows, ROW_PANEL); p++) {
        int64_t first = p * ROW_PANEL;
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, panel_size(rows, ROW_PANEL, p), (int)in,
                    (int)out, 1.0f, dy + first * out, (int)out, w, (int)in, add ? 1.0f : 0.0f,
                    dx + first * in, (int)in);
    }
}

void linear_backward_weight(float *dw, const float *dy, const float *x, int64_t rows, int64_t in, int64_t out)
{
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t p = 0; p < panels(out, OUT_PANEL); p++)
        for (int64_t q = 0; q < panels(in, IN_PANEL); q++) {
            int64_t i = p * OUT_PANEL, j = q * IN_PANEL;
            cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, panel_size(out, OUT_PANEL, p),
                        panel_size(in, IN_PANEL, q), (int)rows, 1.0f, dy + i, (int)out, x + j, (int)in, 1.0f,
                        dw + i * in + j, (int)in);
        }
}
