/* The launch functions of the Hopper kernels, for the table of kernels.c. Each function makes the tensor
 * maps that its kernel needs. The init functions raise limits of shared memory; they are called once for
 * each device. */
#ifndef MOE_CUDA_SM90_KERNELS_H
#define MOE_CUDA_SM90_KERNELS_H

#include "host/kernel_table.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MOE_SM90_DS_COLUMNS = 256 }; /* of a tile of dh.cu */

cudaError_t moe_sm90_up_init(const moe_device *device);
cudaError_t moe_sm90_down_init(const moe_device *device);
cudaError_t moe_sm90_few_rows_init(const moe_device *device);
cudaError_t moe_sm90_dh_init(const moe_device *device);
cudaError_t moe_sm90_dw_init(const moe_device *device);
cudaError_t moe_sm90_dx_rows_init(const moe_device *device);

int moe_sm90_stores(smoe_type dtype);

cudaError_t moe_sm90_up(moe_launch *on, const moe_up *up);
cudaError_t moe_sm90_down(moe_launch *on, const moe_down *down);
cudaError_t moe_sm90_up_few_rows(moe_launch *on, const moe_up *up, int64_t tiles);
cudaError_t moe_sm90_down_few_rows(moe_launch *on, const moe_down *down, int64_t tiles);
cudaError_t moe_sm90_dh(moe_launch *on, const moe_dh *dh);
cudaError_t moe_sm90_dw(moe_launch *on, const moe_dw *dw);
cudaError_t moe_sm90_dx_rows(moe_launch *on, const moe_dx_rows *dx);

#ifdef __cplusplus
}
#endif
#endif
