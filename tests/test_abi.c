/* The binary interface: offset and size of every field, size of every struct, value of every enumerator, and
 * the values that the _INIT macros set. Bindings in other languages repeat these numbers, so none may ever
 * change. A field may only be appended to a struct (then the struct's size in this file grows), and an
 * enumerator may only be added. The numbers are those of 64-bit machines. */
#include "api_case.h"

#include <smoe_ep.h>
#include <stdio.h>

typedef struct pinned {
    const char *name;
    long long got, expected;
} pinned;

static void check_all(const pinned *rows, size_t count)
{
    int wrong = 0;
    for (size_t i = 0; i < count; i++) {
        if (rows[i].got == rows[i].expected) continue;
        print_error("%s is %lld, pinned at %lld\n", rows[i].name, rows[i].got, rows[i].expected);
        wrong++;
    }
    assert_int_equal(wrong, 0);
}

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* A struct's size, and offset and size of a field. */
#define SIZE(type, size)                                                                                     \
    {                                                                                                        \
        "sizeof(" #type ")", (long long)sizeof(type), size                                                   \
    }
#define FIELD(type, field, offset, size)                                                                     \
    {"offset of " #type "." #field, (long long)offsetof(type, field), offset},                               \
    {                                                                                                        \
        "size of " #type "." #field, (long long)sizeof(((type *)NULL)->field), size                          \
    }
#define VALUE(name, value)                                                                                   \
    {                                                                                                        \
        "" #name, (long long)(name), value                                                                   \
    }

static void structs_keep_their_layout(void **state)
{
    (void)state;
    static const pinned rows[] = {
        SIZE(smoe_context_options, 72),
        FIELD(smoe_context_options, struct_size, 0, 8),
        FIELD(smoe_context_options, backend, 8, 4),
        FIELD(smoe_context_options, device, 12, 4),
        FIELD(smoe_context_options, threads, 16, 4),
        FIELD(smoe_context_options, on_stage, 24, 8),
        FIELD(smoe_context_options, on_stage_user, 32, 8),
        FIELD(smoe_context_options, error_text, 40, 8),
        FIELD(smoe_context_options, error_size, 48, 8),
        FIELD(smoe_context_options, check_offsets, 56, 4),
        FIELD(smoe_context_options, sms, 60, 4),
        FIELD(smoe_context_options, kernels, 64, 4),
        SIZE(smoe_layer, 184),
        FIELD(smoe_layer, struct_size, 0, 8),
        FIELD(smoe_layer, tokens, 8, 8),
        FIELD(smoe_layer, hidden, 16, 8),
        FIELD(smoe_layer, intermediate, 24, 8),
        FIELD(smoe_layer, experts, 32, 8),
        FIELD(smoe_layer, topk, 40, 8),
        FIELD(smoe_layer, dtype, 48, 4),
        FIELD(smoe_layer, activation, 52, 4),
        FIELD(smoe_layer, layout, 56, 4),
        FIELD(smoe_layer, entry, 60, 4),
        FIELD(smoe_layer, index_type, 64, 4),
        FIELD(smoe_layer, logits_type, 68, 4),
        FIELD(smoe_layer, gradient_type, 72, 4),
        FIELD(smoe_layer, accumulate, 76, 4),
        FIELD(smoe_layer, inference, 80, 4),
        FIELD(smoe_layer, reuse_saved, 84, 4),
        FIELD(smoe_layer, chunks, 88, 4),
        FIELD(smoe_layer, score, 92, 4),
        FIELD(smoe_layer, renormalize, 96, 4),
        FIELD(smoe_layer, groups, 100, 4),
        FIELD(smoe_layer, groups_kept, 104, 4),
        FIELD(smoe_layer, route_scale, 108, 4),
        FIELD(smoe_layer, rounding, 112, 4),
        FIELD(smoe_layer, tile, 116, 4),
        FIELD(smoe_layer, seed, 120, 8),
        FIELD(smoe_layer, gate_limit, 128, 4),
        FIELD(smoe_layer, up_limit, 132, 4),
        FIELD(smoe_layer, gate_alpha, 136, 4),
        FIELD(smoe_layer, up_offset, 140, 4),
        FIELD(smoe_layer, ranks, 144, 4),
        FIELD(smoe_layer, waves, 148, 4),
        FIELD(smoe_layer, max_tokens, 152, 8),
        FIELD(smoe_layer, row_capacity, 160, 8),
        FIELD(smoe_layer, lora_rank1, 168, 4),
        FIELD(smoe_layer, lora_rank2, 172, 4),
        FIELD(smoe_layer, compute, 176, 4),
        SIZE(smoe_sizes, 104),
        FIELD(smoe_sizes, struct_size, 0, 8),
        FIELD(smoe_sizes, rows, 8, 8),
        FIELD(smoe_sizes, padded_rows, 16, 8),
        FIELD(smoe_sizes, saved_bytes, 24, 8),
        FIELD(smoe_sizes, metadata_bytes, 32, 8),
        FIELD(smoe_sizes, saved_buffer_bytes, 40, 8),
        FIELD(smoe_sizes, scratch_forward_bytes, 48, 8),
        FIELD(smoe_sizes, scratch_backward_bytes, 56, 8),
        FIELD(smoe_sizes, window_bytes, 64, 8),
        FIELD(smoe_sizes, saved_constant_bytes, 72, 8),
        FIELD(smoe_sizes, saved_token_bytes, 80, 8),
        FIELD(smoe_sizes, backward_reads_logits, 88, 4),
        FIELD(smoe_sizes, weights_f8_bytes, 96, 8),
        SIZE(smoe_forward_args, 232),
        FIELD(smoe_forward_args, struct_size, 0, 8),
        FIELD(smoe_forward_args, x, 8, 8),
        FIELD(smoe_forward_args, router_weight, 16, 8),
        FIELD(smoe_forward_args, router_bias, 24, 8),
        FIELD(smoe_forward_args, logits, 32, 8),
        FIELD(smoe_forward_args, selection_bias, 40, 8),
        FIELD(smoe_forward_args, step, 48, 8),
        FIELD(smoe_forward_args, losses, 56, 8),
        FIELD(smoe_forward_args, topk_ids, 64, 8),
        FIELD(smoe_forward_args, topk_weights, 72, 8),
        FIELD(smoe_forward_args, offsets, 80, 8),
        FIELD(smoe_forward_args, row_weights, 88, 8),
        FIELD(smoe_forward_args, w1, 96, 8),
        FIELD(smoe_forward_args, b1, 104, 8),
        FIELD(smoe_forward_args, w2, 112, 8),
        FIELD(smoe_forward_args, b2, 120, 8),
        FIELD(smoe_forward_args, out, 128, 8),
        FIELD(smoe_forward_args, saved, 136, 8),
        FIELD(smoe_forward_args, saved_size, 144, 8),
        FIELD(smoe_forward_args, scratch, 152, 8),
        FIELD(smoe_forward_args, scratch_size, 160, 8),
        FIELD(smoe_forward_args, ep, 168, 8),
        FIELD(smoe_forward_args, token_mask, 176, 8),
        FIELD(smoe_forward_args, lora_a1, 184, 8),
        FIELD(smoe_forward_args, lora_b1, 192, 8),
        FIELD(smoe_forward_args, lora_a2, 200, 8),
        FIELD(smoe_forward_args, lora_b2, 208, 8),
        FIELD(smoe_forward_args, weights_f8, 216, 8),
        FIELD(smoe_forward_args, weights_f8_size, 224, 8),
        SIZE(smoe_plan_view, 104),
        FIELD(smoe_plan_view, struct_size, 0, 8),
        FIELD(smoe_plan_view, topk_ids, 8, 8),
        FIELD(smoe_plan_view, topk_weights, 16, 8),
        FIELD(smoe_plan_view, topk_counts, 24, 8),
        FIELD(smoe_plan_view, counts, 32, 8),
        FIELD(smoe_plan_view, offsets, 40, 8),
        FIELD(smoe_plan_view, block_offsets, 48, 8),
        FIELD(smoe_plan_view, order, 56, 8),
        FIELD(smoe_plan_view, row_token, 64, 8),
        FIELD(smoe_plan_view, row_weight, 72, 8),
        FIELD(smoe_plan_view, token_offsets, 80, 8),
        FIELD(smoe_plan_view, token_rows, 88, 8),
        FIELD(smoe_plan_view, h, 96, 8),
        SIZE(smoe_backward_args, 296),
        FIELD(smoe_backward_args, struct_size, 0, 8),
        FIELD(smoe_backward_args, x, 8, 8),
        FIELD(smoe_backward_args, router_weight, 16, 8),
        FIELD(smoe_backward_args, logits, 24, 8),
        FIELD(smoe_backward_args, topk_ids, 32, 8),
        FIELD(smoe_backward_args, w1, 40, 8),
        FIELD(smoe_backward_args, w2, 48, 8),
        FIELD(smoe_backward_args, b2, 56, 8),
        FIELD(smoe_backward_args, saved, 64, 8),
        FIELD(smoe_backward_args, saved_size, 72, 8),
        FIELD(smoe_backward_args, dout, 80, 8),
        FIELD(smoe_backward_args, balance_coefficient, 88, 4),
        FIELD(smoe_backward_args, z_coefficient, 92, 4),
        FIELD(smoe_backward_args, dx, 96, 8),
        FIELD(smoe_backward_args, dw1, 104, 8),
        FIELD(smoe_backward_args, dw2, 112, 8),
        FIELD(smoe_backward_args, db1, 120, 8),
        FIELD(smoe_backward_args, db2, 128, 8),
        FIELD(smoe_backward_args, drouter_weight, 136, 8),
        FIELD(smoe_backward_args, drouter_bias, 144, 8),
        FIELD(smoe_backward_args, dlogits, 152, 8),
        FIELD(smoe_backward_args, dtopk_weights, 160, 8),
        FIELD(smoe_backward_args, drow_weights, 168, 8),
        FIELD(smoe_backward_args, scratch, 176, 8),
        FIELD(smoe_backward_args, scratch_size, 184, 8),
        FIELD(smoe_backward_args, loss_gradients, 192, 8),
        FIELD(smoe_backward_args, ep, 200, 8),
        FIELD(smoe_backward_args, token_mask, 208, 8),
        FIELD(smoe_backward_args, lora_a1, 216, 8),
        FIELD(smoe_backward_args, lora_b1, 224, 8),
        FIELD(smoe_backward_args, lora_a2, 232, 8),
        FIELD(smoe_backward_args, lora_b2, 240, 8),
        FIELD(smoe_backward_args, dlora_a1, 248, 8),
        FIELD(smoe_backward_args, dlora_b1, 256, 8),
        FIELD(smoe_backward_args, dlora_a2, 264, 8),
        FIELD(smoe_backward_args, dlora_b2, 272, 8),
        FIELD(smoe_backward_args, weights_f8, 280, 8),
        FIELD(smoe_backward_args, weights_f8_size, 288, 8),
        SIZE(smoe_quantize_args, 64),
        FIELD(smoe_quantize_args, struct_size, 0, 8),
        FIELD(smoe_quantize_args, w1, 8, 8),
        FIELD(smoe_quantize_args, w2, 16, 8),
        FIELD(smoe_quantize_args, weight_type, 24, 4),
        FIELD(smoe_quantize_args, first_expert, 32, 8),
        FIELD(smoe_quantize_args, experts, 40, 8),
        FIELD(smoe_quantize_args, weights_f8, 48, 8),
        FIELD(smoe_quantize_args, weights_f8_size, 56, 8),
        SIZE(smoe_ep_options, 24),
        FIELD(smoe_ep_options, struct_size, 0, 8),
        FIELD(smoe_ep_options, rank, 8, 4),
        FIELD(smoe_ep_options, timeout_ms, 12, 4),
        FIELD(smoe_ep_options, windows, 16, 8),
    };
    check_all(rows, COUNT(rows));
}

static void enumerators_keep_their_values(void **state)
{
    (void)state;
    static const pinned rows[] = {
        SIZE(smoe_status, 4),
        VALUE(SMOE_OK, 0),
        VALUE(SMOE_ERROR_ARGUMENT, 100),
        VALUE(SMOE_ERROR_SHAPE, 110),
        VALUE(SMOE_ERROR_ALIGNMENT, 120),
        VALUE(SMOE_ERROR_BUFFER, 130),
        VALUE(SMOE_ERROR_UNSUPPORTED, 140),
        VALUE(SMOE_ERROR_MEMORY, 150),
        VALUE(SMOE_ERROR_DEVICE, 160),
        VALUE(SMOE_ERROR_PEER, 170),
        SIZE(smoe_backend, 4),
        VALUE(SMOE_BACKEND_CPU, 0),
        VALUE(SMOE_BACKEND_CUDA, 10),
        SIZE(smoe_stage, 4),
        VALUE(SMOE_STAGE_ROUTER_GEMM, 0),
        VALUE(SMOE_STAGE_TOPK, 10),
        VALUE(SMOE_STAGE_ROUND, 20),
        VALUE(SMOE_STAGE_PLAN, 30),
        VALUE(SMOE_STAGE_UP, 40),
        VALUE(SMOE_STAGE_DOWN, 50),
        VALUE(SMOE_STAGE_COMBINE, 60),
        VALUE(SMOE_STAGE_DH, 70),
        VALUE(SMOE_STAGE_DW2, 80),
        VALUE(SMOE_STAGE_DX_ROWS, 90),
        VALUE(SMOE_STAGE_DW1, 100),
        VALUE(SMOE_STAGE_DX, 110),
        VALUE(SMOE_STAGE_ROUTER_BWD, 120),
        VALUE(SMOE_STAGE_DISPATCH, 130),
        VALUE(SMOE_STAGE_COLLECT, 140),
        VALUE(SMOE_STAGE_DISPATCH_BWD, 150),
        VALUE(SMOE_STAGE_COLLECT_BWD, 160),
        SIZE(smoe_type, 4),
        VALUE(SMOE_TYPE_F32, 0),
        VALUE(SMOE_TYPE_BF16, 1),
        VALUE(SMOE_TYPE_F16, 2),
        VALUE(SMOE_TYPE_I32, 10),
        VALUE(SMOE_TYPE_I64, 11),
        SIZE(smoe_activation, 4),
        VALUE(SMOE_ACTIVATION_SWIGLU, 0),
        VALUE(SMOE_ACTIVATION_GEGLU, 1),
        VALUE(SMOE_ACTIVATION_GEGLU_TANH, 2),
        VALUE(SMOE_ACTIVATION_REGLU, 3),
        VALUE(SMOE_ACTIVATION_SWIGLU_CLAMPED, 4),
        VALUE(SMOE_ACTIVATION_SWIGLU_CAPPED, 5),
        VALUE(SMOE_ACTIVATION_SILU, 10),
        VALUE(SMOE_ACTIVATION_GELU, 11),
        VALUE(SMOE_ACTIVATION_RELU, 12),
        VALUE(SMOE_ACTIVATION_RELU2, 13),
        SIZE(smoe_layout, 4),
        VALUE(SMOE_LAYOUT_CONCATENATED, 0),
        VALUE(SMOE_LAYOUT_INTERLEAVED, 1),
        SIZE(smoe_entry, 4),
        VALUE(SMOE_ENTRY_FROM_LOGITS, 0),
        VALUE(SMOE_ENTRY_FROM_TOPK, 1),
        VALUE(SMOE_ENTRY_FROM_ROWS, 2),
        SIZE(smoe_score, 4),
        VALUE(SMOE_SCORE_SOFTMAX_TOPK, 0),
        VALUE(SMOE_SCORE_TOPK_SOFTMAX, 1),
        VALUE(SMOE_SCORE_SIGMOID, 2),
        SIZE(smoe_rounding, 4),
        VALUE(SMOE_ROUNDING_NONE, 0),
        VALUE(SMOE_ROUNDING_NR_F, 1),
        VALUE(SMOE_ROUNDING_SR_F, 2),
        VALUE(SMOE_ROUNDING_NR_S, 3),
        VALUE(SMOE_ROUNDING_BALANCE_F, 4),
        VALUE(SMOE_ROUNDING_UP, 5),
        VALUE(SMOE_ROUNDING_DOWN, 6),
        SIZE(smoe_compute, 4),
        VALUE(SMOE_COMPUTE_STORAGE, 0),
        VALUE(SMOE_COMPUTE_F8, 10),
        VALUE(SMOE_COMPUTE_F8_DGRAD, 11),
    };
    check_all(rows, COUNT(rows));
}

/* All bytes that an _INIT macro sets must be zero, except for the defaults below. */
static void defaults_stay(void **state)
{
    (void)state;
    smoe_layer layer = SMOE_LAYER_INIT;
    const smoe_quantize_args quantize = SMOE_QUANTIZE_ARGS_INIT;
    const pinned rows[] = {
        VALUE(quantize.struct_size, 64),
        VALUE(quantize.weight_type, 1),
        VALUE(layer.struct_size, 184),
        VALUE(layer.topk, 1),
        VALUE(layer.dtype, 1),
        VALUE(layer.index_type, 10),
        VALUE(layer.chunks, 1),
        VALUE(layer.groups, 1),
        VALUE(layer.groups_kept, 1),
        VALUE(layer.route_scale == 1.0f, 1),
        VALUE(layer.tile, 128),
        VALUE(layer.gate_limit == 7.0f, 1),
        VALUE(layer.up_limit == 7.0f, 1),
        VALUE(layer.gate_alpha == 1.702f, 1),
        VALUE(layer.up_offset == 1.0f, 1),
    };
    check_all(rows, COUNT(rows));
    layer.struct_size = 0, layer.topk = 0, layer.dtype = (smoe_type)0, layer.index_type = (smoe_type)0;
    layer.chunks = layer.groups = layer.groups_kept = layer.tile = 0, layer.route_scale = 0.0f;
    layer.gate_limit = layer.up_limit = layer.gate_alpha = layer.up_offset = 0.0f;
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    smoe_sizes sizes = SMOE_SIZES_INIT;
    smoe_forward_args forward = SMOE_FORWARD_ARGS_INIT;
    smoe_backward_args backward = SMOE_BACKWARD_ARGS_INIT;
    smoe_plan_view view = SMOE_PLAN_VIEW_INIT;
    size_t *const struct_sizes[] = {&options.struct_size, &sizes.struct_size, &forward.struct_size,
                                    &backward.struct_size, &view.struct_size};
    const size_t expected[] = {sizeof options, sizeof sizes, sizeof forward, sizeof backward, sizeof view};
    for (size_t i = 0; i < COUNT(expected); i++) {
        assert_int_equal(*struct_sizes[i], expected[i]);
        *struct_sizes[i] = 0;
    }
    static const char zeros[512];
    assert_memory_equal(&layer, zeros, offsetof(smoe_layer, compute) + sizeof layer.compute);
    assert_memory_equal(&options, zeros, offsetof(smoe_context_options, on_stage) - sizeof(int32_t));
    assert_memory_equal(&options.on_stage, zeros,
                        offsetof(smoe_context_options, check_offsets) -
                            offsetof(smoe_context_options, on_stage));
    assert_int_equal(options.check_offsets, 0);
    assert_memory_equal(&sizes, zeros, offsetof(smoe_sizes, backward_reads_logits) + sizeof(int32_t));
    assert_int_equal(sizes.weights_f8_bytes, 0);
    assert_memory_equal(&forward, zeros, sizeof forward);
    assert_memory_equal(&backward, zeros, sizeof backward);
    assert_memory_equal(&view, zeros, sizeof view);
}

/* smoe_backward_args as it was before 0.1.0, with five fields that no backend read. A library that has the
 * newer struct must not read one field as another. */
static void former_backward_args_are_read_rightly(void **state)
{
    (void)state;
    enum { X = 1, LOGITS = 3, W1 = 9, W2 = 11, SAVED = 13, DOUT = 15, DX = 17, SCRATCH = 27, FIELDS = 29 };
    smoe_context *context = open_cpu();
    const smoe_layer layer = small_layer();
    smoe_sizes sizes = SMOE_SIZES_INIT;
    assert_int_equal(smoe_query_sizes(context, &layer, &sizes), SMOE_OK);
    const size_t part = (sizes.saved_buffer_bytes + sizes.scratch_backward_bytes + (1 << 20)) / 256 * 256;
    char *pool = aligned_alloc(256, 8 * part);
    assert_non_null(pool);
    memset(pool, 0, 8 * part);
    const int pointers[] = {X, LOGITS, W1, W2, SAVED, DOUT, DX, SCRATCH};
    uint64_t former[FIELDS] = {sizeof former, [SAVED + 1] = part, [SCRATCH + 1] = part};
    for (size_t i = 0; i < 8; i++) former[pointers[i]] = (uint64_t)(uintptr_t)(pool + i * part);
    smoe_backward_args *args = malloc(sizeof former);
    assert_non_null(args);
    memcpy(args, former, sizeof former);
    assert_error(context, smoe_layer_backward(context, &layer, args, NULL), SMOE_ERROR_ARGUMENT,
                 "smoe_layer_backward: ", "");
    free(args);
    free(pool);
    smoe_destroy(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(structs_keep_their_layout),
        cmocka_unit_test(enumerators_keep_their_values),
        cmocka_unit_test(defaults_stay),
        cmocka_unit_test(former_backward_args_are_read_rightly),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
