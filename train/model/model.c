/* See model.h: the forward. model_memory.c allocates, model_backward.c has the backward. */
#include "train/model/model.h"

void *model_past(const model *m, const void *base, int64_t count)
{
    return (char *)base + (size_t)count * type_size(m->device->type);
}

pass_shape model_shape(const model *m, int64_t sequences, int64_t length)
{
    const model_config *c = &m->config;
    return (pass_shape){.sequences = sequences,
                        .length = length,
                        .heads = c->heads,
                        .head_size = c->hidden / c->heads,
                        .forward_only = m->use != MODEL_TRAIN};
}

static void *param(const model *m, size_t offset)
{
    return model_past(m, m->params, (int64_t)offset);
}

static int64_t dense_width(const model_config *c, int64_t layer)
{
    return layer < c->dense_layers ? c->dense_intermediate : c->shared_intermediate;
}

/* Computes x_mid and h2 from layer->h1. In generation k and qkv hold the rows before shape->first. */
void model_attention_half(model *m, model_layer *layer, const param_layer *at, const pass_shape *shape)
{
    train_device *dv = m->device;
    const train_ops *ops = dv->ops;
    int64_t rows = shape->sequences * shape->length, d = m->config.hidden;
    void *qkv = model_past(m, layer->qkv, shape->first * 3 * d),
         *k = model_past(m, layer->k, shape->first * d);
    ops->linear(dv, qkv, layer->h1, param(m, at->qkv), NULL, rows, d, 3 * d);
    ops->qk_norm_rope(dv, layer->q, k, layer->rstd_qk, qkv, param(m, at->q_norm), param(m, at->k_norm),
                      m->rope, shape, m->config.norm_eps);
    ops->attention(dv, layer->mixed, layer->p, layer->q, layer->k, model_past(m, layer->qkv, 2 * d), shape);
    ops->linear(dv, layer->x_mid, layer->mixed, param(m, at->output), layer->x, rows, d, d);
    ops->norm(dv, layer->h2, layer->rstd2, layer->x_mid, NULL, param(m, at->mlp_norm), rows, d,
              m->config.norm_eps);
}

/* out = MLP(h2) */
bool model_mlp(model *m, void *out, model_layer *layer, int64_t l, int64_t rows, const moe_routing *routing,
               error *err)
{
    const model_config *c = &m->config;
    const param_layer *at = &m->layout.layers[l];
    train_device *dv = m->device;
    int64_t d = c->hidden, width = dense_width(c, l);
    bool dense = l < c->dense_layers;
    if (!dense) {
        moe_weights experts = {param(m, at->router), param(m, at->w1), param(m, at->w2)};
        if (!moe_forward(&m->moe, out, layer->h2, &experts, rows, routing, &layer->moe, err)) return false;
    }
    if (width) {
        dv->ops->linear(dv, layer->dense_h, layer->h2, param(m, at->dense_w1), NULL, rows, d, 2 * width);
        dv->ops->swiglu(dv, layer->dense_a, layer->dense_h, rows, width);
        dv->ops->linear(dv, out, layer->dense_a, param(m, at->dense_w2), dense ? NULL : out, rows, width, d);
    }
    return true;
}

/* Computes m->hidden from m->batch.tokens. The input of a layer and the output of its MLP are added by the
 * next norm, which reads the sum. */
static bool decoder(model *m, const pass_shape *shape, const moe_routing *routing, error *err)
{
    static const moe_routing plain = {.rounding = SMOE_ROUNDING_NONE};
    const model_config *c = &m->config;
    const param_layout *layout = &m->layout;
    train_device *dv = m->device;
    int64_t rows = shape->sequences * shape->length, d = c->hidden;
    model_layer *layer = &m->layers[0];
    dv->ops->embed(dv, layer->x, param(m, layout->embedding), m->batch.tokens, rows, d);
    dv->ops->norm(dv, layer->h1, layer->rstd1, layer->x, NULL, param(m, layout->layers[0].input_norm), rows,
                  d, c->norm_eps);
    for (int64_t l = 0; l < c->layers; l++, layer++) {
        bool last = l + 1 == c->layers;
        void *next = last ? m->x_last : layer[1].x;
        model_attention_half(m, layer, &layout->layers[l], shape);
        if (!model_mlp(m, next, layer, l, rows, routing ? routing : &plain, err)) return false;
        dv->ops->norm(dv, last ? m->hidden : layer[1].h1, last ? m->rstd : layer[1].rstd1, next, layer->x_mid,
                      param(m, last ? layout->norm : layout->layers[l + 1].input_norm), rows, d, c->norm_eps);
    }
    return true;
}

/* The losses of all rows. Only the logits of some rows exist at a time. With `train` the gradients of these
 * rows are computed at once: those of the head's weights, and those of the hidden states in m->dh. The loss
 * is the mean over `all` rows. */
