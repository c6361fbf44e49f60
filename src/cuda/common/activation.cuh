// The nine activations on a panel of 64 rows x 64 features in shared memory, by one warp: H is read as it was
// rounded for storage, so that A is what the backward will recompute from the saved H.
#pragma once
#include "common/storage.cuh"
#include "sm90/swizzle.h"
#include <smoe.h>

namespace smoe
{

// bf16: half a tanh.approx (2^-11) is below the rounding of A. fp16 needs more.
template <typename T> SMOE_DEVICE float sigmoid(float x);

template <> SMOE_DEVICE float sigmoid<__nv_bfloat16>(float x)
{
    float t;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(0.5f * x));
    return fmaf(0.5f, t, 0.5f);
}

template <> SMOE_DEVICE float sigmoid<__half>(float x)
{
    return __fdividef(1.0f, 1.0f + __expf(-x));
}

// x sigmoid(x); bf16: x/2 + x/2 tanh(x/2), one product less
template <typename T> SMOE_DEVICE float silu(float x)
{
    return x * sigmoid<T>(x);
}

template <> SMOE_DEVICE float silu<__nv_bfloat16>(float x)
{
    const float h = 0.5f * x;
    float t;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(h));
    return fmaf(h, t, h);
}

SMOE_DEVICE float gelu_erf(float x)
{
    return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
}

// x/2 (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
template <typename T> SMOE_DEVICE float gelu_tanh(float x)
{
    return x * sigmoid<T>(1.5957691216057308f * fmaf(0.044715f * x * x, x, x));
}

// Comparisons are written so that a NaN stays one.
template <typename T, int KIND> SMOE_DEVICE float activate(float g, float u)
{
    switch (KIND) {
    case SMOE_ACTIVATION_SWIGLU: return silu<T>(g) * u;
    case SMOE_ACTIVATION_GEGLU: return gelu_erf(g) * u;
    case SMOE_ACTIVATION_GEGLU_TANH: return gelu_tanh<T>(g) * u;
    case SMOE_ACTIVATION_REGLU: return (g < 0.0f ? 0.0f : g) * u;
    case SMOE_ACTIVATION_SWIGLU_OAI:
        g = g > 7.0f ? 7.0f : g;
        u = u > 7.0f ? 7.0f : u < -7.0f ? -7.0f : u;
        return g * sigmoid<T>(1.702f * g) * (u + 1.0f);
    case SMOE_ACTIVATION_SILU: return silu<T>(g);
    case SMOE_ACTIVATION_GELU: return gelu_erf(g);
    case SMOE_ACTIVATION_RELU: return g < 0.0f ? 0.0f : g;
    default: return g < 0.0f ? 0.0f : g * g; // SMOE_ACTIVATION_RELU2
    }
}

template <typename T, int KIND> SMOE_DEVICE uint32_t activate_pair(uint32_t g, uint32_t u)
{
    using S = storage<T>;
    return S::pack(activate<T, KIND>(S::low(g), S::low(u)), activate<T, KIND>(S::high(g), S::high(u)));
}

// All panels share the swizzle, so 16 bytes at the same offset hold the same features of the same row.
template <typename T, int KIND>
SMOE_DEVICE void activate_panel(uint32_t gate, uint32_t up, uint32_t out, int lane)
{
    constexpr bool GATED = KIND < SMOE_ACTIVATION_SILU;
#pragma unroll 4
    for (int i = lane; i < SMOE_PANEL_BYTES / 16; i += 32) {
        const uint4 g = load_shared16(gate + i * 16);
        const uint4 u = GATED ? load_shared16(up + i * 16) : g;
        const uint4 a = {activate_pair<T, KIND>(g.x, u.x), activate_pair<T, KIND>(g.y, u.y),
                         activate_pair<T, KIND>(g.z, u.z), activate_pair<T, KIND>(g.w, u.w)};
        store_shared16(out + i * 16, a);
    }
}

template <typename T>
SMOE_DEVICE void activate_panel(int kind, uint32_t gate, uint32_t up, uint32_t out, int lane)
{
    switch (kind) {
    case SMOE_ACTIVATION_SWIGLU: return activate_panel<T, SMOE_ACTIVATION_SWIGLU>(gate, up, out, lane);
    case SMOE_ACTIVATION_GEGLU: return activate_panel<T, SMOE_ACTIVATION_GEGLU>(gate, up, out, lane);
    case SMOE_ACTIVATION_GEGLU_TANH:
        return activate_panel<T, SMOE_ACTIVATION_GEGLU_TANH>(gate, up, out, lane);
    case SMOE_ACTIVATION_REGLU: return activate_panel<T, SMOE_ACTIVATION_REGLU>(gate, up, out, lane);
    case SMOE_ACTIVATION_SWIGLU_OAI:
        return activate_panel<T, SMOE_ACTIVATION_SWIGLU_OAI>(gate, up, out, lane);
    case SMOE_ACTIVATION_SILU: return activate_panel<T, SMOE_ACTIVATION_SILU>(gate, up, out, lane);
    case SMOE_ACTIVATION_GELU: return activate_panel<T, SMOE_ACTIVATION_GELU>(gate, up, out, lane);
    case SMOE_ACTIVATION_RELU: return activate_panel<T, SMOE_ACTIVATION_RELU>(gate, up, out, lane);
    default: return activate_panel<T, SMOE_ACTIVATION_RELU2>(gate, up, out, lane);
    }
}

} // namespace smoe
