/* The language model: OLMoE's decoder.
 *
 *     x = embedding[tokens]
 *     every layer:  x += attention(norm(x));  x += experts(norm(x)) [+ shared expert], or in the first layers
 *                   dense MLP(norm(x))
 *     logits = norm(x) head^T;  loss = mean cross-entropy in nats
 *
 * The blocks (block.h) have what stands between norm and sum, head.h the two ends. Everything is computed by
 * the operations of a device (train/ops.h) in the device's types; on the CPU the bits do not depend on the
 * number of threads. */
#ifndef TRAIN_MODEL_H
#define TRAIN_MODEL_H

#include "train/model/block.h"
#include "train/model/head.h"

/* Their names as options have them. */
enum { RECOMPUTE_NAMES = RECOMPUTE_LAYERS + 1 };
extern const char *const model_recompute_names[RECOMPUTE_NAMES];

/* What --compute may be, for experts in training passes: as the device's type, F8, F8_DGRAD. */
enum { COMPUTE_NAMES = 3 };
extern const char *const model_compute_names[COMPUTE_NAMES];
extern const smoe_compute model_computes[COMPUTE_NAMES];
const char *model_compute_name(double compute); // "?" if it is none of them

typedef struct model_options {
    int64_t sequences; // most sequences of a pass, each of up to config.context tokens
    int64_t parts;     // passes whose gradients are added up for one step (micro-batches); 0: 1
    const train_routing
        *routing; // of the training passes (its step may change before each); NULL: plain top-K
    model_use use;
    model_recompute recompute;
    smoe_compute compute; // of the experts in training passes
    int32_t chunks;       // column chunks of the experts (smoe.h): less scratch, the same bits; 0: 1
    bool one_layer;       // the gradients of one layer exist at a time (weights.h); one part
    bool sharded;         // as weights.h has it, with any number of parts
    int rank, ranks; // this model has parts [rank parts, (rank + 1) parts) of the ranks * parts passes of a
                     // step; 0: 1
} model_options;

/* Bytes on the device, by what they are for. */
typedef struct model_bytes {
    size_t weights, gradients, layers; // layers: what they keep from forward to backward
    size_t quantized;                  // weights in e4m3
    size_t turns;                      // used by head, layers and backward at different times
    size_t rest;
} model_bytes;

static inline size_t model_bytes_sum(const model_bytes *b)
{
    return b->weights + b->quantized + b->gradients + b->layers + b->turns + b->rest;
}

/* The gradient's norm, squared; and from SCALAR_SHARED on a step's values that ranks add up (run/step.h). */
enum { SCALAR_LOSS, SCALAR_SQUARE, SCALAR_SHARED, SCALARS = SCALAR_SHARED + 3 };

enum { MODEL_BRANCHES = 2 }; // blocks of a layer

typedef struct model {
    train_device *device;
    bool owns_device;
    model_config config;
    model_weights weights;
    train_routing routing, pass_routing; // of training passes; with the step of the current one
    block_frame frame;
    int64_t parts, first_part, passes; // its parts of a step's passes, and the number of all
    void **commons; // of each kind of block (model_create.c); NULL: no block is of this kind
    block *blocks;  // (MODEL_BRANCHES layers + 1) in the order of the residual stream; the last is the final
                    // norm alone
    model_head head;
    device_batch *batches; // (parts) the batch that was loaded last, pass by pass
    device_batch batch;    // the one that the current pass reads
    float *losses;         // (parts, rows)
    double *scalars;       // (SCALARS) on the device
    void *dx, *dh;         // (rows, d) gradients of the residual stream and of a norm's output
    void *memory;          // on the device: contains all of these
    model_bytes bytes;
} model;

/* One batch on the host: sequences * length tokens, row-major. targets is NULL if no loss is wanted. */
typedef struct model_batch {
    const int32_t *tokens, *targets; // in 0..vocab-1
    int64_t sequences, length;
} model_batch;

/* Makes a model with zero weights on a device, which must outlive it. NULL: on a CPU device of its own. A
 * made model must not be moved. */
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
 * plain top-K, as for validation. `compute`: that of the options, or SMOE_COMPUTE_STORAGE. */
bool model_loss(model *m, const model_batch *batch, const train_routing *routing, smoe_compute compute,
                double *loss, error *err);

/* Runs tokens [first, first + count) of one sequence. Earlier passes must have run the tokens before `first`.
 * logits (vocab) on the host receive the prediction of the token after the last one. Only for
 * MODEL_GENERATE. */
bool model_continue(model *m, const int32_t *tokens, int64_t first, int64_t count, float *logits, error *err);

/* Training. model_stage_batch prepares a batch of m->parts passes. The caller must not change it until the
 * device has used it; on a GPU until the call returns. model_load_batch copies the batch to the device. Then,
 * for each part p:
 *
 *     model_forward       the forward with m->routing, the loss, and the backward down to the last layer; or
 *                         model_begin_forward (the embedding), model_layer_forward for each layer from the
 *                         first on, model_end_forward
 *     model_layer_backward for each layer, from the last to the first
 *     model_end_backward  the embedding
 *
 * enqueue the pass. The gradients of its share of the batch's mean loss, and of the mean of the parts'
 * auxiliary losses, are added to those of the parts before; the first part adds to what is there if `add`,
 * which a device with adds_gradients needs, and else writes. SR-f draws other numbers in each part.
 * model_end_step enqueues the loss of all parts to scalars[SCALAR_LOSS]. */
void model_stage_batch(model *m, const model_batch *batch);
void model_load_batch(model *m);
bool model_forward(model *m, block_pass *pass, int64_t part, bool add, error *err);
void model_begin_forward(model *m, block_pass *pass, int64_t part, bool add);
bool model_layer_forward(model *m, const block_pass *pass, int64_t layer, error *err);
void model_end_forward(model *m, const block_pass *pass);
bool model_layer_backward(model *m, const block_pass *pass, int64_t layer, error *err);
void model_end_backward(model *m, const block_pass *pass);
void model_end_step(model *m);

/* Moves the selection biases by routing.bias_rate against the counts of the passes since the last call, if it
 * is not 0. */
bool model_update_biases(model *m, error *err);

/* The counts from which the next update of the biases follows, on the device, and their number. */
int32_t *model_counts(const model *m, int64_t *count);

/* The selection biases of a layer as a tensor of the checkpoint. NULL: it has none. */
float *model_bias(const model *m, int64_t layer, param_tensor *tensor);

/* All of them; returns the loss too. Not with one_layer. */
bool model_gradients(model *m, const model_batch *batch, double *loss, error *err);

/* The block of experts of a layer; NULL: the layer is dense. */
const block *model_experts(const model *m, int64_t layer);

/* The number of weights that one token uses, without the embedding. 6 times this number is the FLOPs of
 * training for each token, without those of the attention scores. */
int64_t model_active_weights(const model_config *config);

#endif
