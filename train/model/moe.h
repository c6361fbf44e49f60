/* The Mixture-of-Experts layer of the model: softmax over all experts, top-K, SwiGLU experts. This is
 * the only file of the trainer that calls the library, and it uses the public header alone. */
#ifndef TRAIN_MOE_H
#define TRAIN_MOE_H

#include "common/error.h"
#include "smoe.h"
#include "train/model/config.h"
#include "train/ops.h"

#include <stdbool.h>
#include <stdint.h>

/* How a pass routes its tokens, and the coefficients of its auxiliary losses. Validation uses the zeroed
 * struct: plain top-K. */
typedef struct moe_routing {
    smoe_rounding rounding;
    int32_t tile;
    uint64_t seed, step; // the draws of SR-f
    float balance_coefficient, z_coefficient;
} moe_routing;

/* What one layer keeps from forward to backward. */
typedef struct moe_saved {
    float *logits; // (T, E); see moe_keeps_logits
    void *saved;   // saved_bytes, in the library's own layout; NULL if nothing is kept
    float *losses; // (2): load balance, z
} moe_saved;

/* Each model has one: the library's context, and what all layers share. It must be zeroed before
 * moe_create. */
typedef struct moe {
    smoe_context *context;
    train_device *device;
    const model_config *config;
    bool train;
    int32_t chunks;                      // column chunks, as in smoe_layer
    uint64_t saved_bytes, scratch_bytes; // of one layer, of all
    void *scratch;                       // the caller's
} moe;

/* The weights of one layer, or their gradients. */
typedef struct moe_weights {
    void *router; // (E, d)
    void *w1;     // (E, 2n, d)
    void *w2;     // (E, d, n)
} moe_weights;

/* Prepares m for passes of up to `tokens` tokens, with plain top-K or, with `train`, with `routing`. Sets the
 * sizes of the memory that they need. config must outlive m. */
bool moe_create(moe *m, train_device *device, const model_config *config, int64_t tokens, bool train,
                int32_t chunks, const moe_routing *routing, error *err);
void moe_destroy(moe *m);

/* out, x (tokens, d) */
bool moe_forward(moe *m, void *out, const void *x, const moe_weights *w, int64_t tokens,
                 const moe_routing *routing, moe_saved *saved, error *err);

/* Writes dx (tokens, d). The gradients of the weights are added to the old values, or with `add` false
 * written. */
bool moe_backward(moe *m, void *dx, const moe_weights *dw, const void *dout, const void *x,
                  const moe_weights *w, int64_t tokens, const moe_routing *routing, moe_saved *saved,
                  bool add, error *err);

/* Does the backward read the logits? If not, layers may share them. */
bool moe_keeps_logits(const model_config *config, const moe_routing *routing);

/* Fills view with pointers to the plan, on the device, of a training pass that has written `saved`. */
bool moe_view(moe *m, int64_t tokens, const moe_routing *routing, const moe_saved *saved,
              smoe_plan_view *view, error *err);

/* Copies to the host the row counts of all experts (E), under plain top-K and as routed. They belong to the
 * training pass of `tokens` tokens with `routing` that has written `saved`. Waits for the device. */
bool moe_counts(moe *m, int64_t tokens, const moe_routing *routing, const moe_saved *saved, int32_t *plain,
                int32_t *routed, error *err);

#endif
