/* The device table on a GPU. */
#include "harness/device.h"

#ifdef SMOE_HAVE_CUDA
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>

static void *cuda_alloc(size_t bytes)
{
    void *memory = NULL;
    return cudaMalloc(&memory, bytes ? bytes : 1) == cudaSuccess ? memory : NULL;
}

static void cuda_release(void *memory)
{
    (void)cudaFree(memory);
}

static bool cuda_upload(void *to, const void *from_host, size_t bytes)
{
    return cudaMemcpy(to, from_host, bytes, cudaMemcpyHostToDevice) == cudaSuccess;
}

static bool cuda_download(void *to_host, const void *from, size_t bytes)
{
    return cudaMemcpy(to_host, from, bytes, cudaMemcpyDeviceToHost) == cudaSuccess;
}

static bool cuda_copy(void *to, const void *from, size_t bytes)
{
    return cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToDevice) == cudaSuccess;
}

static bool cuda_set(void *to, int byte, size_t bytes)
{
    return cudaMemset(to, byte, bytes) == cudaSuccess;
}

static bool cuda_use(int number)
{
    return cudaSetDevice(number) == cudaSuccess;
}

static int cuda_current(void)
{
    int number = -1;
    (void)cudaGetDevice(&number);
    return number;
}

static bool cuda_sync(void)
{
    return cudaDeviceSynchronize() == cudaSuccess;
}

static uint64_t cuda_available(void)
{
    size_t free_bytes = 0, total = 0;
    return cudaMemGetInfo(&free_bytes, &total) == cudaSuccess ? free_bytes : 0;
}

static void cuda_describe(char *text, size_t size, int threads)
{
    struct cudaDeviceProp properties;
    int which = 0;
    (void)threads;
    const bool good =
        cudaGetDevice(&which) == cudaSuccess && cudaGetDeviceProperties(&properties, which) == cudaSuccess;
    snprintf(text, size, "%s", good ? properties.name : "unknown device");
}

/* A stream of the default kind: what is copied and filled above, on the default stream, is done before its
 * work starts and starts when its work is done. */
static bool cuda_open_stream(void **stream)
{
    cudaStream_t made = NULL;
    if (cudaStreamCreate(&made) != cudaSuccess) return false;
    *stream = made;
    return true;
}

static void cuda_close_stream(void *stream)
{
    if (stream) (void)cudaStreamDestroy(stream);
}

static bool cuda_replay(bool (*enqueue)(void *user, void *stream), void *user, int times)
{
    cudaStream_t stream;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t run = NULL;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return false;
    bool good = cudaDeviceSynchronize() == cudaSuccess &&
                cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess;
    good = good && enqueue(user, stream);
    good = cudaStreamEndCapture(stream, &graph) == cudaSuccess && good;
    good = good && cudaGraphInstantiate(&run, graph, 0) == cudaSuccess;
    for (int i = 0; good && i < times; i++) good = cudaGraphLaunch(run, stream) == cudaSuccess;
    good = cudaStreamSynchronize(stream) == cudaSuccess && good;
    if (run) (void)cudaGraphExecDestroy(run);
    if (graph) (void)cudaGraphDestroy(graph);
    (void)cudaStreamDestroy(stream);
    return good;
}

/* Copies that go through L2 and do not fit into it, on a stream that waits for no other. */
enum { TRAFFIC_BYTES = 64 << 20, TRAFFIC_COPIES = 32 }; // one takes 30 us

typedef struct traffic {
    cudaStream_t stream;
    void *memory[2];
} traffic;

static void cuda_close_traffic(void *closed)
{
    traffic *t = closed;
    if (!t) return;
    if (t->stream) (void)cudaStreamDestroy(t->stream);
    for (int i = 0; i < 2; i++) (void)cudaFree(t->memory[i]); // waits for the copies
    free(t);
}

static void *cuda_open_traffic(void)
{
    traffic *t = calloc(1, sizeof *t);
    if (t && cudaStreamCreateWithFlags(&t->stream, cudaStreamNonBlocking) == cudaSuccess &&
        cudaMalloc(&t->memory[0], TRAFFIC_BYTES) == cudaSuccess &&
        cudaMalloc(&t->memory[1], TRAFFIC_BYTES) == cudaSuccess)
        return t;
    cuda_close_traffic(t);
    return NULL;
}

static bool cuda_drive_traffic(void *driven)
{
    const traffic *t = driven;
    bool good = true;
    for (int i = 0; good && i < TRAFFIC_COPIES; i++)
        good = cudaMemcpyAsync(t->memory[(i + 1) % 2], t->memory[i % 2], TRAFFIC_BYTES,
                               cudaMemcpyDeviceToDevice, t->stream) == cudaSuccess;
    return good;
}

const device device_cuda = {
    "cuda",        SMOE_BACKEND_CUDA, cuda_alloc,         cuda_release,      cuda_upload,
    cuda_download, cuda_copy,         cuda_set,           cuda_use,          cuda_current,
    cuda_sync,     cuda_available,    cuda_describe,      cuda_open_stream,  cuda_close_stream,
    cuda_replay,   cuda_open_traffic, cuda_drive_traffic, cuda_close_traffic};
#endif
