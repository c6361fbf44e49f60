/* See draw.h. */
#include "oracle/draw.h"
#include "oracle/number.h"

#include <math.h>
#include <stdlib.h>

/* `count` values of N(0, scale^2) rounded to the type, or integers as oracle_draw says. */
static double *draw_values(oracle_random *random, int64_t count, double scale, int integers, smoe_type type)
{
    double *values = oracle_alloc((size_t)count, sizeof *values);
    for (int64_t i = 0; i < count; i++) {
        if (!integers)
            values[i] = oracle_round_to(scale * oracle_random_normal(random), type);
        else if (integers == 1 || oracle_random_integer(random, 1, integers) == 1)
            values[i] = (double)oracle_random_integer(random, -1, 1);
    }
    return values;
}

/* The weight of a row: normally distributed, or with integers 1 or 2. */
static double *draw_weights(oracle_random *random, int64_t count, int integers)
{
    double *weights = draw_values(random, count, 1.0, 0, SMOE_TYPE_F32);
    for (int64_t i = 0; integers && i < count; i++) weights[i] = weights[i] < 0.0 ? 1.0 : 2.0;
    return weights;
}

/* The expert of each token under COUNTS. The tokens are dealt to the experts in turn, and an expert that has
 * its count is passed over. -1: all experts have theirs. */
static void deal(const smoe_layer *layer, const int64_t *counts, int64_t *expert_of)
{
    int64_t *left = oracle_alloc((size_t)layer->experts, sizeof *left);
    for (int64_t e = 0; e < layer->experts; e++) left[e] = counts[e];
    int64_t e = 0;
    for (int64_t t = 0; t < layer->tokens; t++) {
        int64_t looked = 0;
        while (!left[e] && looked++ < layer->experts) e = (e + 1) % layer->experts;
        expert_of[t] = left[e] ? e : -1;
        if (left[e]) left[e]--;
        e = (e + 1) % layer->experts;
    }
    free(left);
}

/* Changes logits (T, E) so that plain top-K gives the wanted routing. */
static void shape_logits(const smoe_layer *layer, const oracle_draw *draw, double *logits)
{
    const int64_t experts = layer->experts;
    int64_t *expert_of = oracle_alloc((size_t)layer->tokens, sizeof *expert_of);
    if (draw->routing == ORACLE_COUNTS) deal(layer, draw->counts, expert_of);
    for (int64_t t = 0; t < layer->tokens; t++) {
        for (int64_t e = 0; e < experts; e++) {
            double *logit = &logits[t * experts + e];
            if (draw->integers) *logit = (double)((t * 7 + e * 3) % 11) / 4.0;
            if (draw->routing == ORACLE_TIES) *logit = 0.5;
            if (draw->routing == ORACLE_ONE_TAKES_ALL && e == 0) *logit += 6.0;
            if (draw->routing == ORACLE_HALF_EMPTY && e % 2) *logit -= 8.0;
            if (draw->routing == ORACLE_COUNTS) *logit = *logit / 4.0 + (e == expert_of[t] ? 4.0 : 0.0);
            *logit = oracle_round_to(*logit, layer->logits_type);
        }
    }
    free(expert_of);
}

/* K distinct ids for every token. If broken, the first id of every third token is outside of 0..E-1, and
 * the last id of every fifth token repeats its first. */
static int64_t *draw_ids(const smoe_layer *layer, const oracle_draw *draw, oracle_random *random)
{
    const int64_t topk = layer->topk, experts = layer->experts, tokens = layer->tokens;
    /* 64 bits: a number whose low 32 bits would be an expert */
    const int64_t past = layer->index_type == SMOE_TYPE_I64 ? ((int64_t)1 << 32) + 1 : experts;
    int64_t *ids = oracle_alloc((size_t)(tokens * topk), sizeof *ids);
    int64_t *deck = oracle_alloc((size_t)experts, sizeof *deck);
    int64_t *expert_of = oracle_alloc((size_t)tokens, sizeof *expert_of);
    if (draw->routing == ORACLE_COUNTS) deal(layer, draw->counts, expert_of);
    for (int64_t t = 0; t < tokens; t++) {
        int64_t cards = 0, *token_ids = ids + t * topk;
        const int64_t step = draw->routing == ORACLE_HALF_EMPTY && 2 * topk <= experts ? 2 : 1;
        for (int64_t e = 0; e < experts; e += step) deck[cards++] = e;
        const bool first_is_zero = draw->routing == ORACLE_ONE_TAKES_ALL || draw->routing == ORACLE_TIES;
        for (int64_t k = 0; k < topk; k++) {
            const int64_t low = first_is_zero && k == 0 ? 0 : k;
            const int64_t pick = first_is_zero && k == 0 ? 0 : oracle_random_integer(random, low, cards - 1);
            const int64_t card = deck[pick];
            deck[pick] = deck[k];
            deck[k] = card;
            token_ids[k] = card;
        }
        if (draw->routing == ORACLE_COUNTS) token_ids[0] = expert_of[t];
        if (draw->broken_ids && t % 5 == 0) token_ids[topk - 1] = token_ids[0];
        const int64_t outside[] = {past, -1, INT32_MAX, INT32_MIN};
        if (draw->broken_ids && t % 3 == 0) token_ids[0] = outside[t / 3 % 4];
    }
    free(deck);
    free(expert_of);
    return ids;
}

