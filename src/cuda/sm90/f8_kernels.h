/* The launch functions of Hopper's fp8 kernels, for the table of f8_kernels.c, and their init functions, as
 * in kernels.h. */
#ifndef MOE_CUDA_SM90_F8_KERNELS_H
#define MOE_CUDA_SM90_F8_KERNELS_H

#include "host/f8_table.h"

#ifdef __cplusplus
extern "C" {
#endif

cudaError_t moe_sm90_f8_weights_init(const moe_device *device);
cudaError_t moe_sm90_f8_up_init(const moe_device *device);
cudaError_t moe_sm90_f8_down_init(const moe_device *device);
cudaError_t moe_sm90_f8_dh_init(const moe_device *device);
cudaError_t moe_sm90_f8_dx_rows_init(const moe_device *device);
cudaError_t moe_sm90_f8_dw_init(const moe_device *device);

cudaError_t moe_sm90_f8_rows(const moe_launch *on, const moe_f8_rows *rows);
cudaError_t moe_sm90_f8_weights(const moe_launch *on, const moe_f8_quantized *weights);
cudaError_t moe_sm90_f8_expect(const moe_launch *on, const moe_f8_expect *expect);
cudaError_t moe_sm90_f8_up(moe_launch *on, const moe_f8_up *up);
cudaError_t moe_sm90_f8_down(moe_launch *on, const moe_f8_down *down);
cudaError_t moe_sm90_f8_dh(moe_launch *on, const moe_f8_dh *dh);
cudaError_t moe_sm90_f8_dx_rows(moe_launch *on, const moe_f8_dx_rows *dx);
cudaError_t moe_sm90_f8_dw(moe_launch *on, const moe_f8_dw *dw);

extern const moe_f8_kernels moe_sm90_f8_kernels;

#ifdef __cplusplus
}
#endif
#endif
