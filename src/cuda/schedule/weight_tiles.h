/* How dw cuts the weight gradients. Terms: docs/glossary.md. Features are cut into stripes of
 * 128. A wide tile is 128 columns of d by two stripes, a tall tile 256 columns of d by one stripe. All tiles
 * of a matrix are of one kind, that with fewer tiles: with an odd number of stripes half of the last wide
 * tile is not needed. A stripe never crosses from the gate half of H to the up half. Exception: with a gate
 * and n = 64 both halves are one stripe, and the tiles are tall. The GEMM sums over the rows of a piece
 * (scheduler.h). A unit is a piece and a tile, in the order of moe_weight_place_of. */
#ifndef MOE_CUDA_WEIGHT_TILES_H
#define MOE_CUDA_WEIGHT_TILES_H

#include "common/swizzle.h"
#include "schedule/scheduler.h"
#include "schedule/work_order.h"

enum {
    MOE_WEIGHT_STRIPE = 128,
    MOE_WEIGHT_SHORT = 128, /* the sides of a tile */
    MOE_WEIGHT_LONG = 256,
    MOE_WEIGHT_TILE = MOE_WEIGHT_SHORT * MOE_WEIGHT_LONG,
    MOE_SHARED_STRIPE_HALF = MOE_WEIGHT_STRIPE / 2, /* features of halves that share a stripe */
};

/* The gate half and the up half of a row of H are neighbours, and together one stripe. */
MOE_HOST_DEVICE int moe_halves_share_stripe(int32_t intermediate, int32_t halves)
{
    return halves == 2 && intermediate == MOE_SHARED_STRIPE_HALF;
}

MOE_HOST_DEVICE int32_t moe_stripes_of_half(int32_t intermediate)
{
    return (intermediate + MOE_WEIGHT_STRIPE - 1) / MOE_WEIGHT_STRIPE;
}

/* The tiles of one expert's matrix: tiles over d, and over the features of both halves. */
typedef struct moe_weight_grid {
    int32_t hidden_tiles, feature_tiles, tall;
} moe_weight_grid;

MOE_HOST_DEVICE int32_t moe_grid_tiles(moe_weight_grid grid)
{
    return grid.hidden_tiles * grid.feature_tiles;
}

MOE_HOST_DEVICE moe_weight_grid moe_weight_grid_of(int32_t hidden, int32_t intermediate, int32_t halves)
{
    const int shared = moe_halves_share_stripe(intermediate, halves);
    const int32_t stripes = shared ? 1 : moe_stripes_of_half(intermediate) * halves;
    const moe_weight_grid wide = {(hidden + MOE_WEIGHT_SHORT - 1) / MOE_WEIGHT_SHORT, (stripes + 1) / 2, 0};
    const moe_weight_grid tall = {(hidden + MOE_WEIGHT_LONG - 1) / MOE_WEIGHT_LONG, stripes, 1};
    return shared || moe_grid_tiles(tall) < moe_grid_tiles(wide) ? tall : wide;
}

/* fp8's tiles are wide, and the stripes of a tile belong to one group of 256 features (f8.h): with n > 128
 * the last stripe of a half may have no features. Halves share no stripe. */
MOE_HOST_DEVICE int32_t moe_f8_stripes_of_half(int32_t intermediate)
{
    return intermediate <= MOE_WEIGHT_STRIPE ? 1
                                             : 2 * ((intermediate + MOE_WEIGHT_LONG - 1) / MOE_WEIGHT_LONG);
}

MOE_HOST_DEVICE moe_weight_grid moe_f8_weight_grid_of(int32_t hidden, int32_t intermediate, int32_t halves)
{
    const int32_t stripes = moe_f8_stripes_of_half(intermediate) * halves;
    const moe_weight_grid wide = {(hidden + MOE_WEIGHT_SHORT - 1) / MOE_WEIGHT_SHORT, (stripes + 1) / 2, 0};
    return wide;
}

/* Where tile `tile` of an expert's matrix is: rows of d, columns of features. The position along the shorter
 * side changes fastest. So if an expert's tiles are split over two waves, the second wave reads the shorter
 * operand again but only a part of the longer one. If d is the shorter side and has many tiles, the expert's
 * tokens do not stay in L2. Then d is cut into bands whose columns do. */
MOE_HOST_DEVICE moe_place moe_weight_place_of(int32_t tile, moe_weight_grid grid)
{
    const int hidden_first = grid.hidden_tiles * (grid.tall ? MOE_WEIGHT_LONG : MOE_WEIGHT_SHORT) <
                             grid.feature_tiles * (grid.tall ? MOE_WEIGHT_SHORT : MOE_WEIGHT_LONG);
    if (!hidden_first || grid.hidden_tiles < MOE_LEAST_BANDED)
        return moe_place_in(tile, grid.hidden_tiles, grid.feature_tiles, !hidden_first);
    return moe_place_in_bands(tile, grid.hidden_tiles, grid.feature_tiles);
}

/* Stripe `stripe` of all: its half and first feature there. Past the last stripe the half does not exist. */
typedef struct moe_stripe {
    int32_t half, feature;
} moe_stripe;

MOE_HOST_DEVICE moe_stripe moe_stripe_of(int32_t stripe, int32_t stripes_of_half)
{
    const moe_stripe s = {stripe / stripes_of_half, stripe % stripes_of_half * MOE_WEIGHT_STRIPE};
    return s;
}

/* ---- Where a part of a tile stands in its staging buffer: two subtiles of rows of 128 bytes ----
 * dW2: rows of d, columns are features. dW1: rows are features, columns of d. */

/* Element of an f32 part; subtiles of 64 rows and 32 columns. */
MOE_HOST_DEVICE uint32_t moe_part_f32(uint32_t row, uint32_t column)
{
    return (column >> 5) * MOE_SUBTILE_BYTES + moe_subtile_offset(row, (column & 31) >> 2) + (column & 3) * 4;
}

/* Address that a lane of a warp gives to the q-th transposing stmatrix of a 16-bit part of 128 features by 64
 * of d (one subtile of 128 rows): octets 2q and 2q + 1 of features, the warp's 16 of d. */
MOE_HOST_DEVICE uint32_t moe_part_transposed(uint32_t warp, uint32_t lane, uint32_t q)
{
    return q * 16 * MOE_SUBTILE_ROW_BYTES +
           moe_subtile_offset((lane >> 4) * 8 + (lane & 7), 2 * warp + ((lane >> 3) & 1));
}

/* The same of a 16-bit part of 64 of d by 128 features, not transposed. */
MOE_HOST_DEVICE uint32_t moe_part_plain(uint32_t warp, uint32_t lane, uint32_t q)
{
    return (q >> 2) * MOE_SUBTILE_BYTES +
           moe_subtile_offset(warp * 16 + (lane & 15), (q & 3) * 2 + (lane >> 4));
}

#endif
