/* The part of a step (step.h) that is shared out over ranks. */
#ifndef TRAIN_STEP_SHARDS_H
#define TRAIN_STEP_SHARDS_H

#include "train/run/step.h"

/* Enqueues forward, backward, the sums over the ranks and the updates of a whole step. */
bool step_shards_enqueue(train_step *s, error *err);

/* All ranks gather all weights. */
void step_shards_gather(train_step *s);

#endif
