/* The weights of a model on its device, and the memory of their gradients. With one_layer only the gradients
 * of one layer's matrices exist at a time; those of the other weights exist as a whole. */
#ifndef TRAIN_WEIGHTS_H
#define TRAIN_WEIGHTS_H

#include "train/model/params.h"
#include "train/ops.h"

typedef struct model_weights {
    train_device *device;
    param_layout layout;
    void *params;         // (layout.total), the device's type: what passes read
    float *host;          // `params` on the CPU; else NULL
    const float *masters; // the optimiser's, in the same layout; NULL: none, or not all are here
    void *grads; // (layout.total), grad_type; NULL without training. With one_layer: of the weights before
                 // the layers' matrices, then of those after them
    bool one_layer, sharded; // sharded: every pass writes all gradients anew, and those of two layers exist
                             // at a time, in turns, because one leaves while the next is computed
    void *layer_grads;       // with one_layer: of the matrices of a layer, or of two
    void *layer;             // and of the layer whose backward is on, which begin at
    size_t layer_first;      // in the layout
    bool clears_layer;       // they begin with zeros
} model_weights;

/* Where the weights of a group, and their gradients, are. */
void *weights_at(const model_weights *w, size_t offset);
void *weights_grad(const model_weights *w, size_t offset);

/* Before the first backward of a pass; of layer l. */
void weights_begin_pass(model_weights *w);
void weights_begin_layer(model_weights *w, int64_t l);

/* The matrices of layer l. */
grad_span weights_layer_span(const model_weights *w, int64_t l);

/* The weights whose gradients are complete only after the whole backward: all weights, or with one_layer
 * those that are in no layer's span. Returns the number of spans. */
enum { MOST_SPANS = 2 };
int weights_spans(const model_weights *w, grad_span spans[MOST_SPANS]);

/* The number of elements of `grads` and of `layer_grads`. */
int64_t weights_grads(const model_weights *w);
int64_t weights_layer_grads(const model_weights *w);

/* Must the gradients of one_layer begin with zeros? Yes on a device that only adds gradients, and if there is
 * space between the tensors, which the updates read too. */
bool weights_clear_layers(const model_weights *w);

#endif
