/* What a score is, once more from the text of smoe.h. No switch has a default, so an enumerator that one of
 * them lacks does not compile. */
#ifndef ORACLE_SCORE_H
#define ORACLE_SCORE_H

#include <math.h>
#include <smoe.h>
#include <stdbool.h>

#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Wswitch"

/* Are experts selected by sigma + selection_bias, and are weights made of sigma? */
static inline bool score_is_sigma(smoe_score score)
{
    switch (score) {
    case SMOE_SCORE_SIGMOID: return true;
    case SMOE_SCORE_SOFTMAX_TOPK:
    case SMOE_SCORE_TOPK_SOFTMAX: break;
    }
    return false;
}

/* Do the weights of a token's K experts sum to 1, before route_scale? */
static inline bool weights_sum_to_one(const smoe_layer *layer)
{
    switch (layer->score) {
    case SMOE_SCORE_TOPK_SOFTMAX: return true;
    case SMOE_SCORE_SOFTMAX_TOPK:
    case SMOE_SCORE_SIGMOID: break;
    }
    return layer->renormalize;
}

#pragma GCC diagnostic pop

static inline double sigma_of(double logit)
{
    return 1.0 / (1.0 + exp(-logit));
}

#endif
