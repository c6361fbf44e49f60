/* The model's backward pass, the stages of model_forward in reverse. m->dx carries the gradient of the
 * residual stream; every branch adds its own to it. */
#include "train/attention.h"
#include "train/dense.h"
#include "train/embedding.h"
#include "train/linear.h"
#include "train/model.h"
#include "train/norm.h"
#include "train/rope.h"

/* Gradient of the MLP branch from m->dx = d(x_next); leaves d(x_mid) there. */
static bool mlp_half(model *m, model_layer *layer, int64_t l, int64_t rows, error *err)
{
    const model_config *c = &m->config;
    const param_layer *at = &m->layout.layers[l];
    float *w = m->weights, *g = m->grads;
    bool dense = l < c->dense_layers;
    int64_t d = c->hidden, width = dense ? c->dense_intermediate : c->shared_intermediate;
    if (!dense) {
        moe_weights weights = {w + at->router, w + at->w1, w + at->w2};
        moe_weights grads = {g + at->router, g + at->w1, g + at->w2};
        if (!moe_backward(&m->moe, m->dh, &grads, m->dx, layer->h2, &weights, rows, &m->routing, &layer->moe,
                          err))
            return false;
    }
    if (width)
        dense_backward(m->dh, g + at->dense_w1, g + at->dense_w2, m->dx, layer->dense_h, layer->dense_a,
                       layer->h2, w + at->dense_w1, w + at->dense_w2, rows, d, width, !dense, m->da);
    norm_backward(m->dx, d, g + at->mlp_norm, m->dh, d, layer->x_mid, d, layer->rstd2, w + at->mlp_norm, rows,
                  d, true, m->norm_scratch);
    return true;
}

/* Gradient of the attention branch from m->dx = d(x_mid); leaves d(x) there. */
static void attention_half(model *m, model_layer *layer, const param_layer *at, const model_batch *batch)
{
    const model_config *c = &m->config;
    const float *w = m->weights;
    float *g = m->grads;
    int64_t rows = batch->sequences * batch->length, d = c->hidden, size = d / c->heads;
    attention_shape shape = {batch->sequences, batch->length, c->heads, size, 3 * d};
    linear_backward_input(m->dh, m->dx, w + at->output, rows, d, d, false);
    linear_backward_weight(g + at->output, m->dx, layer->mixed, rows, d, d);
    attention_backward(m->dq, m->dk, m->dqkv + 2 * d, m->dh, layer->p, layer->q, layer->k, layer->qkv + 2 * d,
                       &shape, m->attention_scratch);
    rope_apply(m->dq, m->rope, rows, batch->length, c->heads, size, true);
    rope_apply(m->dk, m->rope, rows, batch->length, c->heads, size, true);
    norm_backward(m->dqkv, 3 * d, g + at->q_norm, m->dq, d, layer->qkv, 3 * d, layer->rstd_q, w + at->q_norm,
                  rows, d, false, m->norm_scratch);
    norm_backward(m->dqkv + d, 3 * d, g + at->k_norm, m->dk, d, layer->qkv + d, 3 * d, layer->rstd_k,
                  w + at->k_norm, rows, d, false, m->norm_scratch);
    linear_backward_input(m->dh, m->dqkv, w + at->qkv, rows, d, 3 * d, false);
    linear_backward_weight(g + at->qkv, m->dqkv, layer->h1, rows, d, 3 * d);
    norm_backward(m->dx, d, g + at->input_norm, m->dh, d, layer->x, d, layer->rstd1, w + at->input_norm, rows,
                  d, true, m->norm_scratch);
}

bool model_backward(model *m, const model_batch *batch, error *err)
{
    const model_config *c = &m->config;
    const param_layout *layout = &m->layout;
    int64_t rows = batch->sequences * batch->length, d = c->hidden;
    linear_backward_input(m->dh, m->logits, m->weights + layout->head, rows, d, c->vocab, false);
    linear_backward_weight(m->grads + layout->head, m->logits, m->hidden, rows, d, c->vocab);
    norm_backward(m->dx, d, m->grads + layout->norm, m->dh, d, m->x_last, d, m->rstd,
                  m->weights + layout->norm, rows, d, false, m->norm_scratch);
    for (int64_t l = c->layers - 1; l >= 0; l--) {
        if (!mlp_half(m, &m->layers[l], l, rows, err)) return false;
        attention_half(m, &m->layers[l], &layout->layers[l], batch);
    }
    embedding_backward(m->grads + layout->embedding, m->dx, batch->tokens, rows, d);
    return true;
}
