// mbarriers in shared memory, by their 32-bit address. The functions without bytes also exist below compute
// capability 9.0.
#pragma once
#include "tma/ring.cuh"

namespace moe
{

MOE_DEVICE void barrier_init(uint32_t barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After the last barrier_init, before the CTA's __syncthreads.
MOE_DEVICE void barrier_init_done()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::
                     : "memory"); // for TMA; __syncthreads is enough for threads
#endif
}

MOE_DEVICE void barrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival, and the phase also waits for `bytes` of TMA.
MOE_DEVICE void barrier_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// An arrival that happens when all cp.async of this thread so far have completed. barrier_init counts it.
MOE_DEVICE void barrier_arrive_after_copies(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

MOE_DEVICE bool barrier_try(uint32_t barrier, uint32_t parity)
{
    uint32_t done;
#if __CUDA_ARCH__ >= 900
#define MOE_TRY "try_wait"
#else
#define MOE_TRY "test_wait"
#endif
    asm volatile("{\n.reg .pred p;\nmbarrier." MOE_TRY ".parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#undef MOE_TRY
    return done != 0;
}

// Waits for the phase of this parity to end. With SMOE_CUDA_TRAP a wait of about a second ends the kernel.
// The main loop with 192 accumulators lacks the registers for that (SAFE = false).
template <bool SAFE = true> MOE_DEVICE void barrier_wait(uint32_t barrier, uint32_t parity)
{
#ifdef SMOE_CUDA_TRAP
    const uint32_t start = SAFE ? clock() : 0;
    while (!barrier_try(barrier, parity))
        if (SAFE && (uint32_t)clock() - start > 1500000000u) __trap();
#else
    while (!barrier_try(barrier, parity)) {
    }
#endif
}

} // namespace moe
