// Launches a kernel whose first part may run while the kernel before it ends: it calls wait_for_previous
// before it touches what that one reads or writes, and let_next_start after its own last store.
#pragma once
#include <cuda_runtime_api.h>

namespace moe
{

template <typename... Formal, typename... Actual>
cudaError_t launch_early(void (*kernel)(Formal...), dim3 ctas, dim3 threads, size_t shared_bytes,
                         cudaStream_t stream, const Actual &...arguments)
{
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = ctas;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

} // namespace moe
