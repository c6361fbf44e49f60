/* See train_options.h. */
#include "cli/lm/train_options.h"

#include "cli/support/problem.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { GROUP_RUN = 1, GROUP_MODEL, GROUP_ROUTING, GROUP_OPTIMISER };

/* An option whose value is a number of the settings. */
typedef struct number_option {
    const char *name, *argument;
    size_t offset; // in train_settings
    enum { INT64, INT32, REAL, SINGLE } type;
    double low, high;
    int group;
    const char *text;
} number_option;

#define AT(field)     offsetof(train_settings, field)
#define CONFIG(field) offsetof(train_settings, config.field)

static const number_option numbers[] = {
    {"steps", "N", AT(steps), INT64, 1, 1e15, GROUP_RUN,
     "Train for N steps instead of a time, those before a --resume included. A resumed run then gives the "
     "same bits as an uninterrupted one"},
    {"seconds", "X", AT(seconds), REAL, 0.001, 1e9, GROUP_RUN,
     "Train for X seconds, those before a --resume included; cannot be combined with --steps"},
    {"seed", "N", AT(seed), INT64, 0, 9e15, GROUP_RUN,
     "Seed of the first weights, the order of the samples and the rounding rule SR-f"},
    {"logs", "N", AT(logs), INT64, 1, 1e9, GROUP_RUN, "Number of log lines over the run"},
    {"evaluations", "N", AT(validations.count), INT64, 0, 1e9, GROUP_RUN,
     "Number of validations over the run, each on windows at equal distances in the validation text (default "
     "at most 10, see --evaluation-share). With 0 no text is set aside: all of it is trained on, except "
     "token files that are for validation by their names"},
    {"evaluation-tokens", "N", AT(validations.tokens), INT64, 1, 1e15, GROUP_RUN,
     "Tokens of each validation except the last one (default at most 16384, see --evaluation-share); without "
     "effect if --evaluations is less than 2"},
    {"last-evaluation-tokens", "N", AT(validations.last), INT64, 1, 1e15, GROUP_RUN,
     "Tokens of the last validation (default at most 1048576, see --evaluation-share); without effect if "
     "--evaluations is 0"},
    {"evaluation-share", "X", AT(validation_share), REAL, 0, 1, GROUP_RUN,
     "Tokens of all validations together, as a fraction of those that the run trains on. What is not given "
     "of --evaluations, --evaluation-tokens and --last-evaluation-tokens is chosen by it before the first "
     "step"},
    {"checkpoints", "N", AT(checkpoints), INT64, 0, 1e9, GROUP_RUN,
     "Number of checkpoints over the run, 0: none"},
    {"keep", "N", AT(keep), INT64, 1, 1000, GROUP_RUN,
     "Keep the N newest checkpoints; without effect if --checkpoints is 0"},

    {"chunks", "C", AT(chunks), INT32, 1, 64, GROUP_RUN,
     "Column chunks of the experts, a power of two. More chunks need less memory and give the same bits "
     "(default 1; 4 if the run does not fit on the GPU otherwise)"},

    {"layers", "L", CONFIG(layers), INT64, 1, 4096, GROUP_MODEL, "Number of layers"},
    {"hidden", "D", CONFIG(hidden), INT64, 8, 1 << 18, GROUP_MODEL, "Hidden size, a multiple of 8"},
    {"heads", "N", CONFIG(heads), INT64, 1, 4096, GROUP_MODEL, "Number of attention heads"},
    {"intermediate", "N", CONFIG(intermediate), INT64, 8, 1 << 20, GROUP_MODEL,
     "Intermediate size of an expert, a multiple of 8"},
    {"experts", "E", CONFIG(experts), INT64, 1, 4096, GROUP_MODEL, "Number of experts of a layer"},
    {"topk", "K", CONFIG(topk), INT64, 1, 64, GROUP_MODEL, "Number of experts of a token"},
    {"shared", "N", CONFIG(shared_intermediate), INT64, 0, 1 << 20, GROUP_MODEL,
     "Intermediate size of a shared expert in every layer with experts, 0: none"},
    {"dense-layers", "N", CONFIG(dense_layers), INT64, 0, 4096, GROUP_MODEL,
     "The first N layers have a dense MLP and no experts"},
    {"dense-intermediate", "N", CONFIG(dense_intermediate), INT64, 0, 1 << 20, GROUP_MODEL,
     "Intermediate size of a dense MLP, 0: K times an expert's"},
    {"groups", "N", CONFIG(groups), INT64, 1, 4096, GROUP_MODEL,
     "Cut the experts into N groups of equal size, of which a token uses --groups-kept; only with --score "
     "sigmoid"},
    {"groups-kept", "N", CONFIG(groups_kept), INT64, 1, 4096, GROUP_MODEL,
     "Groups in which a token has its experts"},
    {"route-scale", "X", CONFIG(route_scale), REAL, 1e-6, 1e6, GROUP_MODEL,
     "Multiply the weights of the experts by X"},
    {"context", "TOKENS", CONFIG(context), INT64, 1, 1 << 24, GROUP_MODEL, "Tokens of a sequence"},
    {"vocab", "N", CONFIG(vocab), INT64, 2, 1 << 24, GROUP_MODEL,
     "Size of the vocabulary; text without --tokenizer needs 256"},
    {"init", "X", CONFIG(initializer_range), REAL, 1e-6, 10, GROUP_MODEL,
     "Standard deviation of the first weights (default 0.1 * sqrt(96 / D), at most 0.1)"},

    {"tile", "M", AT(routing.tile), INT32, 1, 4096, GROUP_ROUTING,
     "Tile of the rounding rules; without effect if --rounding is none"},
    {"balance", "X", AT(routing.balance_coefficient), SINGLE, 0, 100, GROUP_ROUTING,
     "Coefficient of the load-balance loss"},
    {"z-loss", "X", AT(routing.z_coefficient), SINGLE, 0, 100, GROUP_ROUTING,
     "Coefficient of the router's z-loss"},
    {"bias-rate", "X", AT(routing.bias_rate), SINGLE, 0, 1, GROUP_ROUTING,
     "Give the experts selection biases, and after each step raise those of experts with fewer tokens than "
     "the mean by X and lower the others; only with --score sigmoid. 0: the biases of a run that is resumed "
     "stay"},

    {"batch", "N", AT(batch), INT64, 1, 1 << 20, GROUP_OPTIMISER, "Sequences of a step"},
    {"micro-batches", "M", AT(parts), INT64, 1, 1 << 20, GROUP_OPTIMISER,
     "Process a batch in M parts of equal size and add their gradients in f32, which needs the memory of one "
     "part"},
    {"lr", "X", AT(lr), REAL, 0, 1e3, GROUP_OPTIMISER,
     "Peak learning rate (default 0.004 * 96 / D, at most 0.004)"},
    {"end-lr", "X", AT(end_lr), REAL, 0, 1, GROUP_OPTIMISER,
     "Learning rate at the end of the cosine, as a fraction of --lr; without effect if --warmup is 1"},
    {"warmup", "X", AT(warmup), REAL, 0, 1, GROUP_OPTIMISER,
     "Length of the linear warm-up, as a fraction of the run"},
    {"beta1", "X", AT(beta1), REAL, 0, 0.999999, GROUP_OPTIMISER, "Decay rate of the first moment"},
    {"beta2", "X", AT(beta2), REAL, 0, 0.999999, GROUP_OPTIMISER, "Decay rate of the second moment"},
    {"weight-decay", "X", AT(weight_decay), REAL, 0, 1e3, GROUP_OPTIMISER, "Weight decay of the matrices"},
    {"clip", "X", AT(clip), REAL, 0, 1e9, GROUP_OPTIMISER, "Clip the gradient to this norm, 0: do not clip"},
};

