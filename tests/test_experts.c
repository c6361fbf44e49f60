/* What the table of cases (harness/cases.h) does not ask of the experts and the router's backward: exact
 * zeros and untouched gradients of experts without rows, sparse dlogits, and a NaN that stays in its token.
 */
#include "harness/run.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

typedef struct layer_case {
    smoe_context *context;
    oracle_drawn drawn;
    run r;
} layer_case;

static const run_options plain = {0};

static smoe_layer make_layer(smoe_entry entry, int64_t tokens, int64_t hidden, int64_t intermediate,
                             int64_t experts, int64_t topk)
{
    smoe_layer layer = SMOE_LAYER_INIT;
    layer.tokens = tokens;
    layer.hidden = hidden;
    layer.intermediate = intermediate;
    layer.experts = experts;
    layer.topk = topk;
    layer.dtype = SMOE_TYPE_F32;
    layer.entry = entry;
    return layer;
}

static layer_case *case_make(const smoe_layer *layer, oracle_draw draw, uint64_t seed)
{
    layer_case *c = calloc(1, sizeof *c);
    bool wanted[SLOTS];
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.threads = 2;
    assert_non_null(c);
    assert_int_equal(smoe_create(&c->context, &options), SMOE_OK);
    oracle_draw_inputs(layer, &draw, seed, &c->drawn);
    run_wanted(layer, &c->drawn, &plain, wanted);
    if (!run_open(&c->r, device_find("cpu"), c->context, layer, wanted) || !run_make(&c->r) ||
        !run_inputs(&c->r, &c->drawn))
        fail_msg("%s", c->r.text);
    return c;
}

static void case_free(layer_case *c)
{
    run_close(&c->r);
    oracle_drawn_free(&c->drawn);
    smoe_destroy(c->context);
    free(c);
}

static void case_run(layer_case *c)
{
    if (!run_forward(&c->r, &plain) || !run_check(&c->r) || !run_backward(&c->r, &plain) || !run_check(&c->r))
        fail_msg("%s", c->r.text);
}

/* ---- Exact zeros ---- */

static void fill_with_negative_zeros(const buffer *b)
{
    for (size_t i = 0; i < b->bytes / sizeof(float); i++) ((float *)b->data)[i] = -0.0f;
}

/* Whether all floats of expert e's part of a tensor are zeros with this sign. */
static int part_is_zero(const buffer *b, int64_t experts, int64_t e, int negative)
{
    const size_t each = b->bytes / sizeof(float) / (size_t)experts;
    const float *part = (const float *)b->data + each * (size_t)e;
    for (size_t i = 0; i < each; i++)
        if (part[i] != 0.0f || (signbit(part[i]) != 0) != negative) return 0;
    return 1;
}

/* Gradients of experts without rows must be zero if they are written, and unchanged if they are accumulated:
 * -0 must remain, since adding 0 would make it +0. */
static void experts_without_rows_are_not_touched(void **state)
{
    (void)state;
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        smoe_layer layer = make_layer(SMOE_ENTRY_FROM_TOPK, 100, 72, 24, 7, 2);
        layer.accumulate = accumulate;
        const oracle_draw draw = {.b1 = true, .b2 = true, .routing = ORACLE_HALF_EMPTY};
        layer_case *c = case_make(&layer, draw, 3);
        for (int i = SLOT_DW1; i <= SLOT_DB2 && accumulate; i++)
            fill_with_negative_zeros(&c->r.slots[i].memory);
        case_run(c);
        for (int64_t e = 0; e < 7; e++)
            for (int i = SLOT_DW1; i <= SLOT_DB2; i++)
                assert_int_equal(part_is_zero(&c->r.slots[i].memory, 7, e, accumulate), e % 2);
        case_free(c);
    }
}

/* With a sparse score function dlogits must be exactly zero for all experts but the token's own. */
static void sparse_is_sparse(void **state)
{
    (void)state;
    smoe_layer layer = make_layer(SMOE_ENTRY_FROM_LOGITS, 300, 24, 8, 6, 2);
    layer.score = SMOE_SCORE_TOPK_SOFTMAX;
    layer_case *c = case_make(&layer, (oracle_draw){0}, 31);
    case_run(c);
    const float *dlogits = slot_data(&c->r, SLOT_DLOGITS);
    for (int64_t t = 0; t < 300; t++) {
        int nonzero = 0;
        for (int64_t e = 0; e < 6; e++) nonzero += dlogits[t * 6 + e] != 0.0f;
        assert_true(nonzero > 0 && nonzero <= 2);
    }
    case_free(c);
}

