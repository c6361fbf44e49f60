// The functions of the CUDA runtime that the backend, its checks and the program call; streams, graphs and
// events are in graphs.cpp. Device memory is host memory.
#include "emulator.h"

#include <cstdlib>
#include <map>

namespace emulator
{

CUresult encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base,
                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *,
                CUtensorMapInterleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                CUtensorMapFloatOOBfill);

} // namespace emulator

// EMULATOR_MEMORY: how much memory the GPU has, in MiB. EMULATOR_MEMORY_TAKEN: how much more it reports, as
// if another process took that memory afterwards.
static size_t memory_bytes()
{
    const char *set = getenv("EMULATOR_MEMORY");
    return (set ? (size_t)atoll(set) : 8192) << 20;
}
static size_t held;
static std::map<const char *, size_t> sizes;
static std::map<const void *, size_t> shared_limits; // bytes, for kernels that may have more than 48 KB

bool emulator::is_allocated(const void *memory, size_t bytes)
{
    const char *first = (const char *)memory;
    const auto after = sizes.upper_bound(first);
    if (after == sizes.begin()) return false;
    const auto found = std::prev(after);
    return first + bytes <= found->first + found->second;
}

int emulator::launching_device()
{
    const char *device = getenv("EMULATOR_DEVICE");
    return device && strcmp(device, "1") == 0;
}

void emulator::check_shared(const void *kernel, size_t bytes)
{
    const auto found = shared_limits.find(kernel);
    const size_t limit = found == shared_limits.end() ? 48 * 1024 : found->second;
    if (bytes <= limit) return;
    printf("a kernel is launched with %zu bytes of shared memory and has leave for %zu\n", bytes, limit);
    exit(1);
}

static int setting(const char *name, int otherwise)
{
    const char *set = getenv(name);
    return set ? atoi(set) : otherwise;
}

// EMULATOR_CAPABILITY: of the GPU, major times 10 plus minor. EMULATOR_CTAS: its SMs. EMULATOR_SHARED: the
// most bytes of shared memory of a CTA, if not those of GPUs of this capability.
int emulator::capability()
{
    return setting("EMULATOR_CAPABILITY", 90);
}

static int shared_bytes()
{
    const int capability = emulator::capability();
    const int usual = capability == 80                       ? 163 * 1024
                      : capability < 90 || capability >= 120 ? 99 * 1024
                                                             : (int)emulator::SHARED_BYTES;
    return setting("EMULATOR_SHARED", usual);
}

extern "C" {

// EMULATOR_DRIVER: the CUDA version that the driver supports, times 1000.
cudaError_t cudaDriverGetVersion(int *version)
{
    *version = setting("EMULATOR_DRIVER", CUDART_VERSION);
    return cudaSuccess;
}

// There is device 0, and with EMULATOR_DEVICE=1 also device 1. Only the last device can launch kernels.
cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1 + emulator::launching_device();
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = emulator::current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device > emulator::launching_device()) return cudaErrorInvalidDevice;
    emulator::current_device = device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int)
{
    const int capability = emulator::capability();
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = capability / 10; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = capability % 10; return cudaSuccess;
    case cudaDevAttrMultiProcessorCount: *value = setting("EMULATOR_CTAS", 3); return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = shared_bytes(); return cudaSuccess;
    default: return cudaErrorInvalidValue;
    }
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *, void **function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *found)
{
    *function = (void *)emulator::encode;
    *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

// EMULATOR_NO_CODE: the library has no machine code for the GPU.
cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute, int bytes)
{
    if (getenv("EMULATOR_NO_CODE")) return cudaErrorNoKernelImageForDevice;
    if (bytes > shared_bytes()) return cudaErrorInvalidValue;
    shared_limits[kernel] = (size_t)bytes;
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
    const cudaError_t error = emulator::last_error;
    emulator::last_error = cudaSuccess;
    return error;
}

const char *cudaGetErrorName(cudaError_t error)
{
    return error == cudaSuccess ? "cudaSuccess" : "an error of the emulator";
}

const char *cudaGetErrorString(cudaError_t error)
{
    return cudaGetErrorName(error);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int)
{
    *properties = {};
    snprintf(properties->name, sizeof properties->name, "emulator");
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    const char *taken = getenv("EMULATOR_MEMORY_TAKEN");
    const size_t later = taken ? (size_t)atoll(taken) << 20 : 0;
    *total = memory_bytes() + later;
    *free_bytes = *total - held;
    return cudaSuccess;
}

// The functions below fail while a stream is captured, as in the CUDA runtime.

cudaError_t cudaMalloc(void **memory, size_t bytes)
{
    if (emulator::is_capturing()) return cudaErrorStreamCaptureUnsupported;
    if (bytes > memory_bytes() - held) return emulator::last_error = cudaErrorMemoryAllocation;
    *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!*memory) return cudaErrorMemoryAllocation;
    sizes[(const char *)*memory] = bytes;
    held += bytes;
    return cudaSuccess;
}

cudaError_t cudaMallocManaged(void **memory, size_t bytes, unsigned)
{
    return cudaMalloc(memory, bytes);
}

cudaError_t cudaFree(void *memory)
{
    if (emulator::is_capturing()) return cudaErrorStreamCaptureUnsupported;
    if (!memory) return cudaSuccess;
    const auto found = sizes.find((const char *)memory);
    if (found == sizes.end()) return cudaErrorInvalidValue;
    held -= found->second;
    sizes.erase(found);
    free(memory);
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **memory, size_t bytes)
{
    if (emulator::is_capturing()) return cudaErrorStreamCaptureUnsupported;
    *memory = malloc(bytes);
    return *memory ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFreeHost(void *memory)
{
    free(memory);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *memory, int value, size_t bytes)
{
    if (emulator::is_capturing()) return cudaErrorStreamCaptureUnsupported;
    memset(memory, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind)
{
    if (emulator::is_capturing()) return cudaErrorStreamCaptureUnsupported;
    memmove(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t stream)
{
    emulator::enqueue(stream, cudaGraphNodeTypeMemcpy, [=] { memmove(to, from, bytes); });
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream)
{
    emulator::enqueue(stream, cudaGraphNodeTypeMemset, [=] { memset(memory, value, bytes); });
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    return emulator::is_capturing() ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
}
