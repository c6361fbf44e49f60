/* Route, round and plan of one layer through the public API, in poisoned buffers that end with a canary. */
#ifndef TESTS_ROUTING_CASE_H
#define TESTS_ROUTING_CASE_H

#include <smoe.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

enum { CANARY = 256, POISON = 0xff };

typedef struct routing_case {
    smoe_context *context;
    smoe_layer layer;
    smoe_sizes sizes;
    smoe_forward_args args;
    smoe_plan_view plan;
} routing_case;

static inline smoe_layer routing_layer(int64_t tokens, int64_t experts, int64_t topk)
{
    smoe_layer layer = SMOE_LAYER_INIT;
    layer.tokens = tokens;
    layer.hidden = 8;
    layer.intermediate = 8;
    layer.experts = experts;
    layer.topk = topk;
    layer.dtype = SMOE_TYPE_F32;
    return layer;
}

/* An aligned buffer of `bytes` poisoned bytes, followed by a canary. Release it with free(). */
static inline void *poisoned(uint64_t bytes)
{
    const uint64_t whole = (bytes + CANARY + 255) / 256 * 256;
    void *buffer = aligned_alloc(256, whole);
    assert_non_null(buffer);
    memset(buffer, POISON, whole);
    return buffer;
}

static inline void check_canary(const void *buffer, uint64_t bytes)
{
    const unsigned char *canary = (const unsigned char *)buffer + bytes;
    for (int i = 0; i < CANARY; i++) assert_int_equal(canary[i], POISON);
}

static inline routing_case open_case(const smoe_layer *layer, int threads)
{
    routing_case c = {.layer = *layer, .args = SMOE_FORWARD_ARGS_INIT, .plan = SMOE_PLAN_VIEW_INIT};
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.threads = threads;
    assert_int_equal(smoe_create(&c.context, &options), SMOE_OK);
    c.sizes = (smoe_sizes)SMOE_SIZES_INIT;
    if (smoe_query_sizes(c.context, layer, &c.sizes) != SMOE_OK) fail_msg("%s", smoe_last_error(c.context));
    c.args.saved_size = c.sizes.saved_buffer_bytes;
    c.args.scratch_size = c.sizes.scratch_forward_bytes;
    c.args.saved = poisoned(c.args.saved_size);
    c.args.scratch = poisoned(c.args.scratch_size);
    return c;
}

/* Runs the stages that the layer has, up to the plan. The caller has filled the args. */
static inline void run_case(routing_case *c)
{
    smoe_status status = SMOE_OK;
    if (c->layer.entry == SMOE_ENTRY_FROM_LOGITS) status = smoe_route(c->context, &c->layer, &c->args, NULL);
    if (status == SMOE_OK && c->layer.rounding != SMOE_ROUNDING_NONE)
        status = smoe_round(c->context, &c->layer, &c->args, NULL);
    if (status == SMOE_OK) status = smoe_plan(c->context, &c->layer, &c->args, NULL);
    if (status == SMOE_OK) status = smoe_view_plan(c->context, &c->layer, &c->args, &c->plan);
    if (status != SMOE_OK) fail_msg("%s", smoe_last_error(c->context));
    check_canary(c->args.saved, c->args.saved_size);
    check_canary(c->args.scratch, c->args.scratch_size);
}

static inline void close_case(routing_case *c)
{
    free(c->args.saved);
    free(c->args.scratch);
    smoe_destroy(c->context);
}

/* ---- random numbers: xorshift64* ---- */

static inline uint32_t draw_bits(uint64_t *random)
{
    *random ^= *random >> 12;
    *random ^= *random << 25;
    *random ^= *random >> 27;
    return (uint32_t)(*random * UINT64_C(2685821657736338717) >> 32);
}

/* 0..count-1 */
static inline int64_t draw_below(uint64_t *random, int64_t count)
{
    return (int64_t)((uint64_t)draw_bits(random) * (uint64_t)count >> 32);
}

/* -1..1 */
static inline float draw_float(uint64_t *random)
{
    return (float)((double)draw_bits(random) / 2147483648.0 - 1.0);
}

/* ---- bf16 ---- */

static inline float float_of_bf16(uint16_t bits)
{
    const uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
}

/* Truncates instead of rounding, which is good enough for test inputs. */
static inline uint16_t bf16_of_float(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return 0x7fc0;
    return (uint16_t)(bits >> 16);
}

/* ---- what every plan must satisfy ---- */

/* What check_plan compares the plan with: returns 1 if token t has a row for expert e, with the row's weight
 * in *weight, else 0. In the comparison NaN weights are equal. */
typedef int (*wanted_row)(const void *user, int64_t t, int64_t e, float *weight);

static inline int same_float(float a, float b)
{
    return a == b || (a != a && b != b);
}

static inline void check_order(const smoe_plan_view *p, int64_t experts)
{
    for (int64_t i = 1; i < experts; i++) {
        const int32_t a = p->order[i - 1], b = p->order[i];
        assert_in_range(b, 0, experts - 1);
        assert_true(p->counts[a] > p->counts[b] || (p->counts[a] == p->counts[b] && a < b));
    }
}

static inline void check_pad(const smoe_plan_view *p, int64_t row)
{
    assert_int_equal(p->row_token[row], -1);
    assert_true(p->row_weight[row] == 0.0f);
}

static inline void check_plan(const routing_case *c, wanted_row wanted, const void *user)
{
    const smoe_plan_view *p = &c->plan;
    const int64_t tokens = c->layer.tokens, experts = c->layer.experts;
    int32_t *seen = calloc((size_t)tokens, sizeof *seen); /* rows of each token so far */
    int64_t row = 0, real = 0;
    assert_int_equal(p->offsets[0], 0);
    assert_int_equal(p->block_offsets[0], 0);
    assert_int_equal(p->token_offsets[0], 0);
    for (int64_t e = 0; e < experts; e++) {
        int64_t count = 0;
        assert_int_equal(row, 64 * (int64_t)p->block_offsets[e]);
        for (int64_t t = 0; t < tokens; t++) {
            float weight = 0;
            if (!wanted(user, t, e, &weight)) continue;
            assert_int_equal(p->row_token[row], t);
            assert_true(same_float(p->row_weight[row], weight));
            assert_true(p->token_offsets[t] + seen[t] < p->token_offsets[t + 1]);
            assert_int_equal(p->token_rows[p->token_offsets[t] + seen[t]], row);
            seen[t]++;
            row++;
            count++;
        }
        real += count;
        assert_int_equal(p->counts[e], count);
        assert_int_equal(p->offsets[e + 1], real);
        for (; row % 64; row++) check_pad(p, row);
    }
    assert_int_equal(row, 64 * (int64_t)p->block_offsets[experts]);
    assert_true(real <= c->sizes.rows);
    assert_true(row <= c->sizes.padded_rows);
    for (; row < c->sizes.padded_rows; row++) check_pad(p, row);
    for (int64_t t = 0; t < tokens; t++)
        assert_int_equal(p->token_offsets[t + 1], p->token_offsets[t] + seen[t]);
    check_order(p, experts);
    free(seen);
}

#endif
