/* Rotary position embedding in the rotate-half form: inside a head of size h, the pair (x[i], x[i + h/2]) at
 * position p turns by p theta^(-2 i / h). */
#ifndef TRAIN_ROPE_H
#define TRAIN_ROPE_H

#include <stdbool.h>
#include <stdint.h>

/* Fills table (context, head_size): row p holds the cosines of the h/2 angles, then their sines. */
void rope_table(float *table, int64_t context, int64_t head_size, double theta);

/* Turns x (rows, heads * head_size), in place; row r is at position r % length. `inverse` turns back: that is
 * the gradient. */
void rope_apply(float *x, const float *table, int64_t rows, int64_t length, int64_t heads, int64_t head_size,
                bool inverse);

#endif
