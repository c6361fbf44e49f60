/* Forward and backward of the experts through the public API, compared with the fp64 oracle; with small
 * integers the results must be exact. Also the promises of smoe.h: the same bits for any number of threads
 * and chunks, accumulation, experts without rows, a NaN only where the formulas give one, no access outside
 * of buffers. */
#include "harness/check.h"
#include "oracle/number.h"
#include "src/activations.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static smoe_layer make_layer(smoe_entry entry, smoe_type dtype, smoe_activation activation, int64_t tokens,
                             int64_t hidden, int64_t intermediate, int64_t experts, int64_t topk)
{
    smoe_layer layer = SMOE_LAYER_INIT;
    layer.tokens = tokens;
    layer.hidden = hidden;
    layer.intermediate = intermediate;
    layer.experts = experts;
    layer.topk = entry == SMOE_ENTRY_FROM_ROWS ? 1 : topk;
    layer.dtype = dtype;
    layer.gradient_type = dtype;
    layer.activation = activation;
    layer.entry = entry;
    return layer;
}

/* ---- A layer on the CPU, with drawn inputs ---- */

typedef struct layer_case {
    smoe_context *context;
    oracle_drawn drawn;
    run r;
} layer_case;

static const run_options plain = {0};

static smoe_context *make_context(int threads)
{
    smoe_context *context;
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.threads = threads;
    assert_int_equal(smoe_create(&context, &options), SMOE_OK);
    return context;
}

