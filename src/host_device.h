/* Functions that compile for the host (where tests check them by brute force) and for the device. */
#ifndef MOE_HOST_DEVICE_H
#define MOE_HOST_DEVICE_H

#include <stdint.h>

#ifdef __CUDACC__
#define MOE_HOST_DEVICE static __host__ __device__ __forceinline__
#else
#define MOE_HOST_DEVICE static inline
#endif

#endif
