// Sums over the lanes of a warp and over the threads of a CTA, in a fixed order: the same inputs give the
// same bits.
#pragma once
#include "common/ptx.cuh"

namespace moe
{

// Over groups of `lanes` lanes, a power of two; all of them have the sum.
template <typename V> MOE_DEVICE V sum_of_lanes(V v, int lanes = 32)
{
    for (int step = lanes / 2; step; step /= 2) v += __shfl_xor_sync(~0u, v, step);
    return v;
}

// Over the CTA's WARPS warps; all threads get the sum. `memory`: one V for each warp; it may be used again
// afterwards.
template <int WARPS, typename V> MOE_DEVICE V sum_of_threads(V v, V *memory)
{
    v = sum_of_lanes(v);
    if ((threadIdx.x & 31) == 0) memory[threadIdx.x / 32] = v;
    __syncthreads();
    V sum = 0;
    for (int w = 0; w < WARPS; w++) sum += memory[w];
    __syncthreads();
    return sum;
}

// The same for 32-bit integers. Their sum does not depend on the order, so a warp adds them in one
// instruction.
template <int WARPS> MOE_DEVICE uint32_t sum_of_threads(uint32_t v, uint32_t *memory)
{
    v = __reduce_add_sync(~0u, v);
    if ((threadIdx.x & 31) == 0) memory[threadIdx.x / 32] = v;
    __syncthreads();
    const int lane = threadIdx.x & 31;
    const uint32_t sum = __reduce_add_sync(~0u, lane < WARPS ? memory[lane] : 0);
    __syncthreads();
    return sum;
}

// Over the lanes up to this one.
MOE_DEVICE uint32_t sum_up_to_lane(uint32_t value, int lane)
{
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const uint32_t left = __shfl_up_sync(~0u, value, step);
        if (lane >= step) value += left;
    }
    return value;
}

// Over the threads of the CTA before this one. `memory`: one word for each warp.
MOE_DEVICE uint32_t sum_of_threads_before(uint32_t value, uint32_t *memory)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const uint32_t sum = sum_up_to_lane(value, lane);
    if (lane == 31) memory[warp] = sum;
    __syncthreads();
    const uint32_t others = __reduce_add_sync(~0u, lane < warp ? memory[lane] : 0);
    __syncthreads();
    return sum - value + others;
}

} // namespace moe
