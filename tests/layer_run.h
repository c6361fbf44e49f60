/* One layer on random inputs, run by the library and by the fp64 oracle: what the tests of the
 * expert stages share.
 *
 * Every tensor stands between canaries; outputs, saved and scratch start as 0xff bytes, which are NaN in
 * every float type; inputs must come back unchanged. After the forward, its scratch and output are poisoned
 * again, so the backward sees only what it is allowed to. */
#ifndef TESTS_LAYER_RUN_H
#define TESTS_LAYER_RUN_H

#include "oracle/compare.h"
#include "oracle/number.h"
#include "oracle/oracle.h"

#include <smoe.h>

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- Buffers ---- */

enum { CANARY_BYTES = 256, CANARY = 0xa5 };

typedef struct buffer {
    unsigned char *base; /* canary, data, canary; NULL for a buffer that is not there */
    unsigned char *copy; /* of an input */
    void *data;
    size_t bytes;
} buffer;

static inline buffer buffer_make(size_t bytes)
{
    buffer b = {.bytes = bytes};
    const size_t whole = (bytes + 255) / 256 * 256 + 2 * (size_t)CANARY_BYTES;
    b.base = aligned_alloc(256, whole);
    assert_non_null(b.base);
    memset(b.base, CANARY, whole);
    b.data = b.base + CANARY_BYTES;
    memset(b.data, 0xff, bytes);
    return b;
}

static inline void buffer_free(buffer *b)
{
    free(b->base);
    free(b->copy);
    *b = (buffer){0};
}

static inline void buffer_poison(const buffer *b)
{
    if (b->base) memset(b->data, 0xff, b->bytes);
}

static inline void buffer_check(const buffer *b, const char *name)
{
    if (!b->base) return;
    const unsigned char *end = (const unsigned char *)b->data + b->bytes;
    for (int i = 0; i < CANARY_BYTES; i++)
        if (b->base[i] != CANARY || end[i] != CANARY) fail_msg("something was written outside %s", name);
    if (b->copy && memcmp(b->copy, b->data, b->bytes) != 0) fail_msg("the input %s was changed", name);
}

/* An input in its storage type; `values` take what was stored. */
static inline buffer buffer_input(double *values, size_t count, smoe_type type)
{
    buffer b = buffer_make(count * oracle_type_bytes(type));
    oracle_store(b.data, type, values, count);
    oracle_load(values, type, b.data, count);
    b.copy = malloc(b.bytes + 1);
    assert_non_null(b.copy);
    memcpy(b.copy, b.data, b.bytes);
    return b;
}

/* ---- A run ---- */

typedef enum values { VALUES_NORMAL, VALUES_INTEGER, VALUES_SPARSE_INTEGER } values;
typedef enum spread { SPREAD_EVEN, SPREAD_ONE_EXPERT, SPREAD_EMPTY_EXPERTS } spread;

typedef struct run_options {
    values values;
    spread spread;
    int biases;        /* b1 and b2 */
    int router_weight; /* FROM_LOGITS: logits from Wr, so that dX has the router's term */
    int no_row_weights;
    int threads;
    uint64_t seed;
} run_options;

typedef struct layer_run {
    smoe_layer layer;
    run_options options;
    smoe_context *context;
    smoe_sizes sizes;
    int64_t width; /* of H */
    /* as the oracle reads them */
    double *x, *router_weight, *logits_given, *topk_weights, *row_weights, *w1, *b1, *w2, *b2, *dout;
    int64_t *topk_ids, *offsets;
    struct {
        buffer x, router_weight, logits, topk_ids, topk_weights, offsets, row_weights, w1, b1, w2, b2, dout;
    } in;
    struct {
        buffer out, dx, dw1, dw2, db1, db2, drouter_weight, dtopk_weights, drow_weights, dlogits;
    } result;
    buffer saved, scratch_forward, scratch_backward;
    smoe_forward_args forward_args;
    smoe_backward_args backward_args;
} layer_run;

static inline double draw(oracle_random *random, values how, double scale)
{
    if (how == VALUES_NORMAL) return scale * oracle_random_normal(random);
    if (how == VALUES_SPARSE_INTEGER && oracle_random_integer(random, 0, 15) != 0) return 0.0;
    return (double)oracle_random_integer(random, -1, 1);
}

