/* The learning rate over a run: linear warm-up to 1, then a cosine down to `end`. A pure function of the
 * progress through the run, 0 at the first step and 1 at the end. */
#ifndef TRAIN_SCHEDULE_H
#define TRAIN_SCHEDULE_H

#include <math.h>

static inline double schedule_factor(double progress, double warmup, double end)
{
    const double pi = 3.14159265358979323846;
    if (warmup > 0.0 && progress <= warmup) return progress / warmup; // also if the warm-up is the whole run
    if (progress >= 1.0) return end;
    return end + (1.0 - end) * 0.5 * (1.0 + cos(pi * (progress - warmup) / (1.0 - warmup)));
}

#endif
