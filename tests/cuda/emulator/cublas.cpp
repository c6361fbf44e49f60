// Replaces cuBLAS. The program loads cuBLAS with dlopen; the linker wraps dlopen, dlsym and dlclose, so that
// dlsym returns the functions below for it. They check the sizes of a product as cuBLAS does, and that its
// operands lie in device memory. They multiply nothing.
#include "emulator.h"

#include <cstring>
#include <cublas_v2.h>
#include <string>

struct cublasContext {
    cudaStream_t stream;
    void *workspace;
};

static cublasStatus_t create(cublasHandle_t *handle)
{
    *handle = new cublasContext{};
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t destroy(cublasHandle_t handle)
{
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t set_stream(cublasHandle_t handle, cudaStream_t stream)
{
    *handle = {stream, nullptr};
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t set_workspace(cublasHandle_t handle, void *workspace, size_t bytes)
{
    handle->workspace = workspace;
    return emulator::is_allocated(workspace, bytes) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

// Whether `count` column-major matrices of 16-bit elements, `stride` elements apart, lie in allocated memory.
static bool fits(const void *matrix, int rows, int columns, int leading, long long stride, int count)
{
    const size_t elements = (size_t)stride * (count - 1) + (size_t)leading * (columns - 1) + rows;
    return rows > 0 && columns > 0 && leading >= rows && emulator::is_allocated(matrix, 2 * elements);
}

static cublasStatus_t multiply(cublasHandle_t handle, cublasOperation_t a_op, cublasOperation_t b_op, int m,
                               int n, int k, const void *, const void *a, cudaDataType, int a_leading,
                               long long a_stride, const void *b, cudaDataType, int b_leading,
                               long long b_stride, const void *, void *c, cudaDataType, int c_leading,
                               long long c_stride, int count, cublasComputeType_t, cublasGemmAlgo_t)
{
    const bool a_turned = a_op != CUBLAS_OP_N, b_turned = b_op != CUBLAS_OP_N;
    if (!handle->workspace || !fits(a, a_turned ? k : m, a_turned ? m : k, a_leading, a_stride, count) ||
        !fits(b, b_turned ? n : k, b_turned ? k : n, b_leading, b_stride, count) ||
        !fits(c, m, n, c_leading, c_stride, count) || c_stride < (long long)c_leading * n)
        return CUBLAS_STATUS_INVALID_VALUE;
    emulator::enqueue(handle->stream, cudaGraphNodeTypeKernel, [] {});
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" {

void *__real_dlopen(const char *, int);
void *__real_dlsym(void *, const char *);
int __real_dlclose(void *);

static char replaced;

void *__wrap_dlopen(const char *name, int flags)
{
    if (!strstr(name, "cublas")) return __real_dlopen(name, flags);
    return getenv("EMULATOR_NO_CUBLAS") ? nullptr : &replaced;
}

void *__wrap_dlsym(void *library, const char *name)
{
    const std::string wanted = name;
    if (library != &replaced) return __real_dlsym(library, name);
    return wanted == "cublasCreate_v2"              ? (void *)create
           : wanted == "cublasDestroy_v2"           ? (void *)destroy
           : wanted == "cublasSetStream_v2"         ? (void *)set_stream
           : wanted == "cublasSetWorkspace_v2"      ? (void *)set_workspace
           : wanted == "cublasGemmStridedBatchedEx" ? (void *)multiply
                                                    : nullptr;
}

int __wrap_dlclose(void *library)
{
    return library == &replaced ? 0 : __real_dlclose(library);
}
}
