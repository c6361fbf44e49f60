/* Whether OpenBLAS runs the kernels that this processor deserves. A version that does not know a processor
 * takes those of an old one: 0.3.21 of Debian 12 runs its Prescott kernels (2004) on newer Intel processors,
 * at half the speed. */
#ifndef BASE_BLAS_CORE_H
#define BASE_BLAS_CORE_H

/* The processor whose kernels OpenBLAS runs, e.g. "Haswell". */
const char *blas_core(void);

/* NULL, or a sentence: OpenBLAS runs kernels without AVX2 on a processor that has it, and the cure. */
const char *blas_core_fault(void);

/* The same for any core, with what the processor has. */
const char *blas_core_judge(const char *core, int avx2, int avx512);

#endif
