/* See problem.h. Every choice is a table of names and values, from which parsing, messages and names come. */
#include "cli/support/problem.h"

#include "src/activations.h"
#include "src/scores.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct choice {
    const char *name;
    int value;
} choice;

static const choice dtypes[] = {
    {"f32", SMOE_TYPE_F32}, {"bf16", SMOE_TYPE_BF16}, {"fp16", SMOE_TYPE_F16}, {NULL, 0}};
#define ACTIVATION(enumerator, name, shape, curve) {name, enumerator},
static const choice activations[] = {MOE_ACTIVATIONS(ACTIVATION){NULL, 0}};
#undef ACTIVATION
static const choice layouts[] = {
    {"concatenated", SMOE_LAYOUT_CONCATENATED}, {"interleaved", SMOE_LAYOUT_INTERLEAVED}, {NULL, 0}};
enum { SCORE_RENORMALIZE = 100 }; // added to the value of a score whose weights are renormalised
#define RENORM_all(enumerator, name)  {name "-renorm", enumerator + SCORE_RENORMALIZE},
#define RENORM_none(enumerator, name) RENORM_all(enumerator, name)
#define RENORM_kept(enumerator, name)
#define SCORE(enumerator, name, key, value, over, selection)                                                 \
    {name, enumerator}, RENORM_##over(enumerator, name)
static const choice scores[] = {MOE_SCORES(SCORE){NULL, 0}};
#undef SCORE
static const choice roundings[] = {{"none", SMOE_ROUNDING_NONE},           {"nr-f", SMOE_ROUNDING_NR_F},
                                   {"sr-f", SMOE_ROUNDING_SR_F},           {"nr-s", SMOE_ROUNDING_NR_S},
                                   {"balance-f", SMOE_ROUNDING_BALANCE_F}, {"up", SMOE_ROUNDING_UP},
                                   {"down", SMOE_ROUNDING_DOWN},           {NULL, 0}};
static const choice logits_types[] = {{"f32", SMOE_TYPE_F32}, {"bf16", SMOE_TYPE_BF16}, {NULL, 0}};
static const choice routings[] = {
    {"uniform", ROUTING_UNIFORM}, {"random", ROUTING_RANDOM}, {"skewed", ROUTING_SKEWED}, {NULL, 0}};

static const choice computes[] = {{"f8", SMOE_COMPUTE_F8}, {"f8-dgrad", SMOE_COMPUTE_F8_DGRAD}, {NULL, 0}};

static const char *choice_name(const choice *choices, int value)
{
    for (; choices->name; choices++)
        if (choices->value == value) return choices->name;
    return "?";
}

const char *dtype_name(smoe_type dtype)
{
    return choice_name(dtypes, (int)dtype);
}

const char *activation_name(smoe_activation activation)
{
    return choice_name(activations, (int)activation);
}

const char *rounding_name(smoe_rounding rounding)
{
    return choice_name(roundings, (int)rounding);
}

const char *routing_name(routing_kind routing)
{
    return choice_name(routings, (int)routing);
}

static bool parse_choice(const char *option, const choice *choices, const char *text, int *value, error *err)
{
    char names[256] = "";
    for (const choice *c = choices; c->name; c++) {
        if (strcmp(c->name, text) == 0) {
            *value = c->value;
            return true;
        }
        const size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", c->name);
    }
    return fail(err, ERROR_USAGE, "%s: '%s' is not one of %s", option, text, names);
}

bool parse_compute(const char *text, smoe_compute *compute, error *err)
{
    int value = 0;
    if (!parse_choice("--compute", computes, text, &value, err)) return false;
    *compute = (smoe_compute)value;
    return true;
}

const char *layer_compute_name(const smoe_layer *layer)
{
    return layer->compute == SMOE_COMPUTE_STORAGE ? dtype_name(layer->dtype)
                                                  : choice_name(computes, (int)layer->compute);
}

/* Reads a whole number in decimal, also as 1e9 or 4.096e3. *wide: it does not fit 64 bits. */
static bool read_whole(const char *text, int64_t *value, bool *wide)
{
    char *end;
    errno = 0;
    const long long parsed = strtoll(text, &end, 10);
    *wide = errno == ERANGE;
    *value = parsed;
    if (end != text && *end == '\0') return true;
    if (text[strspn(text, "0123456789+-.eE")] != '\0') return false; // no 0x10, inf or nan
    const double real = strtod(text, &end);
    if (end == text || *end != '\0' || real != floor(real)) return false;
    *wide = real < -0x1p63 || real >= 0x1p63;
    *value = *wide ? 0 : (int64_t)real;
    return true;
}

