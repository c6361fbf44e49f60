/* The stage route where results are known by hand: ties, NaN and infinite logits, a token mask. The table of
 * cases (harness/cases.h) compares scores, groups and losses with the oracle. */
#include "routing_case.h"

#include <math.h>

enum { MAX_EXPERTS = 64 };

typedef struct router_case {
    routing_case c;
    float *logits;  /* (T, E) f32, as the library sees them */
    uint16_t *bf16; /* (T, E) */
    float *bias;    /* (E) */
    float *losses;  /* (2) */
} router_case;

/* Logits of a token differ by more than f32 noise, so that rankings in double are the same. */
static void set_separate_logits(router_case *r, uint64_t *random)
{
    const smoe_layer *l = &r->c.layer;
    for (int64_t t = 0; t < l->tokens; t++) {
        float *row = r->logits + t * l->experts;
        const float shift =
            t % 3 == 0 && l->score != SMOE_SCORE_SIGMOID ? -200.0f : 0.0f; /* exp is 0 there */
        for (int64_t e = 0; e < l->experts; e++) row[e] = (float)(e - l->experts / 2) * 0.25f + shift;
        for (int64_t e = l->experts - 1; e > 0; e--) {
            const int64_t other = draw_below(random, e + 1);
            const float swap = row[e];
            row[e] = row[other];
            row[other] = swap;
        }
    }
    for (int64_t e = 0; e < l->experts; e++) r->bias[e] = draw_float(random);
}

static router_case open_router(const smoe_layer *layer, int threads)
{
    const uint64_t cells = (uint64_t)(layer->tokens * layer->experts);
    router_case r = {open_case(layer, threads), poisoned(4 * cells), poisoned(2 * cells),
                     poisoned(4 * (uint64_t)layer->experts), poisoned(8)};
    uint64_t random = 3;
    set_separate_logits(&r, &random);
    r.c.args.losses = r.losses;
    if (layer->score == SMOE_SCORE_SIGMOID) r.c.args.selection_bias = r.bias;
    return r;
}

static void run_router(router_case *r)
{
    const smoe_layer *l = &r->c.layer;
    const int bf16 = l->logits_type == SMOE_TYPE_BF16;
    for (int64_t i = 0; i < l->tokens * l->experts; i++) {
        r->bf16[i] = bf16_of_float(r->logits[i]);
        if (bf16) r->logits[i] = float_of_bf16(r->bf16[i]);
    }
    r->c.args.logits = bf16 ? (void *)r->bf16 : r->logits;
    run_case(&r->c);
    check_canary(r->losses, 8);
}

static void close_router(router_case *r)
{
    close_case(&r->c);
    free(r->logits);
    free(r->bf16);
    free(r->bias);
    free(r->losses);
}

static smoe_layer scored_layer(int64_t tokens, int64_t experts, int64_t topk, smoe_score score,
                               int renormalize)
{
    smoe_layer layer = routing_layer(tokens, experts, topk);
    layer.score = score;
    layer.renormalize = renormalize;
    layer.route_scale = 1.5f;
    return layer;
}

static void ties_go_to_the_lower(void **state)
{
    (void)state;
    for (int score = 0; score < 3; score++) {
        smoe_layer layer = scored_layer(70, 8, 3, (smoe_score)score, 0);
        layer.route_scale = 1.0f;
        if (score == SMOE_SCORE_SIGMOID) {
            layer.groups = 4;
            layer.groups_kept = 2;
        }
        router_case r = open_router(&layer, 2);
        r.c.args.selection_bias = NULL;
        for (int64_t i = 0; i < 70 * 8; i++) r.logits[i] = i % 3 ? 0.0f : -0.0f; /* the zeros tie as well */
        run_router(&r);
        const float weight = score == SMOE_SCORE_SOFTMAX_TOPK ? 0.125f
                             : score == SMOE_SCORE_SIGMOID    ? 0.5f
                                                              : 1.0f / 3.0f;
        for (int64_t i = 0; i < 70 * 3; i++) {
            assert_int_equal(r.c.plan.topk_ids[i], i % 3);
            assert_true(r.c.plan.topk_weights[i] == weight);
        }
        close_router(&r);
    }
}

/* Some tokens have strange logits: a NaN that must be selected, a NaN that need not be selected, infinities,
 * all NaN, all -inf. All other tokens must have the same bits as without these tokens. */
static void strange_logits_stay_at_home(void **state)
{
    (void)state;
    for (int score = 0; score < 3; score++) {
        const smoe_layer layer = scored_layer(20, 4, 3, (smoe_score)score, score == SMOE_SCORE_SIGMOID);
        router_case plain = open_router(&layer, 1), r = open_router(&layer, 1);
        const float strange[5][4] = {{NAN, 1.0f, NAN, 2.0f},
                                     {2.0f, NAN, 3.0f, 1.0f},
                                     {INFINITY, 1.0f, -INFINITY, 2.0f},
                                     {NAN, NAN, NAN, NAN},
                                     {-INFINITY, -INFINITY, -INFINITY, -INFINITY}};
        memcpy(r.logits + 4 * 4, strange, sizeof strange);
        plain.c.args.selection_bias = r.c.args.selection_bias = NULL;
        run_router(&plain);
        run_router(&r);
        const int32_t *ids = r.c.plan.topk_ids;
        const float *weights = r.c.plan.topk_weights;
        for (int64_t i = 0; i < 20 * 3; i++) {
            if (i >= 4 * 3 && i < 9 * 3) continue;
            assert_int_equal(ids[i], plain.c.plan.topk_ids[i]);
            assert_true(weights[i] == plain.c.plan.topk_weights[i]);
        }
        static const int32_t wanted[5][3] = {{3, 1, 0}, {2, 0, 3}, {0, 3, 1}, {0, 1, 2}, {0, 1, 2}};
        for (int i = 0; i < 5; i++) {
            const int nan = i == 0 || i == 3;
            for (int k = 0; k < 3; k++) {
                assert_int_equal(ids[(4 + i) * 3 + k], wanted[i][k]);
                assert_int_equal(isnan(weights[(4 + i) * 3 + k]) != 0, nan);
            }
        }
        const float *infinite = weights + 6 * 3, *uniform = weights + 8 * 3;
        if (score != SMOE_SCORE_SIGMOID) assert_true(infinite[0] == layer.route_scale && infinite[1] == 0.0f);
        if (score == SMOE_SCORE_SOFTMAX_TOPK) assert_true(uniform[0] == 0.25f * layer.route_scale);
        if (score == SMOE_SCORE_SIGMOID) assert_true(uniform[0] == 0.0f); /* 0 / 0 would be NaN */
        close_router(&plain);
        close_router(&r);
    }
}

