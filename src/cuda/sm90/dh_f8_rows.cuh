// The worker warps of dh_f8.cu: from rows of dA' in shared memory and rows of H they compute dH8, the partial
// sums of dS, and what dw reads: dH and A' in dtype or, FOR_DW, their copies dH_w and A'_w (f8.h).
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// With eight worker warps each has the warp tiles of one consumer warp, with four those of two. A warp goes
// through the rows of a warp tile one step after the other. H comes from a ring in shared memory, DEPTH steps
// ahead. With DEPTH 0 there is no memory for it: then H of the next step is in registers, and in L2 earlier.
//
// The 16 bytes that a column has of 16 rows of a copy lie together (moe_f8_dw_byte). So a warp keeps the
// bytes of its warp tile: those of dH_w where the dA' of their row was, those of A'_w behind them or apart.
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

// The steps of H that come next, of one warp. take(): H of the next step; starts the copy of the one DEPTH
// steps after it, which begins at `ahead`.
template <bool GATED, int DEPTH> struct h_ahead {
    enum { STEPS = DEPTH };
    h_ring<GATED> ring;

    MOE_DEVICE h_ahead(const dh_f8_params &p, uint32_t memory, int lane) : ring{p, memory + lane * 16}
    {
    }
    MOE_DEVICE void begin(const char *gate, int column, int step)
    {
        ring.fetch(gate, column, step);
    }
    MOE_DEVICE h_vectors take(const char *ahead, int column, int step)
    {
        const int slot = step % DEPTH;
        wait_copies<DEPTH - 1>();
        const h_vectors h = {ring.gate(slot), ring.up(slot)};
        ring.fetch(ahead, column, slot);
        return h;
    }
};
template <bool GATED> struct h_ahead<GATED, 0> {
    enum { STEPS = 1 };
    const dh_f8_params &p;
    h_vectors next;

    MOE_DEVICE h_ahead(const dh_f8_params &params, uint32_t, int) : p(params)
    {
    }
    MOE_DEVICE void begin(const char *gate, int column, int)
    {
        next = load_h<GATED>(p, gate, column);
    }
    MOE_DEVICE h_vectors take(const char *ahead, int column, int)
    {
        const h_vectors h = next;
        next = load_h<GATED>(p, ahead, column);
        return h;
    }
};

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

// offset: of the lane's elements of the row
template <bool GATED>
MOE_DEVICE void store_dh8(const dh_f8_params &p, const gradients &of, uint32_t amax, int64_t offset,
                          bool exists)
{
    const float factor = moe_f8_factor(amax);
    const char *const to = (const char *)p.dh8 + offset;
    const uint2 gate = quantized(of.dh[0], factor), up = quantized(of.dh[1], factor);
    store_streaming8_if(exists, (void *)to, gate.x, gate.y);
    if (GATED) store_streaming8_if(exists, (void *)advance_by_adds(to, p.intermediate), up.x, up.y);
}

template <typename T> MOE_DEVICE uint4 pack_eight(const float (&v)[8])
{
    using S = storage<T>;
    return {S::pack(v[0], v[1]), S::pack(v[2], v[3]), S::pack(v[4], v[5]), S::pack(v[6], v[7])};
}

// The lane's vectors of dH and A' in dtype.
template <typename T, bool GATED>
MOE_DEVICE void store_in_dtype(const dh_f8_params &p, const gradients &of, int64_t offset, int column,
                               bool exists)
{
    const char *const to_dh = (const char *)p.dh + 2 * offset;
    const int64_t a_bytes = GATED ? offset + column : 2 * offset; // 2 (row n + column)
    store_streaming16_if(exists, (void *)to_dh, pack_eight<T>(of.dh[0]));
    if (GATED) store_streaming16_if(exists, (void *)up_half(to_dh, p), pack_eight<T>(of.dh[1]));
    store_streaming16_if(exists, (char *)p.a + a_bytes, pack_eight<T>(of.a));
}