bool parse_integer(const char *option, const char *text, int64_t least, int64_t most, int64_t *value,
                   error *err)
{
    int64_t parsed = 0;
    bool wide = false;
    if (!read_whole(text, &parsed, &wide))
        return fail(err, ERROR_USAGE, "%s: '%s' is not a whole number", option, text);
    if (wide || parsed < least || parsed > most)
        return fail(err, ERROR_USAGE, "%s: %s is outside %" PRId64 "..%" PRId64, option, text, least, most);
    *value = parsed;
    return true;
}

const char *parse_path(const char *name, const char *text, struct argp_state *state)
{
    if (!*text) argp_error(state, "%s: '' is not a path, it has at least one character", name);
    return text;
}

/* The limits of smoe.h. With them products of sizes are far below 2^63. */
enum {
    MAX_SIZE = 1 << 30,
    MAX_WIDTH = 1 << 20,
    MAX_EXPERTS = 4096,
    MAX_TOPK = 64,
    MAX_TILE = 4096,
    MULTIPLE = 8
};

static bool check_multiple(const char *text, const char *name, int64_t value, error *err)
{
    if (value % MULTIPLE == 0) return true;
    return fail(err, ERROR_USAGE, "--thiek %s: %s = %" PRId64 " is not a multiple of %d", text, name, value,
                MULTIPLE);
}

bool problem_parse_thiek(const char *text, bench_shape *parsed, error *err)
{
    static const char *const names[5] = {"T", "H", "I", "E", "K"};
    static const int64_t most[5] = {MAX_SIZE, MAX_WIDTH, MAX_WIDTH, MAX_EXPERTS, MAX_TOPK};
    int64_t *const values[5] = {&parsed->tokens, &parsed->hidden, &parsed->intermediate, &parsed->experts,
                                &parsed->topk};
    const char *at = text;
    for (int i = 0; i < 5; i++) {
        char part[24], option[96];
        const size_t length = strcspn(at, ",");
        if (length == 0 || length >= sizeof part || (at[length] == ',') != (i < 4))
            return fail(err, ERROR_USAGE,
                        "--thiek %s: five numbers T,H,I,E,K are needed, such as 4096,768,256,32,4", text);
        memcpy(part, at, length);
        part[length] = '\0';
        snprintf(option, sizeof option, "--thiek %.64s: %s", text, names[i]);
        if (!parse_integer(option, part, 1, most[i], values[i], err)) return false;
        at += length + 1;
    }
    if (!check_multiple(text, "H", parsed->hidden, err) ||
        !check_multiple(text, "I", parsed->intermediate, err))
        return false;
    if (parsed->topk > parsed->experts)
        return fail(err, ERROR_USAGE, "--thiek %s: K = %" PRId64 " is more than E = %" PRId64, text,
                    parsed->topk, parsed->experts);
    return true;
}

static bool add_shape(problem_options *options, const bench_shape *added, error *err)
{
    if (options->shape_count == PROBLEM_MAX_SHAPES)
        return fail(err, ERROR_USAGE, "more than %d problems", PROBLEM_MAX_SHAPES);
    options->shapes[options->shape_count++] = *added;
    return true;
}

static bool add_thiek(problem_options *options, const char *text, error *err)
{
    bench_shape added = {.suite = "thiek"};
    if (!problem_parse_thiek(text, &added, err)) return false;
    if (options->shape_count < PROBLEM_MAX_SHAPES) {
        char *name = options->names[options->shape_count];
        snprintf(name, sizeof options->names[0], "%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64,
                 added.tokens, added.hidden, added.intermediate, added.experts, added.topk);
        added.name = name;
    }
    return add_shape(options, &added, err);
}

static bool add_suite(problem_options *options, const char *suite, error *err)
{
    int count;
    const bench_shape *all = shapes_all(&count);
    const int before = options->shape_count;
    for (int i = 0; i < count; i++)
        if (strcmp(all[i].suite, suite) == 0 && !add_shape(options, &all[i], err)) return false;
    if (options->shape_count > before) return true;
    return fail(err, ERROR_USAGE, "--suite: '%s' is not one of paper, models, ep, rounding, granularity",
                suite);
}

