/* See nccl.h. Only functions and types that have stayed the same since NCCL 2.10 are used, so they are
 * declared here: building needs no NCCL.
 *
 * The same bits on every run: NCCL's reductions inside the switch (NVLS) sum in any order, so they are off;
 * rings and trees sum in an order that follows from the number of ranks and the GPUs' connections. */
#define _GNU_SOURCE 1
#include "train/cuda/nccl.h"

#include "train/cuda/device.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LEAST_VERSION = 21000, NCCL_SUM = 0 }; // 2.10 has bf16

typedef struct nccl_id {
    char bytes[GROUP_KEY];
} nccl_id;

typedef void *nccl_handle;

typedef struct nccl_functions {
    int (*version)(int *version);
    int (*make_id)(nccl_id *id);
    int (*init)(nccl_handle *comm, int ranks, nccl_id id, int rank);
    int (*destroy)(nccl_handle comm);
    const char *(*error_text)(int status);
    int (*reduce_scatter)(const void *from, void *to, size_t count, int type, int operation, nccl_handle comm,
                          cudaStream_t stream);
    int (*all_gather)(const void *from, void *to, size_t count, int type, nccl_handle comm,
                      cudaStream_t stream);
    int (*all_reduce)(const void *from, void *to, size_t count, int type, int operation, nccl_handle comm,
                      cudaStream_t stream);
} nccl_functions;

typedef struct nccl_comm {
    train_comm base;
    nccl_functions call;
    nccl_handle handle;
    char name[64];
    cudaStream_t side, main; // main: the device's own stream while `side` takes its place
    cudaEvent_t before, turns[2];
} nccl_comm;

static bool find(void *library, const char *name, void *function)
{
    void *found = dlsym(library, name);
    memcpy(function, &found, sizeof found);
    return found != NULL;
}

