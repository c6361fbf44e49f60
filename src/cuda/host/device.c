/* The context of the CUDA backend: opens a device and chooses its kernels. */
#include "host/device.h"
#include "host/launch.h"
#include "host/launch_lora.h"
#include "host/routing.h"
#include "host/test_options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The best first. */
static const moe_kernels *const generations[] = {
#ifdef SMOE_CUDA_SM90
    &moe_sm90_kernels,
#endif
    &moe_sm80_kernels,
};
enum { GENERATIONS = sizeof generations / sizeof *generations };

/* NULL: no kernels serve this compute capability. */
static const moe_kernels *kernels_for(const moe_device *device, int wanted)
{
    if (wanted != SMOE_KERNELS_BEST)
        return moe_sm80_kernels.serves(device->major, device->minor) ? &moe_sm80_kernels : NULL;
    for (int i = 0; i < GENERATIONS; i++)
        if (generations[i]->serves(device->major, device->minor)) return generations[i];
    return NULL;
}

static smoe_status refuse_generation(smoe_context *context, const moe_device *device)
{
    char built_for[128] = "";
    for (int i = 0; i < GENERATIONS; i++)
        snprintf(built_for + strlen(built_for), sizeof built_for - strlen(built_for), "%s %s", i ? "," : "",
                 generations[i]->devices);
    return moe_fail(context, SMOE_ERROR_DEVICE,
                    "smoe_create: device %d has compute capability %d.%d, there are kernels for%s",
                    device->number, device->major, device->minor, built_for);
}

cudaError_t moe_cuda_open_device(moe_device *device, int number)
{
    *device = (moe_device){.number = number};
    const struct {
        int *value;
        enum cudaDeviceAttr attribute;
    } attributes[] = {
        {&device->major, cudaDevAttrComputeCapabilityMajor},
        {&device->minor, cudaDevAttrComputeCapabilityMinor},
        {&device->sms, cudaDevAttrMultiProcessorCount},
        {&device->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin},
    };
    cudaError_t status = cudaSetDevice(number);
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes && status == cudaSuccess; i++)
        status = cudaDeviceGetAttribute(attributes[i].value, attributes[i].attribute, number);
    return status;
}

static cudaError_t prepare_kernels(device_state *state)
{
    const moe_device *device = &state->device;
    cudaError_t status = moe_cuda_plan_init(device);
    if (status == cudaSuccess) status = moe_cuda_plan_rows_init(device);
    if (status == cudaSuccess) status = moe_cuda_routing_init(device);
    if (status == cudaSuccess) status = moe_cuda_lora_init(device);
    if (status == cudaSuccess) status = moe_cuda_low_pair_init(device);
    return status == cudaSuccess ? state->kernels->init(device, state->own) : status;
}

/* A device runs the machine code of its major number's first architecture: 8.6 that of 80, 12.1 that of 120.
 */
static smoe_status refuse_code(smoe_context *context, const moe_device *device)
{
    return moe_fail(context, SMOE_ERROR_DEVICE,
                    "smoe_create: device %d has compute capability %d.%d, this build has machine code "
                    "for " SMOE_CUDA_CODE "; build it with -DCMAKE_CUDA_ARCHITECTURES=%d%s-real",
                    device->number, device->major, device->minor, device->major * 10,
                    device->major == 9 ? "a" : "");
}

static void describe_kernels(smoe_context *context, device_state *state, int wanted)
{
    const moe_device *device = &state->device;
    char *text = state->kernels_text;
    const size_t size = sizeof state->kernels_text;
    if (state->kernels != &moe_sm80_kernels)
        snprintf(text, size, "%s", state->kernels->name);
    else if (wanted != SMOE_KERNELS_BEST)
        snprintf(text, size, "%s: the option kernels says so", state->kernels->name);
    else
        snprintf(text, size, "%s: this build has no others for compute capability %d.%d",
                 state->kernels->name, device->major, device->minor);
    context->kernels = text;
}

/* Chooses and prepares the kernels for the device, which is current. */
static smoe_status take_kernels(smoe_context *context, device_state *state,
                                const smoe_context_options *options)
{
    moe_device *device = &state->device;
    const int32_t sms = options->sms;
    const int wanted = (int)options->kernels;
    if (wanted != SMOE_KERNELS_BEST && wanted != SMOE_KERNELS_PORTABLE && wanted != MOE_KERNELS_PORTABLE_99K)
        return moe_fail(
            context, SMOE_ERROR_ARGUMENT,
            "smoe_create: kernels is %d; it is SMOE_KERNELS_BEST (0) or SMOE_KERNELS_PORTABLE (1)", wanted);
    if (wanted == MOE_KERNELS_PORTABLE_99K && device->shared_bytes > MOE_SHARED_99K)
        device->shared_bytes = MOE_SHARED_99K;
    if (sms < 0 || sms > device->sms)
        return moe_fail(context, SMOE_ERROR_ARGUMENT,
                        "smoe_create: sms is %d, the range is 0 (all) to %d, those of device %d", (int)sms,
                        device->sms, device->number);
    state->sms = sms ? sms : device->sms;
    state->kernels = kernels_for(device, wanted);
    if (!state->kernels) return refuse_generation(context, device);
    describe_kernels(context, state, wanted);
    const size_t bytes = state->kernels->state_bytes;
    state->own = calloc(1, bytes ? bytes : 1);
    if (!state->own)
        return moe_fail(context, SMOE_ERROR_MEMORY, "smoe_create: no memory for %zu bytes", bytes);
    const cudaError_t status = prepare_kernels(state);
    if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction)
        return refuse_code(context, device);
    return status == cudaSuccess ? SMOE_OK : device_error(context, status);
}

/* SMOE_CUDA_LEAST: the CUDA version that the driver must support. Without a driver the number is 0. */
static smoe_status check_driver(smoe_context *context)
{
    int driver = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0 || driver >= SMOE_CUDA_LEAST)
        return SMOE_OK;
    return moe_fail(context, SMOE_ERROR_DEVICE,
                    "smoe_create: the driver is too old: it supports CUDA %d.%d, this build needs %d.%d",
                    driver / 1000, driver % 1000 / 10, SMOE_CUDA_LEAST / 1000, SMOE_CUDA_LEAST % 1000 / 10);
}

smoe_status moe_cuda_create(smoe_context *context, const smoe_context_options *options)
{
    const smoe_status old = check_driver(context);
    if (old != SMOE_OK) return old;
    int devices = 0, before = 0;
    cudaError_t status = cudaGetDeviceCount(&devices);
    if (status != cudaSuccess)
        return moe_fail(context, SMOE_ERROR_DEVICE, "smoe_create: no usable CUDA device: %s (%s)",
                        cudaGetErrorName(status), cudaGetErrorString(status));
    if (options->device < 0 || options->device >= devices)
        return moe_fail(context, SMOE_ERROR_DEVICE, "smoe_create: device is %d, %d CUDA devices are there",
                        (int)options->device, devices);
    device_state *state = calloc(1, sizeof *state);
    if (!state)
        return moe_fail(context, SMOE_ERROR_MEMORY, "smoe_create: no memory for %zu bytes", sizeof *state);
    context->state = state;
    status = cudaGetDevice(&before);
    if (status == cudaSuccess) status = moe_cuda_open_device(&state->device, options->device);
    const smoe_status result =
        status == cudaSuccess ? take_kernels(context, state, options) : device_error(context, status);
    leave_device(state, before);
    if (result != SMOE_OK) moe_cuda_destroy(context);
    return result;
}

void moe_cuda_destroy(smoe_context *context)
{
    device_state *state = context->state;
    free(state->own);
    free(state);
}
