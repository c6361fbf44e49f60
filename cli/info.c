/* `smoe info`: shows version and backends of this build; for a problem, its FLOPs and bytes. Runs on the host
 * only. */
#include "base/blas_core.h"
#include "build_info.h"
#include "cli/lm/info_model.h"
#include "cli/support/cli.h"
#include "cli/support/costs.h"
#include "cli/support/problem.h"
#include "cli/support/table.h"
#include "cli/support/tile_waste.h"

#include <cblas.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

typedef struct info_options {
    problem_options problem;
    table_format format;
    smoe_backend backend;
    info_model model;
} info_options;

enum {
    KEY_JSON = 1,
    KEY_CSV,
    KEY_DEVICE,
    KEY_MODEL,
    KEY_BATCH,
    KEY_PARTS,
    KEY_PRECISION,
    KEY_GRADIENTS,
    KEY_CLIP,
    KEY_GPUS,
    KEY_COMPUTE,
    KEY_RECOMPUTE
};

static const struct argp_option options_table[] = {
    {NULL, 0, NULL, 0, "The memory that training a model needs (--chunks and --device count too):", 3},
    {"model", KEY_MODEL, "PATH", 0, "config.json, or the folder of a checkpoint or a run", 3},
    {"batch", KEY_BATCH, "N", 0, "Sequences of a step (default 8)", 3},
    {"micro-batches", KEY_PARTS, "M", 0, "Number of parts of a batch, as for train (default 1)", 3},
    {"gpus", KEY_GPUS, "N", 0,
     "Number of GPUs (ranks), as for train: the memory is that of each, and the bytes that it sends are "
     "counted "
     "(default 1)",
     3},
    {"precision", KEY_PRECISION, "TYPE", 0, "f32 (default) or, with --device cuda, bf16, as for train", 3},
    {"gradients", KEY_GRADIENTS, "TYPE", 0, "f32 or, with --device cuda, bf16, as for train", 3},
    {"clip", KEY_CLIP, "X", 0, "Largest norm of the gradient, as for train (default 1; 0: any)", 3},
    {"compute", KEY_COMPUTE, "TYPE", 0, "bf16 (default), f8 or f8-dgrad, as for train", 3},
    {"recompute", KEY_RECOMPUTE, "WHAT", 0, "none, norms (default), norms-qk or layers, as for train", 3},
    {NULL, 0, NULL, 0, "Output:", 2},
    {"json", KEY_JSON, NULL, 0, "One JSON object a line", 2},
    {"csv", KEY_CSV, NULL, 0, "Comma-separated values", 2},
    {"device", KEY_DEVICE, "NAME", 0, "Backend whose scratch sizes are shown: cpu (default) or cuda", 2},
    {0}};

static void parse_model(int key, const char *text, struct argp_state *state)
{
    const double most_clip = 1e9; // as for train
    info_model *wanted = &((info_options *)state->input)->model;
    error err = {0};
    char *end;
    int at = 0;
    switch (key) {
    case KEY_MODEL: wanted->path = parse_path("--model", text, state); return;
    case KEY_BATCH:
        if (!parse_integer("--batch", text, 1, 1 << 20, &wanted->batch, &err))
            argp_error(state, "%s", err.text);
        return;
    case KEY_PARTS:
        if (!parse_integer("--micro-batches", text, 1, 1 << 20, &wanted->parts, &err))
            argp_error(state, "%s", err.text);
        return;
    case KEY_GPUS:
        if (!parse_integer("--gpus", text, 1, 1 << 16, &wanted->gpus, &err))
            argp_error(state, "%s", err.text);
        return;
    case KEY_PRECISION:
        wanted->bf16 = strcmp(text, "bf16") == 0;
        if (!wanted->bf16 && strcmp(text, "f32") != 0)
            argp_error(state, "--precision: '%s' is neither f32 nor bf16", text);
        return;
    case KEY_GRADIENTS:
        wanted->gradients = strcmp(text, "bf16") == 0  ? GRADIENTS_BF16
                            : strcmp(text, "f32") == 0 ? GRADIENTS_F32
                                                       : GRADIENTS_DEFAULT;
        if (wanted->gradients == GRADIENTS_DEFAULT)
            argp_error(state, "--gradients: '%s' is neither f32 nor bf16", text);
        return;
    case KEY_CLIP:
        wanted->clip = strtod(text, &end);
        if (end == text || *end || !(wanted->clip >= 0 && wanted->clip <= most_clip))
            argp_error(state, "--clip: '%s' is not a number in 0..%.9g", text, most_clip);
        return;
    case KEY_COMPUTE:
        while (at < COMPUTE_NAMES && strcmp(text, model_compute_names[at]) != 0) at++;
        if (at == COMPUTE_NAMES) argp_error(state, "--compute: '%s' is not one of bf16, f8, f8-dgrad", text);
        wanted->compute = model_computes[at];
        return;
    default:
        while (at < RECOMPUTE_NAMES && strcmp(text, model_recompute_names[at]) != 0) at++;
        if (at == RECOMPUTE_NAMES)
            argp_error(state, "--recompute: '%s' is not one of none, norms, norms-qk, layers", text);
        wanted->recompute = (model_recompute)at;
    }
}

