// How a persistent CTA gets its units of work, one by one, from a counter in global memory. CTAs that run at
// the same time then work on neighbouring units of the work list, so they find an expert's weights in L2.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// The store warp of consumer 0 claims units, because this warp has time to wait for the counter and the
// list. It writes the units to a ring in shared memory, from which all other warps of the CTA read them.
//
// When to claim a unit. If a CTA claims a unit too early, other CTAs have finished the neighbouring units
// before this CTA starts, and the shared operands have left L2. So a tile with many steps of K is claimed
// when the loaders ask for it, shortly before they need it. For a tile with few steps that would be too
// late. Such a tile is claimed three tiles ahead of the tile that is being stored.
#pragma once
#include "schedule/tile_walk.cuh"
#include "schedule/work_order.h"
#include "tma/unit_ring.cuh"

namespace moe
{
struct work_item {
    moe_work tile; // without blocks: there is no more work
    int column;    // tile
    MOE_DEVICE bool exists() const
    {
        return moe_work_blocks(tile) != 0;
    }
};

// The work list, and the counter of units.
struct work_queue {
    tile_walk walk;
    const int32_t *block_offsets; // as in moe_up, or NULL: the order of the list, column tiles fastest
    int block_stride;
    int *turn; // see unit_ring.cuh
    template <class P>
    MOE_DEVICE work_queue(const P &p, int column_tiles)
        : walk(p.lists.tiles, p.lists.counts, column_tiles), block_offsets(p.block_offsets),
          block_stride(p.block_stride), turn(p.lists.turn)
    {
    }
    MOE_DEVICE work_item item(int unit) const
    {
        if (unit >= walk.units) return {{0, 0}, 0};
        const moe_work tile = walk.tile(unit);
        if (walk.column_tiles <= MOE_MOST_COLUMNS_FIRST || !block_offsets) return {tile, walk.column(unit)};
        const int expert = moe_work_expert(tile), first = __ldg(block_offsets + expert * block_stride);
        const int blocks = __ldg(block_offsets + expert * block_stride + 1) - first;
        const int before = (tile.row / MOE_BLOCK_ROWS - first) / MOE_TILE_BLOCKS; // row tiles of the expert
        const moe_place place =
            moe_place_of(before * walk.column_tiles + walk.column(unit),
                         (blocks + MOE_TILE_BLOCKS - 1) / MOE_TILE_BLOCKS, walk.column_tiles);
        const int block = place.row_tile * MOE_TILE_BLOCKS;
        return {moe_work_make((first + block) * MOE_BLOCK_ROWS, expert,
                              min((int)MOE_TILE_BLOCKS, blocks - block)),
                place.column_tile};
    }
};

// When the claiming warp comes to tile i, loaders and consumers have read all items up to i - 4, because the
// ring of slots does not let them be further behind. The other store warp can be, so it reports what it has
// read.
struct feed {
    enum {
        ITEMS = 8,
        FEW_LEAD = 3,    // tiles of few steps
        MANY_STEPS = 24, // and of many:
        ASK_BEFORE = 12, // so many steps before a tile's last one the loaders ask for the next item
        READ_BEFORE = 4, // and so many steps before the last one they read it, to know its tokens in time
        BYTES = unit_ring<ITEMS, 1>::BYTES + 16
    };
    static_assert((int)READ_BEFORE < (int)ASK_BEFORE && (int)ASK_BEFORE < (int)MANY_STEPS,
                  "asked, then read");
    unit_ring<ITEMS, 1> ring;
    int steps; // of a tile
    MOE_DEVICE bool asks() const
    {
        return steps >= MANY_STEPS;
    }
    MOE_DEVICE int lead() const
    {
        return asks() ? 1 : FEW_LEAD;
    }
    MOE_DEVICE uint32_t asked() const
    {
        return ring.at + ring.BYTES;
    }
    MOE_DEVICE void init() const
    {
        barrier_init(asked(), 1);
        ring.init();
    }
    MOE_DEVICE work_item read(int i) const
    {
        const uint4 v = load_shared16(ring.wait_known(i));
        return {{(int)v.x, (int)v.y}, (int)v.z};
    }
    MOE_DEVICE void publish(int i, work_item item) const
    {
        store_shared16(ring.wait_free(i),
                       {(uint32_t)item.tile.row, (uint32_t)item.tile.what, (uint32_t)item.column, 0});
        barrier_arrive(ring.known(i));
    }
    // The step of a tile at which a loader arrives at asked(), or -1.
    MOE_DEVICE int asks_at() const
    {
        return asks() ? steps - ASK_BEFORE : -1;
    }
    // The claiming thread before its first tile, and when it comes to tile i.
    MOE_DEVICE void begin(const work_queue &queue) const
    {
        for (int i = 0; i < lead(); i++) publish(i, queue.item(blockIdx.x + i * gridDim.x));
    }
    MOE_DEVICE void claim(int i, const work_queue &queue) const
    {
        if (asks()) barrier_wait(asked(), i & 1);
        publish(i + lead(), queue.item(claim_unit(queue.turn, lead())));
    }
};

} // namespace moe
