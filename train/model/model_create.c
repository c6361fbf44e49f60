/* See model.h: makes a model of blocks. All its device memory is one allocation. `place` runs twice: the
 * first run computes the size. */
#include "train/cpu/cpu.h"
#include "train/model/attention.h"
#include "train/model/dense.h"
#include "train/model/experts.h"
#include "train/model/model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

const char *const model_recompute_names[RECOMPUTE_NAMES] = {"none", "norms", "norms-qk", "layers"};
const char *const model_compute_names[COMPUTE_NAMES] = {"bf16", "f8", "f8-dgrad"};
const smoe_compute model_computes[COMPUTE_NAMES] = {SMOE_COMPUTE_STORAGE, SMOE_COMPUTE_F8,
                                                    SMOE_COMPUTE_F8_DGRAD};

const char *model_compute_name(double compute)
{
    for (int i = 0; i < COMPUTE_NAMES; i++)
        if (compute == (double)model_computes[i]) return model_compute_names[i];
    return "?";
}

enum { ATTENTION, EXPERTS, DENSE, KINDS };

static const block_kind *const kinds[KINDS] = {
    [ATTENTION] = &attention_block, [EXPERTS] = &experts_block, [DENSE] = &dense_block};

/* The kind of block `branch` of a layer. */
static int kind_of(const model_config *c, int64_t layer, int branch)
{
    return branch == 0 ? ATTENTION : layer < c->dense_layers ? DENSE : EXPERTS;
}

static bool has_kind(const model_config *c, int kind)
{
    return kind == ATTENTION || (kind == DENSE ? c->dense_layers > 0 : c->dense_layers < c->layers);
}

const block *model_experts(const model *m, int64_t layer)
{
    const block *b = &m->blocks[MODEL_BRANCHES * layer + MODEL_BRANCHES - 1];
    return b->kind == &experts_block ? b : NULL;
}

float *model_bias(const model *m, int64_t layer, param_tensor *t)
{
    const block *b = model_experts(m, layer);
    float *bias = b ? experts_bias(b) : NULL;
    *t = (param_tensor){.shape = {m->config.experts}, .rank = 1, .count = (size_t)m->config.experts};
    snprintf(t->name, sizeof t->name, "model.layers.%lld.mlp.gate.e_score_correction_bias", (long long)layer);
    return bias;
}

int64_t model_active_weights(const model_config *c)
{
    int64_t sum = c->vocab * c->hidden;
    for (int64_t l = 0; l < c->layers; l++)
        for (int i = 0; i < MODEL_BRANCHES; i++) sum += kinds[kind_of(c, l, i)]->active(c);
    return sum;
}

double block_deviation(const model_config *c)
{
    return c->initializer_range;
}

double block_deviation_out(const model_config *c)
{
    return c->initializer_range / sqrt(2.0 * (double)c->layers);
}

/* ---- the blocks and the layout of their weights ---- */

static bool make_blocks(model *m, error *err)
{
    const int64_t count = MODEL_BRANCHES * m->config.layers;
    m->blocks = calloc((size_t)count + 1, sizeof *m->blocks);
    m->batches = calloc((size_t)m->parts, sizeof *m->batches);
    m->commons = calloc(KINDS, sizeof *m->commons);
    bool made = m->blocks && m->batches && m->commons;
    for (int k = 0; made && k < KINDS; k++)
        if (has_kind(&m->config, k)) made = (m->commons[k] = calloc(1, kinds[k]->common)) != NULL;
    for (int64_t i = 0; made && i < count; i++) {
        const int kind = kind_of(&m->config, i / MODEL_BRANCHES, (int)(i % MODEL_BRANCHES));
        m->blocks[i] = (block){.kind = kinds[kind],
                               .frame = &m->frame,
                               .common = m->commons[kind],
                               .own = calloc(1, kinds[kind]->own),
                               .layer = i / MODEL_BRANCHES};
        made = m->blocks[i].own != NULL;
    }
    if (!made) return fail(err, ERROR_RUNTIME, "out of memory: the model's layers");
    m->blocks[count] = (block){.frame = &m->frame, .layer = m->config.layers};
    return true;
}