static layer_case *case_make(const smoe_layer *layer, oracle_draw draw, uint64_t seed, int threads)
{
    layer_case *c = calloc(1, sizeof *c);
    bool wanted[SLOTS];
    const run_options options = {.forward_only = layer->inference};
    assert_non_null(c);
    c->context = make_context(threads);
    oracle_draw_inputs(layer, &draw, seed, &c->drawn);
    run_wanted(layer, &c->drawn, &options, wanted);
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

static void case_forward(layer_case *c)
{
    if (!run_forward(&c->r, &plain) || !run_check(&c->r)) fail_msg("%s", c->r.text);
    buffer_poison(&c->r.slots[SLOT_SCRATCH_FORWARD].memory);
}

static void case_backward(layer_case *c)
{
    if (!run_backward(&c->r, &plain) || !run_check(&c->r)) fail_msg("%s", c->r.text);
}

static layer_case *case_run(const smoe_layer *layer, oracle_draw draw, uint64_t seed, int threads)
{
    layer_case *c = case_make(layer, draw, seed, threads);
    case_forward(c);
    case_backward(c);
    return c;
}

/* ---- Accuracy ---- */

static void assert_ok(void *user, tensor_id id, const verdict *judged)
{
    const smoe_layer *l = user;
    if (!judged->ok)
        fail_msg("%s: error %.3g, limit %.3g (entry %d, dtype %d, activation %d, layout %d)",
                 tensor_names[id], judged->error, judged->limit, (int)l->entry, (int)l->dtype,
                 (int)l->activation, (int)l->layout);
}

/* Runs both passes twice, which must give the same bits, and compares the results with the oracle. */
static void check_with(const smoe_layer *layer, oracle_draw draw, uint64_t seed, bool exact)
{
    int64_t differing[TENSORS] = {0};
    const check_options options = {
        .run = {.repeats = 1, .differing = differing}, .exact = exact, .seed = seed};
    smoe_layer described = *layer;
    smoe_context *context = make_context(2);
    char text[RUN_TEXT];
    if (check_layer(device_find("cpu"), context, layer, &draw, &options, assert_ok, &described, text) !=
        RUN_OK)
        fail_msg("%s", text);
    for (int i = 0; i < TENSORS; i++)
        if (differing[i]) fail_msg("%s: other bits the second time", tensor_names[i]);
    smoe_destroy(context);
}

static void check_against_oracle(const smoe_layer *layer, oracle_draw draw, uint64_t seed)
{
    check_with(layer, draw, seed, false);
}

#define VALUE(enumerator, name, shape, curve) enumerator,
static const smoe_activation activations[] = {MOE_ACTIVATIONS(VALUE)};
#undef VALUE

/* Every activation, type and layout; entries, biases, gradient types, index types and chunks alternate. */
static void test_all_kinds(void **state)
{
    (void)state;
    int turn = 0;
    for (int a = 0; a < MOE_ACTIVATION_COUNT; a++) {
        for (int dtype = SMOE_TYPE_F32; dtype <= SMOE_TYPE_BF16; dtype++) {
            for (int layout = 0; layout < 2; layout++, turn++) {
                smoe_layer layer =
                    make_layer((smoe_entry)(turn % 3), (smoe_type)dtype, activations[a], 90, 136, 24, 5, 2);
                layer.layout = (smoe_layout)layout;
                layer.gradient_type = turn / 2 % 2 ? SMOE_TYPE_F32 : (smoe_type)dtype;
                layer.index_type = turn % 2 ? SMOE_TYPE_I64 : SMOE_TYPE_I32;
                layer.chunks = 1 << turn % 4;
                const bool biases = turn % 2 == 0;
                const oracle_draw draw = {.b1 = biases,
                                          .b2 = biases,
                                          .router = true,
                                          .broken_ids = true,
                                          .row_weights = turn % 5 != 0};
                check_against_oracle(&layer, draw, (uint64_t)turn);
            }
        }
    }
}

/* Several row panels, several tiles of dW, panels of features, a d that is no multiple of 64. */
static void test_many_panels(void **state)
{
    (void)state;
    smoe_layer layer =
        make_layer(SMOE_ENTRY_FROM_TOPK, SMOE_TYPE_F32, SMOE_ACTIVATION_SWIGLU, 600, 72, 40, 3, 2);
    check_against_oracle(&layer, (oracle_draw){.routing = ORACLE_ONE_TAKES_ALL, .b1 = true, .b2 = true}, 100);
    layer = make_layer(SMOE_ENTRY_FROM_LOGITS, SMOE_TYPE_BF16, SMOE_ACTIVATION_GEGLU, 500, 72, 40, 2, 2);
    check_against_oracle(&layer, (oracle_draw){.router = true}, 101);
    for (int layout = 0; layout < 2; layout++) {
        layer = make_layer(SMOE_ENTRY_FROM_ROWS, layout ? SMOE_TYPE_BF16 : SMOE_TYPE_F32,
                           SMOE_ACTIVATION_SWIGLU, 40, 584, 328, 2, 1);
        layer.layout = layout ? SMOE_LAYOUT_INTERLEAVED : SMOE_LAYOUT_CONCATENATED;
        check_against_oracle(&layer, (oracle_draw){.b1 = true, .b2 = true, .row_weights = true}, 102);
    }
}

static void test_smallest(void **state)
{
    (void)state;
    for (int entry = 0; entry < 3; entry++) {
        const smoe_layer layer =
            make_layer((smoe_entry)entry, SMOE_TYPE_F32, SMOE_ACTIVATION_SWIGLU, 1, 8, 8, 1, 1);
        check_against_oracle(&layer, (oracle_draw){.b1 = true, .b2 = true, .router = true}, 11);
    }
}

/* ---- Exactness ---- */

/* Small integers and activations made of max(., 0): every sum is exact in f32, so every bit must be right.
 * The inputs for bf16 are sparse, so that H, A and Y are integers that bf16 can hold. */
static void test_exact_integers(void **state)
{
    (void)state;
    static const smoe_activation exact[] = {SMOE_ACTIVATION_REGLU, SMOE_ACTIVATION_RELU,
                                            SMOE_ACTIVATION_RELU2};
    for (int turn = 0; turn < 24; turn++) {
        const smoe_type dtype = turn % 2 ? SMOE_TYPE_BF16 : SMOE_TYPE_F32;
        const smoe_entry entry = turn / 2 % 2 ? SMOE_ENTRY_FROM_TOPK : SMOE_ENTRY_FROM_ROWS;
        const int64_t hidden = dtype == SMOE_TYPE_BF16 ? 32 : 200, n = dtype == SMOE_TYPE_BF16 ? 8 : 56;
        smoe_layer layer = make_layer(entry, dtype, exact[turn / 4 % 3], 150, hidden, n, 4, 2);
        layer.gradient_type = SMOE_TYPE_F32;
        layer.layout = turn / 12 ? SMOE_LAYOUT_INTERLEAVED : SMOE_LAYOUT_CONCATENATED;
        layer.chunks = 1 << turn % 3;
        const bool biases = dtype == SMOE_TYPE_F32;
        const oracle_draw draw = {.integers = biases ? 1 : 16,
                                  .b1 = biases,
                                  .b2 = biases,
                                  .row_weights = true,
                                  .broken_ids = turn % 3 == 0,
                                  .routing = turn % 5 == 0 ? ORACLE_HALF_EMPTY : ORACLE_RANDOM};
        check_with(&layer, draw, (uint64_t)turn, true);
    }
}

/* ---- The same bits ---- */

/* Whether a slot is a result: out or a gradient. */
static bool is_result(int id)
{
    return id == SLOT_OUT || id >= SLOT_DX;
}

static void assert_same_bits(const run *one, const run *other, const char *what)
{
    for (int i = 0; i < SLOTS; i++) {
        const buffer *a = &one->slots[i].memory, *b = &other->slots[i].memory;
        if (!is_result(i)) continue;
        assert_int_equal(a->bytes, b->bytes);
        if (a->bytes && memcmp(a->data, b->data, a->bytes) != 0)
            fail_msg("%s: other bits with %s", slot_name((slot_id)i), what);
    }
}

static void check_same_bits(const smoe_layer *layer, oracle_draw draw, uint64_t seed)
{
    static const struct {
        int threads, chunks, reuse_saved;
    } changes[] = {{1, 1, 0}, {3, 1, 1}, {2, 2, 0}, {1, 4, 1}, {3, 8, 0}, {2, 64, 0}};
    layer_case *first = case_run(layer, draw, seed, 2);
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        smoe_layer changed = *layer;
        changed.chunks = changes[i].chunks;
        changed.reuse_saved = changes[i].reuse_saved;
        layer_case *again = case_run(&changed, draw, seed, changes[i].threads);
        char what[64];
        snprintf(what, sizeof what, "%d threads, %d chunks, reuse_saved %d", changes[i].threads,
                 changes[i].chunks, changes[i].reuse_saved);
        assert_same_bits(&first->r, &again->r, what);
        case_free(again);
    }
    case_free(first);
}

