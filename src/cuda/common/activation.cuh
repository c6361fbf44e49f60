// The activations of activations.h. Each curve is here twice: NAME(x) computes the value, for the forward;
// NAME_curve(x) computes value and slope, for the backward. Comparisons are written so that a NaN stays a
// NaN.
#pragma once
#include "activations.h"
#include "common/storage.cuh"
#include <smoe.h>

namespace moe
{

// ---- Values

// bf16: the error of tanh.approx (2^-11), halved, is below the rounding of A. fp16 needs a smaller error.
template <typename T> MOE_DEVICE float sigmoid(float x);

template <> MOE_DEVICE float sigmoid<__nv_bfloat16>(float x)
{
    float t;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(0.5f * x));
    return fmaf(0.5f, t, 0.5f);
}

template <> MOE_DEVICE float sigmoid<__half>(float x)
{
    return __fdividef(1.0f, 1.0f + __expf(-x));
}

// x sigmoid(x); bf16: x/2 + x/2 tanh(x/2), one product less
template <typename T> MOE_DEVICE float silu(float x)
{
    return x * sigmoid<T>(x);
}

template <> MOE_DEVICE float silu<__nv_bfloat16>(float x)
{
    const float h = 0.5f * x;
    float t;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(h));
    return fmaf(h, t, h);
}

template <typename T> MOE_DEVICE float gelu(float x)
{
    return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
}

// x/2 (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
template <typename T> MOE_DEVICE float gelu_tanh(float x)
{
    return x * sigmoid<T>(1.5957691216057308f * fmaf(0.044715f * x * x, x, x));
}

template <typename T> MOE_DEVICE float relu(float x)
{
    return x < 0.0f ? 0.0f : x;
}

template <typename T> MOE_DEVICE float relu_squared(float x)
{
    return x < 0.0f ? 0.0f : x * x;
}

// ---- Values with slopes

struct curve {
    float value, slope;
};

// s = sigmoid(k g): value g s, slope s + k g s (1 - s)
template <typename T> MOE_DEVICE curve sigmoid_curve(float g, float k);

template <> MOE_DEVICE curve sigmoid_curve<__nv_bfloat16>(float g, float k)
{
    const float half = 0.5f * g;
    float t;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(half * k));
    const float s = fmaf(0.5f, t, 0.5f), rest = fmaf(-0.5f, t, 0.5f), value = fmaf(half, t, half);
    return {value, fmaf(k * value, rest, s)};
}

template <> MOE_DEVICE curve sigmoid_curve<__half>(float g, float k)
{
    const float s = __fdividef(1.0f, 1.0f + __expf(-k * g)), value = g * s;
    return {value, fmaf(k * value, 1.0f - s, s)};
}

template <typename T> MOE_DEVICE curve silu_curve(float g)
{
    return sigmoid_curve<T>(g, 1.0f);
}

template <typename T> MOE_DEVICE curve gelu_curve(float g)
{
    const float phi = 0.5f * (1.0f + erff(g * 0.70710678118654752f));
    const float bell = fabsf(g) > 20.0f ? 0.0f : g * 0.39894228040143268f * __expf(-0.5f * g * g);
    return {g * phi, phi + bell};
}

// x sigmoid(v), v = 2 sqrt(2/pi) (x + 0.044715 x^3); past 16 the sigmoid is 0 or 1
template <typename T> MOE_DEVICE curve gelu_tanh_curve(float g)
{
    const float z = g > 16.0f ? 16.0f : g < -16.0f ? -16.0f : g, square = z * z;
    const float s = sigmoid<T>(1.5957691216057308f * fmaf(0.044715f * square, z, z));
    const float inner = 1.5957691216057308f * fmaf(0.134145f, square, 1.0f);
    return {g * s, s * fmaf(z * inner, 1.0f - s, 1.0f)};
}

template <typename T> MOE_DEVICE curve relu_curve(float g)
{
    return {g <= 0.0f ? 0.0f : g, g <= 0.0f ? 0.0f : 1.0f};
}

template <typename T> MOE_DEVICE curve relu_squared_curve(float g)
{
    const float positive = g <= 0.0f ? 0.0f : g;
    return {positive * positive, 2.0f * positive};
}

// ---- Curves with values of the layer

template <typename T> MOE_DEVICE float hyperbolic(float x);

template <> MOE_DEVICE float hyperbolic<__nv_bfloat16>(float x)
{
    float t;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(x));
    return t;
}

template <> MOE_DEVICE float hyperbolic<__half>(float x)
{
    return tanhf(x);
}

