/* See step.h. */
#include "train/run/step.h"

#include "train/model/arena.h"
#include "train/run/step_shards.h"

#include <assert.h>
#include <math.h>
#include <string.h>

static void place(train_step *s, const model *m, arena *a)
{
    const smoe_type type = m->device->grad_type;
    const bool inbox = s->comm ? s->comm->has_inbox : m->device->backend == SMOE_BACKEND_CUDA;
    if (m->parts > 1 || s->clips) s->sums = arena_values(a, type, s->shards->states);
    s->received = arena_values(a, type, s->shards->most);
    if (inbox) s->inbox = arena_values(a, type, s->shards->ranks * s->shards->most);
}

size_t step_bytes(const model *m, const shards *sh, bool clips)
{
    train_step s = {.shards = sh, .clips = clips};
    arena a = {0};
    if (sh) place(&s, m, &a);
    return a.most;
}

bool step_open(train_step *s, model *m, optimizer *o, const shards *sh, train_comm *comm, bool clips,
               error *err)
{
    *s = (train_step){.model = m, .optimizer = o, .shards = sh, .comm = comm, .clips = clips};
    if (!comm) return true;
    arena sizes = {0};
    place(s, m, &sizes);
    const size_t bytes = sizes.most;
    s->memory = m->device->ops->allocate(m->device, bytes);
    if (!s->memory)
        return fail(err, ERROR_RUNTIME, "out of memory: the sums of gradients ask for %.2f GB%s",
                    (double)bytes / 1e9, model_lower_memory(m));
    place(s, m, &(arena){.base = s->memory});
    return !comm->ops->share || (comm->ops->share(comm, m->memory, model_bytes_sum(&m->bytes), err) &&
                                 comm->ops->share(comm, s->memory, bytes, err));
}

void step_close(train_step *s)
{
    if (s->recording) s->model->device->ops->forget(s->model->device, s->recording);
    if (s->memory && s->comm->ops->share) {
        s->comm->ops->unshare(s->comm, s->model->memory);
        s->comm->ops->unshare(s->comm, s->memory);
    }
    if (s->memory) s->model->device->ops->release(s->model->device, s->memory);
    *s = (train_step){0};
}

void step_stage(train_step *s, const model_batch *batch)
{
    model_stage_batch(s->model, batch);
}

/* One pass. With one_layer the weights of a layer are updated before the gradients of the next take the place
 * of its own. */
static bool pass(train_step *s, int64_t part, error *err)
{
    model *m = s->model;
    block_pass at;
    if (!model_forward(m, &at, part, m->device->adds_gradients, err)) return false;
    for (int64_t l = m->config.layers - 1; l >= 0; l--) {
        const grad_span span = weights_layer_span(&m->weights, l);
        if (!model_layer_backward(m, &at, l, err)) return false;
        if (m->weights.one_layer) optimizer_update(s->optimizer, &span, &m->scalars[SCALAR_SQUARE]);
    }
    model_end_backward(m, &at);
    return true;
}

static bool enqueue(train_step *s, error *err)
{
    if (s->comm) return step_shards_enqueue(s, err);
    model *m = s->model;
    const bool layers = m->weights.one_layer;
    double *square = &m->scalars[SCALAR_SQUARE];
    grad_span spans[MOST_SPANS];
    const int count = weights_spans(&m->weights, spans);
    if (layers) {
        m->device->ops->clear(m->device, square, sizeof *square);
        optimizer_begin(s->optimizer, square);
    }
    for (int64_t part = 0; part < m->parts; part++)
        if (!pass(s, part, err)) return false;
    model_end_step(m);
    if (!layers) {
        m->device->ops->gradient_square(m->device, square, m->weights.grads,
                                        (int64_t)m->weights.layout.total);
        optimizer_begin(s->optimizer, square);
    }
    for (int i = 0; i < count; i++) optimizer_update(s->optimizer, &spans[i], layers ? square : NULL);
    return model_update_biases(m, err);
}

/* One recording of the launches serves every step, except with SR-f, for which the host passes other
 * arguments at every step. The first step is not recorded, because libraries load their kernels during it. */
static bool records(const train_step *s)
{
    return s->model->device->ops->record && s->steps > 0 && s->model->routing.rounding != SMOE_ROUNDING_SR_F;
}

void step_share(train_step *s, const step_shared *mine)
{
    static_assert(sizeof *mine == (SCALARS - SCALAR_SHARED) * sizeof(double),
                  "the model's scalars have room");
    train_device *dv = s->model->device;
    if (s->comm) dv->ops->upload(dv, &s->model->scalars[SCALAR_SHARED], mine, sizeof *mine);
}

bool step_run(train_step *s, const adamw_step *update, error *err)
{
    model *m = s->model;
    train_device *dv = m->device;
    if (m->weights.one_layer && !s->clips && update->clip != 0.0)
        return fail(err, ERROR_USAGE, "clipping needs the gradients of all layers at once");
    model_load_batch(m);
    optimizer_load(s->optimizer, update);
    if (!records(s)) {
        s->steps++;
        s->stale = s->clips && s->comm;
        return enqueue(s, err);
    }
    if (!s->recording) {
        dv->ops->record(dv);
        bool done = enqueue(s, err);
        s->recording = dv->ops->recorded(dv);
        if (!done) return false;
        if (!s->recording) return dv->ops->finish(dv, err);
    }
    dv->ops->replay(dv, s->recording);
    s->stale = s->clips && s->comm;
    return true;
}

void step_settle(train_step *s)
{
    if (s->stale) step_shards_gather(s);
    s->stale = false;
}

bool step_finish(train_step *s, step_result *result, error *err)
{
    model *m = s->model;
    double scalars[SCALARS];
    m->device->ops->download(m->device, scalars, m->scalars, sizeof scalars);
    *result = (step_result){.loss = scalars[SCALAR_LOSS], .norm = sqrt(scalars[SCALAR_SQUARE])};
    if (s->comm) memcpy(&result->shared, &scalars[SCALAR_SHARED], sizeof result->shared);
    if (s->comm) result->loss /= s->comm->ranks;
    return m->device->ops->finish(m->device, err);
}
