/* See experts.h: the model's config as a smoe_layer, the block's buffers as the library's arguments. */
#include "train/model/experts.h"

#include "train/model/dense.h"

#include <stdio.h>

typedef struct experts_common {
    smoe_context *context, *backward;    // of the backward: with fewer SMs, or the same
    uint64_t saved_bytes, scratch_bytes; // of one block, of all
    uint64_t f8_bytes;                   // of a block's weights in e4m3; 0: it has none
    bool reads_logits;                   // in the backward, also without a coefficient of a loss
    void *scratch;
    void *da;        // (rows, shared f), in the place of `scratch`
    float *bias;     // (blocks, bias_stride) selection biases; NULL: none
    int32_t *counts; // (blocks, bias_stride) of the step at hand; NULL: they are not changed
} experts_common;

typedef struct experts_own {
    size_t router, w1, w2; // weights: (E, d), (E, 2n, d), (E, d, n)
    float *losses;         // (2): load balance, z
    void *saved;           // saved_bytes, in the library's own layout
    void *weights_f8;      // f8_bytes, likewise
    float *logits;         // (rows, E)
    dense_mlp shared;      // the shared expert
} experts_own;

enum { LOSS_BYTES = 4 * sizeof(float) };

static smoe_layer describe(const block_frame *f, int64_t tokens, const train_routing *routing,
                           smoe_compute compute)
{
    const model_config *config = f->config;
    smoe_layer layer = SMOE_LAYER_INIT;
    layer.tokens = tokens;
    layer.hidden = config->hidden;
    layer.intermediate = config->intermediate;
    layer.experts = config->experts;
    layer.topk = config->topk;
    layer.dtype = f->device->type;
    layer.gradient_type = f->device->grad_type;
    layer.accumulate = 1;
    layer.inference = f->use != MODEL_TRAIN;
    layer.reuse_saved = 1;
    layer.chunks = f->chunks;
    layer.score = (smoe_score)config->score;
    layer.renormalize = config->norm_topk_prob;
    layer.groups = (int32_t)config->groups;
    layer.groups_kept = (int32_t)config->groups_kept;
    layer.route_scale = (float)config->route_scale;
    layer.rounding = routing->rounding;
    if (routing->rounding != SMOE_ROUNDING_NONE) layer.tile = routing->tile;
    layer.seed = routing->seed;
    layer.compute = compute;
    return layer;
}

static bool check(const smoe_context *context, smoe_status status, error *err)
{
    if (status == SMOE_OK) return true;
    return fail(err, status == SMOE_ERROR_SHAPE ? ERROR_USAGE : ERROR_RUNTIME, "%s",
                smoe_last_error(context));
}

static uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* Raises the sizes to what passes with `routing` and `compute` need. */
static bool measure(experts_common *all, const block_frame *f, const train_routing *routing,
                    smoe_compute compute, error *err)
{
    const smoe_layer layer = describe(f, f->rows, routing, compute);
    smoe_sizes sizes = SMOE_SIZES_INIT;
    if (!check(all->context, smoe_query_sizes(all->context, &layer, &sizes), err)) return false;
    all->reads_logits |= sizes.backward_reads_logits;
    all->saved_bytes = larger(all->saved_bytes, sizes.saved_buffer_bytes);
    all->f8_bytes = larger(all->f8_bytes, sizes.weights_f8_bytes);
    all->scratch_bytes =
        larger(all->scratch_bytes, larger(sizes.scratch_forward_bytes, sizes.scratch_backward_bytes));
    return true;
}