// ---- The copies for dw

struct token_scales {
    float x, dout;
};
MOE_DEVICE token_scales load_scales(const dh_f8_params &p, int token)
{
    return {__ldg(p.for_dw[0].token_scale + max(token, 0)), __ldg(p.for_dw[1].token_scale + max(token, 0))};
}

// The group of a warp tile's features: its number among those of all experts, and the exponents that are
// expected of dH_w and A'_w.
struct group_of_features {
    int64_t number;
    int32_t expected[2];
};

// Where a warp keeps bytes in shared memory, in pieces of 128 columns: row by row, and a row's 16 bytes
// exchanged so that the 32 bytes that are read at once of rows 2 j and 2 j + 1 lie in different banks.
template <width W> struct kept_bytes {
    enum { PIECES = tile_width<W>::COLUMNS / 128, BYTES = PIECES * SUBTILE_BYTES };
    uint32_t dh, a;

    static MOE_DEVICE uint32_t at(int row, int column)
    {
        return (column >> 7) * SUBTILE_BYTES + row * 128 + ((column >> 4 & 7) ^ (row & 1) * 4) * 16 +
               (column & 15);
    }
};
static_assert(2 * kept_bytes<MIDDLE>::BYTES == WARP_TILE_BYTES, "dH_w is where dA' was");

// A lane's row of a warp tile: the largest of dH, and w of dH_w and A'_w. They are stored after the last row.
struct row_numbers {
    uint32_t amax;
    int32_t w[2];
};

template <width W, bool FOR_DW>
MOE_DEVICE void store_numbers(const dh_f8_params &p, const row_numbers &of, place at,
                              const group_of_features &group, int lane)
{
    constexpr int LANES = tile_width<W>::LANES, ROWS = tile_width<W>::ROWS;
    if (lane % LANES >= WARP_TILE_ROWS / ROWS) return;
    const int row = at.row + lane % LANES * ROWS + tile_width<W>::row(lane);
    const int64_t to = (int64_t)row * p.groups + at.column / MOE_F8_DH_FEATURES;
    p.dh_scale[to] = moe_f8_scale(of.amax);
    if constexpr (FOR_DW)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            p.for_dw[i].exponent[to] = of.w[i];
            if (of.w[i] > group.expected[i]) atomicMax(p.for_dw[i].largest + group.number, of.w[i]);
        }
}

// What multiplies a row's elements of dH_w and A'_w. Lane i has that of row i % 16 for the expected w, which
// is right if no product exceeds 448. NaN: it is less than any w of the token.
struct copy_factors {
    float of[2];
};
MOE_DEVICE float expected_factor(int32_t expected, float token_scale)
{
    const int32_t k = moe_f8_exponent(token_scale) - expected;
    return k > -MOE_F8_LEAST ? __uint_as_float(0x7fc00000) : moe_f8_power(k);
}

// The factors of a row that may exceed the expected w. row: of all.
template <width W>
MOE_DEVICE copy_factors find_factors(const dh_f8_params &p, const group_of_features &group, uint32_t dh_max,
                                     float a_most, int row, row_numbers &own, bool is_own)
{
    const token_scales token = load_scales(p, __ldg(p.row_token + row));
    const uint32_t most[2] = {dh_max, largest_of_row<W>(a_most)};
    const float scale[2] = {token.x, token.dout};
    copy_factors factors;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int32_t w = moe_f8_row_exponent(group.expected[i], most[i], scale[i]);
        if (is_own) own.w[i] = w;
        factors.of[i] = moe_f8_row_factor(w, most[i], scale[i]);
    }
    return factors;
}

MOE_DEVICE void keep(uint32_t to, const float (&v)[8], float factor)
{
    const uint2 bytes = quantized(v, factor);
    store_shared8(to, bytes.x, bytes.y);
}

