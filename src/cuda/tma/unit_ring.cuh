// How one thread of a CTA hands units of work to the other warps, and how it claims them from a counter.
// Terms: docs/glossary.md.
#pragma once
#include "common/ptx.cuh"
#include "tma/mbarrier.cuh"

namespace moe
{

// A ring of UNITS units in shared memory, each of VECTORS vectors of 16 bytes. Unit i is in slot i % UNITS.
// One reader arrives at free(i) when it has read unit i. The kernel must ensure that all other readers have
// read the unit, too, when its slot is written again.
template <int UNITS, int VECTORS> struct unit_ring {
    enum { BYTES = UNITS * (VECTORS * 16 + 8 + 8) };
    uint32_t at;
    MOE_DEVICE uint32_t known(int i) const
    {
        return at + UNITS * VECTORS * 16 + i % UNITS * 8;
    }
    MOE_DEVICE uint32_t free(int i) const
    {
        return at + UNITS * (VECTORS * 16 + 8) + i % UNITS * 8;
    }
    // The slot of unit i: of a known unit for readers, of a free one for the writer.
    MOE_DEVICE uint32_t wait_known(int i) const
    {
        barrier_wait(known(i), i / UNITS & 1);
        return at + i % UNITS * VECTORS * 16;
    }
    MOE_DEVICE uint32_t wait_free(int i) const
    {
        barrier_wait(free(i), (i / UNITS & 1) ^ 1);
        return at + i % UNITS * VECTORS * 16;
    }
    MOE_DEVICE void init() const
    {
        for (int i = 0; i < UNITS; i++) {
            barrier_init(known(i), 1);
            barrier_init(free(i), 1);
        }
    }
};

// turn (2): the number of claims, and of CTAs that have finished. Both are zero before and after a kernel. A
// CTA's first units are not claimed: its number gives them, so that it can start at once.
MOE_DEVICE int claim_unit(int *turn, int units_at_start)
{
    return atomicAdd(turn, 1) + units_at_start * (int)gridDim.x;
}

// After the last claim of a CTA. The last CTA sets both words back to zero.
MOE_DEVICE void finish_claims(int *turn)
{
    __threadfence();
    if (atomicAdd(turn + 1, 1) == (int)gridDim.x - 1) turn[0] = turn[1] = 0;
}

} // namespace moe