static void note_given(info_options *options, int key)
{
    const struct argp_option *o = options_table;
    while (o->key != key) o++;
    options->model.given = o->name;
}

static error_t parse(int key, char *text, struct argp_state *state)
{
    info_options *options = state->input;
    if (key >= KEY_MODEL && key <= KEY_RECOMPUTE) {
        parse_model(key, text, state);
        note_given(options, key);
        return 0;
    }
    switch (key) {
    case ARGP_KEY_INIT: state->child_inputs[0] = &options->problem; return 0;
    case KEY_JSON: options->format = TABLE_JSON; return 0;
    case KEY_CSV: options->format = TABLE_CSV; return 0;
    case KEY_DEVICE:
        if (strcmp(text, "cpu") == 0)
            options->backend = SMOE_BACKEND_CPU;
        else if (strcmp(text, "cuda") == 0)
            options->backend = SMOE_BACKEND_CUDA;
        else
            argp_error(state, "--device: '%s' is neither cpu nor cuda", text);
        return 0;
    case ARGP_KEY_ARG: argp_error(state, "'%s' is not expected here", text); return 0;
    case ARGP_KEY_END:
        if (options->model.given && !options->model.path)
            argp_error(state, "--%s is only for --model", options->model.given);
        if (options->model.path && options->problem.given)
            argp_error(state, "--%s cannot be combined with --model: it is for a layer",
                       options->problem.given);
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_child children[] = {{&problem_argp, 0, NULL, 0}, {0}};
static const struct argp info_argp = {
    .options = options_table,
    .parser = parse,
    .children = children,
    .doc =
        "Shows the version of this build and its backends. With --thiek or --suite: the FLOPs, bytes and "
        "tile waste of a layer, and the bytes that ScatterMoE would keep for the backward. With --model: the "
        "memory that training the model needs."};

static const table_column build_columns[] = {
    {"version", COLUMN_TEXT, 0, false, NULL},
    {"commit", COLUMN_TEXT, 0, false, NULL},
    {"compiler", COLUMN_TEXT, 0, false, NULL},
    {"build", COLUMN_TEXT, 0, false, NULL},
    {"openmp", COLUMN_INTEGER, 0, false, "year and month of the OpenMP version"},
    {"threads", COLUMN_INTEGER, 0, false, "that OpenMP uses unless OMP_NUM_THREADS says otherwise"},
    {"blas", COLUMN_TEXT, 0, false, NULL},
    {"cpu", COLUMN_TEXT, 0, false, NULL},
    {"cuda_build", COLUMN_TEXT, 0, false, NULL},
    {"cuda", COLUMN_TEXT, 0, false, NULL},
};

/* "available", or why a context of this backend cannot be made. */
static void backend_state(smoe_backend backend, char *text, size_t size)
{
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.backend = backend;
    options.error_text = text;
    options.error_size = size;
    smoe_context *context;
    static const char function[] = "smoe_create: ";
    const size_t length = sizeof function - 1;
    if (smoe_create(&context, &options) == SMOE_OK) {
        const char *kernels = smoe_kernels_string(context);
        snprintf(text, size, "available%s%s", *kernels ? ", kernels: " : "", kernels);
    } else if (strncmp(text, function, length) == 0)
        memmove(text, text + length, strlen(text) + 1 - length);
    smoe_destroy(context);
}

static void put_blas(table *t)
{
    char text[512];
    const char *fault = blas_core_fault();
    snprintf(text, sizeof text, "%s%s%s", openblas_get_config(), fault ? ": " : "", fault ? fault : "");
    table_text(t, text);
}

static bool print_build(const info_options *options, error *err)
{
    const table_format format = options->format == TABLE_ALIGNED ? TABLE_VERTICAL : options->format;
    table *t = table_open(stdout, format, build_columns, sizeof build_columns / sizeof build_columns[0]);
    if (!t) return fail(err, ERROR_RUNTIME, "info: out of memory");
    char version[32], state[512];
    const int number = smoe_version();
    snprintf(version, sizeof version, "%d.%d.%d", number / 10000, number / 100 % 100, number % 100);
    table_text(t, version);
    table_text(t, BUILD_COMMIT);
    table_text(t, BUILD_COMPILER);
    table_text(t, BUILD_SANITIZE[0] ? BUILD_TYPE " -fsanitize=" BUILD_SANITIZE : BUILD_TYPE);
    table_integer(t, _OPENMP);
    table_integer(t, omp_get_max_threads());
    put_blas(t);
    backend_state(SMOE_BACKEND_CPU, state, sizeof state);
    table_text(t, state);
    table_text(t, BUILD_CUDA);
    backend_state(SMOE_BACKEND_CUDA, state, sizeof state);
    table_text(t, state);
    table_end_row(t);
    return table_close(t, err);
}

static const table_column problem_columns[] = {
    {"suite", COLUMN_TEXT, 0, false, NULL},
    {"shape", COLUMN_TEXT, 0, false, NULL},
    {"T", COLUMN_INTEGER, 0, false, "tokens"},
    {"d", COLUMN_INTEGER, 0, false, "hidden"},
    {"n", COLUMN_INTEGER, 0, false, "intermediate"},
    {"E", COLUMN_INTEGER, 0, false, "experts"},
    {"K", COLUMN_INTEGER, 0, false, "experts a token"},
    {"dtype", COLUMN_TEXT, 0, false, NULL},
    {"activation", COLUMN_TEXT, 0, false, NULL},
    {"rounding", COLUMN_TEXT, 0, false, NULL},
    {"tile", COLUMN_INTEGER, 0, false, "rows"},
    {"chunks", COLUMN_INTEGER, 0, false, NULL},
    {"flops_forward", COLUMN_INTEGER, 0, false, "6 T K n d with a gate, 4 T K n d without"},
    {"flops_backward", COLUMN_INTEGER, 0, false, "twice that"},
    {"arithmetic_intensity", COLUMN_NUMBER, 2, false, "3 / (2/d + 2/n + 3/Te), Te = T K / E"},
    {"saved_bytes", COLUMN_BYTES, 0, false, "kept from forward to backward, X included"},
    {"metadata_bytes", COLUMN_BYTES, 0, false, "the plan's part of it"},
    {"scratch_forward_bytes", COLUMN_BYTES, 0, false, NULL},
    {"scratch_backward_bytes", COLUMN_BYTES, 0, false, NULL},
    {"peak_bytes", COLUMN_BYTES, 0, false,
     "saved as allocated, scratch and outputs of forward and backward, the most at once"},
    {"scatter_saved_bytes", COLUMN_BYTES, 0, false,
     "what ScatterMoE's caching keeps: X, H, A, Y, ids and gates"},
    {"tile_waste", COLUMN_NUMBER, 4, false,
     "padding's share of rows at tile 128, random routing, plain top-K"},
    {"tile_waste_rounded", COLUMN_NUMBER, 4, false, "the same with --rounding (nr-f when none is given)"},
};

static void put_problem(table *t, const problem_options *options, const bench_shape *shape,
                        const smoe_layer *layer, const smoe_sizes *sizes)
{
    smoe_layer plain = *layer, rounded = *layer;
    plain.rounding = SMOE_ROUNDING_NONE;
    if (layer->rounding == SMOE_ROUNDING_NONE) rounded.rounding = SMOE_ROUNDING_NR_F;
    const pass_bytes peaks =
        pass_peaks(layer, true, (double)sizes->saved_buffer_bytes, (double)sizes->scratch_forward_bytes,
                   (double)sizes->scratch_backward_bytes);
    table_text(t, shape->suite);
    table_text(t, shape->name);
    table_integer(t, layer->tokens);
    table_integer(t, layer->hidden);
    table_integer(t, layer->intermediate);
    table_integer(t, layer->experts);
    table_integer(t, layer->topk);
    table_text(t, dtype_name(layer->dtype));
    table_text(t, activation_name(layer->activation));
    table_text(t, rounding_name(options->rounding));
    table_integer(t, layer->tile);
    table_integer(t, layer->chunks);
    table_count(t, flops_forward(layer));
    table_count(t, flops_backward(layer));
    table_number(t, arithmetic_intensity(layer));
    table_integer(t, (int64_t)sizes->saved_bytes);
    table_integer(t, (int64_t)sizes->metadata_bytes);
    table_integer(t, (int64_t)sizes->scratch_forward_bytes);
    table_integer(t, (int64_t)sizes->scratch_backward_bytes);
    table_integer(t, (int64_t)peaks.layer);
    table_integer(t, (int64_t)scatter_bytes(layer));
    table_number(t, tile_waste(&plain));
    table_number(t, tile_waste(&rounded));
    table_end_row(t);
}

static bool print_problems(const info_options *options, smoe_context *context, error *err)
{
    const problem_options *problem = &options->problem;
    const bool one = problem->shape_count == 1 && options->format == TABLE_ALIGNED;
    table *t = table_open(stdout, one ? TABLE_VERTICAL : options->format, problem_columns,
                          sizeof problem_columns / sizeof problem_columns[0]);
    if (!t) return fail(err, ERROR_RUNTIME, "info: out of memory");
    bool good = true;
    for (int i = 0; i < problem->shape_count && good; i++) {
        const smoe_layer layer = problem_layer(problem, &problem->shapes[i]);
        smoe_sizes sizes = SMOE_SIZES_INIT;
        const smoe_status status = smoe_query_sizes(context, &layer, &sizes);
        if (status == SMOE_OK)
            put_problem(t, problem, &problem->shapes[i], &layer, &sizes);
        else
            good = fail(err, status == SMOE_ERROR_UNSUPPORTED ? ERROR_RUNTIME : ERROR_USAGE, "%s",
                        smoe_last_error(context));
    }
    error close_error = {0};
    const bool closed = table_close(t, &close_error);
    if (good && !closed) *err = close_error;
    return good && closed;
}

static bool print_info(const info_options *options, error *err)
{
    if (options->model.path)
        return info_model_print(&options->model, options->problem.chunks, options->backend, options->format,
                                err);
    if (options->problem.shape_count == 0) return print_build(options, err);
    smoe_context_options wanted = SMOE_CONTEXT_OPTIONS_INIT;
    wanted.backend = options->backend;
    wanted.error_text = err->text;
    wanted.error_size = sizeof err->text;
    smoe_context *context;
    if (smoe_create(&context, &wanted) != SMOE_OK) {
        err->code = ERROR_RUNTIME;
        return false;
    }
    const bool good = print_problems(options, context, err);
    smoe_destroy(context);
    return good;
}

int smoe_cli_info(int argc, char **argv)
{
    argp_err_exit_status = ERROR_USAGE;
    info_options *options = calloc(1, sizeof *options);
    if (!options) {
        fprintf(stderr, "%s: out of memory\n", argv[0]);
        return ERROR_RUNTIME;
    }
    problem_options_init(&options->problem);
    options->model =
        (info_model){.batch = 8, .parts = 1, .gpus = 1, .clip = 1.0, .recompute = RECOMPUTE_NORMS};
    error err = {0};
    if (argp_parse(&info_argp, argc, argv, 0, NULL, options) != 0) {
        err.code = ERROR_USAGE;
    } else if (!print_info(options, &err)) {
        fprintf(stderr, "%s: %s\n", argv[0], err.text);
    }
    free(options);
    return err.code;
}
