// What the small kernels of the backward share: adding up the partial sums of dS, and storing a gradient.
#pragma once
#include "common/storage.cuh"

namespace moe
{

// dS of a row: the sum of its parts (parts, padded_rows) in order. Four loads are in flight at a time.
MOE_DEVICE float sum_of_parts(const float *partial, int parts, int64_t padded_rows, int64_t row)
{
    const float *at = partial + row;
    float sum = *at;
#pragma unroll 1
    for (int i = 1; i < parts; i += 3) {
        float part[3];
#pragma unroll
        for (int j = 0; j < 3; j++) {
            at += padded_rows;
            part[j] = i + j < parts ? *at : 0.0f;
        }
        sum = sum + part[0] + part[1] + part[2];
    }
    return sum;
}

// A gradient is written or added to.
template <typename G> MOE_DEVICE void give(G *to, float sum, bool accumulate);

template <> MOE_DEVICE void give(float *to, float sum, bool accumulate)
{
    *to = accumulate ? *to + sum : sum;
}
template <> MOE_DEVICE void give(__nv_bfloat16 *to, float sum, bool accumulate)
{
    *to = __float2bfloat16_rn(accumulate ? __bfloat162float(*to) + sum : sum);
}
template <> MOE_DEVICE void give(__half *to, float sum, bool accumulate)
{
    *to = __float2half_rn(accumulate ? __half2float(*to) + sum : sum);
}

} // namespace moe
