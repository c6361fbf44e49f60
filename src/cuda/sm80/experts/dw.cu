// Weight gradients of expert e, as sums over its rows r:
//
//   dW2[e] = sum_r dO[t(r)]^T A'[r]
//   dW1[e] = sum_r dH[r]^T X[t(r)]
//
// dWr is computed as a dW1 of one expert, where dlogits is in the place of dH.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Shapes: dO and X (T, d), A' (padded rows, n), dH (padded rows, h), dW2 (E, d, n), dW1 (E, h, d), where h
// is the number of columns of H. In the following w is n for dW2 and h for dW1. FLOPs 2 R d w.
//
// An expert with many rows is split: its rows are cut into pieces, and different CTAs sum different pieces.
// The kernel dw writes the sum of each piece to scratch in f32. A second kernel, add_parts, then adds the
// sums of an expert's pieces in a fixed order.
//
// Bytes:
// - A' or dH: 2 R w, read once for each 128 columns of d (dW1: 256).
// - dO or X: 2 R d, gathered once for each 256 columns of w (dW1: 128).
// - The gradient: E d w elements written. With accumulate they are also read.
// - For each piece of a split expert: 4 d w written and read again.
//
// Tile: 128 x 256 of the gradient as it is in memory (gemm_sync.cuh): the rows are columns of dO or, of dW1,
// columns of dH. The GEMM sums over the rows of an expert. Both operands are MN-major, as they are in memory,
// and the one that is gathered is A for dW2 and B for dW1. Pad rows are zeros.
//
// The gradient of an expert without rows is 0. When a CTA has no more tiles, it writes a part of these zeros.
// With accumulate such a gradient stays as it is.
//
// With accumulate the old gradient is added to the sum in f32, and the result is rounded once.
#include "common/backward_shared.cuh"
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "sm80/gemm_sync.cuh"
#include "sm80/kernels.h"
#include "sm80/weight_grid.h"