// limit tanh(x/limit)
template <typename T> MOE_DEVICE curve capped(float x, float limit)
{
    const float t = hyperbolic<T>(x * __fdividef(1.0f, limit));
    return {limit * t, fmaf(-t, t, 1.0f)};
}

template <typename T> MOE_DEVICE float swish_clamped(float g, const moe_gate_values &v)
{
    const float x = g > v.gate_limit ? v.gate_limit : g;
    return x * sigmoid<T>(v.alpha * x);
}

template <typename T> MOE_DEVICE curve swish_clamped_curve(float g, const moe_gate_values &v)
{
    const bool beyond = g > v.gate_limit;
    const curve c = sigmoid_curve<T>(beyond ? v.gate_limit : g, v.alpha);
    return {c.value, beyond ? 0.0f : c.slope};
}

template <typename T> MOE_DEVICE float swish_capped(float g, const moe_gate_values &v)
{
    return capped<T>(g, v.gate_limit).value * sigmoid<T>(v.alpha * g);
}

template <typename T> MOE_DEVICE curve swish_capped_curve(float g, const moe_gate_values &v)
{
    const curve c = capped<T>(g, v.gate_limit);
    const float s = sigmoid<T>(v.alpha * g);
    return {c.value * s, s * fmaf(v.alpha * c.value, 1.0f - s, c.slope)};
}

// The other curves take no values.
#define MOE_WITHOUT_VALUES(function)                                                                         \
    template <typename T> MOE_DEVICE float function(float g, const moe_gate_values &)                        \
    {                                                                                                        \
        return function<T>(g);                                                                               \
    }                                                                                                        \
    template <typename T> MOE_DEVICE curve function##_curve(float g, const moe_gate_values &)                \
    {                                                                                                        \
        return function##_curve<T>(g);                                                                       \
    }
MOE_WITHOUT_VALUES(silu)
MOE_WITHOUT_VALUES(gelu)
MOE_WITHOUT_VALUES(gelu_tanh)
MOE_WITHOUT_VALUES(relu)
MOE_WITHOUT_VALUES(relu_squared)
#undef MOE_WITHOUT_VALUES

// ---- Shapes: what multiplies the gate's curve, as a function of u

template <typename T> struct plain_shape {
    static constexpr bool GATED = false;
    static MOE_DEVICE curve up(float, const moe_gate_values &)
    {
        return {1.0f, 0.0f};
    }
};

template <typename T> struct gated_shape {
    static constexpr bool GATED = true;
    static MOE_DEVICE curve up(float u, const moe_gate_values &)
    {
        return {u, 1.0f};
    }
};

template <typename T> struct clamped_shape {
    static constexpr bool GATED = true;
    static MOE_DEVICE curve up(float u, const moe_gate_values &v)
    {
        const float limit = v.up_limit;
        return {(u > limit    ? limit
                 : u < -limit ? -limit
                              : u) +
                    v.offset,
                u > limit || u < -limit ? 0.0f : 1.0f};
    }
};

template <typename T> struct capped_shape {
    static constexpr bool GATED = true;
    static MOE_DEVICE curve up(float u, const moe_gate_values &v)
    {
        const curve c = capped<T>(u, v.up_limit);
        return {c.value + v.offset, c.slope};
    }
};

// ---- The list

template <typename T, int KIND> struct activation;

#define MOE_DEFINE(enumerator, name, shape, function)                                                        \
    template <typename T> struct activation<T, enumerator> : shape##_shape<T> {                              \
        static MOE_DEVICE float value(float g, const moe_gate_values &v)                                     \
        {                                                                                                    \
            return function<T>(g, v);                                                                        \
        }                                                                                                    \
        static MOE_DEVICE curve value_and_slope(float g, const moe_gate_values &v)                           \
        {                                                                                                    \
            return function##_curve<T>(g, v);                                                                \
        }                                                                                                    \
    };
MOE_ACTIVATIONS(MOE_DEFINE)
#undef MOE_DEFINE

template <typename T, int KIND> MOE_DEVICE float activate(float g, float u, const moe_gate_values &v)
{
    using A = activation<T, KIND>;
    return A::value(g, v) * A::up(u, v).value;
}

// ---- The forward, two elements at a time

template <typename T, int KIND>
MOE_DEVICE uint32_t activate_pair(uint32_t g, uint32_t u, const moe_gate_values &v)
{
    using S = storage<T>;
    return S::pack(activate<T, KIND>(S::low(g), S::low(u), v), activate<T, KIND>(S::high(g), S::high(u), v));
}

} // namespace moe
