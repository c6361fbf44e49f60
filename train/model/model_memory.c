/* See model.h: makes a model. All its device memory is one allocation. `place` runs twice: the first run
 * computes the size.
 */
#include "train/cpu/cpu.h"
#include "train/model/arena.h"
#include "train/model/model.h"
#include "train/model/rope_table.h"

#include <stdlib.h>

const char *const model_recompute_names[RECOMPUTE_NAMES] = {"none", "norms", "norms-qk", "layers"};

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t dense_width(const model_config *c, int64_t layer)
{
    return layer < c->dense_layers ? c->dense_intermediate : c->shared_intermediate;
}

/* Which parts of the layers share their memory follows from what passes keep. */
static bool shares_norms(const model *m)
{
    return m->use != MODEL_TRAIN || m->recompute != RECOMPUTE_NONE;
}

static bool shares_qk(const model *m)
{
    return m->use != MODEL_TRAIN || m->recompute >= RECOMPUTE_NORMS_QK;
}

static bool shares_rest(const model *m)
{
    return m->use != MODEL_TRAIN || m->recompute == RECOMPUTE_LAYERS;
}

static bool shares_logits(const model *m)
{
    return shares_rest(m) || !moe_keeps_logits(&m->config, &m->routing);
}

static void place_logits(const model *m, arena *a, model_layer *layer, int64_t rows)
{
    layer->moe.logits = arena_floats(a, rows * m->config.experts);
}

/* Shared, h1 and h2 are one: h1 was read when h2 is written. */
static void place_norms(model *m, arena *a, model_layer *layer, int64_t rows)
{
    smoe_type type = m->device->type;
    int64_t d = m->config.hidden;
    layer->h1 = arena_values(a, type, rows * d);
    layer->h2 = shares_norms(m) ? layer->h1 : arena_values(a, type, rows * d);
}

static void place_qk(model *m, arena *a, model_layer *layer, int64_t rows)
{
    smoe_type type = m->device->type;
    int64_t d = m->config.hidden;
    layer->q = arena_values(a, type, rows * d);
    if (m->use != MODEL_GENERATE) layer->k = arena_values(a, type, rows * d);
}

static void place_rest(model *m, arena *a, model_layer *layer, int64_t l, int64_t rows)
{
    const model_config *c = &m->config;
    smoe_type type = m->device->type;
    int64_t d = c->hidden, width = dense_width(c, l);
    pass_shape shape = model_shape(m, m->sequences, c->context);
    layer->rstd1 = arena_floats(a, rows);
    layer->rstd_qk = arena_floats(a, 2 * rows);
    layer->rstd2 = arena_floats(a, rows);
    if (m->use != MODEL_GENERATE) layer->qkv = arena_values(a, type, rows * 3 * d);
    layer->p = arena_take(a, m->device->ops->attention_saved(m->device, &shape));
    layer->mixed = arena_values(a, type, rows * d);
    layer->x_mid = arena_values(a, type, rows * d);
    // Where layers share one place, those of the last pass are read for the log: no dense layer may lie over
    // them.
    if (l >= c->dense_layers || shares_rest(m)) {
        if (!shares_logits(m)) place_logits(m, a, layer, rows);
        layer->moe.losses = arena_floats(a, 4);
        layer->moe.saved = arena_take(a, m->moe.saved_bytes);
    }
    layer->dense_h = arena_values(a, type, rows * 2 * width);
    layer->dense_a = arena_values(a, type, rows * width);
}

/* The buffers that every layer has for itself. */
static void place_layers(model *m, arena *a, int64_t rows)
{
    const model_config *c = &m->config;
    smoe_type type = m->device->type;
    bool train = m->use == MODEL_TRAIN;
    void *x = train ? NULL : arena_values(a, type, rows * c->hidden);
    for (int64_t l = 0; l < c->layers; l++) {
        m->layers[l].x = train ? arena_values(a, type, rows * c->hidden) : x;
        if (m->use != MODEL_GENERATE) continue;
        m->layers[l].k = arena_values(a, type, rows * c->hidden);
        m->layers[l].qkv = arena_values(a, type, rows * 3 * c->hidden);
    }
    for (int64_t l = 0; l < c->layers && !shares_norms(m); l++) place_norms(m, a, &m->layers[l], rows);
    for (int64_t l = 0; l < c->layers && !shares_qk(m); l++) place_qk(m, a, &m->layers[l], rows);
    for (int64_t l = 0; l < c->layers && !shares_rest(m); l++) place_rest(m, a, &m->layers[l], l, rows);
}