namespace moe
{
namespace gemm_sync
{
namespace
{

static_assert((int)MOE_WEIGHT_ROWS == (int)TILE_ROWS && (int)MOE_WEIGHT_COLUMNS == (int)TILE_COLUMNS,
              "weight_grid.h");

enum {
    SUMS = 128, // of a thread
    SLICES = SUMS / 4
};

struct weight_place {
    moe_piece piece;
    int tile, row, column; // of the gradient: tile, and the first element of the tile
};

// The pieces with rows, and the tiles of the gradient. `rows` and `columns` of the gradient.
template <bool TRANSPOSED> struct weight_list {
    const moe_dw &p;
    const int rows, columns;
    const moe_weight_tiles tiles;

    MOE_DEVICE explicit weight_list(const moe_dw &dw)
        : p(dw), rows(TRANSPOSED ? dw.halves * (int)dw.intermediate : (int)dw.hidden),
          columns(TRANSPOSED ? (int)dw.hidden : (int)dw.intermediate),
          tiles(moe_weight_tiles_of(rows, columns))
    {
    }
    MOE_DEVICE int tiles_of_expert() const
    {
        return tiles.down * tiles.across;
    }
    MOE_DEVICE weight_place tile_place(int tile) const
    {
        const moe_place at = moe_weight_tile_place(tile, tiles);
        return {{}, tile, at.row_tile * TILE_ROWS, at.column_tile * TILE_COLUMNS};
    }
    // Element (row, 0) of the expert's gradient. Interleaved, the rows of gate and up alternate.
    MOE_DEVICE int64_t element(int expert, int row) const
    {
        const int n = (int)p.intermediate;
        const int at = TRANSPOSED && p.interleaved ? row < n ? 2 * row : 2 * (row - n) + 1 : row;
        return ((int64_t)expert * rows + at) * columns;
    }
    // The thread's sums of a tile of a split expert, 16 bytes of each thread and then the next 16 bytes of
    // each.
    MOE_DEVICE float4 *part(int number, int tile) const
    {
        return (float4 *)p.parts + ((int64_t)number * tiles_of_expert() + tile) * SLICES * THREADS +
               threadIdx.x;
    }
};

// ---- Copies. `limit`: elements of a row that exist.

// Rows of A' or dH, which follow one another.
template <int SIZE> struct feature_rows {
    using copier = mn_major<SIZE>;
    const char *from; // the thread's first row of the next step
    int row;          // its number
    uint32_t real;    // the thread's column exists

    MOE_DEVICE void begin(const moe_dw &p, int first_row, int column, int limit)
    {
        column += copier::column();
        row = first_row + copier::row();
        real = column < limit;
        from = (const char *)p.features + ((int64_t)row * p.halves * p.row_width + column) * 2;
    }
    MOE_DEVICE void copy(const moe_dw &p, uint32_t slot)
    {
        const uint32_t row_bytes = (uint32_t)(p.halves * (int)p.row_width) * 2;
#pragma unroll
        for (int i = 0; i < copier::COUNT; i++)
            copier::copy_row(slot, i, row + i * copier::APART < p.rows ? real : 0,
                             from + (size_t)(i * copier::APART) * row_bytes);
        from += (size_t)STEP * row_bytes;
        row += STEP;
    }
};

// Rows of dO or X. The tokens of a step are read a step ahead.
template <int SIZE> struct gathered_rows {
    using copier = mn_major<SIZE>;
    int token[copier::COUNT];
    int row;       // the thread's first row of the next step
    int end;       // of the rows that have tokens
    int column;    // the thread's
    uint32_t real; // it exists

    // Without a list of tokens, row i is token i. Without branches (gemm_sync.cuh: copy_step).
    MOE_DEVICE void read_tokens(const moe_dw &p)
    {
        const int32_t *const from = p.row_token + row;
#pragma unroll
        for (int i = 0; i < copier::COUNT; i++) {
            const int at = row + i * copier::APART;
            const bool exists = at < end;
            token[i] = load_word_if(exists && p.row_token, from + i * copier::APART, exists ? at : -1);
        }
    }
    MOE_DEVICE void begin(const moe_dw &p, int first_row, int rows, int first_column)
    {
        column = first_column + copier::column();
        row = first_row + copier::row();
        end = first_row + rows;
        if (!p.row_token) end = min(end, (int)p.rows);
        real = column < p.hidden;
        read_tokens(p);
    }
    MOE_DEVICE void copy(const moe_dw &p, uint32_t slot)
    {
        const uint32_t vectors = (uint32_t)p.hidden / 8, vector = (uint32_t)column / 8;
#pragma unroll
        for (int i = 0; i < copier::COUNT; i++)
            copier::copy_row(slot, i, token[i] >= 0 ? real : 0,
                             (const char *)p.tokens + (size_t)((uint32_t)token[i] * vectors + vector) * 16);
        row += STEP;
        read_tokens(p);
    }
};

// ---- Results

// The row of the gradient of row 8 i + g of a warp.
template <bool TRANSPOSED, typename G>
MOE_DEVICE G *row_of(const weight_list<TRANSPOSED> &list, int expert, int row, int i)
{
    return row + i * 8 < list.rows ? (G *)list.p.gradient + list.element(expert, row + i * 8) : nullptr;
}

// 16 bits: a lane has vectors of eight columns after transpose_four.
template <bool TRANSPOSED, typename G>
MOE_DEVICE void store_gradient(const weight_list<TRANSPOSED> &list, warp_sums &c, int expert, int row,
                               int column, int lane, G)
{
    column += (lane & 3) * 8;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        G *const to = row_of<TRANSPOSED, G>(list, expert, row, i);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int at = column + half * 32;
            const bool exists = to && at < list.columns;
            if (list.p.accumulate) {
                const uint4 v = load_global16_if(exists, to + at);
                uint32_t old[4] = {v.x, v.y, v.z, v.w};
                transpose_four(old, lane);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float *sum = &c[i / 2][half * 4 + j][i % 2 * 2];
                    sum[0] += storage<G>::low(old[j]), sum[1] += storage<G>::high(old[j]);
                }
            }
            uint32_t w[4];
            pack_row<G>(w, c, i, half);
            transpose_four(w, lane);
            if (exists) store_global16(to + at, vector_of(w));
        }
    }
}

