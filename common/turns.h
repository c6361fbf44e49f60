/* The order in which jobs that are compared take turns. */
#ifndef COMMON_TURNS_H
#define COMMON_TURNS_H

#include <stdint.h>

enum { TURNS_MOST = 64 }; /* jobs */

/* The next number of splitmix64. */
static inline uint64_t turns_random(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

/* Which of `count` jobs (1 to TURNS_MOST) has turn i of a round (round >= 0). The order is drawn at random
 * for every two rounds, and the second of the two has the reverse order. So a steady change of the clock
 * cancels in two rounds. In a fixed cycle a job would always follow the same one, which changes the GPU's
 * clock, and this effect would not average out. seed: other seeds, for other problems, give other orders. */
static inline int turn_of(uint64_t seed, int round, int i, int count)
{
    uint8_t order[TURNS_MOST];
    uint64_t random = seed ^ (uint64_t)(round / 2) << 32;
    for (int job = 0; job < count; job++) {
        const int at = (int)(turns_random(&random) % (uint64_t)(job + 1));
        order[job] = order[at];
        order[at] = (uint8_t)job;
    }
    return order[round % 2 ? count - 1 - i : i];
}

#endif
