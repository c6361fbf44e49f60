/* How far a result is from its reference, relative to the reference's norm. */
#ifndef ORACLE_COMPARE_H
#define ORACLE_COMPARE_H

#include <stddef.h>

/* |got - want| / |want| in the Frobenius norm. Where want is NaN, got has to be NaN, and the element counts
 * no further. Infinity when a NaN or an infinity is in got alone, or when want is all zero and got is not. */
double oracle_relative_error(const double *got, const double *want, size_t count);

/* Elements that are not the same value (two NaNs are, and so are 0 and -0). */
size_t oracle_differing(const double *got, const double *want, size_t count);

#endif
