/* The dense SwiGLU MLP, without biases: the first layers' feed-forward and the shared expert.
 *
 *     H = X W1^T (gate | up);   A = silu(gate) up;   O = A W2^T */
#ifndef TRAIN_DENSE_H
#define TRAIN_DENSE_H

#include <stdbool.h>
#include <stdint.h>

/* out (rows, d) from x (rows, d), w1 (2 width, d), w2 (d, width); h (rows, 2 width) and a (rows, width) are
 * kept for the backward. With `add`, out += */
void dense_forward(float *out, float *h, float *a, const float *x, const float *w1, const float *w2,
                   int64_t rows, int64_t d, int64_t width, bool add);

/* dx (with `add`, +=) from dout (rows, d); dw1 and dw2 are added to. Overwrites h with its gradient; da
 * (rows, width) is scratch. */
void dense_backward(float *dx, float *dw1, float *dw2, const float *dout, float *h, const float *a,
                    const float *x, const float *w1, const float *w2, int64_t rows, int64_t d, int64_t width,
                    bool add, float *da);

#endif