/* OpenBLAS has another code path for small products (m n k up to about a million); the sizes are below and
 * above this limit. One d ends in a panel of 8 columns. */
static void test_bits_by_threads_and_chunks(void **state)
{
    (void)state;
    const struct {
        int64_t tokens, hidden, intermediate, experts;
    } sizes[] = {{40, 136, 8, 4}, {300, 328, 48, 3}, {400, 200, 264, 2}};
    for (int i = 0; i < 3; i++) {
        for (int dtype = SMOE_TYPE_F32; dtype <= SMOE_TYPE_BF16; dtype++) {
            smoe_layer layer = make_layer(dtype ? SMOE_ENTRY_FROM_LOGITS : SMOE_ENTRY_FROM_TOPK,
                                          (smoe_type)dtype, SMOE_ACTIVATION_SWIGLU, sizes[i].tokens,
                                          sizes[i].hidden, sizes[i].intermediate, sizes[i].experts, 2);
            layer.layout = i % 2 ? SMOE_LAYOUT_INTERLEAVED : SMOE_LAYOUT_CONCATENATED;
            check_same_bits(&layer, (oracle_draw){.b1 = true, .b2 = true, .router = true, .broken_ids = true},
                            7);
        }
    }
}

/* Inference stores A where training stores H. The output must be the same. */
static void test_inference(void **state)
{
    (void)state;
    for (int turn = 0; turn < 8; turn++) {
        smoe_layer layer =
            make_layer((smoe_entry)(turn % 3), turn % 2 ? SMOE_TYPE_BF16 : SMOE_TYPE_F32,
                       turn / 4 ? SMOE_ACTIVATION_GELU : SMOE_ACTIVATION_SWIGLU, 300, 136, 40, 3, 2);
        layer.layout = turn % 4 / 2 ? SMOE_LAYOUT_INTERLEAVED : SMOE_LAYOUT_CONCATENATED;
        const oracle_draw draw = {.b1 = true, .b2 = true, .router = true, .row_weights = true};
        layer_case *training = case_make(&layer, draw, 31, 2);
        layer.inference = 1;
        layer.chunks = 2;
        layer_case *inference = case_make(&layer, draw, 31, 2);
        assert_int_equal(inference->r.sizes.saved_buffer_bytes, 0);
        case_forward(training);
        case_forward(inference);
        const buffer *out = &training->r.slots[SLOT_OUT].memory;
        assert_memory_equal(out->data, slot_data(&inference->r, SLOT_OUT), out->bytes);
        case_free(training), case_free(inference);
    }
}

