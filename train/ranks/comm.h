/* The collectives of a run on several ranks: one table, filled for one rank (comm.c), for processes on the
 * CPUs of one host (train/cpu/shared.c) and for GPUs (train/cuda/nccl.c). All ranks call the same functions
 * with the same counts in the same order. Sums have the same bits on every run with the same number of ranks.
 *
 * A call may return before it is done. It runs after what the device was given before; between enter and
 * leave device and collectives use a queue of their own, beside the device's. A failure is stored in the
 * device's `failure`. A call that waits for a rank that has ended does not return: the process ends
 * (group.h). */
#ifndef TRAIN_COMM_H
#define TRAIN_COMM_H

#include "train/ops.h"

typedef enum comm_type { COMM_F32, COMM_BF16, COMM_F64, COMM_I32 } comm_type;

static inline size_t comm_type_size(comm_type type)
{
    return type == COMM_F64 ? 8 : type == COMM_BF16 ? 2 : 4;
}

typedef struct train_comm train_comm;

typedef struct comm_ops {
    void (*close)(train_comm *c);
    /* Memory of the device that collectives will read and write; all ranks give theirs in the same order.
     * NULL: not needed. unshare comes before the memory is released and after recordings are forgotten. */
    bool (*share)(train_comm *c, void *memory, size_t bytes, error *err);
    void (*unshare)(train_comm *c, void *memory);
    /* part (count) = the sum over ranks of whole[rank count, (rank + 1) count); whole has ranks * count, as
     * has `inbox`, which may be NULL unless the comm has_inbox */
    void (*reduce_scatter)(train_comm *c, void *part, const void *whole, void *inbox, comm_type type,
                           int64_t count);
    /* whole[r count, ...) = part (count) of rank r, for every r; part may be its place in whole */
    void (*all_gather)(train_comm *c, void *whole, const void *part, comm_type type, int64_t count);
    /* out (count) = the sum over ranks of in; out may be in */
    void (*all_reduce)(train_comm *c, void *out, const void *in, comm_type type, int64_t count);
    void (*barrier)(train_comm *c); // waits, on the host
    /* What is enqueued between enter and leave runs after what the device was given before enter, and beside
     * what it is given after leave, until it is told to wait for `turn`, which is 0 or 1. */
    void (*enter)(train_comm *c);
    void (*leave)(train_comm *c, int turn);
    void (*wait)(train_comm *c, int turn);
} comm_ops;

struct train_comm {
    const comm_ops *ops;
    const char *name; // for messages
    train_device *device;
    int rank, ranks;
    bool has_inbox;      // a reduce_scatter receives all parts before it adds them up
    struct group *group; // told of every collective that this rank enters; NULL: none
};

/* For one rank. NULL and *err: no memory. */
train_comm *comm_alone(train_device *dv, error *err);

/* values (count), on the host, become their sums over the ranks. scratch (count) is on the device. */
bool comm_sum(train_comm *c, double *scratch, double *values, int count, error *err);

#endif
