/* The guard over OpenBLAS's thread count, and the row-major wrapper of cblas_sgemm. */
#include "blas.h"

#include <assert.h>
#include <cblas.h>
#include <limits.h>
#include <pthread.h>
#include <string.h>

static_assert(sizeof(blasint) >= sizeof(int), "sizes up to INT_MAX fit a blasint");

/* The one piece of process-wide state of the library. OpenBLAS (its pthread build) keeps its thread count in
 * a global of its own, so whoever lowers it has to know whether another context still needs it low: a count
 * of the sections that are open, under a mutex. */
static struct {
    pthread_mutex_t mutex;
    int open;
    int threads_before;
} guard = {.mutex = PTHREAD_MUTEX_INITIALIZER};

void smoe_blas_enter(void)
{
    pthread_mutex_lock(&guard.mutex);
    if (guard.open++ == 0) {
        guard.threads_before = openblas_get_num_threads();
        if (guard.threads_before != 1) openblas_set_num_threads(1);
    }
    pthread_mutex_unlock(&guard.mutex);
}

void smoe_blas_leave(void)
{
    pthread_mutex_lock(&guard.mutex);
    assert(guard.open > 0);
    if (--guard.open == 0 && guard.threads_before != 1) openblas_set_num_threads(guard.threads_before);
    pthread_mutex_unlock(&guard.mutex);
}

static blasint narrow(int64_t size)
{
    assert(size >= 0 && size <= INT_MAX);
    return (blasint)size;
}

void smoe_sgemm(int transpose_a, int transpose_b, int64_t m, int64_t n, int64_t k, const float *a,
                int64_t lda, const float *b, int64_t ldb, float beta, float *c, int64_t ldc)
{
    if (m == 0 || n == 0) return;
    if (k == 0) {
        for (int64_t i = 0; i < m && beta == 0.0f; i++) memset(c + i * ldc, 0, (size_t)n * sizeof *c);
        return;
    }
    cblas_sgemm(CblasRowMajor, transpose_a ? CblasTrans : CblasNoTrans,
                transpose_b ? CblasTrans : CblasNoTrans, narrow(m), narrow(n), narrow(k), 1.0f, a,
                narrow(lda), b, narrow(ldb), beta, c, narrow(ldc));
}