// f32: four lanes store the 32 bytes of eight columns.
template <bool TRANSPOSED>
MOE_DEVICE void store_gradient(const weight_list<TRANSPOSED> &list, warp_sums &c, int expert, int row,
                               int column, int lane, float)
{
    column += (lane & 3) * 2;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float *const to = row_of<TRANSPOSED, float>(list, expert, row, i);
        if (!to) continue;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (column + j * 8 >= list.columns) continue;
            float2 *const pair = (float2 *)(to + column + j * 8);
            float2 sum = make_float2(c[i / 2][j][i % 2 * 2], c[i / 2][j][i % 2 * 2 + 1]);
            if (list.p.accumulate) {
                const float2 old = *pair;
                sum.x += old.x, sum.y += old.y;
            }
            *pair = sum;
        }
    }
}

template <typename T, typename G, bool TRANSPOSED> struct dw_gemm {
    using type = T;
    static constexpr bool A_MN = true, B_MN = true, LORA = false;
    enum {
        FEATURE_SIDE = TRANSPOSED ? TILE_ROWS : TILE_COLUMNS,
        TOKEN_SIDE = TRANSPOSED ? TILE_COLUMNS : TILE_ROWS
    };
    const moe_dw &p;
    const weight_list<TRANSPOSED> list;
    feature_rows<FEATURE_SIDE> features;
    gathered_rows<TOKEN_SIDE> tokens;

    MOE_DEVICE explicit dw_gemm(const moe_dw &dw) : p(dw), list(dw)
    {
    }
    MOE_DEVICE int units() const
    {
        return __ldg(p.lists.counts + 1) * list.tiles_of_expert();
    }
    // The longest pieces come first, so CTAs with equal numbers of units have about equal work.
    MOE_DEVICE weight_place place(int unit) const
    {
        const int tiles = list.tiles_of_expert();
        weight_place at = list.tile_place(unit % tiles);
        const int4 v = __ldg((const int4 *)(p.lists.pieces + unit / tiles));
        at.piece = {v.x, v.y, v.z, v.w};
        return at;
    }
    MOE_DEVICE int steps(const weight_place &at) const
    {
        return at.piece.blocks * (MOE_BLOCK_ROWS / STEP);
    }
    MOE_DEVICE void begin(const weight_place &at)
    {
        // The columns of a row that are read reach to the next multiple of 8; those past the features are
        // zeros.
        const int limit = p.halves * (int)p.row_width;
        features.begin(p, at.piece.row, TRANSPOSED ? at.row : at.column, limit);
        tokens.begin(p, at.piece.row, at.piece.blocks * MOE_BLOCK_ROWS, TRANSPOSED ? at.column : at.row);
    }
    MOE_DEVICE void copy_a(int, uint32_t slot)
    {
        if constexpr (TRANSPOSED)
            features.copy(p, slot);
        else
            tokens.copy(p, slot);
    }
    MOE_DEVICE void copy_b(int, uint32_t slot)
    {
        if constexpr (TRANSPOSED)
            tokens.copy(p, slot);
        else
            features.copy(p, slot);
    }
    MOE_DEVICE bool active(const weight_place &at, int warp_row, int warp_column) const
    {
        return at.row + warp_row * WARP_TILE < list.rows &&
               at.column + warp_column * WARP_TILE < list.columns;
    }
    MOE_DEVICE void finish(const weight_place &at, warp_sums &c, bool active, int warp_row, int warp_column,
                           int lane)
    {
        if (!active) return;
        if (at.piece.part < 0)
            return store_gradient<TRANSPOSED>(list, c, at.piece.expert,
                                              at.row + warp_row * WARP_TILE + (lane >> 2),
                                              at.column + warp_column * WARP_TILE, lane, G());
        float4 *const to = list.part(at.piece.part, at.tile);
#pragma unroll
        for (int s = 0; s < SLICES; s++) {
            const float *v = c[s / 8][s % 8];
            to[s * THREADS] = make_float4(v[0], v[1], v[2], v[3]);
        }
    }
};

