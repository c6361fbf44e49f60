/* The place of every parameter of a model in one flat array, and its name in the checkpoint. Weights,
 * gradients and the two AdamW moments are four arrays with the same layout: embedding and head, then layer by
 * layer the matrices, which have weight decay, then the vectors of the norms. Each block adds its own
 * (block.h). Matrices that one GEMM reads together are contiguous: q, k and v; the gate and up rows of an
 * expert. */
#ifndef TRAIN_PARAMS_H
#define TRAIN_PARAMS_H

#include "base/error.h"

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

typedef struct param_layout {
    param_tensor *tensors;
    size_t tensor_count, room; // room: for this many
    size_t *layers; // (layer_count + 1) where the matrices of each layer begin; the last: where all end
    size_t layer_count;
    size_t matrices, total; // elements, with the space between the groups; the matrices come first
    bool failed;            // memory ran out
} param_layout;

/* An empty layout. Then the tensors are added in the order of the file's. */
bool param_layout_create(param_layout *layout, int64_t layers, error *err);
void param_layout_destroy(param_layout *layout);
bool param_layout_check(const param_layout *layout, error *err); // did all additions find memory?

/* The place where the next group starts. */
size_t param_group(param_layout *layout);

/* Adds a matrix, or with columns 0 a vector, after what is there. `format` makes its name. */
void param_add(param_layout *layout, int64_t rows, int64_t columns, double deviation, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/* Adds a vector of ones as a group, model.layers.L.WHAT.weight; returns its place. */
size_t param_add_vector(param_layout *layout, int64_t size, int64_t layer, const char *what);

/* The number of weights, without the space between the groups. */
size_t param_count(const param_layout *layout);

/* The seed of tensor `index`'s random values (base/random.h). */
uint64_t param_seed(uint64_t seed, size_t index);

/* Fills weights (total): normal values, each tensor from its own seed; ones for the norms. */
void param_init(float *weights, const param_layout *layout, uint64_t seed);

#endif
