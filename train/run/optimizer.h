/* The optimiser of a model: AdamW's arrays on the model's device, and the updates of its weights. */
#ifndef TRAIN_OPTIMIZER_H
#define TRAIN_OPTIMIZER_H

#include "train/model/model.h"
#include "train/run/shards.h"

typedef struct optimizer {
    model *model;
    adamw_arrays arrays;
    adamw_step *step; // on the device
    void *scratch;    // of updates that sum squares, on the device
    void *memory;     // on the device
} optimizer;

/* Bytes that the optimiser of such a model takes on the device. */
size_t optimizer_bytes(model *model, const shards *sh);

/* Makes an optimiser whose moments are zero; with `sh` it has those of its shards alone. `model` must have
 * been made for training; it and sh must outlive o. */
bool optimizer_create(optimizer *o, model *model, const shards *sh, error *err);
void optimizer_destroy(optimizer *o); // a zeroed one is fine

/* Sets the first, random weights. They are drawn on the device if it can draw. */
void optimizer_draw(optimizer *o, uint64_t seed);

/* The updates of a step: its parameters, then once before the updates `begin` with the square of the
 * gradient's norm (train/ops.h), then the spans. Unless `square` is NULL, *square += the squares of the
 * span's gradients. */
void optimizer_load(optimizer *o, const adamw_step *step);
void optimizer_begin(optimizer *o, const double *square);
void optimizer_update(optimizer *o, const grad_span *span, double *square);

#endif
