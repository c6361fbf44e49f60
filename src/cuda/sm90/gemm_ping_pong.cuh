// The ping-pong core, for a short K dimension, no bias and no LoRA: the same product as in
// gemm_cooperative_rows.cuh, in tiles of 128 x 192. If the columns of the chunk are no multiple of 192, the
// last column tile has 128 or 64 columns. The weights of 192 columns are loaded for it too, so that every
// slot has the same number of bytes. Those past the tile are not multiplied. Terms: docs/glossary.md;
// symbols: include/smoe.h.
//
// Each of the two consumer warpgroups holds a whole tile (192 accumulators a thread). The two use the tensor
// cores in turns: one converts and stores its tile while the other multiplies. With a short K dimension the
// epilogue would otherwise take a large part of a tile's time.
#pragma once
#include "common/storage.cuh"
#include "common/swizzle.h"
#include "schedule/work_order.h"
#include "sm90/gemm_choice.h"
#include "sm90/gemm_operands.cuh"
#include "sm90/wgmma.cuh"
#include "tma/mbarrier.cuh"

namespace moe
{
namespace gemm_ping_pong
{

enum {
    THREADS = 384,
    TILE_ROWS = 128,
    TILE_COLUMNS = MOE_PING_PONG_COLUMNS,
    SUBTILES = TILE_COLUMNS / MOE_SUBTILE_COLUMNS,
    STEP = 64,
    SLOTS = 4,
    A_BYTES = TILE_ROWS * STEP * 2,
    B_BYTES = TILE_COLUMNS * STEP * 2,
    SLOT_BYTES = A_BYTES + B_BYTES,
    BUFFERS = 2, // subtiles of 128 x 64 for each consumer
    BUFFER_BYTES = 2 * MOE_SUBTILE_BYTES,
    STAGING = SLOTS * SLOT_BYTES,
    BARRIERS = STAGING + 2 * BUFFERS * BUFFER_BYTES,
    SHARED_BYTES = BARRIERS + 8 * 2 * SLOTS
};
static_assert(SHARED_BYTES <= 232448, "shared memory of an SM");
static_assert(BUFFERS == 2, "store_subtile: which store a buffer waits for");
static_assert(SUBTILES == 3, "multiply_columns: a tile has one to three subtiles");

// Named barriers: 1 and 2 for the staging of consumers 0 and 1, 4 and 5 for their turns at the tensor cores.
enum { STAGING_BARRIER = 1, TURN_BARRIER = 4 };

struct shared_layout {
    uint32_t base;
    MOE_DEVICE uint32_t slot(uint32_t s) const
    {
        return base + s * SLOT_BYTES;
    }
    MOE_DEVICE uint32_t staging(int consumer) const
    {
        return base + STAGING + consumer * BUFFERS * BUFFER_BYTES;
    }
    MOE_DEVICE uint32_t full(uint32_t s) const
    {
        return base + BARRIERS + 8 * s;
    }
    MOE_DEVICE uint32_t empty(uint32_t s) const
    {
        return base + BARRIERS + 8 * (SLOTS + s);
    }
};

struct placed_tile {
    moe_work work;
    int column; // its first one in the chunk
};

template <class P> MOE_DEVICE placed_tile tile_of(const P &p, int unit, int column_tiles)
{
    const int row_tile = unit / column_tiles;
    const int2 entry = __ldg((const int2 *)(p.lists.tiles + row_tile));
    return {{entry.x, entry.y}, (unit - row_tile * column_tiles) * TILE_COLUMNS};
}

template <class P> MOE_DEVICE int unit_of(const P &p, int wave)
{
    return moe_unit_in_turns(blockIdx.x, wave, gridDim.x, p.turn);
}

template <class P>
MOE_DEVICE void load_tiles(const P &p, const shared_layout &shared, int units, int column_tiles, int steps)
{
    ring_position<SLOTS> ring(1);
    operands<P>::prefetch(p);
    for (int wave = 0, unit; (unit = unit_of(p, wave)) < units; wave++) {
        const placed_tile tile = tile_of(p, unit, column_tiles);
        for (int k = 0; k < steps; k++) {
            barrier_wait(shared.empty(ring.slot), ring.phase);
            const uint32_t slot = shared.slot(ring.slot), full = shared.full(ring.slot);
            barrier_expect(full, SLOT_BYTES);
            operands<P>::load_rows(p, slot, full, k, tile.work);
            operands<P>::template load_weights<TILE_COLUMNS>(p, slot + A_BYTES, full, k, tile.work,
                                                             tile.column);
            ring.advance();
        }
    }
}

// A thread's first COUNT accumulators. Those of the warpgroup together are 64 rows by 2 COUNT columns.
template <int COUNT> MOE_DEVICE float (&first_sums(float (&acc)[96]))[COUNT]
{
    return *(float(*)[COUNT])acc;
}

// Multiplies the first COLUMNS columns of a tile.
template <typename T, operand_order WEIGHTS, int COLUMNS>
MOE_DEVICE void multiply(float (&acc)[2][96], ring_position<SLOTS> &ring, const shared_layout &shared,
                         int steps, int lane)
{
    uint32_t previous = 0;
    for (int k = 0; k < steps; k++) {
        barrier_wait<false>(shared.full(ring.slot), ring.phase);
        const uint32_t a = descriptor_address(shared.slot(ring.slot));
        const uint32_t b = descriptor_address(shared.slot(ring.slot) + A_BYTES);
        pin(acc[0]);
        pin(acc[1]);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < STEP / 16; j++) {
            const uint64_t weights = descriptor<WEIGHTS>(b + descriptor_step<WEIGHTS>() * j);
#pragma unroll
            for (int block = 0; block < 2; block++)
                tensor_core<T>::template multiply<K_MAJOR, WEIGHTS>(
                    first_sums<COLUMNS / 2>(acc[block]),
                    descriptor(a + descriptor_address(block * MOE_SUBTILE_BYTES) + 2 * j), weights,
                    (k | j) != 0);
        }
        wgmma_commit();
        pin(acc[0]);
        pin(acc[1]);
        wgmma_wait<1>();
        if (k && lane == 0) barrier_arrive(shared.empty(previous));
        previous = ring.slot;
        ring.advance();
    }
}

// columns: from the tile's first one to the end of the chunk.
template <typename T, operand_order WEIGHTS>
MOE_DEVICE void multiply_columns(int columns, float (&acc)[2][96], ring_position<SLOTS> &ring,
                                 const shared_layout &shared, int steps, int lane)
{
    if (columns > 128)
        multiply<T, WEIGHTS, 192>(acc, ring, shared, steps, lane);
    else if (columns > 64)
        multiply<T, WEIGHTS, 128>(acc, ring, shared, steps, lane);
    else
        multiply<T, WEIGHTS, 64>(acc, ring, shared, steps, lane);
}

// Writes one subtile of 64 columns of both row blocks to buffer `subtile % BUFFERS`; then the leader stores
// it by TMA.
template <typename T, class P>
MOE_DEVICE void store_subtile(const float (&acc)[2][96], const P &p, uint32_t staging, int subtile,
                              int consumer, moe_work tile, int column, int lane)
{
    using S = storage<T>;
    const bool leader = (threadIdx.x & 127) == 0;
    const uint32_t buffer = staging + subtile % BUFFERS * BUFFER_BYTES;
    if (leader) {
        if (subtile == 0) // the tile before may have ended with this buffer
            wait_stores_read<0>();
        else
            wait_stores_read<BUFFERS - 1>();
    }
    named_barrier_sync(STAGING_BARRIER + consumer, 128);
    const uint32_t to = buffer + (((threadIdx.x >> 5) & 3) * 16 + (lane & 15)) * MOE_SUBTILE_ROW_BYTES;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int q = 0; q < 4; q++) {
            const float *v = &acc[m][(subtile * 8 + q * 2) * 4];
            store_matrices(to + m * MOE_SUBTILE_BYTES + (((q * 2 + (lane >> 4)) ^ (lane & 7)) << 4),
                           S::pack(v[0], v[1]), S::pack(v[2], v[3]), S::pack(v[4], v[5]),
                           S::pack(v[6], v[7]));
        }
    fence_async_proxy();
    named_barrier_sync(STAGING_BARRIER + consumer, 128);
    if (leader) {
        store_box(&p.y, buffer, column, tile.row);
        if (moe_work_blocks(tile) > 1)
            store_box(&p.y, buffer + MOE_SUBTILE_BYTES, column, tile.row + MOE_BLOCK_ROWS);
        commit_stores();
    }
}

