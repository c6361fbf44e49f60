/* See head.h. */
#include "train/model/head.h"

void head_open(model_head *h, const block_frame *f)
{
    const int64_t most = f->device->loss_rows;
    *h = (model_head){.frame = f, .loss_rows = most && most < f->rows ? most : f->rows};
    if (f->use == MODEL_GENERATE) h->loss_rows = 1;
}

void head_matrices(model_head *h, param_layout *layout)
{
    const model_config *c = h->frame->config;
    h->embedding = param_group(layout);
    param_add(layout, c->vocab, c->hidden, c->initializer_range, "model.embed_tokens.weight");
    h->weight = h->embedding;
    if (c->tied) return;
    h->weight = param_group(layout);
    param_add(layout, c->vocab, c->hidden, c->initializer_range, "lm_head.weight");
}

void head_place(model_head *h, arena *a)
{
    const block_frame *f = h->frame;
    const model_config *c = f->config;
    h->logits = arena_values(a, f->device->type, h->loss_rows * c->vocab);
    if (f->use == MODEL_TRAIN && f->device->grad_type != SMOE_TYPE_F32 && h->loss_rows < f->rows)
        h->grads = arena_floats(a, c->vocab * c->hidden);
}

void head_embed(const model_head *h, void *x, const device_batch *batch, int64_t rows)
{
    const block_frame *f = h->frame;
    f->device->ops->embed(f->device, x, weights_at(f->weights, h->embedding), batch->tokens, rows,
                          f->config->hidden);
}

void head_embed_backward(const model_head *h, const void *dx, const device_batch *batch, int64_t rows,
                         bool add)
{
    const block_frame *f = h->frame;
    const model_config *c = f->config;
    f->device->ops->embed_backward(f->device, weights_grad(f->weights, h->embedding), dx, batch, rows,
                                   c->vocab, c->hidden, add || c->tied);
}

void head_loss(const model_head *h, float *losses, const void *hidden, void *dh, const int32_t *targets,
               int64_t rows, int64_t all, bool add)
{
    const model_config *c = h->frame->config;
    train_device *dv = h->frame->device;
    const train_ops *ops = dv->ops;
    const int64_t d = c->hidden, vocab = c->vocab;
    const size_t row = (size_t)d * type_size(dv->type);
    const void *w = weights_at(h->frame->weights, h->weight);
    void *grads = dh ? weights_grad(h->frame->weights, h->weight) : NULL, *dw = h->grads ? h->grads : grads;
    for (int64_t first = 0; first < rows; first += h->loss_rows) {
        const int64_t count = rows - first < h->loss_rows ? rows - first : h->loss_rows;
        const void *from = (const char *)hidden + (size_t)first * row;
        ops->linear(dv, h->logits, from, w, NULL, count, d, vocab);
        ops->cross_entropy(dv, h->logits, losses + first, targets + first, 1.0f / (float)all, count, vocab);
        if (!dh) continue;
        ops->linear_dx(dv, (char *)dh + (size_t)first * row, h->logits, w, count, d, vocab, false);
        ops->linear_dw(dv, dw, h->grads ? SMOE_TYPE_F32 : dv->grad_type, h->logits, from, count, d, vocab,
                       first > 0 || (add && !h->grads));
    }
    if (dh && h->grads) ops->narrow(dv, grads, h->grads, vocab * d, add);
}

void head_predict(const model_head *h, float *logits, const void *hidden)
{
    const model_config *c = h->frame->config;
    train_device *dv = h->frame->device;
    dv->ops->linear(dv, h->logits, hidden, weights_at(h->frame->weights, h->weight), NULL, 1, c->hidden,
                    c->vocab);
    dv->ops->load(dv, logits, h->logits, dv->type, c->vocab);
}
