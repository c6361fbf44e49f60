/* The activations of activations.h on one row, their backward, and the dot product of two rows, all in f32.
 *
 * The results are accurate to a few units in the last place of f32, GELU (by erf) even in its far tail. NaN
 * gives NaN. The bits do not depend on the processor, because wider vectors do the same operations on every
 * element. */
#ifndef MOE_CPU_ACTIVATION_H
#define MOE_CPU_ACTIVATION_H

#include <smoe.h>

/* a (n) = act(h) with the layer's activation and its values; h is (2n), gate then up, or (n) without a gate.
 */
void moe_activate(const smoe_layer *layer, int64_t n, const float *h, float *a);

/* a (n) = act(h); dh (as h) = weight da dact(h)/dh. No two of the rows overlap. */
void moe_activate_backward(const smoe_layer *layer, int64_t n, const float *h, const float *da, float weight,
                           float *a, float *dh);

/* <x, y> over n elements: 16 partial sums and a tree, so the order is fixed. */
float moe_dot(int64_t n, const float *x, const float *y);

#endif
