/* The CUDA backend's context: a device, and what the host side needs of it. */
#ifndef SMOE_CUDA_DEVICE_H
#define SMOE_CUDA_DEVICE_H

#include "backend.h"
#include "host/kernels.h"

/* context->state */
typedef struct device_state {
    int device;
    int ctas; /* number of SMs; the GEMMs run one CTA on each */
    moe_encode_map encode;
    const moe_kernels *kernels; /* of the device's generation */
} device_state;

static inline moe_launch launch_on(const device_state *state, smoe_type dtype, cudaStream_t stream)
{
    const moe_launch on = {state->encode, dtype, state->ctas, stream, CUDA_SUCCESS};
    return on;
}

/* CUDA's current device belongs to the calling thread. Every call sets the context's device, so that a
 * context may be used by several threads, and restores the caller's device when it is done. */
static inline cudaError_t enter_device(const device_state *state, int *before)
{
    cudaError_t status = cudaGetDevice(before);
    if (status == cudaSuccess && *before != state->device) status = cudaSetDevice(state->device);
    return status;
}

static inline void leave_device(const device_state *state, int before)
{
    if (before != state->device) cudaSetDevice(before);
}

static inline smoe_status device_error(smoe_context *context, cudaError_t status)
{
    return moe_fail(context, SMOE_ERROR_DEVICE, "%s: CUDA error %d (%s): %s", context->function, (int)status,
                    cudaGetErrorName(status), cudaGetErrorString(status));
}

/* The status of a call whose launches returned `status`. */
static inline smoe_status launch_result(smoe_context *context, const moe_launch *on, cudaError_t status)
{
    if (on->map_status != CUDA_SUCCESS)
        return moe_fail(context, SMOE_ERROR_DEVICE, "%s: cuTensorMapEncodeTiled failed with driver error %d",
                        context->function, (int)on->map_status);
    return status == cudaSuccess ? SMOE_OK : device_error(context, status);
}

/* backward.c */
uint64_t moe_cuda_backward_scratch(const device_state *state, const moe_problem *problem);
smoe_status moe_cuda_backward(smoe_context *context, const moe_problem *problem,
                              const smoe_backward_args *args, const moe_plan_arrays *plan, int with_router,
                              void *stream);

#endif
