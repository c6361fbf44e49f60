/* Median, least and 99th percentile (nearest rank) of measured times. */
#ifndef CLI_SAMPLES_H
#define CLI_SAMPLES_H

#include <stddef.h>

typedef struct summary {
    double median, least, p99;
} summary;

/* Sorts the values. All NaN when there are none. */
summary summarize(double *values, size_t count);

#endif
