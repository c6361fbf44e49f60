/* Layers with SMOE_COMPUTE_F8 and _F8_DGRAD on the CPU: every tensor against the oracle that quantises too,
 * small integers exactly, equal bits of equivalent calls, errors, a NaN that stays in its token, and what
 * each scale does. */
#include "api_case.h"
#include "f8.h"

#include "harness/check.h"
#include "oracle/compare.h"
#include "oracle/number.h"

#include <math.h>

#define SIZES(T, d, n, E, K) .tokens = T, .hidden = d, .intermediate = n, .experts = E, .topk = K
#define TOPK                 .entry = SMOE_ENTRY_FROM_TOPK
#define ROWS                 .entry = SMOE_ENTRY_FROM_ROWS
#define ACT(name)            .activation = SMOE_ACTIVATION_##name
#define BIASES               .b1 = true, .b2 = true

typedef struct f8_case {
    const char *name;
    smoe_layer layer; /* fields that are 0 have the defaults of complete() */
    oracle_draw draw;
    bool forward_only;
} f8_case;

static const int64_t counts[] = {0, 1, 63, 64, 65, 2, 31, 33};

static const f8_case cases[] = {
    {"swiglu", {SIZES(150, 64, 32, 8, 2)}, {.router = true}, false},
    {"wide: several groups", {SIZES(70, 48, 400, 3, 2), TOPK}, {BIASES}, false},
    {"interleaved", {SIZES(60, 96, 272, 4, 2), TOPK, .layout = SMOE_LAYOUT_INTERLEAVED}, {BIASES}, false},
    {"gelu", {SIZES(90, 64, 144, 5, 3), TOPK, ACT(GELU)}, {BIASES, .broken_ids = true}, false},
    {"relu2, rows", {SIZES(90, 80, 272, 5, 1), ROWS, ACT(RELU2)}, {BIASES, .row_weights = true}, false},
    {"clamped", {SIZES(64, 64, 48, 4, 2), TOPK, ACT(SWIGLU_CLAMPED)}, {BIASES}, false},
    {"any counts", {SIZES(259, 64, 32, 8, 1), TOPK}, {.routing = ORACLE_COUNTS, .counts = counts}, false},
    {"many rows", {SIZES(700, 32, 16, 2, 2), TOPK}, {0}, false},
    {"accumulate, chunks, H's place",
     {SIZES(80, 208, 64, 4, 2), TOPK, .accumulate = 1, .chunks = 4, .reuse_saved = 1},
     {BIASES},
     false},
    {"inference", {SIZES(80, 64, 144, 4, 2), TOPK, .inference = 1}, {BIASES}, true},
    {"router and losses",
     {SIZES(80, 64, 32, 6, 2), .rounding = SMOE_ROUNDING_NR_F},
     {.router = true, .router_bias = true, .balance_coefficient = 0.25, .z_coefficient = 0.125},
     false},
};

static smoe_layer complete(const f8_case *c, smoe_type dtype)
{
    smoe_layer layer = c->layer, defaults = SMOE_LAYER_INIT;
    layer.struct_size = sizeof layer;
    layer.dtype = dtype;
    layer.index_type = SMOE_TYPE_I32;
    layer.groups = layer.groups_kept = 1;
    layer.route_scale = 1.0f;
    layer.tile = 16;
    if (!layer.chunks) layer.chunks = 1;
    layer.gate_limit = defaults.gate_limit, layer.up_limit = defaults.up_limit;
    layer.gate_alpha = defaults.gate_alpha, layer.up_offset = defaults.up_offset;
    return layer;
}

typedef struct judging {
    const char *name;
    int bad;
} judging;

static void judge(void *user, tensor_id id, const verdict *v)
{
    judging *j = user;
    if (v->ok) return;
    print_message("%s: %s %g, limit %g\n", j->name, tensor_names[id], v->error, v->limit);
    j->bad++;
}

static int check_case(const f8_case *c, smoe_type dtype, smoe_compute compute, bool exact)
{
    smoe_context *context = open_cpu();
    smoe_layer layer = complete(c, dtype);
    layer.compute = compute;
    const check_options options = {
        .run = {.forward_only = c->forward_only, .backwards = layer.accumulate ? 2 : 1},
        .exact = exact,
        .seed = 1};
    char text[RUN_TEXT] = "";
    judging j = {c->name, 0};
    if (check_layer(device_find("cpu"), context, &layer, &c->draw, &options, judge, &j, text) != RUN_OK)
        fail_msg("%s: %s", c->name, text);
    smoe_destroy(context);
    return j.bad;
}

