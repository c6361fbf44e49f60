/* See comm.h: the collectives of one rank, and sums of the host's values. */
#include "train/ranks/comm.h"

#include <stdlib.h>

static void alone_close(train_comm *c)
{
    free(c);
}

static void copy(train_comm *c, void *to, const void *from, comm_type type, int64_t count)
{
    if (to != from) c->device->ops->copy(c->device, to, from, (size_t)count * comm_type_size(type));
}

static void copy_part(train_comm *c, void *part, const void *whole, void *inbox, comm_type type,
                      int64_t count)
{
    (void)inbox;
    copy(c, part, whole, type, count);
}

static void nothing(train_comm *c)
{
    (void)c;
}

static void no_turn(train_comm *c, int turn)
{
    (void)c, (void)turn;
}

static const comm_ops alone_ops = {.close = alone_close,
                                   .reduce_scatter = copy_part,
                                   .all_gather = copy,
                                   .all_reduce = copy,
                                   .barrier = nothing,
                                   .enter = nothing,
                                   .leave = no_turn,
                                   .wait = no_turn};

train_comm *comm_alone(train_device *dv, error *err)
{
    train_comm *c = malloc(sizeof *c);
    if (c)
        *c = (train_comm){&alone_ops, "no other rank", dv, 0, 1, false, NULL};
    else
        fail(err, ERROR_RUNTIME, "out of memory: the collectives");
    return c;
}

bool comm_sum(train_comm *c, double *scratch, double *values, int count, error *err)
{
    train_device *dv = c->device;
    const size_t bytes = (size_t)count * sizeof *values;
    dv->ops->upload(dv, scratch, values, bytes);
    c->ops->all_reduce(c, scratch, scratch, COMM_F64, count);
    dv->ops->download(dv, values, scratch, bytes);
    return dv->ops->finish(dv, err);
}
