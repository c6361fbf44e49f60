// The position of a reader or writer in a ring of stages.
#pragma once
#include "common/ptx.cuh"

namespace moe
{

// A position in a ring of STAGES stages. Who reads starts with phase 0, who writes with phase 1: its first
// round finds every stage free.
template <int STAGES> struct ring_position {
    uint32_t stage = 0, phase;
    SMOE_DEVICE explicit ring_position(uint32_t first_phase) : phase(first_phase)
    {
    }
    SMOE_DEVICE void advance()
    {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
    SMOE_DEVICE void advance(uint32_t steps)
    {
        const uint32_t position = stage + steps;
        phase ^= (position / STAGES) & 1;
        stage = position % STAGES;
    }
};

} // namespace moe
