/* Token rounding: how many tokens each expert gets under the six rules, and which tokens. */
#include "oracle/number.h"
#include "oracle/oracle.h"
#include "oracle/score.h"

#include <math.h>
#include <stdlib.h>

/* ---- How many ---- */

/* The first word of Philox4x32-10 (Salmon et al., SC 2011). */
static uint32_t philox(uint64_t key, uint64_t step, uint64_t expert)
{
    uint64_t c0 = step & 0xffffffffu, c1 = step >> 32, c2 = expert & 0xffffffffu, c3 = expert >> 32;
    uint64_t k0 = key & 0xffffffffu, k1 = key >> 32;
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = 0xD2511F53u * c0, p1 = 0xCD9E8D57u * c2;
        c0 = (p1 >> 32) ^ c1 ^ k0;
        c2 = (p0 >> 32) ^ c3 ^ k1;
        c1 = p1 & 0xffffffffu;
        c3 = p0 & 0xffffffffu;
        k0 = (k0 + 0x9E3779B9u) & 0xffffffffu;
        k1 = (k1 + 0xBB67AE85u) & 0xffffffffu;
    }
    return (uint32_t)c0;
}

int64_t oracle_round_count(const smoe_layer *layer, int64_t c, const oracle_round_facts *facts)
{
    const int64_t tile = layer->tile, lo = c - c % tile;
    const double past = (double)(c - lo), half = (double)tile / 2.0;
    if (c == lo || lo + tile > layer->tokens) return layer->rounding == SMOE_ROUNDING_NONE ? c : lo;
    bool up = false;
    switch (layer->rounding) {
    case SMOE_ROUNDING_NONE: return c;
    case SMOE_ROUNDING_NR_F: up = past > half; break;
    case SMOE_ROUNDING_SR_F:
        up = ldexp((double)philox(layer->seed, facts->step, facts->expert), -32) < past / (double)tile;
        break;
    case SMOE_ROUNDING_NR_S: up = facts->added < facts->dropped; break;
    case SMOE_ROUNDING_BALANCE_F: up = past + (double)facts->residual > half; break;
    case SMOE_ROUNDING_UP: up = true; break;
    case SMOE_ROUNDING_DOWN: up = false; break;
    }
    return up ? lo + tile : lo;
}

/* ---- Which ---- */

/* One token as a candidate of one expert. The library turns its score into a key. `least` and `most` are the
 * limits between which the key may be, because f32 arithmetic computes the score with a small error. */
typedef struct candidate {
    int64_t token;
    bool selected;
    double score, key, least, most;
} candidate;

static double key_of(const smoe_layer *layer, double score)
{
    const double f32 = oracle_round_to(score, SMOE_TYPE_F32);
    return layer->logits_type == SMOE_TYPE_BF16 ? oracle_round_to(f32, SMOE_TYPE_BF16) : f32;
}

static candidate make_candidate(const smoe_layer *layer, int64_t token, bool selected, double score)
{
    const double slack = 1e-6 * fabs(score) + (score_is_sigma(layer->score) ? 3e-7 : 0.0);
    return (candidate){token,
                       selected,
                       score,
                       key_of(layer, score),
                       key_of(layer, score - slack),
                       key_of(layer, score + slack)};
}

static int compare_candidates(const void *left, const void *right)
{
    const candidate *a = left, *b = right;
    if (a->selected != b->selected) return a->selected ? -1 : 1;
    if (isnan(a->key) != isnan(b->key)) return isnan(a->key) ? 1 : -1;
    if (a->key != b->key && !isnan(a->key)) return a->key > b->key ? -1 : 1;
    return a->token < b->token ? -1 : 1;
}

/* Could f32 arithmetic take `b` instead of `a`, where `a` is taken here and `b` is not? */
static bool may_swap(const candidate *a, const candidate *b)
{
    if (a->selected != b->selected || a->score == b->score || isnan(a->score) || isnan(b->score))
        return false;
    const bool certain_tie = a->least == a->most && b->least == b->most && a->key == b->key;
    return !certain_tie && b->most >= a->least;
}

static int64_t count_unclear(const candidate *ranked, int64_t taken, int64_t tokens)
{
    int64_t unclear = 0;
    for (int64_t i = 0; i < taken; i++)
        for (int64_t j = taken; j < tokens; j++)
            if (may_swap(&ranked[i], &ranked[j])) unclear++;
    return unclear;
}

/* The sum of the scores with ranks from..to-1, in fixed point: times 2^32. */
static double fixed_sum(const candidate *ranked, int64_t from, int64_t to)
{
    double sum = 0.0;
    for (int64_t i = from; i < to; i++) {
        const double key = isnan(ranked[i].key) ? 0.0 : fmax(-65536.0, fmin(65536.0, ranked[i].key));
        sum += trunc(ldexp(key, 32));
    }
    return sum;
}

