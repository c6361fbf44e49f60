/* How the states of the optimiser are shared out over ranks (ZeRO-2). A span of weights, all of a layer's
 * matrices for example, is cut into one part of equal size for each rank, a multiple of 8, and a tail of less
 * than 8 ranks, whose states every rank has. So no array is padded, and the layout of weights and files is
 * that of one rank. */
#ifndef TRAIN_SHARDS_H
#define TRAIN_SHARDS_H

#include "train/model/weights.h"

typedef struct shard {
    int64_t first, count;      // of the span, in the layout
    int64_t part, tail;        // elements of a rank's part, of the tail: count = ranks part + tail
    int64_t state, tail_state; // where their states are on this rank
} shard;

typedef struct shards {
    int rank, ranks;
    shard *spans; // ascending: before the layers' matrices, each layer, after them
    int64_t count;
    int64_t parts_end, states; // the states of the parts, then those of the tails
    int64_t most;              // the largest part and tail
    state_run *runs;           // of adamw_arrays
    int64_t run_count;
} shards;

bool shards_create(shards *s, const model_weights *w, int rank, int ranks, error *err);
void shards_destroy(shards *s); // a zeroed one is fine

/* The first run of [at, end) whose states `arrays` has. False: there is none. */
bool state_run_next(const adamw_arrays *arrays, int64_t at, int64_t end, state_run *run);

#endif
