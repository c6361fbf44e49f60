// The worker warps of dh_f8.cu for SMOE_COMPUTE_F8: from rows of dA' in shared memory and rows of H they
// compute dH8, the partial sums of dS, and dH_w and A'_w, the copies of dH and A' that dw reads (f8.h).
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// A warp goes through the rows of a warp tile one after the other, and has H of the next row in registers. So
// that this comes from L2, it prefetches H of its next warp tile. With eight worker warps each has the warp
// tiles of one consumer warp, with four those of two.
//
// Bytes of a column of 16 rows lie together (moe_f8_dw_byte). A row's bytes of dH_w stay where its
// dA' was, until all rows of the warp tile are there. Those of A'_w wait for eight rows in other memory, and
// are then stored as 8 bytes for each column. So the rows come in the order of moe_f8_dw_byte.
#pragma once
#include "f8.h"
#include "sm90/dh_rows.cuh"
#include "sm90/f8.cuh"
#include "sm90/f8_kernels.h"

namespace moe
{
namespace dh_f8_kernel
{

using namespace dh_kernel;

struct dh_f8_params : dh_params { // dout: (T, d) bytes; hidden: d / 2; w2: moe_map_w1 of pairs
    const float *do_scale;        // (T)
    const float *w_scale;         // (experts)
    uint8_t *dh8;                 // (padded_rows, h_width)
    float *dh_scale;              // (padded_rows, groups)
    int32_t groups;
    moe_f8_dw_rows for_dw[2]; // dH_w, A'_w
};

static_assert((int)MOE_F8_DH_FEATURES == (int)TILE_COLUMNS, "a column tile is a group");

// The place in its warp tile of the row that comes as number m.
MOE_DEVICE int row_in_order(int m)
{
    return (m >> 2) * 2 + (m & 1) + (m & 2) * 4;
}

// ---- H

// A row's elements of this lane.
struct h_vectors {
    uint4 gate, up;
};

template <bool GATED> MOE_DEVICE h_vectors load_h(const dh_f8_params &p, const char *gate, int column)
{
    const bool exists = column < p.intermediate;
    return {load_global16_if(exists, gate),
            GATED ? load_global16_if(exists, up_half(gate, p)) : make_uint4(0, 0, 0, 0)};
}

// A warp tile of H goes to L2. at.column: of the lane.
template <bool GATED, width W>
MOE_DEVICE void prefetch_h(const dh_f8_params &p, place at, int h_width, int lane)
{
    if (lane) return;
    const int columns = min((int)tile_width<W>::COLUMNS, p.intermediate - at.column);
    const char *from = vector_of(p.h, at.row, h_width, at.column);
    const bool whole = columns == p.intermediate;
    const uint32_t bytes = whole ? h_width * 2 * WARP_TILE_ROWS : columns * 2;
#pragma unroll 1
    for (int i = 0; i < (whole ? 1 : (int)WARP_TILE_ROWS); i++) {
        prefetch_bytes(from, bytes);
        if (GATED && !whole) prefetch_bytes(up_half(from, p), bytes);
        from = advance_by_adds(from, h_width * 2);
    }
}

// ---- A row

// This lane's eight elements of dH (gate and up) and A', and its part of <dA', A>.
struct gradients {
    float dh[2][8], a[8], ds;
};

// x: of dA', fp16.
template <typename T, int KIND>
MOE_DEVICE gradients differentiate_eight(const moe_gate_values &values, uint4 x, const h_vectors &h,
                                         float weight, float y_weight)
{
    using S = storage<T>;
    using D = storage<__half>;
    const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, gs[4] = {h.gate.x, h.gate.y, h.gate.z, h.gate.w},
                   us[4] = {h.up.x, h.up.y, h.up.z, h.up.w};
    gradients of;
    of.ds = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const gradient low = differentiate<T, KIND>(S::low(gs[i]), S::low(us[i]), values, D::low(xs[i]),
                                                    weight, y_weight, of.ds);
        const gradient high = differentiate<T, KIND>(S::high(gs[i]), S::high(us[i]), values, D::high(xs[i]),
                                                     weight, y_weight, of.ds);
        of.dh[0][2 * i] = low.gate, of.dh[0][2 * i + 1] = high.gate;
        of.dh[1][2 * i] = low.up, of.dh[1][2 * i + 1] = high.up;
        of.a[2 * i] = low.scaled, of.a[2 * i + 1] = high.scaled;
    }
    return of;
}

MOE_DEVICE float largest_of(const float (&v)[8])
{
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) most = larger_or_nan(most, fabsf(v[i]));
    return most;
}

