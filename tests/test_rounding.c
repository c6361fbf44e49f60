/* Compares the stage round with a brute force that sorts every expert's tokens: all rules, scores and key
 * widths, many tiles, strange logits. The brute force computes scores with routing_decisions.h, which
 * test_routing_decisions checks, and makes all decisions itself. */
#include "routing_case.h"
#include "routing_decisions.h"

#include <math.h>

typedef struct rounding_case {
    routing_case c;
    float *logits;  /* (T, E) f32, what the library sees after its bf16 copy too */
    uint16_t *bf16; /* (T, E) */
    float *bias;    /* (E) */
} rounding_case;

/* ---- the brute force ---- */

typedef struct ranked {
    int selected;
    float score; /* NaN ranks lowest */
    int64_t token;
} ranked;

static int compare_ranked(const void *left, const void *right)
{
    const ranked *a = left, *b = right;
    if (a->selected != b->selected) return b->selected - a->selected;
    if (isnan(a->score) != isnan(b->score)) return isnan(a->score) ? 1 : -1;
    if (a->score != b->score && !isnan(a->score)) return a->score < b->score ? 1 : -1;
    return a->token < b->token ? -1 : 1;
}

static float pair_probability(const rounding_case *r, int64_t t, int64_t e)
{
    const int64_t experts = r->c.layer.experts;
    const float *l = r->logits + t * experts;
    float max = -INFINITY;
    uint64_t sum = 0;
    for (int64_t i = 0; i < experts; i++)
        if (l[i] > max) max = l[i];
    for (int64_t i = 0; i < experts; i++) sum += moe_softmax_fixed(moe_softmax_term(l[i], max));
    return moe_softmax_term(l[e], max) / moe_softmax_sum(sum);
}

static float pair_score(const rounding_case *r, int64_t t, int64_t e)
{
    const smoe_layer *l = &r->c.layer;
    float score = pair_probability(r, t, e);
    if (l->score == SMOE_SCORE_SIGMOID) score = moe_sigmoid(r->logits[t * l->experts + e]) + r->bias[e];
    return l->logits_type == SMOE_TYPE_BF16 ? moe_round_to_bf16(score) : score;
}

static int64_t fixed_score(float score)
{
    return isnan(score) ? 0 : (int64_t)((double)score * 4294967296.0);
}

/* A random number of Philox4x32-10, computed by the definition of the algorithm. */
static double uniform_draw(uint64_t seed, uint64_t step, uint32_t expert)
{
    uint64_t c0 = step & 0xffffffffu, c1 = step >> 32, c2 = expert, c3 = 0;
    for (uint64_t i = 0; i < 10; i++) {
        const uint64_t k0 = ((seed & 0xffffffffu) + i * 0x9e3779b9u) & 0xffffffffu;
        const uint64_t k1 = ((seed >> 32) + i * 0xbb67ae85u) & 0xffffffffu;
        const uint64_t p0 = c0 * 0xd2511f53u, p1 = c2 * 0xcd9e8d57u;
        c0 = (p1 >> 32) ^ c1 ^ k0;
        c1 = p1 & 0xffffffffu;
        c2 = (p0 >> 32) ^ c3 ^ k1;
        c3 = p0 & 0xffffffffu;
    }
    return (double)c0 / 4294967296.0;
}

/* The number of an expert's ranked tokens that the rule keeps. c: the number of selected pairs; residual: the
 * error that BALANCE_F has carried over so far. */
static int64_t wanted_count(const rounding_case *r, const ranked *rank, int64_t expert, int64_t c,
                            int64_t residual)
{
    const smoe_layer *l = &r->c.layer;
    const int64_t tile = l->tile;
    int64_t lo = 0;
    if (l->rounding == SMOE_ROUNDING_NONE) return c;
    while (lo + tile <= c) lo += tile;
    if (c == lo || lo + tile > l->tokens) return lo;
    const int64_t hi = lo + tile;
    int64_t added = 0, dropped = 0;
    for (int64_t i = lo; i < c; i++) dropped += fixed_score(rank[i].score);
    for (int64_t i = c; i < hi; i++) added += fixed_score(rank[i].score);
    switch (l->rounding) {
    case SMOE_ROUNDING_NONE: break;
    case SMOE_ROUNDING_NR_F: return hi - c < c - lo ? hi : lo;
    case SMOE_ROUNDING_SR_F:
        return uniform_draw(l->seed, r->c.args.step, (uint32_t)expert) < (double)(c - lo) / (double)tile ? hi
                                                                                                         : lo;
    case SMOE_ROUNDING_NR_S: return added < dropped ? hi : lo;
    case SMOE_ROUNDING_BALANCE_F: return (double)(c + residual - lo) > (double)tile / 2.0 ? hi : lo;
    case SMOE_ROUNDING_UP: return hi;
    case SMOE_ROUNDING_DOWN: return lo;
    }
    return -1;
}

