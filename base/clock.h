/* The monotonic clock in seconds, with a resolution of a nanosecond. Under LLVM's OpenMP omp_get_wtime has
 * only microseconds, and the smallest GEMMs of `smoe bench` take less than one. */
#ifndef TRAIN_CLOCK_H
#define TRAIN_CLOCK_H

#include <time.h>

static inline double clock_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

#endif
