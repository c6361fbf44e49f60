/* A layer on W ranks, and the same layer without ranks on all tokens (G in smoe_ep.h). Both read the same
 * inputs; the ranks' tensors are parts of tensors for all ranks, so results are compared whole. All memory is
 * shared, so that ranks may be processes. */
#ifndef TESTS_EP_CASE_H
#define TESTS_EP_CASE_H

#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include "src/ep.h"
#include "src/routing_decisions.h"
#include "tests/ep_memory.h"

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { EP_MOST = 8, EP_POISON = 0xFF, EP_MAPPINGS = 2 * 17 + 4 * EP_MOST };

typedef enum ep_tensor_id {
    EP_X,
    EP_LOGITS,
    EP_IDS,
    EP_WEIGHTS,
    EP_DOUT,
    EP_OUT,
    EP_DX,
    EP_DLOGITS,
    EP_DS, /* up to here rows of tokens; now the experts' */
    EP_W1,
    EP_B1,
    EP_W2,
    EP_B2,
    EP_DW1,
    EP_DB1,
    EP_DW2,
    EP_DB2,
    EP_TENSORS
} ep_tensor_id;

static const char *const ep_names[EP_TENSORS] = {"x",  "logits",  "ids", "weights", "dout", "out",
                                                 "dx", "dlogits", "ds",  "w1",      "b1",   "w2",
                                                 "b2", "dw1",     "db1", "dw2",     "db2"};

typedef struct ep_tensor {
    char *data;
    int64_t row_bytes; /* of a token, or of an expert */
    int64_t rows;
    smoe_type type;
} ep_tensor;

/* One layer: G, or all ranks together. */
typedef struct ep_run {
    ep_tensor at[EP_TENSORS];
    char *saved[EP_MOST], *scratch[EP_MOST];
} ep_run;

typedef struct ep_case {
    smoe_layer layer;                            /* of a rank; tokens is that of rank 0 */
    int64_t tokens[EP_MOST], first[EP_MOST + 1]; /* first token of each rank in G, and ... */
    int64_t place[EP_MOST + 1];                  /* ... in the ranks' tensors, aligned */
    int biases;
    int frozen;                          /* no gradients of the experts are wanted */
    char *router, *drouter[EP_MOST + 1]; /* NULL, or Wr (E, d) and dWr of each rank, that of G last; dtype */
    uint32_t timeout_ms;
    char *windows[EP_MOST];
    ep_run g, w;
    smoe_context *contexts[EP_MOST];
    smoe_ep *ep[EP_MOST];
    smoe_status status[EP_MOST];
    struct {
        char *at;
        size_t bytes;
    } mappings[EP_MAPPINGS];
    int mapped;
} ep_case;

static inline void *ep_memory(ep_case *c, int64_t bytes)
{
    const size_t used = ((size_t)bytes + 63) / 64 * 64, pages = (used + EP_PAGE - 1) / EP_PAGE * EP_PAGE;
    assert_true(c->mapped < EP_MAPPINGS);
    c->mappings[c->mapped].bytes = pages;
    ep_map(&c->mappings[c->mapped].at, pages);
    return memset(c->mappings[c->mapped++].at + pages - used, EP_POISON, used);
}

/* ---- Tensors ---- */

static inline int64_t ep_element(smoe_type type)
{
    return type == SMOE_TYPE_BF16 ? 2 : 4;
}

static inline void ep_make_run(ep_case *c, ep_run *run, int64_t tokens)
{
    const smoe_layer *l = &c->layer;
    const int64_t d = l->hidden, n = l->intermediate,
                  width = l->activation < SMOE_ACTIVATION_SILU ? 2 * n : n;
    const struct {
        int64_t columns;
        smoe_type type;
    } shapes[EP_TENSORS] = {
        {d, l->dtype},
        {l->experts, SMOE_TYPE_F32},
        {l->topk, SMOE_TYPE_I32},
        {l->topk, SMOE_TYPE_F32},
        {d, l->dtype},
        {d, l->dtype},
        {d, l->dtype},
        {l->experts, SMOE_TYPE_F32},
        {l->topk, SMOE_TYPE_F32},
        {width * d, l->dtype},
        {width, l->dtype},
        {n * d, l->dtype},
        {d, l->dtype},
        {width * d, l->gradient_type},
        {width, l->gradient_type},
        {n * d, l->gradient_type},
        {d, l->gradient_type},
    };
    for (int i = 0; i < EP_TENSORS; i++) {
        ep_tensor *t = &run->at[i];
        t->rows = i <= EP_DS ? tokens : l->experts;
        t->type = shapes[i].type;
        t->row_bytes = shapes[i].columns * ep_element(t->type);
        t->data = ep_memory(c, t->rows * t->row_bytes);
    }
}