// The bits of the largest of the lanes that have the same row.
template <width W> MOE_DEVICE uint32_t largest_of_row(float most)
{
    uint32_t amax = __float_as_uint(most);
    if constexpr (tile_width<W>::LANES == 32)
        return __reduce_max_sync(~0u, amax);
    else {
#pragma unroll
        for (int i = 1; i < tile_width<W>::LANES; i *= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, i));
        return amax;
    }
}

// Eight elements times a factor, as bytes.
MOE_DEVICE uint2 quantized(const float (&v)[8], float factor)
{
    return {pack_e4m3(v[0] * factor, v[1] * factor, v[2] * factor, v[3] * factor),
            pack_e4m3(v[4] * factor, v[5] * factor, v[6] * factor, v[7] * factor)};
}

// dH8 and its scale. offset: of the lane's elements of the row; of_group: where the scale is.
template <width W, bool GATED>
MOE_DEVICE void store_dh8(const dh_f8_params &p, const gradients &of, uint32_t amax, int64_t offset,
                          int64_t of_group, bool exists, bool first_lane)
{
    const float factor = moe_f8_factor(amax);
    const char *const to = (const char *)p.dh8 + offset;
    const uint2 gate = quantized(of.dh[0], factor), up = quantized(of.dh[1], factor);
    store_streaming8_if(exists, (void *)to, gate.x, gate.y);
    if (GATED) store_streaming8_if(exists, (void *)advance_by_adds(to, p.intermediate), up.x, up.y);
    if (first_lane) p.dh_scale[of_group] = moe_f8_scale(amax);
}

// ---- The copies for dw

// Lane i has those of row i % 16 of its warp tile.
struct token_scales {
    float x, dout;
};

// The group of a warp tile's features: its number among those of all experts, and the exponents that are
// expected of dH_w and A'_w.
struct group_of_features {
    int64_t number;
    int32_t expected[2];
};

// Where a warp has bytes in shared memory, in pieces of 128 columns of a row. Rows 2 j and 2 j + 1 of a piece
// are read at once, 64 bytes of each, so these lie in different banks.
template <width W> struct kept_bytes {
    enum { PIECES = tile_width<W>::COLUMNS / 128, A_ROWS = 8, A_BYTES = 2 * 128 * A_ROWS };
    uint32_t dh, a;

    static MOE_DEVICE uint32_t in_piece(int row, int column)
    {
        return ((column >> 4 & 7) ^ (row & 1) * 4) * 16 + (column & 15);
    }
    MOE_DEVICE uint32_t dh_at(int half, int row, int column) const
    {
        return dh + (half * PIECES + (column >> 7)) * SUBTILE_BYTES + row * 128 + in_piece(row, column);
    }
    MOE_DEVICE uint32_t a_at(int m, int column) const
    {
        return a + (m % A_ROWS * PIECES + (column >> 7)) * 128 + in_piece(m, column);
    }
};
static_assert(8 * kept_bytes<MIDDLE>::A_BYTES <= 4 * RING_WARP, "A'_w is where dh.cu has H");

// Finds w of a row of dH_w (0) or A'_w (1). Returns what multiplies its elements.
MOE_DEVICE float row_factor(const dh_f8_params &p, int which, const group_of_features &group,
                            int64_t of_group, uint32_t amax, float token_scale, bool first_lane)
{
    const moe_f8_dw_rows &to = p.for_dw[which];
    const int32_t w = moe_f8_row_exponent(group.expected[which], amax, token_scale);
    if (first_lane) {
        to.exponent[of_group] = w;
        if (w > group.expected[which]) atomicMax(to.largest + group.number, w);
    }
    return moe_f8_row_factor(w, amax, token_scale);
}

MOE_DEVICE void keep(uint32_t to, const float (&v)[8], float factor)
{
    const uint2 bytes = quantized(v, factor);
    store_shared8(to, bytes.x, bytes.y);
}

