/* A layer whose experts are spread over four ranks, on the GPUs of this host (smoe_ep.h). Rank r has GPU r;
 * if there are fewer, ranks share them. Ranks are threads, whose windows all GPUs reach by peer access, or
 * with the argument "processes" processes, which open the windows by CUDA IPC. Each rank compares its output
 * with that of a layer without ranks.
 *
 *   cc ep_cuda_layer.c $(pkg-config --cflags --libs smoe) -lcudart -lpthread -lm */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include <cuda_runtime_api.h>
#include <math.h>
#include <pthread.h>
#include <smoe_ep.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { W = 4, T = 256, D = 256, N = 128, E = 16, K = 4, OWN = E / W };
enum { BLOCK = 2 << 20 }; /* CUDA IPC shares whole blocks; a smaller window may be in one with other memory */

/* Shared by all threads or processes. */
typedef struct meeting {
    pthread_barrier_t barrier;
    void *windows[W];              /* threads */
    cudaIpcMemHandle_t handles[W]; /* processes */
    int processes;
} meeting;
static meeting *all;

static void cuda(cudaError_t status, const char *what)
{
    if (status == cudaSuccess) return;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
    _exit(3); /* several ranks may fail at once, and only one thread may call exit */
}

static void check(smoe_context *context, smoe_status status)
{
    if (status == SMOE_OK) return;
    fprintf(stderr, "%s\n", smoe_last_error(context));
    _exit(3);
}

static void *memory(size_t bytes)
{
    void *p;
    cuda(cudaMalloc(&p, bytes), "cudaMalloc");
    cuda(cudaMemset(p, 0, bytes), "cudaMemset");
    return p;
}

/* bf16 (the upper half of a float). The same values wherever element `first` + i of a tensor is needed. */
static void *fill(long first, long count, float scale)
{
    uint16_t *host = malloc((size_t)count * sizeof *host);
    for (long i = 0; i < count; i++) {
        const float value = scale * sinf(0.7f * (float)((first + i) % 9973));
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        host[i] = (uint16_t)(bits >> 16);
    }
    void *p = memory((size_t)count * sizeof *host);
    cuda(cudaMemcpy(p, host, (size_t)count * sizeof *host, cudaMemcpyHostToDevice), "cudaMemcpy");
    free(host);
    return p;
}

static int tokens_of(int rank)
{
    return T - 10 * rank;
}

static smoe_layer describe(int ranks, int tokens)
{
    smoe_layer layer = SMOE_LAYER_INIT; /* bf16, SwiGLU */
    layer.tokens = tokens;
    layer.hidden = D;
    layer.intermediate = N;
    layer.experts = E;
    layer.topk = K;
    layer.logits_type = SMOE_TYPE_BF16;
    layer.ranks = ranks;
    layer.max_tokens = ranks ? T : 0;
    layer.waves = ranks ? 2 : 0;
    return layer;
}

/* Forward and backward on the tokens of `rank` with `experts` experts from `first_expert` on; O to `out`. */
static void run(smoe_context *context, const smoe_layer *layer, smoe_ep *ep, int rank, int first_expert,
                int experts, uint16_t *out)
{
    smoe_sizes sizes = SMOE_SIZES_INIT;
    check(context, smoe_query_sizes(context, layer, &sizes));
    const long tokens = tokens_of(rank), w1 = 2L * N * D, w2 = (long)D * N;
    smoe_forward_args f = SMOE_FORWARD_ARGS_INIT;
    f.x = fill(rank * T * D, tokens * D, 1.0f);
    f.logits = fill(rank * T * E + 5, tokens * E, 3.0f);
    f.w1 = fill(first_expert * w1, experts * w1, 0.2f);
    f.w2 = fill(first_expert * w2 + 3, experts * w2, 0.2f);
    f.out = memory((size_t)(tokens * D) * 2);
    f.saved = memory(f.saved_size = sizes.saved_buffer_bytes);
    f.scratch = memory(f.scratch_size = sizes.scratch_forward_bytes);
    f.ep = ep;

    smoe_backward_args b = SMOE_BACKWARD_ARGS_INIT;
    b.x = f.x;
    b.logits = f.logits;
    b.w1 = f.w1;
    b.w2 = f.w2;
    b.saved = f.saved;
    b.saved_size = f.saved_size;
    b.dout = f.out; /* the gradient of half the sum of O^2 */
    b.dx = memory((size_t)(tokens * D) * 2);
    b.dw1 = memory((size_t)(experts * w1) * 4);
    b.dw2 = memory((size_t)(experts * w2) * 4);
    b.scratch = memory(b.scratch_size = sizes.scratch_backward_bytes);
    b.ep = ep;
    cudaStream_t stream;
    cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    /* Ranks may share a GPU. There a rank's copies and allocations could wait for a kernel of another rank
     * that waits for this one, so all are done first. */
    if (ep) pthread_barrier_wait(&all->barrier);
    for (int step = 0; step < 3; step++) {
        check(context, smoe_layer_forward(context, layer, &f, stream));
        check(context, smoe_layer_backward(context, layer, &b, stream));
    }
    cuda(cudaStreamSynchronize(stream), "the layer");
    if (ep) check(context, smoe_ep_status(ep));
    cuda(cudaMemcpy(out, f.out, (size_t)(tokens * D) * 2, cudaMemcpyDeviceToHost), "cudaMemcpy");
} /* this example frees nothing but contexts, groups and windows */

