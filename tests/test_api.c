/* The API without memory: every bad description must give its status and a text that names function,
 * argument, value and limit; structs of other versions of the header; sizes. */
#include "api_case.h"

#include <math.h>

/* ---- descriptions ---- */

typedef struct bad_layer {
    void (*spoil)(smoe_layer *layer);
    smoe_status status;
    const char *argument, *limit;
} bad_layer;

#define SPOIL(name, statement)                                                                               \
    static void name(smoe_layer *layer)                                                                      \
    {                                                                                                        \
        statement;                                                                                           \
    }
SPOIL(no_tokens, layer->tokens = 0)
SPOIL(negative_tokens, layer->tokens = -5)
SPOIL(huge_tokens, layer->tokens = (int64_t)1 << 40)
SPOIL(no_hidden, layer->hidden = 0)
SPOIL(odd_hidden, layer->hidden = 36)
SPOIL(huge_hidden, layer->hidden = (int64_t)1 << 30)
SPOIL(no_intermediate, layer->intermediate = 0)
SPOIL(odd_intermediate, layer->intermediate = 17)
SPOIL(no_experts, layer->experts = 0)
SPOIL(many_experts, (layer->experts = 4097, layer->topk = 1))
SPOIL(topk_past_experts, layer->topk = 9)
SPOIL(topk_past_limit, (layer->experts = 128, layer->topk = 65))
SPOIL(no_topk, layer->topk = 0)
SPOIL(rows_topk, (layer->entry = SMOE_ENTRY_FROM_ROWS, layer->topk = 2))
SPOIL(no_tile, layer->tile = 0)
SPOIL(no_chunks, layer->chunks = 0)
SPOIL(odd_chunks, layer->chunks = 3)
SPOIL(bad_dtype, layer->dtype = SMOE_TYPE_I32)
SPOIL(bad_activation, layer->activation = (smoe_activation)7)
SPOIL(bad_layout, layer->layout = (smoe_layout)2)
SPOIL(bad_entry, layer->entry = (smoe_entry)3)
SPOIL(bad_index, layer->index_type = SMOE_TYPE_F32)
SPOIL(bad_logits, layer->logits_type = SMOE_TYPE_F16)
SPOIL(bad_gradient, layer->gradient_type = SMOE_TYPE_BF16)
SPOIL(bad_flag, layer->accumulate = 2)
SPOIL(bad_score, layer->score = (smoe_score)9)
SPOIL(bad_rounding, layer->rounding = (smoe_rounding)7)
SPOIL(rounding_without_logits, (layer->entry = SMOE_ENTRY_FROM_TOPK, layer->rounding = SMOE_ROUNDING_UP))
SPOIL(renormalized_softmax, (layer->score = SMOE_SCORE_TOPK_SOFTMAX, layer->renormalize = 1))
SPOIL(zero_scale, layer->route_scale = 0)
SPOIL(nan_scale, layer->route_scale = (float)strtod("nan", NULL))
SPOIL(topk_scale, (layer->entry = SMOE_ENTRY_FROM_TOPK, layer->route_scale = 2))
SPOIL(softmax_groups, (layer->groups = 2, layer->groups_kept = 1))
SPOIL(uneven_groups, (layer->score = SMOE_SCORE_SIGMOID, layer->groups = 3, layer->groups_kept = 2))
SPOIL(lonely_groups, (layer->score = SMOE_SCORE_SIGMOID, layer->groups = 8, layer->groups_kept = 4))
SPOIL(kept_past_groups, (layer->score = SMOE_SCORE_SIGMOID, layer->groups = 2, layer->groups_kept = 3))
SPOIL(few_kept,
      (layer->score = SMOE_SCORE_SIGMOID, layer->groups = 4, layer->groups_kept = 1, layer->topk = 3))
SPOIL(zero_limit, (layer->activation = SMOE_ACTIVATION_SWIGLU_CLAMPED, layer->gate_limit = 0))
SPOIL(negative_limit, (layer->activation = SMOE_ACTIVATION_SWIGLU_CLAMPED, layer->up_limit = -7))
SPOIL(infinite_cap, (layer->activation = SMOE_ACTIVATION_SWIGLU_CAPPED, layer->up_limit = INFINITY))
SPOIL(nan_alpha, (layer->activation = SMOE_ACTIVATION_SWIGLU_CLAMPED, layer->gate_alpha = NAN))
SPOIL(infinite_offset, (layer->activation = SMOE_ACTIVATION_SWIGLU_CAPPED, layer->up_offset = INFINITY))
SPOIL(half_on_cpu, layer->dtype = SMOE_TYPE_F16)