// ldmatrix.trans gives a lane a pair of columns of two rows. Four matrices whose rows are 2 i and 2 i + 1 of
// four blocks of 16 columns give it those of block lane % 4, of eight rows. These are the row and the column
// that the lane addresses, and the first of the columns that it gets, of 64.
struct pair_of_columns {
    int row, from, to;
    MOE_DEVICE explicit pair_of_columns(int lane)
        : row((lane >> 3) * 2 + (lane & 1)), from((lane >> 1 & 3) * 16), to((lane & 3) * 16 + (lane >> 2) * 2)
    {
    }
};
enum { FIRST_COLUMN = 0x6420, SECOND_COLUMN = 0x7531 }; // for __byte_perm

// dH_w of a warp tile. first: column of the tile.
template <width W, bool GATED>
MOE_DEVICE void store_dh_w(const dh_f8_params &p, const kept_bytes<W> &kept, int row, int first, int lane)
{
    const pair_of_columns own(lane);
    const int columns = GATED ? 2 * p.intermediate : p.intermediate;
#pragma unroll 1
    for (int half = 0; half < (GATED ? 2 : 1); half++)
#pragma unroll 1
        for (int c = 0; c < tile_width<W>::COLUMNS; c += 64) {
            uint32_t low[4], high[4]; // rows 0 to 7, 8 to 15
            const uint32_t from = kept.dh_at(half, own.row, c + own.from);
            load_matrices_transposed(low, from);
            load_matrices_transposed(high, from + 8 * 128);
            const int column = first + c + own.to;
            const auto words = [&](int of) {
                return make_uint4(__byte_perm(low[0], high[0], of), __byte_perm(low[1], high[1], of),
                                  __byte_perm(low[2], high[2], of), __byte_perm(low[3], high[3], of));
            };
            uint8_t *const to =
                p.for_dw[0].rows + ((int64_t)(row >> 4) * columns + half * p.intermediate + column) * 16;
            store_streaming16_if(column < p.intermediate, to, words(FIRST_COLUMN));
            store_streaming16_if(column < p.intermediate, to + 16, words(SECOND_COLUMN));
        }
}

// A'_w of eight rows: the first (part 0) or last (1) 8 of 16 bytes of every column.
template <width W>
MOE_DEVICE void store_a_w(const dh_f8_params &p, const kept_bytes<W> &kept, int part, int row, int first,
                          int lane)
{
    const pair_of_columns own(lane);
#pragma unroll 1
    for (int c = 0; c < tile_width<W>::COLUMNS; c += 64) {
        uint32_t m[4];
        load_matrices_transposed(m, kept.a_at(own.row, c + own.from));
        const int column = first + c + own.to;
        uint8_t *const to =
            p.for_dw[1].rows + ((int64_t)(row >> 4) * p.intermediate + column) * 16 + part * 8;
        store_streaming8_if(column < p.intermediate, to, __byte_perm(m[0], m[1], FIRST_COLUMN),
                            __byte_perm(m[2], m[3], FIRST_COLUMN));
        store_streaming8_if(column < p.intermediate, to + 16, __byte_perm(m[0], m[1], SECOND_COLUMN),
                            __byte_perm(m[2], m[3], SECOND_COLUMN));
    }
}

// ---- A warp tile

// Everything of the row that comes as number m. Returns the lane's part of <dA', A>.
template <typename T, int KIND, width W>
MOE_DEVICE float work_row(const dh_f8_params &p, const kept_bytes<W> &kept, uint4 x, const h_vectors &h,
                          place at, const group_of_features &group, int m, float weight, float y_weight,
                          token_scales tokens, int lane)
{
    constexpr bool GATED = activation<T, KIND>::GATED;
    const int row = row_in_order(m), column = tile_width<W>::column(lane);
    const bool exists = at.column < p.intermediate, first_lane = lane % tile_width<W>::LANES == 0;
    const int64_t offset = (int64_t)(at.row + row) * h_width_of<T, KIND>(p) + at.column;
    const int64_t of_group = (int64_t)(at.row + row) * p.groups + at.column / MOE_F8_DH_FEATURES;
    const gradients of = differentiate_eight<T, KIND>(p.values, x, h, weight, y_weight);
    const uint32_t a_max = largest_of_row<W>(largest_of(of.a));
    keep(kept.a_at(m, column), of.a, row_factor(p, 1, group, of_group, a_max, tokens.dout, first_lane));
    const float gate = largest_of(of.dh[0]);
    const uint32_t amax = largest_of_row<W>(GATED ? larger_or_nan(gate, largest_of(of.dh[1])) : gate);
    const float factor = row_factor(p, 0, group, of_group, amax, tokens.x, first_lane);
    keep(kept.dh_at(0, row, column), of.dh[0], factor);
    if (GATED) keep(kept.dh_at(1, row, column), of.dh[1], factor);
    store_dh8<W, GATED>(p, of, amax, offset, of_group, exists, first_lane);
    return of.ds;
}

