// Launches of kernels. The status of a launch is the launch's own. cudaGetLastError would also report, and
// clear, an error that the caller's code has left.
#pragma once
#include "common/target.h"

namespace moe
{

template <typename... Formal, typename... Actual>
cudaError_t launch_with(cudaLaunchAttribute *attributes, unsigned count, void (*kernel)(Formal...), dim3 ctas,
                        dim3 threads, size_t shared_bytes, cudaStream_t stream, const Actual &...arguments)
{
    cudaLaunchConfig_t config = {};
    config.gridDim = ctas;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <typename... Formal, typename... Actual>
cudaError_t enqueue(void (*kernel)(Formal...), dim3 ctas, dim3 threads, size_t shared_bytes,
                    cudaStream_t stream, const Actual &...arguments)
{
    return launch_with(nullptr, 0, kernel, ctas, threads, shared_bytes, stream, arguments...);
}

// A kernel whose first part may run while the kernel before it ends, on devices that can do this: it calls
// wait_for_previous before it touches what that one reads or writes, and let_next_start after its own last
// store. Some call it earlier: the first part of any next kernel reads nothing that they write.
template <typename... Formal, typename... Actual>
cudaError_t launch_early(void (*kernel)(Formal...), dim3 ctas, dim3 threads, size_t shared_bytes,
                         const moe_launch *on, const Actual &...arguments)
{
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    return launch_with(&early, moe_starts_early(on->device) ? 1 : 0, kernel, ctas, threads, shared_bytes,
                       on->stream, arguments...);
}

// Allows a kernel so many bytes of dynamic shared memory, or as many as the device has.
template <typename K> cudaError_t allow_shared(const moe_device *device, K *kernel, int bytes)
{
    return cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                bytes < device->shared_bytes ? bytes : device->shared_bytes);
}

} // namespace moe
