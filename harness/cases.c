/* The cases that every backend runs. Fields that are not named have the defaults of case_layer. A case
 * without a check of its own is compared with the oracle, tensor by tensor. */
#include "harness/case_words.h"

#include "src/activations.h"

/* Counts around the row block of 64 and beyond; their sum is the tokens of the case. */
static const int64_t small_counts[] = {0, 1, 63, 64, 65, 2, 31, 33};
static const int64_t block_counts[] = {127, 128, 129, 191, 192, 193, 0, 320};
static const int64_t large_counts[] = {255, 256, 257, 0};
/* For tile 16: halves of a tile, multiples of it, and counts one off; and one count that may be rounded up to
 * exactly T. */
static const int64_t half_counts[] = {0, 8, 24, 16, 7, 9, 40, 25};
static const int64_t no_rows[] = {0, 0, 0};
static const int64_t full_counts[] = {60, 0, 4, 0, 0, 0, 0, 0};
enum { SMALL_TOKENS = 259, BLOCK_TOKENS = 1280, LARGE_TOKENS = 768, HALF_TOKENS = 129, FULL_TOKENS = 64 };

/* Every activation of the list with and without biases, from every entry, and those with a gate in both
 * layouts. */
#define CASES_plain(activation_, name)                                                                       \
    {name, QUICK, .layer = {.activation = activation_}, .draw = {ROUTER}},                                   \
        {name ", biases", .layer = {.activation = activation_}, .draw = {ROUTER, BIASES}},                   \
        {name ", given topk", .draw = {BIASES, BROKEN_IDS},                                                  \
         .layer = {.activation = activation_, TOPK, SIZES(90, 136, 24, 5, 3), INDEX_64, G16, .chunks = 2}},  \
        {name ", rows", .draw = {WEIGHTED},                                                                  \
         .layer = {                                                                                          \
             .activation = activation_, ROWS, SIZES(90, 136, 24, 5, 1), .chunks = 4, .accumulate = 1}},
#define CASES_gated(activation_, name)                                                                       \
    CASES_plain(activation_, name){name ", interleaved", QUICK,                                              \
                                   .layer = {.activation = activation_, INTERLEAVED}, .draw = {BIASES}},     \
        {name ", rows, interleaved", .draw = {BIASES},                                                       \
         .layer = {.activation = activation_, ROWS, SIZES(90, 136, 24, 5, 1), INTERLEAVED, G16}},
#define CASES_clamped                                    CASES_gated
#define CASES_capped                                     CASES_gated
#define ACTIVATION_CASES(enumerator, name, shape, curve) CASES_##shape(enumerator, name)

/* Every score with every rounding rule, each with either type of logits and with or without Wr. */
#define ROUNDED(name, rule, coefficient, score_, ...)                                                        \
    {                                                                                                        \
        "every score and rule: " name ", " #rule, TYPES(F32, BF16),                                          \
            .draw = {coefficient, BIASES, .step = 7}, .layer = {                                             \
                SIZES(37, 24, 8, 6, 2),                                                                      \
                ROUND(rule),                                                                                 \
                .tile = 8,                                                                                   \
                .seed = 5,                                                                                   \
                SCORE(score_),                                                                               \
                __VA_ARGS__                                                                                  \
            }                                                                                                \
    }
#define EVERY_RULE(name, score_, ...)                                                                        \
    ROUNDED(name, NONE, ROUTER, score_, __VA_ARGS__), ROUNDED(name, NR_F, LOSSES, score_, __VA_ARGS__),      \
        ROUNDED(name, SR_F, ROUTER, score_, BF16_LOGITS, __VA_ARGS__),                                       \
        ROUNDED(name, NR_S, ROUTER, score_, __VA_ARGS__),                                                    \
        ROUNDED(name, BALANCE_F, LOSSES, score_, BF16_LOGITS, __VA_ARGS__),                                  \
        ROUNDED(name, UP, ROUTER, score_, __VA_ARGS__),                                                      \
        ROUNDED(name, DOWN, LOSSES, score_, BF16_LOGITS, __VA_ARGS__)

