// The worker warps of dh.cu: from rows of dA' in shared memory and rows of H they compute dH, A' and
// the partial sums of dS. Worker warp `worker` takes the warp tiles of warp `worker` of both consumers.
// The addresses of a row follow from those of the row before by additions.
// Terms: docs/glossary.md; symbols: include/smoe.h.
#pragma once
#include "common/activation_gradient.cuh"
#include "problem.h"
#include "sm90/dh_layout.cuh"

namespace moe
{
namespace dh_kernel
{

// A warp tile in global memory: its first row, and this lane's first column.
struct place {
    int row, column;
};

// This lane's 16 bytes of a row, in H's or dH's gate half, or in A'.
MOE_DEVICE const char *vector_of(const void *matrix, int row, int width, int column)
{
    return (const char *)matrix + ((int64_t)row * width + column) * 2;
}

template <typename T, int KIND> MOE_DEVICE int h_width_of(const dh_params &p)
{
    return activation<T, KIND>::GATED ? 2 * p.intermediate : p.intermediate;
}

// The address in the up half that belongs to an address in the gate half.
MOE_DEVICE const char *up_half(const char *gate, const dh_params &p)
{
    return advance_by_adds(gate, (uint32_t)p.intermediate * 2);
}

template <bool GATED> struct h_ring {
    const dh_params &p;
    uint32_t slots; // of this lane

    // Starts the copy of a row into a slot. Columns that do not exist are not read.
    MOE_DEVICE void fetch(const char *gate, int column, int slot) const
    {
        const uint32_t bytes = column < p.intermediate ? 16u : 0u;
        copy16_async_unhinted(slots + slot * RING_ROW, gate, bytes);
        if (GATED) copy16_async_unhinted(slots + slot * RING_ROW + RING_HALF, up_half(gate, p), bytes);
        commit_copies();
    }
    MOE_DEVICE uint4 gate(int slot) const
    {
        return load_shared16(slots + slot * RING_ROW);
    }
    MOE_DEVICE uint4 up(int slot) const
    {
        return GATED ? load_shared16(slots + slot * RING_ROW + RING_HALF) : make_uint4(0, 0, 0, 0);
    }
};

// Computes and stores a row's vectors of dH and A'. Returns the lane's part of <dA', A>.
template <typename T, int KIND>
MOE_DEVICE float write_row(const dh_params &p, uint4 x, uint4 g, uint4 u, const char *to_dh, const char *to_a,
                           bool exists, float weight, float y_weight)
{
    uint4 gate, up, scaled;
    float ds = 0.0f;
    differentiate_pair<T, KIND>(g.x, u.x, p.values, x.x, weight, y_weight, ds, gate.x, up.x, scaled.x);
    differentiate_pair<T, KIND>(g.y, u.y, p.values, x.y, weight, y_weight, ds, gate.y, up.y, scaled.y);
    differentiate_pair<T, KIND>(g.z, u.z, p.values, x.z, weight, y_weight, ds, gate.z, up.z, scaled.z);
    differentiate_pair<T, KIND>(g.w, u.w, p.values, x.w, weight, y_weight, ds, gate.w, up.w, scaled.w);
    store_streaming16_if(exists, (void *)to_dh, gate);
    if (activation<T, KIND>::GATED) store_streaming16_if(exists, (void *)up_half(to_dh, p), up);
    store_streaming16_if(exists, (void *)to_a, scaled);
    return ds;
}

// Every lane has a part of the sums of 4 steps. Of the LANES lanes that have a row, the i-th quarter gets the
// sum of step i.
template <int LANES> MOE_DEVICE float sum_of_lanes(const float (&v)[AHEAD], int lane)
{
    const bool high = lane & LANES / 2, odd = lane & LANES / 4;
    float first = high ? v[2] : v[0], second = high ? v[3] : v[1];
    first += __shfl_xor_sync(~0u, high ? v[0] : v[2], LANES / 2);
    second += __shfl_xor_sync(~0u, high ? v[1] : v[3], LANES / 2);
    float sum = odd ? second : first;
    sum += __shfl_xor_sync(~0u, odd ? first : second, LANES / 4);
#pragma unroll
    for (int apart = LANES / 8; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    return sum;
}

// Stores dS of a group of rows of a warp tile, from `row` on. row < 0: there are none yet.
template <width W>
MOE_DEVICE void write_sums(float *ds_out, int row, const float (&ds)[AHEAD], float scales, int lane)
{
    constexpr int LANES = tile_width<W>::LANES;
    const int own = row + lane % LANES / (LANES / 4) * tile_width<W>::ROWS + tile_width<W>::row(lane);
    const float sum = sum_of_lanes<LANES>(ds, lane), scale = __shfl_sync(~0u, scales, own);
    if (row >= 0 && lane % (LANES / 4) == 0) ds_out[own] = sum * scale;
}

// Computes one warp tile. Each row of H is fetched four steps ahead. `next`: the warp tile after it.
template <typename T, int KIND, width W>
MOE_DEVICE void work_warp_tile(const dh_params &p, const h_ring<activation<T, KIND>::GATED> &ring,
                               const dh_layout<W> &shared, uint32_t warp_tile, place at, place next,
                               float weights, float *ds_out, int lane)
{
    constexpr int ROWS = tile_width<W>::ROWS, GROUP_ROWS = tile_width<W>::GROUP_ROWS;
    const int a_width = p.intermediate, h_width = h_width_of<T, KIND>(p), own = tile_width<W>::row(lane);
    const int vector = tile_width<W>::column(lane) / 8;
    const float scales = load_shared_float(shared.scale(warp_tile, lane & 15)), y_weights = weights * scales;
    const bool exists = at.column < p.intermediate;
    const char *to_dh = vector_of(p.dh, at.row + own, h_width, at.column),
               *to_a = vector_of(p.a, at.row + own, a_width, at.column),
               *ahead = vector_of(p.h, at.row + own + (AHEAD - 1) * ROWS, h_width, at.column);
    const char *const behind = vector_of(p.h, next.row + own, h_width, next.column);
    uint32_t here =
        shared.warp_tile(warp_tile) + (vector >> 3) * SUBTILE_BYTES + moe_subtile_offset(own, vector & 7);
    float ds[AHEAD] = {};
    wait_copies<AHEAD - 1>();
    uint4 x = load_shared16(here), g = ring.gate(0), u = ring.up(0);
#pragma unroll 1
    for (int row = 0; row < WARP_TILE_ROWS; row += GROUP_ROWS) {
        const bool last = row == WARP_TILE_ROWS - GROUP_ROWS;
        const int ahead_column = last ? next.column : at.column;
        write_sums<W>(ds_out, row - GROUP_ROWS, ds, scales, lane); // nothing here waits for this load
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            uint4 x_next = x, g_next = g, u_next = u;
            ahead = last && i == 0 ? behind : advance_by_adds(ahead, h_width * 2 * ROWS);
            ring.fetch(ahead, ahead_column,
                       i); // what was in this slot has been in registers since the last iteration
            wait_copies<AHEAD - 1>();
            if (i + 1 < AHEAD || !last) {
                // Steps i + 1 to 3 of these four, then step 0 of the next four; the vectors of their rows are
                // exchanged.
                const int further = (i + 1) * ROWS;
                const uint32_t below = (here ^ (further & 7) << 4) + further * MOE_SUBTILE_ROW_BYTES;
                if (i + 1 == AHEAD) here = below;
                x_next = load_shared16(below);
                g_next = ring.gate((i + 1) % AHEAD), u_next = ring.up((i + 1) % AHEAD);
            }
            const int of_row = row + i * ROWS + own;
            ds[i] = write_row<T, KIND>(p, x, g, u, to_dh, to_a, exists, __shfl_sync(~0u, weights, of_row),
                                       __shfl_sync(~0u, y_weights, of_row));
            to_dh = advance_by_adds(to_dh, h_width * 2 * ROWS);
            to_a = advance_by_adds(to_a, a_width * 2 * ROWS);
            x = x_next, g = g_next, u = u_next;
        }
    }
    write_sums<W>(ds_out, WARP_TILE_ROWS - GROUP_ROWS, ds, scales, lane);
}

template <typename T, width W, int KIND>
MOE_DEVICE void work_tiles(const dh_params &p, const tile_walk &walk, const dh_layout<W> &shared, int worker,
                           int lane)
{
    if (blockIdx.x >= walk.units) return;
    const h_ring<activation<T, KIND>::GATED> ring = {p, shared.base + RING + worker * RING_WARP + lane * 16};
    uint32_t phases = 0; // bit c: parity of consumer c's next warp tile
    moe_work tile = tile_of<W>(walk, blockIdx.x);
    const int own = tile_width<W>::row(lane), column = tile_width<W>::column(lane);
    place at = {tile.row + worker * WARP_TILE_ROWS, column_of<W>(walk, blockIdx.x) * TILE_COLUMNS + column};
    float weights = __ldg(p.row_weight + at.row + (lane & 15));
    const int h_width = h_width_of<T, KIND>(p);
    for (int i = 0; i < AHEAD; i++)
        ring.fetch(vector_of(p.h, at.row + i * tile_width<W>::ROWS + own, h_width, at.column), at.column, i);
    for (int unit = blockIdx.x; unit < walk.units; unit += gridDim.x) {
        const int blocks = moe_work_blocks(tile);
        const int column_tile = column_of<W>(walk, unit);
        moe_work after = tile;
        place first = at; // of the next tile; after the last tile it is fetched once more
        if (unit + gridDim.x < walk.units) {
            after = tile_of<W>(walk, unit + gridDim.x);
            first = {after.row + worker * WARP_TILE_ROWS,
                     column_of<W>(walk, unit + gridDim.x) * TILE_COLUMNS + column};
        }
        for (int consumer = 0; consumer < blocks; consumer++) {
            const uint32_t warp_tile = consumer * 4 + worker, parity = phases >> consumer & 1;
            const place next = consumer + 1 < blocks ? place{at.row + MOE_BLOCK_ROWS, at.column} : first;
            const float next_weights = __ldg(p.row_weight + next.row + (lane & 15));
            barrier_wait(shared.warp_tile_full(warp_tile), parity);
            work_warp_tile<T, KIND, W>(p, ring, shared, warp_tile, at, next, weights,
                                       p.ds + column_tile * p.padded_rows + at.row, lane);
            __syncwarp();
            if (lane == 0) barrier_arrive(shared.warp_tile_empty(warp_tile));
            at = next;
            weights = next_weights;
            phases ^= 1 << consumer;
        }
        tile = after;
    }
    wait_copies<0>();
}

template <typename T, width W>
MOE_DEVICE void work_tiles(const dh_params &p, const tile_walk &walk, const dh_layout<W> &shared, int worker,
                           int lane)
{
    switch (p.activation) {
#define MOE_WORK(enumerator, name, shape, curve)                                                             \
    case enumerator: return work_tiles<T, W, enumerator>(p, walk, shared, worker, lane);
        MOE_ACTIVATIONS(MOE_WORK)
#undef MOE_WORK
    }
    __builtin_unreachable(); // the host refuses other values
}

} // namespace dh_kernel
} // namespace moe