// ldmatrix.trans gives lane (i, j), 4 i + j, of every matrix what its rows 2 j and 2 j + 1 have in columns
// 2 i and 2 i + 1. With rows 2 m and 2 m + 1 of 16 columns as rows 0, 1 and also 2, 3 of matrix m, and those
// of the next 16 columns as 4, 5 and 6, 7, lanes (i, 0) and (i, 1) get the same bytes. Each keeps one of the
// two columns. So 32 lanes have 32 columns in memory's order, and store whole sectors of 32 bytes.
struct own_column {
    int row, from, to; // the row and the column that the lane addresses, and the column that it gets, of 32
    uint32_t choice;   // for __byte_perm
    MOE_DEVICE explicit own_column(int lane)
        : row((lane >> 3) * 2 + (lane & 1)), from((lane & 4) * 4),
          to((lane & 2) * 8 + (lane >> 2) * 2 + (lane & 1)), choice(lane & 1 ? 0x7531 : 0x6420)
    {
    }
};

// What a warp has kept of 16 rows goes to their group of 16 rows. to: column 0 of the tile; columns: that
// exist.
template <width W> MOE_DEVICE void store_group(uint32_t kept, uint8_t *to, int columns, int lane)
{
    const own_column own(lane);
    uint32_t from = kept + kept_bytes<W>::at(own.row, own.from);
    to += own.to * 16, columns -= own.to;
#pragma unroll 1
    for (int piece = 0; piece < kept_bytes<W>::PIECES; piece++) {
#pragma unroll
        for (int c = 0; c < 128; c += 32) {
            uint32_t low[4], high[4]; // rows 0 to 7, 8 to 15
            load_matrices_transposed(low, from ^ c);
            load_matrices_transposed(high, (from ^ c) + 8 * 128);
            store_streaming16_if(c < columns, to + c * 16,
                                 make_uint4(__byte_perm(low[0], high[0], own.choice),
                                            __byte_perm(low[1], high[1], own.choice),
                                            __byte_perm(low[2], high[2], own.choice),
                                            __byte_perm(low[3], high[3], own.choice)));
        }
        from += SUBTILE_BYTES, to += 128 * 16, columns -= 128;
    }
}

// dH_w and A'_w of a warp tile whose first column is `column`.
template <width W, bool GATED>
MOE_DEVICE void store_copies(const dh_f8_params &p, const kept_bytes<W> &kept, int row, int column, int lane)
{
    const int64_t n = p.intermediate, first = (row >> 4) * n + column;
    const int columns = p.intermediate - column;
    uint8_t *const to = p.for_dw[0].rows + (GATED ? 2 * first - column : first) * 16;
    __syncwarp();
    store_group<W>(kept.dh, to, columns, lane);
    if (GATED) store_group<W>(kept.dh + kept.BYTES, to + n * 16, columns, lane);
    store_group<W>(kept.a, p.for_dw[1].rows + first * 16, columns, lane);
}

// ---- A warp tile

