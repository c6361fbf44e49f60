// How a CTA of dw gets its units, one by one, from a counter in global memory. A unit is a piece of an
// expert and a tile of its gradient. Experts have different counts, so pieces have different lengths. CTAs
// with equal numbers of units would end at different times.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// The store warp, of consumer 0 if there are two, claims the units and hands them to the other warps in a
// ring (unit_ring.cuh). It also computes where a unit's tile is, because the divisions would take longer in
// the warps that load. In each unit a loader arrives once at asked(): AHEAD steps before the unit's end, or
// at the first step of a shorter unit. Then the claiming warp claims units until the units after this one
// have AHEAD steps in all. An earlier claim would take a unit from a CTA that can start it sooner; with a
// later one the loaders would wait.
#pragma once
#include "schedule/scheduler.h"
#include "schedule/weight_tiles.h"
#include "tma/unit_ring.cuh"

namespace moe
{

struct weight_unit {
    moe_piece piece;
    int tile;     // of the expert's matrix; -1: there is no more work
    moe_place at; // the tile's
    MOE_DEVICE bool exists() const
    {
        return tile >= 0;
    }
    MOE_DEVICE int steps() const // of 64 rows
    {
        return piece.blocks;
    }
};

// The list of pieces, and the counter of units; consecutive units have consecutive tiles.
struct weight_queue {
    const moe_piece *pieces; // the longest experts first
    int units;
    moe_weight_grid grid;
    int *turn; // see unit_ring.cuh
    MOE_DEVICE weight_unit unit(int number) const
    {
        const weight_unit none = {{0, 0, 0, -1}, -1, {0, 0}};
        if (number >= units) return none;
        const int tiles = moe_grid_tiles(grid), tile = number % tiles;
        const int4 v = __ldg((const int4 *)(pieces + number / tiles));
        return {{v.x, v.y, v.z, v.w}, tile, moe_weight_place_of(tile, grid)};
    }
};

struct weight_feed {
    enum { UNITS = 16, AHEAD = 8, BYTES = unit_ring<UNITS, 2>::BYTES + UNITS * 8 };
    unit_ring<UNITS, 2> ring;
    // One barrier for each slot: with short units a loader can arrive for several units before the claiming
    // warp waits for the first of them.
    MOE_DEVICE uint32_t asked(int i) const
    {
        return ring.at + ring.BYTES + i % UNITS * 8;
    }
    MOE_DEVICE void init() const
    {
        ring.init();
        for (int i = 0; i < UNITS; i++) barrier_init(asked(i), 1);
    }
    MOE_DEVICE weight_unit read(int i) const
    {
        const uint32_t from = ring.wait_known(i);
        const uint4 piece = load_shared16(from), tile = load_shared16(from + 16);
        return {{(int)piece.x, (int)piece.y, (int)piece.z, (int)piece.w},
                (int)tile.x,
                {(int)tile.y, (int)tile.z}};
    }
    MOE_DEVICE void publish(int i, const weight_unit &unit) const
    {
        const uint32_t to = ring.wait_free(i);
        const moe_piece &p = unit.piece;
        store_shared16(to, {(uint32_t)p.row, (uint32_t)p.expert, (uint32_t)p.blocks, (uint32_t)p.part});
        store_shared16(to + 16,
                       {(uint32_t)unit.tile, (uint32_t)unit.at.row_tile, (uint32_t)unit.at.column_tile, 0});
        barrier_arrive(ring.known(i));
    }
    // The step of a unit at which a loader arrives at asked().
    static MOE_DEVICE int asks_at(int steps)
    {
        return max(steps - AHEAD, 0);
    }
};

// What the claiming thread knows. When it claims units after unit i, the loaders have begun unit i. The ring
// of operands has SLOTS slots, so all loaders and consumers have read the units up to i - SLOTS - 1. The
// thread publishes at most unit i + AHEAD. One more warp, which can be further behind, arrives at free() of
// each unit that it has read: in dw the other store warp, in dw_f8 the one that loads features.
struct weight_claims {
    weight_feed feed;
    const weight_queue &queue;
    int published = 0;
    int steps = 0; // of the published units after the last unit that claim_after was called with
    bool ended = false;
    MOE_DEVICE weight_claims(weight_feed f, const weight_queue &q) : feed(f), queue(q)
    {
    }
    MOE_DEVICE void begin()
    {
        add(queue.unit(blockIdx.x));
    }
    MOE_DEVICE void add(const weight_unit &unit)
    {
        feed.publish(published++, unit);
        ended = !unit.exists();
        if (!ended) steps += unit.steps();
    }
    // Claims units after unit i, which is `unit`.
    MOE_DEVICE void claim_after(int i, const weight_unit &unit)
    {
        steps -= unit.steps();
        barrier_wait(feed.asked(i), i / feed.UNITS & 1);
        while (!ended && steps < feed.AHEAD) add(queue.unit(claim_unit(queue.turn, 1)));
    }
};

} // namespace moe
