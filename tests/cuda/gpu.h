/* Device memory for the programs of this folder: buffers between canaries, poisoned with 0xFF (NaN). */
#ifndef TESTS_CUDA_GPU_H
#define TESTS_CUDA_GPU_H

#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK_CUDA(call)                                                                                     \
    do {                                                                                                     \
        const cudaError_t error_ = (call);                                                                   \
        if (error_ != cudaSuccess) {                                                                         \
            printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_));                \
            exit(3);                                                                                         \
        }                                                                                                    \
    } while (0)

enum { CANARY_BYTES = 4096, CANARY = 0xA5 };

typedef struct gpu_buffer {
    char *memory; /* starts after the first canary */
    size_t bytes;
} gpu_buffer;

static inline gpu_buffer gpu_alloc(size_t bytes)
{
    const size_t rounded = (bytes + 255) / 256 * 256;
    gpu_buffer b = {NULL, rounded};
    CHECK_CUDA(cudaMalloc((void **)&b.memory, rounded + 2 * CANARY_BYTES));
    CHECK_CUDA(cudaMemset(b.memory, CANARY, rounded + 2 * CANARY_BYTES));
    b.memory += CANARY_BYTES;
    CHECK_CUDA(cudaMemset(b.memory, 0xFF, rounded));
    CHECK_CUDA(cudaDeviceSynchronize()); /* non-blocking streams do not wait for the memsets */
    return b;
}

static inline gpu_buffer gpu_copy(const void *from, size_t bytes)
{
    const gpu_buffer b = gpu_alloc(bytes);
    CHECK_CUDA(cudaMemcpy(b.memory, from, bytes, cudaMemcpyHostToDevice));
    /* cudaMemcpy from pageable memory may return before the last bytes arrive, and a non-blocking stream does
     * not wait for them. */
    CHECK_CUDA(cudaDeviceSynchronize());
    return b;
}

static inline void *gpu_read(const void *from, size_t bytes)
{
    void *host = malloc(bytes ? bytes : 1);
    CHECK_CUDA(cudaMemcpy(host, from, bytes, cudaMemcpyDeviceToHost));
    return host;
}

/* Frees a buffer; returns 1 if a canary was overwritten. */
static inline int gpu_free(gpu_buffer b)
{
    if (!b.memory) return 0;
    unsigned char canary[2 * CANARY_BYTES];
    CHECK_CUDA(cudaMemcpy(canary, b.memory - CANARY_BYTES, CANARY_BYTES, cudaMemcpyDeviceToHost));
    CHECK_CUDA(cudaMemcpy(canary + CANARY_BYTES, b.memory + b.bytes, CANARY_BYTES, cudaMemcpyDeviceToHost));
    CHECK_CUDA(cudaFree(b.memory - CANARY_BYTES));
    for (int i = 0; i < 2 * CANARY_BYTES; i++)
        if (canary[i] != CANARY) return 1;
    return 0;
}

#endif
