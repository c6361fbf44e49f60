// Up-projection: H[r] = X[t(r)] W1[e]^T + b1[e], A[r] = act(H[r]).
// For few rows few_rows.cu computes them.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Shapes: X (T, d), W1 (E, h, d), H (padded rows, h), A (padded rows, n), where h is 2n with a gate and n
// without. FLOPs 2 R d h.
//
// Bytes, of 16-bit elements:
// - X: 2 R d, gathered once for each column tile. L2 can serve every column tile after the first.
// - W1: 2 E d h, read once if L2 serves all row tiles of each expert except its first.
// - H: 2 R h written; nothing for inference.
// - A: 2 R n written.
//
// Tile: 128 x 256 (gemm_sync.cuh), both operands K-major. With a gate the 256 columns are 8 gate rows of W1,
// then the 8 up rows of the same features, and so on, for 128 features. So a thread has gate and up of the
// same features, and applies the activation in registers. It computes A from H as rounded for storage,
// because the backward reads that H.
#include "common/activation.cuh"
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "sm80/gemm_sync.cuh"
#include "sm80/kernels.h"

namespace moe
{
namespace gemm_sync
{
namespace
{

template <typename T, int KIND>
MOE_DEVICE void activate_four(uint32_t (&a)[4], const uint32_t (&g)[4], const uint32_t (&u)[4],
                              const moe_gate_values &values)
{
#pragma unroll
    for (int j = 0; j < 4; j++) a[j] = activate_pair<T, KIND>(g[j], u[j], values);
}

template <typename T, bool WITH_LORA> struct up_gemm {
    using type = T;
    static constexpr bool A_MN = false, B_MN = false, LORA = WITH_LORA;
    const moe_up &p;
    const tile_list list;
    token_rows x;
    even_rows<TILE_COLUMNS> weights;
    const char *low; // LORA: the tile's first row of P1, or NULL: the copies are at steps of X and W1

    MOE_DEVICE explicit up_gemm(const moe_up &up)
        : p(up), list(up.lists.tiles, up.lists.counts, up.intermediate, up.gated ? 128 : 256)
    {
    }
    MOE_DEVICE int units() const
    {
        return list.units();
    }
    MOE_DEVICE tile_place place(int unit) const
    {
        return list.place(unit);
    }
    MOE_DEVICE int steps_of_k() const
    {
        return ((int)p.hidden + STEP - 1) / STEP;
    }
    MOE_DEVICE int steps(const tile_place &) const
    {
        return LORA ? steps_of_k() + low_steps(p.lora) : steps_of_k();
    }
    MOE_DEVICE int features_a_tile() const
    {
        return p.gated ? TILE_COLUMNS / 2 : TILE_COLUMNS;
    }
    // Columns of H's rows, and rows of W1 for each expert.
    MOE_DEVICE int h_width() const
    {
        return (int)p.intermediate * (p.gated ? 2 : 1);
    }

    MOE_DEVICE void begin(const tile_place &at)
    {
        using copier = k_major<TILE_COLUMNS>;
        if (LORA) low = nullptr;
        x.begin(p.row_token + at.row, at.blocks);
        const int n = (int)p.intermediate, r = copier::row(), half = p.gated ? r >> 3 & 1 : 0;
        const int feature = at.column_tile * features_a_tile() + (p.gated ? (r >> 4) * 8 + (r & 7) : r);
        const int apart = p.gated ? copier::APART / 2 : copier::APART; // features
        const int feature_rows = p.interleaved ? 2 : 1;
        const int64_t row =
            (int64_t)at.expert * h_width() + feature * feature_rows + (p.interleaved ? half : half * n);
        weights.first = (const char *)p.w1 + row * p.hidden * 2;
        weights.apart = (uint32_t)(apart * feature_rows) * ((uint32_t)p.hidden / 8);
        weights.real = 0;
#pragma unroll
        for (int i = 0; i < copier::COUNT; i++) weights.real |= (feature + i * apart < n ? 1u : 0u) << i;
    }
    // B1 has the gate rows first, in both layouts of W1.
    MOE_DEVICE void begin_low(const tile_place &at)
    {
        using copier = k_major<TILE_COLUMNS>;
        const int r = copier::row(), half = p.gated ? r >> 3 & 1 : 0;
        const int feature = at.column_tile * features_a_tile() + (p.gated ? (r >> 4) * 8 + (r & 7) : r);
        const int64_t row = (int64_t)at.expert * h_width() + half * p.intermediate + feature;
        low = (const char *)p.lora.low + at.row * p.lora.rank * 2;
        x.begin_rows(at.blocks);
        weights.first = (const char *)p.lora.factor + row * p.lora.rank * 2;
        weights.apart = (p.gated ? copier::APART / 2 : copier::APART) * vectors();
    }
    // Of a row of both operands.
    MOE_DEVICE uint32_t vectors() const
    {
        return (uint32_t)(LORA && low ? p.lora.rank : p.hidden) / 8;
    }
    MOE_DEVICE void copy_a(int step, uint32_t slot)
    {
        x.copy(slot, LORA && low ? low : p.x, step, vectors());
    }
    MOE_DEVICE void copy_b(int step, uint32_t slot)
    {
        weights.copy(slot, step, vectors());
    }

    // First of the warp's features.
    MOE_DEVICE int first_feature(const tile_place &at, int warp_column) const
    {
        return at.column_tile * features_a_tile() + warp_column * (features_a_tile() / WARPS_ACROSS);
    }
    MOE_DEVICE bool active(const tile_place &at, int warp_row, int warp_column) const
    {
        return at.has_block(warp_row) && first_feature(at, warp_column) < p.intermediate;
    }

    MOE_DEVICE void add_bias(warp_sums &c, int expert, int first, int lane) const
    {
        const int n = (int)p.intermediate, apart = p.interleaved ? 2 : 1,
                  up = p.gated ? p.interleaved ? 1 : n : 0;
        const T *bias = (const T *)p.b1 + (int64_t)expert * h_width();
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int feature = first + (p.gated ? j / 2 : j) * 8 + (lane & 3) * 2;
            if (feature >= n) continue;
            const T *at = bias + feature * apart + (j & 1) * up;
            const float left = to_float(at[0]), right = to_float(at[apart]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                c[i][j][0] += left, c[i][j][1] += right;
                c[i][j][2] += left, c[i][j][3] += right;
            }
        }
    }

