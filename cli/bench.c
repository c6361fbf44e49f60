/* `smoe bench`: times of a layer and its stages beside a yardstick measured between them, memory beside what
 * the query predicted, and errors against fp64. docs/benchmarks.md says how. */
#include "cli/bench_cuda.h"
#include "cli/bench_report.h"
#include "cli/cli.h"
#include "cli/yardstick.h"
#include "train/clock.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct bench_options {
    problem_options problem;
    bench_settings settings;
    table_format format;
    int passes;
    int64_t repeats; // 0: as many as fit in `seconds`
    double seconds;
} bench_options;

enum { DEFAULT_SECONDS = 10, LEAST_REPEATS = 5, MOST_REPEATS = 1000, MOST_THREADS = 1024 };

/* ---- Arguments ---- */

enum { KEY_DEVICE = 1, KEY_THREADS, KEY_REPEATS, KEY_SECONDS, KEY_PASS, KEY_SCOPE, KEY_JSON, KEY_CSV };

static const struct argp_option options_table[] = {
    {NULL, 0, NULL, 0, "The measurement:", 2},
    {"device", KEY_DEVICE, "NAME", 0, "cpu (default), or cuda: there --dtype is bf16 unless given", 2},
    {"threads", KEY_THREADS, "N", 0, "Threads of library and yardstick (default: OpenMP's)", 2},
    {"repeats", KEY_REPEATS, "N", 0, "How often each pass is timed (cuda: in three rounds, rounded up)", 2},
    {"seconds", KEY_SECONDS, "S", 0, "Repeat for so long, 5 times at least (default 10)", 2},
    {"pass", KEY_PASS, "NAME", 0, "forward, backward, layer (both together) or all (default)", 2},
    {"scope", KEY_SCOPE, "NAME", 0,
     "layer (default): from tokens, router included; experts: from given routing, plan included", 2},
    {NULL, 0, NULL, 0, "Output:", 3},
    {"json", KEY_JSON, NULL, 0, "One JSON object a line", 3},
    {"csv", KEY_CSV, NULL, 0, "Comma-separated values", 3},
    {0}};

static bool parse_pass(const char *text, int *passes, error *err)
{
    static const struct {
        const char *name;
        int passes;
    } all[] = {{"forward", PASS_FORWARD},
               {"backward", PASS_BACKWARD},
               {"layer", PASS_LAYER},
               {"all", PASS_FORWARD | PASS_BACKWARD | PASS_LAYER}};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (strcmp(text, all[i].name) == 0) {
            *passes = all[i].passes;
            return true;
        }
    return fail(err, ERROR_USAGE, "--pass: '%s' is none of forward, backward, layer, all", text);
}

static bool parse_scope(const char *text, bench_scope *scope, error *err)
{
    *scope = strcmp(text, "layer") == 0 ? SCOPE_LAYER : SCOPE_EXPERTS;
    if (*scope == SCOPE_LAYER || strcmp(text, "experts") == 0) return true;
    return fail(err, ERROR_USAGE, "--scope: '%s' is neither layer nor experts", text);
}

static bool parse_seconds(const char *text, double *seconds, error *err)
{
    char *end;
    *seconds = strtod(text, &end);
    if (end != text && *end == '\0' && *seconds > 0 && *seconds <= 86400) return true;
    return fail(err, ERROR_USAGE, "--seconds: '%s' is not a number of seconds above 0, 86400 at most", text);
}

static bool parse_option(bench_options *options, int key, const char *text, error *err)
{
    int64_t number = 0;
    switch (key) {
    case KEY_DEVICE:
        options->settings.device = device_find(text);
        if (options->settings.device) return true;
        return fail(err, ERROR_USAGE, "--device: this build has no '%s' backend", text);
    case KEY_THREADS:
        if (!parse_integer("--threads", text, 1, MOST_THREADS, &number, err)) return false;
        options->settings.threads = (int)number;
        return true;
    case KEY_REPEATS: return parse_integer("--repeats", text, 1, MOST_REPEATS, &options->repeats, err);
    case KEY_SECONDS: return parse_seconds(text, &options->seconds, err);
    case KEY_PASS: return parse_pass(text, &options->passes, err);
    default: return parse_scope(text, &options->settings.scope, err);
    }
}

