// What the small kernels of the backward share.
#pragma once
#include "storage.cuh"

namespace smoe
{

// dS of a row: its parts (parts, padded_rows) in order.
SMOE_DEVICE float sum_of_parts(const float *partial, int parts, int64_t padded_rows, int64_t row)
{
    float sum = 0.0f;
    for (int i = 0; i < parts; i++) sum += partial[i * padded_rows + row];
    return sum;
}

// A gradient is written or added to.
template <typename G> SMOE_DEVICE void give(G *to, float sum, bool accumulate);

template <> SMOE_DEVICE void give(float *to, float sum, bool accumulate)
{
    *to = accumulate ? *to + sum : sum;
}
template <> SMOE_DEVICE void give(__nv_bfloat16 *to, float sum, bool accumulate)
{
    *to = __float2bfloat16_rn(accumulate ? __bfloat162float(*to) + sum : sum);
}
template <> SMOE_DEVICE void give(__half *to, float sum, bool accumulate)
{
    *to = __float2half_rn(accumulate ? __half2float(*to) + sum : sum);
}

} // namespace smoe
