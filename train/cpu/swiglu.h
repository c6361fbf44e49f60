/* The activation of the dense SwiGLU MLP: a = silu(gate) up, h = gate | up. */
#ifndef TRAIN_CPU_SWIGLU_H
#define TRAIN_CPU_SWIGLU_H

#include <stdint.h>

/* a (rows, width) from h (rows, 2 width) */
void swiglu_forward(float *a, const float *h, int64_t rows, int64_t width);

/* Overwrites h with its gradient, from da (rows, width). */
void swiglu_backward(float *h, const float *da, int64_t rows, int64_t width);

#endif
