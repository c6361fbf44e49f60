/* See nccl.h. Only functions and types that have stayed the same since NCCL 2.10, or since 2.28 for memory
 * that ranks share, are used, so they are declared here: building needs no NCCL.
 *
 * Two ways. On one host whose GPUs reach each other's memory, copy engines move the parts of gradients and
 * weights (NCCL 2.28 or later): the SMs are left to the backward, but for a sum over the received parts, in
 * f32 and in the order of the ranks. Else rings of CTAS CTAs, and the library's stages take so many SMs less
 * in a backward: a persistent kernel that counts on all of them waits for the last.
 *
 * The same bits on every run: NCCL's reductions inside the switch (NVLS) sum in any order, so they are off;
 * rings sum in an order that follows from the number of ranks and the GPUs' connections. */
#define _GNU_SOURCE 1
#include "train/cuda/nccl.h"

#include "train/cuda/device.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LEAST_VERSION = 21000, CTAS = 16 }; // 2.10 has bf16
enum { NCCL_SUM = 0, NCCL_MIN = 3, NCCL_WIN_COLL_SYMMETRIC = 1 };
enum { MOST_WINDOWS = 4, PROBE_BYTES = 4096 };

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
    /* of NCCL 2.28, all or none */
    int (*all_to_all)(const void *from, void *to, size_t count, int type, nccl_handle comm,
                      cudaStream_t stream);
    int (*share)(nccl_handle comm, void *memory, size_t bytes, void **window, int flags);
    int (*unshare)(nccl_handle comm, void *window);
    cuda_memory memory;
} nccl_functions;

/* Memory that the others reach. */
typedef struct nccl_window {
    void *memory, *window;
} nccl_window;

typedef struct nccl_comm {
    train_comm base;
    nccl_functions call;
    nccl_handle handle;
    char name[80];
    nccl_window windows[MOST_WINDOWS];
    cudaStream_t side, main; // main: the device's own stream while `side` takes its place
    cudaEvent_t before, turns[2];
} nccl_comm;

static bool find(void *library, const char *name, void *function)
{
    void *found = dlsym(library, name);
    memcpy(function, &found, sizeof found);
    return found != NULL;
}

static bool load(nccl_functions *f, char name[80], error *err)
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
    if (!find(library, "ncclAlltoAll", &f->all_to_all) ||
        !find(library, "ncclCommWindowRegister", &f->share) ||
        !find(library, "ncclCommWindowDeregister", &f->unshare) ||
        !find(library, "ncclMemAlloc", &f->memory.allocate) ||
        !find(library, "ncclMemFree", &f->memory.release))
        f->share = NULL;
    snprintf(name, 80, "NCCL %d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    return true;
}

/* NCCL reads its settings when the first communicator is made. */
static void set_defaults(void)
{
    char ctas[16];
    snprintf(ctas, sizeof ctas, "%d", CTAS);
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    setenv("NCCL_CTA_POLICY", "2", 0); // copy engines where they can
    if (!getenv("NCCL_MAX_CTAS")) setenv("NCCL_MIN_CTAS", ctas, 0);
    setenv("NCCL_MAX_CTAS", ctas, 0);
}

bool nccl_key(unsigned char key[GROUP_KEY], error *err)
{
    nccl_functions f;
    nccl_id id;
    char name[80];
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
    cuda_of(base->device)->memory = NULL;
    free(c);
}

/* By copy engines: every rank's part arrives in the inbox. No rank writes there before this one has come to
 * the next exchange, so the sum is done by then. */
static void exchange_and_add(train_comm *c, void *part, const void *whole, void *inbox, comm_type type,
                             int64_t count)
{
    const smoe_type of_values = type == COMM_F32 ? SMOE_TYPE_F32 : SMOE_TYPE_BF16;
    note(c,
         of(c)->call.all_to_all(whole, inbox, (size_t)count, type_of(type), of(c)->handle, c->device->stream),
         "all-to-all");
    cuda_note(c->device, kernel_add_parts(part, inbox, of_values, count, c->ranks, c->device->stream),
              "a sum over the ranks");
}

