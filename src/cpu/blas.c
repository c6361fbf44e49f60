/* Handles the two states that OpenBLAS has for the whole process: its number of threads and its buffers. Also
 * wraps cblas_sgemm for row-major matrices. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "blas.h"
#include "problem.h"

#include <assert.h>
#include <cblas.h>
#include <limits.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

static_assert(sizeof(blasint) >= sizeof(int), "sizes up to INT_MAX fit a blasint");

/* The only process-wide state of the library. OpenBLAS (its pthread build) keeps its number of threads in a
 * global variable. A context that sets it back must know whether another context still needs it at 1. So the
 * library counts the sections that are open, under a mutex. OpenBLAS's buffers also belong to the process. */
static struct {
    pthread_mutex_t mutex;
    pthread_once_t at_fork;
    int open;
    int threads_before;
    int64_t buffers_needed; /* by the threads of all contexts */
    int64_t buffers_there;
} guard = {.mutex = PTHREAD_MUTEX_INITIALIZER, .at_fork = PTHREAD_ONCE_INIT};

/* Notes the number of threads to restore afterwards. In a nested section a 1 was set by this file; any other
 * number was set by the application. */
static void hold_one_thread(int nested)
{
    const int threads = openblas_get_num_threads();
    if (threads != 1 || !nested) guard.threads_before = threads;
    if (threads != 1) openblas_set_num_threads(1);
}

void moe_blas_enter(void)
{
    pthread_mutex_lock(&guard.mutex);
    hold_one_thread(guard.open++ > 0);
    pthread_mutex_unlock(&guard.mutex);
}

void moe_blas_leave(void)
{
    pthread_mutex_lock(&guard.mutex);
    assert(guard.open > 0);
    if (--guard.open == 0 && guard.threads_before != 1 && openblas_get_num_threads() == 1)
        openblas_set_num_threads(guard.threads_before);
    pthread_mutex_unlock(&guard.mutex);
}

/* ---- Buffers ---- */

/* OpenBLAS exports these two functions but declares them in no header. Another BLAS may lack them. */
void *blas_memory_alloc(int which) __attribute__((weak));
void blas_memory_free(void *buffer) __attribute__((weak));

/* The number of threads of OpenBLAS that exist, the caller's included. They stay when it is set to fewer. */
extern int blas_num_threads __attribute__((weak));

static int address_space_fits(int64_t buffers)
{
    const size_t bytes = (size_t)buffers * MOE_BLAS_BUFFER_MIB << 20;
    void *probe = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return probe != MAP_FAILED && munmap(probe, bytes) == 0;
}

/* Takes `count` buffers at the same time and returns them, so that OpenBLAS allocates as many. */
static void take_buffers(int64_t count)
{
    void *held[MOE_MAX_THREADS];
    int64_t taken = 0;
    while (taken < count && (held[taken] = blas_memory_alloc(1))) taken++;
    while (taken > 0) blas_memory_free(held[--taken]);
}

static int reserve(int threads)
{
    /* OpenBLAS's own threads take one buffer each and keep it: before this, later or at the same time. So
     * there must be room for one more for each of them. */
    int own_threads = (guard.open ? guard.threads_before : openblas_get_num_threads()) - 1;
    if (&blas_num_threads && blas_num_threads - 1 > own_threads) own_threads = blas_num_threads - 1;
    int64_t needed = guard.buffers_needed + threads + own_threads;
    if (needed > MOE_MAX_THREADS) needed = MOE_MAX_THREADS; /* OpenBLAS cannot have many more */
    if (needed > guard.buffers_there) {
        /* Buffers that an open section uses cannot be taken here. So up to as many additional buffers may be
         * allocated. */
        if (!address_space_fits((guard.open ? needed : needed - guard.buffers_there) + own_threads)) return 0;
        take_buffers(needed);
        guard.buffers_there = needed;
    }
    guard.buffers_needed += threads;
    return 1;
}

/* In the child no other thread exists that could close its open section or unlock the mutex. */
static void lock_guard(void)
{
    pthread_mutex_lock(&guard.mutex);
}

static void unlock_guard(void)
{
    pthread_mutex_unlock(&guard.mutex);
}

static void reset_guard(void)
{
    guard.open = 0;
    pthread_mutex_unlock(&guard.mutex);
}

static void follow_forks(void)
{
    pthread_atfork(lock_guard, unlock_guard, reset_guard);
}

int moe_blas_reserve(int threads)
{
    if (!blas_memory_alloc || !blas_memory_free) return 1;
    pthread_once(&guard.at_fork, follow_forks);
    pthread_mutex_lock(&guard.mutex);
    /* In the child of a fork OpenBLAS starts new threads when it is next told their number. */
    openblas_set_num_threads(openblas_get_num_threads());
    const int fits = reserve(threads);
    pthread_mutex_unlock(&guard.mutex);
    return fits;
}

void moe_blas_release(int threads)
{
    if (!blas_memory_alloc || !blas_memory_free) return;
    pthread_mutex_lock(&guard.mutex);
    guard.buffers_needed -= threads;
    pthread_mutex_unlock(&guard.mutex);
}

static blasint narrow(int64_t size)
{
    assert(size >= 0 && size <= INT_MAX);
    return (blasint)size;
}

void moe_sgemm(int transpose_a, int transpose_b, int64_t m, int64_t n, int64_t k, const float *a, int64_t lda,
               const float *b, int64_t ldb, float beta, float *c, int64_t ldc)
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