/* NAME, or SUITE/NAME. */
static bool is_named(const bench_shape *shape, const char *name)
{
    const size_t length = strlen(shape->suite);
    const bool of_suite = strncmp(name, shape->suite, length) == 0 && name[length] == '/';
    return strcmp(of_suite ? name + length + 1 : name, shape->name) == 0;
}

static bool add_named(problem_options *options, const char *name, error *err)
{
    int count;
    const bench_shape *all = shapes_all(&count);
    const int before = options->shape_count;
    for (int i = 0; i < count; i++)
        if (is_named(&all[i], name) && !add_shape(options, &all[i], err)) return false;
    if (options->shape_count > before) return true;
    return fail(err, ERROR_USAGE, "--shape: no suite has a shape '%s'", name);
}

void problem_options_init(problem_options *options)
{
    *options = (problem_options){.dtype = SMOE_TYPE_F32,
                                 .logits_type = SMOE_TYPE_F32,
                                 .tile = 128,
                                 .chunks = 1,
                                 .roundings = {{SMOE_ROUNDING_NONE}, 1},
                                 .chunk_counts = {{1}, 1},
                                 .routings = {{ROUTING_UNIFORM}, 1}};
}

smoe_layer problem_layer(const problem_options *options, const bench_shape *shape)
{
    smoe_layer layer = SMOE_LAYER_INIT;
    layer.tokens = shape->tokens;
    layer.hidden = shape->hidden;
    layer.intermediate = shape->intermediate;
    layer.experts = shape->experts;
    layer.topk = shape->topk;
    layer.dtype = options->dtype;
    layer.gradient_type = options->dtype;
    layer.activation = options->activation;
    layer.layout = options->layout;
    layer.score = options->score;
    layer.renormalize = options->renormalize;
    layer.rounding = options->rounding;
    layer.tile = options->tile;
    layer.chunks = options->chunks;
    layer.reuse_saved = options->reuse_saved;
    layer.logits_type = options->logits_type;
    layer.seed = options->seed;
    return layer;
}

enum {
    KEY_THIEK = 0x100,
    KEY_SUITE,
    KEY_SHAPE,
    KEY_DTYPE,
    KEY_ACTIVATION,
    KEY_LAYOUT,
    KEY_SCORE,
    KEY_LOGITS,
    KEY_ROUNDING,
    KEY_TILE,
    KEY_ROUTING,
    KEY_CHUNKS,
    KEY_REUSE,
    KEY_SEED
};

static const struct argp_option problem_argp_options[] = {
    {NULL, 0, NULL, 0, "The problem:", 1},
    {"thiek", KEY_THIEK, "T,H,I,E,K", 0,
     "Tokens, hidden (d), intermediate (n), experts, experts a token (K); may come several times", 1},
    {"suite", KEY_SUITE, "NAME", 0, "The shapes of a suite: paper, models, ep, rounding or granularity", 1},
    {"shape", KEY_SHAPE, "NAME", 0, "Shapes by name, in any suite (7B-n256) or in one (paper/7B-n256)", 1},
    {"dtype", KEY_DTYPE, "TYPE", 0, "f32 (default), bf16 or fp16 (cuda only)", 1},
    {"activation", KEY_ACTIVATION, "NAME", 0,
     "swiglu (default), geglu, geglu_tanh, reglu, swiglu_clamped, swiglu_capped; without a gate: silu, gelu, "
     "relu, relu2",
     1},
    {"layout", KEY_LAYOUT, "NAME", 0, "Gate and up rows of W1: concatenated (default) or interleaved", 1},
    {"score", KEY_SCORE, "NAME", 0,
     "softmax-topk (default), softmax-topk-renorm, topk-softmax, sigmoid, sigmoid-renorm", 1},
    {"logits", KEY_LOGITS, "TYPE", 0, "Storage of logits and dlogits: f32 (default) or bf16", 1},
    {"rounding", KEY_ROUNDING, "RULE", 0,
     "none (default), nr-f, sr-f, nr-s, balance-f, up or down; bench takes several: none,nr-f", 1},
    {"tile", KEY_TILE, "M", 0, "Row tile of the rounding rules, 1..4096 (default 128)", 1},
    {"routing", KEY_ROUTING, "NAME", 0,
     "uniform (equal counts, default), random (K distinct experts a token) or skewed (Zipf, s = 1); bench "
     "takes several",
     1},
    {"chunks", KEY_CHUNKS, "N", 0,
     "Column chunks of Y and dX~: 1 (default), 2, 4, ..., 64; bench takes several: 1,2,4", 1},
    {"reuse", KEY_REUSE, NULL, 0, "The backward may overwrite the saved H with dH", 1},
    {"seed", KEY_SEED, "N", 0, "Seed of data and routing (default 0)", 1},
    {0}};