static bool open_context(void *common, const block_frame *f, error *err)
{
    experts_common *all = common;
    char text[256] = "";
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.backend = f->device->backend;
    options.device = f->device->index;
    options.error_text = text;
    options.error_size = sizeof text;
    if (smoe_create(&all->context, &options) != SMOE_OK) return fail(err, ERROR_RUNTIME, "%s", text);
    all->backward = all->context;
    options.sms = f->device->backward_sms;
    if (options.sms && f->use == MODEL_TRAIN && smoe_create(&all->backward, &options) != SMOE_OK)
        return fail(err, ERROR_RUNTIME, "%s", text);
    const train_routing plain = {.rounding = SMOE_ROUNDING_NONE};
    if (!measure(all, f, &plain, SMOE_COMPUTE_STORAGE, err)) return false;
    return f->use != MODEL_TRAIN ||
           (measure(all, f, &plain, f->compute, err) && measure(all, f, f->routing, f->compute, err));
}

static void close_context(void *common)
{
    experts_common *all = common;
    if (all->backward != all->context) smoe_destroy(all->backward);
    smoe_destroy(all->context);
}

/* ---- weights ---- */

static void matrices(block *b, param_layout *layout, const model_config *c)
{
    experts_own *s = b->own;
    const long long l = b->layer;
    const double in = block_deviation(c), out = block_deviation_out(c);
    char prefix[64];
    s->router = param_group(layout);
    param_add(layout, c->experts, c->hidden, in, "model.layers.%lld.mlp.gate.weight", l);
    s->w1 = param_group(layout);
    for (int e = 0; e < c->experts; e++) {
        param_add(layout, c->intermediate, c->hidden, in, "model.layers.%lld.mlp.experts.%d.gate_proj.weight",
                  l, e);
        param_add(layout, c->intermediate, c->hidden, in, "model.layers.%lld.mlp.experts.%d.up_proj.weight",
                  l, e);
    }
    s->w2 = param_group(layout);
    for (int e = 0; e < c->experts; e++)
        param_add(layout, c->hidden, c->intermediate, out,
                  "model.layers.%lld.mlp.experts.%d.down_proj.weight", l, e);
    snprintf(prefix, sizeof prefix, "model.layers.%lld.mlp.shared_expert", l);
    s->shared.width = c->shared_intermediate;
    if (s->shared.width) dense_mlp_matrices(&s->shared, layout, c, prefix);
}

static int64_t active(const model_config *c)
{
    return c->experts * c->hidden + 3 * (c->topk * c->intermediate + c->shared_intermediate) * c->hidden;
}

/* ---- memory ---- */

/* Does the backward read the logits? If not, layers may share them. */
static bool reads_logits(const experts_common *all, const train_routing *r)
{
    return all->reads_logits || r->balance_coefficient != 0.0f || r->z_coefficient != 0.0f;
}

static void place(block *b, const block_memory *m)
{
    experts_own *s = b->own;
    const experts_common *all = b->common;
    const block_frame *f = m->frame;
    const bool shared = block_shares(f, RECOMPUTE_LAYERS);
    s->losses = block_place(m, s->losses, shared, LOSS_BYTES);
    s->saved = block_place(m, s->saved, shared, all->saved_bytes);
    dense_mlp_place(&s->shared, m);
    s->logits = block_place(m, s->logits, shared || !reads_logits(all, f->routing),
                            (size_t)(f->rows * f->config->experts) * sizeof(float));
}

static size_t kept_for_log(const void *common)
{
    const experts_common *all = common;
    arena a = {0};
    arena_take(&a, LOSS_BYTES);
    arena_take(&a, all->saved_bytes);
    return a.used;
}

/* From a block's biases, or counts, to the next's: the library asks for aligned ones. */
static int64_t bias_stride(const model_config *c)
{
    enum { UNIT = 64 };
    return (c->experts + UNIT - 1) / UNIT * UNIT;
}

/* The elements of all blocks. */
static int64_t biases(const model_config *c)
{
    return (c->layers - c->dense_layers) * bias_stride(c);
}

static void place_constants(void *common, const block_frame *f, arena *a)
{
    experts_common *all = common;
    if (!f->config->selection_bias) return;
    all->bias = arena_floats(a, biases(f->config));
    if (f->routing->bias_rate != 0.0f)
        all->counts = arena_take(a, (size_t)biases(f->config) * sizeof *all->counts);
}

