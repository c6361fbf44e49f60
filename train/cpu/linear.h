/* The linear map of every projection, without bias: y = x w^T, w (out, in) as PyTorch keeps it.
 *
 * OpenMP threads call single-threaded OpenBLAS on fixed panels, so the bits do not depend on the number of
 * threads. The program must have called openblas_set_num_threads(1). */
#ifndef TRAIN_CPU_LINEAR_H
#define TRAIN_CPU_LINEAR_H

#include <stdbool.h>
#include <stdint.h>

/* y (rows, out) = x (rows, in) w^T; with `add`, y += */
void linear_forward(float *y, const float *x, const float *w, int64_t rows, int64_t in, int64_t out,
                    bool add);

/* dx (rows, in) = dy (rows, out) w; with `add`, dx += */
void linear_backward_input(float *dx, const float *dy, const float *w, int64_t rows, int64_t in, int64_t out,
                           bool add);

/* dw (out, in) += dy^T x */
void linear_backward_weight(float *dw, const float *dy, const float *x, int64_t rows, int64_t in,
                            int64_t out);

#endif