// The gradients of experts without rows, whose pieces are the last of the list.
template <typename G> MOE_DEVICE void clear_gradients(const moe_dw &p)
{
    const int64_t vectors = p.hidden * p.intermediate * p.halves * (int)sizeof(G) / 16;
    const int pieces = __ldg(p.lists.counts + 3);
    for (int i = __ldg(p.lists.counts + 1); i < pieces; i++) {
        uint4 *to = (uint4 *)p.gradient + __ldg(&p.lists.pieces[i].expert) * vectors;
        for (int64_t v = blockIdx.x * THREADS + threadIdx.x; v < vectors; v += gridDim.x * THREADS)
            to[v] = make_uint4(0, 0, 0, 0);
    }
}

template <typename T, typename G, bool TRANSPOSED>
__global__ void __launch_bounds__(THREADS, 1) dw(const __grid_constant__ moe_dw p)
{
    extern __shared__ __align__(1024) char memory[];
    dw_gemm<T, G, TRANSPOSED> gemm(p);
    run(gemm, memory);
    if (!p.accumulate) clear_gradients<G>(p);
}

// The second pass over split experts. The work of a CTA: four sums of a tile for each thread, so that few
// tiles suffice for many CTAs.
template <typename G, bool TRANSPOSED>
__global__ void __launch_bounds__(THREADS) add_parts(const __grid_constant__ moe_dw p)
{
    const weight_list<TRANSPOSED> list(p);
    const warp_part part((int)threadIdx.x >> 5);
    const int lane = threadIdx.x & 31, tiles = list.tiles_of_expert();
    const int slices = __ldg(p.lists.counts + 2) * tiles * SLICES;
    for (int slice = blockIdx.x; slice < slices; slice += gridDim.x) {
        const int unit = slice / SLICES, s = slice % SLICES;
        const weight_place at = list.tile_place(unit % tiles);
        const int first_row = at.row + part.row * WARP_TILE + s / 8 * 16 + (lane >> 2);
        const int first_column = at.column + part.column * WARP_TILE + s % 8 * 8 + (lane & 3) * 2;
        if (first_row >= list.rows || first_column >= list.columns) continue;
        const moe_split split = p.lists.splits[unit / tiles];
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
        for (int i = 0; i < split.parts; i++) {
            const float4 v = list.part(split.first_part + i, at.tile)[s * THREADS];
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
        const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int row = first_row + j / 2 * 8;
            if (row >= list.rows) continue;
            give((G *)p.gradient + list.element(split.expert, row) + first_column + j % 2, values[j],
                 p.accumulate);
        }
    }
}

template <typename T, typename G, bool TRANSPOSED> cudaError_t launch(const moe_launch *on, const moe_dw &d)
{
    const cudaError_t status = enqueue(dw<T, G, TRANSPOSED>, on->sms, THREADS, SHARED_BYTES, on->stream, d);
    if (status != cudaSuccess || !d.parts) return status;
    return enqueue(add_parts<G, TRANSPOSED>, on->sms, THREADS, 0, on->stream, d);
}

} // namespace
} // namespace gemm_sync
} // namespace moe

extern "C" cudaError_t moe_sm80_dw_init(const moe_device *device)
{
    using namespace moe;
    return for_every_type(storage_types(), [&](auto t) {
        using T = typename decltype(t)::type;
        return for_every_type(gradient_types<T>(), [&](auto g) {
            using G = typename decltype(g)::type;
            const cudaError_t status =
                allow_shared(device, gemm_sync::dw<T, G, false>, gemm_sync::SHARED_BYTES);
            return status != cudaSuccess
                       ? status
                       : allow_shared(device, gemm_sync::dw<T, G, true>, gemm_sync::SHARED_BYTES);
        });
    });
}

extern "C" cudaError_t moe_sm80_dw(moe_launch *on, const moe_dw *d)
{
    using namespace moe;
    return for_type(storage_types(), on->dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        return for_type(gradient_types<T>(), d->gradient_type, [&](auto g) {
            using G = typename decltype(g)::type;
            return d->transposed ? gemm_sync::launch<T, G, true>(on, *d)
                                 : gemm_sync::launch<T, G, false>(on, *d);
        });
    });
}
