/* See step_shards.h. */
#include "train/run/step_shards.h"

static comm_type comm_type_of(smoe_type type)
{
    return type == SMOE_TYPE_F32 ? COMM_F32 : COMM_BF16;
}

static void *past(const train_step *s, void *base, int64_t count)
{
    return (char *)base + (size_t)count * type_size(s->model->device->grad_type);
}

/* The sum of a span's gradients over the ranks, part and tail, to two places. */
static void reduce(train_step *s, const shard *span, const void *grads, void *part, void *tail)
{
    const comm_ops *ops = s->comm->ops;
    const comm_type type = comm_type_of(s->model->device->grad_type);
    if (span->part) ops->reduce_scatter(s->comm, part, grads, s->inbox, type, span->part);
    if (span->tail)
        ops->all_reduce(s->comm, tail, past(s, (void *)grads, s->shards->ranks * span->part), type,
                        span->tail);
}

/* Updates what this rank has of a span. The tail is counted once. */
static void update(train_step *s, const shard *span, void *part, void *tail, double *square)
{
    const shards *sh = s->shards;
    const int64_t mine = span->first + sh->rank * span->part, last = span->first + sh->ranks * span->part;
    if (span->part) optimizer_update(s->optimizer, &(grad_span){part, mine, span->part, span->state}, square);
    if (span->tail)
        optimizer_update(s->optimizer, &(grad_span){tail, last, span->tail, span->tail_state},
                         sh->rank == 0 ? square : NULL);
}

/* All ranks get the new weights of a span. */
static void gather(train_step *s, int64_t index)
{
    const shard *span = &s->shards->spans[index];
    const model_weights *w = &s->model->weights;
    if (span->part)
        s->comm->ops->all_gather(s->comm, weights_at(w, (size_t)span->first),
                                 weights_at(w, (size_t)(span->first + s->shards->rank * span->part)),
                                 comm_type_of(w->device->type), span->part);
}

void step_shards_gather(train_step *s)
{
    for (int64_t i = 0; i < s->shards->count; i++) gather(s, i);
}

/* Takes the gradients of a span of one pass. Its last pass updates the weights, if they are not clipped. */
static void take(train_step *s, int64_t index, const void *grads, int64_t pass, int turn)
{
    const shard *span = &s->shards->spans[index];
    model *m = s->model;
    void *received = s->received, *received_tail = past(s, received, span->part);
    void *part = s->sums ? past(s, s->sums, span->state) : received,
         *tail = s->sums ? past(s, s->sums, span->tail_state) : received_tail;
    s->comm->ops->enter(s->comm);
    if (pass == 0) {
        reduce(s, span, grads, part, tail);
    } else {
        reduce(s, span, grads, received, received_tail);
        if (span->part) m->device->ops->add(m->device, part, received, span->part);
        if (span->tail) m->device->ops->add(m->device, tail, received_tail, span->tail);
    }
    if (pass + 1 == m->parts && !s->clips) {
        update(s, span, part, tail, &m->scalars[SCALAR_SQUARE]);
        gather(s, index);
    }
    s->comm->ops->leave(s->comm, turn);
    s->busy[turn] = true;
}

/* The device waits until a turn's reduction is done. */
static void await(train_step *s, int turn)
{
    if (s->busy[turn]) s->comm->ops->wait(s->comm, turn);
    s->busy[turn] = false;
}

/* With clipping the first forward of a step gathers the weights of the step before: the ends and the first
 * layer's have nothing to run beside, each other layer's are gathered during the layer before. */
static bool forward(train_step *s, block_pass *at, int64_t part, error *err)
{
    model *m = s->model;
    const comm_ops *ops = s->comm->ops;
    const int64_t layers = m->config.layers;
    const bool gathers = s->clips && part == 0;
    if (gathers) {
        gather(s, 0);
        gather(s, s->shards->count - 1);
        gather(s, 1);
    }
    model_begin_forward(m, at, part, m->device->adds_gradients);
    for (int64_t l = 0; l < layers; l++) {
        const int next = (int)((l + 1) % 2);
        if (gathers && l + 1 < layers) {
            ops->enter(s->comm);
            gather(s, l + 2);
            ops->leave(s->comm, next);
        }
        if (!model_layer_forward(m, at, l, err)) return false;
        if (gathers && l + 1 < layers) ops->wait(s->comm, next);
    }
    model_end_forward(m, at);
    return true;
}

static bool run_pass(train_step *s, int64_t part, error *err)
{
    model *m = s->model;
    grad_span spans[MOST_SPANS];
    block_pass at;
    if (!forward(s, &at, part, err)) return false;
    for (int64_t l = m->config.layers - 1; l >= 0; l--) {
        const int turn = (int)(l % 2);
        await(s, turn); // before the gradients of a layer overwrite those of the one after the next
        if (!model_layer_backward(m, &at, l, err)) return false;
        take(s, l + 1, weights_layer_span(&m->weights, l).grads, part, turn);
    }
    model_end_backward(m, &at);
    weights_spans(&m->weights, spans);
    take(s, 0, spans[0].grads, part, 0);
    take(s, s->shards->count - 1, spans[1].grads, part, 1);
    await(s, 0); // the next pass uses the memory of all gradients
    await(s, 1);
    return true;
}

/* The square of the gradient's norm from all parts. The tails are the same on every rank. */
static void sum_square(train_step *s, double *square)
{
    model *m = s->model;
    const shards *sh = s->shards;
    m->device->ops->gradient_square(m->device, square, s->sums, sh->rank == 0 ? sh->states : sh->parts_end);
    s->comm->ops->all_reduce(s->comm, square, square, COMM_F64, 1);
}

bool step_shards_enqueue(train_step *s, error *err)
{
    model *m = s->model;
    const shards *sh = s->shards;
    double *square = &m->scalars[SCALAR_SQUARE];
    m->device->ops->clear(m->device, square, sizeof *square);
    if (!s->clips) optimizer_begin(s->optimizer, square);
    for (int64_t part = 0; part < m->parts; part++)
        if (!run_pass(s, part, err)) return false;
    model_end_step(m);
    if (s->clips) {
        sum_square(s, square);
        optimizer_begin(s->optimizer, square);
        for (int64_t i = 0; i < sh->count; i++)
            update(s, &sh->spans[i], past(s, s->sums, sh->spans[i].state),
                   past(s, s->sums, sh->spans[i].tail_state), NULL);
    } else {
        s->comm->ops->all_reduce(s->comm, square, square, COMM_F64, 1);
    }
    s->comm->ops->all_reduce(s->comm, &m->scalars[SCALAR_LOSS], &m->scalars[SCALAR_LOSS], COMM_F64, 1);
    s->comm->ops->all_reduce(s->comm, &m->scalars[SCALAR_SHARED], &m->scalars[SCALAR_SHARED], COMM_F64,
                             SCALARS - SCALAR_SHARED);
    if (m->routing.bias_rate != 0.0f) {
        int64_t count;
        int32_t *counts = model_counts(m, &count);
        s->comm->ops->all_reduce(s->comm, counts, counts, COMM_I32, count);
    }
    return model_update_biases(m, err);
}
