/* Numbers of e4m3, their scales, and sums of their products, written independently of the library.
 *
 * A group of numbers has one scale, a power of two: the least one that brings the largest magnitude to at
 * most 448, but not below 2^-126. */
#ifndef ORACLE_F8_H
#define ORACLE_F8_H

#include "oracle/oracle.h"

enum { ORACLE_F8_GROUP_A = 128, ORACLE_F8_GROUP_DH = 256 }; /* features that have a scale in a row */

/* The nearest e4m3 number, ties to even; beyond 448: 448; NaN stays NaN. */
double oracle_f8_round(double x);

/* The scale of a group whose largest magnitude this is; 1 for a NaN or inf. */
double oracle_f8_scale(double largest);

/* to (count) = from / scale, rounded; returns the scale. A group with a NaN or inf gives NaN. */
double oracle_f8_quantize(const double *from, int64_t count, double *to);

/* The sum over i of a[i step_a] b[i step_b], numbers of e4m3. With short_sums as Hopper's wgmma adds them
 * (from measurements by others: arXiv 2512.07004): 32 products and the sum so far are each cut to a multiple
 * of 2^-13 of the largest power of two among them (that of a product is the product of its factors'), then
 * added, and the sum is cut to 13 bits after its leading one. A sum of more than 1536 products is made in
 * parts of 1024, which are added exactly. */
typedef struct oracle_f8_line {
    const double *at;
    int64_t step;
} oracle_f8_line;
double oracle_f8_sum(oracle_f8_line a, oracle_f8_line b, int64_t count, bool short_sums);

#endif
