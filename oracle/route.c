/* Logits, scores, the top-K of every token with its weights, and the losses. */
#include "oracle/number.h"
#include "oracle/oracle.h"
#include "oracle/score.h"

#include <math.h>
#include <stdlib.h>

/* Two scores closer than this (relative, and absolute for sums with a bias) may come out equal or
 * reversed in f32. */
static const double close = 1e-6;

void oracle_logits(const smoe_layer *layer, const oracle_input *input, oracle_forward *forward)
{
    const int64_t tokens = layer->tokens, experts = layer->experts, hidden = layer->hidden;
    forward->logits = oracle_alloc((size_t)(tokens * experts), sizeof(double));
    for (int64_t t = 0; t < tokens; t++) {
        for (int64_t e = 0; e < experts; e++) {
            double *logit = &forward->logits[t * experts + e];
            if (input->logits) {
                *logit = input->logits[t * experts + e];
                continue;
            }
            *logit = input->router_bias ? input->router_bias[e] : 0.0;
            for (int64_t i = 0; i < hidden; i++)
                *logit += input->x[t * hidden + i] * input->router_weight[e * hidden + i];
            if (input->round_stores) *logit = oracle_round_to(*logit, layer->logits_type);
        }
    }
}

/* Does score a rank before score b? NaN ranks last, after -inf. */
static bool ranks_before(double a, double b)
{
    return !isnan(a) && (isnan(b) || a > b);
}

/* p (E) of one token's logits (E); infinities of one sign share p equally. Returns logsumexp. */
static double softmax(const double *logits, int64_t experts, double *p)
{
    double max = -INFINITY, sum = 0.0;
    for (int64_t e = 0; e < experts; e++)
        if (logits[e] > max) max = logits[e];
    for (int64_t e = 0; e < experts; e++) {
        const double l = isnan(logits[e]) ? -INFINITY : logits[e];
        p[e] = l == max ? 1.0 : exp(l - max);
        sum += p[e];
    }
    for (int64_t e = 0; e < experts; e++) p[e] /= sum;
    return max + log(sum);
}

/* Marks the experts that may be selected: those of the groups_kept best groups. */
static void allow_groups(const smoe_layer *layer, const double *selection, unsigned char *allowed,
                         int64_t *undecided)
{
    const int64_t experts = layer->experts, groups = layer->groups, size = experts / groups;
    if (!score_is_sigma(layer->score) || layer->groups_kept == layer->groups) {
        for (int64_t e = 0; e < experts; e++) allowed[e] = 1;
        return;
    }
    double *sums = oracle_alloc((size_t)groups, sizeof *sums);
    for (int64_t g = 0; g < groups; g++) {
        double best = NAN, second = NAN;
        for (int64_t e = g * size; e < (g + 1) * size; e++) {
            const double s = selection[e];
            if (ranks_before(s, best)) {
                second = best;
                best = s;
            } else if (ranks_before(s, second)) {
                second = s;
            }
        }
        sums[g] = best + second;
    }
    for (int64_t g = 0; g < groups; g++) {
        int64_t before = 0;
        for (int64_t other = 0; other < groups; other++) {
            if (ranks_before(sums[other], sums[g]) || (!ranks_before(sums[g], sums[other]) && other < g))
                before++;
            if (other != g && sums[other] != sums[g] && fabs(sums[other] - sums[g]) < close) ++*undecided;
        }
        for (int64_t e = g * size; e < (g + 1) * size; e++) allowed[e] = before < layer->groups_kept;
    }
    free(sums);
}

/* ids (K): the best of the allowed experts, by descending selection score; ties go to the lower expert. */
static void choose(const smoe_layer *layer, const double *selection, unsigned char *allowed, int64_t *ids)
{
    for (int64_t k = 0; k < layer->topk; k++) {
        int64_t best = -1;
        for (int64_t e = 0; e < layer->experts; e++)
            if (allowed[e] && (best < 0 || ranks_before(selection[e], selection[best]))) best = e;
        ids[k] = best;
        allowed[best] = 0;
    }
}

/* Logits are compared without arithmetic, so they need no tolerance. The sum of a sigmoid and a bias is
 * rounded in f32. */