/* If two of a token's logits are +inf, a softmax must give each half of the weight. One such token must make
 * the z-loss +inf. */
static void infinite_logits_share_the_weight(void **state)
{
    (void)state;
    for (int score = 0; score < 3; score++) {
        const smoe_layer layer = scored_layer(20, 4, 3, (smoe_score)score, 0);
        const float each = score == SMOE_SCORE_SIGMOID ? 1.0f : 0.5f,
                    infinite[] = {INFINITY, 1.0f, INFINITY, 2.0f};
        router_case r = open_router(&layer, 2);
        memcpy(r.logits + 4 * 4, infinite, sizeof infinite);
        r.c.args.selection_bias = NULL;
        run_router(&r);
        const float *weights = r.c.plan.topk_weights + 4 * 3, scale = layer.route_scale;
        const int32_t wanted[] = {0, 2, 3};
        assert_memory_equal(r.c.plan.topk_ids + 4 * 3, wanted, sizeof wanted);
        assert_true(weights[0] == each * scale && weights[1] == each * scale);
        if (score != SMOE_SCORE_SIGMOID) assert_true(weights[2] == 0.0f);
        const float z_loss = ((const float *)r.c.args.losses)[1];
        assert_true(isinf(z_loss) && z_loss > 0.0f);
        close_router(&r);
    }
}

/* Losses and counts of a layer with a mask must be those of a layer that has only the counted tokens,
 * whatever the logits of the others are; and all tokens must be routed as without a mask. */
static void masked_tokens_leave_losses_and_counts(void **state)
{
    (void)state;
    enum { TOKENS = 700, COUNTED = 466, EXPERTS = 12 };
    uint8_t bytes[TOKENS + 1], *const mask = bytes + 1; /* not aligned */
    for (int t = 0; t < TOKENS; t++) mask[t] = t % 3 ? (uint8_t)(t % 255 + 1) : 0;
    for (int rounded = 0; rounded < 2; rounded++) {
        smoe_layer layer = scored_layer(TOKENS, EXPERTS, 3, SMOE_SCORE_SOFTMAX_TOPK, 1), fewer = layer;
        layer.rounding = rounded ? SMOE_ROUNDING_BALANCE_F : SMOE_ROUNDING_NONE, layer.tile = 16;
        fewer.tokens = COUNTED;
        router_case all = open_router(&layer, 2), masked = open_router(&layer, 2),
                    kept = open_router(&fewer, 1);
        int64_t row = 0;
        for (int t = 0; t < TOKENS; t++) {
            const float strange[] = {NAN, INFINITY, -INFINITY, 3e38f};
            if (!mask[t]) masked.logits[t * EXPERTS + t % EXPERTS] = strange[t / 3 % 4];
            if (mask[t])
                memcpy(kept.logits + row++ * EXPERTS, masked.logits + t * EXPERTS, sizeof(float) * EXPERTS);
        }
        assert_int_equal(row, fewer.tokens);
        memcpy(all.logits, masked.logits, sizeof(float) * TOKENS * EXPERTS);
        masked.c.args.token_mask = mask;
        run_router(&all), run_router(&masked), run_router(&kept);
        assert_memory_equal(masked.c.plan.topk_ids, all.c.plan.topk_ids, sizeof(int32_t) * TOKENS * 3);
        assert_memory_equal(masked.c.plan.counts, all.c.plan.counts, sizeof(int32_t) * EXPERTS);
        assert_memory_equal(masked.c.plan.topk_counts, kept.c.plan.topk_counts, sizeof(int32_t) * EXPERTS);
        for (int i = 0; i < 2; i++)
            assert_true(fabsf(masked.losses[i] - kept.losses[i]) <= 1e-6f * fabsf(kept.losses[i]));
        memset(mask, 0, TOKENS);
        run_router(&masked);
        for (int e = 0; e < EXPERTS; e++) assert_int_equal(masked.c.plan.topk_counts[e], 0);
        assert_true(masked.losses[0] == 0.0f && masked.losses[1] == 0.0f);
        for (int t = 0; t < TOKENS; t++) mask[t] = t % 3 ? 1 : 0;
        close_router(&all), close_router(&masked), close_router(&kept);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ties_go_to_the_lower),
        cmocka_unit_test(strange_logits_stay_at_home),
        cmocka_unit_test(infinite_logits_share_the_weight),
        cmocka_unit_test(masked_tokens_leave_losses_and_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
