/* The block of a dense SwiGLU MLP, and the MLP itself, which is also the shared expert of an experts' block.
 */
#ifndef TRAIN_DENSE_H
#define TRAIN_DENSE_H

#include "train/model/block.h"

extern const block_kind dense_block;

typedef struct dense_mlp {
    size_t w1, w2; // weights: (2f, d), (d, f)
    int64_t width; // f; 0: there is none
    void *h, *a;   // (rows, 2f), (rows, f): gate and up; their product
} dense_mlp;

/* `prefix` begins the tensors' names. */
void dense_mlp_matrices(dense_mlp *mlp, param_layout *layout, const model_config *c, const char *prefix);
void dense_mlp_place(dense_mlp *mlp, const block_memory *memory);

/* out = [out +] MLP(b->h) */
void dense_mlp_forward(const block *b, const dense_mlp *mlp, const block_pass *p, void *out, bool add);

/* dh = [dh +] its gradient, and those of the weights; da (rows, f) is scratch. */
void dense_mlp_backward(const block *b, const dense_mlp *mlp, const block_pass *p, void *dh, const void *dout,
                        void *da, bool add_dh);

#endif
