// dX~[r] = dH[r] W1[e], for one column chunk of d.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Shapes: dH (padded rows, h), W1 (E, h, d), dX~ (padded rows, columns of the chunk), where h is the number
// of columns of H. FLOPs 2 R d h over all chunks.
//
// Bytes over all chunks, of 16-bit elements:
// - dH: 2 R h, read once for each column tile. L2 can serve every column tile after the first.
// - W1: 2 E d h, read once if L2 serves all row tiles of each expert except its first.
// - dX~: 2 R d written.
//
// Tile: 128 x 256 (gemm_sync.cuh). dH is K-major. W1 is MN-major, as it is in memory: the GEMM sums over the
// columns of dH, first those of the gate, and finds the row of W1 for each of them.
//
// Also dlogits Wr: there the number of rows is no multiple of 64, and that of the columns of dlogits none
// of 8.
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

template <typename T, bool WITH_LORA> struct dx_gemm {
    using type = T;
    static constexpr bool A_MN = false, B_MN = true, LORA = WITH_LORA;
    using weights = mn_major<TILE_COLUMNS>;
    const moe_dx_rows &p;
    const tile_list list;
    even_rows<TILE_ROWS> rows;
    const char *w1; // the thread's column of the expert's W1, of its first row of the next step
    uint32_t real;  // it exists
    bool low;       // LORA: the copies are at steps of Q1 and A1

    MOE_DEVICE explicit dx_gemm(const moe_dx_rows &dx)
        : p(dx), list(dx.lists.tiles, dx.lists.counts, dx.columns, TILE_COLUMNS)
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
    MOE_DEVICE int dh_width() const
    {
        return p.halves * (int)p.row_width;
    }
    MOE_DEVICE int steps_of_k() const
    {
        return (dh_width() + STEP - 1) / STEP;
    }
    MOE_DEVICE int steps(const tile_place &) const
    {
        return LORA ? steps_of_k() + low_steps(p.lora) : steps_of_k();
    }
    MOE_DEVICE void begin(const tile_place &at)
    {
        using copier = k_major<TILE_ROWS>;
        low = false;
        const int r = copier::row(), column = at.column_tile * TILE_COLUMNS + weights::column();
        rows.first = (const char *)p.dh + (int64_t)(at.row + r) * dh_width() * 2;
        rows.apart = copier::APART * ((uint32_t)dh_width() / 8);
        rows.real = 0;
#pragma unroll
        for (int i = 0; i < copier::COUNT; i++)
            rows.real |= (i < at.blocks && at.row + r + i * copier::APART < p.rows ? 1u : 0u) << i;
        w1 = (const char *)p.w1 +
             ((int64_t)at.expert * p.halves * p.intermediate * p.hidden + p.first_column + column) * 2 +
             weights::row() * rows_apart();
        real = column < p.columns;
    }
    // A1 takes the place of W1.
    MOE_DEVICE void begin_low(const tile_place &at)
    {
        const int r = k_major<TILE_ROWS>::row(), column = at.column_tile * TILE_COLUMNS + weights::column();
        low = true;
        rows.first = (const char *)p.lora.low + (at.row + r) * p.lora.rank * 2;
        rows.apart = k_major<TILE_ROWS>::APART * ((uint32_t)p.lora.rank / 8);
        w1 = (const char *)p.lora.factor +
             ((at.expert * p.lora.rank + weights::row()) * p.hidden + p.first_column + column) * 2;
    }
    MOE_DEVICE void copy_a(int step, uint32_t slot)
    {
        rows.copy(slot, step, (uint32_t)(LORA && low ? (int)p.lora.rank : dh_width()) / 8);
    }
    // Column k of dH is gate k, or up k - n. Interleaved, gate and up rows of W1 alternate: gate k is row 2k,
    // up k - n is row 2k - (2n - 1).
    MOE_DEVICE int64_t rows_apart() const
    {
        return (p.interleaved && !(LORA && low) ? 2 : 1) * p.hidden * 2;
    }
    MOE_DEVICE void copy_b(int step, uint32_t slot)
    {
        const int n = (int)(LORA && low ? p.lora.rank : p.intermediate),
                  rows_of_w1 = LORA && low ? n : p.halves * n;
        const int64_t back = p.interleaved ? (2 * n - 1) * p.hidden * 2 : 0;
#pragma unroll
        for (int i = 0; i < weights::COUNT; i++) {
            const int k = step * STEP + weights::row() + i * weights::APART;
            weights::copy_row(slot, i, k < rows_of_w1 ? real : 0,
                              w1 + i * weights::APART * rows_apart() - (k < n ? 0 : back));
        }
        w1 += STEP * rows_apart();
    }
    MOE_DEVICE bool active(const tile_place &at, int warp_row, int warp_column) const
    {
        return at.has_block(warp_row) && at.column_tile * TILE_COLUMNS + warp_column * WARP_TILE < p.columns;
    }
    MOE_DEVICE void finish(const tile_place &at, warp_sums &c, bool active, int warp_row, int warp_column,
                           int lane)
    {
        if (!active) return;
        const int64_t row = at.row + warp_row * WARP_TILE;
        const int column = at.column_tile * TILE_COLUMNS + warp_column * WARP_TILE;
        store_sums(c, (T *)p.dx + row * p.columns + column, p.columns, (int)(p.rows - row),
                   (int)p.columns - column, lane);
    }
};

template <typename T, bool LORA>
__global__ void __launch_bounds__(THREADS, 1) dx_rows(const __grid_constant__ moe_dx_rows p)
{
    extern __shared__ __align__(1024) char memory[];
    dx_gemm<T, LORA> gemm(p);
    run(gemm, memory);
}

} // namespace
} // namespace gemm_sync
} // namespace moe

extern "C" cudaError_t moe_sm80_dx_rows_init(const moe_device *device)
{
    using namespace moe;
    return for_every_type(storage_types(), [&](auto t) {
        using T = typename decltype(t)::type;
        const cudaError_t status =
            allow_shared(device, gemm_sync::dx_rows<T, false>, gemm_sync::SHARED_BYTES);
        return status != cudaSuccess
                   ? status
                   : allow_shared(device, gemm_sync::dx_rows<T, true>, gemm_sync::SHARED_BYTES);
    });
}

extern "C" cudaError_t moe_sm80_dx_rows(moe_launch *on, const moe_dx_rows *d)
{
    using namespace moe;
    return for_type(storage_types(), on->dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        return enqueue(d->lora.rank ? gemm_sync::dx_rows<T, true> : gemm_sync::dx_rows<T, false>, on->sms,
                       gemm_sync::THREADS, gemm_sync::SHARED_BYTES, on->stream, *d);
    });
}
