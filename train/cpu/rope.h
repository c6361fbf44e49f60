/* Rotary position embedding in the rotate-half form: inside a head of size h, the pair (x[i], x[i + h/2]) at
 * position p turns by p theta^(-2 i / h); the angles come from train/rope_table.h. */
#ifndef TRAIN_CPU_ROPE_H
#define TRAIN_CPU_ROPE_H

#include "train/ops.h"

/* Turns x (rows, heads * head_size), in place; row r is at position first + r % length. `inverse` turns back:
 * that is the gradient. */
void rope_apply(float *x, const float *table, int64_t rows, const pass_shape *shape, bool inverse);

#endif
