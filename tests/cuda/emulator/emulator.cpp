// Fibers, barriers and TMA of emulator.h, and as much of the CUDA runtime as the backend and its checks call.
#include "emulator.h"

#include <memory>
#include <ucontext.h>

namespace emulator
{

fiber *current;
uint3 block_index;
dim3 block_size, grid_size;
alignas(1024) static char shared_memory[SHARED_BYTES];
char *const shared = shared_memory;
bool early = getenv("EMULATOR_EARLY") != nullptr;

namespace
{

enum { STACK_BYTES = 128 << 10, MOST_IDLE_ROUNDS = 1000 };

struct running {
    fiber state;
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
};

struct meeting {
    int arrived;
    uint64_t held;
};

ucontext_t scheduler;
std::vector<std::unique_ptr<running>> fibers; // kept from CTA to CTA
std::function<void()> body;
bool progress; // since the round of all fibers began
std::map<int, meeting> meetings, named;
std::map<uint32_t, barrier> barriers;

running *runner()
{
    return fibers[current->warp * WARP + current->lane].get();
}

void enter()
{
    body();
    current->done = progress = true;
    swapcontext(&runner()->context, &scheduler);
}

void prepare(int i)
{
    if ((int)fibers.size() == i) fibers.emplace_back(new running);
    running &r = *fibers[i];
    const unsigned x = block_size.x, y = block_size.y;
    r.state = {};
    r.state.index = {i % x, i / x % y, i / (x * y)};
    r.state.warp = i / WARP;
    r.state.lane = i % WARP;
    getcontext(&r.context);
    r.context.uc_stack.ss_sp = r.stack.get();
    r.context.uc_stack.ss_size = STACK_BYTES;
    r.context.uc_link = nullptr;
    makecontext(&r.context, enter, 0);
}

void stuck(int left)
{
    printf("deadlock in CTA %u: %d threads left\n", block_index.x, left);
    for (const auto &b : barriers)
        printf("  barrier at %u: phase %u, %d arrivals and %lld bytes pending\n", b.first, b.second.phase,
               b.second.pending, (long long)b.second.bytes);
    exit(1);
}

void run_block()
{
    const int count = (int)(block_size.x * block_size.y * block_size.z);
    meetings.clear();
    named.clear();
    barriers.clear();
    memset(shared, 0xFF, SHARED_BYTES);
    for (int i = 0; i < count; i++) prepare(i);
    for (int left = count, idle = 0; left;) {
        progress = false;
        left = 0;
        for (int i = 0; i < count; i++) {
            current = &fibers[i]->state;
            if (current->done) continue;
            swapcontext(&scheduler, &fibers[i]->context);
            left += !current->done;
        }
        idle = progress ? 0 : idle + 1;
        if (idle > MOST_IDLE_ROUNDS) stuck(left);
    }
}

} // namespace

void launch(dim3 grid, dim3 block, const std::function<void()> &kernel)
{
    grid_size = grid;
    block_size = block;
    body = kernel;
    for (unsigned y = 0; y < grid.y; y++)
        for (unsigned x = 0; x < grid.x; x++) {
            block_index = {x, y, 0};
            run_block();
        }
}

void yield()
{
    fiber *self = current;
    swapcontext(&runner()->context, &scheduler);
    current = self;
}

int lanes()
{
    const int all = (int)(block_size.x * block_size.y * block_size.z);
    return std::min<int>(WARP, all - WARP * current->warp);
}

static void arrive(meeting &m, int count, bool wait)
{
    const uint64_t before = m.held;
    if (++m.arrived == count) {
        m.arrived = 0;
        m.held++;
        progress = true;
    } else
        while (wait && m.held == before) yield();
}

void meet(int key, int count)
{
    arrive(meetings[key], count, true);
}

void named_arrive(int number, int count, bool wait)
{
    arrive(named[number], count, wait);
}

barrier &barrier_at(uint32_t address)
{
    return barriers[address];
}

void settle(barrier &b)
{
    if (b.pending || b.bytes) return;
    b.pending = b.arrivals;
    b.phase++;
    progress = true;
}

static void land(const copy &c)
{
    if (c.from)
        memcpy(shared + c.to, c.from, 16);
    else
        memset(shared + c.to, 0, 16);
}

void start_copy(copy c)
{
    if (early)
        land(c);
    else
        current->open.push_back(c);
}

void land_copies(size_t groups_left, bool open_too)
{
    auto &groups = current->groups;
    for (size_t i = 0; i + groups_left < groups.size(); i++) {
        for (const copy &c : groups[i]) land(c);
        groups[i].clear();
    }
    if (!open_too) groups.erase(groups.begin(), groups.end() - std::min(groups_left, groups.size()));
    if (!open_too) return;
    for (const copy &c : current->open) land(c);
    current->open.clear();
}

// ---- TMA

struct box_map {
    cuuint32_t rank, box[5];
    CUtensorMapDataType type;
    char *base;
    int64_t size[5], stride[5]; // stride[0]: bytes of an element
};
static_assert(sizeof(box_map) <= sizeof(CUtensorMap), "the map is stored in place of the real one");

static CUresult encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base,
                       const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                       const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill)
{
    box_map m = {rank, {}, type, (char *)base, {}, {}};
    const int element = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
    if ((uintptr_t)base % 16 || box[0] * element != 128 || swizzle != CU_TENSOR_MAP_SWIZZLE_128B)
        return CUDA_ERROR_INVALID_VALUE;
    for (cuuint32_t i = 0; i < rank; i++) {
        if (!sizes[i] || !box[i] || box[i] > 256 || (i && strides[i - 1] % 16))
            return CUDA_ERROR_INVALID_VALUE;
        m.size[i] = (int64_t)sizes[i];
        m.box[i] = box[i];
        m.stride[i] = i ? (int64_t)strides[i - 1] : element;
    }
    memcpy((void *)map, &m, sizeof m);
    return CUDA_SUCCESS;
}