static const bad_layer bad_layers[] = {
    {no_tokens, SMOE_ERROR_SHAPE, "tokens is 0", "1 to"},
    {negative_tokens, SMOE_ERROR_SHAPE, "tokens is -5", "1 to"},
    {huge_tokens, SMOE_ERROR_SHAPE, "tokens is 1099511627776", "2147483647"},
    {no_hidden, SMOE_ERROR_SHAPE, "hidden is 0", "8 to"},
    {odd_hidden, SMOE_ERROR_SHAPE, "hidden is 36", "multiple of 8"},
    {huge_hidden, SMOE_ERROR_SHAPE, "hidden is 1073741824", "1048576"},
    {no_intermediate, SMOE_ERROR_SHAPE, "intermediate is 0", "8 to"},
    {odd_intermediate, SMOE_ERROR_SHAPE, "intermediate is 17", "multiple of 8"},
    {no_experts, SMOE_ERROR_SHAPE, "experts is 0", "4096"},
    {many_experts, SMOE_ERROR_SHAPE, "experts is 4097", "4096"},
    {topk_past_experts, SMOE_ERROR_SHAPE, "topk is 9", "1 to 8"},
    {topk_past_limit, SMOE_ERROR_SHAPE, "topk is 65", "1 to 64"},
    {no_topk, SMOE_ERROR_SHAPE, "topk is 0", "1 to 8"},
    {rows_topk, SMOE_ERROR_SHAPE, "topk is 2", "1 to 1"},
    {no_tile, SMOE_ERROR_SHAPE, "tile is 0", "4096"},
    {no_chunks, SMOE_ERROR_SHAPE, "chunks is 0", "64"},
    {odd_chunks, SMOE_ERROR_SHAPE, "chunks is 3", "power of two"},
    {bad_dtype, SMOE_ERROR_ARGUMENT, "dtype is SMOE_TYPE_I32", "F32, SMOE_TYPE_BF16, SMOE_TYPE_F16"},
    {bad_activation, SMOE_ERROR_ARGUMENT, "activation is 7", "one of SMOE_ACTIVATION_SWIGLU, "},
    {bad_layout, SMOE_ERROR_ARGUMENT, "layout is 2", "SMOE_LAYOUT_CONCATENATED, SMOE_LAYOUT_INTERLEAVED"},
    {bad_entry, SMOE_ERROR_ARGUMENT, "entry is 3", "SMOE_ENTRY_FROM_ROWS"},
    {bad_index, SMOE_ERROR_ARGUMENT, "index_type is SMOE_TYPE_F32", "one of SMOE_TYPE_I32, SMOE_TYPE_I64"},
    {bad_logits, SMOE_ERROR_ARGUMENT, "logits_type is SMOE_TYPE_F16", "one of SMOE_TYPE_F32, SMOE_TYPE_BF16"},
    {bad_gradient, SMOE_ERROR_ARGUMENT, "gradient_type is SMOE_TYPE_BF16", "one of SMOE_TYPE_F32"},
    {bad_flag, SMOE_ERROR_ARGUMENT, "accumulate is 2", "one of 0, 1"},
    {bad_score, SMOE_ERROR_ARGUMENT, "score is 9", "SMOE_SCORE_SIGMOID"},
    {bad_rounding, SMOE_ERROR_ARGUMENT, "rounding is 7", "SMOE_ROUNDING_BALANCE_F"},
    {rounding_without_logits, SMOE_ERROR_ARGUMENT, "rounding is SMOE_ROUNDING_UP",
     "entry is SMOE_ENTRY_FROM_TOPK"},
    {renormalized_softmax, SMOE_ERROR_ARGUMENT, "renormalize is 1", "SMOE_SCORE_TOPK_SOFTMAX"},
    {zero_scale, SMOE_ERROR_ARGUMENT, "route_scale is 0", "positive"},
    {nan_scale, SMOE_ERROR_ARGUMENT, "route_scale is", "positive"},
    {zero_limit, SMOE_ERROR_ARGUMENT, "gate_limit is 0", "positive"},
    {negative_limit, SMOE_ERROR_ARGUMENT, "up_limit is -7", "positive"},
    {infinite_cap, SMOE_ERROR_ARGUMENT, "up_limit is inf", "positive and finite"},
    {nan_alpha, SMOE_ERROR_ARGUMENT, "gate_alpha is", "finite"},
    {infinite_offset, SMOE_ERROR_ARGUMENT, "up_offset is inf", "finite"},
    {topk_scale, SMOE_ERROR_ARGUMENT, "route_scale is 2", "entry is SMOE_ENTRY_FROM_TOPK"},
    {softmax_groups, SMOE_ERROR_ARGUMENT, "groups is 2", "SMOE_SCORE_SIGMOID"},
    {uneven_groups, SMOE_ERROR_SHAPE, "groups is 3", "divide experts (8)"},
    {lonely_groups, SMOE_ERROR_SHAPE, "groups is 8", "at least 2"},
    {kept_past_groups, SMOE_ERROR_SHAPE, "groups_kept is 3", "1 to 2"},
    {few_kept, SMOE_ERROR_SHAPE, "topk is 3", "2 experts"},
    {half_on_cpu, SMOE_ERROR_UNSUPPORTED, "F16", "cuda"},
};