/* windows[r] becomes the address at which this rank reaches the window of rank r. The barrier comes after all
 * windows have been zeroed. */
static void share_windows(void *own, int rank, int device, int devices, void *windows[W])
{
    if (all->processes)
        cuda(cudaIpcGetMemHandle(&all->handles[rank], own), "cudaIpcGetMemHandle");
    else
        all->windows[rank] = own;
    cuda(cudaDeviceSynchronize(), "a window");
    pthread_barrier_wait(&all->barrier);
    for (int other = 0; !all->processes && other < devices && other < W; other++) {
        if (other == device) continue;
        const cudaError_t status = cudaDeviceEnablePeerAccess(other, 0);
        if (status != cudaErrorPeerAccessAlreadyEnabled) cuda(status, "cudaDeviceEnablePeerAccess");
        cudaGetLastError();
    }
    for (int r = 0; r < W; r++) {
        windows[r] = r == rank ? own : all->windows[r];
        if (all->processes && r != rank)
            cuda(cudaIpcOpenMemHandle(&windows[r], all->handles[r], cudaIpcMemLazyEnablePeerAccess),
                 "cudaIpcOpenMemHandle");
    }
}

static float value(uint16_t bf16)
{
    const uint32_t bits = (uint32_t)bf16 << 16;
    float v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

static void compare(int rank, const uint16_t *out, const uint16_t *expected)
{
    float error = 0.0f, largest = 0.0f;
    for (int i = 0; i < tokens_of(rank) * D; i++) {
        error = fmaxf(error, fabsf(value(out[i]) - value(expected[i])));
        largest = fmaxf(largest, fabsf(value(expected[i])));
    }
    printf("rank %d: %d tokens, largest output %.3f, largest difference %.1e\n", rank, tokens_of(rank),
           (double)largest, (double)error);
    fflush(stdout);
    if (!(error <= 1e-2f * largest)) _exit(1);
}

static void *run_rank(void *number)
{
    const int rank = *(const int *)number, tokens = tokens_of(rank);
    int devices = 0;
    cuda(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    const int device = rank % devices;
    cuda(cudaSetDevice(device), "cudaSetDevice");
    char why[256] = "";
    smoe_context *context;
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.backend = SMOE_BACKEND_CUDA, options.device = device;
    options.error_text = why, options.error_size = sizeof why;
    if (smoe_create(&context, &options) != SMOE_OK) fprintf(stderr, "%s\n", why), _exit(3);

    const smoe_layer layer = describe(W, tokens), whole = describe(0, tokens);
    smoe_sizes sizes = SMOE_SIZES_INIT;
    check(context, smoe_query_sizes(context, &layer, &sizes));
    void *windows[W], *own = memory((sizes.window_bytes + BLOCK - 1) / BLOCK * BLOCK);
    share_windows(own, rank, device, devices, windows);
    smoe_ep *ep;
    smoe_ep_options group = SMOE_EP_OPTIONS_INIT;
    group.rank = rank;
    group.windows = windows;
    group.timeout_ms = 20000;
    check(context, smoe_ep_create(&ep, context, &layer, &group));
    static _Thread_local uint16_t out[T * D], expected[T * D];
    run(context, &layer, ep, rank, rank * OWN, OWN, out);
    run(context, &whole, NULL, rank, 0, E, expected);
    compare(rank, out, expected);
    smoe_ep_destroy(ep);
    smoe_destroy(context);
    pthread_barrier_wait(&all->barrier); /* nobody writes to a window any more */
    for (int r = 0; r < W && all->processes; r++)
        if (r != rank) cudaIpcCloseMemHandle(windows[r]);
    cudaFree(own);
    return NULL;
}

int main(int argc, char **argv)
{
    static int ranks[W] = {0, 1, 2, 3};
    pthread_t threads[W];
    pid_t children[W];
    int failed = 0;
    alarm(120); /* the end of a rank that waits in the barrier for one that has failed */
    /* Of several ranks in one process: a kernel that is loaded late could wait for one that waits for a rank;
     * and kernels that wait and those that they wait for are in different queues, also on one GPU. */
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) return 3;
    all->processes = argc > 1 && strcmp(argv[1], "processes") == 0;
    pthread_barrierattr_t shared;
    pthread_barrierattr_init(&shared);
    pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&all->barrier, &shared, W);
    for (int r = 0; r < W; r++) { /* a process forks before it uses CUDA */
        if (!all->processes) {
            if (pthread_create(&threads[r], NULL, run_rank, &ranks[r])) return 3;
        } else if ((children[r] = fork()) == 0) {
            run_rank(&ranks[r]);
            _exit(0);
        } else if (children[r] < 0) {
            return 3;
        }
    }
    for (int r = 0; r < W; r++) {
        int how = 0;
        if (all->processes)
            waitpid(children[r], &how, 0);
        else
            pthread_join(threads[r], NULL);
        failed |= how != 0;
    }
    return failed;
}
