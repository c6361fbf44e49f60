// What the plan's kernels share: the block-wide sum over experts, the small tables, and what a warp writes
// for an expert of its own.
#pragma once
#include "launch.h"
#include "ptx.cuh"

#ifndef SMOE_PLAN_THREADS
#define SMOE_PLAN_THREADS 512 // of a CTA of the kernels of one source file
#endif

namespace smoe
{
namespace plan
{

enum { THREADS = SMOE_PLAN_THREADS, WARPS = THREADS / 32 };

// What is summed over experts. odd: experts with an odd number of blocks, so tiles = (blocks + odd) / 2.
struct sums {
    uint32_t blocks, odd, pieces, rows, local, before;
};

SMOE_DEVICE sums operator+(sums a, sums b)
{
    return {a.blocks + b.blocks, a.odd + b.odd,     a.pieces + b.pieces,
            a.rows + b.rows,     a.local + b.local, a.before + b.before};
}

SMOE_DEVICE sums sums_of(uint32_t rows, uint32_t local, uint32_t before, uint32_t piece_limit)
{
    const uint32_t blocks = (rows + SMOE_BLOCK_ROWS - 1) / SMOE_BLOCK_ROWS;
    return {blocks, blocks & 1, (blocks + piece_limit - 1) / piece_limit, rows, local, before};
}

// Exclusive sum over the threads of the CTA; `memory`: a word a warp for each member, twice.
SMOE_DEVICE uint32_t scan(uint32_t value, uint32_t *memory)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint32_t sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const uint32_t left = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += left;
    }
    if (lane == 31) memory[warp] = sum;
    __syncthreads();
    const uint32_t others = __reduce_add_sync(~0u, lane < warp ? memory[lane] : 0);
    __syncthreads();
    return sum - value + others;
}

SMOE_DEVICE sums scan(sums v, uint32_t *memory)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint32_t value[6] = {v.blocks, v.odd, v.pieces, v.rows, v.local, v.before}, sum[6];
#pragma unroll
    for (int i = 0; i < 6; i++) sum[i] = value[i];
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2)
#pragma unroll
        for (int i = 0; i < 6; i++) {
            const uint32_t left = __shfl_up_sync(~0u, sum[i], step);
            if (lane >= step) sum[i] += left;
        }
    if (lane == 31)
#pragma unroll
        for (int i = 0; i < 6; i++) memory[i * WARPS + warp] = sum[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 6; i++)
        sum[i] += __reduce_add_sync(~0u, lane < warp ? memory[i * WARPS + lane] : 0) - value[i];
    __syncthreads();
    return {sum[0], sum[1], sum[2], sum[3], sum[4], sum[5]};
}

// Experts' sums in shared memory, [experts].
struct tables {
    uint32_t *rows;        // of the expert
    uint32_t *first_block; // among the padded rows
    uint32_t *first_tile, *first_piece;
};

// The plan's tables over experts, by thread `expert`'s owner. `s`: sums over the experts before it.
SMOE_DEVICE void write_tables(const smoe_cuda_plan &p, int expert, sums s, uint32_t rows)
{
    p.counts[expert] = (int32_t)rows;
    p.row_offsets[expert] = (int32_t)s.rows;
    p.block_offsets[expert] = (int32_t)s.blocks;
}

SMOE_DEVICE void write_totals(const smoe_cuda_plan &p, sums s)
{
    p.row_offsets[p.experts] = (int32_t)s.rows;
    p.block_offsets[p.experts] = (int32_t)s.blocks;
    p.lists.counts[0] = (int32_t)((s.blocks + s.odd) / 2);
    p.lists.counts[1] = (int32_t)s.pieces;
}

// A warp writes what is left of an expert: its place in the order, its padding rows and its work.
SMOE_DEVICE void write_expert(const smoe_cuda_plan &p, const tables &t, int expert)
{
    const int lane = threadIdx.x & 31;
    const uint32_t rows = t.rows[expert];
    uint32_t place = 0;
#pragma unroll 1
    for (int other = lane; other < p.experts; other += 32)
        place += t.rows[other] > rows || (t.rows[other] == rows && other < expert);
    place = __reduce_add_sync(~0u, place);
    if (lane == 0) p.order[place] = expert;

    const int blocks = (int)((rows + SMOE_BLOCK_ROWS - 1) / SMOE_BLOCK_ROWS);
    const uint32_t first = t.first_block[expert] * SMOE_BLOCK_ROWS;
#pragma unroll 1
    for (uint32_t row = first + rows + lane; row < first + blocks * SMOE_BLOCK_ROWS; row += 32) {
        p.row_token[row] = -1;
        p.row_weight[row] = 0.0f;
    }
#pragma unroll 1
    for (int i = lane; i < (blocks + 1) / 2; i += 32)
        p.lists.tiles[t.first_tile[expert] + i] =
            smoe_work_make((int32_t)(first + i * 2 * SMOE_BLOCK_ROWS), expert, min(2, blocks - 2 * i));
    const int pieces = (blocks + p.lists.piece_limit - 1) / p.lists.piece_limit;
#pragma unroll 1
    for (int i = lane; i < pieces; i += 32) {
        const int begin = smoe_cut(blocks, pieces, i), end = smoe_cut(blocks, pieces, i + 1);
        p.lists.pieces[t.first_piece[expert] + i] =
            smoe_work_make((int32_t)(first + begin * SMOE_BLOCK_ROWS), expert, end - begin);
    }
}

// All padded rows from `first` on belong to nobody. By the whole grid.
SMOE_DEVICE void write_tail(const smoe_cuda_plan &p, uint32_t first)
{
#pragma unroll 1
    for (uint32_t row = first + blockIdx.x * THREADS + threadIdx.x; row < (uint32_t)p.padded_rows;
         row += gridDim.x * THREADS) {
        p.row_token[row] = -1;
        p.row_weight[row] = 0.0f;
    }
}

} // namespace plan
} // namespace smoe
