/* See moe.h: the model's config as a smoe_layer, its buffers as the library's arguments. */
#include "train/model/moe.h"

static smoe_layer describe(const moe *m, int64_t tokens, const moe_routing *routing)
{
    const model_config *config = m->config;
    smoe_layer layer = SMOE_LAYER_INIT;
    layer.tokens = tokens;
    layer.hidden = config->hidden;
    layer.intermediate = config->intermediate;
    layer.experts = config->experts;
    layer.topk = config->topk;
    layer.dtype = m->device->type;
    layer.gradient_type = m->device->grad_type;
    layer.accumulate = 1;
    layer.inference = !m->train;
    layer.reuse_saved = 1;
    layer.chunks = m->chunks;
    layer.renormalize = config->norm_topk_prob;
    layer.rounding = routing->rounding;
    if (routing->rounding != SMOE_ROUNDING_NONE) layer.tile = routing->tile;
    layer.seed = routing->seed;
    return layer;
}

static bool check(const moe *m, smoe_status status, error *err)
{
    if (status == SMOE_OK) return true;
    return fail(err, status == SMOE_ERROR_SHAPE ? ERROR_USAGE : ERROR_RUNTIME, "%s",
                smoe_last_error(m->context));
}

static uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* Raises the sizes in m to what `routing` needs. */
static bool measure(moe *m, int64_t tokens, const moe_routing *routing, error *err)
{
    smoe_layer layer = describe(m, tokens, routing);
    smoe_sizes sizes = SMOE_SIZES_INIT;
    if (!check(m, smoe_query_sizes(m->context, &layer, &sizes), err)) return false;
    m->saved_bytes = larger(m->saved_bytes, sizes.saved_buffer_bytes);
    m->scratch_bytes =
        larger(m->scratch_bytes, larger(sizes.scratch_forward_bytes, sizes.scratch_backward_bytes));
    return true;
}

bool moe_create(moe *m, train_device *device, const model_config *config, int64_t tokens, bool train,
                int32_t chunks, const moe_routing *routing, error *err)
{
    *m = (moe){.device = device, .config = config, .train = train, .chunks = chunks};
    char text[256] = "";
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.backend = device->backend;
    options.error_text = text;
    options.error_size = sizeof text;
    if (smoe_create(&m->context, &options) != SMOE_OK) return fail(err, ERROR_RUNTIME, "%s", text);
    moe_routing plain = {.rounding = SMOE_ROUNDING_NONE};
    return measure(m, tokens, &plain, err) && (!train || measure(m, tokens, routing, err));
}

void moe_destroy(moe *m)
{
    smoe_destroy(m->context);
    *m = (moe){0};
}

bool moe_forward(moe *m, void *out, const void *x, const moe_weights *w, int64_t tokens,
                 const moe_routing *routing, moe_saved *saved, error *err)
{
    smoe_layer layer = describe(m, tokens, routing);
    smoe_forward_args args = SMOE_FORWARD_ARGS_INIT;
    args.x = x;
    args.router_weight = w->router;
    args.logits = saved->logits;
    args.step = routing->step;
    args.losses = saved->losses;
    args.w1 = w->w1;
    args.w2 = w->w2;
    args.out = out;
    args.saved = m->train ? saved->saved : NULL;
    args.saved_size = m->train ? m->saved_bytes : 0;
    args.scratch = m->scratch;
    args.scratch_size = m->scratch_bytes;
    return check(m, smoe_layer_forward(m->context, &layer, &args, m->device->stream), err);
}

bool moe_backward(moe *m, void *dx, const moe_weights *dw, const void *dout, const void *x,
                  const moe_weights *w, int64_t tokens, const moe_routing *routing, moe_saved *saved,
                  bool add, error *err)
{
    smoe_layer layer = describe(m, tokens, routing);
    layer.accumulate = add;
    smoe_backward_args args = SMOE_BACKWARD_ARGS_INIT;
    args.x = x;
    args.router_weight = w->router;
    args.logits = saved->logits;
    args.w1 = w->w1;
    args.w2 = w->w2;
    args.saved = saved->saved;
    args.saved_size = m->saved_bytes;
    args.dout = dout;
    args.balance_coefficient = routing->balance_coefficient;
    args.z_coefficient = routing->z_coefficient;
    args.dx = dx;
    args.dw1 = dw->w1;
    args.dw2 = dw->w2;
    args.drouter_weight = dw->router;
    args.scratch = m->scratch;
    args.scratch_size = m->scratch_bytes;
    return check(m, smoe_layer_backward(m->context, &layer, &args, m->device->stream), err);
}

bool moe_keeps_logits(const model_config *config, const moe_routing *routing)
{
    return !config->norm_topk_prob || routing->rounding != SMOE_ROUNDING_NONE ||
           routing->balance_coefficient != 0.0f || routing->z_coefficient != 0.0f;
}

bool moe_view(moe *m, int64_t tokens, const moe_routing *routing, const moe_saved *saved,
              smoe_plan_view *view, error *err)
{
    smoe_layer layer = describe(m, tokens, routing);
    smoe_forward_args args = SMOE_FORWARD_ARGS_INIT;
    args.saved = saved->saved;
    args.saved_size = m->saved_bytes;
    return check(m, smoe_view_plan(m->context, &layer, &args, view), err);
}

bool moe_counts(moe *m, int64_t tokens, const moe_routing *routing, const moe_saved *saved, int32_t *plain,
                int32_t *routed, error *err)
{
    smoe_plan_view view = SMOE_PLAN_VIEW_INIT;
    if (!moe_view(m, tokens, routing, saved, &view, err)) return false;
    const size_t bytes = (size_t)m->config->experts * sizeof *plain;
    m->device->ops->download(m->device, plain, view.topk_counts, bytes);
    m->device->ops->download(m->device, routed, view.counts, bytes);
    return m->device->ops->finish(m->device, err);
}
