/* Functions of index arithmetic that compile for the host (where tests check them by brute force) and for the
 * device. */
#ifndef SMOE_CUDA_HD_H
#define SMOE_CUDA_HD_H

#include <stdint.h>

#ifdef __CUDACC__
#define MOE_HD static __host__ __device__ __forceinline__
#else
#define MOE_HD static inline
#endif

#endif
