/* Compares the stage plan with a brute force: given top-K with skipped and repeated ids, rows with offsets
 * (also malformed ones), counts near multiples of 64, pad rows, token_offsets and token_rows, and equal bits
 * for 1, 2 and 3 threads. */
#include "routing_case.h"

/* ---- FROM_TOPK ---- */

typedef struct given_topk {
    int64_t tokens, topk;
    int64_t *ids;    /* (T, K) */
    int32_t *narrow; /* the same as int32 */
    float *weights;  /* (T, K) */
} given_topk;

static given_topk make_topk(int64_t tokens, int64_t topk)
{
    const size_t pairs = (size_t)(tokens * topk);
    given_topk g = {tokens, topk, poisoned(8 * pairs), poisoned(4 * pairs), poisoned(4 * pairs)};
    for (size_t i = 0; i < pairs; i++) g.weights[i] = 0.5f + (float)i;
    return g;
}

static void free_topk(given_topk *g)
{
    free(g->ids);
    free(g->narrow);
    free(g->weights);
}

static int wanted_topk(const void *user, int64_t t, int64_t e, float *weight)
{
    const given_topk *g = user;
    for (int64_t k = 0; k < g->topk; k++) {
        *weight = g->weights[t * g->topk + k];
        if (g->ids[t * g->topk + k] == e) return 1;
    }
    return 0;
}

/* Runs with both index types and 1, 2 and 3 threads. All plans must equal the brute force and one another. */
static void check_topk(given_topk *g, int64_t experts)
{
    smoe_layer layer = routing_layer(g->tokens, experts, g->topk);
    layer.entry = SMOE_ENTRY_FROM_TOPK;
    for (int64_t i = 0; i < g->tokens * g->topk; i++) g->narrow[i] = (int32_t)g->ids[i];
    unsigned char *first = NULL;
    for (int run = 0; run < 4; run++) {
        layer.index_type = run == 3 ? SMOE_TYPE_I32 : SMOE_TYPE_I64;
        routing_case c = open_case(&layer, run == 3 ? 2 : run + 1);
        c.args.topk_ids = run == 3 ? (const void *)g->narrow : g->ids;
        c.args.topk_weights = g->weights;
        run_case(&c);
        if (!first) {
            check_plan(&c, wanted_topk, g);
            first = malloc(c.args.saved_size);
            memcpy(first, c.args.saved, c.args.saved_size);
        }
        assert_memory_equal(first, c.args.saved, c.args.saved_size);
        close_case(&c);
    }
    free(first);
}

static void given_ids_at_random(void **state)
{
    (void)state;
    static const int64_t shapes[][3] = {{1, 1, 1},   {1, 5, 3},     {31, 4, 4},   {33, 1, 1},   {64, 8, 2},
                                        {255, 8, 2}, {256, 7, 3},   {257, 9, 3},  {700, 16, 4}, {513, 70, 8},
                                        {300, 3, 3}, {40, 300, 16}, {600, 64, 64}};
    uint64_t random = 11;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        for (int skips = 0; skips < 3; skips++) {
            given_topk g = make_topk(shapes[s][0], shapes[s][2]);
            const int64_t experts = shapes[s][1], low = -skips, range = experts + 2 * skips;
            for (int64_t i = 0; i < g.tokens * g.topk; i++) g.ids[i] = low + draw_below(&random, range);
            check_topk(&g, experts);
            free_topk(&g);
        }
    }
}

static void far_ids_are_skipped(void **state)
{
    (void)state;
    given_topk g = make_topk(66, 2);
    for (int64_t t = 0; t < 66; t++) {
        g.ids[2 * t] = t % 2 ? INT32_MAX : INT32_MIN;
        g.ids[2 * t + 1] = 1;
    }
    check_topk(&g, 3);
    for (int64_t i = 0; i < 132; i++) g.ids[i] = i % 2 ? -1 : 3; /* no valid id */
    check_topk(&g, 3);
    free_topk(&g);

    /* An int64 id whose low 32 bits are a valid id must still be skipped. */
    smoe_layer layer = routing_layer(1, 3, 1);
    layer.entry = SMOE_ENTRY_FROM_TOPK;
    layer.index_type = SMOE_TYPE_I64;
    _Alignas(16) int64_t id[] = {(INT64_C(1) << 32) + 1};
    _Alignas(16) float weight[] = {1.0f};
    routing_case c = open_case(&layer, 1);
    c.args.topk_ids = id;
    c.args.topk_weights = weight;
    run_case(&c);
    assert_int_equal(c.plan.offsets[3], 0);
    assert_int_equal(c.plan.token_offsets[1], 0);
    close_case(&c);
}

