// The position of a producer or of a consumer in a ring of slots.
#pragma once
#include "common/ptx.cuh"

namespace moe
{

// A position in a ring of SLOTS slots. A reader starts with phase 0. A writer starts with phase 1, so that
// its first round finds every slot free.
template <int SLOTS> struct ring_position {
    uint32_t slot = 0, phase;
    MOE_DEVICE explicit ring_position(uint32_t first_phase) : phase(first_phase)
    {
    }
    MOE_DEVICE void advance()
    {
        if (++slot == SLOTS) {
            slot = 0;
            phase ^= 1;
        }
    }
    MOE_DEVICE void advance(uint32_t steps)
    {
        const uint32_t position = slot + steps;
        phase ^= (position / SLOTS) & 1;
        slot = position % SLOTS;
    }
};

} // namespace moe
