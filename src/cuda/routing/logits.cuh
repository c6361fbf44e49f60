// Reading logits of either type, and the last steps from a logit to a weight that all routing kernels share.
#pragma once
#include "common/ptx.cuh"
#include "host/routing.h"
#include "routing/route_math.h"
#include <cuda_bf16.h>

namespace moe
{

template <typename L> struct logits_of;

template <> struct logits_of<float> {
    using key = uint32_t;
    static constexpr smoe_type type = SMOE_TYPE_F32;
    static constexpr uint32_t largest_key = 0xffffffffu;
    static MOE_DEVICE float value(float logit)
    {
        return logit;
    }
    static MOE_DEVICE uint32_t key_of(float score)
    {
        return moe_score_key(score, type);
    }
    static MOE_DEVICE uint32_t widen(uint32_t key)
    {
        return key;
    }
};

template <> struct logits_of<__nv_bfloat16> {
    using key = uint16_t;
    static constexpr smoe_type type = SMOE_TYPE_BF16;
    static constexpr uint32_t largest_key = 0xffffu;
    static MOE_DEVICE float value(__nv_bfloat16 logit)
    {
        return __uint_as_float((uint32_t)__bfloat16_as_ushort(logit) << 16);
    }
    static MOE_DEVICE uint32_t key_of(float score)
    {
        return moe_key_to_16(moe_score_key(score, type));
    }
    static MOE_DEVICE uint32_t widen(uint32_t key)
    {
        return moe_key_from_16(key);
    }
};

// The weight itself. sum: of the raw weights in rank order, when they are divided by it.
MOE_DEVICE float finish_weight(const smoe_layer &layer, float raw, float sum, bool divided, bool nan)
{
    const float weight = !divided ? raw : sum == 0.0f ? 0.0f : moe_div(raw, sum);
    return nan ? moe_float_of(0x7fc00000u) : moe_mul(weight, layer.route_scale);
}

// The largest logit is -inf for a token of NaNs.
MOE_DEVICE float softmax_max(float best_logit)
{
    return moe_is_nan(best_logit) ? moe_float_of(0xff800000u) : best_logit;
}

} // namespace moe