/* -1..1, from a counter */
static inline float ep_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(*state >> 40) / (1 << 23) - 1.0);
}

static inline void ep_fill(const ep_tensor *t, float scale, uint64_t seed)
{
    const int64_t count = t->rows * t->row_bytes / ep_element(t->type);
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = moe_bits_of(moe_round_to_bf16(scale * ep_random(&seed)));
        const uint16_t high = (uint16_t)(bits >> 16);
        memcpy(t->data + i * ep_element(t->type), t->type == SMOE_TYPE_BF16 ? (void *)&high : (void *)&bits,
               (size_t)ep_element(t->type));
    }
}

/* K different experts for each token, a few of them skipped (-1). */
static inline void ep_fill_ids(const ep_case *c, uint64_t seed)
{
    const ep_tensor *t = &c->g.at[EP_IDS];
    const int64_t experts = c->layer.experts, topk = c->layer.topk;
    for (int64_t i = 0; i < t->rows; i++) {
        const int64_t start = (int64_t)((ep_random(&seed) + 1.0f) / 2.0f * (float)experts);
        int32_t *ids = (int32_t *)(void *)(t->data + i * t->row_bytes);
        for (int64_t k = 0; k < topk; k++)
            ids[k] = i % 11 == 7 && k == 0 ? -1 : (int32_t)((start + 5 * k) % experts);
    }
}

/* Row `row` of G's tensor, and the same row of the ranks'. */
static inline char *ep_g_row(const ep_case *c, ep_tensor_id id, int64_t row)
{
    return c->g.at[id].data + row * c->g.at[id].row_bytes;
}

static inline char *ep_w_row(const ep_case *c, ep_tensor_id id, int64_t row)
{
    int rank = 0;
    while (id <= EP_DS && row >= c->first[rank + 1]) rank++;
    if (id <= EP_DS) row += c->place[rank] - c->first[rank];
    return c->w.at[id].data + row * c->w.at[id].row_bytes;
}

static inline void ep_copy(const ep_case *c, ep_tensor_id id)
{
    for (int64_t row = 0; row < c->g.at[id].rows; row++)
        memcpy(ep_w_row(c, id, row), ep_g_row(c, id, row), (size_t)c->g.at[id].row_bytes);
}

static inline void ep_copy_inputs(const ep_case *c)
{
    for (int i = EP_X; i <= EP_DOUT; i++) ep_copy(c, (ep_tensor_id)i);
    for (int i = EP_W1; i <= EP_B2; i++) ep_copy(c, (ep_tensor_id)i);
}

/* ---- Arguments: of a rank, or with rank -1 of G ---- */

static inline smoe_layer ep_layer(const ep_case *c, int rank)
{
    smoe_layer layer = c->layer;
    layer.tokens = rank < 0 ? c->first[layer.ranks] : c->tokens[rank];
    if (rank < 0) layer.ranks = layer.waves = 0, layer.max_tokens = layer.row_capacity = 0;
    return layer;
}

/* The part of a tensor that belongs to the rank; NULL where T is 0, as PyTorch gives it. Gradients are never
 * NULL, because a pointer says that they are wanted. */
static inline void *ep_part(const ep_case *c, int rank, ep_tensor_id id)
{
    const ep_tensor *t = rank < 0 ? &c->g.at[id] : &c->w.at[id];
    if (rank < 0) return t->data;
    if (id > EP_DS) return t->data + rank * (c->layer.experts / c->layer.ranks) * t->row_bytes;
    if (c->tokens[rank] == 0 && id <= EP_OUT) return NULL;
    return t->data + c->place[rank] * t->row_bytes;
}