static bool parse_chunks(const char *text, int *chunks, error *err)
{
    int64_t value = 0;
    if (!parse_integer("--chunks", text, 1, 64, &value, err)) return false;
    if ((value & (value - 1)) != 0) return fail(err, ERROR_USAGE, "--chunks: %s is not a power of two", text);
    *chunks = (int)value;
    return true;
}

static bool parse_rounding(const char *text, int *value, error *err)
{
    return parse_choice("--rounding", roundings, text, value, err);
}

static bool parse_routing(const char *text, int *value, error *err)
{
    return parse_choice("--routing", routings, text, value, err);
}

/* Reads "4", or "1,2,4" if several values are allowed. */
static bool parse_list(const char *option, const char *text, bool several,
                       bool (*parse_one)(const char *, int *, error *), option_list *list, error *err)
{
    list->count = 0;
    for (const char *at = text; at;) {
        char one[24];
        const size_t length = several ? strcspn(at, ",") : strlen(at);
        if (list->count == PROBLEM_MAX_LIST)
            return fail(err, ERROR_USAGE, "%s: '%s' has more than %d values", option, text, PROBLEM_MAX_LIST);
        snprintf(one, sizeof one, "%.*s", (int)length, at);
        if (!parse_one(one, &list->values[list->count++], err)) return false;
        at = at[length] == ',' ? at + length + 1 : NULL;
    }
    return true;
}

static bool parse_option(problem_options *options, int key, const char *text, error *err)
{
    int value = 0;
    int64_t number = 0;
    bool good = false;
    switch (key) {
    case KEY_THIEK: return add_thiek(options, text, err);
    case KEY_SUITE: return add_suite(options, text, err);
    case KEY_SHAPE: return add_named(options, text, err);
    case KEY_DTYPE:
        good = parse_choice("--dtype", dtypes, text, &value, err);
        options->dtype = (smoe_type)value;
        options->dtype_given = good;
        return good;
    case KEY_ACTIVATION:
        good = parse_choice("--activation", activations, text, &value, err);
        options->activation = (smoe_activation)value;
        return good;
    case KEY_LAYOUT:
        good = parse_choice("--layout", layouts, text, &value, err);
        options->layout = (smoe_layout)value;
        return good;
    case KEY_SCORE:
        good = parse_choice("--score", scores, text, &value, err);
        options->score = (smoe_score)(value % SCORE_RENORMALIZE);
        options->renormalize = value >= SCORE_RENORMALIZE;
        return good;
    case KEY_LOGITS:
        good = parse_choice("--logits", logits_types, text, &value, err);
        options->logits_type = (smoe_type)value;
        return good;
    case KEY_ROUNDING:
        good = parse_list("--rounding", text, options->several, parse_rounding, &options->roundings, err);
        options->rounding = (smoe_rounding)options->roundings.values[0];
        return good;
    case KEY_TILE:
        good = parse_integer("--tile", text, 1, MAX_TILE, &number, err);
        options->tile = (int32_t)number;
        return good;
    case KEY_ROUTING:
        good = parse_list("--routing", text, options->several, parse_routing, &options->routings, err);
        options->routing = (routing_kind)options->routings.values[0];
        return good;
    case KEY_REUSE: options->reuse_saved = 1; return true;
    case KEY_SEED:
        good = parse_integer("--seed", text, 0, INT64_MAX, &number, err);
        options->seed = (uint64_t)number;
        return good;
    default:
        good = parse_list("--chunks", text, options->several, parse_chunks, &options->chunk_counts, err);
        options->chunks = options->chunk_counts.values[0];
        return good;
    }
}

static error_t parse(int key, char *text, struct argp_state *state)
{
    if (key < KEY_THIEK || key > KEY_SEED) return ARGP_ERR_UNKNOWN;
    error err = {0};
    problem_options *options = state->input;
    if (!parse_option(options, key, text, &err)) argp_error(state, "%s", err.text);
    if (key == KEY_CHUNKS) return 0;
    const struct argp_option *o = problem_argp_options;
    while (o->key != key) o++;
    options->given = o->name;
    return 0;
}

const struct argp problem_argp = {.options = problem_argp_options, .parser = parse};
