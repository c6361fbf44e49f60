/* dlogits from dS through the score function, and from the losses, one token at a time. ds (E) is dL/dw of
 * each pair, 0 if there is no pair. */
#include "oracle/number.h"
#include "oracle/oracle.h"
#include "oracle/score.h"

#include <math.h>
#include <stdlib.h>

/* dl += J^T dp of a softmax p over `count` logits: the logits of ids, or all if ids is NULL. dp (count) is in
 * the same order. */
static void through_softmax(const double *p, const double *dp, const int64_t *ids, int64_t count, double *dl)
{
    double mean = 0.0;
    for (int64_t i = 0; i < count; i++) mean += p[i] * dp[i];
    for (int64_t i = 0; i < count; i++) dl[ids ? ids[i] : i] += p[i] * (dp[i] - mean);
}

/* Gradient through the weights of kept pairs: a softmax (or normalised sigmoids) over the K ids of plain
 * top-K. */
static void through_normalised(const smoe_layer *layer, const double *logits, const double *ds,
                               const int64_t *ids, double *dl)
{
    const int64_t topk = layer->topk;
    double raw[64], normal[64], dw[64], sum = 0.0, max = -INFINITY, mean = 0.0;
    for (int64_t k = 0; k < topk; k++) max = fmax(max, logits[ids[k]]);
    for (int64_t k = 0; k < topk; k++) {
        const double l = logits[ids[k]];
        raw[k] = score_is_sigma(layer->score) ? sigma_of(l) : l == max ? 1.0 : exp(l - max);
        dw[k] = (double)layer->route_scale * ds[ids[k]];
        sum += raw[k];
    }
    for (int64_t k = 0; k < topk; k++) normal[k] = raw[k] / sum;
    if (!score_is_sigma(layer->score)) {
        through_softmax(normal, dw, ids, topk, dl);
        return;
    }
    for (int64_t k = 0; k < topk; k++) mean += normal[k] * dw[k];
    for (int64_t k = 0; k < topk; k++) dl[ids[k]] += (dw[k] - mean) / sum * raw[k] * (1.0 - raw[k]);
}

/* Gradient through the weights of pairs that are p or sigma itself, times route_scale. */
static void through_plain(const smoe_layer *layer, const double *logits, const double *p, const double *ds,
                          double *dp, double *dl)
{
    for (int64_t e = 0; e < layer->experts; e++) {
        dp[e] = (double)layer->route_scale * ds[e];
        const double sigma = sigma_of(logits[e]);
        if (score_is_sigma(layer->score) && dp[e] != 0.0) dl[e] += dp[e] * sigma * (1.0 - sigma);
    }
    if (!score_is_sigma(layer->score)) through_softmax(p, dp, NULL, layer->experts, dl);
}

/* balance: E sum_e (count_e / C) mean_t p[t,e];  z: mean_t logsumexp^2;  C counted tokens, of which t is one
 */
static void through_losses(const smoe_layer *layer, const oracle_input *input, const oracle_forward *f,
                           int64_t t, double *dp, double *dl)
{
    const int64_t experts = layer->experts;
    const double tokens = (double)f->counted;
    const double *logits = f->logits + t * experts, *p = f->probability + t * experts;
    double max = -INFINITY, sum = 0.0;
    for (int64_t e = 0; e < experts; e++) {
        dp[e] = input->balance_coefficient * (double)experts * (double)f->topk_counts[e] / tokens / tokens;
        max = fmax(max, logits[e]);
    }
    through_softmax(p, dp, NULL, experts, dl);
    for (int64_t e = 0; e < experts; e++)
        sum += isnan(logits[e]) ? 0.0 : logits[e] == max ? 1.0 : exp(logits[e] - max);
    const double logsumexp = max + log(sum);
    for (int64_t e = 0; e < experts && input->z_coefficient != 0.0; e++)
        dl[e] += input->z_coefficient * 2.0 * logsumexp * p[e] / tokens;
}

void oracle_router_backward(const smoe_layer *layer, const oracle_input *input, const oracle_forward *f,
                            const double *ds, double *dlogits)
{
    const int64_t experts = layer->experts;
    const bool normalised = weights_sum_to_one(layer);
    const size_t pairs = (size_t)(layer->tokens * experts);
    double *kept = oracle_alloc(pairs, sizeof *kept);   /* (T, E) dL/dw of normalised weights */
    double *plain = oracle_alloc(pairs, sizeof *plain); /* (T, E) dL/dw of weights that are p or sigma */
    double *dp = oracle_alloc((size_t)experts, sizeof *dp);
    for (int64_t r = 0; r < f->rows; r++) {
        const int64_t pair = f->row_token[r] * experts + f->row_expert[r];
        (normalised && f->pair[pair] == ORACLE_KEPT ? kept : plain)[pair] = ds[r];
    }
    for (int64_t t = 0; t < layer->tokens; t++) {
        const double *logits = f->logits + t * experts;
        double *dl = dlogits + t * experts;
        for (int64_t e = 0; e < experts; e++) dl[e] = 0.0;
        if (normalised)
            through_normalised(layer, logits, kept + t * experts, f->topk_ids + t * layer->topk, dl);
        through_plain(layer, logits, f->probability + t * experts, plain + t * experts, dp, dl);
        if (!input->token_mask || input->token_mask[t]) through_losses(layer, input, f, t, dp, dl);
    }
    free(kept);
    free(plain);
    free(dp);
}