static void every_tensor_is_near_the_oracles(void **state)
{
    (void)state;
    const smoe_type types[] = {SMOE_TYPE_F32, SMOE_TYPE_BF16};
    int bad = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int type = 0; type < 2; type++) {
            bad += check_case(&cases[i], types[type], SMOE_COMPUTE_F8, false);
            bad += check_case(&cases[i], types[type], SMOE_COMPUTE_F8_DGRAD, false);
        }
    assert_int_equal(bad, 0);
}

static void integers_are_exact(void **state)
{
    (void)state;
    const f8_case all[] = {
        {"reglu", {SIZES(40, 48, 272, 4, 2), TOPK, ACT(REGLU)}, {BIASES, .integers = 6}, false},
        {"reglu, interleaved, rows",
         {SIZES(90, 32, 48, 4, 1), ROWS, ACT(REGLU), .layout = SMOE_LAYOUT_INTERLEAVED},
         {.integers = 6, .row_weights = true},
         false},
        {"relu", {SIZES(150, 64, 32, 4, 2), TOPK, ACT(RELU)}, {BIASES, .integers = 6}, false},
    };
    int bad = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        bad += check_case(&all[i], SMOE_TYPE_BF16, SMOE_COMPUTE_F8, true);
        bad += check_case(&all[i], SMOE_TYPE_F32, SMOE_COMPUTE_F8_DGRAD, true);
    }
    assert_int_equal(bad, 0);
}

/* ---- Equal bits ---- */

static tensors run_case(smoe_context *context, const smoe_layer *layer, const oracle_drawn *drawn,
                        bool stages)
{
    const run_options options = {.forward_only = layer->inference, .stages = stages};
    tensors got;
    char text[RUN_TEXT];
    if (run_library(device_find("cpu"), context, layer, drawn, &options, &got, text) != RUN_OK)
        fail_msg("%s", text);
    return got;
}

static void assert_equal_bits(const tensors *a, const tensors *b, const char *way)
{
    for (int i = 0; i < TENSORS; i++)
        if (a->at[i].bits && b->at[i].bits && tensor_differing_bits(&a->at[i], &b->at[i]))
            fail_msg("%s: %s has other bits", way, tensor_names[i]);
}

static void equivalent_calls_give_equal_bits(void **state)
{
    (void)state;
    const f8_case c = {"", {SIZES(300, 144, 272, 3, 2), TOPK}, {BIASES}, false};
    smoe_layer layer = complete(&c, SMOE_TYPE_BF16);
    oracle_drawn drawn;
    oracle_draw_inputs(&layer, &c.draw, 4, &drawn);
    for (int compute = SMOE_COMPUTE_F8; compute <= SMOE_COMPUTE_F8_DGRAD; compute++) {
        smoe_context *context = open_cpu();
        layer.compute = (smoe_compute)compute;
        tensors base = run_case(context, &layer, &drawn, false);
        for (int way = 0; way < 6; way++) {
            smoe_layer other = layer;
            smoe_context *used = context;
            smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
            options.threads = way == 0 ? 1 : 7;
            if (way < 2) assert_int_equal(smoe_create(&used, &options), SMOE_OK);
            if (way == 2) other.chunks = 2;
            if (way == 3) other.reuse_saved = 1;
            if (way == 4) other.inference = 1;
            tensors got = run_case(used, &other, &drawn, way == 5);
            const char *const names[] = {"1 thread", "7 threads", "chunks", "reuse", "inference", "stages"};
            if (way == 3) free(got.at[TENSOR_H].bits), got.at[TENSOR_H].bits = NULL;
            assert_equal_bits(&got, &base, names[way]);
            tensors_free(&got);
            if (way < 2) smoe_destroy(used);
        }
        tensors_free(&base);
        smoe_destroy(context);
    }
    oracle_drawn_free(&drawn);
}

/* ---- Groups of features ---- */

/* Features 0 to 2 are so large that, with their exponent, the gradients of the second group would all be 0.
 */