static error_t parse(int key, char *text, struct argp_state *state)
{
    bench_options *options = state->input;
    error err = {0};
    switch (key) {
    case ARGP_KEY_INIT: state->child_inputs[0] = &options->problem; return 0;
    case KEY_JSON: options->format = TABLE_JSON; return 0;
    case KEY_CSV: options->format = TABLE_CSV; return 0;
    case ARGP_KEY_ARG: argp_error(state, "'%s' is not expected here", text); return 0;
    default:
        if (key < KEY_DEVICE || key > KEY_SCOPE) return ARGP_ERR_UNKNOWN;
        if (!parse_option(options, key, text, &err)) argp_error(state, "%s", err.text);
        return 0;
    }
}

static const struct argp_child children[] = {{&problem_argp, 0, NULL, 0}, {0}};
static const struct argp bench_argp = {
    .options = options_table,
    .parser = parse,
    .children = children,
    .doc = "Measures a layer, stage by stage, beside dense GEMMs of the same sizes; without a problem: "
           "--thiek 4096,768,256,32,4."};

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

/* The first step, on poison: high-water marks, canaries, errors. Also the library's warm-up. */
static bool measure_memory(bench_case *c, bench_result *result, error *err)
{
    uint64_t saved = 0, forward = 0, backward = 0;
    const bool router = c->settings.scope == SCOPE_LAYER;
    if (!bench_poison(c, err) || !bench_prepare(c, err) || !bench_forward(c, NULL, err)) return false;
    if (c->settings.backward && !bench_backward(c, NULL, err)) return false;
    if (!bench_touched(&c->saved, &saved, err) || !bench_touched(&c->scratch_forward, &forward, err) ||
        !bench_touched(&c->scratch_backward, &backward, err) || !bench_canaries(c, err))
        return false;
    result->peak = pass_peaks(&c->layer, router, (double)saved, (double)forward, (double)backward);
    result->predicted =
        pass_peaks(&c->layer, router, (double)c->sizes.saved_buffer_bytes,
                   (double)c->sizes.scratch_forward_bytes, (double)c->sizes.scratch_backward_bytes);
    return bench_check(c, &result->errors, err);
}

static bool measure_library(bench_case *c, bench_times *times, error *err)
{
    if (!bench_prepare(c, err)) return false;
    stage_clock_reset(&c->clock);
    if (!bench_forward(c, &times->forward, err)) return false;
    if (c->settings.backward && !bench_backward(c, &times->backward, err)) return false;
    stage_clock_add(&c->clock, times->stage);
    return true;
}

static bool measure_once(bench_case *c, const yardstick *y, bench_times *times, error *err)
{
    memset(times, 0, sizeof *times);
    rest();
    if (!measure_library(c, times, err)) return false;
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

/* On the host, library and yardstick step by step in turn; counts (E) are the plan's. */
static bool measure_on_host(const bench_options *options, bench_case *c, const int32_t *counts,
                            bench_result *result, error *err)
{
    yardstick y = {0};
    if (!yardstick_make(&y, &c->layer, counts, c->threads))
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
        for (int64_t e = 0; e < c->layer.experts; e++) rows += counts[e];
        progress(result->shape->name, "measuring", 0);
        return bench_cuda_times(c, rows, options->repeats, options->seconds, result, err);
    }
#endif
    return measure_on_host(options, c, counts, result, err);
}

static bool measure(const bench_options *options, bench_case *c, bench_result *result, error *err)
{
    int32_t *counts = malloc((size_t)c->layer.experts * sizeof *counts);
    bool good = counts != NULL;
    if (!good) fail(err, ERROR_RUNTIME, "out of memory for the counts");
    good = good && measure_memory(c, result, err) && bench_read_counts(c, counts, err) &&
           measure_times(options, c, counts, result, err) && bench_canaries(c, err);
    free(counts);
    return good;
}

