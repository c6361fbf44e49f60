/* The times of a case on a GPU: passes as CUDA graphs, stages on a plain stream, the yardstick's GEMMs and
 * copy, each sustained and in turn. docs/benchmarks.md says how. */
#ifndef CLI_BENCH_CUDA_H
#define CLI_BENCH_CUDA_H

#include "cli/bench/report.h"

#ifdef SMOE_HAVE_CUDA

/* After a first step. Fills result->times (the caller frees them) and result->repeats; rows: R of the plan.
 * repeats 0: as many as fit in `seconds`. */
bool bench_cuda_times(bench_case *c, int64_t rows, int64_t repeats, double seconds, bench_result *result,
                      error *err);

#endif
#endif
