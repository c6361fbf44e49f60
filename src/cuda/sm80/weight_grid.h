/* How the portable kernel cuts the weight gradients. A tile is 128 rows by 256 columns of the gradient as it
 * is in memory: of dW2 (d, n) the rows are columns of dO, of dW1 and dWr (features, d) they are features, in
 * the order of the columns of dH. */
#ifndef MOE_CUDA_WEIGHT_GRID_H
#define MOE_CUDA_WEIGHT_GRID_H

#include "schedule/work_order.h"

enum { MOE_WEIGHT_ROWS = 128, MOE_WEIGHT_COLUMNS = 256 };

/* The tiles of one expert's matrix. */
typedef struct moe_weight_tiles {
    int32_t down, across;
} moe_weight_tiles;

MOE_HOST_DEVICE moe_weight_tiles moe_weight_tiles_of(int32_t rows, int32_t columns)
{
    const moe_weight_tiles tiles = {(rows + MOE_WEIGHT_ROWS - 1) / MOE_WEIGHT_ROWS,
                                    (columns + MOE_WEIGHT_COLUMNS - 1) / MOE_WEIGHT_COLUMNS};
    return tiles;
}

/* The shorter side of the matrix changes fastest, as in schedule/weight_tiles.h. */
MOE_HOST_DEVICE moe_place moe_weight_tile_place(int32_t tile, moe_weight_tiles tiles)
{
    return moe_place_in(tile, tiles.down, tiles.across,
                        tiles.down * MOE_WEIGHT_ROWS >= tiles.across * MOE_WEIGHT_COLUMNS);
}

#endif
