/* AdamW and the norm of a gradient. Weight decay is decoupled; the caller says which
 * range of weights it applies to. */
#ifndef TRAIN_CPU_ADAMW_H
#define TRAIN_CPU_ADAMW_H

#include "train/ops.h"

/* One step on `count` weights: g = factor grad, m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, w -= lr (mhat
 * / (sqrt(vhat) + eps) + weight_decay w). Then sets the gradients to zero. The caller handles s->clip. */
void adamw_update(float *w, float *grad, float *m, float *v, int64_t count, const adamw_step *s,
                  float factor);

/* The sum of the squares of count gradients, in double over fixed panels, and its root, their norm. */
double gradient_square(const float *grad, int64_t count);
double gradient_norm(const float *grad, int64_t count);

#endif
