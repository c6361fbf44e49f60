/* The table of Hopper. Its state for a device makes tensor maps. */
#include "sm90/kernels.h"
#include "schedule/few_rows.h"
#include "schedule/weight_tiles.h"
#include "sm90/f8_kernels.h"
#include "tma/tensor_map.h"

static int serves(int major, int minor)
{
    return major == 9 && minor == 0;
}

static int few_rows(int64_t rows, int64_t experts)
{
    return moe_few_rows(rows, experts);
}

static cudaError_t init(const moe_device *device, void *state)
{
    cudaError_t (*const inits[])(const moe_device *) = {
        moe_sm90_up_init,      moe_sm90_down_init,    moe_sm90_few_rows_init,   moe_sm90_dh_init,
        moe_sm90_dw_init,      moe_sm90_dx_rows_init, moe_sm90_f8_weights_init, moe_sm90_f8_up_init,
        moe_sm90_f8_down_init, moe_sm90_f8_dh_init,   moe_sm90_f8_dx_rows_init, moe_sm90_f8_dw_init};
    for (size_t i = 0; i < sizeof inits / sizeof *inits; i++) {
        const cudaError_t status = inits[i](device);
        if (status != cudaSuccess) return status;
    }
    return moe_open_maps(state);
}

static int32_t weight_tiles(int32_t hidden, int32_t intermediate, int32_t halves)
{
    return moe_grid_tiles(moe_weight_grid_of(hidden, intermediate, halves));
}

const moe_kernels moe_sm90_kernels = {
    .name = "Hopper (9.0)",
    .devices = "9.0",
    .serves = serves,
    .state_bytes = sizeof(moe_maps),
    .init = init,
    .stores = moe_sm90_stores,
    .few_rows = few_rows,
    .ds_columns = MOE_SM90_DS_COLUMNS,
    .weight_tile_bytes = MOE_WEIGHT_TILE * sizeof(float),
    .weight_tiles = weight_tiles,
    .up = moe_sm90_up,
    .down = moe_sm90_down,
    .up_few_rows = moe_sm90_up_few_rows,
    .down_few_rows = moe_sm90_down_few_rows,
    .dh = moe_sm90_dh,
    .dw = moe_sm90_dw,
    .dx_rows = moe_sm90_dx_rows,
    .f8 = &moe_sm90_f8_kernels,
};
