// TMA: copies boxes of a tensor map to shared memory, where each copy completes on an mbarrier, and back to
// global memory in bulk groups. Also copies plain bytes to shared memory.
// Terms: docs/glossary.md; symbols: include/smoe.h.
#pragma once
#include "common/ptx.cuh"
#include <cuda.h>

namespace moe
{

// True in one lane of the warp, always the same one. All 32 lanes must call it. Unlike `lane == 0` it tells
// nvcc that one lane runs what follows, so the operands of copies are computed in uniform registers: a copy
// in a loop takes 4 instructions instead of 10.
MOE_DEVICE bool elect_lane()
{
    uint32_t elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected != 0;
}

MOE_DEVICE void prefetch_map(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

MOE_DEVICE void load_box(uint32_t to, const CUtensorMap *map, uint32_t barrier, int x, int y)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y)
                 : "memory");
}

MOE_DEVICE void load_box(uint32_t to, const CUtensorMap *map, uint32_t barrier, int x, int y, int z)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

MOE_DEVICE void load_box(uint32_t to, const CUtensorMap *map, uint32_t barrier, int x, int y, int z, int u)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(u)
                 : "memory");
}

MOE_DEVICE void load_box(uint32_t to, const CUtensorMap *map, uint32_t barrier, int x, int y, int z, int u,
                         int v)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v)
                 : "memory");
}

MOE_DEVICE void store_box(const CUtensorMap *map, uint32_t from, int x, int y)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
        "r"(from), "r"(x), "r"(y)
        : "memory");
}

MOE_DEVICE void store_box(const CUtensorMap *map, uint32_t from, int x, int y, int z)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
        "r"(from), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// As store_box, but L2 evicts these lines first. For a result larger than L2 that only a later kernel reads.
MOE_DEVICE void store_box_evict_first(const CUtensorMap *map, uint32_t from, int x, int y, int z)
{
    const uint64_t evict_first = 0x12F0000000000000; // what createpolicy.fractional.L2::evict_first returns
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint "
                 "[%0, {%2, %3, %4}], [%1], %5;" ::"l"(map),
                 "r"(from), "r"(x), "r"(y), "r"(z), "l"(evict_first)
                 : "memory");
}

MOE_DEVICE void store_box(const CUtensorMap *map, uint32_t from, int x, int y, int z, int u)
{
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
        "r"(from), "r"(x), "r"(y), "r"(z), "r"(u)
        : "memory");
}

// Adds the box to what is there.
MOE_DEVICE void add_box(const CUtensorMap *map, uint32_t from, int x, int y, int z, int u)
{
    asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, "
                 "%5}], [%1];" ::"l"(map),
                 "r"(from), "r"(x), "r"(y), "r"(z), "r"(u)
                 : "memory");
}

// Addresses and bytes: multiples of 16.
MOE_DEVICE void load_bytes(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

MOE_DEVICE void commit_stores()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// All but the newest PENDING groups have been read out of shared memory.
template <int PENDING> MOE_DEVICE void wait_stores_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Waits until all stores of this thread are in global memory; called before the thread ends.
MOE_DEVICE void wait_stores_done()
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

} // namespace moe
