/* The cases of `smoe verify`. Fields that are not named have the defaults of verify_complete_layer. A case
 * without a check of its own is compared with the oracle, tensor by tensor. */
#include "cli/verify/verify.h"

#include "src/activations.h"

/* Counts around the row block of 64 and beyond; their sum is the tokens of the case. */
static const int64_t small_counts[] = {0, 1, 63, 64, 65, 2, 31, 33};
static const int64_t block_counts[] = {127, 128, 129, 191, 192, 193, 0, 320};
static const int64_t large_counts[] = {255, 256, 257, 0};
/* For tile 16: halves of a tile, multiples of it, and counts one off; and one count that may be rounded up to
 * exactly T. */
static const int64_t half_counts[] = {0, 8, 24, 16, 7, 9, 40, 25};
static const int64_t full_counts[] = {60, 0, 4, 0, 0, 0, 0, 0};
enum { SMALL_TOKENS = 259, BLOCK_TOKENS = 1280, LARGE_TOKENS = 768, HALF_TOKENS = 129, FULL_TOKENS = 64 };

#define BIASES .b1 = true, .b2 = true
#define ROUTER .router = true, .router_bias = true
#define LOSSES .balance_coefficient = 0.25, .z_coefficient = 0.125
#define QUICK  .quick = true

/* Every activation of the list with and without biases, and those with a gate also in the interleaved
 * layout. */
#define CASES_plain(activation_, name)                                                                       \
    {name, QUICK, .layer = {.activation = activation_}, .draw = {ROUTER}},                                   \
        {name ", biases", .layer = {.activation = activation_}, .draw = {ROUTER, BIASES}},
#define CASES_gated(activation_, name)                                                                       \
    CASES_plain(activation_, name){name ", interleaved", QUICK,                                              \
                                   .layer = {.activation = activation_, .layout = SMOE_LAYOUT_INTERLEAVED},  \
                                   .draw = {BIASES}},
#define CASES_clamped                                    CASES_gated
#define CASES_capped                                     CASES_gated
#define ACTIVATION_CASES(enumerator, name, shape, curve) CASES_##shape(enumerator, name)

#define ISOLATION(d, n)                                                                                      \
    {                                                                                                        \
        "NaN in an expert, d = " #d ", n = " #n, check_isolation,                                            \
            .layer = {.entry = SMOE_ENTRY_FROM_TOPK,                                                         \
                      .tokens = 700,                                                                         \
                      .experts = 6,                                                                          \
                      .topk = 1,                                                                             \
                      .hidden = d,                                                                           \
                      .intermediate = n},                                                                    \
            .draw = {                                                                                        \
                BIASES                                                                                       \
            }                                                                                                \
    }
