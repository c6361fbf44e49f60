/* See model.h: memory and the forward pass. */
#include "train/model.h"

#include "train/attention.h"
#include "train/dense.h"
#include "train/embedding.h"
#include "train/linear.h"
#include "train/norm.h"
#include "train/rope.h"

#include <stdlib.h>
#include <string.h>

/* Hands out aligned pieces; with a NULL base it only counts. */
typedef struct arena {
    char *base;
    size_t used;
} arena;

static void *take(arena *a, size_t bytes)
{
    void *piece = a->base ? a->base + a->used : NULL;
    a->used += (bytes + 255) / 256 * 256;
    return piece;
}

static float *take_floats(arena *a, int64_t count)
{
    return take(a, (size_t)count * sizeof(float));
}

static int64_t dense_width(const model_config *c, int64_t layer)
{
    return layer < c->dense_layers ? c->dense_intermediate : c->shared_intermediate;
}

static attention_shape attention_of(const model_config *c, int64_t sequences, int64_t length)
{
    return (attention_shape){sequences, length, c->heads, c->hidden / c->heads, 3 * c->hidden};
}

static void place_layer(model *m, arena *a, model_layer *layer, int64_t l, int64_t rows)
{
    const model_config *c = &m->config;
    int64_t d = c->hidden, width = dense_width(c, l);
    attention_shape shape = attention_of(c, m->sequences, c->context);
    layer->x = take_floats(a, rows * d);
    layer->h1 = take_floats(a, rows * d);
    layer->rstd1 = take_floats(a, rows);
    layer->qkv = take_floats(a, rows * 3 * d);
    layer->rstd_q = take_floats(a, rows);
    layer->rstd_k = take_floats(a, rows);
    layer->q = take_floats(a, rows * d);
    layer->k = take_floats(a, rows * d);
    layer->p = take_floats(a, attention_saved(&shape));
    layer->mixed = take_floats(a, rows * d);
    layer->x_mid = take_floats(a, rows * d);
    layer->h2 = take_floats(a, rows * d);
    layer->rstd2 = take_floats(a, rows);
    layer->dense_h = take_floats(a, rows * 2 * width);
    layer->dense_a = take_floats(a, rows * width);
    if (l < c->dense_layers) return;
    layer->moe.logits = take_floats(a, rows * c->experts);
    layer->moe.saved = take(a, m->moe.saved_bytes);
}

static void place(model *m, arena *a, bool training)
{
    const model_config *c = &m->config;
    int64_t rows = m->sequences * c->context, d = c->hidden;
    attention_shape shape = attention_of(c, m->sequences, c->context);
    int64_t widest =
        c->dense_intermediate > c->shared_intermediate ? c->dense_intermediate : c->shared_intermediate;
    m->weights = take_floats(a, (int64_t)m->layout.total);
    m->grads = training ? take_floats(a, (int64_t)m->layout.total) : NULL;
    for (int64_t l = 0; l < c->layers; l++) place_layer(m, a, &m->layers[l], l, rows);
    m->x_last = take_floats(a, rows * d);
    m->hidden = take_floats(a, rows * d);
    m->rstd = take_floats(a, rows);
    m->logits = take_floats(a, rows * c->vocab);
    m->losses = take_floats(a, rows);
    m->rope = take_floats(a, c->context * (d / c->heads));
    if (!training) return;
    m->dx = take_floats(a, rows * d);
    m->dh = take_floats(a, rows * d);
    m->dq = take_floats(a, rows * d);
    m->dk = take_floats(a, rows * d);
    m->dqkv = take_floats(a, rows * 3 * d);
    m->da = take_floats(a, rows * widest);
    m->norm_scratch = take_floats(a, norm_scratch(rows, d));
    m->attention_scratch = take_floats(a, attention_scratch(&shape));
}

static bool allocate(model *m, bool training, error *err)
{
    const model_config *c = &m->config;
    m->layers = calloc((size_t)c->layers, sizeof *m->layers);
    if (!m->layers) return fail(err, ERROR_RUNTIME, "out of memory: the model's layers");
    arena a = {NULL, 0};
    place(m, &a, training);
    m->memory_bytes = a.used;
    m->memory = aligned_alloc(256, a.used);
    if (!m->memory)
        return fail(err, ERROR_RUNTIME,
                    "out of memory: the model asks for %.1f MB (fewer sequences, a smaller model?)",
                    (double)a.used / 1e6);
    a = (arena){m->memory, 0};
    place(m, &a, training);
    memset(m->weights, 0, m->layout.total * sizeof(float));
    if (training) memset(m->grads, 0, m->layout.total * sizeof(float));
    rope_table(m->rope, c->context, c->hidden / c->heads, c->rope_theta);
    return true;
}

