// Slopes of the nine activations, and what the backward makes of an element of H: a = act(g, u) once more, A'
// = s a, dS += x a, and dH from y = s dA'.
#pragma once
#include "common/activation.cuh"

namespace smoe
{

struct curve {
    float value, slope;
};

// s = sigmoid(k g): value g s, slope s + k g s (1 - s)
template <typename T> SMOE_DEVICE curve sigmoid_curve(float g, float k);

template <> SMOE_DEVICE curve sigmoid_curve<__nv_bfloat16>(float g, float k)
{
    const float half = 0.5f * g;
    float t;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(half * k));
    const float s = fmaf(0.5f, t, 0.5f), rest = fmaf(-0.5f, t, 0.5f), value = fmaf(half, t, half);
    return {value, fmaf(k * value, rest, s)};
}

template <> SMOE_DEVICE curve sigmoid_curve<__half>(float g, float k)
{
    const float s = __fdividef(1.0f, 1.0f + __expf(-k * g)), value = g * s;
    return {value, fmaf(k * value, 1.0f - s, s)};
}

SMOE_DEVICE curve gelu_erf_curve(float g)
{
    const float phi = 0.5f * (1.0f + erff(g * 0.70710678118654752f));
    const float bell = fabsf(g) > 20.0f ? 0.0f : g * 0.39894228040143268f * __expf(-0.5f * g * g);
    return {g * phi, phi + bell};
}

// x sigmoid(v), v = 2 sqrt(2/pi) (x + 0.044715 x^3); past 16 the sigmoid is 0 or 1
template <typename T> SMOE_DEVICE curve gelu_tanh_curve(float g)
{
    const float z = g > 16.0f ? 16.0f : g < -16.0f ? -16.0f : g, square = z * z;
    const float s = sigmoid<T>(1.5957691216057308f * fmaf(0.044715f * square, z, z));
    const float inner = 1.5957691216057308f * fmaf(0.134145f, square, 1.0f);
    return {g * s, s * fmaf(z * inner, 1.0f - s, 1.0f)};
}

// Comparisons are written so that a NaN stays one.
template <typename T, int KIND> SMOE_DEVICE curve gate_curve(float g)
{
    switch (KIND) {
    case SMOE_ACTIVATION_SWIGLU:
    case SMOE_ACTIVATION_SILU: return sigmoid_curve<T>(g, 1.0f);
    case SMOE_ACTIVATION_GEGLU:
    case SMOE_ACTIVATION_GELU: return gelu_erf_curve(g);
    case SMOE_ACTIVATION_GEGLU_TANH: return gelu_tanh_curve<T>(g);
    case SMOE_ACTIVATION_SWIGLU_OAI: return sigmoid_curve<T>(g > 7.0f ? 7.0f : g, 1.702f);
    case SMOE_ACTIVATION_RELU2: {
        const float positive = g <= 0.0f ? 0.0f : g;
        return {positive * positive, 2.0f * positive};
    }
    default:
        return {g <= 0.0f ? 0.0f : g, g <= 0.0f ? 0.0f : 1.0f}; // SMOE_ACTIVATION_REGLU, SMOE_ACTIVATION_RELU
    }
}

struct gradient {
    float gate, up, scaled; // dH, A'
};

// x: dA' in some unit; y_weight: s in that unit; ds in that unit.
template <typename T, int KIND>
SMOE_DEVICE gradient differentiate(float g, float u, float x, float weight, float y_weight, float &ds)
{
    const curve c = gate_curve<T, KIND>(g);
    const float y = x * y_weight;
    float factor = u, up = y * c.value;
    if (KIND == SMOE_ACTIVATION_SWIGLU_OAI) {
        factor = (u > 7.0f ? 7.0f : u < -7.0f ? -7.0f : u) + 1.0f;
        up = u > 7.0f || u < -7.0f ? 0.0f : up;
    }
    const float a = KIND < SMOE_ACTIVATION_SILU ? c.value * factor : c.value;
    float gate = KIND < SMOE_ACTIVATION_SILU ? y * factor * c.slope : y * c.slope;
    if (KIND == SMOE_ACTIVATION_SWIGLU_OAI) gate = g > 7.0f ? 0.0f : gate;
    ds = fmaf(x, a, ds);
    return {gate, up, weight * a};
}

// Two elements: pairs of H and dA' (fp16 whatever T is), pairs of dH and A'.
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

} // namespace smoe
