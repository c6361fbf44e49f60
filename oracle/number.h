/* Storage types on the host, written independently of the library: conversion through exact arithmetic on
 * doubles, and seeded random numbers. */
#ifndef ORACLE_NUMBER_H
#define ORACLE_NUMBER_H

#include <smoe.h>

/* Bytes of an element. */
size_t oracle_type_bytes(smoe_type type);

/* x rounded to the nearest value of a type, ties to even; NaN and infinities are unchanged. For integer
 * types: x itself. */
double oracle_round_to(double x, smoe_type type);

/* to[i] = from[i] rounded to the type and stored; from[i] = the value stored. */
void oracle_store(void *to, smoe_type type, const double *from, size_t count);
void oracle_load(double *to, smoe_type type, const void *from, size_t count);

/* A seeded stream (splitmix64): the same numbers on every machine. */
typedef struct oracle_random {
    uint64_t state;
} oracle_random;

uint64_t oracle_random_bits(oracle_random *random);
double oracle_random_uniform(oracle_random *random);                             /* [0, 1) */
double oracle_random_normal(oracle_random *random);                              /* N(0, 1) */
int64_t oracle_random_integer(oracle_random *random, int64_t low, int64_t high); /* low..high */

/* Zeroed memory for the oracle's tensors. If there is none, the program ends with a message. Free with
 * free(). */
void *oracle_alloc(size_t count, size_t bytes);

#endif