static inline double *draw_all(oracle_random *random, values how, int64_t count, double scale)
{
    double *all = oracle_alloc((size_t)count, sizeof *all);
    for (int64_t i = 0; i < count; i++) all[i] = draw(random, how, scale);
    return all;
}

static inline double draw_weight(oracle_random *random, values how)
{
    if (how == VALUES_NORMAL) return 0.1 + oracle_random_uniform(random);
    return (double)oracle_random_integer(random, 1, 2);
}

/* The expert a token is sent to. EMPTY: only every third expert, and not the first. */
static inline int64_t draw_expert(oracle_random *random, const layer_run *run)
{
    const int64_t e = oracle_random_integer(random, 0, run->layer.experts - 1);
    switch (run->options.spread) {
    case SPREAD_ONE_EXPERT: return run->layer.experts / 2;
    case SPREAD_EMPTY_EXPERTS: return e / 3 * 3 + (e / 3 * 3 + 1 < run->layer.experts ? 1 : 0);
    case SPREAD_EVEN: break;
    }
    return e;
}

static inline buffer index_input(const int64_t *values_, int64_t count, smoe_type type)
{
    buffer b = buffer_make((size_t)count * (type == SMOE_TYPE_I64 ? 8 : 4));
    for (int64_t i = 0; i < count; i++) {
        if (type == SMOE_TYPE_I64)
            ((int64_t *)b.data)[i] = values_[i];
        else
            ((int32_t *)b.data)[i] = (int32_t)values_[i];
    }
    b.copy = malloc(b.bytes + 1);
    assert_non_null(b.copy);
    memcpy(b.copy, b.data, b.bytes);
    return b;
}

/* Given ids: some outside 0..E-1, and repeated ones. */
static inline void make_topk(layer_run *run, oracle_random *random)
{
    const int64_t pairs = run->layer.tokens * run->layer.topk;
    run->topk_ids = oracle_alloc((size_t)pairs, sizeof *run->topk_ids);
    run->topk_weights = oracle_alloc((size_t)pairs, sizeof *run->topk_weights);
    for (int64_t i = 0; i < pairs; i++) {
        const int64_t odd = oracle_random_integer(random, 0, 19);
        run->topk_ids[i] = odd == 0 ? -1 : odd == 1 ? run->layer.experts : draw_expert(random, run);
        run->topk_weights[i] = draw_weight(random, run->options.values);
    }
    run->in.topk_ids = index_input(run->topk_ids, pairs, run->layer.index_type);
    run->in.topk_weights = buffer_input(run->topk_weights, (size_t)pairs, SMOE_TYPE_F32);
}

/* Given rows: a tenth of the capacity stays unused. */
static inline void make_rows(layer_run *run, oracle_random *random)
{
    const int64_t experts = run->layer.experts, used = run->layer.tokens - run->layer.tokens / 10;
    run->offsets = oracle_alloc((size_t)experts + 1, sizeof *run->offsets);
    for (int64_t r = 0; r < used; r++) run->offsets[draw_expert(random, run) + 1]++;
    for (int64_t e = 0; e < experts; e++) run->offsets[e + 1] += run->offsets[e];
    run->in.offsets = index_input(run->offsets, experts + 1, run->layer.index_type);
    if (run->options.no_row_weights) return;
    run->row_weights = oracle_alloc((size_t)run->layer.tokens, sizeof *run->row_weights);
    for (int64_t r = 0; r < run->layer.tokens; r++)
        run->row_weights[r] = draw_weight(random, run->options.values);
    run->in.row_weights = buffer_input(run->row_weights, (size_t)run->layer.tokens, SMOE_TYPE_F32);
}

static inline void make_logits(layer_run *run, oracle_random *random)
{
    const int64_t tokens = run->layer.tokens, experts = run->layer.experts, d = run->layer.hidden;
    if (run->options.router_weight) {
        run->router_weight = draw_all(random, VALUES_NORMAL, experts * d, 2.0 / sqrt((double)d));
        run->in.router_weight = buffer_input(run->router_weight, (size_t)(experts * d), run->layer.dtype);
        run->in.logits = buffer_make((size_t)(tokens * experts) * oracle_type_bytes(run->layer.logits_type));
        return;
    }
    run->logits_given = draw_all(random, VALUES_NORMAL, tokens * experts, 1.5);
    run->in.logits = buffer_input(run->logits_given, (size_t)(tokens * experts), run->layer.logits_type);
}

