// The work lists of the backward.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
//   list           an entry is                                            for
//   tiles          up to 128 rows of one expert                           dh, dx_rows
//   pieces         a run of blocks of one expert; the last have none      dw2, dw1, dx_rows
//   splits         an expert that is cut into more than one piece         dw2, dw1
//   block_expert   the expert of a block                                  dS, dlogits
//
// One CTA makes these lists from the plan's block_offsets and order. A second CTA makes the same lists for
// the products dWr = dlogits^T X and dlogits Wr, a term of dX; there all tokens are the rows of one expert.
//
// Bytes: reads block_offsets and order; writes 4 bytes for each block and one entry for each tile, piece and
// split expert. No FLOPs.
//
// Tile: each of the two CTAs has 1024 threads. A thread counts the entries that four neighbouring experts add
// to each list, so E is at most 4096. Prefix sums of these counts tell where each expert's entries begin.
// Then a warp writes the entries of one expert at a time.
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "host/launch_backward.h"

namespace moe
{
namespace
{

enum { THREADS = 1024, WARPS = THREADS / 32, EACH = 4, MOST_EXPERTS = THREADS * EACH };

struct sums {
    uint32_t tiles, pieces, parts, splits;
};

MOE_DEVICE sums operator+(sums a, sums b)
{
    return {a.tiles + b.tiles, a.pieces + b.pieces, a.parts + b.parts, a.splits + b.splits};
}

// Sum over the threads before this one.
MOE_DEVICE sums sums_before(sums own, uint32_t (&memory)[4][WARPS])
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint32_t value[4] = {own.tiles, own.pieces, own.parts, own.splits}, sum[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum[i] = sum_up_to_lane(value[i], lane);
        if (lane == 31) memory[i][warp] = sum[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++)
        sum[i] += __reduce_add_sync(~0u, lane < warp ? memory[i][lane] : 0) - value[i];
    return {sum[0], sum[1], sum[2], sum[3]};
}

struct expert_work {
    int32_t first_block, blocks, pieces;
};

// The blocks before an expert.
MOE_DEVICE int blocks_before(const moe_cuda_make_lists &p, int expert)
{
    return p.block_offsets ? p.block_offsets[expert] : expert * p.padded_blocks;
}

MOE_DEVICE int expert_at(const moe_cuda_make_lists &p, int place)
{
    return p.order ? p.order[place] : place;
}

MOE_DEVICE expert_work work_of(const moe_cuda_make_lists &p, int expert, int limit)
{
    const int first = blocks_before(p, expert), blocks = blocks_before(p, expert + 1) - first;
    return {first, blocks, max(1, (blocks + limit - 1) / limit)};
}

struct both_lists {
    moe_cuda_make_lists of[2];
};

__global__ void __launch_bounds__(THREADS) make_lists(const __grid_constant__ both_lists lists)
{
    const moe_cuda_make_lists &p = lists.of[blockIdx.x];
    __shared__ uint32_t memory[4][WARPS];
    __shared__ uint32_t first_tile[MOST_EXPERTS]; // by expert
    __shared__ uint32_t
        first_part[MOST_EXPERTS]; // by position in the order; parts in the upper half, splits in the lower
    const int all_blocks = blocks_before(p, p.experts);
    const int limit = moe_split_limit(all_blocks, p.weight_tiles, p.ctas);
    sums own[EACH], sum = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int at = threadIdx.x * EACH + i;
        own[i] = {0, 0, 0, 0};
        if (at < p.experts) {
            const expert_work by_id = work_of(p, at, limit), by_size = work_of(p, expert_at(p, at), limit);
            own[i].tiles = (by_id.blocks + MOE_TILE_BLOCKS - 1) / MOE_TILE_BLOCKS;
            own[i].pieces = by_size.blocks ? by_size.pieces : 0;
            own[i].splits = by_size.pieces > 1;
            own[i].parts = by_size.pieces > 1 ? by_size.pieces : 0;
        }
        sum = sum + own[i];
    }
    sums before = sums_before(sum, memory);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int at = threadIdx.x * EACH + i;
        if (at < p.experts) {
            first_tile[at] = before.tiles;
            first_part[at] = before.parts << 16 | before.splits;
        }
        before = before + own[i];
    }
    if (threadIdx.x == THREADS - 1) {
        p.lists.counts[0] = before.tiles;
        p.lists.counts[1] = before.pieces;
        p.lists.counts[2] = before.splits;
        // All pieces: an expert that is not split has one, also if it has no rows.
        p.lists.counts[3] = p.experts + before.parts - before.splits;
        p.lists.turn[0] = p.lists.turn[1] = 0;
    }
    __syncthreads();

    const int lane = threadIdx.x & 31;
    for (int at = threadIdx.x >> 5; at < p.experts; at += WARPS) {
        const expert_work by_id = work_of(p, at, limit);
        for (int i = lane * MOE_TILE_BLOCKS; i < by_id.blocks; i += 32 * MOE_TILE_BLOCKS)
            p.lists.tiles[first_tile[at] + i / MOE_TILE_BLOCKS] = moe_work_make(
                (by_id.first_block + i) * MOE_BLOCK_ROWS, at, min(MOE_TILE_BLOCKS, by_id.blocks - i));
        for (int i = lane; i < by_id.blocks; i += 32) p.lists.block_expert[by_id.first_block + i] = at;

        const int expert = expert_at(p, at);
        const expert_work w = work_of(p, expert, limit);
        const int part = first_part[at] >> 16, split = first_part[at] & 0xffff;
        const int piece = at + part - split; // experts that are not split have one
        for (int i = lane; i < w.pieces; i += 32) {
            const int begin = moe_cut(w.blocks, w.pieces, i), end = moe_cut(w.blocks, w.pieces, i + 1);
            p.lists.pieces[piece + i] = {(w.first_block + begin) * MOE_BLOCK_ROWS, expert, end - begin,
                                         w.pieces > 1 ? part + i : -1};
        }
        if (lane == 0 && w.pieces > 1) p.lists.splits[split] = {expert, part, w.pieces};
    }
    for (int i = all_blocks + threadIdx.x; i < p.padded_blocks; i += THREADS) p.lists.block_expert[i] = -1;
}

} // namespace
} // namespace moe

extern "C" cudaError_t moe_cuda_lists_launch(const moe_launch *on, const moe_cuda_make_lists *experts,
                                             const moe_cuda_make_lists *router)
{
    const moe::both_lists lists = {{*experts, router ? *router : *experts}};
    return moe::enqueue(moe::make_lists, router ? 2 : 1, moe::THREADS, 0, on->stream, lists);
}
