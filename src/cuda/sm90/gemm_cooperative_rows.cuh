// Rows times an expert's weights on the cooperative core, for any shape: Y[r] = A[r] W2[e]^T + b2[e], and
// the backward's dX~[r] = dH[r] W1[e].
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Tiles of 128 x 256. TMA loads both operands, with zeros past the end of the K dimension. TMA also stores
// the result and leaves out what is past the end of the column chunk. Warps 10 and 11 start the stores.
#pragma once
#include "sm90/gemm_cooperative.cuh"
#include "sm90/gemm_operands.cuh"
#include "tma/feed.cuh"

namespace moe
{
namespace gemm_cooperative_rows
{

using namespace gemm_cooperative;

enum { BARRIERS = STAGING_END, FEED = BARRIERS + BARRIER_BYTES, SHARED_BYTES = FEED + feed::BYTES };
static_assert(FEED % 16 == 0, "items are 16 bytes");
static_assert(SHARED_BYTES <= 232448, "shared memory of an SM");

template <class P> MOE_DEVICE void load_tiles(const P &p, const shared_layout &shared, feed items, int steps)
{
    ring_position<SLOTS> ring(1);
    const int ask_at = items.asks_at();
    operands<P>::prefetch(p);
    for (int t = 0;; t++) {
        const work_item item = items.read(t);
        if (!item.exists()) break;
        const moe_work tile = item.tile;
        const int column = item.column * TILE_COLUMNS;
        for (int k = 0; k < steps; k++) {
            barrier_wait(shared.empty(ring.slot), ring.phase);
            const uint32_t slot = shared.slot(ring.slot), full = shared.full(ring.slot);
            barrier_expect(full, SLOT_BYTES);
            operands<P>::load_rows(p, slot, full, k, tile);
            operands<P>::template load_weights<TILE_COLUMNS>(p, slot + A_BYTES, full, k, tile, column);
            if (k == ask_at) barrier_arrive(items.asked());
            ring.advance();
        }
    }
}

template <class P>
MOE_DEVICE void store_tiles(const P &p, const work_queue &queue, const shared_layout &shared, feed items,
                            int consumer)
{
    uint32_t count = 0;
    if (consumer == 0) items.begin(queue);
    for (int t = 0;; t++) {
        const work_item item = items.read(t);
        if (consumer == 1) barrier_arrive(items.ring.free(t));
        if (!item.exists()) break;
        const moe_work tile = item.tile;
        if (consumer >= moe_work_blocks(tile)) continue;
        if (consumer == 0) items.claim(t, queue);
        const int row = tile.row + consumer * MOE_BLOCK_ROWS;
        for (int half = 0; half < 2; half++) {
            const uint32_t buffer = consumer * 2 + half, subtile = shared.buffer(buffer);
            const int column = item.column * TILE_COLUMNS + half * 128;
            barrier_wait(shared.buffer_full(buffer), count & 1);
            if (column < p.columns) store_box(&p.y, subtile, column, row);
            if (column + 64 < p.columns) store_box(&p.y, subtile + MOE_SUBTILE_BYTES, column + 64, row);
            commit_stores();
            wait_stores_read<0>();
            barrier_arrive(shared.buffer_empty(buffer));
        }
        count++;
    }
    if (consumer == 0) finish_claims(queue.turn);
    wait_stores_done();
}

// Adds b2 to one half of the accumulators; `column` is its first column in the chunk.
template <typename T, class P>
MOE_DEVICE void add_bias(float *acc, const P &p, int expert, int column, int lane)
{
    const T *bias = (const T *)p.bias + (int64_t)expert * p.hidden + p.first_column;
#pragma unroll
    for (int octet = 0; octet < 16; octet++) {
        const int at = column + octet * 8 + (lane & 3) * 2;
        if (at < p.columns) {
            const float left = to_float(bias[at]), right = to_float(bias[at + 1]);
            acc[4 * octet] += left;
            acc[4 * octet + 1] += right;
            acc[4 * octet + 2] += left;
            acc[4 * octet + 3] += right;
        }
    }
}

template <typename T, class P>
MOE_DEVICE void multiply_tiles(const P &p, const shared_layout &shared, feed items, int steps, int consumer,
                               int lane)
{
    ring_position<SLOTS> ring(0);
    const release_slot done = {shared, lane};
    uint32_t count = 0;
    float acc[128];
    for (int t = 0;; t++) {
        const work_item item = items.read(t);
        if (!item.exists()) break;
        const moe_work tile = item.tile;
        if (consumer >= moe_work_blocks(tile)) {
            pass_over(ring, shared, steps, done);
            continue;
        }
        if constexpr (operands<P>::LOW_RANK)
            multiply<T, false, K_MAJOR, operands<P>::WEIGHTS, false, true>(
                acc, ring, shared, operands<P>::plain::steps(p), consumer, done, p.rank);
        else
            multiply<T, false, K_MAJOR, operands<P>::WEIGHTS>(acc, ring, shared, steps, consumer, done);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            [[maybe_unused]] const int column = item.column * TILE_COLUMNS + half * 128;
            if constexpr (operands<P>::HAS_BIAS)
                if (p.bias) add_bias<T>(acc + half * 64, p, moe_work_expert(tile), column, lane);
            write_half<T, false>(acc + half * 64, shared, consumer, half, count, 0, lane);
        }
        count++;
    }
}

template <typename T, class P>
__global__ void __launch_bounds__(THREADS, 1) kernel(const __grid_constant__ P p)
{
    extern __shared__ __align__(1024) char memory[];
    const uint32_t base = shared_address(memory);
    const shared_layout shared = {base, base + BARRIERS};
    const int warp = warp_number(), lane = threadIdx.x & 31;
    const int steps = operands<P>::steps(p);
    const feed items = {{base + FEED}, steps};
    if (threadIdx.x == 0) {
        items.init();
        init_barriers(shared, 1);
    }
    __syncthreads();
    const work_queue queue(p, (p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS);
    if (warp >= 8) {
        give_registers<40>();
        if (warp == 8 && lane == 0) load_tiles(p, shared, items, steps);
        if (warp >= 10 && lane == 0) store_tiles(p, queue, shared, items, warp - 10);
    } else {
        take_registers<232>();
        multiply_tiles<T>(p, shared, items, steps, warp >> 2, lane);
    }
}

} // namespace gemm_cooperative_rows
} // namespace moe
