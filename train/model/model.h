/* The language model: OLMoE's decoder on tokens of a small vocabulary.
 *
 *     x = embedding[tokens]
 *     every layer:  h1 = norm(x);  q = rope(norm_q(h1 Wq^T)), k = rope(norm_k(h1 Wk^T)), v = h1 Wv^T
 *                   x += attention(q, k, v) Wo^T
 *                   h2 = norm(x);  x += experts(h2) [+ shared expert(h2)],
 *                                  or dense MLP(h2) in the first layers
 *     logits = norm(x) head^T;  loss = mean cross-entropy in nats
 *
 * The q and k norms go over the whole projection, before it is split into heads. Everything is computed by
 * the operations of a device (train/ops.h) in the device's types; on the CPU the bits do not depend on the
 * number of threads. */
#ifndef TRAIN_MODEL_H
#define TRAIN_MODEL_H

#include "train/model/moe.h"
#include "train/model/params.h"
#include "train/ops.h"

/* What one layer keeps for its backward; rows = sequences * length. Values are of the device's type. */
typedef struct model_layer {
    void *x;                 // (rows, d) into the layer
    void *h1;                // (rows, d)
    float *rstd1;            // (rows)
    void *qkv;               // (rows, 3d) as projected
    float *rstd_qk;          // (2, rows)
    void *q, *k;             // (rows, d) after norm and RoPE
    void *p;                 // attention_saved bytes; without a backward they are scratch
    void *mixed;             // (rows, d) attention's output
    void *x_mid;             // (rows, d) after attention
    void *h2;                // (rows, d)
    float *rstd2;            // (rows)
    void *dense_h, *dense_a; // (rows, 2f), (rows, f) of the dense MLP or shared expert
    moe_saved moe;
} model_layer;

typedef enum model_use {
    MODEL_EVALUATE, // passes keep nothing: the layers share their buffers
    MODEL_TRAIN,    // every layer keeps what its backward needs
    MODEL_GENERATE  // every layer keeps its keys and values
} model_use;

/* What the backward computes again, so that the forward need not keep it. */
typedef enum model_recompute {
    RECOMPUTE_NONE,
    RECOMPUTE_NORMS,    // both norms' outputs, which then share one place
    RECOMPUTE_NORMS_QK, // also q and k after norm and RoPE
    RECOMPUTE_LAYERS    // all but the layer's input
} model_recompute;

/* Their names as options have them. */
enum { RECOMPUTE_NAMES = RECOMPUTE_LAYERS + 1 };
extern const char *const model_recompute_names[RECOMPUTE_NAMES];

typedef struct model_options {
    int64_t sequences;          // most sequences of a pass, each of up to config.context tokens
    int64_t parts;              // passes whose gradients are added up for one step (micro-batches); 0: 1
    const moe_routing *routing; // of the training passes (its step may change before each); NULL: plain top-K
    model_use use;
    model_recompute recompute;
    int32_t chunks; // column chunks of the experts (smoe.h): less scratch, the same bits; 0: 1
    bool one_layer; // the gradients of one layer exist at a time (see grads_ready); one part
} model_options;

/* Told in the backward of a model with `one_layer` that a layer's gradients are complete. The next layer's
 * take their place. */
typedef void grads_ready(void *user, const grad_span *span);

/* Bytes on the device, by what they are for. */
typedef struct model_bytes {
    size_t weights, gradients, layers; // layers: what they keep from forward to backward
    size_t turns;                      // used by head, layers and backward at different times
    size_t rest;
} model_bytes;

enum { SCALAR_LOSS, SCALAR_SQUARE, SCALARS }; // the gradient's norm, squared