    // From row `row` on, vectors of eight features.
    template <int KIND>
    MOE_DEVICE void store_gated(warp_sums &c, bool keeps_h, int64_t row, int feature, int lane) const
    {
        const int n = (int)p.intermediate;
        T *h = (T *)p.h + row * 2 * n + feature, *a = (T *)p.a + row * n + feature;
#pragma unroll 1
        for (int m = 0; m < 4; m++, next_rows(c))
#pragma unroll
            for (int i = 0; i < 2; i++, h += 16 * n, a += 8 * n) {
                uint32_t gate[4], up[4], out[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    gate[j] = storage<T>::pack(c[0][2 * j][i * 2], c[0][2 * j][i * 2 + 1]);
                    up[j] = storage<T>::pack(c[0][2 * j + 1][i * 2], c[0][2 * j + 1][i * 2 + 1]);
                }
                activate_four<T, KIND>(out, gate, up, p.values);
                transpose_four(gate, lane);
                transpose_four(up, lane);
                transpose_four(out, lane);
                if (feature >= n) continue;
                if (keeps_h) {
                    store_global16(h, vector_of(gate));
                    store_global16(h + n, vector_of(up));
                }
                store_global16(a, vector_of(out));
            }
    }
    template <int KIND>
    MOE_DEVICE void store_plain(warp_sums &c, bool keeps_h, int64_t row, int feature, int lane) const
    {
        const int n = (int)p.intermediate;
        T *h = (T *)p.h + row * n + feature, *a = (T *)p.a + row * n + feature;
#pragma unroll 1
        for (int m = 0; m < 4; m++, next_rows(c))
#pragma unroll
            for (int i = 0; i < 2; i++, h += 8 * n, a += 8 * n)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    uint32_t w[4], out[4];
                    pack_row<T>(w, c, i, half);
                    activate_four<T, KIND>(out, w, w, p.values);
                    transpose_four(w, lane);
                    transpose_four(out, lane);
                    if (feature + half * 32 >= n) continue;
                    if (keeps_h) store_global16(h + half * 32, vector_of(w));
                    store_global16(a + half * 32, vector_of(out));
                }
    }
    MOE_DEVICE void finish(const tile_place &at, warp_sums &c, bool active, int warp_row, int warp_column,
                           int lane)
    {
        if (!active) return;
        const int first = first_feature(at, warp_column);
        if (p.b1) add_bias(c, at.expert, first, lane);
        const int64_t row = at.row + warp_row * WARP_TILE + (lane >> 2);
        const int feature = first + (lane & 3) * 8;
        const bool keeps_h = p.h && at.row + warp_row * WARP_TILE < p.h_rows;
        switch (p.activation) {
#define MOE_STORE(enumerator, name, shape, curve)                                                            \
    case enumerator:                                                                                         \
        if constexpr (activation<T, enumerator>::GATED)                                                      \
            return store_gated<enumerator>(c, keeps_h, row, feature, lane);                                  \
        else                                                                                                 \
            return store_plain<enumerator>(c, keeps_h, row, feature, lane);
            MOE_ACTIVATIONS(MOE_STORE)
#undef MOE_STORE
        }
        __builtin_unreachable(); // the host refuses other values
    }
};

template <typename T, bool LORA>
__global__ void __launch_bounds__(THREADS, 1) up(const __grid_constant__ moe_up p)
{
    extern __shared__ __align__(1024) char memory[];
    up_gemm<T, LORA> gemm(p);
    run(gemm, memory);
}

} // namespace
} // namespace gemm_sync
} // namespace moe

extern "C" cudaError_t moe_sm80_up_init(const moe_device *device)
{
    using namespace moe;
    return for_every_type(storage_types(), [&](auto t) {
        using T = typename decltype(t)::type;
        const cudaError_t status = allow_shared(device, gemm_sync::up<T, false>, gemm_sync::SHARED_BYTES);
        return status != cudaSuccess ? status
                                     : allow_shared(device, gemm_sync::up<T, true>, gemm_sync::SHARED_BYTES);
    });
}

extern "C" int moe_sm80_stores(smoe_type dtype)
{
    using namespace moe;
    return for_type(storage_types(), dtype, [](auto) { return cudaSuccess; }) == cudaSuccess;
}

extern "C" cudaError_t moe_sm80_up(moe_launch *on, const moe_up *u)
{
    using namespace moe;
    return for_type(storage_types(), on->dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        return enqueue(u->lora.rank ? gemm_sync::up<T, true> : gemm_sync::up<T, false>, on->sms,
                       gemm_sync::THREADS, gemm_sync::SHARED_BYTES, on->stream, *u);
    });
}
