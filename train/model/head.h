/* The two ends of a model: the embedding of the tokens, and the head, which is another matrix or the same
 * (tied):
 *
 *     x = embedding[tokens];  logits = hidden head^T;  loss = mean cross-entropy in nats
 *
 * Only the logits of some rows exist at a time. In training the gradients of these rows are computed at once.
 */
#ifndef TRAIN_HEAD_H
#define TRAIN_HEAD_H

#include "train/model/block.h"

typedef struct model_head {
    const block_frame *frame;
    size_t embedding, weight; // (V, d) both; the same if tied
    int64_t loss_rows;        // rows of logits that exist at a time
    void *logits;             // (loss_rows, vocab)
    float *grads;             // (V, d): the gradient of `weight` while it is summed, if grad_type is not f32
} model_head;

void head_open(model_head *h, const block_frame *f);
void head_matrices(model_head *h, param_layout *layout);
void head_place(model_head *h, arena *a);

void head_embed(const model_head *h, void *x, const device_batch *batch, int64_t rows);
/* Adds the gradient of the embedding, or with `add` false writes it, if no head has. */
void head_embed_backward(const model_head *h, const void *dx, const device_batch *batch, int64_t rows,
                         bool add);

/* losses (rows) from hidden (rows, d). With dh (rows, d), not NULL, also the gradient of hidden and that of
 * the weights, for a loss that is the mean over `all` rows. */
void head_loss(const model_head *h, float *losses, const void *hidden, void *dh, const int32_t *targets,
               int64_t rows, int64_t all, bool add);

/* Copies the logits (V) of one row to the host. */
void head_predict(const model_head *h, float *logits, const void *hidden);

#endif
