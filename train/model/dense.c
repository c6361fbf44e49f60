/* See dense.h. */
#include "train/model/dense.h"

#include <stdio.h>

void dense_mlp_matrices(dense_mlp *mlp, param_layout *layout, const model_config *c, const char *prefix)
{
    mlp->w1 = param_group(layout);
    param_add(layout, mlp->width, c->hidden, block_deviation(c), "%s.gate_proj.weight", prefix);
    param_add(layout, mlp->width, c->hidden, block_deviation(c), "%s.up_proj.weight", prefix);
    mlp->w2 = param_group(layout);
    param_add(layout, c->hidden, mlp->width, block_deviation_out(c), "%s.down_proj.weight", prefix);
}

void dense_mlp_place(dense_mlp *mlp, const block_memory *m)
{
    const block_frame *f = m->frame;
    const size_t row = (size_t)(f->rows * mlp->width) * type_size(f->device->type);
    const bool shared = block_shares(f, RECOMPUTE_LAYERS);
    mlp->h = block_place(m, mlp->h, shared, 2 * row);
    mlp->a = block_place(m, mlp->a, shared, row);
}

void dense_mlp_forward(const block *b, const dense_mlp *mlp, const block_pass *p, void *out, bool add)
{
    train_device *dv = b->frame->device;
    const int64_t d = b->frame->config->hidden, width = mlp->width;
    dv->ops->linear(dv, mlp->h, b->h, block_weight(b, mlp->w1), NULL, p->rows, d, 2 * width);
    dv->ops->swiglu(dv, mlp->a, mlp->h, p->rows, width);
    dv->ops->linear(dv, out, mlp->a, block_weight(b, mlp->w2), add ? out : NULL, p->rows, width, d);
}

void dense_mlp_backward(const block *b, const dense_mlp *mlp, const block_pass *p, void *dh, const void *dout,
                        void *da, bool add_dh)
{
    train_device *dv = b->frame->device;
    const train_ops *ops = dv->ops;
    const smoe_type type = dv->grad_type;
    const int64_t rows = p->rows, d = b->frame->config->hidden, width = mlp->width;
    ops->linear_dx(dv, da, dout, block_weight(b, mlp->w2), rows, width, d, false);
    ops->linear_dw(dv, block_grad(b, mlp->w2), type, dout, mlp->a, rows, width, d, p->add);
    ops->swiglu_backward(dv, mlp->h, da, rows, width);
    ops->linear_dx(dv, dh, mlp->h, block_weight(b, mlp->w1), rows, d, 2 * width, add_dh);
    ops->linear_dw(dv, block_grad(b, mlp->w1), type, mlp->h, b->h, rows, d, 2 * width, p->add);
}

/* ---- the block ---- */

typedef struct dense_common {
    void *da; // (rows, f)
} dense_common;

static void matrices(block *b, param_layout *layout, const model_config *c)
{
    dense_mlp *mlp = b->own;
    char prefix[64];
    snprintf(prefix, sizeof prefix, "model.layers.%lld.mlp", (long long)b->layer);
    mlp->width = c->dense_intermediate;
    dense_mlp_matrices(mlp, layout, c, prefix);
}

static int64_t active(const model_config *c)
{
    return 3 * c->dense_intermediate * c->hidden;
}

static void place(block *b, const block_memory *m)
{
    dense_mlp_place(b->own, m);
}

static void place_scratch(void *common, const block_frame *f, arena *a)
{
    dense_common *all = common;
    if (f->use == MODEL_TRAIN)
        all->da = arena_values(a, f->device->type, f->rows * f->config->dense_intermediate);
}

static bool forward(block *b, const block_pass *p, void *out, error *err)
{
    (void)err;
    dense_mlp_forward(b, b->own, p, out, false);
    return true;
}

static bool backward(block *b, const block_pass *p, void *dh, void *dout, error *err)
{
    const dense_common *all = b->common;
    (void)err;
    dense_mlp_backward(b, b->own, p, dh, dout, all->da, false);
    return true;
}

const block_kind dense_block = {
    .norm = "post_attention_layernorm",
    .common = sizeof(dense_common),
    .own = sizeof(dense_mlp),
    .matrices = matrices,
    .active = active,
    .place = place,
    .place_scratch = place_scratch,
    .forward = forward,
    .backward = backward,
};