static void bad_layers_are_refused(void **state)
{
    (void)state;
    smoe_context *context = open_cpu();
    for (size_t i = 0; i < sizeof bad_layers / sizeof *bad_layers; i++) {
        smoe_layer layer = small_layer();
        bad_layers[i].spoil(&layer);
        assert_error(context, smoe_supports(context, &layer), bad_layers[i].status,
                     "smoe_supports: ", bad_layers[i].argument);
        assert_non_null(strstr(smoe_last_error(context), bad_layers[i].limit));
        smoe_sizes sizes = SMOE_SIZES_INIT;
        assert_error(context, smoe_query_sizes(context, &layer, &sizes), bad_layers[i].status,
                     "smoe_query_sizes: ", bad_layers[i].argument);
        const smoe_forward_args forward = SMOE_FORWARD_ARGS_INIT;
        assert_error(context, smoe_experts_forward(context, &layer, &forward, NULL), bad_layers[i].status,
                     "smoe_experts_forward: ", bad_layers[i].argument);
        const smoe_backward_args backward = SMOE_BACKWARD_ARGS_INIT;
        assert_error(context, smoe_layer_backward(context, &layer, &backward, NULL), bad_layers[i].status,
                     "smoe_layer_backward: ", bad_layers[i].argument);
    }
    const smoe_layer good = small_layer();
    assert_int_equal(smoe_supports(context, &good), SMOE_OK);
    smoe_destroy(context);
}

static void rows_past_int32_are_refused(void **state)
{
    (void)state;
    smoe_context *context = open_cpu();
    smoe_layer layer = small_layer();
    layer.tokens = 1 << 30;
    layer.experts = 64;
    layer.topk = 4;
    assert_error(context, smoe_supports(context, &layer), SMOE_ERROR_SHAPE, "4294971328 rows", "2147483647");
    smoe_destroy(context);
}

/* ---- growable structs ---- */

static void structs_of_older_callers_are_taken(void **state)
{
    (void)state;
    smoe_context *context = open_cpu();
    smoe_layer layer = small_layer();
    smoe_sizes full = SMOE_SIZES_INIT;
    assert_int_equal(smoe_query_sizes(context, &layer, &full), SMOE_OK);

    /* a caller whose header had no `chunks`: the memory after its struct must not be read */
    smoe_layer older = layer;
    older.struct_size = offsetof(smoe_layer, chunks);
    older.chunks = -1;
    older.score = (smoe_score)99;
    older.tile = -1;
    smoe_sizes sizes = SMOE_SIZES_INIT;
    assert_int_equal(smoe_query_sizes(context, &older, &sizes), SMOE_OK);
    assert_memory_equal(&sizes, &full, sizeof full);

    /* the memory after a smaller result must not be written */
    memset(&sizes, 0xAB, sizeof sizes);
    sizes.struct_size = offsetof(smoe_sizes, saved_bytes);
    assert_int_equal(smoe_query_sizes(context, &layer, &sizes), SMOE_OK);
    assert_int_equal(sizes.padded_rows, full.padded_rows);
    assert_int_equal(sizes.struct_size, offsetof(smoe_sizes, saved_bytes));
    assert_int_equal(sizes.saved_bytes, UINT64_C(0xABABABABABABABAB));

    layer.struct_size = 0;
    assert_error(context, smoe_supports(context, &layer), SMOE_ERROR_ARGUMENT, "struct_size is 0",
                 "SMOE_LAYER_INIT");
    layer.struct_size = (size_t)-1;
    assert_error(context, smoe_supports(context, &layer), SMOE_ERROR_ARGUMENT, "struct_size",
                 "SMOE_LAYER_INIT");
    assert_error(context, smoe_supports(context, NULL), SMOE_ERROR_ARGUMENT, "smoe_supports",
                 "layer is NULL");
    layer = small_layer();
    assert_error(context, smoe_query_sizes(context, &layer, NULL), SMOE_ERROR_ARGUMENT, "smoe_query_sizes",
                 "sizes");
    smoe_destroy(context);
}

