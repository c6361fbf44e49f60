// The two 16-bit storage types as the kernels know them. Two elements are packed in 32 bits, the lower
// element in the low half. instances.cuh has the list of storage types.
#pragma once
#include "common/ptx.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace moe
{

template <typename T> struct storage;

template <> struct storage<__nv_bfloat16> {
    static MOE_DEVICE uint32_t pack(float low, float high)
    {
        uint32_t pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
    }
    static MOE_DEVICE float low(uint32_t pair)
    {
        return __uint_as_float(pair << 16);
    }
    static MOE_DEVICE float high(uint32_t pair)
    {
        return __uint_as_float(pair & 0xffff0000u);
    }
};

template <> struct storage<__half> {
    static MOE_DEVICE uint32_t pack(float low, float high)
    {
        uint32_t pair;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
    }
    static MOE_DEVICE float low(uint32_t pair)
    {
        return __half2float(__ushort_as_half((unsigned short)(pair & 0xffff)));
    }
    static MOE_DEVICE float high(uint32_t pair)
    {
        return __half2float(__ushort_as_half((unsigned short)(pair >> 16)));
    }
};

MOE_DEVICE float to_float(__nv_bfloat16 v)
{
    return __bfloat162float(v);
}

MOE_DEVICE float to_float(__half v)
{
    return __half2float(v);
}

} // namespace moe
