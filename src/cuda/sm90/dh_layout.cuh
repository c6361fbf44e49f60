// Parameters, tile widths and shared memory of dh.cu, which explains them.
// Terms: docs/glossary.md; symbols: include/smoe.h.
#pragma once
#include "schedule/tile_walk.cuh"
#include "schedule/work_order.h"
#include "sm90/gemm_cooperative.cuh"
#include "sm90/kernels.h"
#include <cuda.h>

namespace moe
{
namespace dh_kernel
{

using namespace gemm_cooperative;

struct dh_params {
    CUtensorMap w2;   // moe_map_subtiles of (E, hidden, intermediate): a tile's columns
    const void *dout; // (T, hidden)
    const void *h;    // (padded_rows, h_width)
    void *dh;         // the same shape; may be h
    void *a;          // A' (padded_rows, intermediate)
    float *ds;        // (column tiles, padded_rows) partial sums of dS
    const int32_t *row_token;
    const float *row_weight;
    moe_cuda_backward_lists lists;
    int64_t padded_rows;
    int32_t hidden, intermediate;
    int32_t gated, subtiles_apart;
    smoe_activation activation;
    moe_gate_values values;
    // LoRA
    CUtensorMap a2; // moe_map_subtiles of (E, rank, intermediate), as w2
    const void *q2; // (padded_rows, rank)
    int32_t rank;   // 0: none
};

enum {
    CONSUMER_THREADS = 128,
    COPIES = MOE_BLOCK_ROWS / (CONSUMER_THREADS / 8), // a thread's: eight copy the 128 bytes of a row
    CONSUMER_BARRIER = 1,                             // named, one a consumer
    WARP_TILE_ROWS = 16, // rows of a consumer warp; one worker warp takes them at a time
    WARP_TILES = CONSUMER_WARPS,
    SUBTILES = TILE_COLUMNS / MOE_SUBTILE_COLUMNS,          // of a warp tile, if it is not narrow
    SUBTILE_BYTES = WARP_TILE_ROWS * MOE_SUBTILE_ROW_BYTES, // of a warp tile: 16 rows x 64 columns
    WARP_TILE_BYTES = SUBTILES * SUBTILE_BYTES,
    AHEAD = 4,                                     // steps of H in flight, 8 columns for each lane
    RING = STAGING + WARP_TILES * WARP_TILE_BYTES, // a worker warp: 4 steps x (gate 512 bytes, up 512 bytes)
    RING_HALF = TILE_COLUMNS * 2,
    RING_ROW = 2 * RING_HALF,
    RING_WARP = AHEAD * RING_ROW,
    BARRIERS = RING + 4 * RING_WARP,
    SCALES = BARRIERS + 8 * (2 * NARROW_SLOTS + 2 * WARP_TILES), // (WARP_TILES, WARP_TILE_ROWS) float
    DONE = SCALES + WARP_TILES * WARP_TILE_ROWS *
                        4, // one word for each slot: how many consumers have finished with it
    SHARED_BYTES = DONE + NARROW_SLOTS * 4
};
static_assert(SHARED_BYTES <= 232448, "shared memory of an SM");
static_assert((int)TILE_COLUMNS == (int)MOE_SM90_DS_COLUMNS,
              "the host has room for a part of dS a column tile");
static_assert(TILE_COLUMNS == 32 * 8, "a warp's lanes have a row of the tile, 16 bytes each");
static_assert(WARP_TILE_ROWS % (2 * AHEAD) == 0,
              "the ring's slots, and the rows' places in a subtile, repeat");

// How n is cut into column tiles.
enum width {
    NARROW, // one tile of up to 128 columns
    MIDDLE,
    WIDE // more than MOE_MOST_COLUMNS_FIRST tiles
};

template <width W> struct tile_width {
    enum {
        COLUMNS = W == NARROW ? NARROW_COLUMNS : TILE_COLUMNS,
        RING_SLOTS = W == NARROW ? NARROW_SLOTS : SLOTS,
        SUBTILES = COLUMNS / MOE_SUBTILE_COLUMNS,
        LANES = COLUMNS / 8,      // that have a row
        ROWS = 32 / LANES,        // that a worker warp takes at a time, a step
        GROUP_ROWS = AHEAD * ROWS // that are between two uses of a slot of the ring
    };
    // This lane's row of a step, and its first column.
    static MOE_DEVICE int row(int lane)
    {
        return lane / LANES;
    }
    static MOE_DEVICE int column(int lane)
    {
        return lane % LANES * 8;
    }
};
static_assert(WARP_TILE_ROWS % tile_width<NARROW>::GROUP_ROWS == 0, "whole groups");

template <width W, int COUNT = tile_width<W>::RING_SLOTS> struct dh_layout : ring_layout<COUNT> {
    enum { RING_SLOTS = COUNT };
    MOE_DEVICE explicit dh_layout(uint32_t start) : ring_layout<COUNT>{start, start + BARRIERS}
    {
    }
    MOE_DEVICE uint32_t warp_tile(uint32_t b) const
    {
        return this->base + STAGING + b * WARP_TILE_BYTES;
    }
    MOE_DEVICE uint32_t scale(uint32_t b, uint32_t row) const
    {
        return this->base + SCALES + (b * WARP_TILE_ROWS + row) * 4;
    }
    MOE_DEVICE uint32_t done(uint32_t slot) const
    {
        return this->base + DONE + slot * 4;
    }
    MOE_DEVICE uint32_t warp_tile_full(uint32_t b) const
    {
        return this->barriers + 8 * (2 * RING_SLOTS + b);
    }
    MOE_DEVICE uint32_t warp_tile_empty(uint32_t b) const
    {
        return this->barriers + 8 * (2 * RING_SLOTS + WARP_TILES + b);
    }
};

// The tile of a unit, and its column tile. The width is a template parameter and there are two functions,
// because otherwise a backward with d = 768 takes longer: 0.5 % with both orders in one kernel, 0.2 to 0.6 %
// with one function.
template <width W> MOE_DEVICE moe_work tile_of(const tile_walk &walk, int unit)
{
    if (W != WIDE) return walk.tile(unit);
    return walk.entry(moe_place_in_list(unit, walk.row_tiles, walk.column_tiles).row_tile);
}
template <width W> MOE_DEVICE int column_of(const tile_walk &walk, int unit)
{
    if (W != WIDE) return walk.column(unit);
    return moe_place_in_list(unit, walk.row_tiles, walk.column_tiles).column_tile;
}

} // namespace dh_kernel
} // namespace moe