/* (T, E): 0 no row, 1 a kept pair, 2 an added one. */
static unsigned char *brute_force(const rounding_case *r)
{
    const smoe_layer *l = &r->c.layer;
    const int64_t tokens = l->tokens, experts = l->experts;
    unsigned char *rows = calloc((size_t)(tokens * experts), 1);
    ranked *rank = calloc((size_t)tokens, sizeof *rank);
    int64_t residual = 0;
    for (int64_t i = 0; i < tokens * l->topk; i++) rows[i / l->topk * experts + r->c.plan.topk_ids[i]] = 1;
    for (int64_t e = 0; e < experts; e++) {
        int64_t count = 0;
        for (int64_t t = 0; t < tokens; t++) {
            rank[t] = (ranked){rows[t * experts + e], pair_score(r, t, e), t};
            count += rows[t * experts + e];
        }
        assert_int_equal(r->c.plan.topk_counts[e], count);
        qsort(rank, (size_t)tokens, sizeof *rank, compare_ranked);
        const int64_t picked = wanted_count(r, rank, e, count, residual);
        residual += count - picked;
        for (int64_t i = 0; i < tokens; i++)
            rows[rank[i].token * experts + e] = i >= picked ? 0 : rank[i].selected ? 1 : 2;
    }
    free(rank);
    return rows;
}

/* ---- cases ---- */

typedef enum shape_of_logits {
    RANDOM,     /* -1..1 */
    SKEWED,     /* RANDOM, with higher logits for the lower experts */
    ONE_EXPERT, /* all tokens select the first K experts */
    HALF_EMPTY, /* no token selects the upper half of the experts */
    TIES,       /* three values */
    ALL_EQUAL,
    STRANGE, /* with NaN and both infinities */
    SHAPES
} shape_of_logits;

static float make_logit(shape_of_logits shape, uint64_t *random, int64_t e, const smoe_layer *l)
{
    const float x = 3.0f * draw_float(random);
    switch (shape) {
    case SKEWED: return x - (float)e * 6.0f / (float)l->experts;
    case ONE_EXPERT: return x + (e < l->topk ? 20.0f : 0.0f);
    case HALF_EMPTY: return x - (e >= (l->experts + 1) / 2 ? 20.0f : 0.0f);
    case TIES: return (float)draw_below(random, 3);
    case ALL_EQUAL: return 0.25f;
    case STRANGE: {
        static const float strange[] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f};
        return draw_below(random, 5) ? x : strange[draw_below(random, 5)];
    }
    default: return x;
    }
}

static void set_logits(rounding_case *r, shape_of_logits shape, uint64_t *random)
{
    const smoe_layer *l = &r->c.layer;
    for (int64_t i = 0; i < l->tokens * l->experts; i++) {
        r->logits[i] = make_logit(shape, random, i % l->experts, l);
        r->bf16[i] = bf16_of_float(r->logits[i]);
        if (l->logits_type == SMOE_TYPE_BF16) r->logits[i] = float_of_bf16(r->bf16[i]);
    }
    for (int64_t e = 0; e < l->experts; e++) r->bias[e] = draw_float(random);
}

static rounding_case open_rounding(const smoe_layer *layer, shape_of_logits shape, uint64_t seed, int threads)
{
    const uint64_t cells = (uint64_t)(layer->tokens * layer->experts);
    rounding_case r = {open_case(layer, threads), poisoned(4 * cells), poisoned(2 * cells),
                       poisoned(4 * (uint64_t)layer->experts)};
    set_logits(&r, shape, &seed);
    r.c.args.logits = layer->logits_type == SMOE_TYPE_BF16 ? (void *)r.bf16 : r.logits;
    r.c.args.step = seed >> 7;
    if (layer->score == SMOE_SCORE_SIGMOID) r.c.args.selection_bias = r.bias;
    run_case(&r.c);
    return r;
}

static void close_rounding(rounding_case *r)
{
    close_case(&r->c);
    free(r->logits);
    free(r->bf16);
    free(r->bias);
}

typedef struct wanted_user {
    const rounding_case *r;
    const unsigned char *rows;
} wanted_user;

