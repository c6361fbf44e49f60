/* See compare.h. */
#include "oracle/compare.h"

#include <math.h>

double oracle_relative_error(const double *got, const double *want, size_t count)
{
    double difference = 0.0, norm = 0.0;
    for (size_t i = 0; i < count; i++) {
        if (isnan(want[i]) && isnan(got[i])) continue;
        if (isinf(want[i]) && got[i] == want[i]) continue;
        const double d = got[i] - want[i];
        if (!isfinite(d)) return INFINITY;
        difference += d * d;
        norm += want[i] * want[i];
    }
    if (difference == 0.0) return 0.0;
    return norm > 0.0 ? sqrt(difference / norm) : INFINITY;
}

size_t oracle_differing(const double *got, const double *want, size_t count)
{
    size_t differing = 0;
    for (size_t i = 0; i < count; i++)
        if (got[i] != want[i] && !(isnan(got[i]) && isnan(want[i]))) differing++;
    return differing;
}
