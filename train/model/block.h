/* A block: one branch of the residual stream, x += f(norm(x)). A layer is an attention block and an MLP
 * block, experts or dense. Each kind of block has its weights and their names, its memory, forward, backward
 * and what the backward computes again in one file; model.c has the norms and loops over the blocks. */
#ifndef TRAIN_BLOCK_H
#define TRAIN_BLOCK_H

#include "train/model/arena.h"
#include "train/model/config.h"
#include "train/model/routing.h"
#include "train/model/weights.h"

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

/* What all blocks of a model share. */
typedef struct block_frame {
    train_device *device;
    const model_config *config;
    const model_weights *weights;
    const train_routing *routing; // of training passes
    model_use use;
    model_recompute recompute;
    smoe_compute compute;    // of the experts in training passes (smoe.h)
    int64_t sequences, rows; // most of a pass; rows = sequences * context
    int32_t chunks;          // column chunks of the experts (smoe.h)
    float *norm_scratch;
} block_frame;

/* One pass through the blocks. */
typedef struct block_pass {
    int64_t sequences, length, rows; // rows = sequences * length
    int64_t part;                    // which of a step's passes on this rank
    int64_t first;                   // position of the first row; if not 0: one sequence, see pass_shape
    const train_routing *routing;
    smoe_compute compute; // of the experts: the frame's, or as the device's type
    bool quantizes;       // the weights may have changed since the last pass with this `compute`
    bool add;             // the backward adds to the gradients of the weights; else it writes them
} block_pass;

/* Two rounds lay out what the layers keep: what each layer has for itself, and what they share. */
typedef struct block_memory {
    arena *arena;
    const block_frame *frame;
    bool shared;
} block_memory;

/* Do the layers share what is computed again from `from` on? */
static inline bool block_shares(const block_frame *f, model_recompute from)
{
    return f->use != MODEL_TRAIN || f->recompute >= from;
}

/* The place of a buffer: a new one in its round, else the old one. */
static inline void *block_place(const block_memory *m, void *old, bool shared, size_t bytes)
{
    return shared == m->shared ? arena_take(m->arena, bytes) : old;
}

typedef struct block block;

typedef struct block_kind {
    const char *norm;   // name of the norm before it
    bool adds_residual; // the forward writes x + f(norm(x)), not f(norm(x)) alone
    size_t common, own; // bytes, on the host, of what all blocks of the kind and each block have; zeroed
    bool (*open)(void *common, const block_frame *f,
                 error *err);    // NULL: nothing to do; after the layout is made
    void (*close)(void *common); // may be NULL
    /* Adds the matrices, or the vectors but for the norm before it, to the layout. vectors may be NULL. */
    void (*matrices)(block *b, param_layout *layout, const model_config *c);
    void (*vectors)(block *b, param_layout *layout, const model_config *c);
    int64_t (*active)(const model_config *c); // weights that a token uses
    /* Memory on the device: what a block keeps; constants; what is needed only while a forward or backward of
     * the kind runs. `kept_for_log`, unless NULL: bytes at the begin of what a block keeps, read after a
     * pass. */
    void (*place)(block *b, const block_memory *memory);
    void (*place_constants)(void *common, const block_frame *f, arena *a);
    void (*place_quantized)(block *b, arena *a); // weights; may be NULL, as may quantize, which computes them
    bool (*quantize)(const block *b, error *err);
    void (*place_scratch)(void *common, const block_frame *f, arena *a);
    size_t (*kept_for_log)(const void *common);
    bool (*fill)(void *common, const block_frame *f, error *err); // the constants
    /* out (rows, d) = f(h) [+ x], h = norm(x) */
    bool (*forward)(block *b, const block_pass *p, void *out, error *err);
    /* Computes again what the forward did not keep, without h; may be NULL. Not with RECOMPUTE_LAYERS, where
     * the forward runs again. */
    void (*again)(block *b, const block_pass *p);
    /* dh (rows, d) from dout, and the gradients of the weights. */
    bool (*backward)(block *b, const block_pass *p, void *dh, void *dout, error *err);
    /* The gradients of the weights that read h; NULL: `backward` has computed them. It runs after the
     * backward of the norm, which writes h again. So h need not be there before, and its scratch must outlive
     * the norm's. */
    void (*backward_last)(block *b, const block_pass *p);
} block_kind;

struct block {
    const block_kind *kind;
    const block_frame *frame;
    void *common, *own;
    int64_t layer;
    size_t norm; // (d) weights of the norm
    void *x, *h; // (rows, d): the residual stream before the block; norm(x)
    float *rstd; // (rows)
};

/* `count` elements of the device's type past `base`. */
static inline void *block_past(const block *b, const void *base, int64_t count)
{
    return (char *)base + (size_t)count * type_size(b->frame->device->type);
}

static inline void *block_weight(const block *b, size_t offset)
{
    return weights_at(b->frame->weights, offset);
}

static inline void *block_grad(const block *b, size_t offset)
{
    return weights_grad(b->frame->weights, offset);
}

/* Deviations of the first, random weights. Matrices whose product is added to the residual stream start
 * smaller, so that the variance of that stream does not grow with the depth. */
double block_deviation(const model_config *c);
double block_deviation_out(const model_config *c);

#endif