// Stores dS of the steps before row number m.
template <width W>
MOE_DEVICE void write_sums_in_order(float *ds_out, int m, const float (&ds)[AHEAD], float scales, int lane)
{
    constexpr int LANES = tile_width<W>::LANES, STEP_ROWS = tile_width<W>::ROWS;
    const int step = lane % LANES / (LANES / 4);
    const int own = row_in_order(m + (step - AHEAD) * STEP_ROWS + tile_width<W>::row(lane));
    const float sum = sum_of_lanes<LANES>(ds, lane), scale = __shfl_sync(~0u, scales, own);
    if (lane % (LANES / 4) == 0) ds_out[own] = sum * scale;
}

// h: of the lane's first row, afterwards of that of `next`.
template <typename T, int KIND, width W>
MOE_DEVICE void work_tile(const dh_f8_params &p, const dh_layout<W> &shared, uint32_t warp_tile,
                          const kept_bytes<W> &kept, h_vectors &h, place at, place next, int expert,
                          float weights, token_scales tokens, float *ds_out, int lane)
{
    constexpr bool GATED = activation<T, KIND>::GATED;
    constexpr int ROWS = tile_width<W>::ROWS;
    const int h_width = h_width_of<T, KIND>(p), own = tile_width<W>::row(lane);
    const int column = tile_width<W>::column(lane), vector = column / 8;
    const float scales = load_shared_float(shared.scale(warp_tile, lane & 15));
    const char *const from = vector_of(p.h, at.row, h_width, at.column);
    const char *const behind = vector_of(p.h, next.row + row_in_order(own), h_width, next.column);
    group_of_features group = {(int64_t)expert * p.groups + at.column / MOE_F8_DH_FEATURES, {0, 0}};
    for (int i = 0; i < 2; i++) group.expected[i] = __ldg(p.for_dw[i].expected + group.number);
    float ds[AHEAD] = {};
#pragma unroll 1
    for (int m = 0; m < WARP_TILE_ROWS;) {
        const bool last = m + ROWS == WARP_TILE_ROWS;
        const char *ahead = last ? behind : advance_by_adds(from, row_in_order(m + ROWS + own) * h_width * 2);
        const h_vectors following = load_h<GATED>(p, ahead, last ? next.column : at.column);
        const int row = row_in_order(m + own);
        const uint4 x = load_shared16(shared.warp_tile(warp_tile) + (vector >> 3) * SUBTILE_BYTES +
                                      moe_subtile_offset(row, vector & 7));
        const float weight = __shfl_sync(~0u, weights, row);
        const token_scales of_row = {__shfl_sync(~0u, tokens.x, row), __shfl_sync(~0u, tokens.dout, row)};
        ds[0] = ds[1], ds[1] = ds[2], ds[2] = ds[3];
        ds[3] = work_row<T, KIND, W>(p, kept, x, h, at, group, m + own, weight,
                                     weight * __shfl_sync(~0u, scales, row), of_row, lane);
        h = following;
        m += ROWS;
        if (m % (AHEAD * ROWS) == 0) write_sums_in_order<W>(ds_out, m, ds, scales, lane);
        if (m % kept.A_ROWS == 0) {
            __syncwarp();
            store_a_w(p, kept, m / kept.A_ROWS - 1, at.row, at.column - column, lane);
            __syncwarp();
        }
    }
    store_dh_w<W, GATED>(p, kept, at.row, at.column - column, lane);
}

// ---- The warp tiles of a worker warp

