// A libnccl.so.2 for processes with the emulator: its functions as train/cuda/nccl.c uses them, over shared
// memory. Sums are in the order of the ranks, as rings and copy engines give them for two ranks.
// EMULATOR_NCCL_WINDOWS=0: GPUs that do not reach each other's memory, so that no window can be made. Where
// memory is shared, only what the copy engines do is allowed, on that memory, and all of it is taken back.
#include "emulator.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

namespace
{

enum { OK = 0, INVALID = 4, SLOT = 4 << 20, ID = 128, SUM = 0, MIN = 3, VERSION = 22809 };

struct head {
    std::atomic<unsigned> arrived, round;
};

struct piece {
    char *memory;
    size_t bytes;
};

struct communicator {
    int ranks, rank;
    head *shared;
    std::vector<piece> windows;

    char *slot(int r) const
    {
        return (char *)(shared + 1) + (size_t)r * SLOT;
    }
    bool has(const void *memory, size_t bytes) const
    {
        for (const piece &w : windows)
            if (w.memory <= (const char *)memory && (const char *)memory + bytes <= w.memory + w.bytes)
                return true;
        return false;
    }
};

struct id {
    char name[ID];
};

bool gives_windows()
{
    const char *set = getenv("EMULATOR_NCCL_WINDOWS");
    return !set || *set != '0';
}

size_t size_of(int type)
{
    return type == 8 ? 8 : type == 9 ? 2 : 4;
}

void meet(communicator *c)
{
    const unsigned round = c->shared->round;
    if (++c->shared->arrived == (unsigned)c->ranks) {
        c->shared->arrived = 0;
        c->shared->round++;
    }
    while (c->shared->round == round) usleep(50);
}

double value_of(const void *from, size_t at, int type)
{
    unsigned bits;
    float value;
    if (type == 8) return ((const double *)from)[at];
    if (type == 2) return ((const int *)from)[at];
    if (type == 7) return ((const float *)from)[at];
    bits = (unsigned)((const unsigned short *)from)[at] << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

void put(void *to, size_t at, int type, double value)
{
    const float single = (float)value;
    unsigned bits;
    memcpy(&bits, &single, sizeof bits);
    if (type == 8) ((double *)to)[at] = value;
    if (type == 2) ((int *)to)[at] = (int)value;
    if (type == 7) ((float *)to)[at] = single;
    if (type == 9) ((unsigned short *)to)[at] = (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// to (count) = of every rank's slot the values from `first` on, added up, or the least.
void combine(communicator *c, void *to, size_t first, size_t count, int type, int operation)
{
    for (size_t i = 0; i < count; i++) {
        double all = value_of(c->slot(0), first + i, type);
        for (int r = 1; r < c->ranks; r++) {
            const double one = value_of(c->slot(r), first + i, type);
            if (type != 8) all = operation == MIN ? (one < all ? one : all) : (float)(all + one);
            if (type == 8) all = operation == MIN ? (one < all ? one : all) : all + one;
        }
        put(to, i, type, all);
    }
}

// All ranks give `bytes` bytes to their slots; then `take` reads them.
template <typename F>
int exchange(communicator *c, const void *from, size_t bytes, cudaStream_t stream, F take)
{
    if (bytes > SLOT || !emulator::is_allocated(from, bytes)) return INVALID;
    emulator::enqueue(stream, cudaGraphNodeTypeKernel, [=] {
        memcpy(c->slot(c->rank), from, bytes);
        meet(c);
        take();
        meet(c);
    });
    return OK;
}

} // namespace

extern "C" {

int ncclGetVersion(int *version)
{
    *version = VERSION;
    return OK;
}

const char *ncclGetErrorString(int)
{
    return "invalid argument";
}

int ncclGetUniqueId(id *made)
{
    snprintf(made->name, ID, "/emulated-nccl-%ld", (long)getpid());
    shm_unlink(made->name); // of a process that was killed and had the same number
    const int file = shm_open(made->name, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (file < 0 || ftruncate(file, sizeof(head) + 64 * (off_t)SLOT)) return INVALID;
    close(file);
    return OK;
}

int ncclCommInitRank(communicator **made, int ranks, id key, int rank)
{
    const size_t bytes = sizeof(head) + 64 * (size_t)SLOT;
    const int file = shm_open(key.name, O_RDWR, 0600);
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file < 0 || memory == MAP_FAILED) return INVALID;
    close(file);
    *made = new communicator{ranks, rank, (head *)memory, {}};
    meet(*made);
    if (rank == 0) shm_unlink(key.name);
    return OK;
}

int ncclCommDestroy(communicator *c)
{
    if (!c->windows.empty()) {
        fprintf(stderr, "memory is still shared\n");
        _exit(1);
    }
    delete c;
    return OK;
}

int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation, communicator *c,
                      cudaStream_t stream)
{
    if (!c->windows.empty()) return INVALID;
    return exchange(c, from, c->ranks * count * size_of(type), stream,
                    [=] { combine(c, to, c->rank * count, count, type, operation); });
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, communicator *c,
                  cudaStream_t stream)
{
    return exchange(c, from, count * size_of(type), stream,
                    [=] { combine(c, to, 0, count, type, operation); });
}

int ncclAllGather(const void *from, void *to, size_t count, int type, communicator *c, cudaStream_t stream)
{
    const size_t bytes = count * size_of(type);
    if (!c->windows.empty() && !c->has(to, c->ranks * bytes)) return INVALID;
    return exchange(c, from, bytes, stream, [=] {
        for (int r = 0; r < c->ranks; r++) memcpy((char *)to + r * bytes, c->slot(r), bytes);
    });
}

int ncclAlltoAll(const void *from, void *to, size_t count, int type, communicator *c, cudaStream_t stream)
{
    const size_t bytes = count * size_of(type);
    if (!c->has(from, c->ranks * bytes) || !c->has(to, c->ranks * bytes)) return INVALID;
    return exchange(c, from, c->ranks * bytes, stream, [=] {
        for (int r = 0; r < c->ranks; r++)
            memcpy((char *)to + r * bytes, c->slot(r) + c->rank * bytes, bytes);
    });
}

int ncclMemAlloc(void **memory, size_t bytes)
{
    return cudaMalloc(memory, bytes) == cudaSuccess ? OK : INVALID;
}

int ncclMemFree(void *memory)
{
    return cudaFree(memory) == cudaSuccess ? OK : INVALID;
}

int ncclCommWindowRegister(communicator *c, void *memory, size_t bytes, void **window, int)
{
    *window = NULL;
    if (!emulator::is_allocated(memory, bytes)) return INVALID;
    if (!gives_windows()) return OK;
    memcpy(c->slot(c->rank), &bytes, sizeof bytes);
    meet(c);
    bool same = true; // windows are symmetric
    for (int r = 0; r < c->ranks; r++) same = same && !memcmp(c->slot(r), &bytes, sizeof bytes);
    meet(c);
    if (!same) return INVALID;
    c->windows.push_back({(char *)memory, bytes});
    *window = memory;
    return OK;
}

int ncclCommWindowDeregister(communicator *c, void *window)
{
    for (size_t i = 0; i < c->windows.size(); i++)
        if (c->windows[i].memory == window) {
            c->windows.erase(c->windows.begin() + i);
            return OK;
        }
    return INVALID;
}
}
