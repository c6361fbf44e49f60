/* One step of training: a batch to new weights. It stands above model and optimiser: it loads the batch, runs
 * the passes, updates the weights layer by layer or at the end, and reads the results. */
#ifndef TRAIN_STEP_H
#define TRAIN_STEP_H

#include "train/run/optimizer.h"

typedef struct train_step {
    model *model;
    optimizer *optimizer;
    void *recording; // a recorded step; NULL: none yet, or the device cannot record
    int64_t steps;   // enqueued so far
} train_step;

/* The results of a step. */
typedef struct step_result {
    double loss, norm; // nats; the gradient's norm before clipping
} step_result;

/* May the model be made with one_layer? Its layers are then updated in the backward. The weights get the same
 * bits; the norm is summed in another order. Clipping needs the norm of all gradients before any update, and
 * micro-batches add up the gradients of several backwards. */
static inline bool step_takes_layers(double clip, int64_t parts)
{
    return clip == 0.0 && parts == 1;
}

/* For model and optimiser, which must outlive s. */
void step_open(train_step *s, model *m, optimizer *o);
void step_close(train_step *s); // a zeroed one is fine

/* step_stage prepares a batch of model->parts times frame.sequences whole sequences, while the device may
 * still be busy with the step before. step_run enqueues the step for the batch that was prepared last and
 * returns while the device works; step_finish waits. After a loss or norm that is not finite, the weights are
 * not usable. */
void step_stage(train_step *s, const model_batch *batch);
bool step_run(train_step *s, const adamw_step *update, error *err);
bool step_finish(train_step *s, step_result *result, error *err);

#endif
