/* One problem of `smoe bench` on a device: its buffers, and the calls of a forward and a backward.
 *
 * Scope "layer" goes from tokens and the router's weight through the whole layer, and back to the router's
 * gradient. Scope "experts" starts from given routing, plan included, and goes back to its gradient. With
 * entry FROM_TOPK these are a given top-K and dS. With entry FROM_LOGITS, and always with rounding, they are
 * given logits and dlogits; route and round run before the time is taken. */
#ifndef CLI_BENCH_CASE_H
#define CLI_BENCH_CASE_H

#include "cli/bench/data.h"
#include "cli/support/kernels.h"
#include "cli/support/stage_clock.h"
#include "harness/run.h"

typedef enum bench_scope { SCOPE_EXPERTS, SCOPE_LAYER } bench_scope;

typedef struct bench_settings {
    const device *device;
    smoe_kernels kernels;
    bench_scope scope;
    smoe_compute compute;
    smoe_entry entry; // of scope experts: FROM_TOPK or FROM_LOGITS
    bool backward;    // the backward is run as well
    int threads;      // 0: OpenMP's default
    bool no_bound;    // the yardstick is left out
    bool alone;       // cuda: every kernel of a pass is timed by itself, too
    double settle;    // cuda: seconds that each job runs before it is timed
} bench_settings;

typedef struct bench_case {
    bench_settings settings;
    run run;      // layer, sizes, context, buffers and arguments
    void *stream; // the stream on which everything is enqueued
    stage_clock clock;
    int threads;
} bench_case;

/* Makes the case, or says why not: 2 for a layer the library refuses by its shape, 3 for one it does not
 * support, and for too little memory (what is needed and what there is). */
bool bench_case_make(bench_case *made, const bench_settings *settings, const problem_options *problem,
                     const bench_shape *shape, error *err);
void bench_case_free(bench_case *freed);

/* Enqueues what runs before the time is taken, and the passes. Their stages set marks unless the
 * clock is paused. */
bool bench_enqueue_prepare(bench_case *c, error *err);
bool bench_enqueue_forward(bench_case *c, error *err);
bool bench_enqueue_backward(bench_case *c, error *err);
bool bench_enqueue_quantize(bench_case *c, error *err); // with fp8: the weights

/* The same, and waits for it. Times since the reset are in the clock. *ms (may be NULL) is the time of the
 * pass.
 */
bool bench_prepare(bench_case *c, error *err);
bool bench_prepared_apart(const bench_case *c); // does anything run before the time is taken?
bool bench_forward(bench_case *c, double *ms, error *err);
bool bench_backward(bench_case *c, double *ms, error *err);
bool bench_quantize(bench_case *c, double *ms, error *err); // without fp8 nothing

/* counts (E): rows of each expert in the plan of the last forward. */
bool bench_read_counts(bench_case *c, int32_t *counts, error *err);

/* saved and scratch filled with a pattern that no result has (BENCH_POISON bytes: -1.7e38 as f32 and bf16,
 * NaN as f16), outputs with NaN. */
enum { BENCH_POISON = 0xFE };
bool bench_poison(bench_case *c, error *err);

/* Number of bytes up to the last one that is not poison any more. */
bool bench_touched(const buffer *looked_at, uint64_t *bytes, error *err);

/* Are all canaries in place? The error names the buffer of the first that is not. */
bool bench_canaries(bench_case *c, error *err);

#endif