static inline void make_inputs(layer_run *run)
{
    const smoe_layer *l = &run->layer;
    const values how = run->options.values;
    const int64_t x = l->tokens * l->hidden, w1 = l->experts * run->width * l->hidden;
    const int64_t w2 = l->experts * l->hidden * l->intermediate;
    oracle_random random = {run->options.seed + 1};
    run->x = draw_all(&random, how, x, 1.0);
    run->dout = draw_all(&random, how, x, 1.0);
    const values weights = how == VALUES_NORMAL ? VALUES_NORMAL : VALUES_INTEGER;
    run->w1 = draw_all(&random, weights, w1, 1.5 / sqrt((double)l->hidden));
    run->w2 = draw_all(&random, weights, w2, 1.5 / sqrt((double)l->intermediate));
    run->in.x = buffer_input(run->x, (size_t)x, l->dtype);
    run->in.dout = buffer_input(run->dout, (size_t)x, l->dtype);
    run->in.w1 = buffer_input(run->w1, (size_t)w1, l->dtype);
    run->in.w2 = buffer_input(run->w2, (size_t)w2, l->dtype);
    if (run->options.biases) {
        run->b1 = draw_all(&random, weights, l->experts * run->width, 0.5);
        run->b2 = draw_all(&random, weights, l->experts * l->hidden, 0.5);
        run->in.b1 = buffer_input(run->b1, (size_t)(l->experts * run->width), l->dtype);
        run->in.b2 = buffer_input(run->b2, (size_t)(l->experts * l->hidden), l->dtype);
    }
    if (l->entry == SMOE_ENTRY_FROM_TOPK) make_topk(run, &random);
    if (l->entry == SMOE_ENTRY_FROM_ROWS) make_rows(run, &random);
    if (l->entry == SMOE_ENTRY_FROM_LOGITS) make_logits(run, &random);
}

static inline void make_results(layer_run *run)
{
    const smoe_layer *l = &run->layer;
    const size_t element = oracle_type_bytes(l->dtype), gradient = oracle_type_bytes(l->gradient_type);
    const size_t x = (size_t)(l->tokens * l->hidden), experts = (size_t)l->experts;
    const size_t width = (size_t)run->width, d = (size_t)l->hidden, n = (size_t)l->intermediate;
    run->result.out = buffer_make(x * element);
    run->result.dx = buffer_make(x * element);
    run->result.dw1 = buffer_make(experts * width * d * gradient);
    run->result.dw2 = buffer_make(experts * d * n * gradient);
    if (run->options.biases) {
        run->result.db1 = buffer_make(experts * width * gradient);
        run->result.db2 = buffer_make(experts * d * gradient);
    }
    if (run->router_weight) run->result.drouter_weight = buffer_make(experts * d * gradient);
    if (l->entry == SMOE_ENTRY_FROM_TOPK)
        run->result.dtopk_weights = buffer_make((size_t)(l->tokens * l->topk) * sizeof(float));
    else
        run->result.drow_weights = buffer_make(
            (size_t)(l->entry == SMOE_ENTRY_FROM_ROWS ? l->tokens : run->sizes.padded_rows) * sizeof(float));
    if (l->entry == SMOE_ENTRY_FROM_LOGITS)
        run->result.dlogits = buffer_make((size_t)l->tokens * experts * oracle_type_bytes(l->logits_type));
    run->saved = buffer_make(run->sizes.saved_buffer_bytes);
    run->scratch_forward = buffer_make(run->sizes.scratch_forward_bytes);
    run->scratch_backward = buffer_make(run->sizes.scratch_backward_bytes);
}

static inline void fill_forward_args(layer_run *run)
{
    smoe_forward_args a = SMOE_FORWARD_ARGS_INIT;
    a.x = run->in.x.data;
    a.router_weight = run->in.router_weight.data;
    a.logits = run->in.logits.data;
    a.topk_ids = run->in.topk_ids.data;
    a.topk_weights = run->in.topk_weights.data;
    a.offsets = run->in.offsets.data;
    a.row_weights = run->in.row_weights.data;
    a.w1 = run->in.w1.data;
    a.b1 = run->in.b1.data;
    a.w2 = run->in.w2.data;
    a.b2 = run->in.b2.data;
    a.out = run->result.out.data;
    a.saved = run->layer.inference ? NULL : run->saved.data;
    a.saved_size = run->saved.bytes;
    a.scratch = run->scratch_forward.data;
    a.scratch_size = run->scratch_forward.bytes;
    run->forward_args = a;
}