/* The structs of a caller with a later header are longer. Bytes that this library does not know must be 0. */
static void longer_structs_must_end_in_zeros(void **state)
{
    (void)state;
    struct {
        smoe_layer known;
        char later[40];
    } layer = {.known = small_layer()};
    struct {
        smoe_forward_args known;
        char later[8];
    } forward = {.known = SMOE_FORWARD_ARGS_INIT};
    struct {
        smoe_backward_args known;
        char later[8];
    } backward = {.known = SMOE_BACKWARD_ARGS_INIT};
    struct {
        smoe_context_options known;
        char later[16];
    } options = {.known = SMOE_CONTEXT_OPTIONS_INIT};
    layer.known.struct_size = sizeof layer, options.known.struct_size = sizeof options;
    forward.known.struct_size = sizeof forward, backward.known.struct_size = sizeof backward;
    char text[256] = "";
    options.known.error_text = text, options.known.error_size = sizeof text;
    smoe_context *context;
    options.later[9] = 1;
    assert_int_equal(smoe_create(&context, &options.known), SMOE_ERROR_ARGUMENT);
    assert_non_null(strstr(text, "byte 81 is not zero"));
    options.later[9] = 0;
    assert_int_equal(smoe_create(&context, &options.known), SMOE_OK);
    assert_int_equal(smoe_supports(context, &layer.known), SMOE_OK);
    assert_error(context, smoe_layer_forward(context, &layer.known, &forward.known, NULL),
                 SMOE_ERROR_ARGUMENT, "smoe_layer_forward", "x is NULL");
    layer.later[39] = -1;
    assert_error(context, smoe_supports(context, &layer.known), SMOE_ERROR_ARGUMENT,
                 "layer->struct_size is 224", "byte 223 is not zero");
    layer.later[39] = 0;
    forward.later[0] = 1, backward.later[7] = 1;
    assert_error(context, smoe_layer_forward(context, &layer.known, &forward.known, NULL),
                 SMOE_ERROR_ARGUMENT, "args->struct_size is 240", "byte 232 is not zero");
    assert_error(context, smoe_layer_backward(context, &layer.known, &backward.known, NULL),
                 SMOE_ERROR_ARGUMENT, "args->struct_size is 304", "byte 303 is not zero");
    smoe_destroy(context);
}

/* ---- sizes ---- */

static uint64_t metadata(const smoe_layer *l, uint64_t rows)
{
    const uint64_t tokens = (uint64_t)l->tokens, experts = (uint64_t)l->experts, topk = (uint64_t)l->topk;
    const uint64_t plan = 4 * (3 * rows + (tokens + 1) + 2 * experts + 2 * (experts + 1));
    return l->entry == SMOE_ENTRY_FROM_LOGITS ? plan + 8 * tokens * topk + 4 * experts : plan;
}

/* Fewer rows than experts: each row is alone with 63 pad rows. */
static void few_rows_are_padded_alone(void **state)
{
    (void)state;
    smoe_context *context = open_cpu();
    smoe_layer layer = small_layer();
    for (layer.tokens = 1; layer.tokens * layer.topk <= 2 * layer.experts; layer.tokens++) {
        const int64_t rows = layer.tokens * layer.topk;
        smoe_sizes sizes = SMOE_SIZES_INIT;
        assert_int_equal(smoe_query_sizes(context, &layer, &sizes), SMOE_OK);
        assert_int_equal(sizes.padded_rows, rows < layer.experts ? 64 * rows : rows + 63 * layer.experts);
    }
    smoe_destroy(context);
}

