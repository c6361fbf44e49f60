/* The problem a user describes: --thiek, --suite, --shape and the options of the layer, shared by bench, info
 * and verify. An argp parser to be used as a child; its input is a problem_options. */
#ifndef CLI_PROBLEM_H
#define CLI_PROBLEM_H

#include "base/error.h"
#include "cli/support/shapes.h"

#include <argp.h>
#include <smoe.h>
#include <stddef.h>

typedef enum routing_kind { ROUTING_UNIFORM, ROUTING_RANDOM, ROUTING_SKEWED } routing_kind;

enum { PROBLEM_MAX_SHAPES = 256, PROBLEM_MAX_LIST = 7 };

/* The values of an option that can have several, in the given order. */
typedef struct option_list {
    int values[PROBLEM_MAX_LIST];
    int count;
} option_list;

typedef struct problem_options {
    bench_shape shapes[PROBLEM_MAX_SHAPES]; // from --thiek, --suite, --shape, in the order given
    char names[PROBLEM_MAX_SHAPES][96];
    int shape_count;
    smoe_type dtype;
    bool dtype_given;  // given on the command line
    const char *given; // the last option on the command line that is for layers only: any but --chunks; NULL:
                       // none
    smoe_activation activation;
    smoe_layout layout;
    smoe_score score;
    int32_t renormalize;
    smoe_type logits_type;
    smoe_rounding rounding;
    int32_t tile;
    int32_t chunks;
    int32_t reuse_saved;
    routing_kind routing;
    uint64_t seed;
    bool several; // who takes lists sets it; rounding, chunks and routing are then the first of these
    option_list roundings, chunk_counts, routings;
} problem_options;

/* f32, swiglu, concatenated, softmax-topk, f32 logits, no rounding, tile 128, uniform routing, 1 chunk; no
 * lists; no shapes. */
void problem_options_init(problem_options *options);

/* Put it among the children of a subcommand's argp and set state->child_inputs[i] on ARGP_KEY_INIT. */
extern const struct argp problem_argp;

/* Reads "T,H,I,E,K", the paper's notation. Checks all limits of the library. */
bool problem_parse_thiek(const char *text, bench_shape *parsed, error *err);

/* The library's description of one shape. */
smoe_layer problem_layer(const problem_options *options, const bench_shape *shape);

/* The names on the command line and in records. */
const char *dtype_name(smoe_type dtype);
const char *activation_name(smoe_activation activation);
const char *rounding_name(smoe_rounding rounding);
const char *routing_name(routing_kind routing);

/* --compute of bench and verify: f8 or f8-dgrad. A layer's name has no --compute: that of its dtype. */
#define COMPUTE_HELP                                                                                         \
    "Experimental: the experts' GEMMs in fp8: f8, or f8-dgrad, all but those of the weight gradients"
bool parse_compute(const char *text, smoe_compute *compute, error *err);
const char *layer_compute_name(const smoe_layer *layer);

/* A whole number of `text` (4096, 1e9, 4.096e3) within [least, most], or an error naming option, value and
 * limit. */
bool parse_integer(const char *option, const char *text, int64_t least, int64_t most, int64_t *value,
                   error *err);

/* The path that an option or argument names. If it is empty, argp prints a usage error and exits. */
const char *parse_path(const char *name, const char *text, struct argp_state *state);

#endif
