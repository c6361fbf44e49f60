// An activation on a subtile of 64 rows x 64 features in shared memory, by one warp. It reads H as rounded
// for storage, so that A is the same as the A that the backward computes from the saved H.
#pragma once
#include "common/activation.cuh"
#include "common/swizzle.h"

namespace moe
{

// All subtiles share the swizzle, so 16 bytes at the same offset hold the same features of the same row.
template <typename T, int KIND>
MOE_DEVICE void activate_subtile(const moe_gate_values &v, uint32_t gate, uint32_t up, uint32_t out, int lane)
{
    constexpr bool GATED = activation<T, KIND>::GATED;
#pragma unroll 4
    for (int i = lane; i < MOE_SUBTILE_BYTES / 16; i += 32) {
        const uint4 g = load_shared16(gate + i * 16);
        const uint4 u = GATED ? load_shared16(up + i * 16) : g;
        const uint4 a = {activate_pair<T, KIND>(g.x, u.x, v), activate_pair<T, KIND>(g.y, u.y, v),
                         activate_pair<T, KIND>(g.z, u.z, v), activate_pair<T, KIND>(g.w, u.w, v)};
        store_shared16(out + i * 16, a);
    }
}

template <typename T>
MOE_DEVICE void activate_subtile(smoe_activation kind, const moe_gate_values &v, uint32_t gate, uint32_t up,
                                 uint32_t out, int lane)
{
    switch (kind) {
#define MOE_SUBTILE(enumerator, name, shape, curve)                                                          \
    case enumerator: return activate_subtile<T, enumerator>(v, gate, up, out, lane);
        MOE_ACTIVATIONS(MOE_SUBTILE)
#undef MOE_SUBTILE
    }
    __builtin_unreachable(); // the host refuses other values
}

} // namespace moe
