/* The angles of the rotary position embedding, for every device. */
#ifndef TRAIN_ROPE_TABLE_H
#define TRAIN_ROPE_TABLE_H

#include <stdint.h>

/* Fills table (context, head_size): row p holds the cosines of the h/2 angles p theta^(-2 i / h), then their
 * sines. */
void rope_table(float *table, int64_t context, int64_t head_size, double theta);

#endif
