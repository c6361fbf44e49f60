// The backward of one element of H. Symbols: include/smoe.h. With x = dA' and y = s dA' it computes A =
// act(g, u) again, A' = s A, the element's term x A of dS, and dH = dact(H, y).
#pragma once
#include "common/activation.cuh"

namespace moe
{

struct gradient {
    float gate, up, scaled; // dH, A'
};

// x: dA' divided by a scale; y_weight: s times that scale; ds: dS divided by that scale.
template <typename T, int KIND>
SMOE_DEVICE gradient differentiate(float g, float u, float x, float weight, float y_weight, float &ds)
{
    using A = activation<T, KIND>;
    const curve c = A::value_and_slope(A::gate(g));
    const float y = x * y_weight;
    const float a = A::join(c.value, u), slope = A::join(y, u) * c.slope;
    const float gate = A::gate_moves(g) ? slope : 0.0f, up = A::up_moves(u) ? y * c.value : 0.0f;
    ds = fmaf(x, a, ds);
    return {gate, up, weight * a};
}

// Two elements: in, pairs of H and of dA' (fp16 for every T); out, pairs of dH and A'.
template <typename T, int KIND>
SMOE_DEVICE void differentiate_pair(uint32_t g, uint32_t u, uint32_t x, float weight, float y_weight,
                                    float &ds, uint32_t &gate, uint32_t &up, uint32_t &scaled)
{
    using S = storage<T>;
    using D = storage<__half>;
    const gradient low = differentiate<T, KIND>(S::low(g), S::low(u), D::low(x), weight, y_weight, ds);
    const gradient high = differentiate<T, KIND>(S::high(g), S::high(u), D::high(x), weight, y_weight, ds);
    gate = S::pack(low.gate, high.gate);
    up = S::pack(low.up, high.up);
    scaled = S::pack(low.scaled, high.scaled);
}

} // namespace moe