static bool load(nccl_functions *f, char name[64], error *err)
{
    const char *given = getenv("SMOE_NCCL");
    void *library = dlopen(given ? given : "libnccl.so.2", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    int version = 0;
    if (!library)
        return fail(err, ERROR_RUNTIME,
                    "several GPUs need NCCL, libnccl.so.2 (pip install nvidia-nccl-cu13 and its folder in "
                    "LD_LIBRARY_PATH, or its path in SMOE_NCCL): %s",
                    dlerror());
    if (!find(library, "ncclGetVersion", &f->version) || !find(library, "ncclGetUniqueId", &f->make_id) ||
        !find(library, "ncclCommInitRank", &f->init) || !find(library, "ncclCommDestroy", &f->destroy) ||
        !find(library, "ncclGetErrorString", &f->error_text) ||
        !find(library, "ncclReduceScatter", &f->reduce_scatter) ||
        !find(library, "ncclAllGather", &f->all_gather) || !find(library, "ncclAllReduce", &f->all_reduce) ||
        f->version(&version) != 0)
        return fail(err, ERROR_RUNTIME, "NCCL: %s lacks a function", given ? given : "libnccl.so.2");
    if (version < LEAST_VERSION)
        return fail(err, ERROR_RUNTIME, "NCCL has version code %d, at least %d (2.10) is needed", version,
                    LEAST_VERSION);
    snprintf(name, 64, "NCCL %d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    return true;
}

/* NCCL reads its settings when the first communicator is made. */
static void set_defaults(void)
{
    setenv("NCCL_NVLS_ENABLE", "0", 0);
}

bool nccl_key(unsigned char key[GROUP_KEY], error *err)
{
    nccl_functions f;
    nccl_id id;
    char name[64];
    set_defaults();
    if (!load(&f, name, err)) return false;
    const int status = f.make_id(&id);
    if (status) return fail(err, ERROR_RUNTIME, "%s: no identifier: %s", name, f.error_text(status));
    memcpy(key, id.bytes, GROUP_KEY);
    return true;
}

static nccl_comm *of(train_comm *c)
{
    return (nccl_comm *)c;
}

static int type_of(comm_type type)
{
    static const int types[] = {[COMM_F32] = 7, [COMM_BF16] = 9, [COMM_F64] = 8, [COMM_I32] = 2};
    return types[type];
}

static void note(train_comm *c, int status, const char *doing)
{
    if (status && !c->device->failure.code)
        fail(&c->device->failure, ERROR_RUNTIME, "%s, %s: %s", c->name, doing,
             of(c)->call.error_text(status));
    group_progress(c->group);
}

static void nccl_close(train_comm *base)
{
    nccl_comm *c = of(base);
    if (c->handle) (void)c->call.destroy(c->handle);
    for (int i = 0; i < 2; i++)
        if (c->turns[i]) (void)cudaEventDestroy(c->turns[i]);
    if (c->before) (void)cudaEventDestroy(c->before);
    if (c->side) (void)cudaStreamDestroy(c->side);
    free(c);
}

static void nccl_reduce_scatter(train_comm *c, void *part, const void *whole, comm_type type, int64_t count)
{
    note(c,
         of(c)->call.reduce_scatter(whole, part, (size_t)count, type_of(type), NCCL_SUM, of(c)->handle,
                                    c->device->stream),
         "reduce-scatter");
}

static void nccl_all_gather(train_comm *c, void *whole, const void *part, comm_type type, int64_t count)
{
    note(c,
         of(c)->call.all_gather(part, whole, (size_t)count, type_of(type), of(c)->handle, c->device->stream),
         "all-gather");
}

static void nccl_all_reduce(train_comm *c, void *out, const void *in, comm_type type, int64_t count)
{
    note(c,
         of(c)->call.all_reduce(in, out, (size_t)count, type_of(type), NCCL_SUM, of(c)->handle,
                                c->device->stream),
         "all-reduce");
}

/* A sum that no rank has before all have come. */
static void nccl_barrier(train_comm *c)
{
    cuda_device *cuda = cuda_of(c->device);
    nccl_all_reduce(c, cuda->small, cuda->small, COMM_F64, 1);
    cuda_note(c->device, cudaStreamSynchronize(c->device->stream), "waiting for the other ranks");
}

static void nccl_enter(train_comm *c)
{
    cuda_note(c->device, cudaEventRecord(of(c)->before, c->device->stream), "an event");
    cuda_note(c->device, cudaStreamWaitEvent(of(c)->side, of(c)->before, 0), "an event");
    of(c)->main = c->device->stream;
    c->device->stream = of(c)->side;
}

static void nccl_leave(train_comm *c, int turn)
{
    c->device->stream = of(c)->main;
    cuda_note(c->device, cudaEventRecord(of(c)->turns[turn], of(c)->side), "an event");
}

static void nccl_wait(train_comm *c, int turn)
{
    cuda_note(c->device, cudaStreamWaitEvent(c->device->stream, of(c)->turns[turn], 0), "an event");
}

static const comm_ops nccl_ops = {.close = nccl_close,
                                  .reduce_scatter = nccl_reduce_scatter,
                                  .all_gather = nccl_all_gather,
                                  .all_reduce = nccl_all_reduce,
                                  .barrier = nccl_barrier,
                                  .enter = nccl_enter,
                                  .leave = nccl_leave,
                                  .wait = nccl_wait};

static bool start(nccl_comm *c, const unsigned char key[GROUP_KEY], error *err)
{
    nccl_id id;
    int lowest = 0, highest = 0;
    memcpy(id.bytes, key, GROUP_KEY);
    set_defaults();
    if (!load(&c->call, c->name, err)) return false;
    if (cudaDeviceGetStreamPriorityRange(&lowest, &highest) != cudaSuccess ||
        cudaStreamCreateWithPriority(&c->side, cudaStreamNonBlocking, highest) != cudaSuccess ||
        cudaEventCreateWithFlags(&c->before, cudaEventDisableTiming) != cudaSuccess ||
        cudaEventCreateWithFlags(&c->turns[0], cudaEventDisableTiming) != cudaSuccess ||
        cudaEventCreateWithFlags(&c->turns[1], cudaEventDisableTiming) != cudaSuccess)
        return fail(err, ERROR_RUNTIME, "the GPU gives no stream: %s",
                    cudaGetErrorString(cudaGetLastError()));
    const int status = c->call.init(&c->handle, c->base.ranks, id, c->base.rank);
    return !status ||
           fail(err, ERROR_RUNTIME, "%s does not connect the GPUs: %s", c->name, c->call.error_text(status));
}

train_comm *nccl_open(const unsigned char key[GROUP_KEY], group *g, train_device *dv, error *err)
{
    nccl_comm *c = calloc(1, sizeof *c);
    if (!c) {
        fail(err, ERROR_RUNTIME, "out of memory: NCCL");
        return NULL;
    }
    c->base = (train_comm){&nccl_ops, c->name, dv, group_rank(g), group_ranks(g), g};
    if (start(c, key, err)) return &c->base;
    nccl_close(&c->base);
    return NULL;
}
