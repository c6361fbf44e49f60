/* Hopper's table of fp8. */
#include "sm90/f8_kernels.h"
#include "schedule/weight_tiles.h"

static int32_t weight_tiles(int32_t hidden, int32_t intermediate, int32_t halves)
{
    return moe_grid_tiles(moe_f8_weight_grid_of(hidden, intermediate, halves));
}

const moe_f8_kernels moe_sm90_f8_kernels = {
    .rows = moe_sm90_f8_rows,
    .weights = moe_sm90_f8_weights,
    .expect = moe_sm90_f8_expect,
    .up = moe_sm90_f8_up,
    .down = moe_sm90_f8_down,
    .dh = moe_sm90_f8_dh,
    .dx_rows = moe_sm90_f8_dx_rows,
    .weight_tiles = weight_tiles,
    .dw = moe_sm90_f8_dw,
};