static void saved_has_the_bytes_of_its_parts(void **state)
{
    (void)state;
    smoe_context *context = open_cpu();
    for (int f32 = 0; f32 < 2; f32++)
        for (int gated = 0; gated < 2; gated++)
            for (int entry = SMOE_ENTRY_FROM_LOGITS; entry <= SMOE_ENTRY_FROM_ROWS; entry++) {
                smoe_layer layer = small_layer();
                layer.dtype = f32 ? SMOE_TYPE_F32 : SMOE_TYPE_BF16;
                layer.activation = gated ? SMOE_ACTIVATION_SWIGLU : SMOE_ACTIVATION_RELU2;
                layer.entry = (smoe_entry)entry;
                if (entry == SMOE_ENTRY_FROM_ROWS) layer.topk = 1;
                const uint64_t rows = (uint64_t)(layer.tokens * layer.topk);
                smoe_sizes sizes = SMOE_SIZES_INIT;
                assert_int_equal(smoe_query_sizes(context, &layer, &sizes), SMOE_OK);
                const uint64_t element = f32 ? 4 : 2, h_width = gated ? 2 * 16 : 16;
                assert_int_equal(sizes.rows, rows);
                assert_int_equal(sizes.padded_rows, rows + 63 * 8);
                assert_int_equal(sizes.metadata_bytes, metadata(&layer, rows));
                assert_int_equal(sizes.saved_bytes,
                                 element * (64 * 32 + h_width * rows) + metadata(&layer, rows));
                assert_true(sizes.saved_buffer_bytes >= element * h_width * (rows + 63 * 8));
                layer.inference = 1;
                assert_int_equal(smoe_query_sizes(context, &layer, &sizes), SMOE_OK);
                assert_int_equal(sizes.saved_bytes + sizes.saved_buffer_bytes + sizes.scratch_backward_bytes,
                                 0);
            }
    smoe_destroy(context);
}

static void rounded_rows_stay_within_their_bound(void **state)
{
    (void)state;
    smoe_context *context = open_cpu();
    const struct {
        smoe_rounding rounding;
        int64_t rows;
    } bounds[] = {{SMOE_ROUNDING_NONE, 2048},         {SMOE_ROUNDING_DOWN, 2048},
                  {SMOE_ROUNDING_NR_F, 2048 + 8 * 7}, {SMOE_ROUNDING_BALANCE_F, 2048 + 8},
                  {SMOE_ROUNDING_UP, 2048 + 8 * 15},  {SMOE_ROUNDING_SR_F, 2048 + 8 * 15},
                  {SMOE_ROUNDING_NR_S, 2048 + 8 * 15}};
    for (size_t i = 0; i < sizeof bounds / sizeof *bounds; i++) {
        smoe_layer layer = small_layer();
        layer.tokens = 1024;
        layer.tile = 16;
        layer.rounding = bounds[i].rounding;
        smoe_sizes sizes = SMOE_SIZES_INIT;
        assert_int_equal(smoe_query_sizes(context, &layer, &sizes), SMOE_OK);
        assert_int_equal(sizes.rows, bounds[i].rows);
    }
    smoe_destroy(context);
}

/* With more chunks the scratch must be smaller. */
static void chunks_cut_the_scratch(void **state)
{
    (void)state;
    smoe_context *context = open_cpu();
    smoe_layer layer = small_layer();
    layer.tokens = 4096;
    layer.hidden = 1024;
    smoe_sizes one = SMOE_SIZES_INIT, four = SMOE_SIZES_INIT;
    assert_int_equal(smoe_query_sizes(context, &layer, &one), SMOE_OK);
    layer.chunks = 4;
    assert_int_equal(smoe_query_sizes(context, &layer, &four), SMOE_OK);
    assert_true(four.scratch_forward_bytes < one.scratch_forward_bytes / 2);
    assert_true(four.scratch_backward_bytes < one.scratch_backward_bytes);
    assert_int_equal(four.saved_bytes, one.saved_bytes);
    smoe_destroy(context);
}

/* The bound of `saved` holds for every number of tokens, and does not depend on it. */
static void saved_is_bounded_by_a_constant_and_a_factor(void **state)
{
    (void)state;
    smoe_context *context = open_cpu();
    static const int64_t tokens[] = {1, 63, 64, 65, 1 << 20}, experts[] = {1, 8, 96};
    for (int entry = 0; entry < 3; entry++)
        for (int rounding = SMOE_ROUNDING_NONE; rounding <= SMOE_ROUNDING_DOWN; rounding++)
            for (int e = 0; e < 3; e++) {
                if (entry != SMOE_ENTRY_FROM_LOGITS && rounding != SMOE_ROUNDING_NONE) continue;
                smoe_layer layer = small_layer();
                layer.entry = (smoe_entry)entry, layer.rounding = (smoe_rounding)rounding;
                layer.experts = experts[e], layer.topk = entry == SMOE_ENTRY_FROM_ROWS || e == 0 ? 1 : 3;
                layer.tile = 100, layer.dtype = e % 2 ? SMOE_TYPE_BF16 : SMOE_TYPE_F32;
                uint64_t constant = 0, factor = 0;
                for (int t = 0; t < 5; t++) {
                    smoe_sizes s = SMOE_SIZES_INIT;
                    layer.tokens = tokens[t];
                    assert_int_equal(smoe_query_sizes(context, &layer, &s), SMOE_OK);
                    if (t == 0) constant = s.saved_constant_bytes, factor = s.saved_token_bytes;
                    assert_true(s.saved_constant_bytes == constant && s.saved_token_bytes == factor);
                    const uint64_t bound = constant + factor * (uint64_t)layer.tokens;
                    assert_true(s.saved_buffer_bytes <= bound);
                    if (e > 0 && layer.tokens > 1000) assert_true(bound <= s.saved_buffer_bytes + 13 * 256);
                }
            }
    smoe_destroy(context);
}