static bool check_errors(const bench_result *result, error *err)
{
    const double limit = bench_tolerance(result->c->layer.dtype);
    const double worst = fmax(result->errors.forward, result->errors.backward);
    if (worst <= limit) return true;
    return fail(err, 1, "max_rel_err of O is %.2e, of dX %.2e; the limit for %s is %.0e",
                result->errors.forward, result->errors.backward, dtype_name(result->c->layer.dtype), limit);
}

/* The passes that can run: without a backward the forward alone, and the reason once on stderr. */
static bool choose_passes(const bench_case *c, const bench_shape *shape, int *passes, error *err)
{
    if (!c->no_backward) return true;
    if (!(*passes & PASS_FORWARD))
        return fail(err, ERROR_RUNTIME, "%s: %s", c->settings.device->name, c->no_backward);
    *passes = PASS_FORWARD;
    fprintf(stderr, "smoe bench: %s %s: backward and layer skipped: %s\n", shape->suite, shape->name,
            c->no_backward);
    return true;
}

/* One problem, its rows included. */
static bool bench_problem(const bench_options *options, const bench_shape *shape, table *t, error *err)
{
    bench_case *c = calloc(1, sizeof *c);
    if (!c) return fail(err, ERROR_RUNTIME, "out of memory");
    progress(shape->name, "making inputs", 0);
    bool good = bench_case_make(c, &options->settings, &options->problem, shape, err);
    if (good) {
        bench_result result = {
            .c = c, .problem = &options->problem, .shape = shape, .passes = options->passes};
        progress_end();
        good = choose_passes(c, shape, &result.passes, err);
        progress(shape->name, "first step", 0);
        good = good && measure(options, c, &result, err);
        progress_end();
        if (good) {
            bench_report(t, options->format, &result);
            good = check_errors(&result, err);
        }
        free(result.times);
        bench_case_free(c);
    }
    progress_end();
    free(c);
    return good;
}

/* Every problem with every number of chunks; one that fails is named on stderr and the next one goes on. The
 * first failure's status. */
static int bench_all(const char *program, bench_options *options)
{
    table *t = bench_table(options->format);
    error err = {0};
    int status = 0;
    const int each = options->problem.chunk_count;
    for (int i = 0; t && i < each * options->problem.shape_count; i++) {
        const bench_shape *shape = &options->problem.shapes[i / each];
        options->problem.chunks = options->problem.chunk_list[i % each];
        if (bench_problem(options, shape, t, &err)) continue;
        fprintf(stderr, "%s: %s %s: %s\n", program, shape->suite, shape->name, err.text);
        if (status == 0) status = err.code;
    }
    if (!table_close(t, &err)) {
        fprintf(stderr, "%s: %s\n", program, err.text);
        status = err.code;
    }
    return status;
}

static void add_default_problem(problem_options *problem)
{
    if (problem->shape_count > 0) return;
    problem->shapes[0] = (bench_shape){"default", "4096,768,256,32,4", 4096, 768, 256, 32, 4};
    problem->shape_count = 1;
}

int smoe_cli_bench(int argc, char **argv)
{
    argp_err_exit_status = ERROR_USAGE;
    bench_options *options = calloc(1, sizeof *options);
    if (!options) {
        fprintf(stderr, "%s: out of memory\n", argv[0]);
        return ERROR_RUNTIME;
    }
    problem_options_init(&options->problem);
    options->problem.chunk_most = sizeof options->problem.chunk_list / sizeof options->problem.chunk_list[0];
    options->settings = (bench_settings){.device = device_find("cpu"), .scope = SCOPE_LAYER};
    options->passes = PASS_FORWARD | PASS_BACKWARD | PASS_LAYER;
    options->seconds = DEFAULT_SECONDS;
    int status = ERROR_USAGE;
    if (argp_parse(&bench_argp, argc, argv, 0, NULL, options) == 0) {
        add_default_problem(&options->problem);
        if (options->settings.device->backend == SMOE_BACKEND_CUDA && !options->problem.dtype_given)
            options->problem.dtype = SMOE_BF16;
        options->settings.backward = options->passes != PASS_FORWARD;
        status = bench_all(argv[0], options);
    }
    free(options);
    return status;
}