static void head(model *m, float *losses, int64_t rows, int64_t all, bool train, bool add)
{
    const model_config *c = &m->config;
    train_device *dv = m->device;
    const train_ops *ops = dv->ops;
    int64_t d = c->hidden, vocab = c->vocab;
    const void *w = param(m, m->layout.head);
    void *dw = m->head_grads;
    if (train && !dw) dw = (char *)m->grads + m->layout.head * type_size(dv->grad_type);
    for (int64_t first = 0; first < rows; first += m->loss_rows) {
        int64_t count = rows - first < m->loss_rows ? rows - first : m->loss_rows;
        const void *hidden = model_past(m, m->hidden, first * d);
        ops->linear(dv, m->logits, hidden, w, NULL, count, d, vocab);
        ops->cross_entropy(dv, m->logits, losses + first, m->batch.targets + first, 1.0f / (float)all, count,
                           vocab);
        if (!train) continue;
        ops->linear_dx(dv, model_past(m, m->dh, first * d), m->logits, w, count, d, vocab, false);
        ops->linear_dw(dv, dw, m->head_grads ? SMOE_TYPE_F32 : dv->grad_type, m->logits, hidden, count, d,
                       vocab, first > 0 || (add && !m->head_grads));
    }
    if (train && m->head_grads)
        ops->narrow(dv, (char *)m->grads + m->layout.head * type_size(dv->grad_type), m->head_grads,
                    vocab * d, add);
}

void model_stage_batch(model *m, const model_batch *batch, int64_t parts)
{
    m->device->ops->stage_batch(m->device, m->batches, batch->tokens, batch->targets,
                                batch->sequences * batch->length / parts, parts,
                                m->sequences * m->config.context * m->parts, m->config.vocab);
}

void model_load_batch(model *m)
{
    m->device->ops->load_batch(m->device);
    m->batch = m->batches[0];
}

static bool read_loss(model *m, double *loss, error *err)
{
    m->device->ops->download(m->device, loss, &m->scalars[SCALAR_LOSS], sizeof *loss);
    return m->device->ops->finish(m->device, err);
}

bool model_loss(model *m, const model_batch *batch, const moe_routing *routing, double *loss, error *err)
{
    pass_shape shape = model_shape(m, batch->sequences, batch->length);
    int64_t rows = shape.sequences * shape.length;
    model_stage_batch(m, batch, 1);
    model_load_batch(m);
    if (!decoder(m, &shape, routing, err)) return false;
    head(m, m->losses, rows, rows, false, false);
    m->device->ops->mean(m->device, &m->scalars[SCALAR_LOSS], m->losses, rows);
    return read_loss(m, loss, err);
}

bool model_continue(model *m, const int32_t *tokens, int64_t first, int64_t count, float *logits, error *err)
{
    const model_config *c = &m->config;
    train_device *dv = m->device;
    pass_shape shape = model_shape(m, 1, count);
    shape.first = first;
    model_stage_batch(m, &(model_batch){tokens + first, NULL, 1, count}, 1);
    model_load_batch(m);
    if (!decoder(m, &shape, NULL, err)) return false;
    dv->ops->linear(dv, m->logits, model_past(m, m->hidden, (count - 1) * c->hidden),
                    param(m, m->layout.head), NULL, 1, c->hidden, c->vocab);
    dv->ops->load(dv, logits, m->logits, dv->type, c->vocab);
    return dv->ops->finish(dv, err);
}

bool model_enqueue_gradients(model *m, int64_t sequences, int64_t length, bool add, error *err)
{
    pass_shape shape = model_shape(m, sequences / m->parts, length);
    int64_t rows = shape.sequences * length, all = rows * m->parts;
    uint64_t step = m->routing.step;
    bool done = true;
    for (int64_t p = 0; done && p < m->parts; p++) {
        m->batch = m->batches[p];
        m->routing.step = step * (uint64_t)m->parts + (uint64_t)p;
        done = decoder(m, &shape, &m->routing, err);
        if (done) head(m, m->losses + p * rows, rows, all, true, add || p > 0);
        done = done && model_backward(m, &shape, add || p > 0, err);
    }
    m->routing.step = step;
    m->device->ops->mean(m->device, &m->scalars[SCALAR_LOSS], m->losses, all);
    return done;
}

bool model_gradients(model *m, const model_batch *batch, double *loss, error *err)
{
    model_stage_batch(m, batch, m->parts);
    model_load_batch(m);
    return model_enqueue_gradients(m, batch->sequences, batch->length, m->device->adds_gradients, err) &&
           read_loss(m, loss, err);
}

int64_t model_active_weights(const model_config *c)
{
    int64_t d = c->hidden, sparse = c->layers - c->dense_layers;
    int64_t experts = c->experts * d + c->topk * 3 * c->intermediate * d + 3 * c->shared_intermediate * d;
    return c->layers * 4 * d * d + sparse * experts + c->dense_layers * 3 * c->dense_intermediate * d +
           c->vocab * d;
}