enum {
    NUMBERS = sizeof numbers / sizeof numbers[0],
    KEY_NUMBER = 0x1000, // + index
    KEY_MINUTES = 0x2000,
    KEY_RESUME,
    KEY_FROM,
    KEY_TOKENIZER,
    KEY_RENORMALIZE,
    KEY_TIED,
    KEY_DENSE_TWIN,
    KEY_ROUNDING,
    KEY_SCORE,
    KEY_JSON,
    KEY_GPUS,
    KEY_PEER_TIMEOUT,
    KEY_DEVICE,
    KEY_PRECISION,
    KEY_GRADIENTS,
    KEY_FASTEST,
    KEY_RECOMPUTE,
    KEY_COMPUTE
};
static_assert((int)NUMBERS <= (int)TRAIN_NUMBER_OPTIONS, "a mark for each option with a number");

static const struct argp_option others[] = {
    {NULL, 0, NULL, 0, "Run:", GROUP_RUN},
    {"out", 'o', "DIR", 0, "Folder of the log, the curve and the checkpoints", GROUP_RUN},
    {"minutes", KEY_MINUTES, "X", 0, "Train for X minutes, as --seconds", GROUP_RUN},
    {"resume", KEY_RESUME, NULL, 0,
     "Continue from the newest checkpoint in DIR, on the same text. The sizes of the model, --batch, --seed, "
     "the number and tokens of validations, --compute, and what is under Routing and Optimiser except "
     "--micro-batches "
     "are those of the run unless they are given",
     GROUP_RUN},
    {"from", KEY_FROM, "CHECKPOINT", 0,
     "Start with the weights of a checkpoint (smoe's or OLMoE's, also in shards) instead of random ones. The "
     "model's sizes, the tokenizer and, unless it is given, --balance are the checkpoint's; --context may "
     "differ",
     GROUP_RUN},
    {"tokenizer", KEY_TOKENIZER, "TABLE", 0,
     "bpe.txt of tools/make_tokens.py: the table of the token files, or the table to encode text with. Every "
     "checkpoint has a copy. Unless --vocab is given, the vocabulary is the size of the table, rounded up to "
     "a multiple of 64",
     GROUP_RUN},
    {"device", KEY_DEVICE, "NAME", 0,
     "cpu, cuda, auto (the GPU if there is one) or cuda-plain (a GPU without cuBLASLt and cuDNN, slow)",
     GROUP_RUN},
    {"precision", KEY_PRECISION, "TYPE", 0,
     "cuda: type of weights and AdamW states, f32 or bf16; arithmetic is bf16 with both. CPU: f32",
     GROUP_RUN},
    {"gradients", KEY_GRADIENTS, "TYPE", 0,
     "cuda: type of the gradients of the weights and of their sums over GPUs, f32 or bf16 (default bf16 with "
     "--precision bf16 and no micro-batches, else f32). With several GPUs bf16 halves the bytes that are "
     "summed",
     GROUP_RUN},
    {"fastest", KEY_FASTEST, NULL, 0,
     "With --device cuda the backward of attention may sum in any order, so two runs differ in their last "
     "bits. Without effect on the CPU and with cuda-plain",
     GROUP_RUN},
    {"recompute", KEY_RECOMPUTE, "WHAT", 0,
     "What the backward computes again to save memory: none; norms (the outputs of the norms, at little "
     "cost); norms-qk (also q and k after norm and RoPE); layers (all but the input of a layer). The bits "
     "are the same. Default: norms, or more if the run does not fit on the GPU otherwise",
     GROUP_RUN},
    {"compute", KEY_COMPUTE, "TYPE", 0,
     "Experimental: the experts' GEMMs in training: bf16 (default; CPU: f32), f8, or f8-dgrad, f8 but for "
     "the weight gradients. A GPU needs compute capability 9.0",
     GROUP_RUN},
    {"gpus", KEY_GPUS, "N", 0,
     "Train on N GPUs of this host, a process each; with --device cpu in N processes on its CPUs. Under "
     "torchrun, srun or mpirun every process takes its rank from the environment instead. --batch is that "
     "of all ranks (default 1)",
     GROUP_RUN},
    {"peer-timeout", KEY_PEER_TIMEOUT, "X", 0,
     "With several ranks: end the run when a rank is silent for X seconds, or when none makes progress, "
     "except while files are read at the start or written (default 300)",
     GROUP_RUN},
    {"json", KEY_JSON, NULL, 0, "Print the result as one JSON object", GROUP_RUN},
    {"quiet", 'q', NULL, 0, "Do not show progress", GROUP_RUN},
    {NULL, 0, NULL, 0, "Model:", GROUP_MODEL},
    {"renormalize", KEY_RENORMALIZE, NULL, 0, "Divide the weights of a token's experts by their sum",
     GROUP_MODEL},
    {"score", KEY_SCORE, "NAME", 0,
     "What weights a token's experts: softmax (over all experts), topk-softmax (over the K) or sigmoid",
     GROUP_MODEL},
    {"tied", KEY_TIED, NULL, 0, "Use the embedding as the output head", GROUP_MODEL},
    {"dense-twin", KEY_DENSE_TWIN, NULL, 0,
     "Train a dense model of equal active FLOPs instead: every layer has an MLP as wide as the K experts of "
     "a token and the shared expert together. The options of its MoE model may stay: --experts, "
     "--renormalize, --chunks and those under Routing are without effect",
     GROUP_MODEL},
    {NULL, 0, NULL, 0,
     "Routing while training, in layers with experts (validation is always plain top-K):", GROUP_ROUTING},
    {"rounding", KEY_ROUNDING, "RULE", 0, "Token rounding: none, nr-f, sr-f, nr-s, balance-f, up or down",
     GROUP_ROUTING},
    {NULL, 0, NULL, 0, "Optimiser, AdamW:", GROUP_OPTIMISER},
};
enum { OTHERS = sizeof others / sizeof others[0] };

