/* The stage route: logits, top-K, weights of every score function and losses compared with plain arithmetic
 * in double; ties, NaN and infinite logits; groups; the update of the selection bias; equal bits for 1, 2 and
 * 3 threads. */
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

/* ---- the same in double ---- */

static double sigmoid_of(double x)
{
    return 1.0 / (1.0 + exp(-x));
}

static double selection_score(const router_case *r, const float *logits, int64_t e)
{
    if (r->c.layer.score != SMOE_SCORE_SIGMOID) return (double)logits[e];
    return sigmoid_of((double)logits[e]) + (r->c.args.selection_bias ? (double)r->bias[e] : 0.0);
}

/* Whether a ranks before b. NaN ranks last; ties go to the lower index. */
static int before(double a, double b, int64_t ia, int64_t ib)
{
    if (isnan(a) || isnan(b)) return isnan(a) == isnan(b) ? ia < ib : isnan(b);
    return a > b || (a == b && ia < ib);
}

static double best_two(const double *scores, int64_t first, int64_t size)
{
    double best = -INFINITY;
    for (int64_t i = first; i < first + size; i++)
        for (int64_t j = i + 1; j < first + size; j++)
            if (scores[i] + scores[j] > best) best = scores[i] + scores[j];
    return best;
}

static void wanted_ids(const router_case *r, const float *logits, int32_t *ids)
{
    const smoe_layer *l = &r->c.layer;
    const int64_t size = l->experts / l->groups;
    double scores[MAX_EXPERTS], group[MAX_EXPERTS];
    int allowed[MAX_EXPERTS];
    for (int64_t e = 0; e < l->experts; e++) scores[e] = selection_score(r, logits, e);
    for (int64_t g = 0; g < l->groups; g++) group[g] = l->groups > 1 ? best_two(scores, g * size, size) : 0.0;
    for (int64_t e = 0; e < l->experts; e++) {
        int better = 0;
        for (int64_t g = 0; g < l->groups; g++) better += before(group[g], group[e / size], g, e / size);
        allowed[e] = better < l->groups_kept;
    }
    for (int64_t e = 0; e < l->experts; e++) {
        int64_t rank = 0;
        for (int64_t i = 0; i < l->experts; i++) rank += allowed[i] && before(scores[i], scores[e], i, e);
        if (allowed[e] && rank < l->topk) ids[rank] = (int32_t)e;
    }
}

static double softmax_sum(const float *logits, int64_t experts, double *max)
{
    double sum = 0.0;
    *max = -INFINITY;
    for (int64_t e = 0; e < experts; e++) *max = fmax(*max, (double)logits[e]);
    for (int64_t e = 0; e < experts; e++)
        if (!isnan(logits[e])) sum += (double)logits[e] == *max ? 1.0 : exp((double)logits[e] - *max);
    return sum;
}

static void wanted_weights(const smoe_layer *l, const float *logits, const int32_t *ids, double *weights)
{
    double kept = 0.0, max, sum = softmax_sum(logits, l->experts, &max);
    for (int64_t k = 0; k < l->topk; k++) {
        const double logit = (double)logits[ids[k]], p = logit == max ? 1.0 / sum : exp(logit - max) / sum;
        weights[k] = l->score == SMOE_SCORE_SIGMOID ? sigmoid_of(logit) : p;
        kept += weights[k];
    }
    const int divide = l->renormalize || l->score == SMOE_SCORE_TOPK_SOFTMAX;
    for (int64_t k = 0; k < l->topk; k++) weights[k] *= (double)l->route_scale / (divide ? kept : 1.0);
}

static void check_routing(const router_case *r)
{
    const smoe_layer *l = &r->c.layer;
    int32_t counts[MAX_EXPERTS] = {0};
    for (int64_t t = 0; t < l->tokens; t++) {
        int32_t ids[MAX_EXPERTS];
        double weights[MAX_EXPERTS];
        const float *logits = r->logits + t * l->experts;
        wanted_ids(r, logits, ids);
        wanted_weights(l, logits, ids, weights);
        for (int64_t k = 0; k < l->topk; k++) {
            const double got = (double)r->c.plan.topk_weights[t * l->topk + k];
            assert_int_equal(r->c.plan.topk_ids[t * l->topk + k], ids[k]);
            assert_true(fabs(got - weights[k]) <= 1e-6 * fabs(weights[k]));
            counts[ids[k]]++;
        }
    }
    for (int64_t e = 0; e < l->experts; e++) assert_int_equal(r->c.plan.topk_counts[e], counts[e]);
}