static void a_group_has_its_own_exponent(void **state)
{
    (void)state;
    const f8_case c = {"", {SIZES(120, 64, 288, 2, 1), TOPK}, {0}, false};
    smoe_layer layer = complete(&c, SMOE_TYPE_F32);
    const int64_t n = layer.intermediate, d = layer.hidden;
    oracle_drawn drawn;
    oracle_draw_inputs(&layer, &c.draw, 9, &drawn);
    for (int64_t e = 0; e < 2; e++)
        for (int64_t row = 0; row < 2 * n; row++)
            for (int64_t i = 0; row % n < 3 && i < d; i++) drawn.w1[(e * 2 * n + row) * d + i] *= 512.0;
    oracle_forward f;
    oracle_backward b;
    oracle_forward_run(&layer, &drawn.input, &f);
    oracle_backward_run(&layer, &drawn.input, &f, false, &b);
    smoe_context *context = open_cpu();
    layer.compute = SMOE_COMPUTE_F8;
    tensors got = run_case(context, &layer, &drawn, false);
    double difference = 0.0, norm = 0.0;
    for (int64_t i = 0; i < 2 * d * n; i++) {
        if (i % n < MOE_F8_DH_FEATURES) continue;
        const double off = got.at[TENSOR_DW2].values[i] - b.dw2[i];
        difference += off * off, norm += b.dw2[i] * b.dw2[i];
    }
    print_message("dw2 of the second group: %.3f\n", sqrt(difference / norm));
    assert_true(sqrt(difference / norm) < 0.1);
    tensors_free(&got);
    oracle_forward_free(&f);
    oracle_backward_free(&b);
    oracle_drawn_free(&drawn);
    smoe_destroy(context);
}

/* ---- Single calls: a layer of 4 experts with its memory on the host ---- */

enum { TOKENS = 24, HIDDEN = 48, FEATURES = 32, EXPERTS = 4, TWO = 2 };

typedef struct single {
    smoe_context *context;
    smoe_layer layer;
    smoe_sizes sizes;
    smoe_forward_args forward;
    smoe_backward_args backward;
    smoe_quantize_args quantize;
    void *memory[24];
    int used;
} single;

static void *take(single *s, size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    assert_non_null(memory);
    memset(memory, 0, (bytes + 63) / 64 * 64);
    return s->memory[s->used++] = memory;
}

static float *take_normal(single *s, oracle_random *random, size_t count, double scale)
{
    float *values = take(s, count * sizeof *values);
    for (size_t i = 0; i < count; i++) values[i] = (float)(scale * oracle_random_normal(random));
    return values;
}

static void open_single(single *s, smoe_compute compute)
{
    oracle_random random = {11};
    *s = (single){.context = open_cpu(), .layer = SMOE_LAYER_INIT, .sizes = SMOE_SIZES_INIT};
    smoe_layer *l = &s->layer;
    l->compute = compute;
    l->tokens = TOKENS, l->hidden = HIDDEN, l->intermediate = FEATURES, l->experts = EXPERTS, l->topk = TWO;
    l->dtype = SMOE_TYPE_F32, l->entry = SMOE_ENTRY_FROM_TOPK;
    assert_int_equal(smoe_query_sizes(s->context, l, &s->sizes), SMOE_OK);
    const size_t td = TOKENS * HIDDEN, w1 = EXPERTS * 2 * FEATURES * HIDDEN, w2 = EXPERTS * FEATURES * HIDDEN;
    s->quantize = (smoe_quantize_args)SMOE_QUANTIZE_ARGS_INIT;
    s->quantize.w1 = take_normal(s, &random, w1, 0.15);
    s->quantize.w2 = take_normal(s, &random, w2, 0.2);
    s->quantize.weight_type = SMOE_TYPE_F32;
    s->quantize.experts = EXPERTS;
    s->quantize.weights_f8_size = s->sizes.weights_f8_bytes;
    s->quantize.weights_f8 = take(s, s->sizes.weights_f8_bytes);
    s->forward = (smoe_forward_args)SMOE_FORWARD_ARGS_INIT;
    s->backward = (smoe_backward_args)SMOE_BACKWARD_ARGS_INIT;
    smoe_forward_args *f = &s->forward;
    smoe_backward_args *b = &s->backward;
    f->weights_f8 = b->weights_f8 = s->quantize.weights_f8;
    f->weights_f8_size = b->weights_f8_size = s->sizes.weights_f8_bytes;
    b->x = f->x = take_normal(s, &random, td, 1.0);
    int32_t *ids = take(s, TOKENS * TWO * sizeof *ids);
    for (int i = 0; i < TOKENS * TWO; i++) ids[i] = (i / TWO + i % TWO * (1 + i / TWO % 3)) % EXPERTS;
    b->topk_ids = f->topk_ids = ids;
    f->topk_weights = take_normal(s, &random, TOKENS * TWO, 1.0);
    f->out = take(s, td * sizeof(float));
    b->saved = f->saved = take(s, s->sizes.saved_buffer_bytes);
    b->saved_size = f->saved_size = s->sizes.saved_buffer_bytes;
    f->scratch = take(s, s->sizes.scratch_forward_bytes);
    f->scratch_size = s->sizes.scratch_forward_bytes;
    b->scratch = take(s, s->sizes.scratch_backward_bytes);
    b->scratch_size = s->sizes.scratch_backward_bytes;
    b->dout = take_normal(s, &random, td, 1.0);
    b->dx = take(s, td * sizeof(float));
    b->dw1 = take(s, w1 * sizeof(float));
    b->dw2 = take(s, w2 * sizeof(float));
    b->dtopk_weights = take(s, TOKENS * TWO * sizeof(float));
}

