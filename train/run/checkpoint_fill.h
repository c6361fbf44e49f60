/* What each of several ranks writes of a checkpoint (checkpoint.h). */
#ifndef TRAIN_CHECKPOINT_FILL_H
#define TRAIN_CHECKPOINT_FILL_H

#include "train/model/model.h"

/* Fills the tensors of the reserved files in `folder` with the weights and moments whose states are here;
 * `first`, on one of the ranks, with what all have. */
bool checkpoint_fill(const char *folder, const model *m, const adamw_arrays *arrays, bool first, error *err);

#endif
