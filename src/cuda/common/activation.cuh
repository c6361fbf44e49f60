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

template <typename T> SMOE_DEVICE float gelu(float x)
{
    return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
}

// x/2 (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
template <typename T> SMOE_DEVICE float gelu_tanh(float x)
{
    return x * sigmoid<T>(1.5957691216057308f * fmaf(0.044715f * x * x, x, x));
}

template <typename T> SMOE_DEVICE float silu_oai(float x)
{
    return x * sigmoid<T>(1.702f * x);
}

template <typename T> SMOE_DEVICE float relu(float x)
{
    return x < 0.0f ? 0.0f : x;
}

template <typename T> SMOE_DEVICE float relu_squared(float x)
{
    return x < 0.0f ? 0.0f : x * x;
}

// ---- Values with slopes

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

template <typename T> SMOE_DEVICE curve silu_curve(float g)
{
    return sigmoid_curve<T>(g, 1.0f);
}

template <typename T> SMOE_DEVICE curve silu_oai_curve(float g)
{
    return sigmoid_curve<T>(g, 1.702f);
}

template <typename T> SMOE_DEVICE curve gelu_curve(float g)
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

template <typename T> SMOE_DEVICE curve relu_curve(float g)
{
    return {g <= 0.0f ? 0.0f : g, g <= 0.0f ? 0.0f : 1.0f};
}

template <typename T> SMOE_DEVICE curve relu_squared_curve(float g)
{
    const float positive = g <= 0.0f ? 0.0f : g;
    return {positive * positive, 2.0f * positive};
}

// ---- Shapes: a = join(f(gate(g)), u). gate_moves and up_moves are false where a clamp makes the derivative
// 0

struct plain_shape {
    static constexpr bool GATED = false;
    static SMOE_DEVICE float gate(float g)
    {
        return g;
    }
    static SMOE_DEVICE float join(float value, float)
    {
        return value;
    }
    static SMOE_DEVICE bool gate_moves(float)
    {
        return true;
    }
    static SMOE_DEVICE bool up_moves(float)
    {
        return true;
    }
};

struct gated_shape {
    static constexpr bool GATED = true;
    static SMOE_DEVICE float gate(float g)
    {
        return g;
    }
    static SMOE_DEVICE float join(float value, float u)
    {
        return value * u;
    }
    static SMOE_DEVICE bool gate_moves(float)
    {
        return true;
    }
    static SMOE_DEVICE bool up_moves(float)
    {
        return true;
    }
};

struct limited_shape {
    static constexpr bool GATED = true;
    static SMOE_DEVICE float gate(float g)
    {
        return g > 7.0f ? 7.0f : g;
    }
    static SMOE_DEVICE float join(float value, float u)
    {
        return value * ((u > 7.0f ? 7.0f : u < -7.0f ? -7.0f : u) + 1.0f);
    }
    static SMOE_DEVICE bool gate_moves(float g)
    {
        return !(g > 7.0f);
    }
    static SMOE_DEVICE bool up_moves(float u)
    {
        return !(u > 7.0f || u < -7.0f);
    }
};

// ---- The list

template <typename T, int KIND> struct activation;

#define SMOE_DEFINE(enumerator, name, shape, function)                                                       \
    template <typename T> struct activation<T, enumerator> : shape##_shape {                                 \
        static SMOE_DEVICE float value(float g)                                                              \
        {                                                                                                    \
            return function<T>(g);                                                                           \
        }                                                                                                    \
        static SMOE_DEVICE curve value_and_slope(float g)                                                    \
        {                                                                                                    \
            return function##_curve<T>(g);                                                                   \
        }                                                                                                    \
    };
MOE_ACTIVATIONS(SMOE_DEFINE)
#undef SMOE_DEFINE

template <typename T, int KIND> SMOE_DEVICE float activate(float g, float u)
{
    using A = activation<T, KIND>;
    return A::join(A::value(A::gate(g)), u);
}

// ---- The forward, two elements at a time

template <typename T, int KIND> SMOE_DEVICE uint32_t activate_pair(uint32_t g, uint32_t u)
{
    using S = storage<T>;
    return S::pack(activate<T, KIND>(S::low(g), S::low(u)), activate<T, KIND>(S::high(g), S::high(u)));
}

} // namespace moe