static void check_losses(const router_case *r)
{
    const smoe_layer *l = &r->c.layer;
    double mean_p[MAX_EXPERTS] = {0}, z = 0.0, balance = 0.0;
    const double tokens = (double)l->tokens;
    for (int64_t t = 0; t < l->tokens; t++) {
        double max, sum = softmax_sum(r->logits + t * l->experts, l->experts, &max);
        for (int64_t e = 0; e < l->experts; e++)
            if (!isnan(r->logits[t * l->experts + e]))
                mean_p[e] += exp((double)r->logits[t * l->experts + e] - max) / sum / tokens;
        z += pow(max + log(sum), 2) / tokens;
    }
    for (int64_t e = 0; e < l->experts; e++)
        balance += (double)l->experts * r->c.plan.topk_counts[e] / tokens * mean_p[e];
    assert_true(fabs((double)r->losses[0] - balance) <= 1e-6 * balance);
    assert_true(fabs((double)r->losses[1] - z) <= 1e-6 * z);
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

static void scores_and_losses(void **state)
{
    (void)state;
    static const struct {
        smoe_score score;
        int renormalize;
    } functions[] = {{SMOE_SCORE_SOFTMAX_TOPK, 0},
                     {SMOE_SCORE_SOFTMAX_TOPK, 1},
                     {SMOE_SCORE_TOPK_SOFTMAX, 0},
                     {SMOE_SCORE_SIGMOID, 0},
                     {SMOE_SCORE_SIGMOID, 1}};
    static const int64_t shapes[][3] = {{1, 1, 1},    {7, 2, 1},     {300, 8, 8},
                                        {257, 24, 5}, {600, 64, 16}, {31, 3, 2}};
    for (int f = 0; f < 5; f++) {
        for (int s = 0; s < 6; s++) {
            for (int bf16 = 0; bf16 < 2; bf16++) {
                smoe_layer layer = scored_layer(shapes[s][0], shapes[s][1], shapes[s][2], functions[f].score,
                                                functions[f].renormalize);
                layer.logits_type = bf16 ? SMOE_TYPE_BF16 : SMOE_TYPE_F32;
                router_case r = open_router(&layer, 2);
                run_router(&r);
                check_routing(&r);
                check_losses(&r);
                r.c.args.selection_bias = NULL;
                r.c.args.losses = NULL;
                run_router(&r);
                check_routing(&r);
                close_router(&r);
            }
        }
    }
}

static void groups_of_experts(void **state)
{
    (void)state;
    static const int32_t groups[][3] = {{2, 1, 4}, {4, 2, 3}, {8, 3, 6}, {8, 8, 12}, {12, 2, 4}, {1, 1, 24}};
    for (int i = 0; i < 6; i++) {
        smoe_layer layer = scored_layer(300, 24, groups[i][2], SMOE_SCORE_SIGMOID, 1);
        layer.groups = groups[i][0];
        layer.groups_kept = groups[i][1];
        router_case r = open_router(&layer, 2);
        run_router(&r);
        check_routing(&r);
        close_router(&r);
    }
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

/* ---- logits from the router's weight: small integers, so exact ---- */

static void check_logits(int64_t tokens, int64_t hidden, int64_t experts, smoe_type dtype,
                         smoe_type logits_type, int with_bias)
{
    smoe_layer layer = routing_layer(tokens, experts, 1);
    layer.hidden = hidden;
    layer.dtype = dtype;
    layer.logits_type = logits_type;
    router_case r = open_router(&layer, 2);
    const int64_t sizes[3] = {tokens * hidden, experts * hidden, experts};
    float *values[3];
    void *given[3];
    uint64_t random = 17;
    for (int i = 0; i < 3; i++) {
        values[i] = poisoned(4 * (uint64_t)sizes[i]);
        given[i] = dtype == SMOE_TYPE_F32 ? values[i] : poisoned(2 * (uint64_t)sizes[i]);
        for (int64_t j = 0; j < sizes[i]; j++) {
            values[i][j] = (float)(draw_below(&random, 5) - 2);
            if (dtype == SMOE_TYPE_BF16) ((uint16_t *)given[i])[j] = bf16_of_float(values[i][j]);
        }
    }
    const int64_t cells = tokens * experts;
    void *logits = poisoned((uint64_t)(logits_type == SMOE_TYPE_F32 ? 4 : 2) * (uint64_t)cells);
    r.c.args.x = given[0];
    r.c.args.router_weight = given[1];
    r.c.args.router_bias = with_bias ? given[2] : NULL;
    r.c.args.logits = logits;
    run_case(&r.c);
    check_canary(logits, (uint64_t)(logits_type == SMOE_TYPE_F32 ? 4 : 2) * (uint64_t)cells);
    for (int64_t i = 0; i < cells; i++) {
        const int64_t t = i / experts, e = i % experts;
        float want = with_bias ? values[2][e] : 0.0f;
        for (int64_t j = 0; j < hidden; j++) want += values[0][t * hidden + j] * values[1][e * hidden + j];
        const float got =
            logits_type == SMOE_TYPE_F32 ? ((float *)logits)[i] : float_of_bf16(((uint16_t *)logits)[i]);
        assert_true(got == want);
    }
    free(logits);
    for (int i = 0; i < 3; i++) {
        if (given[i] != values[i]) free(given[i]);
        free(values[i]);
    }
    close_router(&r);
}

static void logits_are_exact_on_integers(void **state)
{
    (void)state;
    for (int i = 0; i < 8; i++) {
        const smoe_type dtype = i & 1 ? SMOE_TYPE_BF16 : SMOE_TYPE_F32,
                        logits_type = i & 2 ? SMOE_TYPE_BF16 : SMOE_TYPE_F32;
        check_logits(300, 24, 5, dtype, logits_type, i & 4);
        check_logits(1, 8, 1, dtype, logits_type, i & 4);
        check_logits(513, 16, 33, dtype, logits_type, i & 4);
    }
}

/* ---- the rest ---- */

static void threads_do_not_matter(void **state)
{
    (void)state;
    smoe_layer layer = routing_layer(1000, 16, 3);
    layer.hidden = 64;
    float *x = poisoned(4 * 64000), *w = poisoned(4 * 1024), *logits[3], *losses[3];
    void *saved[3];
    uint64_t random = 23, bytes = 0;
    for (int i = 0; i < 64000; i++) x[i] = draw_float(&random);
    for (int i = 0; i < 1024; i++) w[i] = draw_float(&random);
    for (int i = 0; i < 3; i++) {
        routing_case c = open_case(&layer, i + 1);
        c.args.x = x;
        c.args.router_weight = w;
        c.args.logits = logits[i] = poisoned(4 * 16000);
        c.args.losses = losses[i] = poisoned(8);
        run_case(&c);
        bytes = c.args.saved_size;
        saved[i] = memcpy(malloc(bytes), c.args.saved, bytes);
        assert_memory_equal(logits[0], logits[i], 4 * 16000);
        assert_memory_equal(losses[0], losses[i], 8);
        assert_memory_equal(saved[0], saved[i], bytes);
        close_case(&c);
    }
    for (int i = 0; i < 3; i++) {
        free(logits[i]);
        free(losses[i]);
        free(saved[i]);
    }
    free(x);
    free(w);
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

static void selection_bias_follows_the_counts(void **state)
{
    (void)state;
    _Alignas(16) const int32_t counts[] = {3, 4, 5, 4, 0, 8};
    _Alignas(16) float bias[] = {1.0f, 1.0f, 1.0f, 1.0f, -0.5f, 0.0f};
    const float wanted[] = {1.25f, 1.0f, 0.75f, 1.0f, -0.25f, -0.25f};
    const smoe_layer layer = scored_layer(12, 6, 2, SMOE_SCORE_SIGMOID, 0);
    smoe_context *context;
    assert_int_equal(smoe_create(&context, NULL), SMOE_OK);
    assert_int_equal(smoe_update_selection_bias(context, &layer, counts, bias, 0.25f, NULL), SMOE_OK);
    for (int e = 0; e < 6; e++) assert_true(bias[e] == wanted[e]);
    smoe_destroy(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scores_and_losses),
        cmocka_unit_test(groups_of_experts),
        cmocka_unit_test(ties_go_to_the_lower),
        cmocka_unit_test(strange_logits_stay_at_home),
        cmocka_unit_test(infinite_logits_share_the_weight),
        cmocka_unit_test(logits_are_exact_on_integers),
        cmocka_unit_test(threads_do_not_matter),
        cmocka_unit_test(masked_tokens_leave_losses_and_counts),
        cmocka_unit_test(selection_bias_follows_the_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
