// Words that several devices share: loads with acquire and stores with release at system scope; and a clock.
#pragma once
#include "common/ptx.cuh"

namespace moe
{

MOE_DEVICE uint64_t load_acquire(const uint64_t *from)
{
    uint64_t v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
    return v;
}

MOE_DEVICE void store_release(uint64_t *to, uint64_t v)
{
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}

// A word that another thread, or the host, may change at any time.
MOE_DEVICE uint32_t load_now(const uint32_t *from)
{
    uint32_t v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}

MOE_DEVICE uint32_t exchange(uint32_t *word, uint32_t v)
{
    return atomicExch(word, v);
}

// What this thread knows to be written is written for all devices before what it writes next.
MOE_DEVICE void fence_system()
{
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

MOE_DEVICE uint64_t nanoseconds()
{
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

} // namespace moe