static void test_saved_is_kept(void **state)
{
    (void)state;
    const smoe_layer layer =
        make_layer(SMOE_ENTRY_FROM_TOPK, SMOE_TYPE_BF16, SMOE_ACTIVATION_SWIGLU, 100, 64, 32, 4, 2);
    layer_case *c = case_make(&layer, (oracle_draw){.b1 = true, .b2 = true}, 5, 2);
    case_forward(c);
    assert_true(slot_keep(&c->r, SLOT_SAVED)); /* an input of the backward, which must not change */
    case_backward(c);
    case_free(c);
}

/* ---- Gradients written and accumulated ---- */

/* Two accumulating backwards that start from zeros must give exactly twice the gradient. Without accumulate
 * the poison in the gradients must be overwritten. */
static void test_accumulate(void **state)
{
    (void)state;
    for (int turn = 0; turn < 4; turn++) {
        const int64_t hidden = turn ? 72 : 520, n = turn ? 40 : 264; /* several tiles of dW, one bias */
        smoe_layer layer = make_layer(SMOE_ENTRY_FROM_TOPK, turn % 2 ? SMOE_TYPE_BF16 : SMOE_TYPE_F32,
                                      SMOE_ACTIVATION_SWIGLU, 100, hidden, n, 6, 2);
        layer.gradient_type = turn / 2 ? SMOE_TYPE_F32 : layer.dtype;
        layer.layout = turn / 2 ? SMOE_LAYOUT_INTERLEAVED : SMOE_LAYOUT_CONCATENATED;
        const oracle_draw draw = {.b1 = true, .b2 = true, .routing = ORACLE_HALF_EMPTY};
        layer_case *once = case_run(&layer, draw, 77, 2);
        layer.accumulate = 1;
        layer_case *twice = case_make(&layer, draw, 77, 2);
        for (int i = SLOT_DW1; i <= SLOT_DB2; i++)
            memset(slot_data(&twice->r, (slot_id)i), 0, twice->r.slots[i].memory.bytes);
        case_forward(twice);
        case_backward(twice);
        case_backward(twice);
        for (int i = SLOT_DW1; i <= SLOT_DB2; i++) {
            const size_t count = twice->r.slots[i].memory.bytes / oracle_type_bytes(layer.gradient_type);
            double *sum = oracle_alloc(count, sizeof *sum), *gradient = oracle_alloc(count, sizeof *gradient);
            oracle_load(sum, layer.gradient_type, slot_data(&twice->r, (slot_id)i), count);
            oracle_load(gradient, layer.gradient_type, slot_data(&once->r, (slot_id)i), count);
            for (size_t k = 0; k < count; k++) assert_true(sum[k] == 2.0 * gradient[k]);
            free(sum), free(gradient);
        }
        const buffer *dx = &once->r.slots[SLOT_DX].memory;
        assert_memory_equal(dx->data, slot_data(&twice->r, SLOT_DX), dx->bytes);
        case_free(once), case_free(twice);
    }
}

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
static void test_empty_experts(void **state)
{
    (void)state;
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        smoe_layer layer =
            make_layer(SMOE_ENTRY_FROM_TOPK, SMOE_TYPE_F32, SMOE_ACTIVATION_SWIGLU, 100, 72, 24, 7, 2);
        layer.accumulate = accumulate;
        const oracle_draw draw = {.b1 = true, .b2 = true, .routing = ORACLE_HALF_EMPTY};
        layer_case *c = case_make(&layer, draw, 3, 2);
        for (int i = SLOT_DW1; i <= SLOT_DB2 && accumulate; i++)
            fill_with_negative_zeros(&c->r.slots[i].memory);
        case_forward(c);
        case_backward(c);
        for (int64_t e = 0; e < 7; e++)
            for (int i = SLOT_DW1; i <= SLOT_DB2; i++)
                assert_int_equal(part_is_zero(&c->r.slots[i].memory, 7, e, accumulate), e % 2);
        case_free(c);
    }
    const smoe_layer layer =
        make_layer(SMOE_ENTRY_FROM_ROWS, SMOE_TYPE_BF16, SMOE_ACTIVATION_SILU, 100, 72, 24, 7, 1);
    check_against_oracle(&layer, (oracle_draw){.routing = ORACLE_ONE_TAKES_ALL, .row_weights = true}, 4);
}

