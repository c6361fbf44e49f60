// Eight elements in a register array, and sums over a CTA in a fixed order.
#pragma once
#include "device.cuh"

typedef __nv_bfloat16 bf16;

enum { VECTOR = 8, WARP = 32, MOST_THREADS = 1024 };

TRAIN_DEVICE float to_float(bf16 v)
{
    return __bfloat162float(v);
}

TRAIN_DEVICE float to_float(float v)
{
    return v;
}

TRAIN_DEVICE void to_stored(bf16 &to, float v)
{
    to = __float2bfloat16_rn(v);
}

TRAIN_DEVICE void to_stored(float &to, float v)
{
    to = v;
}

// 16 bytes of bf16, 32 of float; aligned to 16.
template <typename T> struct __align__(16) eight
{
    T v[VECTOR];
};

template <typename T> TRAIN_DEVICE void load8(float (&v)[VECTOR], const T *from)
{
    const eight<T> raw = *(const eight<T> *)from;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) v[i] = to_float(raw.v[i]);
}

template <typename T> TRAIN_DEVICE void store8(T *to, const float (&v)[VECTOR])
{
    eight<T> raw;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) to_stored(raw.v[i], v[i]);
    *(eight<T> *)to = raw;
}

// Rounds the values to bf16, as a reader of the stored values sees them.
TRAIN_DEVICE void round8(float (&v)[VECTOR])
{
#pragma unroll
    for (int i = 0; i < VECTOR; i++) v[i] = to_float(__float2bfloat16_rn(v[i]));
}

TRAIN_DEVICE float sum_of_warp(float v)
{
    for (int step = WARP / 2; step; step /= 2) v += __shfl_xor_sync(~0u, v, step);
    return v;
}

TRAIN_DEVICE double sum_of_warp(double v)
{
    for (int step = WARP / 2; step; step /= 2) v += __shfl_xor_sync(~0u, v, step);
    return v;
}

TRAIN_DEVICE float largest_of_warp(float v)
{
    for (int step = WARP / 2; step; step /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, step));
    return v;
}

// Every thread gets the sum over the CTA, which consists of whole warps. `memory` has one V for each warp. It
// must not be written again before the CTA's next barrier.
template <typename V> TRAIN_DEVICE V sum_of_block_once(V v, V *memory)
{
    v = sum_of_warp(v);
    const int warps = blockDim.x / WARP;
    if (warps == 1) return v;
    if (threadIdx.x % WARP == 0) memory[threadIdx.x / WARP] = v;
    __syncthreads();
    V sum = 0;
    for (int w = 0; w < warps; w++) sum += memory[w];
    return sum;
}

// The same, but `memory` may be written again at once.
template <typename V> TRAIN_DEVICE V sum_of_block(V v, V *memory)
{
    v = sum_of_block_once(v, memory);
    __syncthreads();
    return v;
}
