/* Medians of measured values, and how far they can be trusted. */
#ifndef BENCH_MEDIAN_H
#define BENCH_MEDIAN_H

#include <math.h>
#include <stdlib.h>

typedef struct middle {
    double median, error; /* error: its standard error; NAN for fewer than 2 values */
} middle;

static inline int compare_doubles(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The value below which the share p of a large sample would be; values[count] are in ascending order. */
static inline double quantile_of(const double *values, int count, double p)
{
    const double at = fmin(fmax(p * (count + 1) - 1, 0), count - 1);
    const int below = (int)at, above = below + 1 < count ? below + 1 : below;
    return values[below] + (at - below) * (values[above] - values[below]);
}

/* Sorts values[count], count >= 1. The standard error follows from the quartiles: for normally distributed
 * values it is 1.2533 sigma / sqrt(count), and sigma is the distance of the quartiles / 1.349. One round that
 * something disturbed changes neither much. */
static inline middle middle_of(double *values, int count)
{
    qsort(values, (size_t)count, sizeof *values, compare_doubles);
    const double range = quantile_of(values, count, 0.75) - quantile_of(values, count, 0.25);
    const middle m = {quantile_of(values, count, 0.5),
                      count > 1 ? 1.2533 / 1.349 * range / sqrt(count) : (double)NAN};
    return m;
}

#endif
