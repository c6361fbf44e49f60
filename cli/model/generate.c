/* `smoe generate`: samples bytes from a checkpoint and writes them as they come. */
#include "cli/common/cli.h"
#include "cli/model/load.h"
#include "common/clock.h"
#include "train/device.h"
#include "train/sample.h"

#include <argp.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct generate_options {
    const char *checkpoint, *prompt, *device;
    int64_t tokens;
    sampler sampler;
} generate_options;

enum { KEY_TEMPERATURE = 1, KEY_TOP_P, KEY_SEED, KEY_DEVICE };

static const struct argp_option options_table[] = {
    {"checkpoint", 'c', "DIR", 0, "A checkpoint, or the folder of a run (default smoe-out)", 0},
    {"prompt", 'p', "TEXT", 0, "What the text begins with (default a newline)", 0},
    {"tokens", 'n', "N", 0, "How many to sample, 0..1e9 (default 400)", 0},
    {"temperature", KEY_TEMPERATURE, "X", 0,
     "0 takes the likeliest, 1 samples as the model says (default 0.8)", 0},
    {"top-p", KEY_TOP_P, "X", 0, "Among the likeliest that together have this probability (default 0.95)", 0},
    {"device", KEY_DEVICE, "NAME", 0, "cpu, cuda, cuda-plain or auto (default auto)", 0},
    {"seed", KEY_SEED, "N", 0, "Of the random numbers (default 1)", 0},
    {0}};

static double number(struct argp_state *state, const char *name, const char *text, double low, double high)
{
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end || !(value >= low && value <= high))
        argp_error(state, "--%s: '%s' is no number in %g..%g", name, text, low, high);
    return value;
}

static int64_t whole(struct argp_state *state, const char *name, const char *text, double high)
{
    double value = number(state, name, text, 0, high);
    if (value != floor(value)) argp_error(state, "--%s: '%s' is no whole number", name, text);
    return (int64_t)value;
}

static error_t parse(int key, char *text, struct argp_state *state)
{
    generate_options *o = state->input;
    switch (key) {
    case 'c': o->checkpoint = text; return 0;
    case 'p': o->prompt = text; return 0;
    case 'n': o->tokens = whole(state, "tokens", text, 1e9); return 0;
    case KEY_TEMPERATURE: o->sampler.temperature = number(state, "temperature", text, 0, 100); return 0;
    case KEY_TOP_P: o->sampler.top_p = number(state, "top-p", text, 1e-6, 1); return 0;
    case KEY_SEED: o->sampler.seed = (uint64_t)whole(state, "seed", text, 9e15); return 0;
    case KEY_DEVICE: o->device = text; return 0;
    case ARGP_KEY_ARG: argp_error(state, "'%s' is not expected here", text); return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp generate_argp = {.options = options_table,
                                          .parser = parse,
                                          .doc = "Samples text from a checkpoint of a byte-level model."};

/* text holds `count` tokens and has room for as many more as are asked for. */
static bool generate(generate_options *o, model *m, int32_t *text, int64_t count, error *err)
{
    double started = 0.0;
    fwrite(o->prompt, 1, strlen(o->prompt), stdout);
    for (int64_t i = 0; i < o->tokens; i++, count++) {
        if (i == 1) started = clock_seconds(); // the first runs the whole prompt
        if (!sample_next(&o->sampler, m, text, count, &text[count], err)) return false;
        putchar(text[count]);
        if (fflush(stdout) != 0) return fail(err, ERROR_RUNTIME, "cannot write: %s", strerror(errno));
    }
    putchar('\n');
    if (o->tokens > 1)
        fprintf(stderr, "%.0f tokens a second\n", (double)(o->tokens - 1) / (clock_seconds() - started));
    return fflush(stdout) == 0 || fail(err, ERROR_RUNTIME, "cannot write: %s", strerror(errno));
}

static bool run_on(train_device *device, generate_options *o, error *err)
{
    model m;
    if (!load_model(&m, o->checkpoint, 1, 0, MODEL_GENERATE, device, err)) return false;
    bool done =
        m.config.vocab == 256 || fail(err, ERROR_USAGE, "%s: a vocabulary of %lld; text is bytes, 256",
                                      o->checkpoint, (long long)m.config.vocab);
    size_t length = strlen(o->prompt);
    int32_t *text = malloc((length + (size_t)o->tokens + 1) * sizeof *text);
    if (done && !text) done = fail(err, ERROR_RUNTIME, "out of memory: %lld tokens", (long long)o->tokens);
    if (done) {
        text[0] = '\n'; // what an empty prompt continues
        for (size_t i = 0; i < length; i++) text[i] = (unsigned char)o->prompt[i];
        done = generate(o, &m, text, length ? (int64_t)length : 1, err);
    }
    free(text);
    model_destroy(&m);
    return done;
}

static bool run(generate_options *o, error *err)
{
    train_device *device = device_open(&(device_options){.name = o->device}, err);
    if (!device) return false;
    bool done = run_on(device, o, err);
    device->ops->close(device);
    return done;
}

int smoe_cli_generate(int argc, char **argv)
{
    generate_options options = {.checkpoint = "smoe-out",
                                .prompt = "",
                                .device = "auto",
                                .tokens = 400,
                                .sampler = {.temperature = 0.8, .top_p = 0.95, .seed = 1}};
    error err = {0};
    argp_err_exit_status = ERROR_USAGE;
    if (argp_parse(&generate_argp, argc, argv, 0, NULL, &options) != 0) return ERROR_USAGE;
    if (!run(&options, &err)) fprintf(stderr, "%s: %s\n", argv[0], err.text);
    return err.code;
}