static int64_t count_close(const smoe_layer *layer, const double *selection, const unsigned char *left,
                           const int64_t *ids)
{
    if (!score_is_sigma(layer->score)) return 0;
    int64_t undecided = 0;
    for (int64_t k = 0; k < layer->topk; k++) {
        const double s = selection[ids[k]];
        if (k + 1 < layer->topk) {
            const double next = selection[ids[k + 1]];
            if (s != next && fabs(s - next) < close) undecided++;
            continue;
        }
        for (int64_t e = 0; e < layer->experts; e++)
            if (left[e] && s != selection[e] && fabs(s - selection[e]) < close) undecided++;
    }
    return undecided;
}

/* w (K) of the selected ids; raw (E) is p or sigma. */
static void weigh(const smoe_layer *layer, const double *logits, const double *raw, const int64_t *ids,
                  double *weights)
{
    const int64_t topk = layer->topk;
    double sum = 0.0;
    bool poisoned = false;
    const bool over_kept = weights_sum_to_one(layer);
    double max = -INFINITY;
    for (int64_t k = 0; k < topk; k++)
        if (logits[ids[k]] > max) max = logits[ids[k]];
    for (int64_t k = 0; k < topk; k++) {
        const double l = logits[ids[k]];
        if (isnan(l)) poisoned = true;
        weights[k] = raw[ids[k]];
        if (over_kept && !score_is_sigma(layer->score)) weights[k] = l == max ? 1.0 : exp(l - max);
        sum += weights[k];
    }
    for (int64_t k = 0; k < topk; k++) {
        if (over_kept) weights[k] /= sum;
        weights[k] = poisoned ? NAN : weights[k] * (double)layer->route_scale;
    }
}

void oracle_route(const smoe_layer *layer, const oracle_input *input, oracle_forward *forward)
{
    const int64_t tokens = layer->tokens, experts = layer->experts, topk = layer->topk;
    const size_t pairs = (size_t)(tokens * experts);
    forward->probability = oracle_alloc(pairs, sizeof(double));
    forward->score = oracle_alloc(pairs, sizeof(double));
    forward->topk_ids = oracle_alloc((size_t)(tokens * topk), sizeof(int64_t));
    forward->topk_weights = oracle_alloc((size_t)(tokens * topk), sizeof(double));
    forward->topk_counts = oracle_alloc((size_t)experts, sizeof(int64_t));
    double *sigma = oracle_alloc((size_t)experts, sizeof *sigma);
    double *selection = oracle_alloc((size_t)experts, sizeof *selection);
    unsigned char *allowed = oracle_alloc((size_t)experts, 1);
    double z = 0.0;

    for (int64_t t = 0; t < tokens; t++) {
        const double *logits = forward->logits + t * experts;
        double *p = forward->probability + t * experts;
        const double logsumexp = softmax(logits, experts, p);
        const bool counted = !input->token_mask || input->token_mask[t];
        if (counted) z += logsumexp * logsumexp;
        forward->counted += counted;
        const bool sigmoid = score_is_sigma(layer->score);
        for (int64_t e = 0; e < experts; e++) {
            sigma[e] = sigma_of(logits[e]);
            const double bias = input->selection_bias ? input->selection_bias[e] : 0.0;
            selection[e] = sigmoid ? sigma[e] + bias : logits[e];
            forward->score[t * experts + e] = sigmoid ? selection[e] : p[e];
        }
        int64_t *ids = forward->topk_ids + t * topk;
        allow_groups(layer, selection, allowed, &forward->undecided);
        choose(layer, selection, allowed, ids);
        forward->undecided += count_close(layer, selection, allowed, ids);
        weigh(layer, logits, sigmoid ? sigma : p, ids, forward->topk_weights + t * topk);
        for (int64_t k = 0; k < topk && counted; k++) forward->topk_counts[ids[k]]++;
    }
    if (input->round_stores)
        for (int64_t i = 0; i < tokens * topk; i++)
            forward->topk_weights[i] = oracle_round_to(forward->topk_weights[i], SMOE_TYPE_F32);

    const double all = (double)forward->counted;
    double balance = 0.0;
    for (int64_t e = 0; e < experts; e++) {
        double sum = 0.0;
        for (int64_t t = 0; t < tokens; t++)
            if (!input->token_mask || input->token_mask[t]) sum += forward->probability[t * experts + e];
        balance += (double)forward->topk_counts[e] * sum;
    }
    forward->losses[0] = all > 0.0 ? (double)experts * balance / all / all : 0.0;
    forward->losses[1] = all > 0.0 ? z / all : 0.0;
    free(sigma);
    free(selection);
    free(allowed);
}