static void close_single(single *s)
{
    for (int i = 0; i < s->used; i++) free(s->memory[i]);
    smoe_destroy(s->context);
}

static smoe_status quantize(single *s)
{
    return smoe_quantize_weights(s->context, &s->layer, &s->quantize, NULL);
}

static smoe_status forward(single *s)
{
    return smoe_layer_forward(s->context, &s->layer, &s->forward, NULL);
}

static smoe_status backward(single *s)
{
    return smoe_layer_backward(s->context, &s->layer, &s->backward, NULL);
}

static void run_single(single *s)
{
    assert_int_equal(quantize(s), SMOE_OK);
    assert_int_equal(forward(s), SMOE_OK);
    assert_int_equal(backward(s), SMOE_OK);
}

/* ---- Errors ---- */

static void refuse_layer(single *s, smoe_status status, const char *text)
{
    assert_error(s->context, smoe_supports(s->context, &s->layer), status, "smoe_supports", text);
}

static void layers_are_refused(void **state)
{
    (void)state;
    single s;
    open_single(&s, SMOE_COMPUTE_F8);
    smoe_layer *l = &s.layer;
    l->hidden = 40;
    refuse_layer(&s, SMOE_ERROR_SHAPE, "hidden is 40, with SMOE_COMPUTE_F8 it must be a multiple of 16");
    l->hidden = HIDDEN, l->intermediate = 24;
    refuse_layer(&s, SMOE_ERROR_SHAPE, "intermediate is 24");
    l->intermediate = FEATURES, l->lora_rank2 = 8;
    refuse_layer(&s, SMOE_ERROR_UNSUPPORTED,
                 "lora_rank2 is 8, and compute is SMOE_COMPUTE_F8, which has no LoRA");
    l->lora_rank2 = 0, l->ranks = 2, l->max_tokens = TOKENS;
    refuse_layer(&s, SMOE_ERROR_UNSUPPORTED, "ranks is 2");
    l->ranks = 0, l->max_tokens = 0, l->compute = (smoe_compute)3;
    refuse_layer(&s, SMOE_ERROR_ARGUMENT, "compute is 3");
    l->compute = SMOE_COMPUTE_STORAGE;
    assert_error(s.context, quantize(&s), SMOE_ERROR_ARGUMENT, "smoe_quantize_weights", "compute");
    const smoe_sizes before = s.sizes;
    assert_int_equal(smoe_query_sizes(s.context, l, &s.sizes), SMOE_OK);
    assert_true(before.weights_f8_bytes > 6 * EXPERTS * FEATURES * HIDDEN);
    assert_int_equal(before.saved_buffer_bytes, s.sizes.saved_buffer_bytes);
    close_single(&s);
}

