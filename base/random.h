/* Counter-based random numbers: value number `index` of `seed`, independent of earlier calls. In
 * CUDA C the functions are for host and device. */
#ifndef BASE_RANDOM_H
#define BASE_RANDOM_H

#include <math.h>
#include <stdint.h>

#ifdef __CUDACC__
#define RANDOM_FUNCTION static __host__ __device__ __forceinline__
#else
#define RANDOM_FUNCTION static inline
#endif

/* The finaliser of SplitMix64, applied to both. */
RANDOM_FUNCTION uint64_t random_bits(uint64_t seed, uint64_t index)
{
    uint64_t z = seed * 0xd1342543de82ef95u + (index + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* In [0, 1), 53 bits. */
RANDOM_FUNCTION double random_uniform(uint64_t seed, uint64_t index)
{
    return (double)(random_bits(seed, index) >> 11) * 0x1p-53;
}

/* Normal with mean 0 and variance 1, by Box and Muller. */
RANDOM_FUNCTION double random_normal(uint64_t seed, uint64_t index)
{
    double u = 1.0 - random_uniform(seed, 2 * index), v = random_uniform(seed, 2 * index + 1);
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}

#endif
