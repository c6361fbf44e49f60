/* See shared.h. The memory holds a barrier and two sets of slots, one slot for each rank. A collective goes
 * through the slots in pieces: every rank writes its piece, passes the barrier, and reads the others' pieces.
 * The next piece uses the other set. A rank that writes to a set again has passed the barrier of the set
 * between, which every rank passes only after it has read; so one barrier a piece is enough. */
#define _GNU_SOURCE 1
#include "train/cpu/shared.h"

#include "train/ranks/group.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SLOT = 1 << 20, SPINS = 2000 };

typedef struct shared_head {
    atomic_uint arrived, round;
    char pad[64 - 2 * sizeof(unsigned)];
} shared_head;
_Static_assert(sizeof(shared_head) == 64, "the slots are aligned");

typedef struct shared_comm {
    train_comm base;
    shared_head *head;
    size_t bytes;
    int set; // of slots, for the next piece
} shared_comm;

static size_t bytes_for(int ranks)
{
    return sizeof(shared_head) + (size_t)(2 * ranks) * SLOT;
}

bool shared_make(char name[SHARED_NAME], int ranks, error *err)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    snprintf(name, SHARED_NAME, "/smoe-%ld-%lx", (long)getpid(),
             (unsigned long)(now.tv_nsec ^ now.tv_sec << 20));
    const int file = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    const bool made = file >= 0 && ftruncate(file, (off_t)bytes_for(ranks)) == 0;
    const int why = errno;
    if (file >= 0) close(file);
    if (!made && file >= 0) shm_unlink(name);
    return made || fail(err, ERROR_RUNTIME, "shared memory of %zu bytes for %d ranks: %s", bytes_for(ranks),
                        ranks, strerror(why));
}

void shared_unlink(const char *name)
{
    (void)shm_unlink(name);
}

static void futex(atomic_uint *word, int operation, unsigned value, const struct timespec *most)
{
    (void)syscall(SYS_futex, word, operation, value, most, NULL, 0);
}

/* All ranks have arrived. The last one opens the barrier; the others spin shortly, then sleep. */
static void meet(shared_comm *c)
{
    shared_head *h = c->head;
    const struct timespec most = {0, 50000000};
    const unsigned round = atomic_load(&h->round);
    group_progress(c->base.group);
    if (atomic_fetch_add(&h->arrived, 1) + 1 == (unsigned)c->base.ranks) {
        atomic_store(&h->arrived, 0);
        atomic_fetch_add(&h->round, 1);
        futex(&h->round, FUTEX_WAKE, INT_MAX, NULL);
        return;
    }
    for (int i = 0; i < SPINS; i++)
        if (atomic_load(&h->round) != round) return;
    while (atomic_load(&h->round) == round) futex(&h->round, FUTEX_WAIT, round, &most);
}

static char *slot(const shared_comm *c, int rank)
{
    return (char *)(c->head + 1) + (size_t)(c->set * c->base.ranks + rank) * SLOT;
}

static void shared_close(train_comm *base)
{
    shared_comm *c = (shared_comm *)base;
    munmap(c->head, c->bytes);
    free(c);
}

/* to = the sum of `count` values at `at` bytes of all slots, in the order of the ranks. */
static void sum_slots(const shared_comm *c, void *to, size_t at, comm_type type, int64_t count)
{
    memcpy(to, slot(c, 0) + at, (size_t)count * comm_type_size(type));
    for (int r = 1; r < c->base.ranks; r++) {
        const void *from = slot(c, r) + at;
        for (int64_t i = 0; i < count; i++)
            if (type == COMM_F32)
                ((float *)to)[i] += ((const float *)from)[i];
            else if (type == COMM_F64)
                ((double *)to)[i] += ((const double *)from)[i];
            else
                ((int32_t *)to)[i] += ((const int32_t *)from)[i];
    }
}

/* The elements of a piece, of which a slot holds `parts`. */
static int64_t piece_of(comm_type type, int parts)
{
    return (int64_t)(SLOT / comm_type_size(type)) / parts / 16 * 16;
}

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static void shared_reduce_scatter(train_comm *base, void *part, const void *whole, void *inbox,
                                  comm_type type, int64_t count)
{
    (void)inbox;
    shared_comm *c = (shared_comm *)base;
    const size_t size = comm_type_size(type);
    const int64_t most = piece_of(type, base->ranks);
    for (int64_t at = 0; at < count; at += most) {
        const int64_t piece = smaller(most, count - at);
        for (int r = 0; r < base->ranks; r++)
            memcpy(slot(c, base->rank) + (size_t)(r * piece) * size,
                   (const char *)whole + (size_t)(r * count + at) * size, (size_t)piece * size);
        meet(c);
        sum_slots(c, (char *)part + (size_t)at * size, (size_t)(base->rank * piece) * size, type, piece);
        c->set ^= 1;
    }
}

static void shared_all_gather(train_comm *base, void *whole, const void *part, comm_type type, int64_t count)
{
    shared_comm *c = (shared_comm *)base;
    const size_t size = comm_type_size(type);
    const int64_t most = piece_of(type, 1);
    for (int64_t at = 0; at < count; at += most) {
        const size_t piece = (size_t)smaller(most, count - at) * size;
        memcpy(slot(c, base->rank), (const char *)part + (size_t)at * size, piece);
        meet(c);
        for (int r = 0; r < base->ranks; r++)
            memcpy((char *)whole + (size_t)(r * count + at) * size, slot(c, r), piece);
        c->set ^= 1;
    }
}

static void shared_all_reduce(train_comm *base, void *out, const void *in, comm_type type, int64_t count)
{
    shared_comm *c = (shared_comm *)base;
    const size_t size = comm_type_size(type);
    const int64_t most = piece_of(type, 1);
    for (int64_t at = 0; at < count; at += most) {
        const int64_t piece = smaller(most, count - at);
        memcpy(slot(c, base->rank), (const char *)in + (size_t)at * size, (size_t)piece * size);
        meet(c);
        sum_slots(c, (char *)out + (size_t)at * size, 0, type, piece);
        c->set ^= 1;
    }
}

static void shared_barrier(train_comm *base)
{
    meet((shared_comm *)base);
    ((shared_comm *)base)->set ^= 1;
}

static void nothing(train_comm *c)
{
    (void)c;
}

static void no_turn(train_comm *c, int turn)
{
    (void)c, (void)turn;
}

static const comm_ops shared_ops = {.close = shared_close,
                                    .reduce_scatter = shared_reduce_scatter,
                                    .all_gather = shared_all_gather,
                                    .all_reduce = shared_all_reduce,
                                    .barrier = shared_barrier,
                                    .enter = nothing,
                                    .leave = no_turn,
                                    .wait = no_turn};

train_comm *shared_open(const char *name, group *g, train_device *dv, error *err)
{
    const int rank = group_rank(g), ranks = group_ranks(g);
    shared_comm *c = calloc(1, sizeof *c);
    const int file = c ? shm_open(name, O_RDWR, 0600) : -1;
    void *memory =
        file >= 0 ? mmap(NULL, bytes_for(ranks), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
    const int why = errno;
    if (file >= 0) close(file);
    if (memory == MAP_FAILED) {
        fail(err, ERROR_RUNTIME, "shared memory %s of rank 0: %s (ranks on CPUs must be on one host)", name,
             strerror(why));
        free(c);
        return NULL;
    }
    *c =
        (shared_comm){{&shared_ops, "shared memory", dv, rank, ranks, false, g}, memory, bytes_for(ranks), 0};
    return &c->base;
}
