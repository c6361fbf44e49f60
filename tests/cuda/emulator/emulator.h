// The kernels of src/cuda on the CPU: every CUDA thread is a fiber, all of them on one thread of the host.
//
// What is emulated: CTAs one after the other; warp shuffles, votes, stmatrix, ldmatrix and mma.sync (all
// lanes meet); named barriers and mbarriers with their transaction bytes; TMA boxes with swizzle,
// out-of-bounds rule and reduction; wgmma through its descriptors; streams that run at once, or record for a
// graph. TMA stores and wgmma read shared memory as late as they may; cp.async and TMA loads land so late,
// too, or with EMULATOR_EARLY in the environment at once: what is filled too soon is seen then. A generic
// write to shared memory that TMA or wgmma reads without a fence ends the program. Threads take turns in
// their order; those of the warps of EMULATOR_SLOW ("4-7") only when no other gets on. What is not: the rest
// of memory ordering, registers, time. convert.py makes C++ of the sources; the headers beside this one stand
// in for those of the same name that hold instructions.
#pragma once
#include "hazards.h"
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
#include <tuple>
#include <vector>

#undef __align__
#undef __device__
#undef __forceinline__
#undef __global__
#undef __grid_constant__
#undef __host__
#undef __launch_bounds__
#undef __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))
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
    int warp, lane, lanes; // lanes: of the warp
    bool done;
    const uint32_t *watched; // runs again when this is no longer `seen`; nullptr: any time
    uint32_t seen;
    uint32_t exchanges;                    // of the warp
    uint64_t fenced;                       // when it last fenced its writes from TMA and wgmma
    late_groups stores, multiplies;        // TMA's, wgmma's
    std::vector<std::vector<copy>> groups; // of cp.async, oldest first
    std::vector<copy> open;                // not committed
};

struct barrier {
    int arrivals, pending;
    uint32_t phase;
    int64_t bytes;
};

extern fiber *current;
extern uint3 cta_index;
extern dim3 cta_size, grid_size;
extern char *const shared; // SHARED_BYTES

void run_grid(dim3 grid, dim3 cta, const std::function<void()> &kernel);
void yield();
void wait_for_change(const uint32_t &word);
void meet_warp();
void meet_cta();

barrier &barrier_at(uint32_t address);
void settle(barrier &b); // the next phase, if nothing is pending
void named_arrive(int number, int count, bool wait);

void start_copy(copy c);
void land_copies(size_t groups_left, bool open_too);

// Done when no thread can go on without it, in the order of the calls.
void later(std::function<void()> landing);

enum transfer { LOAD, STORE, ADD };
void check_box(const CUtensorMap *map, uint32_t address); // before it is stored: fenced?
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
    note_write(address, &current->fenced, true);
    memcpy(shared + address, &value, sizeof value);
}

// Where a warp's lanes show each other their values: two places in turn, since a lane may be at the next
// exchange before another has read this one.
enum { EXCHANGE_BYTES = 48 };
char *exchange();

// All lanes' values, until the next exchange but one.
template <class T> const T *gather(const T &value)
{
    static_assert(sizeof(T) <= EXCHANGE_BYTES, "a lane's place");
    T *all = (T *)exchange();
    memcpy((void *)(all + current->lane), (const void *)&value, sizeof value);
    meet_warp();
    return all;
}

template <class T, class F> T fold(T value, F f)
{
    const T *all = gather(value);
    T result = all[0];
    for (int i = 1; i < current->lanes; i++) result = f(result, all[i]);
    return result;
}

// The sum over the CTA's threads.
inline int cta_sum(int value)
{
    static int sum;
    meet_cta();
    sum = 0;
    meet_cta();
    sum += value;
    meet_cta();
    return sum;
}

// Runs at once; on a stream that is captured, when its graph is launched. `early`: may start before what the
// stream has before it ends.
void enqueue(cudaStream_t stream, cudaGraphNodeType type, std::function<void()> work, bool early = false,
             dim3 grid = dim3());
bool is_capturing();

inline cudaError_t last_error = cudaSuccess; // cudaGetLastError's

inline thread_local int current_device = 0; // of the calling thread
int launching_device();

bool is_allocated(const void *memory, size_t bytes); // by cudaMalloc, in one allocation

