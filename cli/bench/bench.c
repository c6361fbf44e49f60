/* `smoe bench`: measures the times of a layer, of its stages and of a reference, the used memory compared
 * with the predicted one, and errors against fp64. docs/benchmarks.md describes how. */
#include "base/clock.h"
#include "cli/bench/cuda.h"
#include "cli/bench/options.h"
#include "cli/bench/yardstick.h"
#include "cli/support/cli.h"
#include "harness/check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LEAST_REPEATS = 5 };

/* ---- Progress ---- */

static void progress(const char *name, const char *what, size_t done)
{
    if (!isatty(STDERR_FILENO)) return;
    fprintf(stderr, "\r\033[K%s: %s", name, what);
    if (done > 0) fprintf(stderr, " %zu", done);
    fflush(stderr);
}

static void progress_end(void)
{
    if (isatty(STDERR_FILENO)) fputs("\r\033[K", stderr);
}

/* ---- Measuring one problem ---- */

/* Threads of OpenMP and OpenBLAS spin for some milliseconds when their work is done; the next measurement
 * must not share the processors with them. */
static void rest(void)
{
    const struct timespec while_they_spin = {0, 50 * 1000 * 1000};
    nanosleep(&while_they_spin, NULL);
}

/* The first step, on poisoned buffers: high-water marks, canaries, errors. It also warms up the library. */
static bool measure_memory(bench_case *c, bench_result *result, error *err)
{
    uint64_t saved = 0, forward = 0, backward = 0;
    const bool router = c->settings.scope == SCOPE_LAYER;
    if (!bench_poison(c, err) || !bench_prepare(c, err) || !bench_forward(c, NULL, err)) return false;
    if (c->settings.backward && !bench_backward(c, NULL, err)) return false;
    if (!bench_touched(slot_memory(&c->run, SLOT_SAVED), &saved, err) ||
        !bench_touched(slot_memory(&c->run, SLOT_SCRATCH_FORWARD), &forward, err) ||
        !bench_touched(slot_memory(&c->run, SLOT_SCRATCH_BACKWARD), &backward, err) ||
        !bench_canaries(c, err))
        return false;
    result->peak = pass_peaks(&c->run.layer, router, (double)saved, (double)forward, (double)backward);
    result->predicted =
        pass_peaks(&c->run.layer, router, (double)c->run.sizes.saved_buffer_bytes,
                   (double)c->run.sizes.scratch_forward_bytes, (double)c->run.sizes.scratch_backward_bytes);
    return bench_check(c, &result->errors, err);
}

static bool measure_library(bench_case *c, bench_times *times, error *err)
{
    if (!bench_prepare(c, err)) return false;
    stage_clock_reset(&c->clock);
    if (!bench_forward(c, &times->forward, err)) return false;
    if (c->settings.backward && !bench_backward(c, &times->backward, err)) return false;
    times->layer = times->forward + times->backward;
    if (!bench_quantize(c, &times->quantize, err)) return false;
    stage_clock_add(&c->clock, times->stage);
    return true;
}

static bool measure_once(bench_case *c, const yardstick *y, bench_times *times, error *err)
{
    memset(times, 0, sizeof *times);
    rest();
    if (!measure_library(c, times, err)) return false;
    if (!y) {
        for (int i = 0; i < STAGE_COUNT; i++) times->dense[i] = NAN;
        times->copy = NAN;
        return true;
    }
    rest();
    yardstick_gemms(y, true, c->settings.backward, times->dense);
    rest();
    times->copy = yardstick_copy(y);
    return true;
}

static bool enough(const bench_options *options, size_t repeats, double started)
{
    if (options->repeats > 0) return repeats >= (size_t)options->repeats;
    if (repeats >= MOST_REPEATS) return true;
    return repeats >= LEAST_REPEATS && clock_seconds() - started >= options->seconds;
}

static bool measure_turns(const bench_options *options, bench_case *c, const yardstick *y,
                          bench_result *result, error *err)
{
    const size_t most = options->repeats > 0 ? (size_t)options->repeats : MOST_REPEATS;
    bench_times warm_up;
    result->times = calloc(most, sizeof *result->times);
    if (!result->times) return fail(err, ERROR_RUNTIME, "out of memory for the times");
    if (!measure_once(c, y, &warm_up, err)) return false;
    const double started = clock_seconds();
    while (!enough(options, result->repeats, started)) {
        progress(result->shape->name, "repeat", result->repeats + 1);
        if (!measure_once(c, y, &result->times[result->repeats], err)) return false;
        result->repeats++;
    }
    return true;
}

/* On the host: steps of the library and of the reference in turn. counts (E): of the plan. */
static bool measure_on_host(const bench_options *options, bench_case *c, const int32_t *counts,
                            bench_result *result, error *err)
{
    yardstick y = {0};
    if (c->settings.no_bound) return measure_turns(options, c, NULL, result, err);
    if (!yardstick_make(&y, &c->run.layer, counts, c->threads))
        return fail(err, ERROR_RUNTIME, "out of memory for the yardstick");
    const bool good = measure_turns(options, c, &y, result, err);
    yardstick_free(&y);
    return good;
}