/* FROM_TOPK with every id skipped, and FROM_ROWS with no row: all results must be zero. */
static void test_no_rows_at_all(void **state)
{
    (void)state;
    for (int entry = SMOE_ENTRY_FROM_TOPK; entry <= SMOE_ENTRY_FROM_ROWS; entry++) {
        const smoe_layer layer =
            make_layer((smoe_entry)entry, SMOE_TYPE_F32, SMOE_ACTIVATION_SWIGLU, 20, 16, 8, 3, 2);
        layer_case *c = case_make(&layer, (oracle_draw){.b1 = true, .b2 = true, .row_weights = true}, 1, 2);
        const slot_id indices = entry == SMOE_ENTRY_FROM_TOPK ? SLOT_TOPK_IDS : SLOT_OFFSETS;
        memset(slot_data(&c->r, indices), indices == SLOT_TOPK_IDS ? 0xff : 0,
               c->r.slots[indices].memory.bytes);
        assert_true(slot_keep(&c->r, indices));
        case_forward(c);
        case_backward(c);
        for (int i = 0; i < SLOTS; i++)
            if (is_result(i) && c->r.slots[i].memory.bytes)
                assert_true(part_is_zero(&c->r.slots[i].memory, 1, 0, 0));
        case_free(c);
    }
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
    const smoe_layer layer =
        make_layer(SMOE_ENTRY_FROM_TOPK, SMOE_TYPE_F32, SMOE_ACTIVATION_SWIGLU, 300, 72, 40, 4, 1);
    const oracle_draw draw = {.b1 = true, .b2 = true};
    layer_case *clean = case_run(&layer, draw, 21, 2), *c = case_make(&layer, draw, 21, 2);
    const int64_t token = 17, *expert_of = c->drawn.topk_ids, expert = expert_of[token];
    const bool whole_expert = input == SLOT_W1 || input == SLOT_W2;
    if (input == SLOT_W1) spoil(&c->r, input, expert * 2 * layer.intermediate * layer.hidden + 5);
    if (input == SLOT_W2) spoil(&c->r, input, expert * layer.intermediate * layer.hidden + 5);
    if (!whole_expert) spoil(&c->r, input, input == SLOT_TOPK_WEIGHTS ? token : token * layer.hidden + 3);
    case_forward(c);
    case_backward(c);
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

static void test_nan_isolation(void **state)
{
    (void)state;
    const slot_id inputs[] = {SLOT_X, SLOT_DOUT, SLOT_TOPK_WEIGHTS, SLOT_W1, SLOT_W2};
    for (size_t i = 0; i < sizeof inputs / sizeof inputs[0]; i++) check_nan(inputs[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_smallest),
        cmocka_unit_test(test_all_kinds),
        cmocka_unit_test(test_many_panels),
        cmocka_unit_test(test_exact_integers),
        cmocka_unit_test(test_bits_by_threads_and_chunks),
        cmocka_unit_test(test_inference),
        cmocka_unit_test(test_saved_is_kept),
        cmocka_unit_test(test_accumulate),
        cmocka_unit_test(test_empty_experts),
        cmocka_unit_test(test_no_rows_at_all),
        cmocka_unit_test(test_nan_isolation),
    };
    return cmocka_run_group_tests_name("experts", tests, NULL, NULL);
}
