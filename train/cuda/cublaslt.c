/* See cublaslt.h. cuBLASLt is column-major, so it is given the transposed product C^T = B^T A^T. */
#include "train/cuda/cublaslt.h"

#include <stddef.h>

#ifdef SMOE_HAVE_CUBLASLT
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

enum { WORKSPACE_BYTES = 64 << 20, PLANS = 256 };

typedef struct plan {
    cublaslt_shape shape;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t first, second, result;
    cublasLtMatmulAlgo_t algorithm;
} plan;

struct cublaslt {
    void *library;
    cublasLtHandle_t handle;
    void *workspace;
    plan plans[PLANS];
    int count;
    __typeof__(cublasLtCreate) *create;
    __typeof__(cublasLtDestroy) *destroy;
    __typeof__(cublasLtMatmul) *matmul;
    __typeof__(cublasLtMatmulDescCreate) *operation_create;
    __typeof__(cublasLtMatmulDescDestroy) *operation_destroy;
    __typeof__(cublasLtMatmulDescSetAttribute) *operation_set;
    __typeof__(cublasLtMatrixLayoutCreate) *layout_create;
    __typeof__(cublasLtMatrixLayoutDestroy) *layout_destroy;
    __typeof__(cublasLtMatmulPreferenceCreate) *preference_create;
    __typeof__(cublasLtMatmulPreferenceDestroy) *preference_destroy;
    __typeof__(cublasLtMatmulPreferenceSetAttribute) *preference_set;
    __typeof__(cublasLtMatmulAlgoGetHeuristic) *choose;
};

/* function: where the pointer to the function is stored. */
static bool find(const cublaslt *in, const char *name, void *function)
{
    void *found = dlsym(in->library, name);
    memcpy(function, &found, sizeof found);
    return found != NULL;
}

static bool load(cublaslt *made)
{
    static const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so.12", SMOE_CUBLASLT_PATH,
                                        "/usr/local/cuda/lib64/libcublasLt.so"};
    for (size_t i = 0; !made->library && i < sizeof names / sizeof names[0]; i++)
        made->library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    return made->library && find(made, "cublasLtCreate", &made->create) &&
           find(made, "cublasLtDestroy", &made->destroy) && find(made, "cublasLtMatmul", &made->matmul) &&
           find(made, "cublasLtMatmulDescCreate", &made->operation_create) &&
           find(made, "cublasLtMatmulDescDestroy", &made->operation_destroy) &&
           find(made, "cublasLtMatmulDescSetAttribute", &made->operation_set) &&
           find(made, "cublasLtMatrixLayoutCreate", &made->layout_create) &&
           find(made, "cublasLtMatrixLayoutDestroy", &made->layout_destroy) &&
           find(made, "cublasLtMatmulPreferenceCreate", &made->preference_create) &&
           find(made, "cublasLtMatmulPreferenceDestroy", &made->preference_destroy) &&
           find(made, "cublasLtMatmulPreferenceSetAttribute", &made->preference_set) &&
           find(made, "cublasLtMatmulAlgoGetHeuristic", &made->choose);
}

cublaslt *cublaslt_open(error *err)
{
    cublaslt *made = calloc(1, sizeof *made);
    if (made && load(made) && made->create(&made->handle) == CUBLAS_STATUS_SUCCESS &&
        cudaMalloc(&made->workspace, WORKSPACE_BYTES) == cudaSuccess)
        return made;
    const char *why = made && made->library ? "it does not start" : dlerror();
    fail(err, ERROR_RUNTIME,
         "training on the GPU needs libcublasLt.so.13 (CUDA toolkit, or pip install nvidia-cublas and its "
         "folder "
         "in LD_LIBRARY_PATH): %s",
         why ? why : "out of memory");
    cublaslt_close(made);
    return NULL;
}

static void close_plan(const cublaslt *with, plan *p)
{
    if (p->operation) (void)with->operation_destroy(p->operation);
    if (p->first) (void)with->layout_destroy(p->first);
    if (p->second) (void)with->layout_destroy(p->second);
    if (p->result) (void)with->layout_destroy(p->result);
    *p = (plan){0};
}

