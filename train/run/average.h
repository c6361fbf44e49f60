/* A running average in which newer values count more. It has no first value that it would have to forget:
 * the weights of the values so far are divided out. */
#ifndef TRAIN_AVERAGE_H
#define TRAIN_AVERAGE_H

#include <math.h>

typedef struct average {
    double sum, weight; // zeroed: no value yet
} average;

static inline void average_add(average *a, double value)
{
    const double newest = 0.05; // as many values count as a mean over 39
    a->sum = (1.0 - newest) * a->sum + newest * value;
    a->weight = (1.0 - newest) * a->weight + newest;
}

static inline double average_of(const average *a)
{
    return a->weight > 0.0 ? a->sum / a->weight : (double)NAN;
}

#endif
