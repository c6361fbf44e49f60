/* See run_checks.h. */
#include "run_checks.h"

#include "open_cuda.h"

#include <stdlib.h>
#include <string.h>

typedef struct checker {
    const device *on;
    smoe_context *context;
    int repeats;
    const gpu_case *now;
    int wrong, wrong_total;
    tensor_id worst; /* the tensor whose error is the largest share of its limit */
    double worst_share;
} checker;

void edge_counts(int64_t tokens, int64_t counts[EDGE_EXPERTS])
{
    static const int64_t edges[] = {0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 320};
    for (int e = 0; e < EDGE_EXPERTS; e++) {
        const bool last = e + 1 == EDGE_EXPERTS;
        counts[e] = last || edges[e] > tokens ? tokens : edges[e];
        tokens -= counts[e];
    }
}

static smoe_layer complete(smoe_layer l)
{
    l.struct_size = sizeof l;
    if (l.dtype == SMOE_TYPE_F32) l.dtype = SMOE_TYPE_BF16;
    if (l.gradient_type == SMOE_TYPE_BF16) l.gradient_type = l.dtype;
    if (!l.tokens) l.tokens = 157;
    if (!l.hidden) l.hidden = 64;
    if (!l.intermediate) l.intermediate = 32;
    if (!l.experts) l.experts = 8;
    if (!l.topk) l.topk = 2;
    if (!l.chunks) l.chunks = 1;
    if (!l.groups) l.groups = l.groups_kept = 1;
    if (l.route_scale == 0.0f) l.route_scale = 1.0f;
    if (!l.tile) l.tile = 16;
    if (l.index_type == SMOE_TYPE_F32) l.index_type = SMOE_TYPE_I32;
    return l;
}

static void wrong(checker *c, const char *what, double error, double limit)
{
    printf("WRONG %-32s %-16s %g, limit %g\n", c->now->name, what, error, limit);
    c->wrong++;
}

static void note(void *user, tensor_id id, const verdict *judged)
{
    checker *c = user;
    const double share = judged->limit > 0.0 ? judged->error / judged->limit : 0.0;
    if (!judged->ok) wrong(c, tensor_names[id], judged->error, judged->limit);
    if (share > c->worst_share) c->worst = id, c->worst_share = share;
}

static bool failed(checker *c, run_outcome outcome, const char *text)
{
    if (outcome == RUN_OK) return false;
    printf("WRONG %s: %s\n", c->now->name, text);
    c->wrong++;
    return true;
}

static void same_bits(checker *c, const tensors *one, const tensors *other, const char *how)
{
    for (int i = 0; i < TENSORS; i++) {
        const tensor *a = &one->at[i], *b = &other->at[i];
        const int64_t differing = b->bits ? tensor_differing_bits(a, b) : 0;
        if (differing) {
            printf("WRONG %-32s %-16s other bits, %s\n", c->now->name, tensor_names[i], how);
            c->wrong++;
        }
    }
}

static void check_other_ways(checker *c, const smoe_layer *layer, const check_options *options)
{
    oracle_drawn drawn;
    tensors base, other;
    char text[RUN_TEXT];
    smoe_layer chunked = *layer;
    chunked.chunks = layer->chunks == 1 ? 8 : 1;
    const run_options once = {.backwards = options->run.backwards};
    run_options less = once;
    less.less_router = layer->entry == SMOE_ENTRY_FROM_LOGITS && c->now->draw.router;
    oracle_draw_inputs(layer, &c->now->draw, options->seed, &drawn);
    if (!failed(c, run_library(c->on, c->context, layer, &drawn, &once, &base, text), text)) {
        if (!failed(c, run_library(c->on, c->context, &chunked, &drawn, &less, &other, text), text)) {
            same_bits(c, &base, &other, "other chunks, less asked of the router");
            tensors_free(&other);
        }
        tensors_free(&base);
    }
    oracle_drawn_free(&drawn);
}

static void check_case(checker *c)
{
    int64_t differing[TENSORS] = {0};
    const smoe_layer layer = complete(c->now->layer);
    if (smoe_supports(c->context, &layer) == SMOE_ERROR_UNSUPPORTED) { /* a GPU with less shared memory */
        printf("%-40s skipped: %s\n", c->now->name, smoe_last_error(c->context));
        return;
    }
    const check_options options = {.run = {.forward_only = c->now->forward_only,
                                           .backwards = layer.accumulate ? 2 : 1,
                                           .repeats = c->repeats,
                                           .differing = differing},
                                   .exact = c->now->draw.integers > 0 && !c->now->inexact,
                                   .seed = 11};
    char text[RUN_TEXT];
    c->wrong = 0, c->worst_share = 0.0;
    failed(c, check_layer(c->on, c->context, &layer, &c->now->draw, &options, note, c, text), text);
    for (int i = 0; i < TENSORS; i++)
        if (differing[i]) wrong(c, tensor_names[i], (double)differing[i], 0.0);
    if (c->now->other_ways) check_other_ways(c, &layer, &options);
    printf("%-40s %s", c->now->name, c->wrong ? "WRONG" : "ok");
    if (c->worst_share > 0.0) printf("   %s at %.2f of its limit", tensor_names[c->worst], c->worst_share);
    printf("\n");
    fflush(stdout);
    c->wrong_total += c->wrong;
}

int run_checks(int argc, char **argv, make_case *make, size_t count, int repeats)
{
    checker c = {.on = device_find("cuda"), .context = open_cuda(), .repeats = repeats};
    const bool sharded = argc == 4 && strcmp(argv[1], "--shard") == 0;
    const size_t shard = sharded ? (size_t)atoi(argv[2]) : 0, shards = sharded ? (size_t)atoi(argv[3]) : 1;
    const char *only = argc == 2 ? argv[1] : NULL;
    int64_t checked = 0;
    if (getenv("REPEATS")) c.repeats = atoi(getenv("REPEATS"));
    for (size_t i = shard; i < count; i += shards) {
        const gpu_case now = make(i);
        if (only && !strstr(now.name, only)) continue;
        c.now = &now;
        check_case(&c);
        checked++;
    }
    smoe_destroy(c.context);
    printf("%d wrong of %lld cases\n", c.wrong_total, (long long)checked);
    return c.wrong_total != 0 || (only && !checked);
}