void cublaslt_close(cublaslt *closed)
{
    if (!closed) return;
    for (int i = 0; i < closed->count; i++) close_plan(closed, &closed->plans[i]);
    if (closed->workspace) (void)cudaFree(closed->workspace);
    if (closed->handle) (void)closed->destroy(closed->handle);
    if (closed->library) (void)dlclose(closed->library);
    free(closed);
}

static cublasStatus_t describe(const cublaslt *with, plan *p)
{
    const cublaslt_shape *s = &p->shape;
    const cublasOperation_t first = s->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                            second = s->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const uint64_t m = (uint64_t)s->m, n = (uint64_t)s->n, k = (uint64_t)s->k;
    const uint64_t first_rows = s->transpose_b ? k : n, first_columns = s->transpose_b ? n : k;
    const uint64_t second_rows = s->transpose_a ? m : k, second_columns = s->transpose_a ? k : m;
    cublasStatus_t status = with->operation_create(&p->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (!status)
        status = with->operation_set(p->operation, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first);
    if (!status)
        status = with->operation_set(p->operation, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second);
    if (!status)
        status = with->layout_create(&p->first, CUDA_R_16BF, first_rows, first_columns, (int64_t)first_rows);
    if (!status)
        status =
            with->layout_create(&p->second, CUDA_R_16BF, second_rows, second_columns, (int64_t)second_rows);
    if (!status)
        status = with->layout_create(&p->result, s->type == SMOE_TYPE_F32 ? CUDA_R_32F : CUDA_R_16BF, n, m,
                                     (int64_t)n);
    return status;
}

/* Takes the heuristic's first choice. Nothing is timed, so that the bits are the same on every run. */
static cublasStatus_t choose(const cublaslt *with, plan *p)
{
    const size_t workspace = WORKSPACE_BYTES;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t found;
    int count = 0;
    cublasStatus_t status = with->preference_create(&preference);
    if (status) return status;
    status = with->preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                  sizeof workspace);
    if (!status)
        status = with->choose(with->handle, p->operation, p->first, p->second, p->result, p->result,
                              preference, 1, &found, &count);
    (void)with->preference_destroy(preference);
    if (!status && count == 0) status = CUBLAS_STATUS_NOT_SUPPORTED;
    if (!status) p->algorithm = found.algo;
    return status;
}

static bool same(const cublaslt_shape *a, const cublaslt_shape *b)
{
    return a->m == b->m && a->n == b->n && a->k == b->k && a->transpose_a == b->transpose_a &&
           a->transpose_b == b->transpose_b && a->adds == b->adds && a->type == b->type;
}

static cublasStatus_t plan_of(cublaslt *with, const cublaslt_shape *shape, plan **found)
{
    for (int i = 0; i < with->count; i++)
        if (same(&with->plans[i].shape, shape)) {
            *found = &with->plans[i];
            return CUBLAS_STATUS_SUCCESS;
        }
    if (with->count == PLANS) close_plan(with, &with->plans[--with->count]);
    plan *made = &with->plans[with->count++];
    *made = (plan){.shape = *shape};
    cublasStatus_t status = describe(with, made);
    if (!status) status = choose(with, made);
    if (status) close_plan(with, &with->plans[--with->count]);
    *found = made;
    return status;
}

int cublaslt_multiply(cublaslt *with, const cublaslt_shape *shape, void *c, const void *a, const void *b,
                      const void *addend, void *stream)
{
    const float one = 1, beta = shape->adds ? 1 : 0;
    plan *p;
    cublasStatus_t status = plan_of(with, shape, &p);
    if (status) return (int)status;
    return (int)with->matmul(with->handle, p->operation, &one, b, p->first, a, p->second, &beta,
                             shape->adds ? addend : c, p->result, c, p->result, &p->algorithm,
                             with->workspace, WORKSPACE_BYTES, stream);
}

#else

cublaslt *cublaslt_open(error *err)
{
    fail(err, ERROR_RUNTIME, "this build has no cuBLASLt (its header was missing)");
    return NULL;
}

void cublaslt_close(cublaslt *closed)
{
    (void)closed;
}

int cublaslt_multiply(cublaslt *with, const cublaslt_shape *shape, void *c, const void *a, const void *b,
                      const void *addend, void *stream)
{
    (void)with, (void)shape, (void)c, (void)a, (void)b, (void)addend, (void)stream;
    return -1;
}

#endif
