/* The token embedding, and the loss at the end of the model. Token ids are int32 in 0..vocab-1. */
#ifndef TRAIN_CPU_EMBEDDING_H
#define TRAIN_CPU_EMBEDDING_H

#include <stdint.h>

/* x (rows, d) = the rows of weight (vocab, d) that tokens (rows) names */
void embedding_forward(float *x, const float *weight, const int32_t *tokens, int64_t rows, int64_t d);

/* dweight (vocab, d) += dx (rows, d), row by row in order */
void embedding_backward(float *dweight, const float *dx, const int32_t *tokens, int64_t rows, int64_t d);

/* losses (rows) = -log softmax(logits[row])[target[row]], in nats. Overwrites logits (rows, vocab) with
 * `scale` times the gradient of their sum. */
void cross_entropy(float *logits, float *losses, const int32_t *targets, float scale, int64_t rows,
                   int64_t vocab);

#endif
