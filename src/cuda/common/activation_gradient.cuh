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
MOE_DEVICE gradient differentiate(float g, float u, const moe_gate_values &v, float x, float weight,
                                  float y_weight, float &ds)
{
    using A = activation<T, KIND>;
    const curve c = A::value_and_slope(g, v), w = A::up(u, v);
    const float y = x * y_weight, a = c.value * w.value;
    ds = fmaf(x, a, ds);
    return {y * w.value * c.slope, y * c.value * w.slope, weight * a};
}

// Two elements: in, pairs of H and of dA' (fp16 for every T); out, pairs of dH and A'.
template <typename T, int KIND>
MOE_DEVICE void differentiate_pair(uint32_t g, uint32_t u, const moe_gate_values &v, uint32_t x, float weight,
                                   float y_weight, float &ds, uint32_t &gate, uint32_t &up, uint32_t &scaled)
{
    using S = storage<T>;
    using D = storage<__half>;
    const gradient low = differentiate<T, KIND>(S::low(g), S::low(u), v, D::low(x), weight, y_weight, ds);
    const gradient high = differentiate<T, KIND>(S::high(g), S::high(u), v, D::high(x), weight, y_weight, ds);
    gate = S::pack(low.gate, high.gate);
    up = S::pack(low.up, high.up);
    scaled = S::pack(low.scaled, high.scaled);
}

} // namespace moe
