/* The order in which jobs that are compared take turns. */
#ifndef BASE_TURNS_H
#define BASE_TURNS_H

#include "base/random.h"

enum { TURNS_MOST = 64 }; /* jobs */

/* Which of `count` jobs (1 to TURNS_MOST) has turn i of a round (round >= 0). The order is drawn at random
 * for every two rounds, and the second of the two has the reverse order. So a steady change of the clock
 * cancels in two rounds. In a fixed cycle a job would always follow the same one, which changes the GPU's
 * clock, and this effect would not average out. seed: other seeds, for other problems, give other orders. */
static inline int turn_of(uint64_t seed, int round, int i, int count)
{
    uint8_t order[TURNS_MOST];
    const uint64_t stream = random_bits(seed, (uint64_t)(round / 2));
    for (int job = 0; job < count; job++) {
        const int at = (int)(random_bits(stream, (uint64_t)job) % (uint64_t)(job + 1));
        order[job] = order[at];
        order[at] = (uint8_t)job;
    }
    return order[round % 2 ? count - 1 - i : i];
}

#endif