#define NAN_LOGITS(name, score_, renormalize_)                                                               \
    {"NaN logits, E = 13, K = 3, " name, check_nan_logits,                                                   \
     .layer = {.experts = 13, .topk = 3, .score = SMOE_SCORE_##score_, .renormalize = renormalize_}},        \
    {                                                                                                        \
        "NaN logits, E = 13, K = 10, " name, check_nan_logits, .layer = {                                    \
            .experts = 13,                                                                                   \
            .topk = 10,                                                                                      \
            .score = SMOE_SCORE_##score_,                                                                    \
            .renormalize = renormalize_                                                                      \
        }                                                                                                    \
    }

static const verify_case cases[] = {
    /* activations and layouts */
    {"swiglu, losses", QUICK, .draw = {ROUTER, LOSSES}},
    {"swiglu, biases, losses", QUICK, .draw = {ROUTER, LOSSES, BIASES}},
    MOE_ACTIVATIONS(ACTIVATION_CASES)
    /* with other values than gpt-oss's; integers, so that no rounding carries an element of H past a limit */
    {"swiglu_clamped, other values", QUICK,
     .layer = {.activation = SMOE_ACTIVATION_SWIGLU_CLAMPED,
               .gate_limit = 3.0f,
               .up_limit = 2.0f,
               .gate_alpha = 1.0f,
               .up_offset = 0.5f},
     .draw = {.integers = 1}},
    {"swiglu_capped, other values", QUICK,
     .layer = {.activation = SMOE_ACTIVATION_SWIGLU_CAPPED,
               .gate_limit = 0.5f,
               .up_limit = 0.25f,
               .gate_alpha = 2.0f,
               .up_offset = 0.5f},
     .draw = {BIASES}},

    /* scores */
    {"softmax-topk, renormalized", QUICK, .layer = {.renormalize = 1}, .draw = {ROUTER}},
    {"softmax-topk, renormalized, losses", .layer = {.renormalize = 1}, .draw = {ROUTER, LOSSES}},
    {"softmax-topk, renormalized, gradients of the losses", QUICK, .layer = {.renormalize = 1},
     .draw = {ROUTER, LOSSES, .loss_gradients = true}},
    {"softmax-topk, given logits", QUICK, .draw = {LOSSES}},
    {"softmax-topk, no losses", .draw = {.router = true}},
    {"topk-softmax", QUICK, .layer = {.score = SMOE_SCORE_TOPK_SOFTMAX, .topk = 3}, .draw = {ROUTER}},
    {"topk-softmax, scaled", .layer = {.score = SMOE_SCORE_TOPK_SOFTMAX, .route_scale = 2.5f},
     .draw = {ROUTER, LOSSES}},
    {"sigmoid", QUICK, .layer = {.score = SMOE_SCORE_SIGMOID}, .draw = {ROUTER}},
    {"sigmoid, selection bias", .layer = {.score = SMOE_SCORE_SIGMOID},
     .draw = {ROUTER, LOSSES, .selection_bias = true}},
    {"sigmoid, renormalized", .layer = {.score = SMOE_SCORE_SIGMOID, .renormalize = 1},
     .draw = {.selection_bias = true}},
    {"sigmoid, groups", QUICK,
     .layer = {.score = SMOE_SCORE_SIGMOID,
               .renormalize = 1,
               .experts = 16,
               .topk = 4,
               .groups = 4,
               .groups_kept = 2,
               .route_scale = 2.5f},
     .draw = {ROUTER, LOSSES, .selection_bias = true}},
    {"bf16 logits", QUICK, .layer = {.logits_type = SMOE_TYPE_BF16}, .draw = {ROUTER, LOSSES}},
    {"sigmoid, gradients of the losses", .layer = {.score = SMOE_SCORE_SIGMOID, .renormalize = 1},
     .draw = {ROUTER, LOSSES, .loss_gradients = true}},
    {"bf16 logits, sigmoid", .layer = {.logits_type = SMOE_TYPE_BF16, .score = SMOE_SCORE_SIGMOID},
     .draw = {LOSSES}},

    /* a token mask: some tokens, or all, are not in the losses and the counts */
    {"masked", QUICK, .draw = {ROUTER, LOSSES, .masked = 3}},
    {"masked, all tokens", QUICK, .layer = {.renormalize = 1}, .draw = {ROUTER, LOSSES, .masked = 1}},
    {"masked, no losses", .layer = {.score = SMOE_SCORE_TOPK_SOFTMAX}, .draw = {ROUTER, .masked = 3}},
    {"masked, sigmoid, round balance-f", QUICK,
     .layer = {.score = SMOE_SCORE_SIGMOID, .rounding = SMOE_ROUNDING_BALANCE_F},
     .draw = {ROUTER, LOSSES, .selection_bias = true, .masked = 2}},
    {"masked, bf16 logits, round up",
     .layer = {.logits_type = SMOE_TYPE_BF16, .rounding = SMOE_ROUNDING_UP, .renormalize = 1},
     .draw = {LOSSES, .masked = 5}},
    {"masked, one takes all, round nr-s", .layer = {.rounding = SMOE_ROUNDING_NR_S},
     .draw = {LOSSES, .routing = ORACLE_ONE_TAKES_ALL, .masked = 2}},

    /* rounding */
    {"round nr-f", QUICK, .layer = {.rounding = SMOE_ROUNDING_NR_F}, .draw = {ROUTER, LOSSES}},
    {"round sr-f", QUICK, .layer = {.rounding = SMOE_ROUNDING_SR_F, .seed = 0x123456789abcdef0u},
     .draw = {ROUTER, .step = 0x1000000007u}},
    {"round nr-s", QUICK, .layer = {.rounding = SMOE_ROUNDING_NR_S}, .draw = {ROUTER}},
    {"round balance-f", QUICK, .layer = {.rounding = SMOE_ROUNDING_BALANCE_F}, .draw = {ROUTER, LOSSES}},
    {"round up", QUICK, .layer = {.rounding = SMOE_ROUNDING_UP}, .draw = {ROUTER}},
    {"round down", QUICK, .layer = {.rounding = SMOE_ROUNDING_DOWN}, .draw = {ROUTER}},
    {"round up, tile 1", .layer = {.rounding = SMOE_ROUNDING_UP, .tile = 1}},
    {"round up, tile 7", .layer = {.rounding = SMOE_ROUNDING_UP, .tile = 7}},
    {"round nr-f, tile past T", .layer = {.rounding = SMOE_ROUNDING_NR_F, .tile = 256}},
    {"round up, renormalized", .layer = {.rounding = SMOE_ROUNDING_UP, .renormalize = 1},
     .draw = {ROUTER, LOSSES}},
    {"round nr-s, topk-softmax",
     .layer = {.rounding = SMOE_ROUNDING_NR_S, .score = SMOE_SCORE_TOPK_SOFTMAX, .route_scale = 1.5f}},
    {"round nr-f, sigmoid", QUICK,
     .layer = {.rounding = SMOE_ROUNDING_NR_F, .score = SMOE_SCORE_SIGMOID, .route_scale = 1.5f},
     .draw = {ROUTER, .selection_bias = true}},
    {"round up, sigmoid renormalized",
     .layer = {.rounding = SMOE_ROUNDING_UP, .score = SMOE_SCORE_SIGMOID, .renormalize = 1},
     .draw = {.selection_bias = true}},
    {"round nr-s, bf16 logits", QUICK,
     .layer = {.rounding = SMOE_ROUNDING_NR_S, .logits_type = SMOE_TYPE_BF16}},
    {"round balance-f, bf16 logits",
     .layer = {.rounding = SMOE_ROUNDING_BALANCE_F, .logits_type = SMOE_TYPE_BF16}},
    {"round up, ties", QUICK, .layer = {.rounding = SMOE_ROUNDING_UP}, .draw = {.routing = ORACLE_TIES}},
    {"round nr-s, ties", .layer = {.rounding = SMOE_ROUNDING_NR_S}, .draw = {.routing = ORACLE_TIES}},
    {"round nr-f, one takes all", .layer = {.rounding = SMOE_ROUNDING_NR_F},
     .draw = {.routing = ORACLE_ONE_TAKES_ALL}},
    {"round nr-f, counts at halves", QUICK,
     .layer = {.rounding = SMOE_ROUNDING_NR_F, .tokens = HALF_TOKENS, .topk = 1},
     .draw = {.routing = ORACLE_COUNTS, .counts = half_counts}},
    {"round balance-f, counts at halves", QUICK,
     .layer = {.rounding = SMOE_ROUNDING_BALANCE_F, .tokens = HALF_TOKENS, .topk = 1},
     .draw = {.routing = ORACLE_COUNTS, .counts = half_counts}},
    {"round nr-s, counts at halves",
     .layer = {.rounding = SMOE_ROUNDING_NR_S, .tokens = HALF_TOKENS, .topk = 1},
     .draw = {.routing = ORACLE_COUNTS, .counts = half_counts}},
    {"round sr-f, counts at halves",
     .layer = {.rounding = SMOE_ROUNDING_SR_F, .tokens = HALF_TOKENS, .topk = 1},
     .draw = {.routing = ORACLE_COUNTS, .counts = half_counts}},
    {"round down, counts at halves",
     .layer = {.rounding = SMOE_ROUNDING_DOWN, .tokens = HALF_TOKENS, .topk = 1},
     .draw = {.routing = ORACLE_COUNTS, .counts = half_counts}},
    {"round up to T", QUICK, .layer = {.rounding = SMOE_ROUNDING_UP, .tokens = FULL_TOKENS, .topk = 1},
     .draw = {.routing = ORACLE_COUNTS, .counts = full_counts}},

    /* routings */
    {"one expert takes all", QUICK, .draw = {.routing = ORACLE_ONE_TAKES_ALL, BIASES}},
    {"half the experts empty", QUICK, .draw = {.routing = ORACLE_HALF_EMPTY, BIASES}},
    {"ties", QUICK, .draw = {.routing = ORACLE_TIES}},
    {"counts 0 to 65", QUICK, .layer = {.tokens = SMALL_TOKENS, .topk = 1},
     .draw = {.routing = ORACLE_COUNTS, .counts = small_counts, BIASES}},
    {"counts 127 to 320", .layer = {.tokens = BLOCK_TOKENS, .topk = 1},
     .draw = {.routing = ORACLE_COUNTS, .counts = block_counts}},
    {"counts 255 to 257", .layer = {.tokens = LARGE_TOKENS, .topk = 1, .experts = 4},
     .draw = {.routing = ORACLE_COUNTS, .counts = large_counts}},
    {"K = 1, E = 1", QUICK, .layer = {.topk = 1, .experts = 1}, .draw = {ROUTER, LOSSES}},
    {"K = E", QUICK, .layer = {.topk = 8}, .draw = {ROUTER, LOSSES}},
    {"K = E, topk-softmax", .layer = {.topk = 8, .score = SMOE_SCORE_TOPK_SOFTMAX}, .draw = {ROUTER}},
    {"K = 16, E = 64", .layer = {.topk = 16, .experts = 64}, .draw = {ROUTER, LOSSES}},
    {"E = 256", .layer = {.topk = 8, .experts = 256, .hidden = 32, .intermediate = 8}, .draw = {ROUTER}},
    {"T = 1", QUICK, .layer = {.tokens = 1}, .draw = {ROUTER, LOSSES, BIASES}},
    {"T = 33", .layer = {.tokens = 33}, .draw = {ROUTER}},
    {"d = 8, n = 8", QUICK, .layer = {.hidden = 8, .intermediate = 8}, .draw = {ROUTER, BIASES}},
    {"d = 200, n = 72", .layer = {.hidden = 200, .intermediate = 72}, .draw = {ROUTER, BIASES}},
    {"d = 72, n = 136", .layer = {.hidden = 72, .intermediate = 136, .topk = 3}, .draw = {ROUTER}},
    {"d = 584, n = 264: several panels, accumulated",
     .layer = {.accumulate = 1, .tokens = 300, .hidden = 584, .intermediate = 264, .experts = 2, .topk = 1},
     .draw = {.router = true, BIASES}},

    /* FROM_TOPK and FROM_ROWS */
    {"given topk", QUICK, .layer = {.entry = SMOE_ENTRY_FROM_TOPK, .topk = 3}, .draw = {BIASES}},
    {"given topk, broken ids", QUICK, .layer = {.entry = SMOE_ENTRY_FROM_TOPK, .topk = 3},
     .draw = {.broken_ids = true, BIASES}},
    {"given topk, broken 64-bit ids",
     .layer = {.entry = SMOE_ENTRY_FROM_TOPK, .topk = 3, .index_type = SMOE_TYPE_I64},
     .draw = {.broken_ids = true}},
    {"given topk, counts 0 to 65",
     .layer = {.entry = SMOE_ENTRY_FROM_TOPK, .tokens = SMALL_TOKENS, .topk = 1},
     .draw = {.routing = ORACLE_COUNTS, .counts = small_counts}},
    {"given topk, one takes all", .layer = {.entry = SMOE_ENTRY_FROM_TOPK},
     .draw = {.routing = ORACLE_ONE_TAKES_ALL}},
    {"rows", QUICK, .layer = {.entry = SMOE_ENTRY_FROM_ROWS}, .draw = {BIASES}},
    {"rows, weighted", QUICK, .layer = {.entry = SMOE_ENTRY_FROM_ROWS},
     .draw = {.row_weights = true, BIASES}},
    {"rows, 64-bit offsets", .layer = {.entry = SMOE_ENTRY_FROM_ROWS, .index_type = SMOE_TYPE_I64},
     .draw = {.row_weights = true}},
    {"rows, counts 0 to 65", QUICK, .layer = {.entry = SMOE_ENTRY_FROM_ROWS, .tokens = SMALL_TOKENS + 5},
     .draw = {.routing = ORACLE_COUNTS, .counts = small_counts, .row_weights = true}},
    {"rows, half empty", .layer = {.entry = SMOE_ENTRY_FROM_ROWS}, .draw = {.routing = ORACLE_HALF_EMPTY}},

    /* stages, gradients, chunks */
    {"stage by stage", QUICK, .stages = true, .draw = {ROUTER, BIASES}},
    {"stage by stage, rounded", .stages = true, .layer = {.rounding = SMOE_ROUNDING_NR_F}, .draw = {ROUTER}},
    {"accumulate twice", QUICK, .layer = {.accumulate = 1}, .draw = {ROUTER, LOSSES, BIASES}},
    {"accumulate, rows", .layer = {.accumulate = 1, .entry = SMOE_ENTRY_FROM_ROWS}, .draw = {BIASES}},
    {"gradients in the storage type", QUICK, .layer = {.gradient_type = SMOE_TYPE_BF16},
     .draw = {ROUTER, BIASES}},
    {"4 chunks", QUICK, .layer = {.chunks = 4, .hidden = 200}, .draw = {ROUTER, LOSSES, BIASES}},
    {"reuse saved", QUICK, .layer = {.reuse_saved = 1}, .draw = {ROUTER, BIASES}},

    /* bits */
    {"integers, given topk", check_exact, QUICK,
     .layer = {.entry = SMOE_ENTRY_FROM_TOPK, .activation = SMOE_ACTIVATION_RELU, .topk = 3},
     .draw = {.integers = true, BIASES}},
    {"integers, broken ids, chunks", check_exact,
     .layer = {.entry = SMOE_ENTRY_FROM_TOPK,
               .activation = SMOE_ACTIVATION_RELU,
               .topk = 3,
               .hidden = 72,
               .chunks = 2},
     .draw = {.integers = true, .broken_ids = true}},
    {"integers, counts 0 to 65", check_exact, QUICK,
     .layer = {.entry = SMOE_ENTRY_FROM_TOPK,
               .activation = SMOE_ACTIVATION_RELU,
               .tokens = SMALL_TOKENS,
               .topk = 1},
     .draw = {.routing = ORACLE_COUNTS, .counts = small_counts, .integers = true, BIASES}},
    {"integers, counts 127 to 320", check_exact,
     .layer = {.entry = SMOE_ENTRY_FROM_TOPK,
               .activation = SMOE_ACTIVATION_RELU,
               .tokens = BLOCK_TOKENS,
               .topk = 1},
     .draw = {.routing = ORACLE_COUNTS, .counts = block_counts, .integers = true}},
    {"integers, rows", check_exact, QUICK,
     .layer = {.entry = SMOE_ENTRY_FROM_ROWS, .activation = SMOE_ACTIVATION_RELU},
     .draw = {.integers = true, .row_weights = true, BIASES}},
    {"integers, gate", check_exact, QUICK,
     .layer = {.entry = SMOE_ENTRY_FROM_TOPK,
               .activation = SMOE_ACTIVATION_REGLU,
               .hidden = 16,
               .intermediate = 8},
     .draw = {.integers = true}},
    {"integers, interleaved gate", check_exact, QUICK,
     .layer = {.entry = SMOE_ENTRY_FROM_TOPK,
               .activation = SMOE_ACTIVATION_REGLU,
               .hidden = 16,
               .intermediate = 8,
               .layout = SMOE_LAYOUT_INTERLEAVED},
     .draw = {.integers = true}},
    {"same bits", check_same_bits, QUICK, .layer = {.hidden = 256}, .draw = {ROUTER, LOSSES, BIASES}},
    {"same bits, larger", check_same_bits,
     .layer = {.tokens = 700, .hidden = 256, .intermediate = 72, .topk = 4},
     .draw = {ROUTER, LOSSES, BIASES}},
    {"same bits, rounded", check_same_bits, .layer = {.hidden = 256, .rounding = SMOE_ROUNDING_NR_S},
     .draw = {ROUTER, LOSSES}},
    {"same bits, given topk", check_same_bits, .layer = {.hidden = 256, .entry = SMOE_ENTRY_FROM_TOPK},
     .draw = {BIASES}},
    {"same bits, rows", check_same_bits, QUICK, .layer = {.hidden = 200, .entry = SMOE_ENTRY_FROM_ROWS},
     .draw = {.row_weights = true, BIASES}},
    {"repeats beside copies", check_repeats,
     .layer = {.tokens = 700, .hidden = 256, .intermediate = 72, .topk = 4},
     .draw = {ROUTER, LOSSES, BIASES}},
    {"repeats beside copies, n = 256", check_repeats,
     .layer =
         {.tokens = 300, .hidden = 384, .intermediate = 256, .experts = 4, .entry = SMOE_ENTRY_FROM_TOPK}},
    {"repeats beside copies, n = 512", check_repeats,
     .layer =
         {.tokens = 300, .hidden = 192, .intermediate = 512, .experts = 4, .entry = SMOE_ENTRY_FROM_TOPK}},

    {"repeats beside copies, d = 768, n = 256", check_repeats,
     .layer = {.tokens = 512,
               .hidden = 768,
               .intermediate = 256,
               .experts = 4,
               .gradient_type = SMOE_TYPE_BF16,
               .entry = SMOE_ENTRY_FROM_TOPK}},
    {"repeats beside copies, d = 512, n = 1024, chunks", check_repeats,
     .layer = {.tokens = 512,
               .hidden = 512,
               .intermediate = 1024,
               .experts = 2,
               .topk = 1,
               .chunks = 2,
               .gradient_type = SMOE_TYPE_BF16,
               .entry = SMOE_ENTRY_FROM_TOPK}},

    /* values that are not numbers: every GEMM of the cuda backend */
    ISOLATION(72, 40),
    ISOLATION(192, 256),
    ISOLATION(256, 320),
    ISOLATION(384, 512),
    ISOLATION(512, 256),
    {"NaN in an expert of few rows", check_isolation,
     .layer = {.entry = SMOE_ENTRY_FROM_TOPK,
               .tokens = 30,
               .experts = 6,
               .topk = 1,
               .hidden = 72,
               .intermediate = 40},
     .draw = {BIASES}},
    {"NaN in an expert and its tokens", check_isolation, QUICK,
     .layer = {.entry = SMOE_ENTRY_FROM_TOPK, .tokens = SMALL_TOKENS, .topk = 1},
     .draw = {.routing = ORACLE_COUNTS, .counts = small_counts, BIASES}},
    {"NaN in rows", check_isolation, .layer = {.entry = SMOE_ENTRY_FROM_ROWS},
     .draw = {.routing = ORACLE_TIES, BIASES}},
    {"NaN logits", check_nan_logits, QUICK, .layer = {.topk = 3}},
    {"NaN logits, sigmoid", check_nan_logits, .layer = {.topk = 3, .score = SMOE_SCORE_SIGMOID}},
    {"NaN logits, topk-softmax", check_nan_logits, .layer = {.topk = 3, .score = SMOE_SCORE_TOPK_SOFTMAX}},
    NAN_LOGITS("softmax", SOFTMAX_TOPK, 0),
    NAN_LOGITS("softmax renormalized", SOFTMAX_TOPK, 1),
    NAN_LOGITS("topk-softmax", TOPK_SOFTMAX, 0),
    NAN_LOGITS("sigmoid", SIGMOID, 0),
    NAN_LOGITS("sigmoid renormalized", SIGMOID, 1),

    /* small things */
    {"selection bias update", check_bias_update, QUICK, .f32_only = true},
    {"saved bytes", check_saved_bytes, QUICK, .draw = {ROUTER}},
    {"saved bytes, no gate", check_saved_bytes, .layer = {.activation = SMOE_ACTIVATION_GELU}},
    {"saved bytes, rounded", check_saved_bytes, .layer = {.rounding = SMOE_ROUNDING_UP}},
    {"saved bytes, rows", check_saved_bytes, .layer = {.entry = SMOE_ENTRY_FROM_ROWS}},
};

const verify_case *verify_cases(size_t *count)
{
    *count = sizeof cases / sizeof cases[0];
    return cases;
}

smoe_layer verify_complete_layer(const verify_case *c, smoe_type dtype)
{
    smoe_layer layer = c->layer;
    layer.struct_size = sizeof layer;
    layer.dtype = dtype;
    if (!layer.tokens) layer.tokens = 150;
    if (!layer.hidden) layer.hidden = 64;
    if (!layer.intermediate) layer.intermediate = 32;
    if (!layer.experts) layer.experts = 8;
    if (!layer.topk) layer.topk = layer.entry == SMOE_ENTRY_FROM_ROWS ? 1 : 2;
    if (layer.index_type == SMOE_TYPE_F32) layer.index_type = SMOE_TYPE_I32;
    if (layer.gradient_type == SMOE_TYPE_BF16) layer.gradient_type = dtype;
    if (!layer.chunks) layer.chunks = 1;
    if (!layer.groups) layer.groups = layer.groups_kept = 1;
    if (layer.route_scale == 0.0f) layer.route_scale = 1.0f;
    if (!layer.tile) layer.tile = 16;
    if (layer.gate_limit == 0.0f) { // gpt-oss's, as SMOE_LAYER_INIT
        layer.gate_limit = layer.up_limit = 7.0f;
        layer.gate_alpha = 1.702f;
        layer.up_offset = 1.0f;
    }
    return layer;
}