static double number_get(const train_settings *s, const number_option *o)
{
    const char *at = (const char *)s + o->offset;
    switch (o->type) {
    case INT64: return (double)*(const int64_t *)at;
    case INT32: return *(const int32_t *)at;
    case REAL: return *(const double *)at;
    default: return (double)*(const float *)at;
    }
}

static void number_set(train_settings *s, const number_option *o, double value)
{
    char *at = (char *)s + o->offset;
    switch (o->type) {
    case INT64: *(int64_t *)at = (int64_t)value; break;
    case INT32: *(int32_t *)at = (int32_t)value; break;
    case REAL: *(double *)at = value; break;
    default: *(float *)at = (float)value;
    }
}

static double parse_real(struct argp_state *state, const char *name, const char *text, double low,
                         double high)
{
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end || !(value >= low && value <= high))
        argp_error(state, "--%s: '%s' is not a number in %.9g..%.9g", name, text, low, high);
    return value;
}

/* A run ends after a number of steps or after a time. Of the options that set this, only one may be given. */
static void note_length(train_options *options, const char *name, struct argp_state *state)
{
    if (options->length && strcmp(options->length, name) != 0)
        argp_error(state, "--%s cannot be combined with --%s: a run ends by one of them", name,
                   options->length);
    options->length = name;
}