static void calls_are_refused(void **state)
{
    (void)state;
    single s;
    open_single(&s, SMOE_COMPUTE_F8);
    const uint64_t bytes = s.sizes.weights_f8_bytes;
    s.forward.weights_f8 = NULL;
    assert_error(s.context, forward(&s), SMOE_ERROR_ARGUMENT, "smoe_layer_forward", "weights_f8 is NULL");
    s.forward.weights_f8 = (char *)s.quantize.weights_f8 + 16;
    assert_error(s.context, forward(&s), SMOE_ERROR_ALIGNMENT, "weights_f8", "64");
    s.forward.weights_f8 = s.quantize.weights_f8, s.forward.weights_f8_size = bytes - 1;
    assert_error(s.context, forward(&s), SMOE_ERROR_BUFFER, "weights_f8 has", "smoe_query_sizes");
    s.backward.weights_f8 = NULL;
    assert_error(s.context, backward(&s), SMOE_ERROR_ARGUMENT, "smoe_layer_backward", "weights_f8 is NULL");
    s.backward.weights_f8 = s.quantize.weights_f8, s.backward.x = NULL, s.backward.dw1 = NULL;
    assert_error(s.context, backward(&s), SMOE_ERROR_ARGUMENT, "smoe_layer_backward", "x is NULL");
    smoe_quantize_args *q = &s.quantize;
    q->first_expert = EXPERTS, q->experts = 1;
    assert_error(s.context, quantize(&s), SMOE_ERROR_SHAPE, "first_expert is 4", "4 experts");
    q->first_expert = 3, q->experts = 2;
    assert_error(s.context, quantize(&s), SMOE_ERROR_SHAPE, "experts is 2", "from 1 to 1");
    q->experts = 0;
    assert_error(s.context, quantize(&s), SMOE_ERROR_SHAPE, "experts is 0", "from 1 to 1");
    q->experts = 1, q->weight_type = SMOE_TYPE_BF16;
    assert_error(s.context, quantize(&s), SMOE_ERROR_ARGUMENT, "weight_type is SMOE_TYPE_BF16",
                 "SMOE_TYPE_F32");
    q->weight_type = SMOE_TYPE_F32, q->weights_f8_size = 1;
    assert_error(s.context, quantize(&s), SMOE_ERROR_BUFFER, "smoe_quantize_weights",
                 "weights_f8 has 1 bytes");
    q->weights_f8_size = bytes, q->w2 = NULL;
    assert_error(s.context, quantize(&s), SMOE_ERROR_ARGUMENT, "smoe_quantize_weights", "w2 is NULL");
    close_single(&s);
}

/* Structs that end before the fields of fp8. What is in memory behind them counts for nothing. */
static void callers_without_fp8_stay_as_they_were(void **state)
{
    (void)state;
    single s;
    open_single(&s, SMOE_COMPUTE_F8);
    s.forward.struct_size = offsetof(smoe_forward_args, weights_f8);
    assert_error(s.context, forward(&s), SMOE_ERROR_ARGUMENT, "smoe_layer_forward", "weights_f8 is NULL");
    s.backward.struct_size = offsetof(smoe_backward_args, weights_f8);
    assert_error(s.context, backward(&s), SMOE_ERROR_ARGUMENT, "smoe_layer_backward", "weights_f8 is NULL");
    s.layer.struct_size = offsetof(smoe_layer, compute);
    s.sizes.struct_size = offsetof(smoe_sizes, weights_f8_bytes), s.sizes.weights_f8_bytes = 7;
    assert_int_equal(smoe_query_sizes(s.context, &s.layer, &s.sizes), SMOE_OK);
    assert_int_equal(s.sizes.weights_f8_bytes, 7);
    assert_true(s.sizes.scratch_forward_bytes <= s.forward.scratch_size);
    assert_true(s.sizes.scratch_backward_bytes <= s.backward.scratch_size);
    s.forward.w1 = s.backward.w1 = s.quantize.w1, s.forward.w2 = s.backward.w2 = s.quantize.w2;
    assert_int_equal(forward(&s), SMOE_OK);
    assert_int_equal(backward(&s), SMOE_OK);
    close_single(&s);
}

/* ---- Weights ---- */

static float bf16_of(float x)
{
    const double value = oracle_round_to((double)x, SMOE_TYPE_BF16);
    return (float)value;
}

