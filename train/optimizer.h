/* The optimiser of a model: AdamW's arrays on the model's device, and one step of training from a batch to
 * new weights. */
#ifndef TRAIN_OPTIMIZER_H
#define TRAIN_OPTIMIZER_H

#include "train/model.h"

typedef struct optimizer {
    model *model;
    adamw_arrays arrays;
    adamw_step *step; // on the device
    void *scratch;    // of updates that sum squares, on the device
    void *memory;     // on the device
    void *recording;  // a step as the device noted it; NULL: not yet, or it cannot
    int64_t steps;    // enqueued so far
} optimizer;

/* What a step found. */
typedef struct step_result {
    double loss, norm; // nats; the gradient's norm before clipping
} step_result;

/* May a model's gradients exist one layer at a time (model_options.one_layer)? Then its layers are updated in
 * the backward. The weights get the same bits; the norm is summed in another order. Clipping needs the norm
 * of all gradients before, and micro-batches add them up. */
static inline bool optimizer_takes_layers(double clip, int64_t parts)
{
    return clip == 0.0 && parts == 1;
}

/* Bytes on the device of such a model's optimiser. */
size_t optimizer_bytes(model *model);

/* Moments of zero. `model` was made for training and outlives o. */
bool optimizer_create(optimizer *o, model *model, error *err);
void optimizer_destroy(optimizer *o); // a zeroed one is fine

/* First weights, drawn where the device can. */
void optimizer_draw(optimizer *o, uint64_t seed);

/* optimizer_stage prepares a batch of model->parts times model->sequences whole sequences, while the device
 * may still be busy with the step before. optimizer_step enqueues forward, backward and the update for the
 * batch that was prepared last, and returns while the device works; optimizer_finish waits. With a loss or
 * norm that is not finite the weights are worthless. */
void optimizer_stage(optimizer *o, const model_batch *batch);
bool optimizer_step(optimizer *o, const adamw_step *step, error *err);
bool optimizer_finish(optimizer *o, step_result *result, error *err);

#endif