static inline smoe_forward_args ep_forward_args(const ep_case *c, int rank)
{
    const int logits = c->layer.entry == SMOE_ENTRY_FROM_LOGITS, r = rank < 0 ? 0 : rank;
    const ep_run *run = rank < 0 ? &c->g : &c->w;
    smoe_forward_args a = SMOE_FORWARD_ARGS_INIT;
    a.x = ep_part(c, rank, EP_X);
    a.logits = logits ? ep_part(c, rank, EP_LOGITS) : NULL;
    a.router_weight = c->router;
    a.topk_ids = logits ? NULL : ep_part(c, rank, EP_IDS);
    a.topk_weights = logits ? NULL : ep_part(c, rank, EP_WEIGHTS);
    a.w1 = ep_part(c, rank, EP_W1);
    a.b1 = c->biases ? ep_part(c, rank, EP_B1) : NULL;
    a.w2 = ep_part(c, rank, EP_W2);
    a.b2 = c->biases ? ep_part(c, rank, EP_B2) : NULL;
    a.out = ep_part(c, rank, EP_OUT);
    a.saved = run->saved[r];
    a.scratch = run->scratch[r];
    a.saved_size = a.scratch_size = UINT64_MAX; /* made to measure */
    a.ep = rank < 0 ? NULL : c->ep[rank];
    return a;
}

static inline smoe_backward_args ep_backward_args(const ep_case *c, int rank)
{
    const smoe_forward_args f = ep_forward_args(c, rank);
    const int logits = c->layer.entry == SMOE_ENTRY_FROM_LOGITS;
    smoe_backward_args a = SMOE_BACKWARD_ARGS_INIT;
    a.x = f.x;
    a.logits = f.logits;
    a.router_weight = f.router_weight;
    a.drouter_weight = c->router ? c->drouter[rank < 0 ? EP_MOST : rank] : NULL;
    a.topk_ids = f.topk_ids;
    a.w1 = f.w1;
    a.w2 = f.w2;
    a.b2 = f.b2;
    a.saved = f.saved;
    a.scratch = f.scratch;
    a.saved_size = a.scratch_size = UINT64_MAX;
    a.dout = ep_part(c, rank, EP_DOUT);
    a.dx = ep_part(c, rank, EP_DX);
    a.dw1 = ep_part(c, rank, EP_DW1);
    a.dw2 = ep_part(c, rank, EP_DW2);
    a.db1 = c->biases ? ep_part(c, rank, EP_DB1) : NULL;
    a.db2 = c->biases ? ep_part(c, rank, EP_DB2) : NULL;
    a.dlogits = logits ? ep_part(c, rank, EP_DLOGITS) : NULL;
    a.dtopk_weights = logits ? NULL : ep_part(c, rank, EP_DS);
    if (c->frozen) a.dw1 = a.dw2 = a.db1 = a.db2 = NULL;
    a.ep = f.ep;
    return a;
}

/* ---- Making a case ---- */

static inline smoe_layer ep_describe(int ranks, int64_t experts, int64_t topk, smoe_type dtype)
{
    smoe_layer layer = SMOE_LAYER_INIT;
    layer.hidden = 72;
    layer.intermediate = 40;
    layer.experts = experts;
    layer.topk = topk;
    layer.dtype = layer.gradient_type = dtype;
    layer.entry = SMOE_ENTRY_FROM_TOPK;
    layer.ranks = ranks;
    layer.max_tokens = 140;
    return layer;
}

static inline void ep_make_buffers(ep_case *c, smoe_context *context, ep_run *run, int rank)
{
    const smoe_layer layer = ep_layer(c, rank);
    smoe_sizes sizes = SMOE_SIZES_INIT;
    if (smoe_query_sizes(context, &layer, &sizes) != SMOE_OK) fail_msg("%s", smoe_last_error(context));
    const uint64_t forward = sizes.scratch_forward_bytes, backward = sizes.scratch_backward_bytes;
    run->saved[rank < 0 ? 0 : rank] = ep_memory(c, (int64_t)sizes.saved_buffer_bytes);
    run->scratch[rank < 0 ? 0 : rank] = ep_memory(c, (int64_t)(forward > backward ? forward : backward));
}

/* The group of a rank, in the process or thread that will use it. */
static inline void ep_join(ep_case *c, int rank, int threads)
{
    const smoe_layer layer = ep_layer(c, rank);
    smoe_ep_options options = SMOE_EP_OPTIONS_INIT;
    options.rank = rank;
    options.timeout_ms = c->timeout_ms;
    options.windows = (void *const *)c->windows;
    c->contexts[rank] = ep_context(threads);
    if (smoe_ep_create(&c->ep[rank], c->contexts[rank], &layer, &options) != SMOE_OK)
        fail_msg("%s", smoe_last_error(c->contexts[rank]));
}