/* Every byte by f8.h, transposed too, in H's order of rows; and a range leaves the other experts alone. */
static void check_weights(smoe_type type, smoe_layout layout)
{
    single s;
    open_single(&s, SMOE_COMPUTE_F8);
    const size_t count1 = EXPERTS * 2 * FEATURES * HIDDEN, count2 = EXPERTS * HIDDEN * FEATURES;
    float *w1 = (float *)(uintptr_t)s.quantize.w1, *w2 = (float *)(uintptr_t)s.quantize.w2;
    for (int e = 0; e < EXPERTS; e++) { /* the largest: an up row, the last column */
        w1[(e * 2 * FEATURES + FEATURES + 3) * HIDDEN + 5] = 9.0f;
        w2[(e * HIDDEN + 4) * FEATURES + FEATURES - 1] = -9.0f;
    }
    uint16_t *narrow1 = take(&s, count1 * 2), *narrow2 = take(&s, count2 * 2);
    s.layer.layout = layout;
    if (type == SMOE_TYPE_BF16) {
        s.layer.dtype = s.quantize.weight_type = type;
        for (size_t i = 0; i < count1; i++)
            w1[i] = bf16_of(w1[i]), narrow1[i] = (uint16_t)(moe_bits_of(w1[i]) >> 16);
        for (size_t i = 0; i < count2; i++)
            w2[i] = bf16_of(w2[i]), narrow2[i] = (uint16_t)(moe_bits_of(w2[i]) >> 16);
        s.quantize.w1 = narrow1, s.quantize.w2 = narrow2;
    }
    memset(s.quantize.weights_f8, 0x55, s.sizes.weights_f8_bytes);
    const int64_t first = 1, experts = 2;
    const size_t element = type == SMOE_TYPE_BF16 ? 2 : 4;
    s.quantize.first_expert = first, s.quantize.experts = experts;
    s.quantize.w1 = (const char *)s.quantize.w1 + 2 * FEATURES * HIDDEN * element;
    s.quantize.w2 = (const char *)s.quantize.w2 + FEATURES * HIDDEN * element;
    assert_int_equal(quantize(&s), SMOE_OK);
    moe_problem problem;
    moe_problem_init(&problem, &s.layer);
    const moe_f8_weights got = moe_f8_weights_at(&problem, s.quantize.weights_f8);
    uint8_t *want = malloc(got.bytes);
    assert_non_null(want);
    memset(want, 0x55, got.bytes);
    const moe_f8_weights expected = moe_f8_weights_at(&problem, want);
    for (int64_t e = first; e < first + experts; e++) {
        uint32_t amax1 = 0, amax2 = 0;
        const float *of1 = w1 + e * 2 * FEATURES * HIDDEN, *of2 = w2 + e * FEATURES * HIDDEN;
        for (int i = 0; i < 2 * FEATURES * HIDDEN; i++) amax1 = moe_f8_amax(amax1, of1[i]);
        for (int i = 0; i < FEATURES * HIDDEN; i++) amax2 = moe_f8_amax(amax2, of2[i]);
        expected.group1[e] = expected.scale1[e] = moe_f8_scale(amax1);
        expected.group2[e] = expected.scale2[e] = moe_f8_scale(amax2); /* all features are one group */
        for (int64_t j = 0; j < 2 * FEATURES; j++) {
            const int64_t row = layout == SMOE_LAYOUT_CONCATENATED ? j : j % FEATURES * 2 + j / FEATURES;
            for (int64_t i = 0; i < HIDDEN; i++)
                expected.w1[(e * 2 * FEATURES + j) * HIDDEN + i] =
                    expected.w1_t[(e * HIDDEN + i) * 2 * FEATURES + j] =
                        moe_f8_of(of1[row * HIDDEN + i] / expected.scale1[e]);
        }
        for (int64_t i = 0; i < HIDDEN; i++)
            for (int64_t j = 0; j < FEATURES; j++)
                expected.w2[(e * HIDDEN + i) * FEATURES + j] =
                    expected.w2_t[(e * FEATURES + j) * HIDDEN + i] =
                        moe_f8_of(of2[i * FEATURES + j] / expected.scale2[e]);
    }
    assert_memory_equal(s.quantize.weights_f8, want, got.bytes);
    free(want);
    close_single(&s);
}

static void weights_have_the_bytes_of_the_header(void **state)
{
    (void)state;
    check_weights(SMOE_TYPE_F32, SMOE_LAYOUT_CONCATENATED);
    check_weights(SMOE_TYPE_F32, SMOE_LAYOUT_INTERLEAVED);
    check_weights(SMOE_TYPE_BF16, SMOE_LAYOUT_INTERLEAVED);
}

/* ---- Subsets, NaN ---- */

