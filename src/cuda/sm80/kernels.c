/* The table of the portable kernels. They need mma.sync of bf16, ldmatrix and cp.async: every GPU from 8.0
 * on. */
#include "sm80/kernels.h"
#include "schedule/few_rows.h"
#include "sm80/weight_grid.h"

static int serves(int major, int minor)
{
    (void)minor;
    return major >= 8;
}

static int few_rows(int64_t rows, int64_t experts)
{
    return moe_few_rows(rows, experts);
}

static cudaError_t init(const moe_device *device, void *state)
{
    cudaError_t (*const inits[])(const moe_device *) = {moe_sm80_up_init,       moe_sm80_down_init,
                                                        moe_sm80_few_rows_init, moe_sm80_dh_init,
                                                        moe_sm80_dw_init,       moe_sm80_dx_rows_init};
    (void)state;
    for (size_t i = 0; i < sizeof inits / sizeof *inits; i++) {
        const cudaError_t status = inits[i](device);
        if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
}

/* A bound for both orders of the sides: dW2 has d as its rows, dW1 has its features. */
static int32_t weight_tiles(int32_t hidden, int32_t intermediate, int32_t halves)
{
    const moe_weight_tiles plain = moe_weight_tiles_of(hidden, intermediate * halves),
                           transposed = moe_weight_tiles_of(intermediate * halves, hidden);
    const int32_t a = plain.down * plain.across, b = transposed.down * transposed.across;
    return a > b ? a : b;
}

const moe_kernels moe_sm80_kernels = {
    .name = "portable (8.0 and later)",
    .devices = "8.0 and later",
    .serves = serves,
    .init = init,
    .stores = moe_sm80_stores,
    .gathered_bytes = INT64_C(16) << 32, /* gemm_sync.cuh counts vectors of 16 bytes in 32 bits */
    .few_rows = few_rows,
    .ds_columns = MOE_SM80_DS_COLUMNS,
    .weight_tile_bytes = MOE_WEIGHT_ROWS * MOE_WEIGHT_COLUMNS * sizeof(float),
    .weight_tiles = weight_tiles,
    .up = moe_sm80_up,
    .down = moe_sm80_down,
    .up_few_rows = moe_sm80_up_few_rows,
    .down_few_rows = moe_sm80_down_few_rows,
    .dh = moe_sm80_dh,
    .dw = moe_sm80_dw,
    .dx_rows = moe_sm80_dx_rows,
};
