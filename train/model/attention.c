/* See attention.h. */
#include "train/model/attention.h"

#include "train/model/rope_table.h"

#include <math.h>
#include <stdlib.h>

typedef struct attention_common {
    float *rope;          // rope_table
    void *dq, *dk, *dqkv; // (rows, d), (rows, d), (rows, 3d) gradients
    void *scratch;        // attention_scratch bytes
} attention_common;

typedef struct attention_own {
    size_t qkv, output, q_norm, k_norm; // weights: (3d, d), (d, d), (d), (d)
    void *projected;                    // (rows, 3d) q, k and v before norm and RoPE
    float *rstd_qk;                     // (2, rows)
    void *q, *k;                        // (rows, d) after norm and RoPE
    void *saved;                        // attention_saved bytes; without a backward they are scratch
    void *mixed;                        // (rows, d) attention's output
} attention_own;

static pass_shape shape_of(const block_frame *f, int64_t sequences, int64_t length, int64_t first)
{
    return (pass_shape){.sequences = sequences,
                        .length = length,
                        .heads = f->config->heads,
                        .head_size = model_config_head_size(f->config),
                        .first = first,
                        .forward_only = f->use != MODEL_TRAIN};
}

static pass_shape usual_shape(const block_frame *f)
{
    return shape_of(f, f->sequences, f->config->context, 0);
}

static const void *values(const block *b, const attention_own *s)
{
    return block_past(b, s->projected, 2 * b->frame->config->hidden);
}

bool attention_check(const model_config *c, const train_device *dv, error *err)
{
    const int64_t head = model_config_head_size(c);
    return !dv->most_head || (head <= dv->most_head && head % 8 == 0) ||
           fail(err, ERROR_USAGE,
                "hidden_size / num_attention_heads is %lld, on %s a multiple of 8, at most %lld",
                (long long)head, dv->name, (long long)dv->most_head);
}

/* ---- weights ---- */

static void matrices(block *b, param_layout *layout, const model_config *c)
{
    attention_own *s = b->own;
    const long long l = b->layer;
    s->qkv = param_group(layout);
    for (int i = 0; i < 3; i++)
        param_add(layout, c->hidden, c->hidden, block_deviation(c),
                  "model.layers.%lld.self_attn.%c_proj.weight", l, "qkv"[i]);
    s->output = param_group(layout);
    param_add(layout, c->hidden, c->hidden, block_deviation_out(c),
              "model.layers.%lld.self_attn.o_proj.weight", l);
}

static void vectors(block *b, param_layout *layout, const model_config *c)
{
    attention_own *s = b->own;
    s->q_norm = param_add_vector(layout, c->hidden, b->layer, "self_attn.q_norm");
    s->k_norm = param_add_vector(layout, c->hidden, b->layer, "self_attn.k_norm");
}

static int64_t active(const model_config *c)
{
    return 4 * c->hidden * c->hidden;
}

/* ---- memory ---- */

static void place(block *b, const block_memory *m)
{
    attention_own *s = b->own;
    const block_frame *f = m->frame;
    const pass_shape shape = usual_shape(f);
    const size_t row = (size_t)(f->rows * f->config->hidden) * type_size(f->device->type),
                 scalar = (size_t)f->rows * sizeof(float);
    const bool keys = f->use == MODEL_GENERATE, qk = block_shares(f, RECOMPUTE_NORMS_QK),
               rest = block_shares(f, RECOMPUTE_LAYERS);
    s->q = block_place(m, s->q, qk, row);
    s->k = block_place(m, s->k, qk && !keys, row);
    s->rstd_qk = block_place(m, s->rstd_qk, rest, 2 * scalar);
    s->projected = block_place(m, s->projected, rest && !keys, 3 * row);
    s->saved = block_place(m, s->saved, rest, f->device->ops->attention_saved(f->device, &shape));
    s->mixed = block_place(m, s->mixed, rest, row);
}

static int64_t angles(const model_config *c)
{
    return c->context * model_config_head_size(c);
}

static void place_constants(void *common, const block_frame *f, arena *a)
{
    attention_common *all = common;
    all->rope = arena_floats(a, angles(f->config));
}

static void place_scratch(void *common, const block_frame *f, arena *a)
{
    attention_common *all = common;
    const pass_shape shape = usual_shape(f);
    const int64_t d = f->config->hidden;
    if (f->use != MODEL_TRAIN) return;
    all->dq = arena_values(a, f->device->type, f->rows * d);
    all->dk = arena_values(a, f->device->type, f->rows * d);
    all->dqkv = arena_values(a, f->device->type, f->rows * 3 * d);
    all->scratch = arena_take(a, f->device->ops->attention_scratch(f->device, &shape));
}

