// What the kernels of the plan share: writing one expert's part of the plan's arrays and work lists by one
// warp.
// Terms: docs/glossary.md; symbols: include/smoe.h.
#pragma once
#include "common/reduce.cuh"
#include "host/launch.h"
#include "schedule/plan_size.h"

namespace moe
{
namespace plan
{

enum { THREADS = MOE_PLAN_THREADS, WARPS = THREADS / 32 };

MOE_DEVICE uint32_t blocks_of(uint32_t rows)
{
    return (rows + MOE_BLOCK_ROWS - 1) / MOE_BLOCK_ROWS;
}

// For one expert: sums over the experts before it, and its position in the order.
struct expert_sums {
    uint32_t place, rows, blocks, odd, pieces; // odd: experts with an odd number of blocks
};

MOE_DEVICE uint32_t tiles_of(const expert_sums &s)
{
    return (s.blocks + s.odd) / 2;
}

MOE_DEVICE void add_expert(expert_sums &s, uint32_t rows, uint32_t piece_limit)
{
    const uint32_t blocks = blocks_of(rows);
    s.rows += rows;
    s.blocks += blocks;
    s.odd += blocks & 1;
    s.pieces += (blocks + piece_limit - 1) / piece_limit;
}

// Computed by one warp. `rows`: of every expert, in shared memory.
MOE_DEVICE expert_sums sum_experts(const moe_cuda_plan &p, const uint32_t *rows, int expert, int lane)
{
    const uint32_t own = rows[expert];
    expert_sums s = {0, 0, 0, 0, 0};
#pragma unroll 2
    for (int other = lane; other < expert; other += 32) {
        s.place += rows[other] >= own;
        add_expert(s, rows[other], (uint32_t)p.lists.piece_limit);
    }
#pragma unroll 2
    for (int other = expert + 1 + lane; other < p.experts; other += 32) s.place += rows[other] > own;
    return {__reduce_add_sync(~0u, s.place), __reduce_add_sync(~0u, s.rows), __reduce_add_sync(~0u, s.blocks),
            __reduce_add_sync(~0u, s.odd), __reduce_add_sync(~0u, s.pieces)};
}

// One warp writes an expert's entries of the tables, its pad rows and its entries of the work lists.
template <bool COUNTED = false>
MOE_DEVICE void write_expert(const moe_cuda_plan &p, const uint32_t *rows, int expert)
{
    const int lane = threadIdx.x & 31;
    const uint32_t own = rows[expert];
    const expert_sums before = sum_experts(p, rows, expert, lane);
    expert_sums after = before;
    add_expert(after, own, (uint32_t)p.lists.piece_limit);
    if (lane == 0) {
        p.order[before.place] = expert;
        if (!COUNTED) p.counts[expert] = (int32_t)own;
        if (p.topk_counts) p.topk_counts[expert] = (int32_t)own;
        p.row_offsets[expert] = (int32_t)before.rows;
        p.block_offsets[expert] = (int32_t)before.blocks;
        if (expert == p.experts - 1) {
            p.row_offsets[p.experts] = (int32_t)after.rows;
            p.block_offsets[p.experts] = (int32_t)after.blocks;
            p.lists.counts[0] = (int32_t)tiles_of(after);
            p.lists.counts[1] = (int32_t)after.pieces;
            p.lists.turn[0] = p.lists.turn[1] = 0;
        }
    }
    const uint32_t first = before.blocks * MOE_BLOCK_ROWS, end = after.blocks * MOE_BLOCK_ROWS;
    const int blocks = (int)(after.blocks - before.blocks);
#pragma unroll 1
    for (uint32_t row = first + own + lane; row < end; row += 32) {
        p.row_token[row] = -1;
        p.row_weight[row] = 0.0f;
    }
#pragma unroll 1
    for (int i = lane; i < (blocks + 1) / 2; i += 32)
        p.lists.tiles[tiles_of(before) + i] =
            moe_work_make((int32_t)(first + i * 2 * MOE_BLOCK_ROWS), expert, min(2, blocks - 2 * i));
    const int pieces = (int)(after.pieces - before.pieces);
#pragma unroll 1
    for (int i = lane; i < pieces; i += 32) {
        const int begin = moe_cut(blocks, pieces, i), end_block = moe_cut(blocks, pieces, i + 1);
        p.lists.pieces[before.pieces + i] =
            moe_work_make((int32_t)(first + begin * MOE_BLOCK_ROWS), expert, end_block - begin);
    }
}

// Marks all padded rows from `first` on as pad rows. Done by the whole grid.
MOE_DEVICE void write_tail(const moe_cuda_plan &p, uint32_t first)
{
#pragma unroll 1
    for (uint32_t row = first + blockIdx.x * THREADS + threadIdx.x; row < (uint32_t)p.padded_rows;
         row += gridDim.x * THREADS) {
        p.row_token[row] = -1;
        p.row_weight[row] = 0.0f;
    }
}

} // namespace plan
} // namespace moe
