/* The error of a result, relative to the norm of its reference. */
#ifndef ORACLE_COMPARE_H
#define ORACLE_COMPARE_H

#include <stddef.h>

/* |got - want| / |want| in the Frobenius norm. If an element of want is NaN, that of got must be NaN too, and
 * the element is left out. The result is infinity if a NaN or an infinity is in got alone, or if want is all
 * zero and got is not. */
double oracle_relative_error(const double *got, const double *want, size_t count);

/* The number of elements with different values. Two NaNs count as equal, and so do 0 and -0. */
size_t oracle_differing(const double *got, const double *want, size_t count);

#endif