/* The buffers that the layers use one after the other. */
static void place_shared(model *m, arena *a, int64_t rows)
{
    size_t start = a->used, most = start;
    for (int64_t l = 0; l < m->config.layers; l++) {
        a->used = start;
        if (shares_norms(m)) place_norms(m, a, &m->layers[l], rows);
        if (shares_qk(m)) place_qk(m, a, &m->layers[l], rows);
        if (shares_rest(m)) place_rest(m, a, &m->layers[l], l, rows);
        if (shares_logits(m) && l >= m->config.dense_layers) place_logits(m, a, &m->layers[l], rows);
        if (a->used > most) most = a->used;
    }
    a->used = most;
}

/* The gradients inside one layer, without those of the experts. */
static void place_scratch(model *m, arena *a, int64_t rows)
{
    const model_config *c = &m->config;
    train_device *dv = m->device;
    int64_t d = c->hidden, widest = larger(c->dense_intermediate, c->shared_intermediate);
    pass_shape shape = model_shape(m, m->sequences, c->context);
    m->dq = arena_values(a, dv->type, rows * d);
    m->dk = arena_values(a, dv->type, rows * d);
    m->dqkv = arena_values(a, dv->type, rows * 3 * d);
    m->da = arena_values(a, dv->type, rows * widest);
    m->norm_scratch = arena_floats(a, dv->ops->norm_scratch(dv, rows, d));
    m->attention_scratch = arena_take(a, dv->ops->attention_scratch(dv, &shape));
}

static void place_head(model *m, arena *a, int64_t rows)
{
    const model_config *c = &m->config;
    const train_device *dv = m->device;
    m->logits = arena_values(a, dv->type, (m->use == MODEL_GENERATE ? 1 : m->loss_rows) * c->vocab);
    if (m->use == MODEL_TRAIN && dv->grad_type != SMOE_TYPE_F32 && m->loss_rows < rows)
        m->head_grads = arena_floats(a, c->vocab * c->hidden);
}

grad_span model_layer_span(const model *m, int64_t l)
{
    const param_layout *layout = &m->layout;
    const size_t first = layout->layers[l].qkv,
                 end = l + 1 < m->config.layers ? layout->layers[l + 1].qkv : layout->matrices;
    return (grad_span){m->layer_grads, (int64_t)first, (int64_t)(end - first)};
}

int model_spans(const model *m, grad_span spans[MOST_SPANS])
{
    const int64_t total = (int64_t)m->layout.total, matrices = (int64_t)m->layout.matrices,
                  before = (int64_t)m->layout.layers[0].qkv;
    spans[0] = (grad_span){m->grads, 0, m->one_layer ? before : total};
    if (!m->one_layer) return 1;
    void *after = m->grads ? (char *)m->grads + (size_t)before * type_size(m->device->grad_type) : NULL;
    spans[1] = (grad_span){after, matrices, total - matrices};
    return 2;
}

static int64_t elements_of_gradients(const model *m)
{
    grad_span spans[MOST_SPANS];
    int64_t elements = 0;
    for (int i = model_spans(m, spans); i > 0; i--) elements += spans[i - 1].count;
    return elements;
}

static int64_t elements_of_layer(const model *m)
{
    int64_t most = 0;
    for (int64_t l = 0; m->one_layer && l < m->config.layers; l++)
        most = larger(most, model_layer_span(m, l).count);
    return most;
}

/* Gives the same memory to buffers that are never needed at the same time. The head runs between forward and
 * backward, and the experts' scratch is free before and after the experts run. With one_layer the
 * gradients of a layer are there too. */
static void place_in_turns(model *m, arena *a, int64_t rows)
{
    size_t start = a->used;
    place_head(m, a, rows);
    a->used = start;
    place_shared(m, a, rows);
    m->layer_grads = arena_values(a, m->device->grad_type, elements_of_layer(m));
    start = a->used;
    m->moe.scratch = arena_take(a, m->moe.scratch_bytes);
    a->used = start;
    if (m->use == MODEL_TRAIN) place_scratch(m, a, rows);
    a->used = a->most;
}

