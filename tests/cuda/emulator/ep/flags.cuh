// Replaces src/cuda/ep/flags.cuh. No other rank runs while a kernel waits.
#pragma once
#include "common/ptx.cuh"
#include <ctime>

namespace moe
{

MOE_DEVICE uint64_t load_acquire(const uint64_t *from)
{
    return *(const volatile uint64_t *)from;
}

MOE_DEVICE void store_release(uint64_t *to, uint64_t v)
{
    *to = v;
}

MOE_DEVICE uint32_t load_now(const uint32_t *from)
{
    return *(const volatile uint32_t *)from;
}

MOE_DEVICE uint32_t exchange(uint32_t *word, uint32_t v)
{
    const uint32_t before = *word;
    *word = v;
    return before;
}

MOE_DEVICE void fence_system()
{
}

MOE_DEVICE uint64_t nanoseconds()
{
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

} // namespace moe
