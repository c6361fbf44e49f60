/* See model.h: the passes. model_create.c makes a model. */
#include "train/model/model.h"

#include "train/model/experts.h"

static const train_routing plain_routing = {.rounding = SMOE_ROUNDING_NONE};

static int64_t blocks_of(const model *m)
{
    return MODEL_BRANCHES * m->config.layers;
}

/* h = norm(x += residual) */
static void norm(const block *b, int64_t rows, const void *residual)
{
    const block_frame *f = b->frame;
    f->device->ops->norm(f->device, b->h, b->rstd, b->x, residual, block_weight(b, b->norm), rows,
                         f->config->hidden, f->config->norm_eps);
}

/* The norm before a block, or the last norm. A block that does not add its input itself leaves that to the
 * norm after it. */
static void norm_between(const model *m, int64_t index, int64_t rows)
{
    const block *b = &m->blocks[index];
    const bool adds = index > 0 && !b[-1].kind->adds_residual;
    norm(b, rows, adds ? b[-1].x : NULL);
}

bool model_layer_forward(model *m, const block_pass *p, int64_t layer, error *err)
{
    for (int64_t i = MODEL_BRANCHES * layer; i < MODEL_BRANCHES * (layer + 1); i++) {
        block *b = &m->blocks[i];
        norm_between(m, i, p->rows);
        if (p->quantizes && b->kind->quantize && !b->kind->quantize(b, err)) return false;
        if (!b->kind->forward(b, p, b[1].x, err)) return false;
    }
    return true;
}

/* Computes the final norm's output from m->batch. */
static bool decoder(model *m, const block_pass *p, error *err)
{
    head_embed(&m->head, m->blocks[0].x, &m->batch, p->rows);
    for (int64_t l = 0; l < m->config.layers; l++)
        if (!model_layer_forward(m, p, l, err)) return false;
    norm_between(m, blocks_of(m), p->rows);
    return true;
}

void model_stage_batch(model *m, const model_batch *batch)
{
    m->device->ops->stage_batch(m->device, m->batches, batch->tokens, batch->targets,
                                batch->sequences * batch->length / m->parts, m->parts,
                                m->frame.rows * m->parts, m->config.vocab);
}

void model_load_batch(model *m)
{
    m->device->ops->load_batch(m->device);
    m->batch = m->batches[0];
}

/* A pass over a batch of its own. */
static void load_pass(model *m, const model_batch *batch)
{
    m->device->ops->stage_batch(m->device, m->batches, batch->tokens, batch->targets,
                                batch->sequences * batch->length, 1, m->frame.rows * m->parts,
                                m->config.vocab);
    model_load_batch(m);
}

static bool read_loss(model *m, double *loss, error *err)
{
    m->device->ops->download(m->device, loss, &m->scalars[SCALAR_LOSS], sizeof *loss);
    return m->device->ops->finish(m->device, err);
}

bool model_loss(model *m, const model_batch *batch, const train_routing *routing, smoe_compute compute,
                double *loss, error *err)
{
    const block_pass pass = {.sequences = batch->sequences,
                             .length = batch->length,
                             .rows = batch->sequences * batch->length,
                             .routing = routing ? routing : &plain_routing,
                             .compute = compute,
                             .quantizes = compute != SMOE_COMPUTE_STORAGE};
    load_pass(m, batch);
    if (!decoder(m, &pass, err)) return false;
    head_loss(&m->head, m->losses, m->blocks[blocks_of(m)].h, NULL, m->batch.targets, pass.rows, pass.rows,
              false);
    m->device->ops->mean(m->device, &m->scalars[SCALAR_LOSS], m->losses, pass.rows);
    return read_loss(m, loss, err);
}

bool model_continue(model *m, const int32_t *tokens, int64_t first, int64_t count, float *logits, error *err)
{
    const block_pass pass = {
        .sequences = 1, .length = count, .rows = count, .first = first, .routing = &plain_routing};
    const block *last = &m->blocks[blocks_of(m)];
    load_pass(m, &(model_batch){tokens + first, NULL, 1, count});
    if (!decoder(m, &pass, err)) return false;
    head_predict(&m->head, logits, block_past(last, last->h, (count - 1) * m->config.hidden));
    return m->device->ops->finish(m->device, err);
}

/* ---- training ---- */

/* dx (+)= the gradient of the block's input through its norm, whose output is written again if `again`. */
static void norm_backward(model *m, const block *b, const block_pass *p, bool add_dx, bool again)
{
    m->device->ops->norm_backward(m->device, m->dx, block_grad(b, b->norm), again ? b->h : NULL, m->dh, b->x,
                                  b->rstd, block_weight(b, b->norm), p->rows, m->config.hidden, add_dx,
                                  p->add, m->frame.norm_scratch);
}