static double parse_whole(struct argp_state *state, const char *name, const char *text, double low,
                          double high)
{
    const double value = parse_real(state, name, text, low, high);
    if (value != floor(value)) argp_error(state, "--%s: '%s' is not a whole number", name, text);
    return value;
}

static void parse_number(train_options *options, int index, const char *text, struct argp_state *state)
{
    const number_option *o = &numbers[index];
    const bool whole = o->type == INT64 || o->type == INT32;
    const double value = (whole ? parse_whole : parse_real)(state, o->name, text, o->low, o->high);
    number_set(&options->settings, o, value);
    options->given[index] = true;
    options->sizes_given |=
        o->group == GROUP_MODEL && o->offset != CONFIG(initializer_range) && o->offset != CONFIG(context);
    options->vocab_given |= o->offset == CONFIG(vocab);
    options->init_given |= o->offset == CONFIG(initializer_range);
    options->settings.keep_chunks |= o->offset == AT(chunks);
    if (o->offset == AT(steps) || o->offset == AT(seconds)) note_length(options, o->name, state);
}

/* The place of `text` among the count choices. */
static int parse_choice(struct argp_state *state, const char *name, const char *text,
                        const char *const *choices, int count)
{
    char all[128] = "";
    for (int i = 0; i < count; i++) {
        const size_t length = strlen(all);
        if (strcmp(text, choices[i]) == 0) return i;
        snprintf(all + length, sizeof all - length, "%s%s", i ? ", " : "", choices[i]);
    }
    argp_error(state, "--%s: '%s' is not one of %s", name, text, all);
    return 0;
}

