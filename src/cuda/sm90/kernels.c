/* The table of Hopper. */
#include "sm90/kernels.h"
#include "schedule/weight_tiles.h"

static cudaError_t init(void)
{
    cudaError_t (*const inits[])(void) = {moe_sm90_up_init, moe_sm90_down_init, moe_cuda_few_rows_init,
                                          moe_sm90_dh_init, moe_sm90_dw_init,   moe_sm90_dx_rows_init};
    for (size_t i = 0; i < sizeof inits / sizeof *inits; i++) {
        const cudaError_t status = inits[i]();
        if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
}

static int32_t weight_tiles(int32_t hidden, int32_t intermediate, int32_t halves)
{
    return moe_grid_tiles(moe_weight_grid_of(hidden, intermediate, halves));
}

const moe_kernels moe_sm90_kernels = {
    .major = 9,
    .minor = 0,
    .init = init,
    .stores = moe_sm90_stores,
    .ds_columns = MOE_SM90_DS_COLUMNS,
    .weight_tile_bytes = SMOE_WEIGHT_TILE * sizeof(float),
    .weight_tiles = weight_tiles,
    .up = moe_sm90_up,
    .down = moe_sm90_down,
    .up_few_rows = moe_cuda_up_few_rows,
    .down_few_rows = moe_cuda_down_few_rows,
    .dh = moe_sm90_dh,
    .dw = moe_sm90_dw,
    .dx_rows = moe_sm90_dx_rows,
};