/* The bytes placed since *start; sets *start to the current position. */
static size_t since(size_t *start, const arena *a)
{
    size_t bytes = a->used - *start;
    *start = a->used;
    return bytes;
}

static size_t place(model *m, arena *a)
{
    const model_config *c = &m->config;
    train_device *dv = m->device;
    int64_t rows = m->sequences * c->context, d = c->hidden;
    size_t start = 0;
    m->params = arena_values(a, dv->type, (int64_t)m->layout.total);
    m->bytes.weights = since(&start, a);
    if (m->use == MODEL_TRAIN) m->grads = arena_values(a, dv->grad_type, elements_of_gradients(m));
    m->bytes.gradients = since(&start, a);
    place_layers(m, a, rows);
    m->bytes.layers = since(&start, a);
    m->x_last = arena_values(a, dv->type, rows * d);
    m->hidden = arena_values(a, dv->type, rows * d);
    m->rstd = arena_floats(a, rows);
    m->losses = arena_floats(a, rows * m->parts);
    m->scalars = arena_take(a, SCALARS * sizeof *m->scalars);
    m->rope = arena_floats(a, c->context * (d / c->heads));
    if (m->use == MODEL_TRAIN) {
        m->dx = m->hidden; // the head is the last to read hidden
        m->dh = arena_values(a, dv->type, rows * d);
    }
    m->bytes.rest = since(&start, a);
    place_in_turns(m, a, rows);
    m->bytes.turns = since(&start, a);
    return a->most;
}

static bool fill_rope(model *m, error *err)
{
    const model_config *c = &m->config;
    int64_t count = c->context * (c->hidden / c->heads);
    float *table = malloc((size_t)count * sizeof *table);
    if (!table) return fail(err, ERROR_RUNTIME, "out of memory: RoPE's %lld angles", (long long)count);
    rope_table(table, c->context, c->hidden / c->heads, c->rope_theta);
    m->device->ops->store(m->device, m->rope, SMOE_TYPE_F32, table, count);
    free(table);
    return true;
}

/* Allocates now whatever else a pass of the usual shape needs. */
static bool prepare(model *m, error *err)
{
    train_device *dv = m->device;
    pass_shape shape = model_shape(m, m->sequences, m->config.context);
    if (m->use != MODEL_GENERATE) dv->ops->prepare(dv, &shape, m->use == MODEL_TRAIN);
    return dv->ops->finish(dv, err);
}

const char *model_lower_memory(const model *m)
{
    if (m->use == MODEL_EVALUATE) return " (a shorter --context?)";
    if (m->use != MODEL_TRAIN) return "";
    return m->device->master ? " (more --micro-batches, --recompute layers, --precision bf16?)"
                             : " (more --micro-batches, --recompute layers?)";
}

static bool no_memory(const model *m, size_t bytes, error *err)
{
    size_t available = m->device->ops->available(m->device);
    const char *lower = model_lower_memory(m);
    if (!available)
        return fail(err, ERROR_RUNTIME, "out of memory: the model asks for %.1f MB%s", (double)bytes / 1e6,
                    lower);
    return fail(err, ERROR_RUNTIME, "out of memory: the model asks for %.2f GB, the device has %.2f GB%s",
                (double)bytes / 1e9, (double)available / 1e9, lower);
}

static bool allocate(model *m, error *err)
{
    train_device *dv = m->device;
    size_t bytes = place(m, &(arena){0});
    m->memory = dv->ops->allocate(dv, bytes);
    if (!m->memory) return no_memory(m, bytes, err);
    place(m, &(arena){.base = m->memory});
    m->weights = dv->backend == SMOE_BACKEND_CPU ? m->params : NULL;
    dv->ops->clear(dv, m->params, m->layout.total * type_size(dv->type));
    if (m->grads) dv->ops->clear(dv, m->grads, (size_t)elements_of_gradients(m) * type_size(dv->grad_type));
    return fill_rope(m, err) && prepare(m, err);
}