/* How many of one expert's ranked candidates are taken. */
static int64_t take(const smoe_layer *layer, const oracle_input *input, const candidate *ranked,
                    int64_t expert, int64_t c, int64_t *residual, int64_t *undecided)
{
    oracle_round_facts facts = {.step = input->step, .expert = (uint64_t)expert, .residual = *residual};
    const int64_t lo = c - c % layer->tile, hi = lo + layer->tile;
    if (layer->rounding == SMOE_ROUNDING_NR_S && c != lo && hi <= layer->tokens) {
        facts.added = fixed_sum(ranked, c, hi);
        facts.dropped = fixed_sum(ranked, lo, c);
        const double apart = fabs(facts.added - facts.dropped);
        if (apart != 0.0 && apart < 1e-5 * (fabs(facts.added) + fabs(facts.dropped))) ++*undecided;
    }
    const int64_t taken = oracle_round_count(layer, c, &facts);
    *residual += c - taken;
    return taken;
}

double oracle_added_weight(const smoe_layer *layer, const oracle_forward *forward, int64_t pair)
{
    const double logit = forward->logits[pair];
    const double raw = score_is_sigma(layer->score) ? sigma_of(logit)
                       : isnan(logit)               ? NAN
                                                    : forward->probability[pair];
    return raw * (double)layer->route_scale;
}

/* The pairs of plain top-K, from the router or from the caller's ids. Of the caller's ids those out of range
 * are skipped, and only the first of a token's repeated ids counts. */
static void keep_topk(const smoe_layer *layer, const oracle_input *input, oracle_forward *forward)
{
    const bool given = layer->entry == SMOE_ENTRY_FROM_TOPK;
    const int64_t *ids = given ? input->topk_ids : forward->topk_ids;
    const double *weights = given ? input->topk_weights : forward->topk_weights;
    for (int64_t t = 0; t < layer->tokens; t++) {
        for (int64_t k = 0; k < layer->topk; k++) {
            const int64_t e = ids[t * layer->topk + k], pair = t * layer->experts + e;
            if (e < 0 || e >= layer->experts || forward->pair[pair] == ORACLE_KEPT) continue;
            forward->pair[pair] = ORACLE_KEPT;
            forward->pair_weight[pair] = weights[t * layer->topk + k];
        }
    }
}

static void round_expert(const smoe_layer *layer, const oracle_input *input, oracle_forward *forward,
                         candidate *ranked, int64_t expert, int64_t *residual)
{
    const int64_t tokens = layer->tokens, experts = layer->experts;
    int64_t c = 0;
    for (int64_t t = 0; t < tokens; t++) {
        const int64_t pair = t * experts + expert;
        const bool selected = forward->pair[pair] == ORACLE_KEPT;
        ranked[t] = make_candidate(layer, t, selected, forward->score[pair]);
        c += selected;
    }
    qsort(ranked, (size_t)tokens, sizeof *ranked, compare_candidates);
    const int64_t taken = take(layer, input, ranked, expert, c, residual, &forward->undecided);
    if (taken != c) forward->undecided += count_unclear(ranked, taken, tokens);
    for (int64_t i = 0; i < tokens; i++) {
        const int64_t pair = ranked[i].token * experts + expert;
        if (i >= taken) {
            forward->pair[pair] = ORACLE_OUT;
            forward->pair_weight[pair] = 0.0;
        } else if (!ranked[i].selected) {
            forward->pair[pair] = ORACLE_ADDED;
            forward->pair_weight[pair] = oracle_added_weight(layer, forward, pair);
            if (input->round_stores)
                forward->pair_weight[pair] = oracle_round_to(forward->pair_weight[pair], SMOE_TYPE_F32);
        }
    }
}

void oracle_round(const smoe_layer *layer, const oracle_input *input, oracle_forward *forward)
{
    const size_t pairs = (size_t)(layer->tokens * layer->experts);
    forward->pair = oracle_alloc(pairs, 1);
    forward->pair_weight = oracle_alloc(pairs, sizeof(double));
    keep_topk(layer, input, forward);
    if (layer->entry != SMOE_ENTRY_FROM_LOGITS || layer->rounding == SMOE_ROUNDING_NONE) return;
    candidate *ranked = oracle_alloc((size_t)layer->tokens, sizeof *ranked);
    int64_t residual = 0;
    for (int64_t e = 0; e < layer->experts; e++) round_expert(layer, input, forward, ranked, e, &residual);
    free(ranked);
}