static inline void ep_leave(ep_case *c, int rank)
{
    smoe_ep_destroy(c->ep[rank]);
    smoe_destroy(c->contexts[rank]);
    c->ep[rank] = NULL;
}

/* Inputs, buffers and windows; no groups yet. The tokens of rank r are tokens[r]. */
static inline ep_case *ep_make(const smoe_layer *layer, const int64_t *tokens, int biases)
{
    ep_case *c = calloc(1, sizeof *c);
    assert_non_null(c);
    c->layer = *layer;
    c->biases = biases;
    c->timeout_ms = 20000;
    for (int r = 0; r < layer->ranks; r++) {
        c->tokens[r] = tokens[r];
        c->first[r + 1] = c->first[r] + tokens[r];
        c->place[r + 1] = c->place[r] + (tokens[r] + 15) / 16 * 16;
    }
    ep_make_run(c, &c->g, c->first[layer->ranks]);
    ep_make_run(c, &c->w, c->place[layer->ranks]);
    const float scales[EP_TENSORS] = {
        [EP_X] = 1.0f,  [EP_LOGITS] = 3.0f, [EP_WEIGHTS] = 1.0f, [EP_DOUT] = 1.0f,
        [EP_W1] = 0.3f, [EP_B1] = 0.5f,     [EP_W2] = 0.3f,      [EP_B2] = 0.5f,
    };
    for (int i = 0; i < EP_TENSORS; i++)
        if (scales[i] > 0.0f) ep_fill(&c->g.at[i], scales[i], (uint64_t)i + 1);
    ep_fill_ids(c, 99);
    smoe_context *context = ep_context(2); /* the most that a test uses: scratch grows with threads */
    const smoe_layer described = ep_layer(c, 0);
    smoe_sizes sizes = SMOE_SIZES_INIT;
    if (smoe_query_sizes(context, &described, &sizes) != SMOE_OK) fail_msg("%s", smoe_last_error(context));
    ep_make_buffers(c, context, &c->g, -1);
    for (int r = 0; r < layer->ranks; r++) {
        ep_make_buffers(c, context, &c->w, r);
        c->windows[r] = ep_memory(c, (int64_t)sizes.window_bytes);
        memset(c->windows[r], 0, (size_t)sizes.window_bytes);
        /* rows that nobody sent must not be read */
        moe_ep_window window;
        moe_ep_window_init(&window, &described);
        memset(c->windows[r] + window.routing, EP_POISON, (size_t)(window.bytes - window.routing));
    }
    smoe_destroy(context);
    return c;
}

static inline void ep_free(ep_case *c)
{
    for (int r = 0; r < c->layer.ranks; r++)
        if (c->ep[r]) ep_leave(c, r);
    for (int i = 0; i < c->mapped; i++) ep_unmap(c->mappings[i].at, c->mappings[i].bytes);
    free(c);
}

/* ---- Running ---- */

static inline void ep_run_g(ep_case *c)
{
    smoe_context *context = ep_context(2);
    const smoe_layer layer = ep_layer(c, -1);
    const smoe_forward_args f = ep_forward_args(c, -1);
    const smoe_backward_args b = ep_backward_args(c, -1);
    if (smoe_layer_forward(context, &layer, &f, NULL) != SMOE_OK) fail_msg("%s", smoe_last_error(context));
    if (!layer.inference && smoe_layer_backward(context, &layer, &b, NULL) != SMOE_OK)
        fail_msg("%s", smoe_last_error(context));
    ep_settle();
    smoe_destroy(context);
}

/* Forward and backward of one rank, `steps` times, as its thread or process does it. */
static inline smoe_status ep_run_rank(ep_case *c, int rank, int steps)
{
    const smoe_layer layer = ep_layer(c, rank);
    const smoe_forward_args f = ep_forward_args(c, rank);
    const smoe_backward_args b = ep_backward_args(c, rank);
    smoe_status status = SMOE_OK;
    for (int step = 0; step < steps && status == SMOE_OK; step++) {
        status = smoe_layer_forward(c->contexts[rank], &layer, &f, NULL);
        if (status == SMOE_OK && !layer.inference)
            status = smoe_layer_backward(c->contexts[rank], &layer, &b, NULL);
    }
    return status;
}

