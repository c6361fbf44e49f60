/* One step of training: a batch to new weights. It stands above model and optimiser: it loads the batch, runs
 * the passes, updates the weights layer by layer or at the end, and reads the results. On several ranks
 * (ZeRO-2) every rank has all weights and the states of its shards: a layer's gradients are summed into the
 * parts of the ranks while the backward of the next layer runs; each rank updates its part, and all gather
 * the new weights: at once, or with clipping, where the updates come last, in the forward of the next step, a
 * layer's while the layer before runs. */
#ifndef TRAIN_STEP_H
#define TRAIN_STEP_H

#include "train/ranks/comm.h"
#include "train/run/optimizer.h"

typedef struct train_step {
    model *model;
    optimizer *optimizer;
    void *recording;  // a recorded step; NULL: none yet, or the device cannot record
    int64_t steps;    // enqueued so far
    train_comm *comm; // NULL: one rank, nothing is shared out; and else
    const shards *shards;
    bool clips;
    void *sums; // (states) grad_type: this rank's parts of the gradients, if several passes add to them or
                // they are clipped; else NULL
    void *received; // (most) grad_type: its parts of the sum of one span
    void *inbox;    // (ranks, most) grad_type, of reduce_scatter; NULL: not needed
    void *memory;   // on the device: contains all three
    bool busy[2];   // the turn's reduction may still be running
    bool stale;     // only this rank's parts of the weights are those of the last update
} train_step;

/* Values of a step that are summed over the ranks. */
typedef struct step_shared {
    double stop, seconds, bytes;
} step_shared;

/* The results of a step. */
typedef struct step_result {
    double loss, norm;  // nats; the gradient's norm before clipping
    step_shared shared; // the sums over the ranks; zeros without a comm
} step_result;

/* May the model be made with one_layer? Its layers are then updated in the backward. The weights get the same
 * bits; the norm is summed in another order. Clipping needs the norm of all gradients before any update, and
 * micro-batches add up the gradients of several backwards. */
static inline bool step_takes_layers(double clip, int64_t parts)
{
    return clip == 0.0 && parts == 1;
}

/* For model and optimiser, which must outlive s; the shards' are those of the optimiser. With a comm the
 * model must be `sharded`; `clips`: steps may have a clip. */
bool step_open(train_step *s, model *m, optimizer *o, const shards *sh, train_comm *comm, bool clips,
               error *err);
void step_close(train_step *s); // a zeroed one is fine

/* Bytes on the device that step_open takes. */
size_t step_bytes(const model *m, const shards *sh, bool clips);

/* step_stage prepares a batch of model->parts times frame.sequences whole sequences, while the device may
 * still be busy with the step before. step_share gives this rank's values, for ranks to add up. step_run
 * enqueues the step for the batch that was prepared last and returns while the device works; step_finish
 * waits. After a loss or norm that is not finite, the weights are not usable. */
void step_stage(train_step *s, const model_batch *batch);
void step_share(train_step *s, const step_shared *mine);
bool step_run(train_step *s, const adamw_step *update, error *err);
bool step_finish(train_step *s, step_result *result, error *err);

/* Gathers the weights, if a step has not. To be called on all ranks before a pass that is no step. A
 * checkpoint takes each rank's own parts. */
void step_settle(train_step *s);

#endif