// Everything of a row but its numbers. Returns the lane's part of <dA', A>.
template <typename T, int KIND, width W, bool FOR_DW>
MOE_DEVICE float work_row(const dh_f8_params &p, const kept_bytes<W> &kept, uint4 x, const h_vectors &h,
                          place at, const group_of_features &group, int row, float weight, float y_weight,
                          copy_factors expected, row_numbers &own, int lane)
{
    constexpr bool GATED = activation<T, KIND>::GATED;
    const bool exists = at.column < p.intermediate;
    const bool is_own = lane % tile_width<W>::LANES == row / tile_width<W>::ROWS;
    const int64_t offset = (int64_t)(at.row + row) * h_width_of<T, KIND>(p) + at.column;
    const gradients of = differentiate_eight<T, KIND>(p.values, x, h, weight, y_weight);
    if (!FOR_DW) store_in_dtype<T, GATED>(p, of, offset, at.column, exists);
    const float gate = largest_of(of.dh[0]);
    const float dh_most = GATED ? larger_or_nan(gate, largest_of(of.dh[1])) : gate;
    const uint32_t amax = largest_of_row<W>(dh_most);
    if (is_own) own.amax = amax;
    if (FOR_DW) {
        const float a_most = largest_of(of.a);
        copy_factors factors = {__shfl_sync(~0u, expected.of[0], row), __shfl_sync(~0u, expected.of[1], row)};
        if (!__all_sync(~0u, dh_most * factors.of[0] <= 448.0f && a_most * factors.of[1] <= 448.0f))
            factors = find_factors<W>(p, group, amax, a_most, at.row + row, own, is_own);
        const uint32_t to = kept.at(row, tile_width<W>::column(lane));
        keep(kept.dh + to, of.dh[0], factors.of[0]);
        if (GATED) keep(kept.dh + kept.BYTES + to, of.dh[1], factors.of[0]);
        keep(kept.a + to, of.a, factors.of[1]);
    }
    store_dh8<GATED>(p, of, amax, offset, exists);
    return of.ds;
}

