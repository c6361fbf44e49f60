/* The place of every parameter of a model in one flat array of floats, and its name in the checkpoint.
 * Weights, gradients and the two AdamW moments are four arrays with the same layout: first the matrices,
 * which have weight decay, then the vectors of the norms. Matrices that one GEMM reads together are
 * contiguous: q, k and v; the gate and up rows of an expert. */
#ifndef TRAIN_PARAMS_H
#define TRAIN_PARAMS_H

#include "common/error.h"
#include "train/model/config.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One tensor as the checkpoint names it. */
typedef struct param_tensor {
    char name[80];
    int64_t shape[2];
    int rank; // 2, or 1 for the norms
    size_t offset, count;
    double deviation; // standard deviation of its first, random values; 0: they are ones
} param_tensor;

/* Offsets of one layer in floats. The MLP is either experts (router, w1, w2, and shared_* if there is a
 * shared expert) or dense (dense_*); the other offsets are 0. */
typedef struct param_layer {
    size_t qkv;                  // (3d, d)
    size_t output;               // (d, d)
    size_t router;               // (E, d)
    size_t w1, w2;               // (E, 2n, d), (E, d, n)
    size_t dense_w1, dense_w2;   // (2f, d), (d, f): the dense layer's, or the shared expert's
    size_t input_norm, mlp_norm; // (d)
    size_t q_norm, k_norm;       // (d)
} param_layer;

typedef struct param_layout {
    param_tensor *tensors;
    size_t tensor_count;
    param_layer *layers;
    size_t embedding, head, norm; // (V, d), (V, d) (the embedding if tied), (d)
    size_t matrices, total;       // floats, with the space between the groups; the matrices come first
} param_layout;

bool param_layout_create(param_layout *layout, const model_config *config, error *err);
void param_layout_destroy(param_layout *layout);

/* The number of weights, without the space between the groups. */
size_t param_count(const param_layout *layout);

/* The stream of random values (common/random.h) that tensor `index` starts from. */
uint64_t param_stream(uint64_t seed, size_t index);

/* Fills weights (total): normal values from the seed, each tensor its own stream; ones for the norms. */
void param_init(float *weights, const param_layout *layout, uint64_t seed);

#endif
