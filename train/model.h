/* The language model: OLMoE's decoder on tokens of a small vocabulary.
 *
 *     x = embedding[tokens]
 *     every layer:  h1 = norm(x);  q = rope(norm_q(h1 Wq^T)), k = rope(norm_k(h1 Wk^T)), v = h1 Wv^T
 *                   x += attention(q, k, v) Wo^T
 *                   h2 = norm(x);  x += experts(h2) [+ shared expert(h2)],
 *                                  or dense MLP(h2) in the first layers
 *     logits = norm(x) head^T;  loss = mean cross-entropy in nats
 *
 * The q and k norms go over the whole projection, before it is split into heads. All in f32; the bits do not
 * depend on the number of threads. */
#ifndef TRAIN_MODEL_H
#define TRAIN_MODEL_H

#include "train/moe.h"
#include "train/params.h"

/* What one layer keeps for its backward; rows = sequences * length. */
typedef struct model_layer {
    float *x;                 // (rows, d) into the layer
    float *h1, *rstd1;        // (rows, d), (rows)
    float *qkv;               // (rows, 3d) as projected
    float *rstd_q, *rstd_k;   // (rows)
    float *q, *k;             // (rows, d) after norm and RoPE
    float *p;                 // attention_saved
    float *mixed;             // (rows, d) attention's output
    float *x_mid;             // (rows, d) after attention
    float *h2, *rstd2;        // (rows, d), (rows)
    float *dense_h, *dense_a; // (rows, 2f), (rows, f) of the dense MLP or shared expert
    moe_saved moe;
} model_layer;

typedef struct model {
    model_config config;
    param_layout layout;
    float *weights; // (layout.total)
    float *grads;   // as weights; NULL when the model was made without training
    moe moe;
    moe_routing routing; // of training passes
    int64_t sequences;   // most of a pass, each of up to config.context tokens
    model_layer *layers;
    float *x_last, *hidden, *rstd; // (rows, d), (rows, d), (rows): the final norm's input, output
    float *logits;                 // (rows, vocab); after a pass with targets: their gradient
    float *losses;                 // (rows)
    float *rope;                   // rope_table
    float *dx, *dh, *dq, *dk;      // (rows, d) gradients in flight
    float *dqkv, *da;              // (rows, 3d), (rows, widest f)
    float *norm_scratch, *attention_scratch;
    void *memory; // what all of these lie in
    size_t memory_bytes;
} model;

/* One batch: sequences * length tokens, row-major; targets NULL when no loss is wanted. */
typedef struct model_batch {
    const int32_t *tokens, *targets; // in 0..vocab-1
    int64_t sequences, length;
} model_batch;

/* Makes a model with zero weights for passes of up to `sequences` sequences; `routing` is that of the
 * training passes (its step may change before each). `training` adds the gradients. */
bool model_create(model *m, const model_config *config, int64_t sequences, const moe_routing *routing,
                  bool training, error *err);
void model_destroy(model *m); // a zeroed model is fine

/* Runs a batch. `routing` NULL: plain top-K, as validation and generation use it. *loss (may be NULL without
 * targets) is the mean in nats, auxiliary losses not included. */
bool model_forward(model *m, const model_batch *batch, const moe_routing *routing, double *loss, error *err);

/* After model_forward of the same batch with targets and m->routing: adds the gradients of the loss and of
 * the auxiliary losses to m->grads. */
bool model_backward(model *m, const model_batch *batch, error *err);

/* Weights that one token uses in its pass, embedding not included (6 times that: FLOPs of training,
 * attention's scores apart). */
int64_t model_active_weights(const model_config *config);

#endif