void model_begin_forward(model *m, block_pass *pass, int64_t part, bool add)
{
    m->batch = m->batches[part];
    m->pass_routing = m->routing;
    m->pass_routing.step = m->routing.step * (uint64_t)m->passes + (uint64_t)(m->first_part + part);
    *pass = (block_pass){.sequences = m->frame.sequences,
                         .length = m->config.context,
                         .rows = m->frame.rows,
                         .part = part,
                         .routing = &m->pass_routing,
                         .compute = m->frame.compute,
                         .quantizes = m->frame.compute != SMOE_COMPUTE_STORAGE && part == 0,
                         .add = add || (part > 0 && !m->weights.sharded)};
    weights_begin_pass(&m->weights);
    head_embed(&m->head, m->blocks[0].x, &m->batch, pass->rows);
}

void model_end_forward(model *m, const block_pass *pass)
{
    const block *last = &m->blocks[blocks_of(m)];
    const int64_t rows = pass->rows;
    norm_between(m, blocks_of(m), rows);
    head_loss(&m->head, m->losses + pass->part * rows, last->h, m->dh, m->batch.targets, rows,
              rows * m->passes, pass->add);
    norm_backward(m, last, pass, false, false);
}

bool model_forward(model *m, block_pass *pass, int64_t part, bool add, error *err)
{
    model_begin_forward(m, pass, part, add);
    for (int64_t l = 0; l < m->config.layers; l++)
        if (!model_layer_forward(m, pass, l, err)) return false;
    model_end_forward(m, pass);
    return true;
}

/* Computes again what the forward of a layer did not keep. The h of a block with backward_last is written by
 * the backward of its norm. */
static bool recompute(model *m, block *layer, const block_pass *p, error *err)
{
    const model_recompute again = m->frame.recompute;
    for (block *b = layer; b < layer + MODEL_BRANCHES && again != RECOMPUTE_NONE; b++) {
        const bool all = again == RECOMPUTE_LAYERS, last = b + 1 == layer + MODEL_BRANCHES;
        if (!all && b->kind->again) b->kind->again(b, p);
        if (all || !b->kind->backward_last) norm(b, p->rows, NULL);
        if (all && !b->kind->forward(b, p, last ? m->dh : b[1].x, err))
            return false; // the last output is not used
    }
    return true;
}

bool model_layer_backward(model *m, const block_pass *p, int64_t layer, error *err)
{
    block *first = &m->blocks[MODEL_BRANCHES * layer];
    weights_begin_layer(&m->weights, layer);
    if (!recompute(m, first, p, err)) return false;
    for (block *b = first + MODEL_BRANCHES - 1; b >= first; b--) {
        const bool deferred = b->kind->backward_last != NULL;
        if (!b->kind->backward(b, p, m->dh, m->dx, err)) return false;
        norm_backward(m, b, p, true, deferred && m->frame.recompute != RECOMPUTE_NONE);
        if (deferred) b->kind->backward_last(b, p);
    }
    return true;
}

void model_end_backward(model *m, const block_pass *p)
{
    head_embed_backward(&m->head, m->dx, &m->batch, p->rows, p->add);
}

void model_end_step(model *m)
{
    m->device->ops->mean(m->device, &m->scalars[SCALAR_LOSS], m->losses, m->frame.rows * m->parts);
}

int32_t *model_counts(const model *m, int64_t *count)
{
    *count = 0;
    return m->config.dense_layers < m->config.layers
               ? experts_all_counts(model_experts(m, m->config.dense_layers), count)
               : NULL;
}

bool model_update_biases(model *m, error *err)
{
    if (m->routing.bias_rate == 0.0f) return true;
    for (int64_t l = m->config.dense_layers; l < m->config.layers; l++)
        if (!experts_update_bias(&m->blocks[MODEL_BRANCHES * l + MODEL_BRANCHES - 1], m->routing.bias_rate,
                                 err))
            return false;
    return true;
}

bool model_gradients(model *m, const model_batch *batch, double *loss, error *err)
{
    model_stage_batch(m, batch);
    model_load_batch(m);
    for (int64_t part = 0; part < m->parts; part++) {
        block_pass pass;
        if (!model_forward(m, &pass, part, m->device->adds_gradients, err)) return false;
        for (int64_t l = m->config.layers - 1; l >= 0; l--)
            if (!model_layer_backward(m, &pass, l, err)) return false;
        model_end_backward(m, &pass);
    }
    model_end_step(m);
    return read_loss(m, loss, err);
}