static void parse_rounding(train_options *options, const char *text, struct argp_state *state)
{
    const char *names[SMOE_ROUNDING_DOWN + 1];
    for (int i = 0; i <= SMOE_ROUNDING_DOWN; i++) names[i] = rounding_name((smoe_rounding)i);
    options->settings.routing.rounding =
        (smoe_rounding)parse_choice(state, "rounding", text, names, SMOE_ROUNDING_DOWN + 1);
    options->rounding_given = true;
}

static error_t parse_device(int key, const char *text, struct argp_state *state)
{
    static const char *const names[] = {"auto", "cpu", "cuda", "cuda-plain"}, *const precisions[] = {"f32",
                                                                                                     "bf16"};
    train_settings *s = &((train_options *)state->input)->settings;
    switch (key) {
    case KEY_DEVICE: s->device.name = names[parse_choice(state, "device", text, names, 4)]; return 0;
    case KEY_PRECISION: s->device.bf16 = parse_choice(state, "precision", text, precisions, 2); return 0;
    case KEY_GRADIENTS:
        s->device.gradients =
            parse_choice(state, "gradients", text, precisions, 2) ? GRADIENTS_BF16 : GRADIENTS_F32;
        return 0;
    case KEY_FASTEST: s->device.fastest = true; return 0;
    case KEY_RECOMPUTE:
        s->recompute =
            (model_recompute)parse_choice(state, "recompute", text, model_recompute_names, RECOMPUTE_NAMES);
        s->keep_recompute = true;
        return 0;
    case KEY_COMPUTE:
        s->compute = model_computes[parse_choice(state, "compute", text, model_compute_names, COMPUTE_NAMES)];
        ((train_options *)state->input)->compute_given = true;
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static error_t parse(int key, char *text, struct argp_state *state)
{
    train_options *options = state->input;
    train_settings *s = &options->settings;
    if (key >= KEY_NUMBER && key < KEY_NUMBER + NUMBERS) {
        parse_number(options, key - KEY_NUMBER, text, state);
        return 0;
    }
    switch (key) {
    case 'o': s->out = parse_path("--out", text, state); return 0;
    case 'q': options->quiet = true; return 0;
    case KEY_JSON: options->json = true; return 0;
    case KEY_RESUME: s->resume = true; return 0;
    case KEY_FROM: s->from = parse_path("--from", text, state); return 0;
    case KEY_TOKENIZER: s->tokenizer = parse_path("--tokenizer", text, state); return 0;
    case KEY_MINUTES:
        s->seconds = 60.0 * parse_real(state, "minutes", text, 1e-4, 1e7);
        note_length(options, "minutes", state);
        return 0;
    case KEY_RENORMALIZE:
    case KEY_TIED:
        *(key == KEY_TIED ? &s->config.tied : &s->config.norm_topk_prob) = true;
        options->sizes_given = true;
        return 0;
    case KEY_GPUS: options->gpus = (int32_t)parse_whole(state, "gpus", text, 1, 64); return 0;
    case KEY_PEER_TIMEOUT: options->peer_timeout = parse_real(state, "peer-timeout", text, 1, 1e6); return 0;
    case KEY_DENSE_TWIN: options->dense_twin = options->sizes_given = true; return 0;
    case KEY_SCORE:
        s->config.score = parse_choice(state, "score", text, model_score_names, MOE_SCORE_COUNT);
        options->score_given = options->sizes_given = true;
        return 0;
    case KEY_ROUNDING: parse_rounding(options, text, state); return 0;
    case ARGP_KEY_ARG: options->paths[s->path_count++] = parse_path("FILE", text, state); return 0;
    case ARGP_KEY_NO_ARGS: argp_error(state, "no FILE to train on"); return 0;
    default: return parse_device(key, text, state);
    }
}

/* "" for a default that the option itself would refuse. Such is 0 steps, which means that the run ends after
 * a time. */
static void number_text(char *text, size_t size, const train_settings *s, const number_option *o)
{
    const double value = number_get(s, o);
    *text = '\0';
    if (value >= o->low) snprintf(text, size, "%.7g", value);
}

/* Adds the default to the text of an option that has one. */
static char *add_default(int key, const char *text, void *input)
{
    (void)input;
    train_settings s = train_settings_default();
    char value[64] = "", *made;
    s.lr = s.config.initializer_range = NAN; // they depend on the sizes
    if (key >= KEY_NUMBER && key < KEY_NUMBER + NUMBERS)
        number_text(value, sizeof value, &s, &numbers[key - KEY_NUMBER]);
    if (key == 'o') snprintf(value, sizeof value, "%s", s.out);
    if (key == KEY_DEVICE) snprintf(value, sizeof value, "%s", s.device.name);
    if (key == KEY_PRECISION) snprintf(value, sizeof value, "f32");
    if (key == KEY_RECOMPUTE) snprintf(value, sizeof value, "norms");
    if (key == KEY_SCORE) snprintf(value, sizeof value, "%s", model_score_names[s.config.score]);
    if (key == KEY_ROUNDING) snprintf(value, sizeof value, "%s", rounding_name(s.routing.rounding));
    if (!*value || !text || asprintf(&made, "%s (default %s)", text, value) < 0) return (char *)text;
    return made;
}

/* The options of a router that not every score has. */
static bool check_router(const model_config *c, error *err)
{
    const char *only = c->groups > 1 ? "--groups" : c->selection_bias ? "--bias-rate" : NULL;
    if (only && !moe_score_takes_bias(c->score))
        return fail(err, ERROR_USAGE, "%s needs --score sigmoid, not %s", only, model_score_names[c->score]);
    if (moe_score_over_kept(c->score) && c->norm_topk_prob)
        return fail(err, ERROR_USAGE,
                    "--renormalize cannot be combined with --score %s: the weights of a "
                    "token's experts sum to 1 already",
                    model_score_names[c->score]);
    return true;
}

/* The limits that relate two options. model_config_check has them too, with the names of config.json. */
static bool check_sizes(const model_config *c, error *err)
{
    if (!check_router(c, err)) return false;
    if (c->topk > c->experts)
        return fail(err, ERROR_USAGE, "--topk is %lld, more than --experts, which is %lld",
                    (long long)c->topk, (long long)c->experts);
    if (c->hidden % (2 * c->heads) != 0)
        return fail(err, ERROR_USAGE,
                    "--hidden is %lld, it must be a multiple of %lld, twice --heads (RoPE turns pairs)",
                    (long long)c->hidden, 2 * (long long)c->heads);
    if (c->dense_layers > c->layers)
        return fail(err, ERROR_USAGE, "--dense-layers is %lld, more than --layers, which is %lld",
                    (long long)c->dense_layers, (long long)c->layers);
    return true;
}

/* Sizes that follow from others. The config.json of a dense twin has its own already; a shared expert counts
 * if it was given again. */
static bool derive_sizes(train_options *options, error *err)
{
    model_config *c = &options->settings.config;
    if (c->dense_intermediate && !c->dense_layers)
        return fail(err, ERROR_USAGE, "--dense-intermediate is only for --dense-layers");
    if (options->dense_twin && (c->dense_layers < c->layers || c->shared_intermediate > 0)) {
        c->dense_layers = c->layers;
        c->dense_intermediate = c->topk * c->intermediate + c->shared_intermediate;
        c->shared_intermediate = 0;
    }
    if (c->dense_layers && !c->dense_intermediate) c->dense_intermediate = c->topk * c->intermediate;
    return check_sizes(c, err);
}

/* The double of the shortest decimal number that is `value` in single precision: 0.01 for 0.01f. */
static double decimal(float value)
{
    char text[32];
    for (int digits = 1; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)value);
        if (strtof(text, NULL) == value) break;
    }
    return strtod(text, NULL);
}

