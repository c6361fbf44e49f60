/* The list of all activations. The checks, names and dispatch of the library, the tool and the tests are made
 * from this list; it contains no code.
 *
 *   X(enumerator, name, shape, curve)
 *
 *   enumerator  as in smoe.h
 *   name        as `smoe --activation` takes it
 *   curve       f, the function of g
 *   shape       plain     a = f(h), no gate
 *               gated     a = f(g) u
 *               clamped   a = f(g) (u clamped + offset)
 *               capped    a = f(g) (u capped by tanh + offset)
 * The CPU backend defines curves and shapes with their derivatives in src/cpu/activation.c, the CUDA backend
 * in src/cuda/common/activation.cuh. If one is missing, the code does not compile.
 *
 * The oracle takes nothing from here: its switches name every enumerator again. */
#ifndef MOE_ACTIVATIONS_H
#define MOE_ACTIVATIONS_H

#include <smoe.h>

#define MOE_ACTIVATIONS(X)                                                                                   \
    X(SMOE_ACTIVATION_SWIGLU, "swiglu", gated, silu)                                                         \
    X(SMOE_ACTIVATION_GEGLU, "geglu", gated, gelu)                                                           \
    X(SMOE_ACTIVATION_GEGLU_TANH, "geglu_tanh", gated, gelu_tanh)                                            \
    X(SMOE_ACTIVATION_REGLU, "reglu", gated, relu)                                                           \
    X(SMOE_ACTIVATION_SWIGLU_CLAMPED, "swiglu_clamped", clamped, swish_clamped)                              \
    X(SMOE_ACTIVATION_SWIGLU_CAPPED, "swiglu_capped", capped, swish_capped)                                  \
    X(SMOE_ACTIVATION_SILU, "silu", plain, silu)                                                             \
    X(SMOE_ACTIVATION_GELU, "gelu", plain, gelu)                                                             \
    X(SMOE_ACTIVATION_RELU, "relu", plain, relu)                                                             \
    X(SMOE_ACTIVATION_RELU2, "relu2", plain, relu_squared)

enum { MOE_HALVES_plain = 1, MOE_HALVES_gated = 2, MOE_HALVES_clamped = 2, MOE_HALVES_capped = 2 };

#define MOE_COUNT_ACTIVATION(enumerator, name, shape, curve) +1
enum { MOE_ACTIVATION_COUNT = 0 MOE_ACTIVATIONS(MOE_COUNT_ACTIVATION) };
#undef MOE_COUNT_ACTIVATION

/* If the list lacks an enumerator of smoe.h, every file that includes this header fails to compile. */
#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Wswitch"

/* 2 for an activation with a gate, because H then has gate and up columns and W1 their rows; 1 without a
 * gate; 0 if the value is not in the list.
 */
static inline int moe_activation_halves(smoe_activation activation)
{
    switch (activation) {
#define MOE_CASE(enumerator, name, shape, curve)                                                             \
    case enumerator: return MOE_HALVES_##shape;
        MOE_ACTIVATIONS(MOE_CASE)
#undef MOE_CASE
    }
    return 0;
}

#pragma GCC diagnostic pop

/* The values of clamped and capped activations, as kernels get them. */
typedef struct moe_gate_values {
    float gate_limit, up_limit, alpha, offset;
} moe_gate_values;

static inline moe_gate_values moe_gate_values_of(const smoe_layer *layer)
{
    return (moe_gate_values){layer->gate_limit, layer->up_limit, layer->gate_alpha, layer->up_offset};
}

/* Columns of H, and rows of W1 of one expert. */
static inline int64_t moe_h_width(const smoe_layer *layer)
{
    return moe_activation_halves(layer->activation) * layer->intermediate;
}

#endif
