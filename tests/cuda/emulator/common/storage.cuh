// Replaces src/cuda/common/storage.cuh.
#pragma once
#include "common/ptx.cuh"

namespace moe
{

MOE_DEVICE float to_float(__nv_bfloat16 v)
{
    return __bfloat162float(v);
}

MOE_DEVICE float to_float(__half v)
{
    return __half2float(v);
}

MOE_DEVICE void convert(float v, __nv_bfloat16 &to)
{
    to = __float2bfloat16_rn(v);
}

MOE_DEVICE void convert(float v, __half &to)
{
    to = __float2half_rn(v);
}

template <typename T> struct storage {
    static uint32_t pack(float low, float high)
    {
        T pair[2];
        convert(low, pair[0]);
        convert(high, pair[1]);
        uint32_t bits;
        memcpy(&bits, pair, 4);
        return bits;
    }
    static float part(uint32_t pair, int which)
    {
        T parts[2];
        memcpy(parts, &pair, 4);
        return to_float(parts[which]);
    }
    static float low(uint32_t pair)
    {
        return part(pair, 0);
    }
    static float high(uint32_t pair)
    {
        return part(pair, 1);
    }
};

} // namespace moe