// h: from this warp tile's first row on, afterwards from that of `next`.
template <typename T, int KIND, width W, bool FOR_DW, class H>
MOE_DEVICE void work_tile(const dh_f8_params &p, uint32_t dh_a, float scales, const kept_bytes<W> &kept, H &h,
                          place at, place next, int expert, float weights, token_scales tokens, float *ds_out,
                          int lane)
{
    constexpr bool GATED = activation<T, KIND>::GATED;
    constexpr int ROWS = tile_width<W>::ROWS, GROUP_ROWS = tile_width<W>::GROUP_ROWS;
    const int own = tile_width<W>::row(lane), vector = tile_width<W>::column(lane) / 8;
    const uint32_t row_bytes = h_width_of<T, KIND>(p) * 2;
    const char *const from = vector_of(p.h, at.row, h_width_of<T, KIND>(p), at.column);
    const char *const behind = vector_of(p.h, next.row, h_width_of<T, KIND>(p), next.column);
    group_of_features group = {(int64_t)expert * p.groups + at.column / MOE_F8_DH_FEATURES, {0, 0}};
    row_numbers numbers = {};
    copy_factors factors = {};
    if (FOR_DW) {
#pragma unroll
        for (int i = 0; i < 2; i++)
            numbers.w[i] = group.expected[i] = __ldg(p.for_dw[i].expected + group.number);
        factors = {expected_factor(group.expected[0], tokens.x),
                   expected_factor(group.expected[1], tokens.dout)};
    }
    float ds[AHEAD] = {};
#pragma unroll 1
    for (int first = 0; first < WARP_TILE_ROWS;) {
        const int row = first + own, ahead = row + H::STEPS * ROWS;
        const bool last = first + H::STEPS * ROWS >= WARP_TILE_ROWS;
        const h_vectors here =
            h.take(advance_by_adds(last ? behind : from, ahead % WARP_TILE_ROWS * row_bytes),
                   last ? next.column : at.column, first / ROWS);
        const uint4 x =
            load_shared16(dh_a + (vector >> 3) * SUBTILE_BYTES + moe_subtile_offset(row, vector & 7));
        const float weight = __shfl_sync(~0u, weights, row);
        ds[0] = ds[1], ds[1] = ds[2], ds[2] = ds[3];
        ds[3] = work_row<T, KIND, W, FOR_DW>(p, kept, x, here, at, group, row, weight,
                                             weight * __shfl_sync(~0u, scales, row), factors, numbers, lane);
        first += ROWS;
        if (first % GROUP_ROWS == 0) write_sums<W>(ds_out, first - GROUP_ROWS, ds, scales, lane);
    }
    store_numbers<W, FOR_DW>(p, numbers, at, group, lane);
    if (FOR_DW) store_copies<W, GATED>(p, kept, at.row, at.column - tile_width<W>::column(lane), lane);
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

// D: how a kernel divides its threads and its shared memory. COPIES_FOR_DW; WORKERS, warps; DEPTH of the ring
// of H; h(worker) and a_w(worker), where a warp has that ring and A'_w.
template <typename T, class D, width W, int COUNT, int KIND>
MOE_DEVICE void work_f8_tiles(const dh_f8_params &p, const tile_walk &walk, const dh_layout<W, COUNT> &shared,
                              int worker, int lane)
{
    constexpr bool GATED = activation<T, KIND>::GATED, FOR_DW = D::COPIES_FOR_DW;
    using H = h_ahead<GATED, D::DEPTH>;
    const int column = tile_width<W>::column(lane), h_width = h_width_of<T, KIND>(p), row = lane & 15;
    warp_tiles<W, D::WORKERS> tiles(walk, worker);
    if (!tiles.exists()) return;
    place at = tiles.at(column);
    int consumer = tiles.consumer, expert = moe_work_expert(tiles.tile);
    float weights = __ldg(p.row_weight + at.row + row);
    int token = FOR_DW ? __ldg(p.row_token + at.row + row) : 0;
    H h(p, shared.base + D::h(worker), lane);
    for (int i = 0; i < H::STEPS; i++)
        h.begin(
            vector_of(p.h, at.row + i * tile_width<W>::ROWS + tile_width<W>::row(lane), h_width, at.column),
            at.column, i);
    tiles.advance();
    tiles.settle();
    uint32_t phases = 0; // bit c: parity of the next warp tile of consumer c
    for (bool more = true; more;) {
        more = tiles.exists();
        const place next = more ? tiles.at(column) : at; // after the last tile its H is fetched once more
        const int next_consumer = tiles.consumer, next_expert = moe_work_expert(tiles.tile);
        tiles.advance();
        if (D::DEPTH == 0) prefetch_h<GATED, W>(p, next, h_width, lane);
        const float next_weights = __ldg(p.row_weight + next.row + row);
        const int next_token = FOR_DW ? __ldg(p.row_token + next.row + row) : 0;
        const uint32_t warp_tile = consumer * 4 + (worker & 3);
        const uint32_t dh_a = shared.warp_tile(warp_tile);
        const kept_bytes<W> kept = {dh_a, W == NARROW ? dh_a + 2 * kept_bytes<W>::BYTES
                                                      : shared.base + D::a_w(worker)};
        const token_scales tokens = FOR_DW ? load_scales(p, token) : token_scales{};
        barrier_wait(shared.warp_tile_full(warp_tile), phases >> consumer & 1);
        work_tile<T, KIND, W, FOR_DW>(p, dh_a, load_shared_float(shared.scale(warp_tile, row)), kept, h, at,
                                      next, expert, weights, tokens,
                                      p.ds + at.column / TILE_COLUMNS * p.padded_rows + at.row, lane);
        __syncwarp();
        if (lane == 0) barrier_arrive(shared.warp_tile_empty(warp_tile));
        phases ^= 1 << consumer;
        at = next, consumer = next_consumer, expert = next_expert;
        weights = next_weights, token = next_token;
        tiles.settle();
    }
    wait_copies<0>();
}

template <typename T, class D, width W, int COUNT>
MOE_DEVICE void work_f8_tiles(const dh_f8_params &p, const tile_walk &walk, const dh_layout<W, COUNT> &shared,
                              int worker, int lane)
{
    switch (p.activation) {
#define MOE_WORK(enumerator, name, shape, curve)                                                             \
    case enumerator: return work_f8_tiles<T, D, W, COUNT, enumerator>(p, walk, shared, worker, lane);
        MOE_ACTIVATIONS(MOE_WORK)
#undef MOE_WORK
    }
    __builtin_unreachable(); // the host refuses other values
}

} // namespace dh_f8_kernel
} // namespace moe
