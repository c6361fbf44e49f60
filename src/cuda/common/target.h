/* On what kernels are launched: a device, and what a call has chosen on it. */
#ifndef MOE_CUDA_TARGET_H
#define MOE_CUDA_TARGET_H

#include <cuda_runtime_api.h>
#include <smoe.h>

/* What the host code knows about a GPU. */
typedef struct moe_device {
    int number;       /* the CUDA runtime's */
    int major, minor; /* compute capability */
    int sms;
    int shared_bytes; /* the most shared memory of a CTA */
} moe_device;

/* From 9.0 on a kernel can start before the kernel before it has ended. */
static inline int moe_starts_early(const moe_device *device)
{
    return device->major >= 9;
}

/* What every launch of a call needs. */
typedef struct moe_launch {
    const moe_device *device;
    const void *state; /* what the device's generation keeps for it (host/kernel_table.h) */
    smoe_type dtype;
    int sms; /* a persistent kernel has CTAs for so many SMs: 1 to those of the device */
    cudaStream_t stream;
    const char *refused_call; /* out: the first driver call that failed, or NULL, and its error */
    int refusal;
} moe_launch;

#endif