static bool is_given(const train_options *options, size_t offset)
{
    for (int i = 0; i < NUMBERS; i++)
        if (numbers[i].offset == offset) return options->given[i];
    return false;
}

/* What follows from the sizes of a new run, unless it is given. */
static void choose_by_sizes(train_options *options)
{
    train_settings *s = &options->settings;
    if (!s->from && !options->init_given) s->config.initializer_range = train_default_init(&s->config);
    if (!is_given(options, AT(lr))) s->lr = train_default_lr(&s->config);
}

/* Options that contradict each other. The sizes of a run that takes them from a checkpoint come later. */
static bool complete(train_options *options, error *err)
{
    train_settings *s = &options->settings;
    model_config *c = &s->config;
    if (s->from && (s->resume || options->sizes_given))
        return fail(err, ERROR_USAGE, "--from cannot be combined with %s",
                    s->resume ? "--resume: a run continues from its own checkpoint"
                              : "options of the model's sizes: they are the checkpoint's");
    if (s->resume && options->init_given)
        return fail(err, ERROR_USAGE,
                    "--init cannot be combined with --resume: the weights are those of the run");
    if (s->from && options->init_given)
        return fail(err, ERROR_USAGE,
                    "--from cannot be combined with --init: the first weights are the checkpoint's");
    c->router_aux_loss_coef = decimal(s->routing.balance_coefficient);
    if (options->dense_twin && c->dense_layers)
        return fail(err, ERROR_USAGE,
                    "--dense-twin cannot be combined with --dense-layers: all its layers are dense");
    if (!options->dense_twin && !s->resume && c->shared_intermediate && c->dense_layers == c->layers)
        return fail(err, ERROR_USAGE,
                    "--shared is %lld, but no layer has experts: --dense-layers is %lld, as --layers is",
                    (long long)c->shared_intermediate, (long long)c->dense_layers);
    if (!s->from && !s->resume) c->selection_bias = s->routing.bias_rate > 0.0f;
    if (s->from || s->resume) return true;
    choose_by_sizes(options);
    return derive_sizes(options, err);
}

