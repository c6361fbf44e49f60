/* See options.h. */
#include "cli/bench/options.h"

#include <stdlib.h>
#include <string.h>

enum { DEFAULT_SECONDS = 10, MOST_THREADS = 1024 };
static const double DEFAULT_SETTLE = 0.02;

enum {
    KEY_DEVICE = 1,
    KEY_KERNELS,
    KEY_COMPUTE,
    KEY_THREADS,
    KEY_REPEATS,
    KEY_SECONDS,
    KEY_SETTLE,
    KEY_PASS,
    KEY_SCOPE,
    KEY_ENTRY,
    KEY_STAGE,
    KEY_NO_BOUND,
    KEY_ALONE,
    KEY_JSON,
    KEY_CSV
};

static const struct argp_option options_table[] = {
    {NULL, 0, NULL, 0, "The measurement:", 2},
    {"device", KEY_DEVICE, "NAME", 0, "cpu (default) or cuda; with cuda the default --dtype is bf16", 2},
    {"kernels", KEY_KERNELS, "NAME", 0, KERNELS_HELP, 2},
    {"compute", KEY_COMPUTE, "TYPE", 0, COMPUTE_HELP, 2},
    {"threads", KEY_THREADS, "N", 0, "Threads of the library and of the reference (default: OpenMP's)", 2},
    {"repeats", KEY_REPEATS, "N", 0,
     "How often each pass is timed (cuda: in at least two rounds, so the number may be rounded up)", 2},
    {"seconds", KEY_SECONDS, "S", 0, "Repeat for S seconds (default 10; cpu: at least 5 times)", 2},
    {"settle", KEY_SETTLE, "S", 0,
     "cuda: run each job untimed for S seconds before it is timed (default 0.02)", 2},
    {"pass", KEY_PASS, "NAME", 0,
     "forward, backward, layer (both together), several of them (forward,backward) or all (default)", 2},
    {"scope", KEY_SCOPE, "NAME", 0,
     "layer (default): the whole layer, router included; experts: the experts on given routing, plan "
     "included",
     2},
    {"entry", KEY_ENTRY, "NAME", 0,
     "What scope experts starts from: topk (default; the backward ends with the gradient of the top-K "
     "weights) "
     "or logits (top-K runs untimed; the backward ends with dlogits)",
     2},
    {"stage", KEY_STAGE, "NAME", 0,
     "Write only the rows of this stage: router_gemm, topk, ..., all (the whole pass), routing, gemms or "
     "weights_f8",
     2},
    {"no-bound", KEY_NO_BOUND, NULL, 0, "Leave the reference out", 2},
    {"alone", KEY_ALONE, NULL, 0, "cuda, without rounding: also time every kernel of a pass by itself", 2},
    {NULL, 0, NULL, 0, "Output:", 3},
    {"json", KEY_JSON, NULL, 0, "One JSON object a line", 3},
    {"csv", KEY_CSV, NULL, 0, "Comma-separated values", 3},
    {0}};

static bool parse_one_pass(const char *text, size_t length, int *passes)
{
    static const struct {
        const char *name;
        int passes;
    } all[] = {{"forward", PASS_FORWARD},
               {"backward", PASS_BACKWARD},
               {"layer", PASS_LAYER},
               {"all", PASS_FORWARD | PASS_BACKWARD | PASS_LAYER}};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (strlen(all[i].name) == length && strncmp(text, all[i].name, length) == 0) {
            *passes |= all[i].passes;
            return true;
        }
    return false;
}

static bool parse_pass(const char *text, int *passes, error *err)
{
    *passes = 0;
    for (const char *at = text; at;) {
        const size_t length = strcspn(at, ",");
        if (!parse_one_pass(at, length, passes))
            return fail(err, ERROR_USAGE, "--pass: '%.*s' is not one of forward, backward, layer, all",
                        (int)length, at);
        at = at[length] == ',' ? at + length + 1 : NULL;
    }
    return true;
}

static bool parse_scope(const char *text, bench_scope *scope, error *err)
{
    *scope = strcmp(text, "layer") == 0 ? SCOPE_LAYER : SCOPE_EXPERTS;
    if (*scope == SCOPE_LAYER || strcmp(text, "experts") == 0) return true;
    return fail(err, ERROR_USAGE, "--scope: '%s' is neither layer nor experts", text);
}