template <typename T, class P>
MOE_DEVICE void multiply_tiles(const P &p, const shared_layout &shared, int units, int column_tiles,
                               int steps, int consumer, int lane)
{
    ring_position<SLOTS> ring(0);
    float acc[2][96];
    if (consumer == 1) {
        named_barrier_arrive(TURN_BARRIER, 256); // consumer 0 begins
        if (blockIdx.x < units) ring.advance(steps);
    }
    for (int wave = consumer, unit; (unit = unit_of(p, wave)) < units; wave += 2) {
        const placed_tile tile = tile_of(p, unit, column_tiles);
        named_barrier_sync(TURN_BARRIER + consumer, 256);
        multiply_columns<T, operands<P>::WEIGHTS>(p.columns - tile.column, acc, ring, shared, steps, lane);
        named_barrier_arrive(TURN_BARRIER + (consumer ^ 1), 256);
        wgmma_wait<0>();
        pin(acc[0]);
        pin(acc[1]);
        if (lane == 0) barrier_arrive(shared.empty(ring.slot == 0 ? SLOTS - 1 : ring.slot - 1));
        ring.advance(steps); // a tile of the other consumer
#pragma unroll
        for (int subtile = 0; subtile < SUBTILES; subtile++) {
            const int column = tile.column + subtile * MOE_SUBTILE_COLUMNS;
            if (column < p.columns)
                store_subtile<T>(acc, p, shared.staging(consumer), subtile, consumer, tile.work, column,
                                 lane);
        }
    }
    if ((threadIdx.x & 127) == 0) wait_stores_done();
}

template <typename T, class P>
__global__ void __launch_bounds__(THREADS, 1) kernel(const __grid_constant__ P p)
{
    extern __shared__ __align__(1024) char memory[];
    const shared_layout shared = {shared_address(memory)};
    const int warp = warp_number(), lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) {
            barrier_init(shared.full(i), 1);
            barrier_init(shared.empty(i), 4); // the warps of the consumer whose tile it is
        }
        barrier_init_done();
    }
    __syncthreads();
    const int column_tiles = (p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int units = __ldg(p.lists.counts) * column_tiles, steps = operands<P>::steps(p);
    if (warp >= 8) {
        give_registers<24>();
        if (warp == 8 && lane == 0) load_tiles(p, shared, units, column_tiles, steps);
    } else {
        take_registers<240>();
        multiply_tiles<T>(p, shared, units, column_tiles, steps, warp >> 2, lane);
    }
}

} // namespace gemm_ping_pong
} // namespace moe