/* Each gradient alone has the bits that it has among all. */
static void a_gradient_alone_has_the_same_bits(void **state)
{
    (void)state;
    const size_t bytes[] = {TOKENS * HIDDEN * 4, EXPERTS * 2 * FEATURES * HIDDEN * 4,
                            EXPERTS * FEATURES * HIDDEN * 4, TOKENS * TWO * 4};
    for (int compute = SMOE_COMPUTE_F8; compute <= SMOE_COMPUTE_F8_DGRAD; compute++) {
        single s;
        open_single(&s, (smoe_compute)compute);
        run_single(&s);
        smoe_backward_args *b = &s.backward;
        void *all[] = {b->dx, b->dw1, b->dw2, b->dtopk_weights};
        const void *x = b->x;
        for (int i = 0; i < 4; i++) {
            void *before = malloc(bytes[i]);
            assert_non_null(before);
            memcpy(before, all[i], bytes[i]);
            memset(all[i], 0xff, bytes[i]);
            b->dx = i == 0 ? all[0] : NULL, b->dw1 = i == 1 ? all[1] : NULL;
            b->dw2 = i == 2 ? all[2] : NULL, b->dtopk_weights = i == 3 ? all[3] : NULL;
            b->x = i == 1 || (i == 2 && compute == SMOE_COMPUTE_F8) ? x : NULL;
            memset(b->scratch, 0xff, b->scratch_size);
            assert_int_equal(backward(&s), SMOE_OK);
            assert_memory_equal(all[i], before, bytes[i]);
            free(before);
        }
        close_single(&s);
    }
}

static int is_of_token(const single *s, int64_t token, int64_t expert)
{
    const int32_t *ids = s->forward.topk_ids;
    return ids[token * TWO] == expert || ids[token * TWO + 1] == expert;
}

/* `got` of the rows that depend on the fault is NaN (all of it, where `whole`), the rest has the bits of
 * `want`. */
static void check_rows(const float *got, const float *want, int64_t rows, int64_t columns,
                       const unsigned char *hit)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) {
            if (hit[i] ? !isnan(got[i * columns + j])
                       : memcmp(&got[i * columns + j], &want[i * columns + j], 4) != 0)
                fail_msg("row %d, column %d: %g, without the fault %g", (int)i, (int)j,
                         (double)got[i * columns + j], (double)want[i * columns + j]);
        }
}

/* A NaN or inf in one element of X or dO of one token. */
static void check_isolation(smoe_compute compute, float fault, int in_dout)
{
    enum { TOKEN = 5 };
    single clean, s;
    unsigned char token[TOKENS] = {0}, none[TOKENS] = {0}, expert[EXPERTS] = {0};
    open_single(&clean, compute);
    run_single(&clean);
    open_single(&s, compute);
    float *faulty = (float *)(uintptr_t)(in_dout ? s.backward.dout : s.forward.x);
    faulty[TOKEN * HIDDEN + 7] = fault;
    run_single(&s);
    token[TOKEN] = 1;
    for (int64_t e = 0; e < EXPERTS; e++) expert[e] = (unsigned char)is_of_token(&s, TOKEN, e);
    const smoe_backward_args *got = &s.backward, *want = &clean.backward;
    check_rows(s.forward.out, clean.forward.out, TOKENS, HIDDEN, in_dout ? none : token);
    check_rows(got->dx, want->dx, TOKENS, HIDDEN, token);
    check_rows(got->dtopk_weights, want->dtopk_weights, TOKENS, TWO, token);
    check_rows(got->dw1, want->dw1, EXPERTS, 2 * FEATURES * HIDDEN, expert);
    if (compute == SMOE_COMPUTE_F8) check_rows(got->dw2, want->dw2, EXPERTS, HIDDEN * FEATURES, expert);
    close_single(&s);
    close_single(&clean);
}

static void a_nan_stays_in_its_token(void **state)
{
    (void)state;
    const float faults[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 3; i++)
        for (int in_dout = 0; in_dout < 2; in_dout++) {
            check_isolation(SMOE_COMPUTE_F8, faults[i], in_dout);
            check_isolation(SMOE_COMPUTE_F8_DGRAD, faults[i], in_dout);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_tensor_is_near_the_oracles),
        cmocka_unit_test(integers_are_exact),
        cmocka_unit_test(equivalent_calls_give_equal_bits),
        cmocka_unit_test(a_group_has_its_own_exponent),
        cmocka_unit_test(layers_are_refused),
        cmocka_unit_test(calls_are_refused),
        cmocka_unit_test(callers_without_fp8_stay_as_they_were),
        cmocka_unit_test(weights_have_the_bytes_of_the_header),
        cmocka_unit_test(a_gradient_alone_has_the_same_bits),
        cmocka_unit_test(a_nan_stays_in_its_token),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