/* Checks the limits of this device's kernels. */
static bool check_device(const model *m, error *err)
{
    const train_device *dv = m->device;
    const model_config *c = &m->config;
    int64_t head = c->hidden / c->heads;
    if (!dv->most_hidden) return true;
    if (c->hidden > dv->most_hidden)
        return fail(err, ERROR_USAGE, "hidden_size is %lld, at most %lld on %s", (long long)c->hidden,
                    (long long)dv->most_hidden, dv->name);
    if (head > dv->most_head || head % 8)
        return fail(err, ERROR_USAGE,
                    "hidden_size / num_attention_heads is %lld, on %s a multiple of 8, at most %lld",
                    (long long)head, dv->name, (long long)dv->most_head);
    if (c->dense_intermediate % 8 || c->shared_intermediate % 8)
        return fail(err, ERROR_USAGE, "the dense intermediate sizes are %lld and %lld, on %s multiples of 8",
                    (long long)c->dense_intermediate, (long long)c->shared_intermediate, dv->name);
    return true;
}

/* Is there unused space between the tensors of a layer's matrices, so that each group starts on 64 floats? */
static bool has_gaps(const param_layout *layout)
{
    for (size_t i = 0; i < layout->tensor_count; i++) {
        const param_tensor *t = &layout->tensors[i];
        const size_t next = i + 1 < layout->tensor_count ? t[1].offset : layout->total;
        if (t->offset + t->count < next && t->offset < layout->matrices) return true;
    }
    return false;
}

/* Makes a model except for its memory. */
static bool describe(model *m, train_device *device, const model_config *config, const model_options *options,
                     error *err)
{
    *m = (model){.device = device,
                 .config = *config,
                 .sequences = options->sequences,
                 .parts = options->parts ? options->parts : 1,
                 .use = options->use,
                 .recompute = options->recompute,
                 .one_layer = options->one_layer && options->use == MODEL_TRAIN};
    if (options->routing) m->routing = *options->routing;
    // The auxiliary losses are means over the passes, so each pass adds its share.
    m->routing.balance_coefficient /= (float)m->parts;
    m->routing.z_coefficient /= (float)m->parts;
    const model_config *c = &m->config;
    if (!m->device && !(m->owns_device = (m->device = cpu_open(err)) != NULL)) return false;
    int64_t rows = m->sequences * c->context;
    m->loss_rows = m->device->loss_rows && m->device->loss_rows < rows ? m->device->loss_rows : rows;
    if (!model_config_check(c, err) || !check_device(m, err) || !param_layout_create(&m->layout, c, err))
        return false;
    m->clears_layer = m->one_layer && (m->device->adds_gradients || has_gaps(&m->layout));
    if (m->parts > 1 && m->one_layer)
        return fail(err, ERROR_USAGE, "micro-batches: %lld, with gradients of one layer at a time at most 1",
                    (long long)m->parts);
    if (m->parts > 1 && m->device->grad_type != SMOE_TYPE_F32)
        return fail(err, ERROR_USAGE, "micro-batches: %lld, with gradients that are not f32 at most 1",
                    (long long)m->parts);
    m->layers = calloc((size_t)c->layers, sizeof *m->layers);
    m->batches = calloc((size_t)m->parts, sizeof *m->batches);
    if (!m->layers || !m->batches) return fail(err, ERROR_RUNTIME, "out of memory: the model's layers");
    return c->dense_layers == c->layers ||
           moe_create(&m->moe, m->device, c, rows, m->use == MODEL_TRAIN,
                      options->chunks ? options->chunks : 1, &m->routing, err);
}

bool model_measure(model *m, train_device *device, const model_config *config, const model_options *options,
                   error *err)
{
    if (describe(m, device, config, options, err)) {
        place(m, &(arena){0});
        return true;
    }
    model_destroy(m);
    return false;
}

bool model_create(model *m, train_device *device, const model_config *config, const model_options *options,
                  error *err)
{
    if (describe(m, device, config, options, err) && allocate(m, err)) return true;
    model_destroy(m);
    return false;
}

void model_destroy(model *m)
{
    moe_destroy(&m->moe);
    param_layout_destroy(&m->layout);
    free(m->layers);
    free(m->batches);
    if (m->memory) m->device->ops->release(m->device, m->memory);
    if (m->owns_device) m->device->ops->close(m->device);
    *m = (model){0};
}
