/* Rows past row_capacity: a layer that keeps H of few rows computes that of the others again, and gives bit
 * for bit what it gives with room for all. */
#ifndef TESTS_EP_CAPACITY_H
#define TESTS_EP_CAPACITY_H

#include "tests/ep_case.h"

typedef void ep_runner(ep_case *c); /* a forward and a backward of all ranks */

typedef enum ep_routing { EP_SPREAD, EP_ONE_RANK, EP_ONE_EXPERT } ep_routing;

typedef struct ep_capacity {
    smoe_layer layer;
    ep_routing routing;
    int64_t nan_token; /* 0: none */
    int biases, frozen;
} ep_capacity;

static inline ep_case *ep_make_routed(const ep_capacity *given, int64_t row_capacity)
{
    static const int64_t uneven[EP_MOST] = {137, 0, 64, 5, 140, 1, 20, 9};
    smoe_layer layer = given->layer;
    int64_t tokens[EP_MOST];
    for (int r = 0; r < EP_MOST; r++) tokens[r] = uneven[r] < layer.max_tokens ? uneven[r] : layer.max_tokens;
    layer.row_capacity = row_capacity;
    ep_case *c = ep_make(&layer, tokens, given->biases);
    c->frozen = given->frozen;
    const int64_t each = layer.experts / layer.ranks, first = layer.ranks / 2 * each, topk = layer.topk;
    const ep_tensor *ids = &c->g.at[EP_IDS];
    for (int64_t i = 0; i < ids->rows * topk && given->routing != EP_SPREAD;
         i++) /* a repeated id is skipped */
        ((int32_t *)(void *)ids->data)[i] =
            (int32_t)(first + (given->routing == EP_ONE_RANK ? i % topk % each : 0));
    if (given->nan_token) memset(ep_g_row(c, EP_X, given->nan_token), 0xFF, 4);
    ep_copy_inputs(c);
    return c;
}

static inline uint64_t ep_saved_bytes(const ep_case *c)
{
    smoe_context *context = ep_context(1);
    smoe_sizes sizes = SMOE_SIZES_INIT;
    const smoe_layer layer = ep_layer(c, 0);
    assert_int_equal(smoe_query_sizes(context, &layer, &sizes), SMOE_OK);
    smoe_destroy(context);
    return sizes.saved_buffer_bytes;
}

static inline void ep_check_capacity(const ep_capacity *given, int64_t row_capacity, ep_runner *run)
{
    ep_case *all = ep_make_routed(given, INT32_MAX), *few = ep_make_routed(given, row_capacity);
    assert_true(ep_saved_bytes(few) < ep_saved_bytes(all));
    run(all);
    run(few);
    for (int id = EP_OUT; id < EP_TENSORS; id++) {
        const ep_tensor *want = &all->w.at[id], *is = &few->w.at[id];
        if (memcmp(want->data, is->data, (size_t)(want->rows * want->row_bytes)))
            fail_msg("%d ranks, %d waves, room for %lld rows: other bits in %s", (int)given->layer.ranks,
                     (int)given->layer.waves, (long long)row_capacity, ep_names[id]);
    }
    ep_free(few);
    ep_free(all);
}

/* Room for 1.25 times the mean, with all rows on one rank; and room for nearly none. */
static inline void ep_check_capacities(smoe_type dtype, ep_runner *run)
{
    for (int ranks = 1; ranks <= 8; ranks *= 2) {
        ep_capacity given = {.layer = ep_describe(ranks, 16, ranks == 8 ? 2 : 3, dtype)};
        given.layer.waves = ranks == 2 ? 2 : 1;
        given.layer.chunks = ranks == 4 ? 2 : 1;
        given.biases = ranks == 4;
        ep_check_capacity(&given, 64, run);
        given.routing = EP_ONE_RANK;
        given.biases = ranks != 4;
        if (ranks > 1) ep_check_capacity(&given, given.layer.max_tokens * given.layer.topk * 5 / 4, run);
    }
    ep_capacity given = {.layer = ep_describe(4, 16, 3, dtype), .routing = EP_ONE_EXPERT, .biases = 1};
    given.layer.waves = 4;
    given.layer.chunks = 2;
    ep_check_capacity(&given, 100, run);
    given.routing = EP_ONE_RANK;
    given.layer.chunks = 1;
    given.nan_token = 150;
    ep_check_capacity(&given, 64, run);
    given.routing = EP_SPREAD;
    given.layer.entry = SMOE_ENTRY_FROM_LOGITS;
    given.frozen = 1;
    ep_check_capacity(&given, 64, run);
    ep_capacity small = {.layer = ep_describe(4, 16, 1, dtype), .biases = 1};
    small.layer.max_tokens = 4; /* a GPU takes the kernels for few rows */
    ep_check_capacity(&small, 64, run);
}

#endif
