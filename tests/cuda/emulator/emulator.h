// Runs the kernels of src/cuda on the CPU. Every CUDA thread is a fiber; all fibers run on one host thread.
//
// Emulated are:
// - CTAs, one after the other; their threads run by turns, in the order of their numbers.
// - Warp shuffles, votes, stmatrix, ldmatrix and mma.sync. All lanes of the warp wait for one another there.
// - Named barriers, and mbarriers with their transaction bytes.
// - TMA boxes with swizzle, the rule for elements outside of the tensor, and reduction.
// - wgmma with its descriptors.
// - Streams, which run work at once or record it for a graph.
//
// Asynchronous work is done as late as the program allows, so that missing waits change results. TMA stores
// and wgmma read shared memory late; cp.async and TMA loads write it late. With EMULATOR_EARLY in the
// environment, cp.async and TMA loads write at once: this shows whether a slot is filled too early. With
// EMULATOR_SLOW, for example "4-7", these warps run only when no other thread can. The program ends if TMA or
// wgmma reads shared memory that was written by other instructions with no fence since, or if ldmatrix reads
// bytes to which a cp.async is under way.
//
// Not emulated: all other memory ordering, registers, time. convert.py converts the sources to C++. The
// headers in this folder replace those of src/cuda with the same names, which contain PTX instructions.
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
#define __shared__ static // convert.py converts dynamic shared memory

namespace emulator
{

enum { SHARED_BYTES = 232448, WARP = 32 };

struct copy {
    uint32_t to;
    const void *from; // nullptr: zeros
    uint32_t bytes = 16;
};

struct fiber {
    uint3 index;
    int warp, lane, lanes; // lanes: number of lanes of the warp
    bool done;
    const uint32_t *watched; // the fiber runs again when *watched != seen; nullptr: at any time
    uint32_t seen;
    uint32_t exchanges;                    // number of exchanges that the warp has made
    uint64_t fenced;                       // hazard_time at the fiber's last fence_async_proxy
    late_groups stores, multiplies;        // TMA stores, wgmma multiplications
    std::vector<std::vector<copy>> groups; // committed groups of cp.async, oldest first
    std::vector<copy> open;                // copies of cp.async that are not committed
};

struct barrier {
    int arrivals, pending;
    uint32_t phase;
    int64_t bytes;
};

extern fiber *current;
extern uint3 cta_index;
extern dim3 cta_size, grid_size;
extern char *const shared; // the CTA's shared memory, SHARED_BYTES

void run_grid(dim3 grid, dim3 cta, const std::function<void()> &kernel);
void yield();
void wait_for_change(const uint32_t &word);
void meet_warp();
void meet_cta();

barrier &barrier_at(uint32_t address);
void settle(barrier &b); // begins the next phase if no arrivals and no bytes are pending
void named_arrive(int number, int count, bool wait);

void start_copy(copy c);
void land_copies(size_t groups_left, bool open_too);

// `landing` runs when no thread can make progress without it. Several run in the order of these calls.
void later(std::function<void()> landing);

enum transfer { LOAD, STORE, ADD };
void check_box(const CUtensorMap *map, uint32_t address); // ends the program if the box is not fenced
// Returns the bytes of the box.
uint32_t move_box(const CUtensorMap *map, uint32_t address, const int *coordinates, transfer how);

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

// The memory in which the lanes of a warp exchange their values. Exchanges use two places by turns, because a
// lane may be at the next exchange before another lane has read the values of this one.
enum { EXCHANGE_BYTES = 48 };
char *exchange();

// The values of all lanes. They are valid until the exchange after the next one.
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

// Runs `work` at once, or if the stream is captured when its graph is launched. `early`: programmatic
// dependent launch, so that the work may start before the stream's earlier work ends.
void enqueue(cudaStream_t stream, cudaGraphNodeType type, std::function<void()> work, bool early = false,
             dim3 grid = dim3());
bool is_capturing();

inline cudaError_t last_error = cudaSuccess; // the result of cudaGetLastError

inline thread_local int current_device = 0; // of the calling thread
int launching_device();
int capability(); // of the GPU, major times 10 plus minor

bool is_allocated(const void *memory, size_t bytes); // whether one allocation of cudaMalloc contains it

// Ends the program if a kernel is launched with more dynamic shared memory than its attribute allows. On a
// GPU the kernel's static shared memory counts too; its size is not known here.
void check_shared(const void *kernel, size_t bytes);

// Does what cudaLaunchKernelEx does.
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

inline void __threadfence_block()
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

inline int atomicMin(int *to, int value)
{
    const int before = *to;
    if (value < before) *to = value;
    return before;
}

inline int32_t atomicMax(int32_t *to, int32_t value)
{
    const int32_t before = *to;
    if (value > before) *to = value;
    return before;
}

inline uint32_t atomicMax(uint32_t *to, uint32_t value)
{
    const uint32_t before = *to;
    if (value > before) *to = value;
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

// The maximum of each of the two unsigned 16-bit halves.
inline uint32_t __vmaxu2(uint32_t a, uint32_t b)
{
    const uint32_t low = (uint16_t)a > (uint16_t)b ? (uint16_t)a : (uint16_t)b;
    return (a >> 16 > b >> 16 ? a >> 16 : b >> 16) << 16 | low;
}

// The four bytes of a and b that the hexadecimal digits of the selector choose.
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
    if (config->numAttrs > 0 && emulator::capability() < 90) // programmatic dependent launch
        return emulator::last_error = cudaErrorNotSupported;
    emulator::launch(grid, cta, config->dynamicSmemBytes, config->stream, config->numAttrs > 0, kernel,
                     actual...);
    return cudaSuccess;
}
