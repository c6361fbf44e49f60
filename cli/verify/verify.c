/* `smoe verify`: compares the library with the fp64 oracle on this machine. */
#include "cli/verify/verify.h"

#include "cli/support/cli.h"
#include "cli/support/problem.h"

#include <argp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct verify_options {
    const device *on;
    smoe_kernels kernels;
    smoe_compute compute;
    table_format format;
    bool quick, all, every_tensor, any_check;
    case_check check; /* instead of the case's own, if any_check is set */
    int64_t seed, threads, repeats, again, gpu, shard, shards;
    const char *only[4]; /* run the cases with all these texts in their names; NULL: no more */
} verify_options;

enum {
    KEY_DEVICE = 1,
    KEY_QUICK,
    KEY_JSON,
    KEY_CSV,
    KEY_SEED,
    KEY_THREADS,
    KEY_REPEATS,
    KEY_ONLY,
    KEY_KERNELS,
    KEY_COMPUTE,
    KEY_ALL,
    KEY_CHECK,
    KEY_AGAIN,
    KEY_GPU,
    KEY_SHARD
};

static const struct argp_option options_table[] = {
    {"device", KEY_DEVICE, "NAME", 0, "Backend: cpu (default) or cuda", 1},
    {"kernels", KEY_KERNELS, "NAME", 0, KERNELS_HELP, 1},
    {"compute", KEY_COMPUTE, "TYPE", 0, COMPUTE_HELP, 1},
    {"gpu", KEY_GPU, "N", 0, "cuda: the number of the GPU (default 0)", 1},
    {"quick", KEY_QUICK, NULL, 0, "Run a short list of cases", 1},
    {"all", KEY_ALL, NULL, 0, "Run also the cases that are made for single kernels; many minutes", 1},
    {"only", KEY_ONLY, "TEXT", 0, "Run only the cases with TEXT in their names; several: with all of them",
     1},
    {"check", KEY_CHECK, "NAME", 0,
     "Check each layer for: compare (with the oracle), bits (of equivalent calls), gradients (of any subset) "
     "or "
     "support (does the backend take it?). Default: what each case is for",
     1},
    {"shard", KEY_SHARD, "I/N", 0, "Run every N-th case from the I-th on (from 0), for N processes at a time",
     1},
    {"again", KEY_AGAIN, "N", 0,
     "How often each comparison runs again, in the same buffers; the bits must be the same (default 1)", 1},
    {"seed", KEY_SEED, "N", 0, "Seed of the inputs (default 1)", 1},
    {"threads", KEY_THREADS, "N", 0, "Threads of the cpu backend (default: OpenMP's)", 1},
    {"repeats", KEY_REPEATS, "N", 0,
     "cuda: how often the repeated cases run, while a second stream copies memory (default 1000)", 1},
    {"verbose", 'v', NULL, 0, "A line for every tensor, not only the worst of each case", 2},
    {"json", KEY_JSON, NULL, 0, "One JSON object a line, every tensor", 2},
    {"csv", KEY_CSV, NULL, 0, "Comma-separated values, every tensor", 2},
    {0}};

static void parse_number(struct argp_state *state, const char *option, const char *text, int64_t least,
                         int64_t most, int64_t *value)
{
    error err;
    if (!parse_integer(option, text, least, most, value, &err)) argp_error(state, "%s", err.text);
}

static error_t parse_only(struct argp_state *state, verify_options *options, const char *text)
{
    const size_t most = sizeof options->only / sizeof options->only[0];
    size_t count = 0;
    while (count < most && options->only[count]) count++;
    if (count == most) argp_error(state, "--only: at most %zu times", most);
    options->only[count] = text;
    return 0;
}

static error_t parse_check(struct argp_state *state, verify_options *options, const char *text)
{
    static const char *const names[] = {[CASE_COMPARE] = "compare",
                                        [CASE_BITS] = "bits",
                                        [CASE_GRADIENTS] = "gradients",
                                        [CASE_SUPPORT] = "support"};
    for (int i = 0; i <= CASE_SUPPORT; i++)
        if (strcmp(text, names[i]) == 0) {
            options->any_check = true;
            options->check = (case_check)i;
            return 0;
        }
    argp_error(state, "--check: '%s' is not compare, bits, gradients or support", text);
    return 0;
}

static error_t parse_shard(struct argp_state *state, verify_options *options, const char *text)
{
    long long shard, shards;
    char end;
    if (sscanf(text, "%lld/%lld%c", &shard, &shards, &end) != 2 || shard < 0 || shard >= shards)
        argp_error(state, "--shard: '%s' is not I/N with 0 <= I < N", text);
    options->shard = shard, options->shards = shards;
    return 0;
}