typedef struct ep_thread {
    ep_case *c;
    int rank, steps;
} ep_thread;

static inline void *ep_thread_main(void *user)
{
    const ep_thread *t = user;
    t->c->status[t->rank] = ep_run_rank(t->c, t->rank, t->steps);
    return NULL;
}

/* Every rank a thread; their statuses are in c->status. */
static inline void ep_run_threads(ep_case *c, int steps)
{
    pthread_t threads[EP_MOST];
    ep_thread users[EP_MOST];
    for (int r = 0; r < c->layer.ranks; r++) ep_join(c, r, 1);
    for (int r = 0; r < c->layer.ranks; r++) {
        users[r] = (ep_thread){c, r, steps};
        assert_int_equal(pthread_create(&threads[r], NULL, ep_thread_main, &users[r]), 0);
    }
    for (int r = 0; r < c->layer.ranks; r++) pthread_join(threads[r], NULL);
}

typedef smoe_status ep_forward_call(smoe_context *, const smoe_layer *, const smoe_forward_args *, void *);
typedef smoe_status ep_backward_call(smoe_context *, const smoe_layer *, const smoe_backward_args *, void *);

/* All ranks in one thread: each call for all ranks, then the next call. The first that fails is reported, if
 * `must`. */
static inline void ep_forward_lockstep(ep_case *c, void *stream, int must)
{
    ep_forward_call *const calls[] = {smoe_route,       smoe_round,           smoe_plan,
                                      smoe_ep_dispatch, smoe_experts_forward, smoe_ep_collect};
    for (int i = 0; i < 6; i++) {
        if (i == 0 && c->layer.entry != SMOE_ENTRY_FROM_LOGITS) continue;
        if (i == 1 && c->layer.rounding == SMOE_ROUNDING_NONE) continue;
        for (int r = 0; r < c->layer.ranks; r++) {
            const smoe_layer layer = ep_layer(c, r);
            const smoe_forward_args f = ep_forward_args(c, r);
            c->status[r] = calls[i](c->contexts[r], &layer, &f, stream);
            if (must && c->status[r] != SMOE_OK)
                fail_msg("rank %d, forward call %d: %s", r, i, smoe_last_error(c->contexts[r]));
        }
    }
}

static inline void ep_backward_lockstep(ep_case *c, void *stream, int must)
{
    ep_backward_call *const calls[] = {smoe_ep_dispatch_backward, smoe_experts_backward,
                                       smoe_ep_collect_backward};
    for (int i = 0; i < 3; i++)
        for (int r = 0; r < c->layer.ranks; r++) {
            const smoe_layer layer = ep_layer(c, r);
            const smoe_backward_args b = ep_backward_args(c, r);
            c->status[r] = calls[i](c->contexts[r], &layer, &b, stream);
            if (must && c->status[r] != SMOE_OK)
                fail_msg("rank %d, backward call %d: %s", r, i, smoe_last_error(c->contexts[r]));
        }
}

static inline void ep_run_lockstep(ep_case *c, int threads)
{
    for (int r = 0; r < c->layer.ranks; r++)
        if (!c->ep[r]) ep_join(c, r, threads);
    ep_forward_lockstep(c, NULL, 1);
    if (!c->layer.inference) ep_backward_lockstep(c, NULL, 1);
    ep_settle();
}

/* ---- Comparing ---- */

static inline double ep_value(const char *row, smoe_type type, int64_t i)
{
    uint32_t bits = 0;
    uint16_t high;
    memcpy(&high, row + 2 * i, 2);
    memcpy(&bits, row + (type == SMOE_TYPE_BF16 ? 0 : 4 * i), 4);
    return (double)moe_float_of(type == SMOE_TYPE_BF16 ? (uint32_t)high << 16 : bits);
}

static inline void ep_assert_bits(const ep_case *c, ep_tensor_id id)
{
    const ep_tensor *g = &c->g.at[id];
    for (int64_t row = 0; row < g->rows; row++)
        if (memcmp(ep_g_row(c, id, row), ep_w_row(c, id, row), (size_t)g->row_bytes))
            fail_msg("%s: row %lld of %lld has other bits", ep_names[id], (long long)row, (long long)g->rows);
}

