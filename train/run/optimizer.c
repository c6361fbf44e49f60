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
    if (!m->weights.one_layer) return 0;
    for (int i = weights_spans(&m->weights, spans) - 1; i >= 0; i--) most = larger(most, spans[i].count);
    for (int64_t l = 0; l < m->config.layers; l++)
        most = larger(most, weights_layer_span(&m->weights, l).count);
    return most;
}

static void place(optimizer *o, arena *a)
{
    train_device *dv = o->model->device;
    int64_t total = o->arrays.states;
    o->step = arena_take(a, sizeof *o->step);
    o->scratch = arena_take(a, dv->ops->update_scratch(dv, largest_span(o->model)));
    o->arrays.first = arena_values(a, o->arrays.state_type, total);
    o->arrays.second = arena_values(a, o->arrays.state_type, total);
    if (dv->master) o->arrays.master = arena_floats(a, total);
}

static optimizer describe(model *m, const shards *sh)
{
    const int64_t total = (int64_t)m->weights.layout.total;
    return (optimizer){.model = m,
                       .arrays = {.runs = sh ? sh->runs : NULL,
                                  .run_count = sh ? sh->run_count : 0,
                                  .states = sh ? sh->states : total,
                                  .weights = m->weights.params,
                                  .state_type = m->device->state_type,
                                  .matrices = (int64_t)m->weights.layout.matrices,
                                  .total = total}};
}

size_t optimizer_bytes(model *m, const shards *sh)
{
    optimizer o = describe(m, sh);
    arena a = {0};
    place(&o, &a);
    return a.most;
}

static bool allocate(optimizer *o, error *err)
{
    train_device *dv = o->model->device;
    int64_t total = o->arrays.states;
    arena sizes = {0};
    place(o, &sizes);
    size_t bytes = sizes.most, available = dv->ops->available(dv);
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

bool optimizer_create(optimizer *o, model *m, const shards *sh, error *err)
{
    *o = describe(m, sh);
    if (allocate(o, err)) {
        if (!sh) m->weights.masters = o->arrays.master;
        return true;
    }
    optimizer_destroy(o);
    return false;
}

void optimizer_destroy(optimizer *o)
{
    if (o->model) o->model->weights.masters = NULL;
    if (o->memory) o->model->device->ops->release(o->model->device, o->memory);
    *o = (optimizer){0};
}

/* The master weights of one tensor whose states are here. */
static void draw_master(optimizer *o, const param_tensor *t, uint64_t seed)
{
    train_device *dv = o->model->device;
    const int64_t begin = (int64_t)t->offset, end = begin + (int64_t)t->count;
    state_run run;
    for (int64_t at = begin; state_run_next(&o->arrays, at, end, &run); at = run.first + run.count)
        dv->ops->draw(dv, NULL, dv->type, o->arrays.master + run.state, run.first - begin, run.count,
                      t->deviation, seed);
}

void optimizer_draw(optimizer *o, uint64_t seed)
{
    model *m = o->model;
    train_device *dv = m->device;
    if (!dv->ops->draw) {
        param_init(m->weights.host, &m->weights.layout, seed);
        return;
    }
    for (size_t i = 0; i < m->weights.layout.tensor_count; i++) {
        const param_tensor *t = &m->weights.layout.tensors[i];
        dv->ops->draw(dv, weights_at(&m->weights, t->offset), dv->type, NULL, 0, (int64_t)t->count,
                      t->deviation, param_seed(seed, i));
        if (o->arrays.master) draw_master(o, t, param_seed(seed, i));
    }
}

void optimizer_load(optimizer *o, const adamw_step *step)
{
    train_device *dv = o->model->device;
    dv->ops->upload(dv, o->step, step, sizeof *step);
}

void optimizer_begin(optimizer *o, const double *square)
{
    o->model->device->ops->begin_update(o->model->device, o->step, square);
}

void optimizer_update(optimizer *o, const grad_span *span, double *square)
{
    o->model->device->ops->update(o->model->device, &o->arrays, span, square, o->scratch);
}
