/* Hopper's table of fp8. */
#include "sm90/f8_kernels.h"

const moe_f8_kernels moe_sm90_f8_kernels = {
    .rows = moe_sm90_f8_rows,
    .weights = moe_sm90_f8_weights,
    .up = moe_sm90_f8_up,
    .down = moe_sm90_f8_down,
    .dx_rows = moe_sm90_f8_dx_rows,
};