/* Relative Frobenius error. */
static inline void ep_assert_close(const ep_case *c, ep_tensor_id id, double limit)
{
    const ep_tensor *g = &c->g.at[id];
    double error = 0.0, size = 0.0;
    for (int64_t row = 0; row < g->rows; row++)
        for (int64_t i = 0; i < g->row_bytes / ep_element(g->type); i++) {
            const double want = ep_value(ep_g_row(c, id, row), g->type, i);
            const double got = ep_value(ep_w_row(c, id, row), g->type, i);
            error += (got - want) * (got - want);
            size += want * want;
        }
    if (!(sqrt(error) <= limit * sqrt(size)))
        fail_msg("%s: error %.3g, limit %.3g", ep_names[id], sqrt(error / size), limit);
}

/* G's token of a slot. */
static inline int64_t ep_token(const ep_case *c, int64_t slot)
{
    return c->first[slot / c->layer.max_tokens] + slot % c->layer.max_tokens;
}

/* H of the received rows that are kept, expert by expert, against G's. On the CPU, and with one wave, an
 * expert's tokens ascend by rank, then by token, which is the order of G's tokens. */
static inline void ep_assert_h(const ep_case *c)
{
    const smoe_layer whole = ep_layer(c, -1);
    moe_problem g;
    moe_problem_init(&g, &whole);
    const moe_plan_arrays plan = moe_plan_at(&g, c->g.saved[0]);
    const int64_t each = c->layer.experts / c->layer.ranks, bytes = g.h_width * g.element;
    for (int64_t e = 0; e < whole.experts; e++) {
        const int rank = (int)(e / each);
        const smoe_layer layer = ep_layer(c, rank);
        moe_problem problem;
        moe_ep_problem ep;
        moe_problem_init(&problem, &layer);
        moe_ep_problem_init(&ep, &layer);
        const moe_ep_arrays got = moe_ep_arrays_at(&ep, &problem, c->w.saved[rank]);
        assert_int_equal(got.plan.counts[e % each], plan.counts[e]);
        int64_t found = 0, at = 64 * plan.block_offsets[e];
        for (int64_t row = 64 * got.plan.block_offsets[e % each];
             row < 64 * got.plan.block_offsets[e % each + 1]; row++) {
            if (got.plan.row_token[row] < 0) continue;
            const int64_t token = ep_token(c, got.plan.row_token[row]);
            if (plan.row_token[at] != token) /* a wave starts again with a lower rank */
                for (at = 64 * plan.block_offsets[e]; plan.row_token[at] != token;) at++;
            const char *want = (char *)plan.h + at++ * bytes, *is = (char *)got.plan.h + row * bytes;
            if (row < ep.received.kept_rows && memcmp(want, is, (size_t)bytes))
                fail_msg("H of expert %lld, token %lld has other bits", (long long)e, (long long)token);
            found++;
        }
        assert_int_equal(found, plan.counts[e]);
    }
}

static inline void ep_assert_same(const ep_case *c)
{
    const double limit = c->layer.dtype == SMOE_TYPE_F32 ? 1e-6 : 6e-3;
    const int logits = c->layer.entry == SMOE_ENTRY_FROM_LOGITS;
    moe_ep_problem ep;
    moe_ep_problem_init(&ep, &c->layer);
#ifdef TEST_ON_CUDA
    const int order = ep.parts == 1; /* several waves sum the rows of an expert in another order */
#else
    const int order = 1;
#endif
    ep_assert_close(c, EP_OUT, limit);
    if (c->layer.topk == 1) ep_assert_bits(c, EP_OUT); /* one row: O[t] is s Y, rounded */
    if (c->layer.inference) return;
    ep_assert_h(c);
    for (int i = EP_DW1; i <= EP_DB2; i++) {
        if (!c->biases && (i == EP_DB1 || i == EP_DB2)) continue;
        if (order)
            ep_assert_bits(c, (ep_tensor_id)i);
        else
            ep_assert_close(c, (ep_tensor_id)i, limit);
    }
    ep_assert_bits(c, logits ? EP_DLOGITS : EP_DS);
    ep_assert_close(c, EP_DX, limit);
    if (c->layer.topk == 1) ep_assert_bits(c, EP_DX);
}

#endif
