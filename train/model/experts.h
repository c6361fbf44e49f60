/* The block of experts: a router, top-K, SwiGLU experts, and with shared_intermediate a shared expert beside
 * them. This is the only file of the trainer that calls the library, and it uses the
 * public header alone. */
#ifndef TRAIN_EXPERTS_H
#define TRAIN_EXPERTS_H

#include "train/model/block.h"

extern const block_kind experts_block;

/* What the last pass of a model for training, of `tokens` tokens, has left of one such block. Fills view with
 * pointers to its plan, on the device. */
bool experts_view(const block *b, int64_t tokens, const train_routing *routing, smoe_plan_view *view,
                  error *err);

/* Copies to the host the row counts of all experts (E), under plain top-K and as routed. Waits for the
 * device. */
bool experts_counts(const block *b, int64_t tokens, int32_t *plain, int32_t *routed, error *err);

/* Its auxiliary losses (2) on the device: load balance, z. */
const float *experts_losses(const block *b);

/* The selection biases (E), f32, on the device; NULL: the model has none. They are no weights: no gradient
 * reaches them. The backwards of the passes of a step count the tokens that top-K gives each expert, and
 * experts_update_bias moves the biases by `rate` against these counts. */
float *experts_bias(const block *b);
/* The counts of all blocks of the kind, and their number. */
int32_t *experts_all_counts(const block *b, int64_t *count);
bool experts_update_bias(block *b, float rate, error *err);

#endif