typedef struct model {
    train_device *device;
    bool owns_device;
    model_config config;
    param_layout layout;
    float *weights; // (layout.total) on the CPU: `params`; else NULL
    void *params;   // (layout.total) on the device: what passes read
    void *grads;    // (layout.total) on the device, grad_type; NULL when the model was made without training.
                    // With one_layer: of the weights before the layers' matrices, then of those after them
    bool one_layer; // and then
    void *layer_grads;  // of the matrices of the layer whose backward is on, which begin at
    size_t layer_first; // in the layout
    bool clears_layer;  // they begin with zeros
    grads_ready *ready; // set by who calls model_enqueue_gradients
    void *ready_user;
    moe moe;
    moe_routing routing; // of training passes
    int64_t sequences, parts;
    model_use use;
    model_recompute recompute;
    model_layer *layers;
    device_batch *batches;   // (parts) the batch that was loaded last, pass by pass
    device_batch batch;      // the one that the current pass reads
    void *x_last, *hidden;   // (rows, d): the final norm's input, output
    float *rstd;             // (rows)
    int64_t loss_rows;       // rows of logits that exist at a time
    void *logits;            // (loss_rows, vocab)
    float *losses;           // (parts, rows)
    double *scalars;         // (SCALARS) on the device
    float *rope;             // rope_table
    void *dx, *dh, *dq, *dk; // (rows, d) gradients of activations; dx is in the memory of `hidden`
    void *dqkv, *da;         // (rows, 3d), (rows, widest f)
    float *head_grads;       // (vocab, d): the head's gradient while it is summed, if grad_type is not f32
    float *norm_scratch;
    void *attention_scratch;
    void *memory; // on the device: contains all of these
    model_bytes bytes;
} model;

/* One batch on the host: sequences * length tokens, row-major. targets is NULL if no loss is wanted. */
typedef struct model_batch {
    const int32_t *tokens, *targets; // in 0..vocab-1
    int64_t sequences, length;
} model_batch;

/* Makes a model with zero weights on a device, which must outlive it. NULL: on a CPU device of its own. */
bool model_create(model *m, train_device *device, const model_config *config, const model_options *options,
                  error *err);
void model_destroy(model *m); // a zeroed model is fine

/* The options that may reduce the memory of a training run or an evaluation, for messages. */
const char *model_lower_memory(const model *m);

/* Computes m->bytes of such a model without allocating its memory. The model can run no passes. The caller
 * calls model_destroy. */
bool model_measure(model *m, train_device *device, const model_config *config, const model_options *options,
                   error *err);

/* Loss of a batch: the mean in nats, without auxiliary losses. Gradients are not changed. `routing` NULL:
 * plain top-K, as for validation. */
bool model_loss(model *m, const model_batch *batch, const moe_routing *routing, double *loss, error *err);

/* Runs tokens [first, first + count) of one sequence. Earlier passes must have run the tokens before `first`.
 * logits (vocab) on the host receive the prediction of the token after the last one. Only for
 * MODEL_GENERATE. */
bool model_continue(model *m, const int32_t *tokens, int64_t first, int64_t count, float *logits, error *err);

/* Training in three steps. model_stage_batch prepares a batch of `parts` passes. The caller must not change
 * the batch until the device has used it; on a GPU until the call returns. model_load_batch copies the batch
 * to the device. model_enqueue_gradients enqueues the forward with m->routing and the backward of the batch
 * that was loaded last. It has m->parts passes with `sequences` sequences in total. The gradients of its loss
 * and of the mean of the passes' auxiliary losses are added to m->grads. (`add` false: on a device without
 * adds_gradients the first pass writes them.) The loss is written to scalars[SCALAR_LOSS]. SR-f draws other
 * numbers in each pass. */
void model_stage_batch(model *m, const model_batch *batch, int64_t parts);
void model_load_batch(model *m);
bool model_enqueue_gradients(model *m, int64_t sequences, int64_t length, bool add, error *err);

/* The weights whose gradients are complete only after model_enqueue_gradients: all weights, or with one_layer
 * those that `ready` was not called for. Returns the number of spans. */
enum { MOST_SPANS = 2 };
int model_spans(const model *m, grad_span spans[MOST_SPANS]);

/* The matrices of layer l in the layout. */
grad_span model_layer_span(const model *m, int64_t l);

/* All three steps; returns the loss too. Not with one_layer. */
bool model_gradients(model *m, const model_batch *batch, double *loss, error *err);

/* The number of weights that one token uses, without the embedding. 6 times this number is the FLOPs of
 * training for each token, without those of the attention scores. */
int64_t model_active_weights(const model_config *config);

/* ---- between model.c and model_backward.c ---- */

/* `count` elements of the device's type past `base`. */
void *model_past(const model *m, const void *base, int64_t count);
pass_shape model_shape(const model *m, int64_t sequences, int64_t length);
/* The parts of a layer's forward that its backward may run again. */
void model_attention_half(model *m, model_layer *layer, const param_layer *at, const pass_shape *shape);
bool model_mlp(model *m, void *out, model_layer *layer, int64_t l, int64_t rows, const moe_routing *routing,
               error *err);
/* Computes the gradients of all weights except the head's, from the gradient of the final norm's output in
 * m->dh. */
bool model_backward(model *m, const pass_shape *shape, bool add, error *err);

#endif
