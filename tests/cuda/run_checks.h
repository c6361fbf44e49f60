/* Compares the cuda backend with the oracle, case by case, with the functions of harness/. Buffers are
 * poisoned and lie between canaries. Every case is repeated and must give the same bits. The programs that
 * include this header are tables of cases.
 *
 *   PROGRAM [NAME]          cases whose name contains NAME
 *   PROGRAM --shard I N     every N-th case from I on
 *
 * REPEATS in the environment: repeats of every case. Exit 0 all right, 1 something wrong, 77 no device. */
#ifndef SMOE_TESTS_CUDA_RUN_CHECKS_H
#define SMOE_TESTS_CUDA_RUN_CHECKS_H

#include "harness/check.h"

typedef struct gpu_case {
    const char *name;
    smoe_layer layer; /* a field that is 0 gets its default, see run_checks.c */
    oracle_draw draw; /* if it draws integers, every element must be equal, unless `inexact` is set */
    bool inexact;     /* the activation's results for these integers are not integers */
    bool forward_only;
    bool other_ways; /* another number of chunks, without dlogits and drouter_bias, must give the same bits */
} gpu_case;

/* The counts (E) for ORACLE_COUNTS: below, at and above multiples of 64 up to 320, as far as the tokens
 * suffice. The last expert has the tokens that are left. */
enum { EDGE_EXPERTS = 16 };
void edge_counts(int64_t tokens, int64_t counts[EDGE_EXPERTS]);

/* The i-th case of `count`. */
typedef gpu_case make_case(size_t i);

int run_checks(int argc, char **argv, make_case *make, size_t count, int repeats);

#endif
