/* The model's backward pass, the stages of the forward in reverse. m->dx holds the gradient of the residual
 * stream, and every branch adds its gradient to it. */
#include "train/model/model.h"

/* A group of weights and their gradients. */
static void *param(const model *m, size_t offset)
{
    return model_past(m, m->params, (int64_t)offset);
}

static void *grad(const model *m, size_t offset)
{
    const size_t size = type_size(m->device->grad_type), before = m->layout.layers[0].qkv;
    if (!m->one_layer || offset < before) return (char *)m->grads + offset * size;
    if (offset < m->layout.matrices) return (char *)m->layer_grads + (offset - m->layer_first) * size;
    return (char *)m->grads + (before + offset - m->layout.matrices) * size;
}

/* The gradients of one_layer take the place of those of the layer before in the backward, first that of the
 * head's logits. A device that adds gradients has cleared the former, but not the latter; and the updates see
 * what lies between the tensors of a layer, which is another thing after a layer of other tensors. */
static void begin_layer(model *m, int64_t l)
{
    const grad_span span = model_layer_span(m, l);
    const int64_t dense = m->config.dense_layers;
    const bool first = l + 1 == m->config.layers, other = (l < dense) != (l + 1 < dense);
    m->layer_first = (size_t)span.first;
    if (m->clears_layer && (first || other))
        m->device->ops->clear(m->device, span.grads, (size_t)span.count * type_size(m->device->grad_type));
}

static void dense_backward(model *m, model_layer *layer, const param_layer *at, int64_t rows, int64_t width,
                           bool add_dh, bool add)
{
    train_device *dv = m->device;
    const train_ops *ops = dv->ops;
    int64_t d = m->config.hidden;
    smoe_type type = dv->grad_type;
    ops->linear_dx(dv, m->da, m->dx, param(m, at->dense_w2), rows, width, d, false);
    ops->linear_dw(dv, grad(m, at->dense_w2), type, m->dx, layer->dense_a, rows, width, d, add);
    ops->swiglu_backward(dv, layer->dense_h, m->da, rows, width);
    ops->linear_dx(dv, m->dh, layer->dense_h, param(m, at->dense_w1), rows, d, 2 * width, add_dh);
    ops->linear_dw(dv, grad(m, at->dense_w1), type, layer->dense_h, layer->h2, rows, d, 2 * width, add);
}

/* Gradient of the MLP branch from m->dx = d(x_next); leaves d(x_mid) there. */
static bool mlp_half(model *m, model_layer *layer, int64_t l, int64_t rows, bool add, error *err)
{
    const model_config *c = &m->config;
    const param_layer *at = &m->layout.layers[l];
    train_device *dv = m->device;
    bool dense = l < c->dense_layers;
    int64_t width = dense ? c->dense_intermediate : c->shared_intermediate;
    if (!dense) {
        moe_weights weights = {param(m, at->router), param(m, at->w1), param(m, at->w2)};
        moe_weights grads = {grad(m, at->router), grad(m, at->w1), grad(m, at->w2)};
        if (!moe_backward(&m->moe, m->dh, &grads, m->dx, layer->h2, &weights, rows, &m->routing, &layer->moe,
                          add, err))
            return false;
    }
    if (width) dense_backward(m, layer, at, rows, width, !dense, add);
    dv->ops->norm_backward(dv, m->dx, grad(m, at->mlp_norm), NULL, m->dh, layer->x_mid, layer->rstd2,
                           param(m, at->mlp_norm), rows, c->hidden, true, add, m->norm_scratch);
    return true;
}