static inline void fill_backward_args(layer_run *run)
{
    const smoe_forward_args *f = &run->forward_args;
    smoe_backward_args a = SMOE_BACKWARD_ARGS_INIT;
    a.x = f->x;
    a.router_weight = f->router_weight;
    a.logits = f->logits;
    a.topk_ids = f->topk_ids;
    a.topk_weights = f->topk_weights;
    a.offsets = f->offsets;
    a.row_weights = f->row_weights;
    a.w1 = f->w1;
    a.b1 = f->b1;
    a.w2 = f->w2;
    a.b2 = f->b2;
    a.saved = f->saved;
    a.saved_size = f->saved_size;
    a.dout = run->in.dout.data;
    a.dx = run->result.dx.data;
    a.dw1 = run->result.dw1.data;
    a.dw2 = run->result.dw2.data;
    a.db1 = run->result.db1.data;
    a.db2 = run->result.db2.data;
    a.drouter_weight = run->result.drouter_weight.data;
    a.dlogits = run->result.dlogits.data;
    a.dtopk_weights = run->result.dtopk_weights.data;
    a.drow_weights = run->result.drow_weights.data;
    a.scratch = run->scratch_backward.data;
    a.scratch_size = run->scratch_backward.bytes;
    run->backward_args = a;
}

static inline layer_run run_make(const smoe_layer *layer, run_options options)
{
    layer_run run = {.layer = *layer, .options = options, .width = oracle_h_width(layer)};
    smoe_context_options context_options = SMOE_CONTEXT_OPTIONS_INIT;
    context_options.threads = options.threads ? options.threads : 2;
    assert_int_equal(smoe_create(&run.context, &context_options), SMOE_OK);
    run.sizes = (smoe_sizes)SMOE_SIZES_INIT;
    if (smoe_query_sizes(run.context, layer, &run.sizes) != SMOE_OK)
        fail_msg("%s", smoe_last_error(run.context));
    make_inputs(&run);
    make_results(&run);
    fill_forward_args(&run);
    fill_backward_args(&run);
    return run;
}

typedef struct named_buffer {
    buffer *buffer;
    const char *name;
} named_buffer;

enum { RUN_BUFFERS = 25 };

static inline void run_buffers(layer_run *run, named_buffer all[RUN_BUFFERS])
{
    const named_buffer list[RUN_BUFFERS] = {
        {&run->in.x, "x"},
        {&run->in.router_weight, "router_weight"},
        {&run->in.logits, "logits"},
        {&run->in.topk_ids, "topk_ids"},
        {&run->in.topk_weights, "topk_weights"},
        {&run->in.offsets, "offsets"},
        {&run->in.row_weights, "row_weights"},
        {&run->in.w1, "w1"},
        {&run->in.b1, "b1"},
        {&run->in.w2, "w2"},
        {&run->in.b2, "b2"},
        {&run->in.dout, "dout"},
        {&run->result.out, "out"},
        {&run->result.dx, "dx"},
        {&run->result.dw1, "dw1"},
        {&run->result.dw2, "dw2"},
        {&run->result.db1, "db1"},
        {&run->result.db2, "db2"},
        {&run->result.drouter_weight, "drouter_weight"},
        {&run->result.dtopk_weights, "dtopk_weights"},
        {&run->result.drow_weights, "drow_weights"},
        {&run->result.dlogits, "dlogits"},
        {&run->saved, "saved"},
        {&run->scratch_forward, "scratch of the forward"},
        {&run->scratch_backward, "scratch of the backward"},
    };
    memcpy(all, list, sizeof list);
}

static inline void run_check(layer_run *run)
{
    named_buffer all[RUN_BUFFERS];
    run_buffers(run, all);
    for (int i = 0; i < RUN_BUFFERS; i++) buffer_check(all[i].buffer, all[i].name);
}