bool train_options_parse(train_options *options, int argc, char **argv, error *err)
{
    struct argp_option table[NUMBERS + OTHERS + 1] = {{0}};
    memcpy(table, others, sizeof others);
    for (int i = 0; i < NUMBERS; i++)
        table[OTHERS + i] = (struct argp_option){numbers[i].name, KEY_NUMBER + i,  numbers[i].argument, 0,
                                                 numbers[i].text, numbers[i].group};
    const struct argp argp = {
        .options = table,
        .parser = parse,
        .args_doc = "FILE...",
        .doc =
            "Trains a Mixture-of-Experts language model (OLMoE's architecture) on text files, folders of "
            "them, or token files (*.bin); - is the text on standard input. Token files with val, valid or "
            "validation in their names are for validation only.\vDIR receives train.jsonl (a JSON "
            "object a line), curve.png if gnuplot is installed, and checkpoints (DIR/latest is the newest). "
            "Hugging Face transformers opens the checkpoint of a model without --shared and --dense-layers "
            "as it is. Any other checkpoint has the model type smoe, which the Python package registers: "
            "import smoe.transformers.",
        .help_filter = add_default,
    };
    argp_err_exit_status = ERROR_USAGE;
    *options = (train_options){.settings = train_settings_default(), .gpus = 1, .peer_timeout = 300};
    options->paths = calloc((size_t)argc, sizeof *options->paths);
    if (!options->paths) return fail(err, ERROR_RUNTIME, "out of memory");
    options->settings.paths = options->paths;
    error_t status = argp_parse(&argp, argc, argv, 0, NULL, options);
    if (status != 0) return fail(err, ERROR_USAGE, "%s", strerror(status));
    return complete(options, err);
}