static int compare_integers(const void *left, const void *right)
{
    const int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

/* offsets (E+1). Random offsets leave a few of the T rows unused. */
static int64_t *draw_offsets(const smoe_layer *layer, const oracle_draw *draw, oracle_random *random)
{
    const int64_t experts = layer->experts, used = layer->tokens - layer->tokens / 16;
    int64_t *offsets = oracle_alloc((size_t)experts + 1, sizeof *offsets);
    for (int64_t e = 1; e <= experts; e++) {
        if (draw->routing == ORACLE_COUNTS) offsets[e] = offsets[e - 1] + draw->counts[e - 1];
        if (draw->routing == ORACLE_ONE_TAKES_ALL) offsets[e] = used;
        if (draw->routing == ORACLE_HALF_EMPTY) offsets[e] = used * ((e + 1) / 2) / ((experts + 1) / 2);
        if (draw->routing == ORACLE_TIES) offsets[e] = used * e / experts;
        if (draw->routing == ORACLE_RANDOM) offsets[e] = oracle_random_integer(random, 0, used);
    }
    qsort(offsets, (size_t)experts + 1, sizeof *offsets, compare_integers);
    return offsets;
}

static void draw_routing(const smoe_layer *layer, const oracle_draw *draw, oracle_random *random,
                         oracle_drawn *d)
{
    const int64_t tokens = layer->tokens, experts = layer->experts, hidden = layer->hidden;
    const smoe_type dtype = layer->dtype;
    if (layer->entry == SMOE_ENTRY_FROM_ROWS) {
        d->offsets = draw_offsets(layer, draw, random);
        if (draw->row_weights) d->row_weights = draw_weights(random, tokens, draw->integers);
    } else if (layer->entry == SMOE_ENTRY_FROM_TOPK) {
        d->topk_ids = draw_ids(layer, draw, random);
        d->topk_weights = draw_weights(random, tokens * layer->topk, draw->integers);
    } else if (draw->router) {
        const double scale = 1.0 / sqrt((double)hidden);
        d->router_weight = draw_values(random, experts * hidden, scale, draw->integers, dtype);
        if (draw->router_bias) d->router_bias = draw_values(random, experts, 0.5, draw->integers, dtype);
    } else {
        d->logits = draw_values(random, tokens * experts, 1.0, false, layer->logits_type);
        shape_logits(layer, draw, d->logits);
        for (int64_t i = 0; i < tokens * experts; i++)
            d->logits[i] = oracle_round_to(d->logits[i] + draw->shift, layer->logits_type);
    }
    if (layer->entry == SMOE_ENTRY_FROM_LOGITS && draw->selection_bias)
        d->selection_bias = draw_values(random, experts, 0.1, false, SMOE_TYPE_F32);
    if (draw->masked) d->token_mask = oracle_alloc((size_t)tokens, sizeof *d->token_mask);
    for (int64_t t = 0; t < tokens && draw->masked; t++)
        d->token_mask[t] = oracle_random_integer(random, 1, draw->masked) > 1;
}

void oracle_draw_inputs(const smoe_layer *layer, const oracle_draw *draw, uint64_t seed, oracle_drawn *d)
{
    oracle_random random = {seed};
    const int64_t tokens = layer->tokens, experts = layer->experts, hidden = layer->hidden;
    const int64_t n = layer->intermediate, width = oracle_h_width(layer);
    const smoe_type dtype = layer->dtype;
    const int integers = draw->integers;
    *d = (oracle_drawn){0};
    draw_routing(layer, draw, &random, d);
    d->x = draw_values(&random, tokens * hidden, 1.0, integers, dtype);
    d->w1 = draw_values(&random, experts * width * hidden, 1.0 / sqrt((double)hidden), integers, dtype);
    d->w2 = draw_values(&random, experts * hidden * n, 1.0 / sqrt((double)n), integers, dtype);
    if (draw->b1) d->b1 = draw_values(&random, experts * width, 0.5, integers, dtype);
    if (draw->b2) d->b2 = draw_values(&random, experts * hidden, 0.5, integers, dtype);
    d->dout = draw_values(&random, tokens * hidden, 1.0, integers, dtype);
    d->loss_gradients = draw->loss_gradients;
    d->input = (oracle_input){
        .x = d->x,
        .router_weight = d->router_weight,
        .router_bias = d->router_bias,
        .logits = d->logits,
        .selection_bias = d->selection_bias,
        .token_mask = d->token_mask,
        .step = draw->step,
        .topk_ids = d->topk_ids,
        .topk_weights = d->topk_weights,
        .offsets = d->offsets,
        .row_weights = d->row_weights,
        .w1 = d->w1,
        .b1 = d->b1,
        .w2 = d->w2,
        .b2 = d->b2,
        .dout = d->dout,
        .balance_coefficient = (double)(float)draw->balance_coefficient,
        .z_coefficient = (double)(float)draw->z_coefficient,
    };
}

void oracle_drawn_free(oracle_drawn *d)
{
    void *all[] = {d->x,
                   d->router_weight,
                   d->router_bias,
                   d->logits,
                   d->selection_bias,
                   d->topk_weights,
                   d->w1,
                   d->b1,
                   d->w2,
                   d->b2,
                   d->row_weights,
                   d->dout,
                   d->topk_ids,
                   d->offsets,
                   d->token_mask};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
    *d = (oracle_drawn){0};
}