static bool measure_times(const bench_options *options, bench_case *c, const int32_t *counts,
                          bench_result *result, error *err)
{
#ifdef SMOE_HAVE_CUDA
    if (c->settings.device->backend == SMOE_BACKEND_CUDA) {
        int64_t rows = 0;
        for (int64_t e = 0; e < c->run.layer.experts; e++) rows += counts[e];
        progress(result->shape->name, "measuring", 0);
        return bench_cuda_times(c, rows, options->repeats, options->seconds, result, err);
    }
#endif
    return measure_on_host(options, c, counts, result, err);
}

/* *checked: the clock when the first step and its check are done. */
static bool measure(const bench_options *options, bench_case *c, bench_result *result, double *checked,
                    error *err)
{
    int32_t *counts = malloc((size_t)c->run.layer.experts * sizeof *counts);
    bool good = counts != NULL;
    if (!good) fail(err, ERROR_RUNTIME, "out of memory for the counts");
    good = good && measure_memory(c, result, err) && bench_read_counts(c, counts, err);
    *checked = clock_seconds();
    good = good && measure_times(options, c, counts, result, err) && bench_canaries(c, err);
    free(counts);
    return good;
}

static bool check_errors(const bench_result *result, error *err)
{
    const double f8_limit = 0.12; // from fp64 that does not quantise
    const smoe_layer *l = &result->c->run.layer;
    const double limit = l->compute ? f8_limit : check_cap(l);
    const double worst = fmax(result->errors.forward, result->errors.backward);
    if (worst <= limit) return true;
    return fail(err, 1, "max_rel_err of O is %.2e, of dX %.2e; the limit for %s is %.0e",
                result->errors.forward, result->errors.backward, layer_compute_name(l), limit);
}

/* What a problem's seconds were spent on: one line, for logs. */
static void log_seconds(const bench_options *options, const bench_shape *shape, const double at[4])
{
    const problem_options *p = &options->problem;
    if (options->format == TABLE_ALIGNED || isatty(STDERR_FILENO)) return;
    fprintf(stderr, "%s %s %s %s chunks %d: %.1f s for inputs, %.1f for step and check, %.1f for times\n",
            shape->suite, shape->name, routing_name(p->routing), rounding_name(p->rounding), (int)p->chunks,
            at[1] - at[0], at[2] - at[1], at[3] - at[2]);
}

/* A case that was made: what it takes, its rows included. */
static bool bench_made_case(const bench_options *options, bench_case *c, const bench_shape *shape,
                            double started, table *t, error *err)
{
    bench_result result = {.c = c,
                           .problem = &options->problem,
                           .shape = shape,
                           .format = options->format,
                           .passes = options->passes,
                           .stage = options->stage};
    double at[4] = {started, clock_seconds()};
    progress_end();
    progress(shape->name, "first step", 0);
    bool good = measure(options, c, &result, &at[2], err);
    at[3] = clock_seconds();
    progress_end();
    if (good) {
        log_seconds(options, shape, at);
        bench_report(t, &result);
        good = check_errors(&result, err);
    }
    free(result.times);
    return good;
}

/* One problem, its rows included. */
static bool bench_problem(const bench_options *options, const bench_shape *shape, table *t, error *err)
{
    const double started = clock_seconds();
    bench_case *c = calloc(1, sizeof *c);
    if (!c) return fail(err, ERROR_RUNTIME, "out of memory");
    progress(shape->name, "making inputs", 0);
    bool good = bench_case_make(c, &options->settings, &options->problem, shape, err);
    if (good) {
        good = bench_made_case(options, c, shape, started, t, err);
        bench_case_free(c);
    }
    progress_end();
    free(c);
    return good;
}

/* One problem with every routing, rounding and number of chunks. If one fails, it is named on stderr and the
 * others still run. The first failure's status. */
static int bench_variants(const char *program, bench_options *options, const bench_shape *shape, table *t)
{
    problem_options *p = &options->problem;
    const int count = p->routings.count * p->roundings.count * p->chunk_counts.count;
    int status = 0;
    for (int i = 0; i < count; i++) {
        error err = {0};
        const int others = i / p->chunk_counts.count;
        p->chunks = p->chunk_counts.values[i % p->chunk_counts.count];
        p->rounding = (smoe_rounding)p->roundings.values[others % p->roundings.count];
        p->routing = (routing_kind)p->routings.values[others / p->roundings.count];
        if (bench_problem(options, shape, t, &err)) continue;
        fprintf(stderr, "%s: %s %s: %s\n", program, shape->suite, shape->name, err.text);
        if (status == 0) status = err.code;
    }
    return status;
}

static int bench_all(const char *program, bench_options *options)
{
    table *t = bench_table(options->format, options->settings.device);
    error err = {0};
    int status = 0;
    for (int i = 0; t && i < options->problem.shape_count; i++) {
        const int failed = bench_variants(program, options, &options->problem.shapes[i], t);
        if (status == 0) status = failed;
    }
    if (!table_close(t, &err)) {
        fprintf(stderr, "%s: %s\n", program, err.text);
        status = err.code;
    }
    return status;
}

int smoe_cli_bench(int argc, char **argv)
{
    bench_options *options = calloc(1, sizeof *options);
    if (!options) {
        fprintf(stderr, "%s: out of memory\n", argv[0]);
        return ERROR_RUNTIME;
    }
    int status = ERROR_USAGE;
    if (bench_parse(options, argc, argv)) {
        if (options->settings.device->backend == SMOE_BACKEND_CPU) cli_show_blas_fault();
        status = bench_all(argv[0], options);
    }
    free(options);
    return status;
}
