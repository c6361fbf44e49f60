/* The order in which the Hopper kernels go through a work list, and how the weight-stationary core shares
 * the units that are left over after the full waves. */
#ifndef SMOE_CUDA_WORK_ORDER_H
#define SMOE_CUDA_WORK_ORDER_H

#include "common/hd.h"

/* ---- The order of an expert's tiles ----
 * Column tiles fastest, so that a row tile is fetched once. The weights of an expert with many column tiles
 * do not stay in L2 beside its rows: then row tiles are fastest, and a column tile's weights are done with
 * before the next; of an expert with many of those too, in bands whose rows stay in L2. */

enum { SMOE_MOST_COLUMNS_FIRST = 8, SMOE_BAND = 16 };

typedef struct moe_place {
    int32_t row_tile, column_tile;
} moe_place;

/* Place `unit` of so many tiles, either columns or rows fastest. */
SMOE_HD moe_place moe_place_in(int32_t unit, int32_t row_tiles, int32_t column_tiles, int columns_first)
{
    const int32_t fast = columns_first ? column_tiles : row_tiles, slow = unit / fast,
                  rest = unit - slow * fast;
    const moe_place place = {columns_first ? slow : rest, columns_first ? rest : slow};
    return place;
}

/* Row tiles of a band: about SMOE_BAND, all bands alike but the last. */
SMOE_HD int32_t moe_band_height(int32_t row_tiles)
{
    const int32_t bands = (row_tiles + SMOE_BAND / 2) / SMOE_BAND;
    return bands > 1 ? (row_tiles + bands - 1) / bands : row_tiles;
}

SMOE_HD moe_place moe_place_of(int32_t unit, int32_t row_tiles, int32_t column_tiles)
{
    if (column_tiles <= SMOE_MOST_COLUMNS_FIRST) return moe_place_in(unit, row_tiles, column_tiles, 1);
    const int32_t height = moe_band_height(row_tiles), first = unit / (height * column_tiles) * height;
    const int32_t left = row_tiles - first;
    moe_place place =
        moe_place_in(unit - first * column_tiles, left < height ? left : height, column_tiles, 0);
    place.row_tile += first;
    return place;
}

/* ---- Shares of the weight-stationary down-projection ----
 * Whole units go round the CTAs in full waves; the blocks of the units left over are shared out so that all
 * CTAs end alike: CTA c lacks max(0, target - whole units of c) blocks and gets the rest in that proportion.
 */

/* Blocks of the rest before the CTA whose predecessors lack `lacking_before` of `lacking` blocks in all. */
SMOE_HD int64_t moe_rest_share(int64_t rest, int64_t lacking_before, int64_t lacking, int32_t cta,
                               int32_t ctas)
{
    return lacking > 0 ? rest * lacking_before / lacking : rest * cta / ctas;
}

#endif