template <class T> static float widen(T v);
template <> float widen(float v)
{
    return v;
}
template <> float widen(__nv_bfloat16 v)
{
    return __bfloat162float(v);
}
template <> float widen(__half v)
{
    return __half2float(v);
}

static void narrow(float v, float &to)
{
    to = v;
}
static void narrow(float v, __nv_bfloat16 &to)
{
    to = __float2bfloat16_rn(v);
}
static void narrow(float v, __half &to)
{
    to = __float2half_rn(v);
}

template <class T> static void add(char *to, const char *value)
{
    T a, b;
    memcpy(&a, to, sizeof a);
    memcpy(&b, value, sizeof b);
    narrow(widen(a) + widen(b), a);
    memcpy(to, &a, sizeof a);
}

static void add(CUtensorMapDataType type, char *to, const char *value)
{
    if (type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32) return add<float>(to, value);
    if (type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16) return add<__nv_bfloat16>(to, value);
    add<__half>(to, value);
}

uint32_t move_box(const CUtensorMap *map, uint32_t address, const int *coordinates, transfer how)
{
    box_map m;
    memcpy(&m, (const void *)map, sizeof m);
    const uint32_t element = (uint32_t)m.stride[0];
    uint32_t count = 1;
    for (cuuint32_t i = 0; i < m.rank; i++) count *= m.box[i];
    if (address % 1024 || address + count * element > SHARED_BYTES) abort();
    for (uint32_t i = 0; i < count; i++) {
        char *there = m.base, *here = shared + swizzled(address + i * element);
        bool inside = true;
        uint32_t rest = i;
        for (cuuint32_t j = 0; j < m.rank; j++) {
            const int64_t x = (int64_t)coordinates[j] + rest % m.box[j];
            rest /= m.box[j];
            inside = inside && x >= 0 && x < m.size[j];
            there += x * m.stride[j];
        }
        if (how == LOAD && inside) memcpy(here, there, element);
        if (how == LOAD && !inside) memset(here, 0, element);
        if (how == STORE && inside) memcpy(there, here, element);
        if (how == ADD && inside) add(m.type, there, here);
    }
    return count * element;
}

} // namespace emulator

// ---- The CUDA runtime: device memory is the host's, streams do everything at once

extern "C" {

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int)
{
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int)
{
    const char *ctas = getenv("EMULATOR_CTAS");
    *value = attribute == cudaDevAttrComputeCapabilityMajor   ? 9
             : attribute == cudaDevAttrComputeCapabilityMinor ? 0
             : ctas                                           ? atoi(ctas)
                                                              : 3;
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *, void **function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *found)
{
    *function = (void *)emulator::encode;
    *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int bytes)
{
    return bytes <= emulator::SHARED_BYTES ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

const char *cudaGetErrorName(cudaError_t error)
{
    return error == cudaSuccess ? "cudaSuccess" : "an error of the emulator";
}

const char *cudaGetErrorString(cudaError_t error)
{
    return cudaGetErrorName(error);
}

cudaError_t cudaMalloc(void **memory, size_t bytes)
{
    *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    return *memory ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFree(void *memory)
{
    free(memory);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *memory, int value, size_t bytes)
{
    memset(memory, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind)
{
    memmove(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t)
{
    return cudaMemcpy(to, from, bytes, kind);
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t)
{
    return cudaMemset(memory, value, bytes);
}

cudaError_t cudaDeviceSynchronize(void)
{
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t)
{
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned)
{
    *stream = nullptr;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t)
{
    return cudaSuccess;
}
}
