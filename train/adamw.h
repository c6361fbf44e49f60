/* AdamW and the norm of the whole gradient. Weight decay is decoupled; the caller says for which
 * range it counts. */
#ifndef TRAIN_ADAMW_H
#define TRAIN_ADAMW_H

#include <stdint.h>

typedef struct adamw {
    double lr, beta1, beta2, eps, weight_decay;
    int64_t step;      // counts from 1: the bias corrections
    float grad_factor; // multiplies every gradient first: clipping
} adamw;

/* One step on `count` weights: m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2,
 * w -= lr (mhat / (sqrt(vhat) + eps) + weight_decay w). Clears the gradients. */
void adamw_update(float *w, float *grad, float *m, float *v, int64_t count, const adamw *settings);

/* The Euclidean norm of count gradients, summed in double over fixed panels. */
double gradient_norm(const float *grad, int64_t count);

#endif