static bool parse_entry(const char *text, smoe_entry *entry, error *err)
{
    *entry = strcmp(text, "logits") == 0 ? SMOE_ENTRY_FROM_LOGITS : SMOE_ENTRY_FROM_TOPK;
    if (*entry == SMOE_ENTRY_FROM_LOGITS || strcmp(text, "topk") == 0) return true;
    return fail(err, ERROR_USAGE, "--entry: '%s' is neither topk nor logits", text);
}

static bool parse_stage(const char *text, const char **stage, error *err)
{
    static const char *const sums[] = {"all", "routing", "gemms", "weights_f8"};
    *stage = text;
    for (size_t i = 0; i < sizeof sums / sizeof sums[0]; i++)
        if (strcmp(text, sums[i]) == 0) return true;
    for (int i = 0; i < STAGE_COUNT; i++)
        if (strcmp(text, smoe_stage_string(stage_at(i))) == 0) return true;
    return fail(err, ERROR_USAGE, "--stage: '%s' is no stage, nor all, routing, gemms or weights_f8", text);
}

static bool parse_seconds(const char *option, const char *text, double *seconds, error *err)
{
    char *end;
    *seconds = strtod(text, &end);
    if (end != text && *end == '\0' && *seconds > 0 && *seconds <= 86400) return true;
    return fail(err, ERROR_USAGE, "%s: '%s' is not a number of seconds above 0, 86400 at most", option, text);
}

static bool parse_option(bench_options *options, int key, const char *text, error *err)
{
    int64_t number = 0;
    switch (key) {
    case KEY_DEVICE:
        options->settings.device = device_find(text);
        if (options->settings.device) return true;
        return fail(err, ERROR_USAGE, "--device: this build has no '%s' backend", text);
    case KEY_KERNELS:
        if (parse_kernels(text, &options->settings.kernels)) return true;
        return fail(err, ERROR_USAGE, "--kernels: '%s' is neither best nor portable", text);
    case KEY_COMPUTE: return parse_compute(text, &options->settings.compute, err);
    case KEY_THREADS:
        if (!parse_integer("--threads", text, 1, MOST_THREADS, &number, err)) return false;
        options->settings.threads = (int)number;
        return true;
    case KEY_REPEATS: return parse_integer("--repeats", text, 1, MOST_REPEATS, &options->repeats, err);
    case KEY_SECONDS: return parse_seconds("--seconds", text, &options->seconds, err);
    case KEY_SETTLE: return parse_seconds("--settle", text, &options->settings.settle, err);
    case KEY_PASS: return parse_pass(text, &options->passes, err);
    case KEY_SCOPE: return parse_scope(text, &options->settings.scope, err);
    case KEY_ENTRY: return parse_entry(text, &options->settings.entry, err);
    case KEY_STAGE: return parse_stage(text, &options->stage, err);
    case KEY_NO_BOUND: options->settings.no_bound = true; return true;
    default: options->settings.alone = true; return true;
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
        if (key < KEY_DEVICE || key > KEY_ALONE) return ARGP_ERR_UNKNOWN;
        if (!parse_option(options, key, text, &err)) argp_error(state, "%s", err.text);
        return 0;
    }
}

static const struct argp_child children[] = {{&problem_argp, 0, NULL, 0}, {0}};
static const struct argp bench_argp = {
    .options = options_table,
    .parser = parse,
    .children = children,
    .doc = "Measures a layer, stage by stage, and for comparison dense GEMMs of the same FLOPs. The default "
           "problem is --thiek 4096,768,256,32,4."};

static void add_default_problem(problem_options *problem)
{
    if (problem->shape_count > 0) return;
    problem->shapes[0] = (bench_shape){"default", "4096,768,256,32,4", 4096, 768, 256, 32, 4};
    problem->shape_count = 1;
}

bool bench_parse(bench_options *options, int argc, char **argv)
{
    argp_err_exit_status = ERROR_USAGE;
    problem_options_init(&options->problem);
    options->problem.several = true;
    options->settings = (bench_settings){.device = device_find("cpu"),
                                         .scope = SCOPE_LAYER,
                                         .entry = SMOE_ENTRY_FROM_TOPK,
                                         .settle = DEFAULT_SETTLE};
    options->passes = PASS_FORWARD | PASS_BACKWARD | PASS_LAYER;
    options->seconds = DEFAULT_SECONDS;
    if (argp_parse(&bench_argp, argc, argv, 0, NULL, options) != 0) return false;
    add_default_problem(&options->problem);
    if (options->settings.device->backend == SMOE_BACKEND_CUDA && !options->problem.dtype_given)
        options->problem.dtype = SMOE_TYPE_BF16;
    options->settings.backward = options->passes != PASS_FORWARD;
    return true;
}