/* The order of the tensors is that of the checkpoint's moments. */
static bool lay_out(model *m, error *err)
{
    const model_config *c = &m->config;
    param_layout *layout = &m->weights.layout;
    const int64_t count = MODEL_BRANCHES * c->layers;
    block *const last = &m->blocks[count];
    if (!param_layout_create(layout, c->layers, err)) return false;
    head_matrices(&m->head, layout);
    for (block *b = m->blocks; b < last; b++) {
        if ((b - m->blocks) % MODEL_BRANCHES == 0) layout->layers[b->layer] = param_group(layout);
        b->kind->matrices(b, layout, c);
    }
    layout->matrices = layout->layers[c->layers] = param_group(layout);
    for (block *layer = m->blocks; layer < last; layer += MODEL_BRANCHES) {
        for (block *b = layer; b < layer + MODEL_BRANCHES; b++)
            b->norm = param_add_vector(layout, c->hidden, b->layer, b->kind->norm);
        for (block *b = layer; b < layer + MODEL_BRANCHES; b++)
            if (b->kind->vectors) b->kind->vectors(b, layout, c);
    }
    last->norm = param_group(layout);
    param_add(layout, c->hidden, 0, 0.0, "model.norm.weight");
    layout->total = param_group(layout);
    return param_layout_check(layout, err);
}

/* ---- memory ---- */

/* The residual stream before a block, its norm's output and what the block keeps. The residual stream before
 * a layer is there for the whole pass. Shared, the outputs of both norms of a layer are one: the first was
 * read when the second is written. */
static void place_layer(model *m, block *layer, const block_memory *memory)
{
    const block_frame *f = &m->frame;
    const size_t row = (size_t)(f->rows * m->config.hidden) * type_size(m->device->type),
                 scalar = (size_t)f->rows * sizeof(float);
    const bool norms = block_shares(f, RECOMPUTE_NORMS), rest = block_shares(f, RECOMPUTE_LAYERS);
    for (int i = 0; i < MODEL_BRANCHES; i++) {
        block *b = &layer[i];
        if (i > 0 && norms)
            b->h = layer->h;
        else
            b->h = block_place(memory, b->h, norms, row);
        b->rstd = block_place(memory, b->rstd, rest, scalar);
        if (i > 0) b->x = block_place(memory, b->x, rest, row);
    }
    for (int i = 0; i < MODEL_BRANCHES; i++) {
        // Where layers share one place, what the last pass left is read for the log: no other kind may lie
        // over it.
        for (int k = 0; memory->shared && rest && i > 0 && k < KINDS; k++)
            if (m->commons[k] && kinds[k]->kept_for_log && layer[i].kind != kinds[k])
                memory->arena->used += kinds[k]->kept_for_log(m->commons[k]);
        layer[i].kind->place(&layer[i], memory);
    }
}

/* What every layer has for itself. */
static void place_layers(model *m, arena *a)
{
    const block_memory memory = {a, &m->frame, false};
    const int64_t residual = m->frame.rows * m->config.hidden;
    void *x = NULL;
    for (int64_t l = 0; l < m->config.layers; l++) {
        block *layer = &m->blocks[MODEL_BRANCHES * l];
        if (!l || m->frame.use == MODEL_TRAIN) x = arena_values(a, m->device->type, residual);
        layer->x = x;
        place_layer(m, layer, &memory);
    }
}

/* What the layers use one after the other. */
static void place_shared(model *m, arena *a)
{
    const block_memory memory = {a, &m->frame, true};
    const size_t start = a->used;
    size_t most = start;
    for (int64_t l = 0; l < m->config.layers; l++) {
        a->used = start;
        place_layer(m, &m->blocks[MODEL_BRANCHES * l], &memory);
        if (a->used > most) most = a->used;
    }
    a->used = most;
}

/* A kind's scratch is free while another kind runs. It may be over the norms', unless it must outlive that.
 */
static void place_scratch(model *m, arena *a)
{
    const size_t start = a->used;
    if (m->frame.use == MODEL_TRAIN)
        m->frame.norm_scratch =
            arena_floats(a, m->device->ops->norm_scratch(m->device, m->frame.rows, m->config.hidden));
    const size_t behind = a->used;
    for (int k = 0; k < KINDS; k++) {
        a->used = kinds[k]->backward_last ? behind : start;
        if (m->commons[k]) kinds[k]->place_scratch(m->commons[k], &m->frame, a);
    }
}

