/* The order in which kernels go through a work list. */
#ifndef MOE_CUDA_WORK_ORDER_H
#define MOE_CUDA_WORK_ORDER_H

#include "host_device.h"

/* ---- The order of an expert's tiles ----
 * Normally column tiles are fastest, so that each row tile is fetched once. With many column tiles the
 * weights of an expert do not stay in L2 beside its rows. Then row tiles are fastest, so that the weights of
 * a column tile are used up before those of the next. If there are many row tiles too, they are cut into
 * bands whose rows stay in L2. */

enum {
    MOE_MOST_COLUMNS_FIRST = 8,
    MOE_BAND = 16,                              /* row tiles */
    MOE_LEAST_BANDED = MOE_BAND + MOE_BAND / 2, /* fewer row tiles are one band */
};

typedef struct moe_place {
    int32_t row_tile, column_tile;
} moe_place;

/* Position of unit `unit`, with columns or rows fastest. */
MOE_HOST_DEVICE moe_place moe_place_in(int32_t unit, int32_t row_tiles, int32_t column_tiles,
                                       int columns_first)
{
    const int32_t fast = columns_first ? column_tiles : row_tiles, slow = unit / fast,
                  rest = unit - slow * fast;
    const moe_place place = {columns_first ? slow : rest, columns_first ? rest : slow};
    return place;
}

/* Row tiles of a band: about MOE_BAND; all bands but the last are equal. */
MOE_HOST_DEVICE int32_t moe_band_height(int32_t row_tiles)
{
    const int32_t bands = (row_tiles + MOE_BAND / 2) / MOE_BAND;
    return bands > 1 ? (row_tiles + bands - 1) / bands : row_tiles;
}

/* Position of unit `unit`: bands of row tiles one after the other, in each band row tiles fastest. */
MOE_HOST_DEVICE moe_place moe_place_in_bands(int32_t unit, int32_t row_tiles, int32_t column_tiles)
{
    const int32_t height = moe_band_height(row_tiles), first = unit / (height * column_tiles) * height;
    const int32_t left = row_tiles - first;
    moe_place place =
        moe_place_in(unit - first * column_tiles, left < height ? left : height, column_tiles, 0);
    place.row_tile += first;
    return place;
}

MOE_HOST_DEVICE moe_place moe_place_of(int32_t unit, int32_t row_tiles, int32_t column_tiles)
{
    if (column_tiles <= MOE_MOST_COLUMNS_FIRST) return moe_place_in(unit, row_tiles, column_tiles, 1);
    return moe_place_in_bands(unit, row_tiles, column_tiles);
}

/* Position of unit `unit` of a whole work list, whose rows are those of all experts: bands of MOE_BAND row
 * tiles. A band may have rows of two experts; then it reads the weights of both. The fewer than MOE_BAND row
 * tiles after the last band go with column tiles fastest, because a division by their number would make dh.cu
 * spill registers. */
MOE_HOST_DEVICE moe_place moe_place_in_list(int32_t unit, int32_t row_tiles, int32_t column_tiles)
{
    const int32_t row = unit / column_tiles;
    if (row >= row_tiles / MOE_BAND * MOE_BAND) return moe_place_in(unit, row_tiles, column_tiles, 1);
    const int32_t first = row / MOE_BAND * MOE_BAND;
    moe_place place = moe_place_in(unit - first * column_tiles, MOE_BAND, column_tiles, 0);
    place.row_tile += first;
    return place;
}

/* ---- Units in fixed order, column tiles fastest ----
 * In wave w the CTAs take units w ctas to (w + 1) ctas - 1, one each. If the last column tile has less work
 * than the others, all CTAs should get about equally many of these short tiles. So the CTAs are shifted by
 * `turn` units from one wave to the next. */

/* The least turn for which ctas + turn and column_tiles have no common divisor but 1. If there are many more
 * CTAs than column tiles, every CTA then gets about the same number of units of each column tile. */
MOE_HOST_DEVICE int32_t moe_turn(int32_t ctas, int32_t column_tiles)
{
    for (int32_t turn = 0;; turn++) {
        int32_t a = ctas + turn, b = column_tiles;
        while (b) {
            const int32_t rest = a % b;
            a = b;
            b = rest;
        }
        if (a == 1) return turn;
    }
}

/* The unit of CTA `cta` in wave `wave`. turn: of moe_turn; 0 if all column tiles are equal. */
MOE_HOST_DEVICE int32_t moe_unit_in_turns(int32_t cta, int32_t wave, int32_t ctas, int32_t turn)
{
    return wave * ctas + (cta + wave * turn) % ctas;
}

#endif