// Ends the program where a kernel is to have more dynamic shared memory than it has leave for. What it
// declares itself counts too on a GPU and is not known here.
void check_shared(const void *kernel, size_t bytes);

// What cudaLaunchKernelEx does.
template <class... Formal, class... Actual>
void launch(dim3 grid, dim3 cta, size_t shared_bytes, cudaStream_t stream, bool early,
            void (*kernel)(Formal...), const Actual &...actual)
{
    check_shared((const void *)kernel, shared_bytes);
    const std::tuple<std::decay_t<Formal>...> arguments(actual...);
    enqueue(
        stream, cudaGraphNodeTypeKernel, [=] { run_grid(grid, cta, [&] { std::apply(kernel, arguments); }); },
        early, grid);
}

} // namespace emulator

#define threadIdx (emulator::current->index)
inline uint3 &blockIdx = emulator::cta_index;
inline dim3 &blockDim = emulator::cta_size;
inline dim3 &gridDim = emulator::grid_size;

inline void __syncwarp()
{
    emulator::meet_warp();
}

inline void __threadfence()
{
}

inline void __syncthreads()
{
    emulator::meet_cta();
}

inline int __syncthreads_or(int value)
{
    return emulator::cta_sum(value != 0) != 0;
}

inline int __syncthreads_count(int value)
{
    return emulator::cta_sum(value != 0);
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
    return emulator::fold(value, [](uint32_t a, uint32_t b) { return a + b; });
}

inline uint32_t __reduce_max_sync(unsigned, uint32_t value)
{
    return emulator::fold(value, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
}

inline uint32_t __reduce_min_sync(unsigned, uint32_t value)
{
    return emulator::fold(value, [](uint32_t a, uint32_t b) { return a < b ? a : b; });
}

inline uint32_t __ballot_sync(unsigned, bool value)
{
    return emulator::fold(value ? 1u << emulator::current->lane : 0u,
                          [](uint32_t a, uint32_t b) { return a | b; });
}

inline bool __any_sync(unsigned mask, bool value)
{
    return __ballot_sync(mask, value) != 0;
}

inline bool __all_sync(unsigned mask, bool value)
{
    return __ballot_sync(mask, !value) == 0;
}

template <class T, class V> T atomicAdd(T *to, V value)
{
    const T before = *to;
    *to += (T)value;
    return before;
}

inline uint32_t atomicOr(uint32_t *to, uint32_t value)
{
    const uint32_t before = *to;
    *to |= value;
    return before;
}

inline uint32_t atomicXor(uint32_t *to, uint32_t value)
{
    const uint32_t before = *to;
    *to ^= value;
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

inline int __clz(int v)
{
    return v ? __builtin_clz((unsigned)v) : 32;
}

inline int __ffs(int v)
{
    return __builtin_ffs(v);
}

// The larger of each two unsigned halves.
inline uint32_t __vmaxu2(uint32_t a, uint32_t b)
{
    const uint32_t low = (uint16_t)a > (uint16_t)b ? (uint16_t)a : (uint16_t)b;
    return (a >> 16 > b >> 16 ? a >> 16 : b >> 16) << 16 | low;
}

// The bytes of b and a that the selector's digits name.
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector)
{
    const uint64_t bytes = (uint64_t)b << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) result |= (uint32_t)(uint8_t)(bytes >> (selector >> 4 * i & 7) * 8) << 8 * i;
    return result;
}

inline double cospi(double v)
{
    return cos(M_PI * v);
}

inline float __fadd_rn(float a, float b)
{
    return a + b;
}

inline float __frcp_rn(float a)
{
    return 1.0f / a;
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
                               const Actual &...actual)
{
    const dim3 grid = config->gridDim, cta = config->blockDim;
    if (!grid.x || !grid.y || grid.y > 65535 || cta.x * cta.y * cta.z > 1024)
        return emulator::last_error = cudaErrorInvalidConfiguration;
    if (emulator::current_device != emulator::launching_device())
        return emulator::last_error = cudaErrorInvalidDevice;
    emulator::launch(grid, cta, config->dynamicSmemBytes, config->stream, config->numAttrs > 0, kernel,
                     actual...);
    return cudaSuccess;
}
