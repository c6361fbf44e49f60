/* See cublas.h. */
#include "cli/bench/cublas.h"

#ifdef SMOE_HAVE_CUDA
#ifdef SMOE_HAVE_CUBLAS
#include <cublas_v2.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

struct cublas {
    void *library;
    cublasHandle_t handle;
    __typeof__(cublasCreate_v2) *create;
    __typeof__(cublasDestroy_v2) *destroy;
    __typeof__(cublasSetStream_v2) *set_stream;
    __typeof__(cublasSetWorkspace_v2) *set_workspace;
    __typeof__(cublasGemmStridedBatchedEx) *multiply;
};

#define TEXT_OF(value)   #value
#define LIBRARY(version) "libcublas.so." TEXT_OF(version)

/* function: where the pointer to the function goes. */
static bool find(const cublas *in, const char *name, void *function)
{
    void *found = dlsym(in->library, name);
    memcpy(function, &found, sizeof found);
    return found != NULL;
}

/* By name as the system finds it, the version of the header first; where the build found it; where the
 * toolkit is by habit. These five functions are the same since version 11. Once loaded it stays: half a
 * gigabyte that the next problem would load again. */
static void *open_library(void)
{
    static const char *const names[] = {LIBRARY(CUBLAS_VER_MAJOR), "libcublas.so.13", "libcublas.so.12",
                                        SMOE_CUBLAS_PATH, "/usr/local/cuda/lib64/libcublas.so"};
    void *opened = NULL;
    for (size_t i = 0; !opened && i < sizeof names / sizeof names[0]; i++)
        opened = dlopen(names[i], RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    return opened;
}

static bool load(cublas *made)
{
    made->library = open_library();
    return made->library && find(made, "cublasCreate_v2", &made->create) &&
           find(made, "cublasDestroy_v2", &made->destroy) &&
           find(made, "cublasSetStream_v2", &made->set_stream) &&
           find(made, "cublasSetWorkspace_v2", &made->set_workspace) &&
           find(made, "cublasGemmStridedBatchedEx", &made->multiply);
}

static bool start(cublas *with, void *stream, void *workspace, size_t workspace_bytes)
{
    return with->create(&with->handle) == CUBLAS_STATUS_SUCCESS &&
           with->set_stream(with->handle, stream) == CUBLAS_STATUS_SUCCESS && // takes a workspace away
           with->set_workspace(with->handle, workspace, workspace_bytes) == CUBLAS_STATUS_SUCCESS;
}

cublas *cublas_open(void *stream, void *workspace, size_t workspace_bytes)
{
    cublas *opened = calloc(1, sizeof *opened);
    if (opened && load(opened) && start(opened, stream, workspace, workspace_bytes)) return opened;
    cublas_close(opened);
    return NULL;
}

void cublas_close(cublas *closed)
{
    if (!closed) return;
    if (closed->handle) (void)closed->destroy(closed->handle);
    if (closed->library) (void)dlclose(closed->library);
    free(closed);
}

/* cuBLAS's matrices are column-major and ours are row-major, so it computes C^T = B^T A^T. */
bool cublas_multiply(const cublas *with, smoe_type type, bool transpose_a, bool transpose_b, int64_t count,
                     int64_t m, int64_t n, int64_t k, const void *a, const void *b, void *c, error *err)
{
    const float one = 1, zero = 0;
    const cudaDataType_t stored = type == SMOE_TYPE_BF16 ? CUDA_R_16BF : CUDA_R_16F;
    const cublasStatus_t status =
        with->multiply(with->handle, transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                       transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, (int)n, (int)m, (int)k, &one, b, stored,
                       (int)(transpose_b ? k : n), n * k, a, stored, (int)(transpose_a ? m : k), m * k, &zero,
                       c, stored, (int)n, m * n, (int)count, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    if (status == CUBLAS_STATUS_SUCCESS) return true;
    return fail(err, ERROR_RUNTIME, "cublasGemmStridedBatchedEx: status %d", (int)status);
}

#else

cublas *cublas_open(void *stream, void *workspace, size_t workspace_bytes)
{
    (void)stream, (void)workspace, (void)workspace_bytes;
    return NULL;
}

void cublas_close(cublas *closed)
{
    (void)closed;
}

bool cublas_multiply(const cublas *with, smoe_type type, bool transpose_a, bool transpose_b, int64_t count,
                     int64_t m, int64_t n, int64_t k, const void *a, const void *b, void *c, error *err)
{
    (void)with, (void)type, (void)transpose_a, (void)transpose_b, (void)count, (void)m, (void)n, (void)k;
    (void)a, (void)b, (void)c;
    return fail(err, ERROR_RUNTIME, "this build has no cuBLAS");
}

#endif
#endif
