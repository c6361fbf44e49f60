/* The CUDA backend's context: a device, and the kernels for it. */
#ifndef MOE_CUDA_DEVICE_H
#define MOE_CUDA_DEVICE_H

#include "backend.h"
#include "host/kernel_table.h"

/* context->state */
typedef struct device_state {
    moe_device device;
    int sms; /* of a launch: those of the device, or fewer */
    const moe_kernels *kernels;
    char kernels_text[96]; /* smoe_kernels_string */
    void *own;             /* what the kernels' generation keeps for the device */
} device_state;

/* A stage beside which something else runs may lower `sms` of its launches. No result depends on it: work
 * that is cut by the number of SMs is cut by that of the device. */
static inline moe_launch launch_on(const device_state *state, smoe_type dtype, cudaStream_t stream)
{
    const moe_launch on = {
        .device = &state->device, .state = state->own, .dtype = dtype, .sms = state->sms, .stream = stream};
    return on;
}

/* CUDA's current device belongs to the calling thread. Every call sets the context's device, so that a
 * context may be used by several threads, and restores the caller's device when it is done. */
static inline cudaError_t enter_device(const device_state *state, int *before)
{
    cudaError_t status = cudaGetDevice(before);
    if (status == cudaSuccess && *before != state->device.number)
        status = cudaSetDevice(state->device.number);
    return status;
}

static inline void leave_device(const device_state *state, int before)
{
    if (before != state->device.number) cudaSetDevice(before);
}

static inline smoe_status device_error(smoe_context *context, cudaError_t status)
{
    return moe_fail(context, SMOE_ERROR_DEVICE, "%s: CUDA error %d (%s): %s", context->function, (int)status,
                    cudaGetErrorName(status), cudaGetErrorString(status));
}

/* The status of a call whose launches returned `status`. */
static inline smoe_status launch_result(smoe_context *context, const moe_launch *on, cudaError_t status)
{
    if (on->refused_call)
        return moe_fail(context, SMOE_ERROR_DEVICE, "%s: %s failed with driver error %d", context->function,
                        on->refused_call, on->refusal);
    return status == cudaSuccess ? SMOE_OK : device_error(context, status);
}

/* Fills *device. The device becomes the calling thread's current one. */
cudaError_t moe_cuda_open_device(moe_device *device, int number);

/* The backend's functions `create` and `destroy`. */
smoe_status moe_cuda_create(smoe_context *context, const smoe_context_options *options);
void moe_cuda_destroy(smoe_context *context);

#endif
