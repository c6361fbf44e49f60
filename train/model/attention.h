/* The block of causal self-attention:
 *
 *     q = rope(norm_q(h Wq^T)), k = rope(norm_k(h Wk^T)), v = h Wv^T;  out = x + attention(q, k, v) Wo^T
 *
 * The q and k norms go over the whole projection, before it is split into heads. */
#ifndef TRAIN_ATTENTION_H
#define TRAIN_ATTENTION_H

#include "train/model/block.h"

extern const block_kind attention_block;

/* Checks the limits of the device's kernels. */
bool attention_check(const model_config *c, const train_device *dv, error *err);

#endif