static bool create(model *m, bool training, error *err)
{
    const model_config *c = &m->config;
    if (!model_config_check(c, err) || !param_layout_create(&m->layout, c, err)) return false;
    if (c->dense_layers < c->layers && !moe_create(&m->moe, c, m->sequences * c->context, &m->routing, err))
        return false;
    return allocate(m, training, err);
}

bool model_create(model *m, const model_config *config, int64_t sequences, const moe_routing *routing,
                  bool training, error *err)
{
    *m = (model){.config = *config, .sequences = sequences};
    if (routing) m->routing = *routing;
    if (create(m, training, err)) return true;
    model_destroy(m);
    return false;
}

void model_destroy(model *m)
{
    moe_destroy(&m->moe);
    param_layout_destroy(&m->layout);
    free(m->layers);
    free(m->memory);
    *m = (model){0};
}

static void attention_half(model *m, model_layer *layer, const param_layer *at, const model_batch *batch)
{
    const model_config *c = &m->config;
    const float *w = m->weights;
    int64_t rows = batch->sequences * batch->length, d = c->hidden, size = d / c->heads;
    float eps = (float)c->norm_eps;
    attention_shape shape = attention_of(c, batch->sequences, batch->length);
    norm_forward(layer->h1, d, layer->rstd1, layer->x, d, w + at->input_norm, rows, d, eps);
    linear_forward(layer->qkv, layer->h1, w + at->qkv, rows, d, 3 * d, false);
    norm_forward(layer->q, d, layer->rstd_q, layer->qkv, 3 * d, w + at->q_norm, rows, d, eps);
    norm_forward(layer->k, d, layer->rstd_k, layer->qkv + d, 3 * d, w + at->k_norm, rows, d, eps);
    rope_apply(layer->q, m->rope, rows, batch->length, c->heads, size, false);
    rope_apply(layer->k, m->rope, rows, batch->length, c->heads, size, false);
    attention_forward(layer->mixed, layer->p, layer->q, layer->k, layer->qkv + 2 * d, &shape);
    memcpy(layer->x_mid, layer->x, (size_t)(rows * d) * sizeof(float));
    linear_forward(layer->x_mid, layer->mixed, w + at->output, rows, d, d, true);
}

static void add_rows(float *restrict to, const float *restrict from, int64_t count)
{
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < count; i++) to[i] += from[i];
}

/* x_next = x_mid + MLP(norm(x_mid)) */
static bool mlp_half(model *m, float *x_next, model_layer *layer, int64_t l, int64_t rows,
                     const moe_routing *routing, error *err)
{
    const model_config *c = &m->config;
    const param_layer *at = &m->layout.layers[l];
    float *w = m->weights;
    int64_t d = c->hidden, width = dense_width(c, l);
    norm_forward(layer->h2, d, layer->rstd2, layer->x_mid, d, w + at->mlp_norm, rows, d, (float)c->norm_eps);
    bool dense = l < c->dense_layers;
    if (!dense) {
        moe_weights experts = {w + at->router, w + at->w1, w + at->w2};
        if (!moe_forward(&m->moe, x_next, layer->h2, &experts, rows, routing, &layer->moe, err)) return false;
    }
    if (width)
        dense_forward(x_next, layer->dense_h, layer->dense_a, layer->h2, w + at->dense_w1, w + at->dense_w2,
                      rows, d, width, !dense);
    add_rows(x_next, layer->x_mid, rows * d);
    return true;
}

bool model_forward(model *m, const model_batch *batch, const moe_routing *routing, double *loss, error *err)
{
    static const moe_routing plain = {.rounding = SMOE_ROUNDING_NONE};
    const model_config *c = &m->config;
    const param_layout *layout = &m->layout;
    int64_t rows = batch->sequences * batch->length, d = c->hidden;
    embedding_forward(m->layers[0].x, m->weights + layout->embedding, batch->tokens, rows, d);
    for (int64_t l = 0; l < c->layers; l++) {
        float *next = l + 1 < c->layers ? m->layers[l + 1].x : m->x_last;
        attention_half(m, &m->layers[l], &layout->layers[l], batch);
        if (!mlp_half(m, next, &m->layers[l], l, rows, routing ? routing : &plain, err)) return false;
    }
    norm_forward(m->hidden, d, m->rstd, m->x_last, d, m->weights + layout->norm, rows, d, (float)c->norm_eps);
    linear_forward(m->logits, m->hidden, m->weights + layout->head, rows, d, c->vocab, false);
    if (batch->targets) *loss = cross_entropy(m->logits, m->losses, batch->targets, rows, c->vocab);
    return true;
}

int64_t model_active_weights(const model_config *c)
{
    int64_t d = c->hidden, sparse = c->layers - c->dense_layers;
    int64_t experts = c->experts * d + c->topk * 3 * c->intermediate * d + 3 * c->shared_intermediate * d;
    return c->layers * 4 * d * d + sparse * experts + c->dense_layers * 3 * c->dense_intermediate * d +
           c->vocab * d;
}
