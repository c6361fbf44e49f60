/* Two layers that use one group, as in a model: the windows hold what the other layer sent last. */
#ifndef TESTS_EP_PAIR_H
#define TESTS_EP_PAIR_H

#include "tests/ep_case.h"

typedef struct ep_pair {
    ep_case *first, *second; /* the second needs less room than the first, which makes the group */
} ep_pair;

/* row_capacity 64: H is computed again, from X that must have come again. */
static inline ep_pair ep_make_pair(smoe_type dtype, const int64_t *tokens, int64_t row_capacity)
{
    smoe_layer layer = ep_describe(4, 8, 3, dtype);
    layer.waves = 4;
    layer.row_capacity = row_capacity;
    ep_case *first = ep_make(&layer, tokens, 1);
    layer.hidden = 64;
    layer.topk = 1;
    layer.waves = 1;
    ep_case *second = ep_make(&layer, tokens, 1);
    ep_fill(&second->g.at[EP_X], 1.0f, 77);
    ep_fill(&second->g.at[EP_DOUT], 1.0f, 78);
    ep_copy_inputs(first);
    ep_copy_inputs(second);
    ep_run_g(first);
    ep_run_g(second);
    for (int r = 0; r < layer.ranks; r++) {
        ep_join(first, r, 1);
        second->ep[r] = first->ep[r];
        second->contexts[r] = first->contexts[r];
    }
    return (ep_pair){first, second};
}

static inline void ep_compare_pair(ep_pair p)
{
    for (int r = 0; r < p.first->layer.ranks; r++) p.second->ep[r] = NULL;
    ep_assert_same(p.first);
    ep_assert_same(p.second);
    ep_free(p.second);
    ep_free(p.first);
}

#endif