static bool fill(void *common, const block_frame *f, error *err)
{
    const experts_common *all = common;
    const size_t count = (size_t)biases(f->config);
    (void)err;
    if (all->bias) f->device->ops->clear(f->device, all->bias, count * sizeof *all->bias);
    if (all->counts) f->device->ops->clear(f->device, all->counts, count * sizeof *all->counts);
    return true;
}

static void place_scratch(void *common, const block_frame *f, arena *a)
{
    experts_common *all = common;
    const size_t start = a->used;
    if (f->use == MODEL_TRAIN)
        all->da = arena_values(a, f->device->type, f->rows * f->config->shared_intermediate);
    a->used = start;
    all->scratch = arena_take(a, all->scratch_bytes);
}

/* ---- weights in e4m3 ---- */

static void place_quantized(block *b, arena *a)
{
    experts_own *s = b->own;
    const experts_common *all = b->common;
    if (all->f8_bytes) s->weights_f8 = arena_take(a, all->f8_bytes);
}

static bool quantize(const block *b, error *err)
{
    const experts_common *all = b->common;
    const experts_own *s = b->own;
    const block_frame *f = b->frame;
    const float *masters = f->weights->masters;
    const smoe_layer layer = describe(f, f->rows, f->routing, f->compute);
    smoe_quantize_args args = SMOE_QUANTIZE_ARGS_INIT;
    args.w1 = masters ? masters + s->w1 : block_weight(b, s->w1);
    args.w2 = masters ? masters + s->w2 : block_weight(b, s->w2);
    args.weight_type = masters ? SMOE_TYPE_F32 : f->device->type;
    args.experts = f->config->experts;
    args.weights_f8 = s->weights_f8;
    args.weights_f8_size = all->f8_bytes;
    return check(all->context, smoe_quantize_weights(all->context, &layer, &args, f->device->stream), err);
}

/* ---- selection biases ---- */

/* The block's place in arrays of all blocks. */
static int64_t place_of(const block *b)
{
    return (b->layer - b->frame->config->dense_layers) * bias_stride(b->frame->config);
}

float *experts_bias(const block *b)
{
    const experts_common *all = b->common;
    return all->bias ? all->bias + place_of(b) : NULL;
}

int32_t *experts_all_counts(const block *b, int64_t *count)
{
    const experts_common *all = b->common;
    *count = biases(b->frame->config);
    return all->counts;
}

bool experts_update_bias(block *b, float rate, error *err)
{
    const experts_common *all = b->common;
    const block_frame *f = b->frame;
    int32_t *counts = all->counts + place_of(b);
    const smoe_layer layer = describe(f, f->rows, f->routing, SMOE_COMPUTE_STORAGE);
    if (!check(all->context,
               smoe_update_selection_bias(all->context, &layer, counts, experts_bias(b), rate,
                                          f->device->stream),
               err))
        return false;
    f->device->ops->clear(f->device, counts, (size_t)f->config->experts * sizeof *counts);
    return true;
}

static bool count_tokens(const block *b, const block_pass *p, error *err)
{
    const experts_common *all = b->common;
    train_device *dv = b->frame->device;
    smoe_plan_view view = SMOE_PLAN_VIEW_INIT;
    if (!all->counts) return true;
    if (!experts_view(b, p->rows, p->routing, &view, err)) return false;
    dv->ops->add_counts(dv, all->counts + place_of(b), view.topk_counts, b->frame->config->experts);
    return true;
}

/* ---- passes ---- */

