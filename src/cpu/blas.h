/* Single-threaded, row-major sgemm on top of OpenBLAS: the CPU backend's threads are its own, so that how a
 * product is cut, and with it every bit of the result, does not depend on how many there are. */
#ifndef SMOE_CPU_BLAS_H
#define SMOE_CPU_BLAS_H

#include <stdint.h>

/* Between enter and leave OpenBLAS computes on the calling thread alone. Sections may nest and overlap
 * (several contexts on several threads): the first one in saves OpenBLAS's thread count, the last one out
 * restores it. A count that the application sets in between is the one restored, unless it is 1, which cannot
 * be told from the section's own. */
void moe_blas_enter(void);
void moe_blas_leave(void);

/* OpenBLAS needs a buffer of its own for every thread that is inside a product, takes it from the system when
 * one is first missing, and tries for ever when there is no address space for it. reserve makes it take those
 * of `threads` more threads now, and returns 0 when they do not fit; release says that they are no longer
 * needed. OpenBLAS keeps them for the next context. */
enum { MOE_BLAS_BUFFER_MIB = 129 }; /* 128 and what OpenBLAS adds, where it is built for many processors */
int moe_blas_reserve(int threads);
void moe_blas_release(int threads);

/* C = op(A) op(B) + beta C, row-major; op(A) (m, k), op(B) (k, n), C (m, n), beta 0 or 1. With transpose_a A
 * is stored (k, m), with transpose_b B is stored (n, k); ld* are the stored matrices' row strides in
 * elements. With beta 0, C is written without being read. Sizes of zero are fine; sizes and strides are at
 * most 2^31 - 1, as panels, d, n and E are. */
void moe_sgemm(int transpose_a, int transpose_b, int64_t m, int64_t n, int64_t k, const float *a, int64_t lda,
               const float *b, int64_t ldb, float beta, float *c, int64_t ldc);

#endif