/* Gives the same memory to buffers that are never needed at the same time. The head runs between forward and
 * backward, and the blocks' scratch is free before and after they run. With one_layer the gradients of a
 * layer are there too. */
static void place_in_turns(model *m, arena *a)
{
    const size_t start = a->used;
    head_place(&m->head, a);
    a->used = start;
    place_shared(m, a);
    m->weights.layer_grads = arena_values(a, m->device->grad_type, weights_layer_grads(&m->weights));
    place_scratch(m, a);
    a->used = a->most;
}

/* The bytes placed since *start; sets *start to the current position. */
static size_t since(size_t *start, const arena *a)
{
    size_t bytes = a->used - *start;
    *start = a->used;
    return bytes;
}

static void place_rest(model *m, arena *a)
{
    const train_device *dv = m->device;
    const int64_t rows = m->frame.rows, d = m->config.hidden;
    block *last = &m->blocks[MODEL_BRANCHES * m->config.layers];
    last->x = arena_values(a, dv->type, rows * d);
    last->h = arena_values(a, dv->type, rows * d);
    last->rstd = arena_floats(a, rows);
    m->losses = arena_floats(a, rows * m->parts);
    m->scalars = arena_take(a, SCALARS * sizeof *m->scalars);
    for (int k = 0; k < KINDS; k++)
        if (m->commons[k] && kinds[k]->place_constants)
            kinds[k]->place_constants(m->commons[k], &m->frame, a);
    if (m->frame.use != MODEL_TRAIN) return;
    m->dx = last->h; // the head is the last to read it
    m->dh = arena_values(a, dv->type, rows * d);
}

static size_t place(model *m, arena *a)
{
    model_weights *w = &m->weights;
    size_t start = 0;
    w->params = arena_values(a, m->device->type, (int64_t)w->layout.total);
    m->bytes.weights = since(&start, a);
    for (int64_t i = 0; i < MODEL_BRANCHES * m->config.layers; i++)
        if (m->blocks[i].kind->place_quantized) m->blocks[i].kind->place_quantized(&m->blocks[i], a);
    m->bytes.quantized = since(&start, a);
    if (m->frame.use == MODEL_TRAIN) w->grads = arena_values(a, m->device->grad_type, weights_grads(w));
    m->bytes.gradients = since(&start, a);
    place_layers(m, a);
    m->bytes.layers = since(&start, a);
    place_rest(m, a);
    m->bytes.rest = since(&start, a);
    place_in_turns(m, a);
    m->bytes.turns = since(&start, a);
    return a->most;
}

const char *model_lower_memory(const model *m)
{
    if (m->frame.use == MODEL_EVALUATE) return " (a shorter --context?)";
    if (m->frame.use != MODEL_TRAIN) return "";
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
    model_weights *w = &m->weights;
    size_t bytes = place(m, &(arena){0});
    m->memory = dv->ops->allocate(dv, bytes);
    if (!m->memory) return no_memory(m, bytes, err);
    place(m, &(arena){.base = m->memory});
    w->host = dv->backend == SMOE_BACKEND_CPU ? w->params : NULL;
    dv->ops->clear(dv, w->params, w->layout.total * type_size(dv->type));
    if (w->grads) dv->ops->clear(dv, w->grads, (size_t)weights_grads(w) * type_size(dv->grad_type));
    for (int k = 0; k < KINDS; k++)
        if (m->commons[k] && kinds[k]->fill && !kinds[k]->fill(m->commons[k], &m->frame, err)) return false;
    return dv->ops->finish(dv, err);
}

/* ---- making a model ---- */

/* Checks the limits of this device's kernels. */
static bool check_device(const model *m, error *err)
{
    const train_device *dv = m->device;
    const model_config *c = &m->config;
    if (!dv->most_hidden) return true;
    if (c->hidden > dv->most_hidden)
        return fail(err, ERROR_USAGE, "hidden_size is %lld, at most %lld on %s", (long long)c->hidden,
                    (long long)dv->most_hidden, dv->name);
    if (!attention_check(c, dv, err)) return false;
    if (c->dense_intermediate % 8 || c->shared_intermediate % 8)
        return fail(err, ERROR_USAGE, "the dense intermediate sizes are %lld and %lld, on %s multiples of 8",
                    (long long)c->dense_intermediate, (long long)c->shared_intermediate, dv->name);
    return true;
}

