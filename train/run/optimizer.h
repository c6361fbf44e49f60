/* The optimiser of a model: AdamW's arrays on the model's device, and one step of training from a batch to
 * new weights. */
#ifndef TRAIN_OPTIMIZER_H
#define TRAIN_OPTIMIZER_H

#include "train/model/model.h"

typedef struct optimizer {
    model *model;
    adamw_arrays arrays;
    adamw_step *step; // on the device
    void *scratch;    // of updates that sum squares, on the device
    void *memory;     // on the device
    void *recording;  // a recorded step; NULL: none yet, or the device cannot record
    int64_t steps;    // enqueued so far
} optimizer;

/* The results of a step. */
typedef struct step_result {
    double loss, norm; // nats; the gradient's norm before clipping
} step_result;

/* May the model be made with one_layer? Its layers are then updated in the backward. The weights get the same
 * bits; the norm is summed in another order. Clipping needs the norm of all gradients before any update, and
 * micro-batches add up the gradients of several backwards. */
static inline bool optimizer_takes_layers(double clip, int64_t parts)
{
    return clip == 0.0 && parts == 1;
}

/* Bytes that the optimiser of such a model takes on the device. */
size_t optimizer_bytes(model *model);

/* Makes an optimiser whose moments are zero. `model` must have been made for training and must outlive o. */
bool optimizer_create(optimizer *o, model *model, error *err);
void optimizer_destroy(optimizer *o); // a zeroed one is fine

/* Sets the first, random weights. They are drawn on the device if it can draw. */
void optimizer_draw(optimizer *o, uint64_t seed);

/* optimizer_stage prepares a batch of model->parts times model->sequences whole sequences, while the device
 * may still be busy with the step before. optimizer_step enqueues forward, backward and the update for the
 * batch that was prepared last, and returns while the device works; optimizer_finish waits. After a loss or
 * norm that is not finite, the weights are not usable. */
void optimizer_stage(optimizer *o, const model_batch *batch);
bool optimizer_step(optimizer *o, const adamw_step *step, error *err);
bool optimizer_finish(optimizer *o, step_result *result, error *err);

#endif