static inline void run_free(layer_run *run)
{
    named_buffer all[RUN_BUFFERS];
    run_buffers(run, all);
    for (int i = 0; i < RUN_BUFFERS; i++) buffer_free(all[i].buffer);
    void *given[] = {run->x,           run->router_weight, run->logits_given, run->topk_weights, run->w1,
                     run->row_weights, run->topk_ids,      run->offsets,      run->b1,           run->b2,
                     run->w2,          run->dout};
    for (size_t i = 0; i < sizeof given / sizeof given[0]; i++) free(given[i]);
    smoe_destroy(run->context);
}

static inline void run_forward(layer_run *run)
{
    if (smoe_layer_forward(run->context, &run->layer, &run->forward_args, NULL) != SMOE_OK)
        fail_msg("%s", smoe_last_error(run->context));
    run_check(run);
    buffer_poison(&run->scratch_forward);
}

static inline void run_backward(layer_run *run)
{
    buffer_poison(&run->scratch_backward);
    if (smoe_layer_backward(run->context, &run->layer, &run->backward_args, NULL) != SMOE_OK)
        fail_msg("%s", smoe_last_error(run->context));
    run_check(run);
}

/* ---- Against the oracle ---- */

typedef struct references {
    oracle_forward forward;
    oracle_backward backward;
    double *logits;
} references;

/* The oracle on what the run was given; after the run's forward, whose logits it takes. */
static inline references run_oracle(const layer_run *run, bool round_stores)
{
    references r = {0};
    const size_t pairs = (size_t)(run->layer.tokens * run->layer.experts);
    oracle_input input = {.x = run->x,
                          .router_weight = run->router_weight,
                          .topk_ids = run->topk_ids,
                          .topk_weights = run->topk_weights,
                          .offsets = run->offsets,
                          .row_weights = run->row_weights,
                          .w1 = run->w1,
                          .b1 = run->b1,
                          .w2 = run->w2,
                          .b2 = run->b2,
                          .dout = run->dout,
                          .round_stores = round_stores};
    if (run->layer.entry == SMOE_ENTRY_FROM_LOGITS) {
        r.logits = oracle_alloc(pairs, sizeof *r.logits);
        oracle_load(r.logits, run->layer.logits_type, run->in.logits.data, pairs);
        input.logits = r.logits;
    }
    oracle_forward_run(&run->layer, &input, &r.forward);
    oracle_backward_run(&run->layer, &input, &r.forward, true, &r.backward);
    return r;
}

static inline void references_free(references *r)
{
    oracle_forward_free(&r->forward);
    oracle_backward_free(&r->backward);
    free(r->logits);
}

/* One tensor of the run beside its reference; want is NULL when there is none. */
typedef struct tensor {
    const char *name;
    const buffer *got;
    smoe_type type;
    const double *want;
    size_t count;
} tensor;

enum { RUN_TENSORS = 8 };

static inline void run_tensors(const layer_run *run, const references *r, tensor all[RUN_TENSORS])
{
    const smoe_layer *l = &run->layer;
    const size_t tokens = (size_t)l->tokens, d = (size_t)l->hidden, n = (size_t)l->intermediate;
    const size_t experts = (size_t)l->experts, width = (size_t)run->width;
    const tensor list[RUN_TENSORS] = {
        {"out", &run->result.out, l->dtype, r->forward.out, tokens * d},
        {"dx", &run->result.dx, l->dtype, r->backward.dx, tokens * d},
        {"dw1", &run->result.dw1, l->gradient_type, r->backward.dw1, experts * width * d},
        {"dw2", &run->result.dw2, l->gradient_type, r->backward.dw2, experts * d * n},
        {"db1", &run->result.db1, l->gradient_type, r->backward.db1, experts * width},
        {"db2", &run->result.db2, l->gradient_type, r->backward.db2, experts * d},
        {"dtopk_weights", &run->result.dtopk_weights, SMOE_TYPE_F32, r->backward.dtopk_weights,
         tokens * (size_t)l->topk},
        {"drow_weights", &run->result.drow_weights, SMOE_TYPE_F32, r->backward.drow_weights, tokens},
    };
    memcpy(all, list, sizeof list);
    for (int i = 0; i < RUN_TENSORS; i++)
        if (!all[i].got->base) all[i].want = NULL;
}

static inline double *tensor_values(const tensor *t)
{
    double *values_ = oracle_alloc(t->count, sizeof *values_);
    oracle_load(values_, t->type, t->got->data, t->count);
    return values_;
}

#endif
