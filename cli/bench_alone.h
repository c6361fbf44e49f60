/* The launches of a pass: how many each stage has, and what each kernel takes by itself, again and again in a
 * graph of its own, so that no gap between launches counts. What is left of the pass's time is such gaps. */
#ifndef CLI_BENCH_ALONE_H
#define CLI_BENCH_ALONE_H

#include "cli/bench_report.h"
#include "cli/cuda_graph.h"
#include "cli/sustained.h"

#ifdef SMOE_HAVE_CUDA

/* Adds the launches of a recorded pass to result->launches. */
void bench_count_launches(const cuda_graph *pass, bench_result *result);

/* Adds the milliseconds of its kernels to result->alone. `restore` (its launch) is run ahead of every kernel:
 * a kernel that changes what it reads would find something else the second time in later ones. */
bool bench_time_alone(const cuda_graph *pass, const sustained *how, const sustained_job *restore,
                      bench_result *result, error *err);

#endif
#endif
