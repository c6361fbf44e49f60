/* The launches of a pass: how many each stage has, and what each kernel takes by itself, again and again in a
 * graph of its own, so that no gap between launches counts. What is left of the pass's time is such gaps. */
#ifndef CLI_BENCH_ALONE_H
#define CLI_BENCH_ALONE_H

#include "cli/bench/cuda_graph.h"
#include "cli/bench/report.h"
#include "cli/bench/sustained.h"
#include "cli/bench/yardstick_cuda.h"

#ifdef SMOE_HAVE_CUDA

/* Adds the launches of a recorded pass to result->launches. */
void bench_count_launches(const cuda_graph *pass, bench_result *result);

/* Adds the milliseconds of its kernels to result->alone. Before each kernel, `before` (its launch) and the
 * pass up to that kernel are run: the stages share scratch, so what a kernel reads is there only
 * then. */
bool bench_time_alone(const cuda_graph *pass, const sustained *how, const sustained_job *before,
                      bench_result *result, error *err);

/* result->alone_copy of a stage: a copy that moves as many bytes, repeated as often in a row. A longer copy
 * would be faster for each byte, because start and end are a smaller part of its time. */
bool bench_time_copy_alone(const cuda_yardstick *yardstick, smoe_stage stage, const sustained *how,
                           bench_result *result, error *err);

#endif
#endif
