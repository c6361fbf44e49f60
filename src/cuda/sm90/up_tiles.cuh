// What up.cu and up_f8.cu share: the parameters, the layout of shared memory, the warps that load, the bias.
// up.cu explains them. With e4m3 a vector of 16 bytes has 16 elements; there `hidden` counts pairs of them.
// Terms: docs/glossary.md; symbols: include/smoe.h.
#pragma once
#include "sm90/gemm_cooperative.cuh"
#include "sm90/kernels.h"
#include "tma/feed.cuh"
#include "tma/tensor_map.h"
#include "tma/tma.cuh"

namespace moe
{
namespace up_kernel
{

using namespace gemm_cooperative;

struct up_params {
    CUtensorMap w1;               // 5-D: K, 8 rows, gate and up (or 1), groups of 8 features, experts
    CUtensorMap h;                // 3-D: n columns, gate and up (or 1), rows
    CUtensorMap a;                // 2-D: n columns, rows
    const void *x;                // (T, hidden)
    const void *bias;             // b1 or NULL
    const int32_t *row_token;     // (padded_rows)
    const int32_t *block_offsets; // as in moe_up
    int32_t block_stride;
    moe_cuda_lists lists;
    int32_t hidden, intermediate;
    int32_t gated, interleaved, store_h;
    smoe_activation activation;
    moe_gate_values values;
    // LoRA
    CUtensorMap b1; // B1, as w1
    const void *p1; // (padded_rows, rank)
    int32_t rank;   // 0: none
};

enum {
    LOADERS = 64,
    ROWS_A_LOADER = TILE_ROWS / (LOADERS / 8), // eight threads copy the 128 bytes of a row
    ACTIVATED = STAGING_END,                   // a subtile of A for each store warp
    BARRIERS = ACTIVATED + 2 * MOE_SUBTILE_BYTES,
    FEED = BARRIERS + 8 * (2 * NARROW_SLOTS + 2 * BUFFERS),
    SHARED_BYTES = FEED + feed::BYTES
};
static_assert(SHARED_BYTES <= 232448, "shared memory of an SM");
static_assert(FEED % 16 == 0, "items are 16 bytes");

// Of a tile: columns, and staging buffers of a consumer.
template <bool NARROW> MOE_DEVICE constexpr int columns_of()
{
    return NARROW ? NARROW_COLUMNS : TILE_COLUMNS;
}
template <bool NARROW> MOE_DEVICE constexpr int slots_of()
{
    return NARROW ? NARROW_SLOTS : SLOTS;
}
template <bool NARROW> using layout = ring_layout<slots_of<NARROW>()>;
template <bool NARROW> MOE_DEVICE constexpr int halves_of()
{
    return NARROW ? 1 : 2;
}

// Eight lanes copy the same rows row0 + 8 i of a tile, i < 16, one vector each. Lane `vector` of the eight
// reads the tokens of rows i = 2 vector and 2 vector + 1. If the tile has no second block, its rows have no
// tokens.
MOE_DEVICE int2 read_tokens(const up_params &p, moe_work tile, int row0, int vector)
{
    if (vector >= 4 && moe_work_blocks(tile) == 1) return {-1, -1};
    const int32_t *rows = p.row_token + tile.row + row0 + 16 * vector;
    return {__ldg(rows), __ldg(rows + 8)};
}

// The steps of LoRA, which follow those of K: 64 columns of P1 and of B1.
template <bool NARROW>
MOE_DEVICE void load_low_rank(const up_params &p, const layout<NARROW> &shared,
                              ring_position<slots_of<NARROW>()> &ring, work_item now, int group, uint32_t to)
{
    const int thread = threadIdx.x - 256, vector = thread & 7, row0 = thread >> 3;
    const int rows = moe_work_blocks(now.tile) * MOE_BLOCK_ROWS;
    for (int k = 0; k < p.rank; k += STEP) {
        barrier_wait(shared.empty(ring.slot), ring.phase);
        const uint32_t slot = shared.slot(ring.slot), full = shared.full(ring.slot);
        if (thread == 0) {
            barrier_expect(full, columns_of<NARROW>() * STEP * 2);
            load_box(slot + A_BYTES, &p.b1, full, k, 0, 0, group, moe_work_expert(now.tile));
        }
        const int column = k + vector * 8;
#pragma unroll 2
        for (int i = 0; i < ROWS_A_LOADER; i++) {
            const int row = row0 + 8 * i;
            const bool real = row < rows && column < p.rank;
            const int64_t element = (int64_t)(now.tile.row + row) * p.rank + column;
            copy16_async_if(real, slot + to + i * 8 * MOE_SUBTILE_ROW_BYTES,
                            (const char *)p.p1 + (real ? element * 2 : 0));
        }
        barrier_arrive_after_copies(full);
        ring.advance();
    }
}

// steps: of K, without those of LoRA. begin(t, tokens) is called before the first copies of tile t; tokens:
// of this thread's rows, as in read_tokens.
template <bool NARROW, bool LORA, class Begin>
MOE_DEVICE void load_tiles(const up_params &p, const layout<NARROW> &shared, feed items, int steps,
                           const Begin &begin)
{
    const int thread = threadIdx.x - 256, vector = thread & 7, row0 = thread >> 3;
    const uint32_t to = moe_subtile_offset(row0, vector), row_bytes = (uint32_t)p.hidden * 2;
    ring_position<slots_of<NARROW>()> ring(1);
    work_item item = items.read(0);
    int2 next = item.exists() ? read_tokens(p, item.tile, row0, vector) : int2{-1, -1};
    for (int t = 0; item.exists(); t++) {
        begin(t, next);
        const char *from[ROWS_A_LOADER]; // this lane's 16 bytes of the step
        uint32_t real = 0;
#pragma unroll
        for (int i = 0; i < ROWS_A_LOADER; i++) {
            const int row = __shfl_sync(~0u, i & 1 ? next.y : next.x, (thread & 24) | i >> 1);
            real |= (row >= 0 ? 1u : 0u) << i;
            from[i] = (const char *)p.x + (uint64_t)(uint32_t)max(row, 0) * row_bytes + vector * 16;
        }
        const work_item now = item;
        // Takes the next tile, and reads its tokens if it has other rows.
        const auto follow = [&] {
            item = items.read(t + 1);
            if (item.exists() && item.tile.row != now.tile.row)
                next = read_tokens(p, item.tile, row0, vector);
        };
        const int group = now.column * (p.gated ? 16 : 32); // of eight features
        // A tile of many steps is loaded in three loops; the third one also serves tiles of few steps. With
        // one loop and a test for what to do at a step, the compiler would not keep the counters in uniform
        // registers, and every step would take longer.
        const auto load = [&](int first, int end) {
            for (int k = first; k < end; k++) {
                barrier_wait(shared.empty(ring.slot), ring.phase);
                const uint32_t slot = shared.slot(ring.slot), full = shared.full(ring.slot);
                if (thread == 0) {
                    barrier_expect(full, columns_of<NARROW>() * STEP * 2);
                    load_box(slot + A_BYTES, &p.w1, full, k * STEP, 0, 0, group, moe_work_expert(now.tile));
                }
                const uint32_t wanted = k * STEP + vector * 8 < p.hidden ? real : 0;
#pragma unroll
                for (int i = 0; i < ROWS_A_LOADER; i++)
                    copy16_async_if(wanted & 1u << i, slot + to + i * 8 * MOE_SUBTILE_ROW_BYTES, from[i]);
                barrier_arrive_after_copies(full);
#pragma unroll
                for (int i = 0; i < ROWS_A_LOADER; i++) from[i] = advance_by_adds(from[i], STEP * 2);
                ring.advance();
            }
        };
        int done = 0;
        if (items.asks()) {
            load(0, items.asks_at());
            if (thread == 0) barrier_arrive(items.asked());
            done = (LORA ? items.steps : steps) - feed::READ_BEFORE;
            load(items.asks_at(), done);
        }
        follow();
        load(done, steps);
        if constexpr (LORA) load_low_rank<NARROW>(p, shared, ring, now, group, to);
    }
    for (int i = 0; i < slots_of<NARROW>(); i++) { // the last copies have arrived and have been read
        barrier_wait(shared.empty(ring.slot), ring.phase);
        ring.advance();
    }
}

// Adds b1 to one half of the accumulators.
template <typename T>
MOE_DEVICE void add_bias(float *acc, const up_params &p, int expert, int column_tile, int half, int lane)
{
    const int n = p.intermediate, feature_step = p.gated && p.interleaved ? 2 : 1;
    const int up_step = p.gated ? p.interleaved ? 1 : n : 0;
    const T *bias = (const T *)p.bias + (int64_t)expert * (p.gated ? 2 * n : n);
#pragma unroll
    for (int octet = 0; octet < 16; octet++) {
        const int feature = moe_octet_feature(column_tile, half, octet, p.gated) + (lane & 3) * 2;
        if (feature < n) {
            const T *at = bias + feature * feature_step + (octet & 1) * up_step;
            const float left = to_float(at[0]), right = to_float(at[feature_step]);
            acc[4 * octet] += left;
            acc[4 * octet + 1] += right;
            acc[4 * octet + 2] += left;
            acc[4 * octet + 3] += right;
        }
    }
}

// ---- The host's side

inline bool is_narrow(const moe_up &u)
{
    return (u.gated ? 2 : 1) * u.intermediate <= NARROW_COLUMNS;
}

inline up_params prepare(moe_launch *on, const moe_up &u)
{
    const int halves = u.gated ? 2 : 1;
    const moe_w1 w1 = {u.w1, u.experts, u.hidden, u.intermediate, halves, u.interleaved};
    up_params p = {};
    moe_map_w1(on, &p.w1, &w1, is_narrow(u) ? NARROW_COLUMNS : TILE_COLUMNS);
    if (u.h) moe_map_halves(on, &p.h, u.h, u.h_rows, halves, u.intermediate, MOE_BLOCK_ROWS);
    moe_map_matrix(on, &p.a, u.a, u.rows, u.intermediate, MOE_BLOCK_ROWS);
    p.x = u.x;
    p.bias = u.b1;
    p.row_token = u.row_token;
    p.block_offsets = u.block_offsets;
    p.block_stride = u.block_stride;
    p.lists = u.lists;
    p.hidden = (int32_t)u.hidden;
    p.intermediate = (int32_t)u.intermediate;
    p.gated = u.gated;
    p.interleaved = u.interleaved;
    p.store_h = u.h != NULL;
    p.activation = u.activation;
    p.values = u.values;
    p.rank = (int32_t)u.lora.rank;
    if (!p.rank) return p;
    const moe_w1 b1 = {u.lora.factor, u.experts, u.lora.rank, u.intermediate, halves, 0};
    moe_map_w1(on, &p.b1, &b1, is_narrow(u) ? NARROW_COLUMNS : TILE_COLUMNS);
    p.p1 = u.lora.low;
    return p;
}

} // namespace up_kernel
} // namespace moe
