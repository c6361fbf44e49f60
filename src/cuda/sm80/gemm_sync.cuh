// The core of the portable GEMMs: mma.sync on operands that cp.async copies to shared memory. It needs a GPU
// of compute capability 8.0 or later and nothing newer. Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Tile: 128 x 256, by eight warps of 64 x 64, in steps of 32 elements of K. Four steps fit in 96 KB of shared
// memory, which every GPU of 8.0 or later has. On an H100 this shape reached 0.71 to 0.79 of the speed of
// mma.sync without memory, with and without a gather, where K was 1536 or more; no other shape was more than
// 5 % faster (docs/log/2026-11-27.md).
//
// A CTA is persistent and takes units blockIdx.x, blockIdx.x + gridDim.x and so on. All threads copy and all
// warps multiply. Three steps are being copied while one is multiplied, with one barrier a step. The copies
// run on into the next unit while the results of this one are stored, so the slots are never free for
// staging: results go from registers to global memory, after shuffles within four lanes.
//
// An operand is K-major if its rows are the tile's rows or columns, and MN-major if its rows are steps of K.
#pragma once
#include "common/mma.cuh"
#include "common/storage.cuh"
#include "host/kernel_table.h"
#include "schedule/work_order.h"

namespace moe
{
namespace gemm_sync
{

enum {
    TILE_ROWS = 128,
    TILE_COLUMNS = 256,
    STEP = 32,
    STAGES = 4,
    WARP_TILE = 64, // rows and columns of a warp
    WARPS_DOWN = TILE_ROWS / WARP_TILE,
    WARPS_ACROSS = TILE_COLUMNS / WARP_TILE,
    THREADS = 32 * WARPS_DOWN * WARPS_ACROSS,
    A_BYTES = TILE_ROWS * STEP * 2,
    SLOT_BYTES = A_BYTES + TILE_COLUMNS * STEP * 2,
    SHARED_BYTES = STAGES * SLOT_BYTES
};
static_assert((int)TILE_ROWS == MOE_TILE_BLOCKS * MOE_BLOCK_ROWS && (int)WARP_TILE == MOE_BLOCK_ROWS,
              "a warp has one block of a row tile");

// The sums of a warp's 64 x 64 elements. Lane 4 g + q has of row 16 m + g columns 8 j + 2 q and 8 j + 2 q + 1
// in [m][j][0] and [1], and the same of row 16 m + 8 + g in [2] and [3].
typedef float warp_sums[4][8][4];

// The warp's part of the tile. Each of the SM's four schedulers has two warps, `warp` and `warp` + 4. Of a
// tile with one block, and of one with half of its columns, every scheduler has one warp that works.
struct warp_part {
    int row, column;
    MOE_DEVICE explicit warp_part(int warp)
        : row(warp / WARPS_ACROSS), column((warp + 2 * row) % WARPS_ACROSS)
    {
    }
};
static_assert(WARPS_DOWN == 2 && WARPS_ACROSS == 4, "see warp_part");

// ---- Shared memory

// A step of an operand: SIZE rows of 32 elements (K-major) or 32 rows of SIZE elements (MN-major), in vectors
// of 16 bytes. They are placed so that the eight rows that an ldmatrix reads at once are in different banks.
template <bool MN, int SIZE> struct operand {
    enum { PITCH = (MN ? SIZE : (int)STEP) * 2, VECTORS = PITCH / 16 };

    static MOE_DEVICE uint32_t place(int row, int vector)
    {
        const int turn = MN ? row & 7 : row >> 1 & 3;
        return (uint32_t)(row * PITCH + ((vector ^ turn) << 4));
    }
    // Where the lane's row of the first ldmatrix begins, for part `part` of 64 rows or columns.
    template <bool IS_B> static MOE_DEVICE uint32_t lane_place(int lane, int part)
    {
        const int middle = lane >> 3 & 1, high = lane >> 4;
        const int down = MN == IS_B ? middle : high, across = MN == IS_B ? high : middle;
        return place((lane & 7) + 8 * down + (MN ? 0 : part * WARP_TILE), across + (MN ? part * 8 : 0));
    }
    // The four 16 x 16 fragments at places 16 kk of the step.
    static MOE_DEVICE void load(uint32_t (&f)[4][4], uint32_t at, int kk)
    {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if constexpr (MN)
                load_matrices_transposed(f[i], (at ^ (uint32_t)(i << 5)) + kk * 16 * PITCH);
            else
                load_matrices(f[i], (at ^ (uint32_t)(kk << 5)) + i * 16 * PITCH);
    }
};

// ---- Copies: the thread's vectors of a step. An offset counts vectors from a tensor's start in 32 bits, so
// that the compiler holds no address of 64 bits for each copy. A tensor that is gathered may have 64 GB.

// K-major: four threads copy the 64 bytes of a row, a thread has rows row() + 64 i.
template <int SIZE> struct k_major {
    using tile = operand<false, SIZE>;
    enum { APART = THREADS / tile::VECTORS, COUNT = SIZE / APART };

    static MOE_DEVICE int row()
    {
        return (int)threadIdx.x / tile::VECTORS;
    }
    static MOE_DEVICE uint32_t vector()
    {
        return threadIdx.x % tile::VECTORS;
    }
    // vectors: of a row of the tensor; bit i of real: row i exists; offset(i): of the row
    template <class F>
    static MOE_DEVICE void copy(uint32_t slot, const void *tensor, int step, uint32_t vectors, uint32_t real,
                                const F &offset)
    {
        const uint32_t along = (uint32_t)(step * tile::VECTORS) + vector();
        const uint32_t wanted = along < vectors ? real : 0;
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            copy16_async_if(wanted & 1u << i, slot + tile::place(row(), vector()) + i * APART * tile::PITCH,
                            (const char *)tensor + (size_t)(offset(i) + (wanted ? along : 0)) * 16);
    }
};

// Rows of a tensor that are equally far apart.
template <int SIZE> struct even_rows {
    using copier = k_major<SIZE>;
    const char *first; // the thread's first row
    uint32_t apart;    // vectors between two of its rows
    uint32_t real;     // bit i: row i exists

    MOE_DEVICE void copy(uint32_t slot, int step, uint32_t vectors) const
    {
        const uint32_t step_apart = apart;
        copier::copy(slot, first, step, vectors, real, [&](int i) { return i * step_apart; });
    }
};

// The rows of tokens.
struct token_rows {
    using copier = k_major<TILE_ROWS>;
    int token[copier::COUNT];