static void nccl_reduce_scatter(train_comm *c, void *part, const void *whole, void *inbox, comm_type type,
                                int64_t count)
{
    if (c->has_inbox) {
        exchange_and_add(c, part, whole, inbox, type, count);
        return;
    }
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

/* ---- memory that ranks share ---- */

static bool nccl_share(train_comm *base, void *memory, size_t bytes, error *err)
{
    nccl_comm *c = of(base);
    nccl_window *w = c->windows;
    if (!base->has_inbox) return true;
    while (w < c->windows + MOST_WINDOWS && w->window) w++;
    if (w == c->windows + MOST_WINDOWS)
        return fail(err, ERROR_RUNTIME, "%s: more than %d pieces of memory are shared", base->name,
                    MOST_WINDOWS);
    const int status = c->call.share(c->handle, memory, bytes, &w->window, NCCL_WIN_COLL_SYMMETRIC);
    w->memory = memory;
    return (!status && w->window) || fail(err, ERROR_RUNTIME, "%s does not share %.2f GB of memory: %s",
                                          base->name, (double)bytes / 1e9, c->call.error_text(status));
}

static void nccl_unshare(train_comm *base, void *memory)
{
    nccl_comm *c = of(base);
    for (nccl_window *w = c->windows; w < c->windows + MOST_WINDOWS; w++) {
        if (w->memory != memory) continue;
        if (w->window) (void)c->call.unshare(c->handle, w->window);
        *w = (nccl_window){0};
    }
}

/* Has the user forbidden what copy engines need? NCCL gives windows all the same, and moves the data by
 * kernels or through the network. */
static bool forbids(void)
{
    static const char *const names[] = {"NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_HOSTID"};
    const char *policy = getenv("NCCL_CTA_POLICY");
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (getenv(names[i])) return true;
    return strcmp(policy, "2") != 0 && strcmp(policy, "ZERO") != 0;
}

/* Can this rank share memory so that copy engines move it? NCCL gives no window where the GPUs do not reach
 * each other's memory. */
static bool probe(nccl_comm *c)
{
    void *memory = NULL, *window = NULL;
    if (!c->call.share || forbids() || c->call.memory.allocate(&memory, PROBE_BYTES) != 0) return false;
    const bool shared =
        !c->call.share(c->handle, memory, PROBE_BYTES, &window, NCCL_WIN_COLL_SYMMETRIC) && window != NULL;
    if (window) (void)c->call.unshare(c->handle, window);
    (void)c->call.memory.release(memory);
    (void)cudaGetLastError();
    return shared;
}

/* A number of this host, the same on all its ranks. */
static double host_number(void)
{
    unsigned number = 0;
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (!file) return 0.0;
    if (fscanf(file, "%8x", &number) != 1) number = 0;
    fclose(file);
    return (double)number;
}

/* The way that all ranks take. */
static bool choose_way(nccl_comm *c, error *err)
{
    train_device *dv = c->base.device;
    cuda_device *cuda = cuda_of(dv);
    const double host = host_number();
    double least[3] = {probe(c) ? 1.0 : 0.0, host, -host};
    dv->ops->upload(dv, cuda->small, least, sizeof least);
    note(&c->base,
         c->call.all_reduce(cuda->small, cuda->small, 3, type_of(COMM_F64), NCCL_MIN, c->handle, dv->stream),
         "all-reduce");
    dv->ops->download(dv, least, cuda->small, sizeof least);
    c->base.has_inbox = least[0] == 1.0 && least[1] == -least[2];
    if (c->base.has_inbox) {
        cuda->memory = &c->call.memory;
        strcat(c->name, ", copy engines");
    } else {
        const int ctas = atoi(getenv("NCCL_MAX_CTAS"));
        dv->backward_sms = ctas > 0 && ctas < cuda->processors ? cuda->processors - ctas : 0;
    }
    return dv->ops->finish(dv, err);
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
                                  .share = nccl_share,
                                  .unshare = nccl_unshare,
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
    if (status)
        return fail(err, ERROR_RUNTIME, "%s does not connect the GPUs: %s", c->name,
                    c->call.error_text(status));
    return choose_way(c, err);
}

train_comm *nccl_open(const unsigned char key[GROUP_KEY], group *g, train_device *dv, error *err)
{
    nccl_comm *c = calloc(1, sizeof *c);
    if (!c) {
        fail(err, ERROR_RUNTIME, "out of memory: NCCL");
        return NULL;
    }
    c->base = (train_comm){&nccl_ops, c->name, dv, group_rank(g), group_ranks(g), false, g};
    if (start(c, key, err)) return &c->base;
    nccl_close(&c->base);
    return NULL;
}