static void sizes_say_whether_the_logits_are_read(void **state)
{
    (void)state;
    smoe_context *context = open_cpu();
    static const struct {
        smoe_score score;
        int renormalize;
        smoe_rounding rounding;
        int read;
    } cases[] = {{SMOE_SCORE_SOFTMAX_TOPK, 0, SMOE_ROUNDING_NONE, 1},
                 {SMOE_SCORE_SOFTMAX_TOPK, 1, SMOE_ROUNDING_NONE, 0},
                 {SMOE_SCORE_TOPK_SOFTMAX, 0, SMOE_ROUNDING_NONE, 0},
                 {SMOE_SCORE_SIGMOID, 0, SMOE_ROUNDING_NONE, 1},
                 {SMOE_SCORE_SIGMOID, 1, SMOE_ROUNDING_NONE, 1},
                 {SMOE_SCORE_TOPK_SOFTMAX, 0, SMOE_ROUNDING_UP, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        smoe_layer layer = small_layer();
        layer.score = cases[i].score, layer.renormalize = cases[i].renormalize,
        layer.rounding = cases[i].rounding;
        smoe_sizes s = SMOE_SIZES_INIT;
        assert_int_equal(smoe_query_sizes(context, &layer, &s), SMOE_OK);
        assert_int_equal(s.backward_reads_logits, cases[i].read);
    }
    smoe_destroy(context);
}

static void a_selection_bias_follows_the_counts(void **state)
{
    (void)state;
    smoe_context *context = open_cpu();
    smoe_layer layer = small_layer();
    layer.experts = 4;
    _Alignas(16) const int32_t counts[4] = {10, 20, 15, 15};
    _Alignas(16) float bias[4] = {0, 0, 1, -1};
    assert_int_equal(smoe_update_selection_bias(context, &layer, counts, bias, 0.5f, NULL), SMOE_OK);
    const float expected[4] = {0.5f, -0.5f, 1, -1};
    assert_memory_equal(bias, expected, sizeof bias);
    assert_error(context, smoe_update_selection_bias(context, &layer, NULL, bias, 0.5f, NULL),
                 SMOE_ERROR_ARGUMENT, "smoe_update_selection_bias", "counts is NULL");
    smoe_destroy(context);
}

static void every_code_has_a_text(void **state)
{
    (void)state;
    assert_int_equal(smoe_version(), SMOE_VERSION);
    for (int status = 0; status <= 160; status += 10)
        assert_true(strlen(smoe_status_string((smoe_status)status)) > 1);
    assert_string_equal(smoe_status_string((smoe_status)-1), "unknown status");
    assert_string_equal(smoe_stage_string(SMOE_STAGE_DX_ROWS), "dx_rows");
    assert_string_equal(smoe_stage_string((smoe_stage)-1), "unknown stage");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_layers_are_refused),
        cmocka_unit_test(rows_past_int32_are_refused),
        cmocka_unit_test(structs_of_older_callers_are_taken),
        cmocka_unit_test(longer_structs_must_end_in_zeros),
        cmocka_unit_test(few_rows_are_padded_alone),
        cmocka_unit_test(saved_has_the_bytes_of_its_parts),
        cmocka_unit_test(rounded_rows_stay_within_their_bound),
        cmocka_unit_test(chunks_cut_the_scratch),
        cmocka_unit_test(saved_is_bounded_by_a_constant_and_a_factor),
        cmocka_unit_test(sizes_say_whether_the_logits_are_read),
        cmocka_unit_test(a_selection_bias_follows_the_counts),
        cmocka_unit_test(every_code_has_a_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
