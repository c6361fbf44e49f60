/* `smoe eval`: computes loss and bits per byte of a checkpoint on files, with plain top-K. */
#include "cli/lm/data.h"
#include "cli/lm/load.h"
#include "cli/lm/progress.h"
#include "cli/support/cli.h"
#include "cli/support/problem.h"
#include "cli/support/table.h"
#include "train/device.h"
#include "train/run/evaluate.h"

#include <argp.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SEQUENCES = 16, MOST_CONTEXT = 1 << 24, KEY_JSON = 1, KEY_CSV, KEY_CONTEXT, KEY_DEVICE };

typedef struct eval_options {
    const char *checkpoint, *device;
    const char **paths;
    size_t path_count;
    int64_t context; // 0: the checkpoint's
    table_format format;
    bool quiet;
} eval_options;

static const struct argp_option options_table[] = {
    {"checkpoint", 'c', "DIR", 0, "A checkpoint, or the folder of a run (default smoe-out)", 0},
    {"context", KEY_CONTEXT, "N", 0,
     "Tokens of a window (default: the checkpoint's context, for which the model was trained); at most those "
     "of the text. The last window may be shorter, so that every token except the first is predicted",
     0},
    {"device", KEY_DEVICE, "NAME", 0,
     "auto (default: the GPU if there is one), cpu, cuda, or cuda-plain (without cuBLASLt and cuDNN, slow)",
     0},
    {"json", KEY_JSON, NULL, 0, "One JSON object", 0},
    {"csv", KEY_CSV, NULL, 0, "Comma-separated values", 0},
    {"quiet", 'q', NULL, 0, "Do not show progress", 0},
    {0}};

static error_t parse(int key, char *text, struct argp_state *state)
{
    eval_options *o = state->input;
    error err = {0};
    switch (key) {
    case 'c': o->checkpoint = parse_path("--checkpoint", text, state); return 0;
    case KEY_CONTEXT:
        if (!parse_integer("--context", text, 1, MOST_CONTEXT, &o->context, &err))
            argp_error(state, "%s", err.text);
        return 0;
    case KEY_DEVICE: o->device = text; return 0;
    case KEY_JSON: o->format = TABLE_JSON; return 0;
    case 'q': o->quiet = true; return 0;
    case KEY_CSV: o->format = TABLE_CSV; return 0;
    case ARGP_KEY_ARG: o->paths[o->path_count++] = parse_path("FILE", text, state); return 0;
    case ARGP_KEY_NO_ARGS: argp_error(state, "no FILE to evaluate on"); return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp eval_argp = {
    .options = options_table,
    .parser = parse,
    .args_doc = "FILE...",
    .doc = "Computes the loss of a checkpoint on text files, folders of them, or token "
           "files, window by window; - is "
           "the text on standard input."};

static const table_column columns[] = {
    {"tokens", COLUMN_INTEGER, 0, false, NULL},
    {"loss", COLUMN_NUMBER, 4, false, "nats a token"},
    {"bits_per_byte", COLUMN_NUMBER, 4, false, NULL},
    {"perplexity", COLUMN_NUMBER, 3, false, "e to the loss"},
};

static bool print_result(const eval_options *o, const evaluation *e, error *err)
{
    table *t = table_open(stdout, o->format, columns, sizeof columns / sizeof columns[0]);
    if (!t) return fail(err, ERROR_RUNTIME, "out of memory");
    table_integer(t, e->tokens);
    table_number(t, e->loss);
    table_number(t, evaluation_bits_per_byte(e));
    table_number(t, exp(e->loss));
    table_end_row(t);
    return table_close(t, err);
}

/* The tokens of a window: --context, but no more than can be predicted, or else the model's own context. A
 * line says if the text has fewer, or if the model was trained with fewer. */
static int64_t choose_context(const eval_options *o, int64_t trained, const tokens *data)
{
    const int64_t most = tokens_validation_count(data) - 1;
    if (o->context == 0) return trained;
    if (o->context > most)
        fprintf(stderr, "--context %lld is longer than the text: it is one window of %lld tokens\n",
                (long long)o->context, (long long)most);
    const int64_t context = o->context < most ? o->context : most;
    if (context > trained)
        fprintf(stderr,
                "windows of %lld tokens, but the model was trained with a context of %lld: its loss may be "
                "higher past it\n",
                (long long)context, (long long)trained);
    return context;
}

static bool measure(train_device *device, const eval_options *o, const tokens *data, int64_t context,
                    error *err)
{
    model m;
    evaluation result;
    const int64_t windows = (tokens_validation_count(data) + context - 1) / context;
    if (!load_model(&m, o->checkpoint, windows < SEQUENCES ? windows : SEQUENCES, context, MODEL_EVALUATE,
                    device, err))
        return false;
    progress shown = progress_start();
    const evaluation_watch watch = {.pass = o->quiet ? NULL : progress_show_pass, .user = &shown};
    bool done = evaluate(&result, &m, data, 0, &watch, err);
    progress_end(&shown);
    if (done && !isfinite(result.loss))
        done = fail(err, ERROR_RUNTIME, "%s: its loss is %g: the weights are broken or too large",
                    o->checkpoint, result.loss);
    done = done && print_result(o, &result, err);
    model_destroy(&m);
    return done;
}

static bool run_on(train_device *device, const eval_options *o, error *err)
{
    model_config config;
    tokenizer words = {0};
    tokens *data = NULL;
    if (!load_config(&config, o->checkpoint, err) ||
        !load_tokenizer(&words, o->checkpoint, config.vocab, err))
        return false;
    const int64_t wanted = o->context ? o->context : config.context;
    bool done = tokens_open(&data, o->paths, o->path_count, words.table.tokens ? &words.table : NULL,
                            config.vocab, wanted, TOKENS_EVAL, err);
    if (done) show_skipped(data);
    done = done && measure(device, o, data, choose_context(o, config.context, data), err);
    tokens_close(data);
    tokenizer_close(&words);
    return done;
}

static bool run(const eval_options *o, error *err)
{
    show_device(o->device);
    train_device *device = device_open(&(device_options){.name = o->device}, err);
    if (!device) return false;
    if (strcmp(device->name, "cpu") == 0) cli_show_blas_fault();
    bool done = run_on(device, o, err);
    device->ops->close(device);
    return done;
}

int smoe_cli_eval(int argc, char **argv)
{
    eval_options options = {.checkpoint = "smoe-out", .device = "auto", .format = TABLE_ALIGNED};
    error err = {0};
    argp_err_exit_status = ERROR_USAGE;
    options.paths = calloc((size_t)argc, sizeof *options.paths);
    if (!options.paths)
        fail(&err, ERROR_RUNTIME, "out of memory");
    else if (argp_parse(&eval_argp, argc, argv, 0, NULL, &options) != 0)
        fail(&err, ERROR_USAGE, "the arguments cannot be read");
    else
        run(&options, &err);
    if (err.code) fprintf(stderr, "%s: %s\n", argv[0], err.text);
    free(options.paths);
    return err.code;
}