static bool check_biases(const model *m, error *err)
{
    return m->routing.bias_rate == 0.0f || m->config.selection_bias ||
           fail(err, ERROR_USAGE,
                "the rate of the selection biases is %g, but the model has none (selection_bias)",
                (double)m->routing.bias_rate);
}

static bool check_parts(const model *m, error *err)
{
    if (m->parts > 1 && m->weights.one_layer && !m->weights.sharded)
        return fail(err, ERROR_USAGE, "micro-batches: %lld, with gradients of one layer at a time at most 1",
                    (long long)m->parts);
    if (m->parts > 1 && m->device->grad_type != SMOE_TYPE_F32)
        return fail(err, ERROR_USAGE, "micro-batches: %lld, with gradients in bf16 at most 1",
                    (long long)m->parts);
    return true;
}

static void describe(model *m, train_device *device, const model_config *config, const model_options *o)
{
    *m = (model){.device = device, .config = *config, .parts = o->parts ? o->parts : 1};
    m->first_part = o->rank * m->parts;
    m->passes = (o->ranks ? o->ranks : 1) * m->parts;
    if (o->routing) m->routing = *o->routing;
    // The auxiliary losses are means over the passes, so each pass adds its share.
    m->routing.balance_coefficient /= (float)m->passes;
    m->routing.z_coefficient /= (float)m->passes;
    m->weights.sharded = o->sharded && o->use == MODEL_TRAIN;
    m->weights.one_layer = m->weights.sharded || (o->one_layer && o->use == MODEL_TRAIN);
    m->frame = (block_frame){.config = &m->config,
                             .weights = &m->weights,
                             .routing = &m->routing,
                             .compute = o->use == MODEL_TRAIN ? o->compute : SMOE_COMPUTE_STORAGE,
                             .use = o->use,
                             .recompute = o->recompute,
                             .sequences = o->sequences,
                             .rows = o->sequences * config->context,
                             .chunks = o->chunks ? o->chunks : 1};
}

/* Makes a model except for its memory. */
static bool make(model *m, error *err)
{
    if (!m->device && !(m->owns_device = (m->device = cpu_open(err)) != NULL)) return false;
    m->frame.device = m->weights.device = m->device;
    if (!model_config_check(&m->config, err) || !check_device(m, err) || !check_biases(m, err)) return false;
    head_open(&m->head, &m->frame);
    if (!make_blocks(m, err) || !lay_out(m, err) || !check_parts(m, err)) return false;
    m->weights.clears_layer = weights_clear_layers(&m->weights);
    for (int k = 0; k < KINDS; k++)
        if (m->commons[k] && kinds[k]->open && !kinds[k]->open(m->commons[k], &m->frame, err)) return false;
    return true;
}

bool model_measure(model *m, train_device *device, const model_config *config, const model_options *options,
                   error *err)
{
    describe(m, device, config, options);
    if (make(m, err)) {
        place(m, &(arena){0});
        return true;
    }
    model_destroy(m);
    return false;
}

bool model_create(model *m, train_device *device, const model_config *config, const model_options *options,
                  error *err)
{
    describe(m, device, config, options);
    if (make(m, err) && allocate(m, err)) return true;
    model_destroy(m);
    return false;
}

void model_destroy(model *m)
{
    for (int64_t i = 0; m->blocks && i < MODEL_BRANCHES * m->config.layers; i++) free(m->blocks[i].own);
    for (int k = 0; m->commons && k < KINDS; k++) {
        if (m->commons[k] && kinds[k]->close) kinds[k]->close(m->commons[k]);
        free(m->commons[k]);
    }
    param_layout_destroy(&m->weights.layout);
    free(m->commons);
    free(m->blocks);
    free(m->batches);
    if (m->memory) m->device->ops->release(m->device, m->memory);
    if (m->owns_device) m->device->ops->close(m->device);
    *m = (model){0};
}