#define NAN_EXPERT(T, d, n)                                                                                  \
    {                                                                                                        \
        "NaN in an expert, d = " #d ", n = " #n, CHECK(ISOLATION), .layer = {SIZES(T, d, n, 6, 1), TOPK},    \
                                                                   .draw = {                                 \
                                                                       BIASES                                \
                                                                   }                                         \
    }
#define NAN_OF_13(name, ...)                                                                                 \
    {"NaN logits, E = 13, K = 3, " name, CHECK(NAN_LOGITS),                                                  \
     .layer = {.experts = 13, .topk = 3, __VA_ARGS__}},                                                      \
    {                                                                                                        \
        "NaN logits, E = 13, K = 10, " name, CHECK(NAN_LOGITS), .layer = {                                   \
            .experts = 13,                                                                                   \
            .topk = 10,                                                                                      \
            __VA_ARGS__                                                                                      \
        }                                                                                                    \
    }

static const layer_case cases[] = {
    /* activations and layouts */
    {"swiglu, losses", QUICK, .draw = {ROUTER, LOSSES}},
    {"swiglu, biases, losses", QUICK, .draw = {ROUTER, LOSSES, BIASES}},
    MOE_ACTIVATIONS(ACTIVATION_CASES)
    /* with other values than gpt-oss's; integers, so that no rounding carries an element of H past a limit */
    {"swiglu_clamped, other values", QUICK, .layer = {ACT(SWIGLU_CLAMPED), GATE(3.0f, 2.0f, 1.0f, 0.5f)},
     .draw = {DENSE}, .inexact = true},
    {"swiglu_capped, other values", QUICK, .layer = {ACT(SWIGLU_CAPPED), GATE(0.5f, 0.25f, 2.0f, 0.5f)},
     .draw = {BIASES}},

    /* scores */
    {"softmax-topk, renormalized", QUICK, .layer = {RENORM}, .draw = {ROUTER}},
    {"softmax-topk, renormalized, losses", .layer = {RENORM}, .draw = {ROUTER, LOSSES}},
    {"softmax-topk, renormalized, gradients of the losses", QUICK, .layer = {RENORM},
     .draw = {ROUTER, LOSSES, .loss_gradients = true}},
    {"softmax-topk, given logits", QUICK, .draw = {LOSSES}},
    {"softmax-topk, no losses", .draw = {.router = true}},
    {"topk-softmax", QUICK, .layer = {SCORE(TOPK_SOFTMAX), .topk = 3}, .draw = {ROUTER}},
    {"topk-softmax, scaled", .layer = {SCORE(TOPK_SOFTMAX), .route_scale = 2.5f}, .draw = {ROUTER, LOSSES}},
    {"sigmoid", QUICK, .layer = {SCORE(SIGMOID)}, .draw = {ROUTER}},
    {"sigmoid, selection bias", .layer = {SCORE(SIGMOID)}, .draw = {ROUTER, LOSSES, SELECTION_BIAS}},
    {"sigmoid, renormalized", .layer = {SCORE(SIGMOID), RENORM}, .draw = {SELECTION_BIAS}},
    {"sigmoid, groups", QUICK,
     .layer = {SCORE(SIGMOID), RENORM, .experts = 16, .topk = 4, GROUPS(4, 2), .route_scale = 2.5f},
     .draw = {ROUTER, LOSSES, SELECTION_BIAS}},
    {"sigmoid, 1 of 2 groups", .layer = {SIZES(300, 16, 8, 24, 4), SCORE(SIGMOID), RENORM, GROUPS(2, 1)},
     .draw = {SELECTION_BIAS}},
    {"sigmoid, 3 of 8 groups", .layer = {SIZES(300, 16, 8, 24, 6), SCORE(SIGMOID), GROUPS(8, 3)},
     .draw = {SELECTION_BIAS, LOSSES}},
    {"sigmoid, all of 8 groups", .layer = {SIZES(300, 16, 8, 24, 12), SCORE(SIGMOID), GROUPS(8, 8)},
     .draw = {SELECTION_BIAS}},
    {"sigmoid, 2 of 12 groups", .layer = {SIZES(300, 16, 8, 24, 4), SCORE(SIGMOID), GROUPS(12, 2)},
     .draw = {ROUTER, SELECTION_BIAS}},
    {"bf16 logits", QUICK, .layer = {BF16_LOGITS}, .draw = {ROUTER, LOSSES}},
    {"sigmoid, gradients of the losses", .layer = {SCORE(SIGMOID), RENORM},
     .draw = {ROUTER, LOSSES, .loss_gradients = true}},
    {"bf16 logits, sigmoid", .layer = {BF16_LOGITS, SCORE(SIGMOID)}, .draw = {LOSSES}},

    /* exp of each logit is 0 in f32, but not that of its difference to the token's largest */
    {"low logits", .draw = {.shift = -128}},
    {"low logits, renormalized, round nr-f", .layer = {RENORM, ROUND(NR_F)}, .draw = {.shift = -128}},
    {"low logits, topk-softmax", .layer = {SCORE(TOPK_SOFTMAX)}, .draw = {.shift = -128}},
    {"low logits, round nr-f", .layer = {ROUND(NR_F)}, .draw = {.shift = -128, LOSSES}},

    /* a token mask: some tokens, or all, are not in the losses and the counts */
    {"masked", QUICK, .draw = {ROUTER, LOSSES, .masked = 3}},
    {"masked, all tokens", QUICK, .layer = {RENORM}, .draw = {ROUTER, LOSSES, .masked = 1}},
    {"masked, no losses", .layer = {SCORE(TOPK_SOFTMAX)}, .draw = {ROUTER, .masked = 3}},
    {"masked, sigmoid, round balance-f", QUICK, .layer = {SCORE(SIGMOID), ROUND(BALANCE_F)},
     .draw = {ROUTER, LOSSES, SELECTION_BIAS, .masked = 2}},
    {"masked, bf16 logits, round up", .layer = {BF16_LOGITS, ROUND(UP), RENORM},
     .draw = {LOSSES, .masked = 5}},
    {"masked, one takes all, round nr-s", .layer = {ROUND(NR_S)}, .draw = {LOSSES, ONE_EXPERT, .masked = 2}},

    /* rounding */
    {"round nr-f", QUICK, .layer = {ROUND(NR_F)}, .draw = {ROUTER, LOSSES}},
    {"round sr-f", QUICK, .layer = {ROUND(SR_F), .seed = 0x123456789abcdef0u},
     .draw = {ROUTER, .step = 0x1000000007u}},
    {"round nr-s", QUICK, .layer = {ROUND(NR_S)}, .draw = {ROUTER}},
    {"round balance-f", QUICK, .layer = {ROUND(BALANCE_F)}, .draw = {ROUTER, LOSSES}},
    {"round up", QUICK, .layer = {ROUND(UP)}, .draw = {ROUTER}},
    {"round down", QUICK, .layer = {ROUND(DOWN)}, .draw = {ROUTER}},
    {"round up, tile 1", .layer = {ROUND(UP), .tile = 1}},
    {"round up, tile 7", .layer = {ROUND(UP), .tile = 7}},
    {"round nr-f, tile past T", .layer = {ROUND(NR_F), .tile = 256}},
    {"round up, renormalized", .layer = {ROUND(UP), RENORM}, .draw = {ROUTER, LOSSES}},
    {"round nr-s, topk-softmax", .layer = {ROUND(NR_S), SCORE(TOPK_SOFTMAX), .route_scale = 1.5f}},
    {"round nr-f, sigmoid", QUICK, .layer = {ROUND(NR_F), SCORE(SIGMOID), .route_scale = 1.5f},
     .draw = {ROUTER, SELECTION_BIAS}},
    {"round up, sigmoid renormalized", .layer = {ROUND(UP), SCORE(SIGMOID), RENORM},
     .draw = {SELECTION_BIAS}},
    {"round nr-s, bf16 logits", QUICK, .layer = {ROUND(NR_S), BF16_LOGITS}},
    {"round balance-f, bf16 logits", .layer = {ROUND(BALANCE_F), BF16_LOGITS}},
    {"round up, ties", QUICK, .layer = {ROUND(UP)}, .draw = {TIES}},
    {"round nr-s, ties", .layer = {ROUND(NR_S)}, .draw = {TIES}},
    {"round nr-f, one takes all", .layer = {ROUND(NR_F)}, .draw = {ONE_EXPERT}},
    {"round nr-f, counts at halves", QUICK, .layer = {ROUND(NR_F), .tokens = HALF_TOKENS, .topk = 1},
     .draw = {COUNTS(half_counts)}},
    {"round balance-f, counts at halves", QUICK,
     .layer = {ROUND(BALANCE_F), .tokens = HALF_TOKENS, .topk = 1}, .draw = {COUNTS(half_counts)}},
    {"round nr-s, counts at halves", .layer = {ROUND(NR_S), .tokens = HALF_TOKENS, .topk = 1},
     .draw = {COUNTS(half_counts)}},
    {"round sr-f, counts at halves", .layer = {ROUND(SR_F), .tokens = HALF_TOKENS, .topk = 1},
     .draw = {COUNTS(half_counts)}},
    {"round down, counts at halves", .layer = {ROUND(DOWN), .tokens = HALF_TOKENS, .topk = 1},
     .draw = {COUNTS(half_counts)}},
    {"round up to T", QUICK, .layer = {ROUND(UP), .tokens = FULL_TOKENS, .topk = 1},
     .draw = {COUNTS(full_counts)}},

    EVERY_RULE("softmax", SOFTMAX_TOPK, .route_scale = 1.25f),
    EVERY_RULE("softmax, renormalized", SOFTMAX_TOPK, RENORM),
    EVERY_RULE("topk-softmax", TOPK_SOFTMAX, .route_scale = 1.25f),
    EVERY_RULE("sigmoid", SIGMOID, .route_scale = 1.25f),
    EVERY_RULE("sigmoid, renormalized, groups", SIGMOID, RENORM, GROUPS(3, 2)),

    /* routings */
    {"one expert takes all", QUICK, .draw = {ONE_EXPERT, BIASES}},
    {"half the experts empty", QUICK, .draw = {HALF_EMPTY, BIASES}},
    {"ties", QUICK, .draw = {TIES}},
    {"counts 0 to 65", QUICK, .layer = {.tokens = SMALL_TOKENS, .topk = 1},
     .draw = {COUNTS(small_counts), BIASES}},
    {"counts 127 to 320", .layer = {.tokens = BLOCK_TOKENS, .topk = 1}, .draw = {COUNTS(block_counts)}},
    {"counts 255 to 257", .layer = {.tokens = LARGE_TOKENS, .topk = 1, .experts = 4},
     .draw = {COUNTS(large_counts)}},
    {"K = 1, E = 1", QUICK, .layer = {.topk = 1, .experts = 1}, .draw = {ROUTER, LOSSES}},
    {"K = E", QUICK, .layer = {.topk = 8}, .draw = {ROUTER, LOSSES}},
    {"K = E, topk-softmax", .layer = {.topk = 8, SCORE(TOPK_SOFTMAX)}, .draw = {ROUTER}},
    {"K = 16, E = 64", .layer = {.topk = 16, .experts = 64}, .draw = {ROUTER, LOSSES}},
    {"E = 256", .layer = {.topk = 8, .experts = 256, .hidden = 32, .intermediate = 8}, .draw = {ROUTER}},
    {"T = 1", QUICK, .layer = {.tokens = 1}, .draw = {ROUTER, LOSSES, BIASES}},
    {"T = 33", .layer = {.tokens = 33}, .draw = {ROUTER}},
    {"d = 8, n = 8", QUICK, .layer = {.hidden = 8, .intermediate = 8}, .draw = {ROUTER, BIASES}},
    {"d = 200, n = 72", .layer = {.hidden = 200, .intermediate = 72}, .draw = {ROUTER, BIASES}},
    {"d = 72, n = 136", .layer = {.hidden = 72, .intermediate = 136, .topk = 3}, .draw = {ROUTER}},
    {"d = 8, n = 8, E = 1, T = 1", .layer = {SIZES(1, 8, 8, 1, 1)}, .draw = {BIASES, .router = true}},
    {"d = 8, n = 8, E = 1, T = 1, given topk", .layer = {SIZES(1, 8, 8, 1, 1), TOPK}, .draw = {BIASES}},
    {"d = 8, n = 8, E = 1, T = 1, rows", .layer = {SIZES(1, 8, 8, 1, 1), ROWS}, .draw = {BIASES}},
    {"d = 72, n = 40: several row panels", .layer = {SIZES(600, 72, 40, 3, 2), TOPK},
     .draw = {ONE_EXPERT, BIASES}},
    {"d = 72, n = 40: several row panels, geglu", .layer = {SIZES(500, 72, 40, 2, 2), ACT(GEGLU)},
     .draw = {.router = true}},
    {"d = 584, n = 328: several panels, rows", .layer = {SIZES(40, 584, 328, 2, 1), ROWS},
     .draw = {BIASES, WEIGHTED}},
    {"d = 584, n = 328: several panels, rows, interleaved",
     .layer = {SIZES(40, 584, 328, 2, 1), ROWS, INTERLEAVED}, .draw = {BIASES, WEIGHTED}},
    {"d = 584, n = 264: several panels, accumulated",
     .layer = {.accumulate = 1, .tokens = 300, .hidden = 584, .intermediate = 264, .experts = 2, .topk = 1},
     .draw = {.router = true, BIASES}},

    /* FROM_TOPK and FROM_ROWS */
    {"given topk", QUICK, .layer = {TOPK, .topk = 3}, .draw = {BIASES}},
    {"given topk, broken ids", QUICK, .layer = {TOPK, .topk = 3}, .draw = {BROKEN_IDS, BIASES}},
    {"given topk, broken 64-bit ids", .layer = {TOPK, .topk = 3, INDEX_64}, .draw = {BROKEN_IDS}},
    {"given topk, K = E = 64, broken ids", .layer = {SIZES(600, 8, 8, 64, 64), TOPK}, .draw = {BROKEN_IDS}},
    {"given topk, E = 300, K = 16", .layer = {SIZES(40, 8, 8, 300, 16), TOPK}, .draw = {BROKEN_IDS}},
    {"given topk, E = 700, a count of 770", .layer = {SIZES(770, 8, 8, 700, 2), TOPK}, .draw = {ONE_EXPERT}},
    {"given topk, counts 0 to 65", .layer = {TOPK, .tokens = SMALL_TOKENS, .topk = 1},
     .draw = {COUNTS(small_counts)}},
    {"given topk, one takes all", .layer = {TOPK}, .draw = {ONE_EXPERT}},
    {"rows", QUICK, .layer = {ROWS}, .draw = {BIASES}},
    {"rows, weighted", QUICK, .layer = {ROWS}, .draw = {WEIGHTED, BIASES}},
    {"rows, 64-bit offsets", .layer = {ROWS, INDEX_64}, .draw = {WEIGHTED}},
    {"rows, counts 0 to 65", QUICK, .layer = {ROWS, .tokens = SMALL_TOKENS + 5},
     .draw = {COUNTS(small_counts), WEIGHTED}},
    {"rows, half empty", .layer = {ROWS}, .draw = {HALF_EMPTY}},

    /* stages, gradients, chunks */
    {"stage by stage", QUICK, .stages = true, .draw = {ROUTER, BIASES}},
    {"stage by stage, rounded", .stages = true, .layer = {ROUND(NR_F)}, .draw = {ROUTER}},
    {"accumulate twice", QUICK, .layer = {.accumulate = 1}, .draw = {ROUTER, LOSSES, BIASES}},
    {"accumulate, rows", .layer = {.accumulate = 1, ROWS}, .draw = {BIASES}},
    {"gradients in the storage type", QUICK, .layer = {G16}, .draw = {ROUTER, BIASES}},
    {"4 chunks", QUICK, .layer = {.chunks = 4, .hidden = 208}, .draw = {ROUTER, LOSSES, BIASES}},
    {"reuse saved", QUICK, .layer = {.reuse_saved = 1}, .draw = {ROUTER, BIASES}},

    /* bits */
    {"integers, given topk", QUICK, .layer = {TOPK, ACT(RELU), .topk = 3}, .draw = {DENSE, BIASES}},
    {"integers, broken ids, chunks", .layer = {TOPK, ACT(RELU), .topk = 3, .hidden = 72, .chunks = 2},
     .draw = {DENSE, BROKEN_IDS}},
    {"integers, counts 0 to 65", QUICK, .layer = {TOPK, ACT(RELU), .tokens = SMALL_TOKENS, .topk = 1},
     .draw = {COUNTS(small_counts), DENSE, BIASES}},
    {"integers, counts 127 to 320", .layer = {TOPK, ACT(RELU), .tokens = BLOCK_TOKENS, .topk = 1},
     .draw = {COUNTS(block_counts), DENSE}},
    {"integers, rows", QUICK, .layer = {ROWS, ACT(RELU)}, .draw = {DENSE, WEIGHTED, BIASES}},
    {"integers, gate", QUICK, .layer = {TOPK, ACT(REGLU), .hidden = 16, .intermediate = 8}, .draw = {DENSE}},
    {"integers, interleaved gate", QUICK,
     .layer = {TOPK, ACT(REGLU), .hidden = 16, .intermediate = 8, INTERLEAVED}, .draw = {DENSE}},
    {"integers, relu2, rows", QUICK,
     .layer = {ROWS, ACT(RELU2), .hidden = 32, .intermediate = 8, .chunks = 4},
     .draw = {SPARSE(16), WEIGHTED}},
    {"integers, interleaved gate, half empty",
     .layer = {TOPK, ACT(REGLU), INTERLEAVED, SIZES(150, 200, 56, 4, 2)},
     .draw = {SPARSE(8), HALF_EMPTY, BIASES}},
    {"integers, no rows, given topk", QUICK, .layer = {TOPK, SIZES(20, 16, 8, 3, 1)},
     .draw = {DENSE, COUNTS(no_rows), BIASES}},
    {"integers, no rows, rows", .layer = {ROWS, SIZES(20, 16, 8, 3, 1)},
     .draw = {DENSE, COUNTS(no_rows), WEIGHTED, BIASES}},
    {"same bits", CHECK(BITS), QUICK, .layer = {.hidden = 256}, .draw = {ROUTER, LOSSES, BIASES}},
    {"same bits, larger", CHECK(BITS), .layer = {.tokens = 700, .hidden = 256, .intermediate = 72, .topk = 4},
     .draw = {ROUTER, LOSSES, BIASES}},
    {"same bits, rounded", CHECK(BITS), .layer = {.hidden = 256, ROUND(NR_S)}, .draw = {ROUTER, LOSSES}},
    {"same bits, round up", CHECK(BITS), .layer = {.tokens = 900, ROUND(UP)}, .draw = {ROUTER}},
    {"same bits, round sr-f, sigmoid", CHECK(BITS), .layer = {.tokens = 900, ROUND(SR_F), SCORE(SIGMOID)},
     .draw = {SELECTION_BIAS}},
    {"same bits, round balance-f", CHECK(BITS), .layer = {.tokens = 900, ROUND(BALANCE_F), BF16_LOGITS}},
    {"same bits, given topk", CHECK(BITS), .layer = {.hidden = 256, TOPK}, .draw = {BIASES}},
    {"same bits, rows", CHECK(BITS), QUICK, .layer = {.hidden = 200, ROWS}, .draw = {WEIGHTED, BIASES}},
    /* OpenBLAS has another code path for small products (m n k up to about a million) */
    {"same bits, small products", CHECK(BITS), .layer = {SIZES(40, 136, 8, 4, 2), TOPK},
     .draw = {BIASES, BROKEN_IDS}},
    {"same bits, medium products", CHECK(BITS), .layer = {SIZES(300, 328, 48, 3, 2), INTERLEAVED},
     .draw = {BIASES, .router = true}},
    {"same bits, large products", CHECK(BITS), .layer = {SIZES(400, 200, 264, 2, 2), TOPK}, .draw = {BIASES}},

    {"repeats beside copies", CHECK(REPEATS), .layer = {SIZES(700, 256, 72, 8, 4)},
     .draw = {ROUTER, LOSSES, BIASES}},
    {"repeats beside copies, n = 256", CHECK(REPEATS), .layer = {SIZES(300, 384, 256, 4, 2), TOPK}},
    {"repeats beside copies, n = 512", CHECK(REPEATS), .layer = {SIZES(300, 192, 512, 4, 2), TOPK}},
    {"repeats beside copies, d = 768, n = 256", CHECK(REPEATS),
     .layer = {SIZES(512, 768, 256, 4, 2), TOPK, G16}},
    {"repeats beside copies, d = 512, n = 1024, chunks", CHECK(REPEATS),
     .layer = {SIZES(512, 512, 1024, 2, 1), TOPK, G16, .chunks = 2}},

    /* any subset of the gradients may be wanted */
    {"gradients, dense dlogits", CHECK(GRADIENTS), TYPES(F32, BF16), .layer = {SIZES(90, 72, 24, 6, 2), G16},
     .draw = {ROUTER, BIASES}},
    {"gradients, sparse dlogits", CHECK(GRADIENTS), ONLY(BF16), .draw = {ROUTER, BIASES},
     .layer = {SIZES(90, 72, 24, 6, 2), RENORM, G16, .accumulate = 1}},
    {"gradients, given logits, rounded, a loss", CHECK(GRADIENTS), ONLY(BF16),
     .draw = {.balance_coefficient = 0.5},
     .layer = {SIZES(90, 72, 24, 6, 2), SCORE(SIGMOID), ACT(RELU2), ROUND(UP), .tile = 8, G16,
               .reuse_saved = 1}},
    {"gradients, given topk", CHECK(GRADIENTS), TYPES(F32, BF16), .draw = {BIASES, BROKEN_IDS},
     .layer = {SIZES(90, 80, 48, 6, 2), TOPK, G16, .reuse_saved = 1}},
    {"gradients, rows", CHECK(GRADIENTS), ONLY(BF16), .draw = {WEIGHTED},
     .layer = {SIZES(90, 72, 24, 6, 1), ROWS, G16, .chunks = 2}},

    /* values that are not numbers: every GEMM of the cuda backend */
    NAN_EXPERT(700, 72, 40),
    NAN_EXPERT(700, 192, 256),
    NAN_EXPERT(700, 256, 320),
    NAN_EXPERT(700, 384, 512),
    NAN_EXPERT(700, 512, 256),
    {"NaN in an expert of few rows", CHECK(ISOLATION), .layer = {SIZES(30, 72, 40, 6, 1), TOPK},
     .draw = {BIASES}},
    {"NaN in an expert and its tokens", CHECK(ISOLATION), QUICK,
     .layer = {TOPK, .tokens = SMALL_TOKENS, .topk = 1}, .draw = {COUNTS(small_counts), BIASES}},
    {"NaN in rows", CHECK(ISOLATION), .layer = {ROWS}, .draw = {TIES, BIASES}},
    {"NaN logits", CHECK(NAN_LOGITS), QUICK, .layer = {.topk = 3}},
    {"NaN logits, sigmoid", CHECK(NAN_LOGITS), .layer = {.topk = 3, SCORE(SIGMOID)}},
    {"NaN logits, topk-softmax", CHECK(NAN_LOGITS), .layer = {.topk = 3, SCORE(TOPK_SOFTMAX)}},
    NAN_OF_13("softmax", .renormalize = 0),
    NAN_OF_13("softmax renormalized", RENORM),
    NAN_OF_13("topk-softmax", SCORE(TOPK_SOFTMAX)),
    NAN_OF_13("sigmoid", SCORE(SIGMOID)),
    NAN_OF_13("sigmoid renormalized", SCORE(SIGMOID), RENORM),

    /* small things */
    {"selection bias update", CHECK(BIAS_UPDATE), QUICK, ONLY(F32)},
    {"saved bytes", CHECK(SAVED_BYTES), QUICK, .draw = {ROUTER}},
    {"saved bytes, no gate", CHECK(SAVED_BYTES), .layer = {ACT(GELU)}},
    {"saved bytes, rounded", CHECK(SAVED_BYTES), .layer = {ROUND(UP)}},
    {"saved bytes, rows", CHECK(SAVED_BYTES), .layer = {ROWS}},
};

const layer_case *case_at(size_t i)
{
    const size_t count = sizeof cases / sizeof cases[0];
    if (i < count) return &cases[i];
    return i - count < moe_kernel_case_count ? &moe_kernel_cases[i - count] : NULL;
}

smoe_layer case_layer(const layer_case *c, smoe_type dtype)
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
