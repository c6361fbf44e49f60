/* Rotary position embedding in the rotate-half form: inside a head of size h, the pair (x[i], x[i + h/2]) at
 * position p is rotated by the angle p theta^(-2 i / h). train/model/rope_table.h computes the angles. */
#ifndef TRAIN_CPU_ROPE_H
#define TRAIN_CPU_ROPE_H

#include "train/ops.h"

/* Rotates x (rows, heads * head_size) in place. Row r is at position first + r % length. `inverse` rotates
 * back, which is the gradient. */
void rope_apply(float *x, const float *table, int64_t rows, const pass_shape *shape, bool inverse);

#endif
