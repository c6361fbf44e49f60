/* The GPU's memory behind the device table. */
#include "cli/device.h"

#ifdef SMOE_HAVE_CUDA
#include <cuda_runtime_api.h>

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

static bool cuda_set(void *to, int byte, size_t bytes)
{
    return cudaMemset(to, byte, bytes) == cudaSuccess;
}

static bool cuda_sync(void)
{
    return cudaDeviceSynchronize() == cudaSuccess;
}

const device device_cuda = {"cuda",      SMOE_BACKEND_CUDA, cuda_alloc, cuda_release,
                            cuda_upload, cuda_download,     cuda_set,   cuda_sync};
#endif
