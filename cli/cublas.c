/* See cublas.h. */
#include "cli/cublas.h"

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

/* The version of the header it is called by: as the system finds it, or where the build found it. */
static bool load(cublas *made)
{
    made->library = dlopen(LIBRARY(CUBLAS_VER_MAJOR), RTLD_NOW | RTLD_LOCAL);
    if (!made->library) made->library = dlopen(SMOE_CUBLAS_PATH, RTLD_NOW | RTLD_LOCAL);
    return made->library && find(made, "cublasCreate_v2", &made->create) &&
           find(made, "cublasDestroy_v2", &made->destroy) &&
           find(made, "cublasSetStream_v2", &made->set_stream) &&
           find(made, "cublasSetWorkspace_v2", &made->set_workspace) &&
           find(made, "cublasGemmStridedBatchedEx", &made->multiply);
}

bool cublas_open(cublas **made, void *stream, void *workspace, size_t workspace_bytes, error *err)
{
    cublas *new = calloc(1, sizeof *new);
    *made = NULL;
    if (!new) return fail(err, ERROR_RUNTIME, "out of memory for cuBLAS");
    if (!load(new)) {
        cublas_close(new);
        return true;
    }
    if (new->create(&new->handle) == CUBLAS_STATUS_SUCCESS &&new->set_stream(new->handle, stream) ==
        CUBLAS_STATUS_SUCCESS &&new->set_workspace(new->handle, workspace, workspace_bytes) ==
        CUBLAS_STATUS_SUCCESS) {
        *made = new;
        return true;
    }
    cublas_close(new);
    return fail(err, ERROR_RUNTIME, "cuBLAS is there but did not start");
}

void cublas_close(cublas *closed)
{
    if (!closed) return;
    if (closed->handle) (void)closed->destroy(closed->handle);
    if (closed->library) (void)dlclose(closed->library);
    free(closed);
}

/* cuBLAS has columns where we have rows: it is given C^T = B^T A^T. */
bool cublas_multiply(const cublas *with, smoe_type type, bool transpose_a, bool transpose_b, int64_t count,
                     int64_t m, int64_t n, int64_t k, const void *a, const void *b, void *c, error *err)
{
    const float one = 1, zero = 0;
    const cudaDataType_t stored = type == SMOE_BF16 ? CUDA_R_16BF : CUDA_R_16F;
    const cublasStatus_t status =
        with->multiply(with->handle, transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                       transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, (int)n, (int)m, (int)k, &one, b, stored,
                       (int)(transpose_b ? k : n), n * k, a, stored, (int)(transpose_a ? m : k), m * k, &zero,
                       c, stored, (int)n, m * n, (int)count, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    if (status == CUBLAS_STATUS_SUCCESS) return true;
    return fail(err, ERROR_RUNTIME, "cublasGemmStridedBatchedEx: status %d", (int)status);
}

#else

bool cublas_open(cublas **made, void *stream, void *workspace, size_t workspace_bytes, error *err)
{
    (void)stream, (void)workspace, (void)workspace_bytes, (void)err;
    *made = NULL;
    return true;
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