static int wanted_rounded(const void *user, int64_t t, int64_t e, float *weight)
{
    const wanted_user *u = user;
    const smoe_layer *l = &u->r->c.layer;
    const int kind = u->rows[t * l->experts + e];
    if (kind == 1)
        for (int64_t k = 0; k < l->topk; k++)
            if (u->r->c.plan.topk_ids[t * l->topk + k] == e)
                *weight = u->r->c.plan.topk_weights[t * l->topk + k];
    if (kind == 2)
        *weight =
            l->route_scale * (l->score == SMOE_SCORE_SIGMOID ? moe_sigmoid(u->r->logits[t * l->experts + e])
                                                             : pair_probability(u->r, t, e));
    return kind;
}

static void check_against_brute_force(const smoe_layer *layer, shape_of_logits shape, uint64_t seed)
{
    rounding_case r = open_rounding(layer, shape, seed, 2);
    unsigned char *rows = brute_force(&r);
    check_plan(&r.c, wanted_rounded, &(wanted_user){&r, rows});
    free(rows);
    close_rounding(&r);
}

static smoe_layer random_layer(uint64_t *random, smoe_rounding rule)
{
    static const int64_t many[] = {1, 5, 31, 63, 64, 65, 100, 256, 257, 300, 511, 700};
    static const int64_t experts[] = {1, 2, 3, 8, 13};
    static const int32_t tiles[] = {1, 2, 3, 7, 16, 32, 64, 100, 128};
    const int64_t e = experts[draw_below(random, 5)];
    const int64_t topk[] = {1, e < 2 ? 1 : 2, e, 1 + draw_below(random, e)};
    smoe_layer l = routing_layer(many[draw_below(random, 12)], e, topk[draw_below(random, 4)]);
    l.rounding = rule;
    l.tile = tiles[draw_below(random, 9)];
    l.score = (smoe_score)draw_below(random, 3);
    l.renormalize = l.score != SMOE_SCORE_TOPK_SOFTMAX && draw_below(random, 2);
    l.logits_type = draw_below(random, 2) ? SMOE_TYPE_BF16 : SMOE_TYPE_F32;
    l.route_scale = draw_below(random, 2) ? 1.0f : 2.5f;
    l.seed = ((uint64_t)draw_bits(random) << 32) + draw_bits(random);
    return l;
}

static void equals_brute_force(smoe_rounding rule)
{
    uint64_t random = 1000 + (uint64_t)rule;
    for (int i = 0; i < 40; i++) {
        for (int shape = RANDOM; shape < SHAPES; shape++) {
            const smoe_layer layer = random_layer(&random, rule);
            check_against_brute_force(&layer, (shape_of_logits)shape, 1 + draw_bits(&random));
        }
    }
}

#define RULE_TEST(name, rule)                                                                                \
    static void name(void **state)                                                                           \
    {                                                                                                        \
        (void)state;                                                                                         \
        equals_brute_force(rule);                                                                            \
    }
RULE_TEST(none_equals_brute_force, SMOE_ROUNDING_NONE)
RULE_TEST(nr_f_equals_brute_force, SMOE_ROUNDING_NR_F)
RULE_TEST(sr_f_equals_brute_force, SMOE_ROUNDING_SR_F)
RULE_TEST(nr_s_equals_brute_force, SMOE_ROUNDING_NR_S)
RULE_TEST(balance_f_equals_brute_force, SMOE_ROUNDING_BALANCE_F)
RULE_TEST(up_equals_brute_force, SMOE_ROUNDING_UP)
RULE_TEST(down_equals_brute_force, SMOE_ROUNDING_DOWN)

static void stochastic_rounding_moves_with_step_and_seed(void **state)
{
    (void)state;
    smoe_layer layer = routing_layer(512, 16, 2);
    layer.rounding = SMOE_ROUNDING_SR_F;
    rounding_case r = open_rounding(&layer, RANDOM, 5, 1);
    unsigned char *before = malloc(r.c.args.saved_size);
    memcpy(before, r.c.args.saved, r.c.args.saved_size);
    run_case(&r.c);
    assert_memory_equal(before, r.c.args.saved, r.c.args.saved_size);
    int moved = 0;
    for (int step = 0; step < 20; step++) {
        r.c.args.step++;
        run_case(&r.c);
        moved += memcmp(before, r.c.args.saved, r.c.args.saved_size) != 0;
    }
    assert_true(moved > 15);
    free(before);
    close_rounding(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(none_equals_brute_force),
        cmocka_unit_test(nr_f_equals_brute_force),
        cmocka_unit_test(sr_f_equals_brute_force),
        cmocka_unit_test(nr_s_equals_brute_force),
        cmocka_unit_test(balance_f_equals_brute_force),
        cmocka_unit_test(up_equals_brute_force),
        cmocka_unit_test(down_equals_brute_force),
        cmocka_unit_test(stochastic_rounding_moves_with_step_and_seed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
