/* Cases of a check of the cuda backend against the oracle, on the harness: buffers poisoned and between
 * canaries, every case repeated with the same bits. The programs of this folder are tables of cases.
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
    smoe_layer layer; /* what is 0 takes its default, see run_checks.c */
    oracle_draw draw; /* with integers every element has to be the same, unless inexact */
    bool inexact;     /* the integers meet an activation that leaves them */
    bool forward_only;
    bool other_ways; /* other chunks, and no dlogits and drouter_bias, have to give the same bits too */
} gpu_case;

/* counts (E) for ORACLE_COUNTS: around every multiple of 64 up to 320, for as many tokens as there are. */
enum { EDGE_EXPERTS = 16 };
void edge_counts(int64_t tokens, int64_t counts[EDGE_EXPERTS]);

/* The i-th case of `count`. */
typedef gpu_case make_case(size_t i);

int run_checks(int argc, char **argv, make_case *make, size_t count, int repeats);

#endif
