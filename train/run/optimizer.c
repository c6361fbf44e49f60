/* See optimizer.h. */
#include "train/run/optimizer.h"

#include "train/model/arena.h"

#include <math.h>

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* The largest span of weights that is updated together with the sum of its squares. */
static int64_t largest_span(const model *m)
{
    grad_span spans[MOST_SPANS];
    int64_t most = 0;
    if (!m->one_layer) return 0;
    for (int i = model_spans(m, spans) - 1; i >= 0; i--) most = larger(most, spans[i].count);
    for (int64_t l = 0; l < m->config.layers; l++) most = larger(most, model_layer_span(m, l).count);
    return most;
}

static void place(optimizer *o, arena *a)
{
    train_device *dv = o->model->device;
    int64_t total = o->arrays.total;
    o->step = arena_take(a, sizeof *o->step);
    o->scratch = arena_take(a, dv->ops->update_scratch(dv, largest_span(o->model)));
    o->arrays.first = arena_values(a, o->arrays.state_type, total);
    o->arrays.second = arena_values(a, o->arrays.state_type, total);
    if (dv->master) o->arrays.master = arena_floats(a, total);
}

static optimizer describe(model *m)
{
    return (optimizer){.model = m,
                       .arrays = {.weights = m->params,
                                  .state_type = m->device->state_type,
                                  .matrices = (int64_t)m->layout.matrices,
                                  .total = (int64_t)m->layout.total}};
}

size_t optimizer_bytes(model *m)
{
    optimizer o = describe(m);
    arena a = {0};
    place(&o, &a);
    return a.most;
}

static bool allocate(optimizer *o, error *err)
{
    train_device *dv = o->model->device;
    int64_t total = o->arrays.total;
    size_t bytes = optimizer_bytes(o->model), available = dv->ops->available(dv);
    o->memory = dv->ops->allocate(dv, bytes);
    if (!o->memory && available)
        return fail(err, ERROR_RUNTIME,
                    "out of memory: AdamW's states ask for %.2f GB, the device has %.2f GB left%s",
                    (double)bytes / 1e9, (double)available / 1e9, model_lower_memory(o->model));
    if (!o->memory)
        return fail(err, ERROR_RUNTIME, "out of memory: AdamW's moments of %lld weights", (long long)total);
    place(o, &(arena){.base = o->memory});
    dv->ops->clear(dv, o->memory, bytes);
    return true;
}

bool optimizer_create(optimizer *o, model *m, error *err)
{
    *o = describe(m);
    if (allocate(o, err)) return true;
    optimizer_destroy(o);
    return false;
}

void optimizer_destroy(optimizer *o)
{
    if (o->recording) o->model->device->ops->forget(o->model->device, o->recording);
    if (o->memory) o->model->device->ops->release(o->model->device, o->memory);
    *o = (optimizer){0};
}

void optimizer_draw(optimizer *o, uint64_t seed)
{
    model *m = o->model;
    train_device *dv = m->device;
    if (!dv->ops->draw) {
        param_init(m->weights, &m->layout, seed);
        return;
    }
    for (size_t i = 0; i < m->layout.tensor_count; i++) {
        const param_tensor *t = &m->layout.tensors[i];
        dv->ops->draw(dv, model_past(m, m->params, (int64_t)t->offset), dv->type,
                      o->arrays.master ? o->arrays.master + t->offset : NULL, (int64_t)t->count, t->deviation,
                      param_stream(seed, i));
    }
}

/* A grads_ready. */
static void update(void *user, const grad_span *span)
{
    optimizer *o = user;
    model *m = o->model;
    m->device->ops->update(m->device, &o->arrays, span, m->one_layer ? &m->scalars[SCALAR_SQUARE] : NULL,
                           o->scratch);
}

static bool enqueue(optimizer *o, error *err)
{
    model *m = o->model;
    int64_t sequences = m->sequences * m->parts, length = m->config.context;
    train_device *dv = m->device;
    double *square = &m->scalars[SCALAR_SQUARE];
    grad_span spans[MOST_SPANS];
    const int count = model_spans(m, spans);
    m->ready = update;
    m->ready_user = o;
    if (m->one_layer) {
        dv->ops->clear(dv, square, sizeof *square);
        dv->ops->begin_update(dv, o->step, square);
    }
    if (!model_enqueue_gradients(m, sequences, length, dv->adds_gradients, err)) return false;
    if (!m->one_layer) {
        dv->ops->gradient_square(dv, square, m->grads, o->arrays.total);
        dv->ops->begin_update(dv, o->step, square);
    }
    for (int i = 0; i < count; i++) update(o, &spans[i]);
    return true;
}

/* One recording of the launches serves every step, except with SR-f, for which the host passes other
 * arguments at every step. The first step is not recorded, because libraries load their kernels during it. */
static bool records(const optimizer *o)
{
    return o->model->device->ops->record && o->steps > 0 && o->model->routing.rounding != SMOE_ROUNDING_SR_F;
}

void optimizer_stage(optimizer *o, const model_batch *batch)
{
    model_stage_batch(o->model, batch, o->model->parts);
}

bool optimizer_step(optimizer *o, const adamw_step *step, error *err)
{
    model *m = o->model;
    train_device *dv = m->device;
    if (m->one_layer && step->clip != 0.0)
        return fail(err, ERROR_USAGE, "clipping needs the gradients of all layers at once");
    model_load_batch(m);
    dv->ops->upload(dv, o->step, step, sizeof *step);
    if (!records(o)) {
        o->steps++;
        return enqueue(o, err);
    }
    if (!o->recording) {
        dv->ops->record(dv);
        bool done = enqueue(o, err);
        o->recording = dv->ops->recorded(dv);
        if (!done) return false;
        if (!o->recording) return dv->ops->finish(dv, err);
    }
    dv->ops->replay(dv, o->recording);
    return true;
}

bool optimizer_finish(optimizer *o, step_result *result, error *err)
{
    model *m = o->model;
    double scalars[SCALARS];
    m->device->ops->download(m->device, scalars, m->scalars, sizeof scalars);
    *result = (step_result){scalars[SCALAR_LOSS], sqrt(scalars[SCALAR_SQUARE])};
    return m->device->ops->finish(m->device, err);
}
