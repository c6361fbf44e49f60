// Up- and down-projection of few rows: H[r] = X[t(r)] W1[e]^T + b1[e], A[r] = act(H[r]) and
// Y[r] = A[r] W2[e]^T + b2[e], the latter for one column chunk of d. schedule/few_rows.h says for which
// layers. Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Shapes: X (T, d), W1 (E, h, d), H (padded rows, h), A (padded rows, n), W2 (E, d, n), Y (padded rows,
// columns of the chunk), where h is 2n with a gate and n without. FLOPs 2 R d h and 2 R d n.
//
// Bytes, of 16-bit elements, where C experts have rows: 2 C d h of W1 and 2 C d n of W2, once more for every
// further 16 rows of an expert. All other bytes are few: X, A and Y have R rows, and H, which only training
// stores, also has the pad rows.
//
// With a gate the 16 rows of W1 are the gate rows and the up rows of 8 features. If an expert has more than
// 16 rows, the CTA reads its weights again for each group of 16. Pad rows are not multiplied. Only the
// backward reads them, and only in H: there they get the same values as from the other kernels, b1 or 0.
#pragma once
#include "common/activation.cuh"
#include "common/instances.cuh"
#include "experts/gemm_few_rows.cuh"
#include "host/kernel_table.h"

namespace moe
{
namespace few_rows
{

// Element `at` of a tensor: the low 16 bits of `value`.
MOE_DEVICE void store_element(void *tensor, int64_t at, uint32_t value)
{
    ((uint16_t *)tensor)[at] = (uint16_t)value;
}

// ---- Up

// b1 of row `half` (0: gate, 1: up) of a feature, or 0.
template <typename T> MOE_DEVICE float bias_of(const moe_up &u, int expert, int feature, int half)
{
    if (!u.b1) return 0.0f;
    const int64_t n = u.intermediate, row = u.interleaved ? 2 * feature + half : half * n + feature;
    return to_float(((const T *)u.b1)[expert * (u.gated ? 2 * n : n) + row]);
}

// `pair`: gate and up of a feature.
MOE_DEVICE void store_h(const moe_up &u, int row, int feature, uint32_t pair)
{
    if (row >= u.h_rows) return;
    const int64_t n = u.intermediate, at = row * (u.gated ? 2 * n : n) + feature;
    store_element(u.h, at, pair);
    if (u.gated) store_element(u.h, at + n, pair >> 16);
}

template <typename T> MOE_DEVICE float activate_element(const moe_up &u, uint32_t pair)
{
    const float gate = storage<T>::low(pair), up = storage<T>::high(pair);
    switch (u.activation) {
#define MOE_ACTIVATE(enumerator, name, shape, curve)                                                         \
    case enumerator: return activate<T, enumerator>(gate, up, u.values);
        MOE_ACTIVATIONS(MOE_ACTIVATE)
#undef MOE_ACTIVATE
    }
    __builtin_unreachable(); // the host refuses other values
}

MOE_DEVICE weight_rows w1_rows(const moe_up &u, int expert, int feature)
{
    const int64_t row = u.hidden * 2, n = u.intermediate, step = u.interleaved ? 2 : 1;
    const char *first = (const char *)u.w1 + (expert * (u.gated ? 2 * n : n) + feature * step) * row;
    const int64_t second = u.gated ? (u.interleaved ? 1 : n) : feature + 8 < n ? 8 : 0;
    return {first, first + second * row, step * row};
}

// The next kernel may begin as soon as CTAs of this one have ended: what this one writes it reads after its
// wait_for_previous.
template <typename T, class C>
__global__ void __launch_bounds__(THREADS, CTAS_AN_SM) up(const __grid_constant__ moe_up u)
{
    shared_memory<C> &shared = shared_of_cta<C>();
    init_ring(shared);
    wait_for_previous();
    let_next_start();
    const int shift = u.gated ? 3 : 4; // 8 or 16 features
    const int n = (int)u.intermediate, length = (int)u.hidden;
    if (warp_number() == WARPS) {
        produce(shared, u.lists, u.row_token, (n + (1 << shift) - 1) >> shift, length,
                [&](int expert, int column_tile) { return w1_rows(u, expert, column_tile << shift); });
        return;
    }
    const auto start_of = [&](int, int token) { return (const char *)u.x + token * u.hidden * 2; };
    const auto finish = [&](const row_group &group, int i, int j, const auto &sum) {
        const int row = group.row + i, feature = (group.column_tile << shift) + j;
        if (feature >= n) return;
        const uint32_t pair =
            storage<T>::pack(sum(j) + bias_of<T>(u, group.expert, feature, 0),
                             u.gated ? sum(j + 8) + bias_of<T>(u, group.expert, feature, 1) : 0.0f);
        if (u.h) store_h(u, row, feature, pair);
        store_element(u.a, (int64_t)row * n + feature, storage<T>::pack(activate_element<T>(u, pair), 0.0f));
    };
    multiply_groups<T>(shared, length, shift, start_of, finish, [&](const row_group &group) {
        if (!u.h) return;
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < group.pad_rows << shift; i += MULTIPLIERS) {
            const int feature = (group.column_tile << shift) + (i & ((1 << shift) - 1));
            if (feature < n)
                store_h(u, group.row + group.rows + (i >> shift), feature,
                        storage<T>::pack(bias_of<T>(u, group.expert, feature, 0),
                                         u.gated ? bias_of<T>(u, group.expert, feature, 1) : 0.0f));
        }
    });
}

// ---- Down

MOE_DEVICE weight_rows w2_rows(const moe_down &d, int expert, int column)
{
    const int64_t row = d.intermediate * 2;
    const char *first = (const char *)d.w2 + (expert * d.hidden + d.first_column + column) * row;
    return {first, first + (column + 8 < d.columns ? 8 : 0) * row, row};
}

// Begins to read the weights before the kernel before has ended. This kernel is only launched behind kernels
// that began when the plan was complete.
template <typename T, class C>
__global__ void __launch_bounds__(THREADS, CTAS_AN_SM) down(const __grid_constant__ moe_down d)
{
    shared_memory<C> &shared = shared_of_cta<C>();
    init_ring(shared);
    const int length = (int)d.intermediate;
    if (warp_number() == WARPS) {
        produce(shared, d.lists, d.row_token, (int)((d.columns + WEIGHTS - 1) / WEIGHTS), length,
                [&](int expert, int column_tile) { return w2_rows(d, expert, column_tile * WEIGHTS); });
        return;
    }
    wait_for_previous();
    let_next_start();
    const auto start_of = [&](int row, int) { return (const char *)d.a + (int64_t)row * length * 2; };
    const auto finish = [&](const row_group &group, int i, int j, const auto &sum) {
        const int column = group.column_tile * WEIGHTS + j;
        if (column >= d.columns) return;
        float value = sum(j);
        if (d.b2) value += to_float(((const T *)d.b2)[group.expert * d.hidden + d.first_column + column]);
        store_element(d.y, (group.row + i) * d.columns + column, storage<T>::pack(value, 0.0f));
    };
    multiply_groups<T>(shared, length, 4, start_of, finish, [](const row_group &) {});
}

// ---- For the tables: init is to be called once for each device, the others launch.

template <class C> cudaError_t init(const moe_device *device)
{
    return for_every_type(storage_types(), [&](auto t) {
        using T = typename decltype(t)::type;
        const cudaError_t status = allow_shared(device, up<T, C>, sizeof(shared_memory<C>));
        return status == cudaSuccess ? allow_shared(device, down<T, C>, sizeof(shared_memory<C>)) : status;
    });
}

template <class C> cudaError_t launch_up(const moe_launch *on, const moe_up &u, int64_t tiles)
{
    return for_type(storage_types(), on->dtype, [&](auto t) {
        return launch<C>(up<typename decltype(t)::type, C>, on, u.intermediate, u.gated ? 8 : 16, tiles, u);
    });
}

template <class C> cudaError_t launch_down(const moe_launch *on, const moe_down &d, int64_t tiles)
{
    return for_type(storage_types(), on->dtype, [&](auto t) {
        return launch<C>(down<typename decltype(t)::type, C>, on, d.columns, WEIGHTS, tiles, d);
    });
}

} // namespace few_rows
} // namespace moe
