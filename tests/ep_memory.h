/* Memory and contexts of ep_case.h: shared memory and the CPU backend; with TEST_ON_CUDA managed memory,
 * which host and device use, and the cuda backend. */
#ifndef TESTS_EP_MEMORY_H
#define TESTS_EP_MEMORY_H

#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include <setjmp.h>
#include <smoe_ep.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#include <cmocka.h>

#ifdef TEST_ON_CUDA
#include "tests/cuda/open_cuda.h"

#include <cuda_runtime_api.h>
#endif

enum { EP_PAGE = 4096 };

#ifdef TEST_ON_CUDA
static inline void ep_map(char **at, size_t pages)
{
    assert_int_equal(cudaMallocManaged((void **)at, pages + EP_PAGE, cudaMemAttachGlobal), cudaSuccess);
}

static inline void ep_unmap(char *at, size_t bytes)
{
    (void)bytes;
    cudaFree(at);
}

/* Host code may read what kernels have written, and write what they will read. */
static inline void ep_settle(void)
{
    const cudaError_t status = cudaDeviceSynchronize();
    if (status != cudaSuccess) fail_msg("%s", cudaGetErrorString(status));
}

static inline smoe_context *ep_context(int threads)
{
    (void)threads;
    return open_cuda();
}
#else
/* It ends, but for alignment to 64, at a page that nobody may touch. */
static inline void ep_map(char **at, size_t pages)
{
    *at = mmap(NULL, pages + EP_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(*at != MAP_FAILED);
    assert_int_equal(mprotect(*at + pages, EP_PAGE, PROT_NONE), 0);
}

static inline void ep_unmap(char *at, size_t bytes)
{
    munmap(at, bytes + EP_PAGE);
}

static inline void ep_settle(void)
{
}

static inline smoe_context *ep_context(int threads)
{
    smoe_context *context;
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.threads = threads;
    assert_int_equal(smoe_create(&context, &options), SMOE_OK);
    return context;
}
#endif

#endif