static bool forward(block *b, const block_pass *p, void *out, error *err)
{
    const experts_common *all = b->common;
    const experts_own *s = b->own;
    const block_frame *f = b->frame;
    const smoe_layer layer = describe(f, p->rows, p->routing, p->compute);
    smoe_forward_args args = SMOE_FORWARD_ARGS_INIT;
    args.x = b->h;
    args.router_weight = block_weight(b, s->router);
    args.selection_bias = experts_bias(b);
    args.logits = s->logits;
    args.step = p->routing->step;
    args.losses = s->losses;
    args.w1 = block_weight(b, s->w1);
    args.w2 = block_weight(b, s->w2);
    args.weights_f8 = s->weights_f8;
    args.weights_f8_size = all->f8_bytes;
    args.out = out;
    args.saved = layer.inference ? NULL : s->saved;
    args.saved_size = layer.inference ? 0 : all->saved_bytes;
    args.scratch = all->scratch;
    args.scratch_size = all->scratch_bytes;
    if (!check(all->context, smoe_layer_forward(all->context, &layer, &args, f->device->stream), err))
        return false;
    if (s->shared.width) dense_mlp_forward(b, &s->shared, p, out, true);
    return true;
}

static bool backward(block *b, const block_pass *p, void *dh, void *dout, error *err)
{
    const experts_common *all = b->common;
    const experts_own *s = b->own;
    const block_frame *f = b->frame;
    smoe_layer layer = describe(f, p->rows, p->routing, p->compute);
    layer.accumulate = p->add;
    smoe_backward_args args = SMOE_BACKWARD_ARGS_INIT;
    args.x = b->h;
    args.router_weight = block_weight(b, s->router);
    args.logits = s->logits;
    args.w1 = block_weight(b, s->w1);
    args.w2 = block_weight(b, s->w2);
    args.weights_f8 = s->weights_f8;
    args.weights_f8_size = all->f8_bytes;
    args.saved = s->saved;
    args.saved_size = all->saved_bytes;
    args.dout = dout;
    args.balance_coefficient = p->routing->balance_coefficient;
    args.z_coefficient = p->routing->z_coefficient;
    args.dx = dh;
    args.dw1 = block_grad(b, s->w1);
    args.dw2 = block_grad(b, s->w2);
    args.drouter_weight = block_grad(b, s->router);
    args.scratch = all->scratch;
    args.scratch_size = all->scratch_bytes;
    if (!check(all->backward, smoe_layer_backward(all->backward, &layer, &args, f->device->stream), err))
        return false;
    if (s->shared.width) dense_mlp_backward(b, &s->shared, p, dh, dout, all->da, true);
    return count_tokens(b, p, err);
}

/* ---- after a pass ---- */

bool experts_view(const block *b, int64_t tokens, const train_routing *routing, smoe_plan_view *view,
                  error *err)
{
    const experts_common *all = b->common;
    const experts_own *s = b->own;
    const smoe_layer layer = describe(b->frame, tokens, routing, SMOE_COMPUTE_STORAGE);
    smoe_forward_args args = SMOE_FORWARD_ARGS_INIT;
    args.saved = s->saved;
    args.saved_size = all->saved_bytes;
    return check(all->context, smoe_view_plan(all->context, &layer, &args, view), err);
}

bool experts_counts(const block *b, int64_t tokens, int32_t *plain, int32_t *routed, error *err)
{
    smoe_plan_view view = SMOE_PLAN_VIEW_INIT;
    train_device *dv = b->frame->device;
    if (!experts_view(b, tokens, b->frame->routing, &view, err)) return false;
    const size_t bytes = (size_t)b->frame->config->experts * sizeof *plain;
    dv->ops->download(dv, plain, view.topk_counts, bytes);
    dv->ops->download(dv, routed, view.counts, bytes);
    return dv->ops->finish(dv, err);
}

const float *experts_losses(const block *b)
{
    return ((const experts_own *)b->own)->losses;
}

const block_kind experts_block = {
    .norm = "post_attention_layernorm",
    .common = sizeof(experts_common),
    .own = sizeof(experts_own),
    .open = open_context,
    .close = close_context,
    .matrices = matrices,
    .active = active,
    .place = place,
    .place_constants = place_constants,
    .place_quantized = place_quantized,
    .quantize = quantize,
    .place_scratch = place_scratch,
    .fill = fill,
    .kept_for_log = kept_for_log,
    .forward = forward,
    .backward = backward,
};
