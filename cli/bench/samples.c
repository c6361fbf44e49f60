/* See samples.h. */
#include "cli/bench/samples.h"

#include <math.h>
#include <stdlib.h>

static int rising(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

summary summarize(double *values, size_t count)
{
    if (count == 0) return (summary){NAN, NAN, NAN};
    qsort(values, count, sizeof *values, rising);
    const size_t half = count / 2, last = (size_t)ceil(0.99 * (double)count) - 1;
    return (summary){.median = count % 2 ? values[half] : 0.5 * (values[half - 1] + values[half]),
                     .least = values[0],
                     .p99 = values[last]};
}