/* K = 1 and exact counts: sorted ids, then shuffled ones. */
static void given_counts(void **state)
{
    (void)state;
    static const int32_t counts[] = {0,   1,   63,  64,  65,  127, 128, 129, 191,
                                     192, 193, 255, 256, 257, 320, 0,   0,   2};
    const int64_t experts = sizeof counts / sizeof *counts;
    int64_t tokens = 0;
    for (int64_t e = 0; e < experts; e++) tokens += counts[e];
    given_topk g = make_topk(tokens, 1);
    int64_t t = 0;
    for (int64_t e = 0; e < experts; e++)
        for (int32_t i = 0; i < counts[e]; i++) g.ids[t++] = e;
    check_topk(&g, experts);
    uint64_t random = 5;
    for (int64_t i = tokens - 1; i > 0; i--) {
        const int64_t j = draw_below(&random, i + 1), id = g.ids[i];
        g.ids[i] = g.ids[j];
        g.ids[j] = id;
    }
    check_topk(&g, experts);
    free_topk(&g);
}

static void one_expert_takes_all(void **state)
{
    (void)state;
    given_topk g = make_topk(777, 1);
    for (int64_t t = 0; t < 777; t++) g.ids[t] = 2;
    check_topk(&g, 4);
    free_topk(&g);
}

static void order_is_by_count_over_many_experts(void **state)
{
    (void)state;
    enum { EXPERTS = 700 };
    int64_t tokens = 0;
    uint64_t random = 99;
    int32_t counts[EXPERTS];
    for (int e = 0; e < EXPERTS; e++)
        tokens += counts[e] = (int32_t)(draw_below(&random, 8) ? draw_below(&random, 30) : 300);
    given_topk g = make_topk(tokens, 1);
    int64_t t = 0;
    for (int e = 0; e < EXPERTS; e++)
        for (int32_t i = 0; i < counts[e]; i++) g.ids[t++] = e;
    check_topk(&g, EXPERTS); /* counts above 255 need two bytes of the sort key */
    free_topk(&g);
}

/* ---- FROM_ROWS ---- */

typedef struct given_rows {
    const int64_t *offsets;
    const float *weights;
} given_rows;

static int wanted_rows(const void *user, int64_t t, int64_t e, float *weight)
{
    const given_rows *g = user;
    *weight = g->weights ? g->weights[t] : 1.0f;
    return t >= g->offsets[e] && t < g->offsets[e + 1];
}

static void check_rows(int64_t tokens, int64_t experts, const int64_t *given)
{
    smoe_layer layer = routing_layer(tokens, experts, 1);
    layer.entry = SMOE_ENTRY_FROM_ROWS;
    int64_t *wide = poisoned(8 * (uint64_t)(experts + 1));
    int32_t *narrow = poisoned(4 * (uint64_t)(experts + 1));
    float *weights = poisoned(4 * (uint64_t)tokens);
    for (int64_t e = 0; e <= experts; e++) wide[e] = given[e];
    for (int64_t e = 0; e <= experts; e++) narrow[e] = (int32_t)given[e];
    for (int64_t t = 0; t < tokens; t++) weights[t] = (float)t * 0.25f;
    for (int run = 0; run < 4; run++) {
        layer.index_type = run % 2 ? SMOE_TYPE_I32 : SMOE_TYPE_I64;
        routing_case c = open_case(&layer, run + 1);
        c.args.offsets = run % 2 ? (const void *)narrow : wide;
        c.args.row_weights = run < 2 ? weights : NULL;
        run_case(&c);
        check_plan(&c, wanted_rows, &(given_rows){given, c.args.row_weights});
        close_case(&c);
    }
    free(wide);
    free(narrow);
    free(weights);
}

static void rows_with_offsets(void **state)
{
    (void)state;
    static const int64_t counts[] = {0,   1,   63,  64,  65,  0,   127, 128, 129,
                                     191, 192, 193, 255, 256, 257, 320, 0};
    int64_t offsets[18] = {0};
    for (int e = 0; e < 17; e++) offsets[e + 1] = offsets[e] + counts[e];
    check_rows(offsets[17], 17, offsets);
    check_rows(offsets[17] + 100, 17, offsets); /* rows after the last offset have no expert */
    check_rows(1, 1, (int64_t[]){0, 1});
    check_rows(1, 2, (int64_t[]){0, 0, 0});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(given_ids_at_random),
        cmocka_unit_test(far_ids_are_skipped),
        cmocka_unit_test(given_counts),
        cmocka_unit_test(one_expert_takes_all),
        cmocka_unit_test(order_is_by_count_over_many_experts),
        cmocka_unit_test(rows_with_offsets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