template <width W, int WORKERS> struct warp_tiles {
    const tile_walk &walk;
    int worker, consumer, unit; // worker: of four
    moe_work tile;

    MOE_DEVICE warp_tiles(const tile_walk &of, int which)
        : walk(of), worker(which & 3), consumer(which >> 2), unit(blockIdx.x), tile({0, 0})
    {
        if (exists()) tile = tile_of<W>(walk, unit);
        settle();
    }
    MOE_DEVICE bool exists() const
    {
        return unit < walk.units;
    }
    // Starts to read which tile comes next; settle() waits for it.
    MOE_DEVICE void advance()
    {
        if (WORKERS == 4) { // they have the warp tiles of both consumers
            consumer ^= 1;
            if (consumer && consumer < moe_work_blocks(tile)) return;
            consumer = 0;
        }
        unit += gridDim.x;
        if (exists()) tile = tile_of<W>(walk, unit);
    }
    // Not all tiles have rows of consumer 1.
    MOE_DEVICE void settle()
    {
        while (WORKERS == 8 && exists() && consumer >= moe_work_blocks(tile)) advance();
    }
    MOE_DEVICE place at(int column) const
    {
        return {tile.row + consumer * MOE_BLOCK_ROWS + worker * WARP_TILE_ROWS,
                column_of<W>(walk, unit) * TILE_COLUMNS + column};
    }
};

MOE_DEVICE token_scales load_scales(const dh_f8_params &p, int token)
{
    return {__ldg(p.for_dw[0].token_scale + max(token, 0)), __ldg(p.for_dw[1].token_scale + max(token, 0))};
}

template <typename T, width W, int WORKERS, int KIND>
MOE_DEVICE void work_f8_tiles(const dh_f8_params &p, const tile_walk &walk, const dh_layout<W> &shared,
                              int worker, int lane)
{
    constexpr bool GATED = activation<T, KIND>::GATED;
    const int column = tile_width<W>::column(lane), h_width = h_width_of<T, KIND>(p), row = lane & 15;
    warp_tiles<W, WORKERS> tiles(walk, worker);
    if (!tiles.exists()) return;
    place at = tiles.at(column);
    int consumer = tiles.consumer, expert = moe_work_expert(tiles.tile);
    float weights = __ldg(p.row_weight + at.row + row);
    token_scales tokens = load_scales(p, __ldg(p.row_token + at.row + row));
    h_vectors h = load_h<GATED>(
        p, vector_of(p.h, at.row + row_in_order(tile_width<W>::row(lane)), h_width, at.column), at.column);
    tiles.advance();
    tiles.settle();
    uint32_t phases = 0; // bit c: parity of the next warp tile of consumer c
    for (bool more = true; more;) {
        more = tiles.exists();
        const place next = more ? tiles.at(column) : at; // after the last tile its H is loaded once more
        const int next_consumer = tiles.consumer, next_expert = moe_work_expert(tiles.tile);
        tiles.advance();
        prefetch_h<GATED, W>(p, next, h_width, lane);
        const float next_weights = __ldg(p.row_weight + next.row + row);
        const int next_token = __ldg(p.row_token + next.row + row);
        const uint32_t warp_tile = consumer * 4 + (worker & 3);
        const kept_bytes<W> kept = {shared.warp_tile(warp_tile),
                                    shared.base + RING + worker * kept_bytes<W>::A_BYTES};
        barrier_wait(shared.warp_tile_full(warp_tile), phases >> consumer & 1);
        const token_scales next_tokens = load_scales(p, next_token);
        work_tile<T, KIND, W>(p, shared, warp_tile, kept, h, at, next, expert, weights, tokens,
                              p.ds + at.column / TILE_COLUMNS * p.padded_rows + at.row, lane);
        __syncwarp();
        if (lane == 0) barrier_arrive(shared.warp_tile_empty(warp_tile));
        phases ^= 1 << consumer;
        at = next, consumer = next_consumer, expert = next_expert;
        weights = next_weights, tokens = next_tokens;
        tiles.settle();
    }
}

template <typename T, width W, int WORKERS>
MOE_DEVICE void work_f8_tiles(const dh_f8_params &p, const tile_walk &walk, const dh_layout<W> &shared,
                              int worker, int lane)
{
    switch (p.activation) {
#define MOE_WORK(enumerator, name, shape, curve)                                                             \
    case enumerator: return work_f8_tiles<T, W, WORKERS, enumerator>(p, walk, shared, worker, lane);
        MOE_ACTIVATIONS(MOE_WORK)
#undef MOE_WORK
    }
    __builtin_unreachable(); // the host refuses other values
}

} // namespace dh_f8_kernel
} // namespace moe
