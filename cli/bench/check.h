/* Checks the results of the bench: compares the rows of O and dX of some tokens with fp64. The oracle
 * computes each token from the inputs, routing included. Only one thing is taken from the library's plan:
 * which pairs rounding kept or added. */
#ifndef CLI_BENCH_CHECK_H
#define CLI_BENCH_CHECK_H

#include "cli/bench/case.h"

/* As many tokens as CHECK_PRODUCTS multiplications pay for (3 K n d a token), within these limits. */
enum { CHECK_TOKENS_LEAST = 4, CHECK_TOKENS_MOST = 32, CHECK_PRODUCTS = 100 * 1000 * 1000 };

typedef struct bench_errors {
    double forward, backward; // relative Frobenius error over the sampled rows of O and of dX; NaN: not run
} bench_errors;

/* After a forward and, when the settings have one, a backward. */
bool bench_check(const bench_case *c, bench_errors *errors, error *err);

#endif