static bool fill(void *common, const block_frame *f, error *err)
{
    const attention_common *all = common;
    const model_config *c = f->config;
    const pass_shape shape = usual_shape(f);
    float *table = malloc((size_t)angles(c) * sizeof *table);
    if (!table) return fail(err, ERROR_RUNTIME, "out of memory: RoPE's %lld angles", (long long)angles(c));
    rope_table(table, c->context, model_config_head_size(c), c->rope_theta);
    f->device->ops->store(f->device, all->rope, SMOE_TYPE_F32, table, angles(c));
    free(table);
    if (f->use != MODEL_GENERATE) f->device->ops->prepare(f->device, &shape, f->use == MODEL_TRAIN);
    return true;
}

/* ---- passes ---- */

static void turn_qk(block *b, const pass_shape *shape)
{
    const attention_common *all = b->common;
    attention_own *s = b->own;
    const block_frame *f = b->frame;
    const int64_t d = f->config->hidden;
    f->device->ops->qk_norm_rope(f->device, s->q, block_past(b, s->k, shape->first * d), s->rstd_qk,
                                 block_past(b, s->projected, shape->first * 3 * d),
                                 block_weight(b, s->q_norm), block_weight(b, s->k_norm), all->rope, shape,
                                 f->config->norm_eps);
}

/* In generation k and `projected` hold the rows before p->first. */
static bool forward(block *b, const block_pass *p, void *out, error *err)
{
    attention_own *s = b->own;
    train_device *dv = b->frame->device;
    const pass_shape shape = shape_of(b->frame, p->sequences, p->length, p->first);
    const int64_t d = b->frame->config->hidden;
    (void)err;
    dv->ops->linear(dv, block_past(b, s->projected, p->first * 3 * d), b->h, block_weight(b, s->qkv), NULL,
                    p->rows, d, 3 * d);
    turn_qk(b, &shape);
    dv->ops->attention(dv, s->mixed, s->saved, s->q, s->k, values(b, s), &shape);
    dv->ops->linear(dv, out, s->mixed, block_weight(b, s->output), b->x, p->rows, d, d);
    return true;
}

static void again(block *b, const block_pass *p)
{
    const pass_shape shape = shape_of(b->frame, p->sequences, p->length, p->first);
    if (block_shares(b->frame, RECOMPUTE_NORMS_QK)) turn_qk(b, &shape);
}

static bool backward(block *b, const block_pass *p, void *dh, void *dout, error *err)
{
    const attention_common *all = b->common;
    attention_own *s = b->own;
    train_device *dv = b->frame->device;
    const train_ops *ops = dv->ops;
    const pass_shape shape = shape_of(b->frame, p->sequences, p->length, p->first);
    const int64_t d = b->frame->config->hidden;
    (void)err;
    ops->linear_dx(dv, dh, dout, block_weight(b, s->output), p->rows, d, d, false);
    ops->linear_dw(dv, block_grad(b, s->output), dv->grad_type, dout, s->mixed, p->rows, d, d, p->add);
    ops->attention_backward(dv, all->dq, all->dk, block_past(b, all->dqkv, 2 * d), dh, s->mixed, s->saved,
                            s->q, s->k, values(b, s), &shape, all->scratch);
    ops->qk_norm_rope_backward(dv, all->dqkv, block_grad(b, s->q_norm), block_grad(b, s->k_norm), all->dq,
                               all->dk, s->projected, s->rstd_qk, block_weight(b, s->q_norm),
                               block_weight(b, s->k_norm), all->rope, &shape, p->add, b->frame->norm_scratch);
    ops->linear_dx(dv, dh, all->dqkv, block_weight(b, s->qkv), p->rows, d, 3 * d, false);
    return true;
}

static void backward_last(block *b, const block_pass *p)
{
    const attention_common *all = b->common;
    const attention_own *s = b->own;
    train_device *dv = b->frame->device;
    const int64_t d = b->frame->config->hidden;
    dv->ops->linear_dw(dv, block_grad(b, s->qkv), dv->grad_type, all->dqkv, b->h, p->rows, d, 3 * d, p->add);
}

const block_kind attention_block = {
    .norm = "input_layernorm",
    .adds_residual = true,
    .common = sizeof(attention_common),
    .own = sizeof(attention_own),
    .matrices = matrices,
    .vectors = vectors,
    .active = active,
    .place = place,
    .place_constants = place_constants,
    .place_scratch = place_scratch,
    .fill = fill,
    .forward = forward,
    .again = again,
    .backward = backward,
    .backward_last = backward_last,
};
