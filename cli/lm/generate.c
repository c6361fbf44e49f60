/* `smoe generate`: samples text from a checkpoint and writes it token by token. */
#include "base/clock.h"
#include "cli/lm/load.h"
#include "cli/support/cli.h"
#include "cli/support/problem.h"
#include "train/device.h"
#include "train/run/sample.h"

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
    {"prompt", 'p', "TEXT", 0, "What the text begins with (default nothing)", 0},
    {"tokens", 'n', "N", 0,
     "Largest number of tokens to sample, 0..1e9 (default 400). Sampling stops at an end-of-text token", 0},
    {"temperature", KEY_TEMPERATURE, "X", 0,
     "0: always take the most likely token; 1: sample with the model's probabilities (default 0.8)", 0},
    {"top-p", KEY_TOP_P, "X", 0,
     "Sample among the most likely tokens that together have this probability (default 0.95)", 0},
    {"device", KEY_DEVICE, "NAME", 0,
     "auto (default: the GPU if there is one), cpu, cuda, or cuda-plain (without cuBLASLt and cuDNN, slow)",
     0},
    {"seed", KEY_SEED, "N", 0, "Seed of the random numbers (default 1)", 0},
    {0}};

static double number(struct argp_state *state, const char *name, const char *text, double low, double high)
{
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end || !(value >= low && value <= high))
        argp_error(state, "--%s: '%s' is not a number in %g..%g", name, text, low, high);
    return value;
}

static int64_t whole(struct argp_state *state, const char *name, const char *text, double high)
{
    double value = number(state, name, text, 0, high);
    if (value != floor(value)) argp_error(state, "--%s: '%s' is not a whole number", name, text);
    return (int64_t)value;
}

static error_t parse(int key, char *text, struct argp_state *state)
{
    generate_options *o = state->input;
    switch (key) {
    case 'c': o->checkpoint = parse_path("--checkpoint", text, state); return 0;
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
                                          .doc = "Samples text from a checkpoint. Its tokens are bytes, or "
                                                 "those of the checkpoint's tokenizer (bpe.txt)."};

static bool print(const void *bytes, size_t length, error *err)
{
    return (fwrite(bytes, 1, length, stdout) == length && fflush(stdout) == 0) ||
           fail(err, ERROR_RUNTIME, "cannot write: %s", strerror(errno));
}

/* Tokens per second, without the first token, because its pass processes the whole prompt. */
static void show_rate(int64_t sampled, double seconds)
{
    if (sampled > 1) fprintf(stderr, "%.0f tokens a second\n", (double)(sampled - 1) / seconds);
}

/* `text` has `count` tokens and room for the tokens that will be sampled. Sampling stops at an end-of-text
 * token. */
static bool generate(generate_options *o, model *m, const bpe *table, int32_t *text, int64_t count,
                     error *err)
{
    double started = 0.0;
    int64_t sampled = 0;
    bool ended = false;
    if (!print(o->prompt, strlen(o->prompt), err)) return false;
    while (sampled < o->tokens && !ended) {
        if (sampled == 1) started = clock_seconds();
        if (!sample_next(&o->sampler, m, text, count, &text[count], err)) return false;
        size_t length;
        const unsigned char *bytes = bpe_bytes(table, text[count], &length);
        if (!print(bytes, length, err)) return false;
        ended = text[count] == table->end;
        count++;
        sampled++;
    }
    if (!print("\n", 1, err)) return false;
    show_rate(sampled, clock_seconds() - started);
    return true;
}

/* The tokens before the sampled ones: an end-of-text token, after which a document begins, and the prompt. If
 * the table has no end-of-text token and there is no prompt, the text continues a newline. Returns the number
 * of tokens. */
static int64_t begin(const bpe *table, const char *prompt, uint16_t *room, int32_t *text)
{
    int64_t first = 0;
    if (table->end >= 0) text[first++] = (int32_t)table->end;
    if (first == 0 && !*prompt) prompt = "\n";
    size_t count = bpe_encode(table, (const unsigned char *)prompt, strlen(prompt), room);
    for (size_t i = 0; i < count; i++) text[first++] = room[i];
    return first;
}

static bool generate_from(generate_options *o, model *m, const bpe *table, error *err)
{
    size_t length = strlen(o->prompt) + 1; // tokens of the prompt: no more than its bytes, or than a newline
    int32_t *text = malloc((length + 1 + (size_t)o->tokens) * sizeof *text);
    uint16_t *room = malloc(length * sizeof *room);
    bool done =
        (text && room) || fail(err, ERROR_RUNTIME, "out of memory: %lld tokens", (long long)o->tokens);
    done = done && generate(o, m, table, text, begin(table, o->prompt, room, text), err);
    free(room);
    free(text);
    return done;
}

/* A model without a tokenizer has bytes as tokens, which is a table without merges. */
static bool find_table(tokenizer *words, const generate_options *o, const model *m, error *err)
{
    static const char bytes[] = "smoe-bpe 1 256 0\n";
    if (!load_tokenizer(words, o->checkpoint, m->config.vocab, err)) return false;
    if (words->table.tokens > 0) return true;
    if (m->config.vocab != 256)
        return fail(err, ERROR_USAGE, "%s: a vocabulary of %lld and no tokenizer (bpe.txt); bytes are 256",
                    o->checkpoint, (long long)m->config.vocab);
    return bpe_parse(&words->table, bytes, sizeof bytes - 1, "bytes", err);
}

static bool run_on(train_device *device, generate_options *o, error *err)
{
    model m;
    tokenizer words = {0};
    if (!load_model(&m, o->checkpoint, 1, 0, MODEL_GENERATE, device, err)) return false;
    bool done = find_table(&words, o, &m, err) && generate_from(o, &m, &words.table, err);
    tokenizer_close(&words);
    model_destroy(&m);
    return done;
}

static bool run(generate_options *o, error *err)
{
    show_device(o->device);
    train_device *device = device_open(&(device_options){.name = o->device}, err);
    if (!device) return false;
    if (strcmp(device->name, "cpu") == 0) cli_show_blas_fault();
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
