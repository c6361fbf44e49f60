/* Causal softmax attention over whole sequences.
 *
 *     p[i, j] = softmax over j <= i of <q[i], k[j]> / sqrt(head size);
 *     out[i] = sum over j <= i of p[i, j] v[j]
 *
 * One (sequence, head) pair is one thread's work; queries go in blocks of ATTENTION_BLOCK rows, so that only
 * keys up to the block's end are touched. */
#ifndef TRAIN_ATTENTION_H
#define TRAIN_ATTENTION_H

#include <stdint.h>

enum { ATTENTION_BLOCK = 64 };

typedef struct attention_shape {
    int64_t sequences, length, heads, head_size; // rows = sequences * length, hidden d = heads * head_size
    int64_t value_stride;                        // floats between rows of v and of dv
} attention_shape;

/* Floats of p, kept from forward to backward: every block's rows are `length` wide. */
int64_t attention_saved(const attention_shape *shape);

/* Floats of scratch that attention_backward wants, for omp_get_max_threads() threads. */
int64_t attention_scratch(const attention_shape *shape);

/* out, q, k (rows, d); v (rows, d) with row stride value_stride; p: attention_saved floats */
void attention_forward(float *out, float *p, const float *q, const float *k, const float *v,
                       const attention_shape *shape);

/* Writes dq, dk (rows, d) and dv (row stride value_stride) from dout (rows, d). */
void attention_backward(float *dq, float *dk, float *dv, const float *dout, const float *p, const float *q,
                        const float *k, const float *v, const attention_shape *shape, float *scratch);

#endif