    MOE_DEVICE void begin(const int32_t *row_token, int blocks)
    {
#pragma unroll
        for (int i = 0; i < copier::COUNT; i++)
            token[i] = i < blocks ? __ldg(row_token + copier::row() + i * copier::APART) : -1;
    }
    // Instead of tokens, `blocks` blocks of 64 rows that follow each other.
    MOE_DEVICE void begin_rows(int blocks)
    {
#pragma unroll
        for (int i = 0; i < copier::COUNT; i++)
            token[i] = i < blocks ? copier::row() + i * copier::APART : -1;
    }
    MOE_DEVICE void copy(uint32_t slot, const void *tensor, int step, uint32_t vectors) const
    {
        uint32_t real = 0;
#pragma unroll
        for (int i = 0; i < copier::COUNT; i++) real |= (token[i] >= 0 ? 1u : 0u) << i;
        copier::copy(slot, tensor, step, vectors, real,
                     [&](int i) { return (uint32_t)max(token[i], 0) * vectors; });
    }
};
static_assert((int)token_rows::copier::COUNT == (int)MOE_TILE_BLOCKS &&
                  (int)token_rows::copier::APART == (int)MOE_BLOCK_ROWS,
              "row i of a thread is in block i");

// MN-major: a thread has one column of vectors and rows row() + APART i of a step.
template <int SIZE> struct mn_major {
    using tile = operand<true, SIZE>;
    enum { APART = THREADS / tile::VECTORS, COUNT = STEP / APART };

    static MOE_DEVICE int row()
    {
        return (int)threadIdx.x / tile::VECTORS;
    }
    static MOE_DEVICE int column() // of elements
    {
        return (int)(threadIdx.x % tile::VECTORS) * 8;
    }
    static MOE_DEVICE void copy_row(uint32_t slot, int i, uint32_t real, const char *from)
    {
        copy16_async_if(real, slot + tile::place(row(), column() / 8) + i * APART * tile::PITCH, from);
    }
};
static_assert((int)mn_major<TILE_ROWS>::APART % 8 == 0 && (int)mn_major<TILE_COLUMNS>::APART % 8 == 0,
              "all rows of a thread are turned alike");

// The steps of LoRA's term of rank r.
MOE_DEVICE int low_steps(const moe_low_rank &lora)
{
    return ((int)lora.rank + STEP - 1) / STEP;
}

// ---- The work list of row tiles

struct tile_place {
    int row, blocks, expert, column_tile;
    MOE_DEVICE bool has_block(int warp_row) const
    {
        return warp_row < blocks;
    }
};

struct tile_list {
    const moe_work *tiles;
    int row_tiles, column_tiles;
    MOE_DEVICE tile_list(const moe_work *list, const int32_t *counts, int64_t columns, int columns_a_tile)
        : tiles(list), row_tiles(__ldg(counts)),
          column_tiles((int)((columns + columns_a_tile - 1) / columns_a_tile))
    {
    }
    MOE_DEVICE int units() const
    {
        return row_tiles * column_tiles;
    }
    MOE_DEVICE tile_place place(int unit) const
    {
        const moe_place at = column_tiles <= MOE_MOST_COLUMNS_FIRST
                                 ? moe_place_in(unit, row_tiles, column_tiles, 1)
                                 : moe_place_in_list(unit, row_tiles, column_tiles);
        const int2 entry = __ldg((const int2 *)(tiles + at.row_tile));
        const moe_work work = {entry.x, entry.y};
        return {work.row, moe_work_blocks(work), moe_work_expert(work), at.column_tile};
    }
};

// ---- The loop

// What a kernel says of its GEMM:
//   type: of the elements; A_MN, B_MN: the operands are MN-major
//   units() const; place(unit) const, of a type of its own; steps(place) const
//   begin(place): the copies go on to this place; copy_a(step, slot), copy_b(step, slot)
//   LORA: steps_of_k() steps of a place are those of K, and low_steps(p.lora) more, counted from 0 again,
//   those of its term of rank r. begin_low(place): the copies go on to these; low: they are there
//   active(place, warp_row, warp_column) const: some of the warp's elements exist
//   finish(place, sums, active, warp_row, warp_column, lane): every warp calls it
template <class G> struct pipeline {
    using tile_a = operand<G::A_MN, TILE_ROWS>;
    using tile_b = operand<G::B_MN, TILE_COLUMNS>;
    enum { KK = STEP / 16, LAST_SLOT = (STAGES - 1) * SLOT_BYTES };
    G &gemm;
    const int units;
    const uint32_t shared, at_a, at_b;
    int unit, step, steps; // of the next copies
    uint32_t fill, read;   // slots, in bytes

    MOE_DEVICE pipeline(G &of, uint32_t slots, int warp_row, int warp_column, int lane)
        : gemm(of), units(of.units()), shared(slots),
          at_a(slots + tile_a::template lane_place<false>(lane, warp_row)),
          at_b(slots + A_BYTES + tile_b::template lane_place<true>(lane, warp_column)), unit((int)blockIdx.x),
          step(0), steps(0), fill(0), read(0)
    {
    }
    static MOE_DEVICE void advance(uint32_t &slot)
    {
        slot = slot == LAST_SLOT ? 0 : slot + SLOT_BYTES;
    }
    // Begins the next unit. After the last one the copies run on: no element of those steps exists, so they
    // read nothing that is multiplied.
    MOE_DEVICE void begin_unit()
    {
        if (unit >= units) return;
        const auto at = gemm.place(unit);
        if constexpr (G::LORA)
            steps = gemm.steps_of_k();
        else
            steps = gemm.steps(at);
        step = 0;
        gemm.begin(at);
    }
    // Without a branch, so that the compiler can put it among the multiplications.
    MOE_DEVICE void copy_step()
    {
        gemm.copy_a(step, shared + fill);
        gemm.copy_b(step, shared + fill + A_BYTES);
        commit_copies();
        advance(fill);
        step++;
    }
    // To be called after each copy_step.
    MOE_DEVICE void end_copy()
    {
        if (step == steps) {
            if constexpr (G::LORA)
                if (!gemm.low) {
                    gemm.begin_low(gemm.place(unit));
                    steps = low_steps(gemm.p.lora);
                    step = 0;
                    return;
                }
            unit += (int)gridDim.x;
            begin_unit();
        }
    }
    // The next step has landed for all warps, and all have read the step before. A named barrier, because
    // warps come to it at different places of the code.
    MOE_DEVICE void await_step()
    {
        wait_copies<STAGES - 2>();
        named_barrier_sync(1, THREADS);
    }
    MOE_DEVICE void start()
    {
        begin_unit();
        for (int i = 0; i < STAGES - 1; i++) {
            copy_step();
            end_copy();
        }
        await_step();
    }
    static MOE_DEVICE void multiply_fragments(warp_sums &c, const uint32_t (&a)[4][4],
                                              const uint32_t (&b)[4][4])
    {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int t = 0; t < 8; t++) {
                const int j = i & 1 ? 7 - t : t; // b's registers are used again at once
                multiply(c[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1], typename G::type());
            }
    }
    // The fragments of a tile's first step are loaded here once more. Otherwise they would hold registers
    // while the results of the tile before are stored.
    MOE_DEVICE void multiply_tile(warp_sums &c, int count)
    {
        uint32_t a[2][4][4], b[2][4][4];
#pragma unroll
        for (int i = 0; i < 128; i++) c[i / 32][i / 4 % 8][i % 4] = 0.0f;
        tile_a::load(a[0], at_a + read, 0);
        tile_b::load(b[0], at_b + read, 0);
        for (int i = 0; i < count; i++)
#pragma unroll
            for (int kk = 0; kk < KK; kk++) {
                if (kk == KK - 1) {
                    await_step();
                    advance(read);
                }
                tile_a::load(a[(kk + 1) & 1], at_a + read, (kk + 1) % KK);
                tile_b::load(b[(kk + 1) & 1], at_b + read, (kk + 1) % KK);
                if (kk == 0) copy_step();
                multiply_fragments(c, a[kk & 1], b[kk & 1]);
                if (kk == 0) end_copy();
            }
    }
    // A warp without elements in a tile copies its part.
    MOE_DEVICE void pass_tile(int count)
    {
        for (int i = 0; i < count; i++) {
            copy_step();
            end_copy();
            await_step();
            advance(read);
        }
    }
};

template <class G> MOE_DEVICE void run(G &gemm, const char *memory)
{
    const int warp = warp_number(), lane = threadIdx.x & 31;
    const warp_part part(warp);
    const int warp_row = part.row, warp_column = part.column;
    pipeline<G> pipe(gemm, shared_address(memory), warp_row, warp_column, lane);
    if ((int)blockIdx.x >= pipe.units) return;
    pipe.start();
    for (int unit = (int)blockIdx.x; unit < pipe.units; unit += (int)gridDim.x) {
        const auto at = gemm.place(unit);
        const bool active = gemm.active(at, warp_row, warp_column);
        warp_sums c;
        if (active)
            pipe.multiply_tile(c, gemm.steps(at));
        else
            pipe.pass_tile(gemm.steps(at));
        gemm.finish(at, c, active, warp_row, warp_column, lane);
    }
    wait_copies<0>();
}

// ---- Results

// Lane q of four has pair q of four blocks of eight columns; afterwards it has the four pairs of block q. The
// function is its own inverse.
template <typename V> MOE_DEVICE void transpose_four(V (&w)[4], int lane)
{
#pragma unroll
    for (int z = 0; z < 4; z += 2) {
        const V got = __shfl_xor_sync(~0u, lane & 1 ? w[z] : w[z + 1], 1);
        (lane & 1 ? w[z] : w[z + 1]) = got;
    }
#pragma unroll
    for (int z = 0; z < 2; z++) {
        const V got = __shfl_xor_sync(~0u, lane & 2 ? w[z] : w[z + 2], 2);
        (lane & 2 ? w[z] : w[z + 2]) = got;
    }
}

MOE_DEVICE uint4 vector_of(const uint32_t (&w)[4])
{
    return make_uint4(w[0], w[1], w[2], w[3]);
}

// The next 16 rows take the place of the first 16. A loop over the rows with this at its end is a quarter as
// long as one that is unrolled; where every row has many instructions, ptxas would take minutes for the
// latter.
MOE_DEVICE void next_rows(warp_sums &c)
{
#pragma unroll
    for (int i = 0; i < 96; i++) c[i / 32][i / 4 % 8][i % 4] = c[i / 32 + 1][i / 4 % 8][i % 4];
}

// Columns 32 half to 32 half + 31 of row 8 i + g as pairs, before transpose_four.
template <typename T> MOE_DEVICE void pack_row(uint32_t (&w)[4], const warp_sums &c, int i, int half)
{
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float *v = &c[i / 2][half * 4 + j][i % 2 * 2];
        w[j] = storage<T>::pack(v[0], v[1]);
    }
}

// Stores a warp's sums. `to`: its element (0, 0), in rows `width` elements apart. The first `rows` rows and
// `columns` columns exist.
template <typename T>
MOE_DEVICE void store_sums(const warp_sums &c, T *to, int64_t width, int rows, int columns, int lane)
{
    const int row = lane >> 2, column = (lane & 3) * 8;
    to += row * width + column;
#pragma unroll
    for (int i = 0; i < 8; i++, to += 8 * width)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t w[4];
            pack_row<T>(w, c, i, half);
            transpose_four(w, lane);
            if (row + i * 8 < rows && column + half * 32 < columns)
                store_global16(to + half * 32, vector_of(w));
        }
}

} // namespace gemm_sync
} // namespace moe
