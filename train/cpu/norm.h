/* RMSNorm: y = x rstd w, rstd = 1 / sqrt(mean(x^2) + eps), one row at a time. Rows may be slices of wider
 * rows: the strides count floats. */
#ifndef TRAIN_CPU_NORM_H
#define TRAIN_CPU_NORM_H

#include <stdbool.h>
#include <stdint.h>

enum { NORM_PANEL = 128 }; // rows whose part of dw one thread sums; it fixes the order of the sums

/* y (rows, size) row stride ldy, rstd (rows), x (rows, size) row stride ldx, w (size) */
void norm_forward(float *y, int64_t ldy, float *rstd, const float *x, int64_t ldx, const float *w,
                  int64_t rows, int64_t size, float eps);

/* Computes the y (rows, size) of norm_forward again from its rstd, with the same bits. */
void norm_again(float *y, const float *rstd, const float *x, const float *w, int64_t rows, int64_t size);

/* The number of floats that norm_backward needs as scratch. */
int64_t norm_scratch(int64_t rows, int64_t size);

/* dx = (with `add`, +=) the gradient of x, dw (size) += that of w. dx may be dy itself. */
void norm_backward(float *dx, int64_t lddx, float *dw, const float *dy, int64_t lddy, const float *x,
                   int64_t ldx, const float *rstd, const float *w, int64_t rows, int64_t size, bool add,
                   float *scratch);

#endif
