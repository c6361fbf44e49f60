// The kernels of src/cuda on the CPU: every CUDA thread is a fiber, all of them on one thread of the host.
//
// What is emulated: CTAs one after the other; warp shuffles, votes and stmatrix (all lanes meet); named
// barriers and mbarriers with their transaction bytes; cp.async that lands as late as it may (EMULATOR_EARLY
// in the environment: at once); TMA boxes with swizzle, out-of-bounds rule and reduction; wgmma through its
// descriptors. What is not: memory ordering and proxies, registers, time. convert.py makes C++ of the
// sources; the headers beside this one stand in for those of the same name that hold instructions.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <functional>
#include <map>
#include <vector>

#undef __align__
#undef __device__
#undef __forceinline__
#undef __global__
#undef __grid_constant__
#undef __host__
#undef __launch_bounds__
#undef __shared__
#define __align__(bytes)
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __host__
#define __launch_bounds__(...)
#define __shared__ static // convert.py sees to the dynamic part

namespace emulator
{

enum { SHARED_BYTES = 232448, WARP = 32 };

struct copy {
    uint32_t to;
    const void *from; // nullptr: zeros
};

struct fiber {
    uint3 index;
    int warp, lane;
    bool done;
    std::vector<std::vector<copy>> groups; // of cp.async, oldest first
    std::vector<copy> open;                // not committed
};

struct barrier {
    int arrivals, pending;
    uint32_t phase;
    int64_t bytes;
};

extern fiber *current;
extern uint3 block_index;
extern dim3 block_size, grid_size;
extern char *const shared; // SHARED_BYTES
extern bool early;

void launch(dim3 grid, dim3 block, const std::function<void()> &kernel);
void yield();
// `count` fibers wait here for each other.
void meet(int key, int count);
int lanes(); // of the current warp

barrier &barrier_at(uint32_t address);
void settle(barrier &b); // the next phase, if nothing is pending
void named_arrive(int number, int count, bool wait);

void start_copy(copy c);
void land_copies(size_t groups_left, bool open_too);

enum transfer { LOAD, STORE, ADD };
uint32_t move_box(const CUtensorMap *map, uint32_t address, const int *coordinates, transfer how); // bytes

inline uint32_t swizzled(uint32_t address)
{
    return address ^ ((address >> 7 & 7) << 4);
}

template <class T> T read_shared(uint32_t address)
{
    T value;
    memcpy(&value, shared + address, sizeof value);
    return value;
}

template <class T> void write_shared(uint32_t address, T value)
{
    if (address % sizeof value != 0 || address + sizeof value > SHARED_BYTES) abort();
    memcpy(shared + address, &value, sizeof value);
}

// All lanes' values, as a vector that lane l reads at will.
template <class T> std::vector<T> gather(T value)
{
    static std::map<int, std::vector<T>> by_warp;
    std::vector<T> &all = by_warp[current->warp];
    all.resize(WARP);
    all[current->lane] = value;
    meet(1000 + current->warp, lanes());
    const std::vector<T> result(all.begin(), all.begin() + lanes());
    meet(1000 + current->warp, lanes());
    return result;
}

} // namespace emulator

#define threadIdx (emulator::current->index)
inline uint3 &blockIdx = emulator::block_index;
inline dim3 &blockDim = emulator::block_size;
inline dim3 &gridDim = emulator::grid_size;

inline void __syncwarp()
{
    emulator::meet(1000 + emulator::current->warp, emulator::lanes());
}

inline void __syncthreads()
{
    emulator::meet(1, (int)(blockDim.x * blockDim.y * blockDim.z));
}

inline int __syncthreads_or(int value)
{
    static int any;
    __syncthreads();
    any = 0;
    __syncthreads();
    any |= value != 0;
    __syncthreads();
    return any;
}

template <class T> T __shfl_sync(unsigned, T value, int lane)
{
    return emulator::gather(value)[lane & 31];
}

template <class T> T __shfl_xor_sync(unsigned, T value, int mask)
{
    return emulator::gather(value)[emulator::current->lane ^ mask];
}

template <class T> T __shfl_up_sync(unsigned, T value, int by)
{
    const int lane = emulator::current->lane;
    return emulator::gather(value)[lane >= by ? lane - by : lane];
}

inline uint32_t __reduce_add_sync(unsigned, uint32_t value)
{
    uint32_t sum = 0;
    for (const uint32_t v : emulator::gather(value)) sum += v;
    return sum;
}

inline bool __all_sync(unsigned, bool value)
{
    for (const int v : emulator::gather((int)value))
        if (!v) return false;
    return true;
}

inline uint32_t atomicAdd(uint32_t *to, uint32_t value)
{
    const uint32_t before = *to;
    *to += value;
    return before;
}

inline uint32_t atomicOr(uint32_t *to, uint32_t value)
{
    const uint32_t before = *to;
    *to |= value;
    return before;
}

template <class T> T __ldg(const T *p)
{
    return *p;
}

template <class T> T __ldcg(const T *p)
{
    return *p;
}

inline int __popc(uint32_t v)
{
    return __builtin_popcount(v);
}

inline uint32_t __float_as_uint(float v)
{
    uint32_t bits;
    memcpy(&bits, &v, 4);
    return bits;
}

inline float __uint_as_float(uint32_t bits)
{
    float v;
    memcpy(&v, &bits, 4);
    return v;
}

inline float __fdividef(float a, float b)
{
    return a / b;
}

#define __expf expf

template <class A, class B> auto max(A a, B b)
{
    return +a > +b ? +a : +b;
}

template <class A, class B> auto min(A a, B b)
{
    return +a < +b ? +a : +b;
}

template <class... Formal, class... Actual>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Formal...),
                               Actual &&...arguments)
{
    emulator::launch(config->gridDim, config->blockDim, [&] { kernel(arguments...); });
    return cudaSuccess;
}