/* Gradient of the attention branch from m->dx = d(x_mid); leaves d(x) there. */
static void attention_half(model *m, model_layer *layer, const param_layer *at, const pass_shape *shape,
                           bool add)
{
    train_device *dv = m->device;
    const train_ops *ops = dv->ops;
    smoe_type type = dv->grad_type;
    int64_t rows = shape->sequences * shape->length, d = m->config.hidden;
    ops->linear_dx(dv, m->dh, m->dx, param(m, at->output), rows, d, d, false);
    ops->linear_dw(dv, grad(m, at->output), type, m->dx, layer->mixed, rows, d, d, add);
    ops->attention_backward(dv, m->dq, m->dk, model_past(m, m->dqkv, 2 * d), m->dh, layer->mixed, layer->p,
                            layer->q, layer->k, model_past(m, layer->qkv, 2 * d), shape,
                            m->attention_scratch);
    ops->qk_norm_rope_backward(dv, m->dqkv, grad(m, at->q_norm), grad(m, at->k_norm), m->dq, m->dk,
                               layer->qkv, layer->rstd_qk, param(m, at->q_norm), param(m, at->k_norm),
                               m->rope, shape, add, m->norm_scratch);
    ops->linear_dx(dv, m->dh, m->dqkv, param(m, at->qkv), rows, d, 3 * d, false);
    // h2 may lie where h1 did.
    ops->norm_backward(dv, m->dx, grad(m, at->input_norm), m->recompute == RECOMPUTE_NONE ? NULL : layer->h1,
                       m->dh, layer->x, layer->rstd1, param(m, at->input_norm), rows, d, true, add,
                       m->norm_scratch);
    ops->linear_dw(dv, grad(m, at->qkv), type, m->dqkv, layer->h1, rows, d, 3 * d, add);
}

/* Computes again what the forward of a layer did not keep, except h1: the backward of its norm writes h1. */
static bool recompute(model *m, model_layer *layer, int64_t l, const pass_shape *shape, error *err)
{
    const param_layer *at = &m->layout.layers[l];
    train_device *dv = m->device;
    const train_ops *ops = dv->ops;
    int64_t rows = shape->sequences * shape->length, d = m->config.hidden;
    double eps = m->config.norm_eps;
    if (m->recompute == RECOMPUTE_NONE) return true;
    if (m->recompute == RECOMPUTE_LAYERS) {
        ops->norm(dv, layer->h1, layer->rstd1, layer->x, NULL, param(m, at->input_norm), rows, d, eps);
        model_attention_half(m, layer, at, shape);
        return model_mlp(m, m->dh, layer, l, rows, &m->routing, err); // its output is not used
    }
    if (m->recompute == RECOMPUTE_NORMS_QK)
        ops->qk_norm_rope(dv, layer->q, layer->k, layer->rstd_qk, layer->qkv, param(m, at->q_norm),
                          param(m, at->k_norm), m->rope, shape, eps);
    ops->norm(dv, layer->h2, layer->rstd2, layer->x_mid, NULL, param(m, at->mlp_norm), rows, d, eps);
    return true;
}

bool model_backward(model *m, const pass_shape *shape, bool add, error *err)
{
    const model_config *c = &m->config;
    const param_layout *layout = &m->layout;
    train_device *dv = m->device;
    int64_t rows = shape->sequences * shape->length, d = c->hidden;
    dv->ops->norm_backward(dv, m->dx, grad(m, layout->norm), NULL, m->dh, m->x_last, m->rstd,
                           param(m, layout->norm), rows, d, false, add, m->norm_scratch);
    for (int64_t l = c->layers - 1; l >= 0; l--) {
        begin_layer(m, l);
        if (!recompute(m, &m->layers[l], l, shape, err)) return false;
        if (!mlp_half(m, &m->layers[l], l, rows, add, err)) return false;
        attention_half(m, &m->layers[l], &layout->layers[l], shape, add);
        const grad_span span = model_layer_span(m, l);
        if (m->one_layer) m->ready(m->ready_user, &span);
    }
    dv->ops->embed_backward(dv, grad(m, layout->embedding), m->dx, &m->batch, rows, c->vocab, d,
                            add || c->tied);
    return true;
}
