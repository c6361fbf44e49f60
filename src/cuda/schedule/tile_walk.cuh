// How a kernel goes through a list of row tiles.
#pragma once
#include "common/ptx.cuh"
#include "schedule/scheduler.h"

namespace moe
{

// The units of a list: pairs of an entry and a column tile, column tile fastest.
struct tile_walk {
    const moe_work *tiles;
    int row_tiles, column_tiles, units;
    MOE_DEVICE tile_walk(const moe_work *list, const int32_t *count, int columns)
        : tiles(list), row_tiles(__ldg(count)), column_tiles(columns), units(row_tiles * columns)
    {
    }
    MOE_DEVICE moe_work entry(int row_tile) const
    {
        const int2 words = __ldg((const int2 *)(tiles + row_tile));
        return {words.x, words.y};
    }
    MOE_DEVICE moe_work tile(int unit) const
    {
        return entry(unit / column_tiles);
    }
    MOE_DEVICE int column(int unit) const
    {
        return unit % column_tiles;
    }
};

} // namespace moe
