// Down-projection: Y[r] = A[r] W2[e]^T + b2[e], for one column chunk of d.
// For few rows few_rows.cu computes it.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Shapes: A (padded rows, n), W2 (E, d, n), Y (padded rows, columns of the chunk). FLOPs 2 R d n over all
// chunks.
//
// Bytes over all chunks, of 16-bit elements:
// - A: 2 R n, read once for each column tile. L2 can serve every column tile after the first.
// - W2: 2 E d n, read once if L2 serves all row tiles of each expert except its first.
// - Y: 2 R d written.
//
// Tile: 128 x 256 (gemm_sync.cuh), both operands K-major.
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

template <typename T, bool WITH_LORA> struct down_gemm {
    using type = T;
    static constexpr bool A_MN = false, B_MN = false, LORA = WITH_LORA;
    const moe_down &p;
    const tile_list list;
    even_rows<TILE_ROWS> rows;
    even_rows<TILE_COLUMNS> weights;
    bool low; // LORA: the copies are at steps of P2 and B2

    MOE_DEVICE explicit down_gemm(const moe_down &down)
        : p(down), list(down.lists.tiles, down.lists.counts, down.columns, TILE_COLUMNS)
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
        return ((int)p.intermediate + STEP - 1) / STEP;
    }
    MOE_DEVICE int steps(const tile_place &) const
    {
        return LORA ? steps_of_k() + low_steps(p.lora) : steps_of_k();
    }
    MOE_DEVICE void begin(const tile_place &at)
    {
        using copier = k_major<TILE_COLUMNS>;
        low = false;
        const int r = copier::row(), column = at.column_tile * TILE_COLUMNS + r;
        rows.first = (const char *)p.a + (at.row + r) * p.intermediate * 2;
        weights.first =
            (const char *)p.w2 + (at.expert * p.hidden + p.first_column + column) * p.intermediate * 2;
        rows.apart = weights.apart = copier::APART * ((uint32_t)p.intermediate / 8);
        rows.real = at.blocks == 1 ? 1 : 3;
        weights.real = 0;
#pragma unroll
        for (int i = 0; i < copier::COUNT; i++)
            weights.real |= (column + i * copier::APART < p.columns ? 1u : 0u) << i;
    }
    MOE_DEVICE void begin_low(const tile_place &at)
    {
        using copier = k_major<TILE_COLUMNS>;
        const int r = copier::row(), column = at.column_tile * TILE_COLUMNS + r;
        low = true;
        rows.first = (const char *)p.lora.low + (at.row + r) * p.lora.rank * 2;
        weights.first =
            (const char *)p.lora.factor + (at.expert * p.hidden + p.first_column + column) * p.lora.rank * 2;
        rows.apart = weights.apart = copier::APART * vectors();
    }
    // Of a row of both operands.
    MOE_DEVICE uint32_t vectors() const
    {
        return (uint32_t)(LORA && low ? p.lora.rank : p.intermediate) / 8;
    }
    MOE_DEVICE void copy_a(int step, uint32_t slot)
    {
        rows.copy(slot, step, vectors());
    }
    MOE_DEVICE void copy_b(int step, uint32_t slot)
    {
        weights.copy(slot, step, vectors());
    }
    MOE_DEVICE bool active(const tile_place &at, int warp_row, int warp_column) const
    {
        return at.has_block(warp_row) && at.column_tile * TILE_COLUMNS + warp_column * WARP_TILE < p.columns;
    }
    // bias: of the warp's first column; `columns` of its columns exist
    MOE_DEVICE void add_bias(warp_sums &c, const T *bias, int columns, int lane) const
    {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int column = j * 8 + (lane & 3) * 2;
            if (column >= columns) continue;
            const float left = to_float(bias[column]), right = to_float(bias[column + 1]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                c[i][j][0] += left, c[i][j][1] += right;
                c[i][j][2] += left, c[i][j][3] += right;
            }
        }
    }
    MOE_DEVICE void finish(const tile_place &at, warp_sums &c, bool active, int warp_row, int warp_column,
                           int lane)
    {
        if (!active) return;
        const int64_t row = at.row + warp_row * WARP_TILE;
        const int column = at.column_tile * TILE_COLUMNS + warp_column * WARP_TILE,
                  columns = (int)p.columns - column;
        if (p.b2)
            add_bias(c, (const T *)p.b2 + at.expert * p.hidden + p.first_column + column, columns, lane);
        store_sums(c, (T *)p.y + row * p.columns + column, p.columns, WARP_TILE, columns, lane);
    }
};

template <typename T, bool LORA>
__global__ void __launch_bounds__(THREADS, 1) down(const __grid_constant__ moe_down p)
{
    extern __shared__ __align__(1024) char memory[];
    down_gemm<T, LORA> gemm(p);
    run(gemm, memory);
}

} // namespace
} // namespace gemm_sync
} // namespace moe

extern "C" cudaError_t moe_sm80_down_init(const moe_device *device)
{
    using namespace moe;
    return for_every_type(storage_types(), [&](auto t) {
        using T = typename decltype(t)::type;
        const cudaError_t status = allow_shared(device, gemm_sync::down<T, false>, gemm_sync::SHARED_BYTES);
        return status != cudaSuccess
                   ? status
                   : allow_shared(device, gemm_sync::down<T, true>, gemm_sync::SHARED_BYTES);
    });
}

extern "C" cudaError_t moe_sm80_down(moe_launch *on, const moe_down *d)
{
    using namespace moe;
    return for_type(storage_types(), on->dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        return enqueue(d->lora.rank ? gemm_sync::down<T, true> : gemm_sync::down<T, false>, on->sms,
                       gemm_sync::THREADS, gemm_sync::SHARED_BYTES, on->stream, *d);
    });
}