/* ---- NaN stays where it belongs ---- */

static int token_has_nan(const buffer *b, const smoe_layer *l, int64_t token)
{
    const float *row = (const float *)b->data + token * l->hidden;
    for (int64_t i = 0; i < l->hidden; i++)
        if (isnan(row[i])) return 1;
    return 0;
}

static void assert_same_row(const run *one, const run *other, slot_id id, int64_t row, size_t bytes)
{
    assert_memory_equal((const char *)slot_data(one, id) + (size_t)row * bytes,
                        (const char *)slot_data(other, id) + (size_t)row * bytes, bytes);
}

/* Writes a NaN into an f32 input. */
static void spoil(run *r, slot_id id, int64_t element)
{
    ((float *)slot_data(r, id))[element] = NAN;
    assert_true(slot_keep(r, id));
}

static void assert_other_experts_same(const run *clean, const run *spoiled, int64_t expert)
{
    for (int i = SLOT_DW1; i <= SLOT_DB2; i++)
        for (int64_t e = 0; e < clean->layer.experts; e++)
            if (e != expert)
                assert_same_row(clean, spoiled, (slot_id)i, e,
                                clean->slots[i].memory.bytes / (size_t)clean->layer.experts);
}

/* K = 1: one NaN in a token's x, dout or weight, or in an expert's weights. Only that token's rows of O and
 * dX (for weights: those of the expert's tokens), and only that expert's gradients, may change. */
static void check_nan(slot_id input)
{
    const smoe_layer layer = make_layer(SMOE_ENTRY_FROM_TOPK, 300, 72, 40, 4, 1);
    const oracle_draw draw = {.b1 = true, .b2 = true};
    layer_case *clean = case_make(&layer, draw, 21), *c = case_make(&layer, draw, 21);
    const int64_t token = 17, *expert_of = c->drawn.topk_ids, expert = expert_of[token];
    const bool whole_expert = input == SLOT_W1 || input == SLOT_W2;
    if (input == SLOT_W1) spoil(&c->r, input, expert * 2 * layer.intermediate * layer.hidden + 5);
    if (input == SLOT_W2) spoil(&c->r, input, expert * layer.intermediate * layer.hidden + 5);
    if (!whole_expert) spoil(&c->r, input, input == SLOT_TOPK_WEIGHTS ? token : token * layer.hidden + 3);
    case_run(clean);
    case_run(c);
    const size_t row = (size_t)layer.hidden * sizeof(float);
    for (int64_t t = 0; t < layer.tokens; t++) {
        if (t == token || (whole_expert && expert_of[t] == expert)) continue;
        assert_same_row(&clean->r, &c->r, SLOT_OUT, t, row);
        assert_same_row(&clean->r, &c->r, SLOT_DX, t, row);
        assert_same_row(&clean->r, &c->r, SLOT_DTOPK_WEIGHTS, t, sizeof(float));
    }
    assert_int_equal(token_has_nan(&c->r.slots[SLOT_OUT].memory, &layer, token), input != SLOT_DOUT);
    assert_true(token_has_nan(&c->r.slots[SLOT_DX].memory, &layer, token));
    assert_other_experts_same(&clean->r, &c->r, expert);
    case_free(clean), case_free(c);
}

static void a_nan_stays_in_its_token(void **state)
{
    (void)state;
    const slot_id inputs[] = {SLOT_X, SLOT_DOUT, SLOT_TOPK_WEIGHTS, SLOT_W1, SLOT_W2};
    for (size_t i = 0; i < sizeof inputs / sizeof inputs[0]; i++) check_nan(inputs[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(experts_without_rows_are_not_touched),
        cmocka_unit_test(sparse_is_sparse),
        cmocka_unit_test(a_nan_stays_in_its_token),
    };
    return cmocka_run_group_tests_name("experts", tests, NULL, NULL);
}
