/* See f8.h. */
#include "oracle/f8.h"

#include <math.h>

enum { FRACTION_BITS = 13, OF_INSTRUCTION = 32, LONGEST_SUM = 1536, PART = 1024, NO_EXPONENT = -2000 };

double oracle_f8_round(double x)
{
    if (isnan(x) || x == 0.0) return x;
    if (fabs(x) >= 448.0) return copysign(448.0, x);
    int exponent;
    frexp(x, &exponent); /* |x| = 0.5..1 times 2^exponent */
    const int unit = (exponent < -5 ? -5 : exponent) - 4;
    return ldexp(nearbyint(ldexp(x, -unit)), unit);
}

double oracle_f8_scale(double largest)
{
    if (!isfinite(largest)) return 1.0;
    int k = -126;
    while (ldexp(448.0, k) < largest) k++;
    return ldexp(1.0, k);
}

double oracle_f8_quantize(const double *from, int64_t count, double *to)
{
    double largest = 0.0;
    for (int64_t i = 0; i < count; i++) {
        const double magnitude = fabs(from[i]);
        if (!(magnitude <= largest)) largest = magnitude;
        if (!isfinite(largest)) break;
    }
    const double scale = oracle_f8_scale(largest);
    for (int64_t i = 0; i < count; i++)
        to[i] = isfinite(largest) ? oracle_f8_round(from[i] / scale) : (double)NAN;
    return scale;
}

/* The exponent of an e4m3 number, -6 for subnormal ones, or of any other if `least` is lower. */
static int exponent_of(double x, int least)
{
    if (x == 0.0) return NO_EXPONENT;
    const int exponent = ilogb(x);
    return exponent < least ? least : exponent;
}

static double cut(double x, int unit)
{
    return ldexp(trunc(ldexp(x, -unit)), unit);
}

/* sum plus up to 32 products, by one instruction */
static double add_products(double sum, oracle_f8_line a, oracle_f8_line b, int64_t first, int64_t end)
{
    int most = exponent_of(sum, -126);
    double exact = sum;
    for (int64_t i = first; i < end; i++) {
        const double x = a.at[i * a.step], y = b.at[i * b.step];
        exact += x * y;
        if (x == 0.0 || y == 0.0) continue;
        const int exponent = exponent_of(x, -6) + exponent_of(y, -6);
        if (exponent > most) most = exponent;
    }
    if (most == NO_EXPONENT || !isfinite(exact)) return exact;
    double total = cut(sum, most - FRACTION_BITS);
    for (int64_t i = first; i < end; i++)
        total += cut(a.at[i * a.step] * b.at[i * b.step], most - FRACTION_BITS);
    return total == 0.0 ? 0.0 : cut(total, exponent_of(total, -126) - FRACTION_BITS);
}

double oracle_f8_sum(oracle_f8_line a, oracle_f8_line b, int64_t count, bool short_sums)
{
    double total = 0.0;
    if (!short_sums) {
        for (int64_t i = 0; i < count; i++) total += a.at[i * a.step] * b.at[i * b.step];
        return total;
    }
    const int64_t part = count > LONGEST_SUM ? PART : count;
    for (int64_t start = 0; start < count; start += part) {
        const int64_t end = start + part < count ? start + part : count;
        double sum = 0.0;
        for (int64_t i = start; i < end; i += OF_INSTRUCTION)
            sum = add_products(sum, a, b, i, i + OF_INSTRUCTION < end ? i + OF_INSTRUCTION : end);
        total += sum;
    }
    return total;
}
