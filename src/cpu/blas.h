/* Single-threaded, row-major sgemm on top of OpenBLAS. The CPU backend uses threads of its own and cuts the
 * work itself, so that the bits of a result do not depend on the number of threads. */
#ifndef MOE_CPU_BLAS_H
#define MOE_CPU_BLAS_H

#include <stdint.h>

/* Between enter and leave OpenBLAS computes on the calling thread alone. Sections may nest and overlap
 * (several contexts on several threads): the first to enter saves OpenBLAS's number of threads, the last to
 * leave restores it. If the application sets another number in between, that number stays. Only if it sets 1,
 * which is also the number inside a section, the saved number replaces it. */
void moe_blas_enter(void);
void moe_blas_leave(void);

/* OpenBLAS needs one buffer for every thread that computes a product. It allocates a buffer when none is
 * free, and tries forever when there is no address space for it. reserve makes OpenBLAS allocate the buffers
 * of `threads` more threads now. It returns 0 if they do not fit. release says that these buffers are no
 * longer needed; OpenBLAS keeps them for the next context. */
enum { MOE_BLAS_BUFFER_MIB = 129 }; /* 128, and what OpenBLAS adds if it is built for many processors */
int moe_blas_reserve(int threads);
void moe_blas_release(int threads);

/* C = op(A) op(B) + beta C, row-major; op(A) (m, k), op(B) (k, n), C (m, n), beta 0 or 1. With transpose_a A
 * is stored (k, m), with transpose_b B is stored (n, k); ld* are the stored matrices' row strides in
 * elements. With beta 0, C is written without being read. Sizes of zero are fine; sizes and strides are at
 * most 2^31 - 1, as panels, d, n and E are. */
void moe_sgemm(int transpose_a, int transpose_b, int64_t m, int64_t n, int64_t k, const float *a, int64_t lda,
               const float *b, int64_t ldb, float beta, float *c, int64_t ldc);

#endif