/* NAN: not known, because an earlier program wrote the checkpoint. */
static void adopt(train_options *options, size_t offset, double value)
{
    for (int i = 0; i < NUMBERS; i++)
        if (numbers[i].offset == offset && !options->given[i] && !isnan(value))
            number_set(&options->settings, &numbers[i], value);
}

void train_options_summary(const train_options *options, char *text, size_t size)
{
    static const char *const gradients[] = {
        [GRADIENTS_DEFAULT] = "default", [GRADIENTS_F32] = "f32", [GRADIENTS_BF16] = "bf16"};
    const train_settings *s = &options->settings;
    size_t at = 0;
    text[0] = '\0';
    for (int i = 0; i < NUMBERS && at < size; i++)
        at += (size_t)snprintf(text + at, size - at, "--%s %.9g\n", numbers[i].name,
                               number_get(s, &numbers[i]));
    if (at < size)
        snprintf(text + at, size - at,
                 "--score %s\n--renormalize %d\n--tied %d\n--rounding %s\n--precision %s\n"
                 "--gradients %s\n--fastest %d\n"
                 "--recompute %s\n--compute %s\n--device %s\n--resume %d",
                 model_score_names[s->config.score], s->config.norm_topk_prob, s->config.tied,
                 rounding_name(s->routing.rounding), s->device.bf16 ? "bf16" : "f32",
                 gradients[s->device.gradients], s->device.fastest, model_recompute_names[s->recompute],
                 model_compute_name(s->compute), s->device.name, s->resume);
}

bool train_options_adopt_sizes(train_options *options, const model_config *run, error *err)
{
    train_settings *s = &options->settings;
    const train_settings given = *s;
    s->config = *run;
    for (int i = 0; i < NUMBERS; i++)
        if (options->given[i] && numbers[i].group == GROUP_MODEL)
            number_set(s, &numbers[i], number_get(&given, &numbers[i]));
    s->config.tied |= given.config.tied;
    s->config.norm_topk_prob |= given.config.norm_topk_prob;
    if (options->score_given) s->config.score = given.config.score;
    if (s->from) choose_by_sizes(options);
    if (s->from) adopt(options, AT(routing.balance_coefficient), run->router_aux_loss_coef);
    if ((float)run->router_aux_loss_coef != s->routing.balance_coefficient)
        s->config.router_aux_loss_coef = decimal(s->routing.balance_coefficient);
    return derive_sizes(options, err);
}

void train_options_adopt(train_options *options, const train_state *run)
{
    const train_recipe *r = &run->recipe;
    const struct {
        size_t offset;
        double value;
    } values[] = {{AT(batch), (double)run->batch},
                  {AT(seed), (double)run->seed},
                  {AT(lr), r->lr},
                  {AT(end_lr), r->end_lr},
                  {AT(warmup), r->warmup},
                  {AT(beta1), r->beta1},
                  {AT(beta2), r->beta2},
                  {AT(weight_decay), r->weight_decay},
                  {AT(clip), r->clip},
                  {AT(routing.tile), r->tile},
                  {AT(routing.balance_coefficient), r->balance},
                  {AT(routing.z_coefficient), r->z_loss},
                  {AT(routing.bias_rate), r->bias_rate},
                  {AT(validations.count), r->evaluations},
                  {AT(validations.tokens), r->evaluation_tokens},
                  {AT(validations.last), r->last_evaluation_tokens}};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++)
        adopt(options, values[i].offset, values[i].value);
    if (tokens_are_whole(&run->text)) adopt(options, AT(validations.count), 0.0);
    if (!options->rounding_given && r->rounding >= SMOE_ROUNDING_NONE && r->rounding <= SMOE_ROUNDING_DOWN)
        options->settings.routing.rounding = (smoe_rounding)r->rounding;
    for (int i = 0; i < COMPUTE_NAMES && !options->compute_given; i++)
        if (r->compute == (double)model_computes[i]) options->settings.compute = model_computes[i];
}
