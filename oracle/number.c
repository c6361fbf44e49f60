/* Storage types by arithmetic: a value is rounded to p significant bits with frexp, rint and ldexp, and its
 * bits are built from sign, exponent and fraction. */
#include "oracle/number.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A binary floating-point type: significant bits (with the leading one), least and greatest exponent. */
typedef struct format {
    int bits, min_exponent, max_exponent, storage_bits;
} format;

static const format f32 = {24, -126, 127, 32}, bf16 = {8, -126, 127, 16}, f16 = {11, -14, 15, 16};

static const format *format_of(smoe_type type)
{
    switch (type) {
    case SMOE_TYPE_F32: return &f32;
    case SMOE_TYPE_BF16: return &bf16;
    case SMOE_TYPE_F16: return &f16;
    case SMOE_TYPE_I32:
    case SMOE_TYPE_I64: return NULL;
    }
    return NULL;
}

size_t oracle_type_bytes(smoe_type type)
{
    const format *f = format_of(type);
    return f ? (size_t)f->storage_bits / 8 : type == SMOE_TYPE_I32 ? 4 : 8;
}

double oracle_round_to(double x, smoe_type type)
{
    const format *f = format_of(type);
    if (!f || !isfinite(x) || x == 0.0) return x;
    int exponent;
    frexp(x, &exponent); /* |x| = 0.5..1 times 2^exponent */
    const int leading = exponent - 1 < f->min_exponent ? f->min_exponent : exponent - 1;
    const int unit = leading - (f->bits - 1); /* exponent of the last place */
    const double rounded = ldexp(nearbyint(ldexp(x, -unit)), unit);
    return fabs(rounded) >= ldexp(1.0, f->max_exponent + 1) ? copysign(INFINITY, x) : rounded;
}

static uint64_t encode(double x, const format *f, smoe_type type)
{
    const int fraction_bits = f->bits - 1, exponent_bits = f->storage_bits - f->bits;
    const uint64_t sign = (uint64_t)(signbit(x) ? 1 : 0) << (f->storage_bits - 1);
    const uint64_t all_ones = (((uint64_t)1 << exponent_bits) - 1) << fraction_bits;
    const double value = fabs(oracle_round_to(x, type));
    if (isnan(x)) return all_ones | (uint64_t)1 << (fraction_bits - 1);
    if (isinf(value)) return sign | all_ones;
    if (value < ldexp(1.0, f->min_exponent))
        return sign | (uint64_t)ldexp(value, fraction_bits - f->min_exponent);
    int exponent;
    frexp(value, &exponent);
    const uint64_t fraction = (uint64_t)ldexp(value, fraction_bits - (exponent - 1));
    const uint64_t biased = (uint64_t)(exponent - 1 + f->max_exponent);
    return sign | biased << fraction_bits | (fraction - ((uint64_t)1 << fraction_bits));
}

static double decode(uint64_t bits, const format *f)
{
    const int fraction_bits = f->bits - 1, exponent_bits = f->storage_bits - f->bits;
    const uint64_t fraction = bits & (((uint64_t)1 << fraction_bits) - 1);
    const int biased = (int)(bits >> fraction_bits & (((uint64_t)1 << exponent_bits) - 1));
    const double sign = bits >> (f->storage_bits - 1) & 1 ? -1.0 : 1.0;
    if (biased == (1 << exponent_bits) - 1) return fraction ? NAN : sign * INFINITY;
    if (biased == 0) return sign * ldexp((double)fraction, f->min_exponent - fraction_bits);
    const double significand = (double)(fraction | (uint64_t)1 << fraction_bits);
    return sign * ldexp(significand, biased - f->max_exponent - fraction_bits);
}

void oracle_store(void *to, smoe_type type, const double *from, size_t count)
{
    const format *f = format_of(type);
    for (size_t i = 0; i < count; i++) {
        if (type == SMOE_TYPE_I64) {
            ((int64_t *)to)[i] = (int64_t)from[i];
        } else if (type == SMOE_TYPE_I32) {
            ((int32_t *)to)[i] = (int32_t)from[i];
        } else if (f->storage_bits == 16) {
            ((uint16_t *)to)[i] = (uint16_t)encode(from[i], f, type);
        } else {
            ((uint32_t *)to)[i] = (uint32_t)encode(from[i], f, type);
        }
    }
}

void oracle_load(double *to, smoe_type type, const void *from, size_t count)
{
    const format *f = format_of(type);
    for (size_t i = 0; i < count; i++) {
        if (type == SMOE_TYPE_I64) {
            to[i] = (double)((const int64_t *)from)[i];
        } else if (type == SMOE_TYPE_I32) {
            to[i] = (double)((const int32_t *)from)[i];
        } else if (f->storage_bits == 16) {
            to[i] = decode(((const uint16_t *)from)[i], f);
        } else {
            to[i] = decode(((const uint32_t *)from)[i], f);
        }
    }
}

uint64_t oracle_random_bits(oracle_random *random)
{
    uint64_t z = random->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

double oracle_random_uniform(oracle_random *random)
{
    return (double)(oracle_random_bits(random) >> 11) * 0x1p-53;
}

double oracle_random_normal(oracle_random *random)
{
    const double radius = sqrt(-2.0 * log(1.0 - oracle_random_uniform(random)));
    return radius * cos(6.283185307179586 * oracle_random_uniform(random));
}

int64_t oracle_random_integer(oracle_random *random, int64_t low, int64_t high)
{
    return low + (int64_t)(oracle_random_bits(random) % (uint64_t)(high - low + 1));
}

void *oracle_alloc(size_t count, size_t bytes)
{
    void *memory = calloc(count ? count : 1, bytes);
    if (!memory) {
        fprintf(stderr, "oracle: out of memory (%zu elements of %zu bytes)\n", count, bytes);
        exit(3);
    }
    return memory;
}
