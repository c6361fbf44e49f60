/* Causal softmax attention over whole sequences.
 *
 *     p[i, j] = softmax over j <= i of <q[i], k[j]> / sqrt(head size);
 *     out[i] = sum over j <= i of p[i, j] v[j]
 *
 * A thread works on one (sequence, head) pair. Queries are cut into tiles of ATTENTION_ROWS rows; a tile
 * reads only the keys up to its own end. */
#ifndef TRAIN_CPU_ATTENTION_H
#define TRAIN_CPU_ATTENTION_H

#include "train/ops.h"

enum { ATTENTION_ROWS = 64 };

/* The number of floats of p, which is kept from forward to backward. The rows of every tile are `length`
 * wide. With shape->forward_only p has one tile for each of omp_get_max_threads() threads. */
int64_t attention_saved(const pass_shape *shape);

/* The number of floats of scratch that attention_backward needs for omp_get_max_threads() threads. */
int64_t attention_scratch(const pass_shape *shape);

/* out, q, k (rows, d); v (rows, d) with row stride 3 d; p: attention_saved floats */
void attention_forward(float *out, float *p, const float *q, const float *k, const float *v,
                       const pass_shape *shape);

/* For shape->length rows of q and out, which begin at position shape->first of one sequence, with all rows of
 * k and v up to each row's position. */
void attention_continue(float *out, const float *q, const float *k, const float *v, const pass_shape *shape);

/* Writes dq, dk (rows, d) and dv (row stride 3 d) from dout (rows, d). */
void attention_backward(float *dq, float *dk, float *dv, const float *dout, const float *p, const float *q,
                        const float *k, const float *v, const pass_shape *shape, float *scratch);

#endif
