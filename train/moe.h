/* The Mixture-of-Experts layer of the model: softmax over all experts, top-K, SwiGLU experts, in f32. This is
 * the one file of the trainer that calls the library (include/smoe.h), and it does so through the public
 * header alone. */
#ifndef TRAIN_MOE_H
#define TRAIN_MOE_H

#include "common/error.h"
#include "smoe.h"
#include "train/config.h"

#include <stdbool.h>
#include <stdint.h>

/* How a pass routes and what its losses weigh. Validation uses the zeroed struct: plain top-K. */
typedef struct moe_routing {
    smoe_rounding rounding;
    int32_t tile;
    uint64_t seed, step; // the draws of SR-f
    float balance_coefficient, z_coefficient;
} moe_routing;

/* What one layer keeps from forward to backward. */
typedef struct moe_saved {
    float *logits;                // (T, E)
    void *saved;                  // the library's own
    _Alignas(16) float losses[2]; // load balance, z
} moe_saved;

/* One a model: the library's context and what all its layers share. Zeroed, then moe_create. */
typedef struct moe {
    smoe_context *context;
    const model_config *config;
    uint64_t saved_bytes, scratch_bytes;
    void *scratch;
} moe;

/* The weights of one layer, or their gradients. */
typedef struct moe_weights {
    float *router; // (E, d)
    float *w1;     // (E, 2n, d)
    float *w2;     // (E, d, n)
} moe_weights;

/* Buffers for passes of up to `tokens` tokens, under plain top-K or under `routing`. config must outlive m.
 */
bool moe_create(moe *m, const model_config *config, int64_t tokens, const moe_routing *routing, error *err);
void moe_destroy(moe *m);

/* out, x (tokens, d) */
bool moe_forward(moe *m, float *out, const float *x, const moe_weights *w, int64_t tokens,
                 const moe_routing *routing, moe_saved *saved, error *err);

/* dx (tokens, d) written; the weights' gradients are added to */
bool moe_backward(moe *m, float *dx, const moe_weights *dw, const float *dout, const float *x,
                  const moe_weights *w, int64_t tokens, const moe_routing *routing, moe_saved *saved,
                  error *err);

#endif