static error_t parse(int key, char *text, struct argp_state *state)
{
    verify_options *options = state->input;
    error err;
    switch (key) {
    case KEY_DEVICE:
        if (strcmp(text, "cpu") != 0 && strcmp(text, "cuda") != 0)
            argp_error(state, "--device: '%s' is neither cpu nor cuda", text);
        options->on = device_find(text);
        if (!options->on) argp_failure(state, 3, 0, "--device: this build has no %s backend", text);
        return 0;
    case KEY_KERNELS:
        if (!parse_kernels(text, &options->kernels))
            argp_error(state, "--kernels: '%s' is neither best nor portable", text);
        return 0;
    case KEY_COMPUTE:
        if (!parse_compute(text, &options->compute, &err)) argp_error(state, "%s", err.text);
        return 0;
    case KEY_QUICK: options->quick = true; return 0;
    case KEY_JSON: options->format = TABLE_JSON; return 0;
    case KEY_CSV: options->format = TABLE_CSV; return 0;
    case KEY_SEED: parse_number(state, "--seed", text, 0, INT64_MAX, &options->seed); return 0;
    case KEY_THREADS: parse_number(state, "--threads", text, 0, 4096, &options->threads); return 0;
    case KEY_REPEATS: parse_number(state, "--repeats", text, 1, 1000000000, &options->repeats); return 0;
    case KEY_ONLY: return parse_only(state, options, text);
    case KEY_ALL: options->all = true; return 0;
    case KEY_CHECK: return parse_check(state, options, text);
    case KEY_SHARD: return parse_shard(state, options, text);
    case KEY_AGAIN: parse_number(state, "--again", text, 0, 1000, &options->again); return 0;
    case KEY_GPU: parse_number(state, "--gpu", text, 0, 1023, &options->gpu); return 0;
    case 'v': options->every_tensor = true; return 0;
    case ARGP_KEY_ARG: argp_error(state, "'%s' is not expected here", text); return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp verify_argp = {
    .options = options_table,
    .parser = parse,
    .doc = "Compares the library on this machine with an fp64 oracle: every stage, activation, score "
           "function, rounding "
           "rule and entry, and edge cases. Also checks that equivalent calls give the same bits. An "
           "error is the relative Frobenius error of a tensor, or a "
           "number of elements that must be 0. The exit "
           "status is 1 if a check failed."};

static const table_column columns[] = {
    {"case", COLUMN_TEXT, 0, false, NULL},    {"dtype", COLUMN_TEXT, 0, false, NULL},
    {"tensor", COLUMN_TEXT, 0, false, NULL},  {"error", COLUMN_NUMBER, 8, false, NULL},
    {"limit", COLUMN_NUMBER, 8, false, NULL}, {"ok", COLUMN_TEXT, 0, false, NULL},
    {"note", COLUMN_TEXT, 0, false, NULL}};

/* Tries a layer that every backend runs. Returns NULL, or why the backend does not have this type, or not
 * with `compute`. */
static const char *refuses_type(verify *v, smoe_compute compute, smoe_type dtype)
{
    const layer_case any = {
        .layer = {.entry = SMOE_ENTRY_FROM_TOPK, .compute = compute}}; /* every backend has it */
    const smoe_layer layer = case_layer(&any, dtype);
    return smoe_supports(v->context, &layer) == SMOE_ERROR_UNSUPPORTED ? smoe_last_error(v->context) : NULL;
}

static void run_check_of(verify *v, const layer_case *c, case_check check, const smoe_layer *layer)
{
    static verify_check *const checks[] = {
        [CASE_COMPARE] = check_compare,        [CASE_BITS] = check_bits,
        [CASE_GRADIENTS] = check_gradients,    [CASE_SUPPORT] = check_support,
        [CASE_REPEATS] = check_repeats,        [CASE_ISOLATION] = check_isolation,
        [CASE_NAN_LOGITS] = check_nan_logits,  [CASE_BIAS_UPDATE] = check_bias_update,
        [CASE_SAVED_BYTES] = check_saved_bytes};
    checks[check](v, c, layer);
}

/* Does the backend or, because of its sizes, fp8 not have this layer? */
static bool refuses(verify *v, const smoe_layer *layer)
{
    const smoe_status status = smoe_supports(v->context, layer);
    return status == SMOE_ERROR_UNSUPPORTED || (layer->compute && status == SMOE_ERROR_SHAPE);
}

static void run_case(verify *v, const verify_options *options, const layer_case *c, smoe_type dtype)
{
    smoe_layer layer = case_layer(c, dtype);
    layer.compute = options->compute;
    report_begin(&v->report, c->name, dtype_name(dtype));
    if (refuses(v, &layer))
        report_skip(&v->report, smoe_last_error(v->context));
    else
        run_check_of(v, c, options->any_check ? options->check : c->check, &layer);
    report_end(&v->report);
}

/* Can the check of the command line be run on this case? */
static bool may_check(const verify_options *options, const layer_case *c)
{
    if (!options->any_check) return true;
    if (options->check == CASE_GRADIENTS && (c->forward_only || c->layer.inference)) return false;
    return c->check <= CASE_SUPPORT;
}

static bool chosen(const verify_options *options, size_t i, const layer_case *c, smoe_type dtype)
{
    for (size_t k = 0; k < sizeof options->only / sizeof options->only[0]; k++)
        if (options->only[k] && !strstr(c->name, options->only[k])) return false;
    return (int64_t)i % options->shards == options->shard && (!options->quick || c->quick) &&
           (!c->kernel || options->all) && (!c->types || c->types >> dtype & 1) && may_check(options, c);
}

static void run_cases(verify *v, const verify_options *options)
{
    const smoe_type types[] = {SMOE_TYPE_F32, SMOE_TYPE_BF16, SMOE_TYPE_F16};
    const bool terminal = isatty(STDERR_FILENO);
    const layer_case *c;
    for (size_t t = 0; t < sizeof types / sizeof types[0]; t++) {
        const char *refusal = refuses_type(v, options->compute, types[t]);
        if (refusal) {
            report_begin(&v->report, "every case", dtype_name(types[t]));
            report_skip(&v->report, refusal);
            continue;
        }
        for (size_t i = 0; (c = case_at(i)); i++) {
            if (!chosen(options, i, c, types[t])) continue;
            if (terminal) fprintf(stderr, "\r\033[K%s %zu %s", dtype_name(types[t]), i + 1, c->name);
            run_case(v, options, c, types[t]);
        }
    }
    if (terminal) fprintf(stderr, "\r\033[K");
}

static int finish(verify *v, const verify_options *options)
{
    error err;
    if (!table_close(v->report.table, &err)) {
        fprintf(stderr, "smoe verify: %s\n", err.text);
        return 3;
    }
    FILE *summary = options->format == TABLE_ALIGNED ? stdout : stderr;
    fprintf(summary, "%lld passed, %lld failed", (long long)v->report.passed, (long long)v->report.failed);
    if (v->report.skipped) fprintf(summary, ", %lld skipped", (long long)v->report.skipped);
    fprintf(summary, "\n");
    if (v->report.passed + v->report.failed == 0) {
        fprintf(stderr, "smoe verify: no case was run\n");
        return 2;
    }
    return v->report.failed ? 1 : 0;
}

int smoe_cli_verify(int argc, char **argv)
{
    verify_options options = {.on = device_find("cpu"),
                              .format = TABLE_ALIGNED,
                              .seed = 1,
                              .repeats = 1000,
                              .again = 1,
                              .shards = 1};
    argp_err_exit_status = 2;
    if (argp_parse(&verify_argp, argc, argv, 0, NULL, &options) != 0) return 2;
    verify v = {.on = options.on,
                .threads = (int32_t)options.threads,
                .kernels = options.kernels,
                .seed = (uint64_t)options.seed,
                .repeats = options.repeats,
                .again = options.again,
                .gpu = (int32_t)options.gpu};
    char text[512] = "";
    smoe_context_options context = SMOE_CONTEXT_OPTIONS_INIT;
    context.backend = v.on->backend;
    context.device = v.gpu;
    context.threads = v.threads;
    context.kernels = v.kernels;
    context.error_text = text;
    context.error_size = sizeof text;
    if (smoe_create(&v.context, &context) != SMOE_OK) {
        fprintf(stderr, "smoe verify: %s\n", text);
        return 3;
    }
    if (!v.on->use(v.gpu)) {
        fprintf(stderr, "smoe verify: --gpu: there is no device %d\n", (int)v.gpu);
        smoe_destroy(v.context);
        return 3;
    }
    v.report.every_tensor = options.every_tensor || options.format != TABLE_ALIGNED;
    v.report.table = table_open(stdout, options.format, columns, sizeof columns / sizeof columns[0]);
    int status = 3;
    if (v.report.table) {
        run_cases(&v, &options);
        status = finish(&v, &options);
    } else {
        fprintf(stderr, "smoe verify: out of memory\n");
    }
    smoe_destroy(v.context);
    return status;
}
