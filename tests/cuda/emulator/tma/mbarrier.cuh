// Replaces src/cuda/tma/mbarrier.cuh.
#pragma once
#include "tma/ring.cuh"

namespace moe
{

MOE_DEVICE void barrier_init(uint32_t barrier, uint32_t arrivals)
{
    emulator::barrier_at(barrier) = {(int)arrivals, (int)arrivals, 0, 0};
}

MOE_DEVICE void barrier_init_done()
{
}

MOE_DEVICE void barrier_arrive(uint32_t barrier)
{
    emulator::barrier &b = emulator::barrier_at(barrier);
    if (--b.pending < 0) {
        printf("barrier at %u: an arrival too many\n", barrier);
        abort();
    }
    emulator::settle(b);
}

MOE_DEVICE void barrier_expect(uint32_t barrier, uint32_t bytes)
{
    emulator::barrier_at(barrier).bytes += bytes;
    barrier_arrive(barrier);
}

MOE_DEVICE void barrier_arrive_after_copies(uint32_t barrier)
{
    emulator::land_copies(0, true);
    barrier_arrive(barrier);
}

template <bool SAFE = true> MOE_DEVICE void barrier_wait(uint32_t barrier, uint32_t parity)
{
    const emulator::barrier &b = emulator::barrier_at(barrier);
    while ((b.phase & 1) == parity) emulator::wait_for_change(b.phase);
}

} // namespace moe
