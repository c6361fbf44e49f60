/* The list of all scores. The library's checks, ranking, weights and gradients, the names of the tool and of
 * checkpoints are made from this list; no other file of src, harness, cli and train compares a score.
 *
 *   X(enumerator, name, key, value, over, selection)
 *
 *   enumerator  as in smoe.h
 *   name        as `smoe --score` takes it
 *   key         as `scoring_func` in a checkpoint's config.json has it
 *
 * value:
 * - softmax: experts are ranked by their logits; the weights are terms of a softmax.
 * - CURVE: a function f of one logit. It is MOE_VALUE_CURVE in routing_decisions.h; its slope is
 * MOE_SLOPE_CURVE in cpu/router_backward.c and MOE_AT_CURVE in cuda/routing/dlogits.cu. Experts are ranked by
 * f plus the selection bias, and weights are f. The backward reads the logits.
 *
 * over: what the raw weights are divided by, and so which dlogits a weight has.
 * - all: a softmax over all E. With `renormalize` the weights are then divided by the sum of the K.
 * - kept: a softmax over the K kept logits; `renormalize` must be 0.
 * - none: nothing, or with `renormalize` the sum of the K.
 *
 * selection: biased takes a selection bias and groups, plain takes neither.
 *
 * The oracle takes nothing from here: its switches name every enumerator again. */
#ifndef MOE_SCORES_H
#define MOE_SCORES_H

#include "host_device.h"

#include <smoe.h>

#define MOE_SCORES(X)                                                                                        \
    X(SMOE_SCORE_SOFTMAX_TOPK, "softmax-topk", "softmax", softmax, all, plain)                               \
    X(SMOE_SCORE_TOPK_SOFTMAX, "topk-softmax", "topk-softmax", softmax, kept, plain)                         \
    X(SMOE_SCORE_SIGMOID, "sigmoid", "sigmoid", sigmoid, none, biased)

enum { MOE_CURVE_softmax = 0, MOE_CURVE_sigmoid = 1 };
enum { MOE_OVER_none, MOE_OVER_all, MOE_OVER_kept };
enum { MOE_SELECTION_plain, MOE_SELECTION_biased };

/* Those that are biased, for error texts: " SMOE_SCORE_..." of each. */
#define MOE_NAME_plain(enumerator)
#define MOE_NAME_biased(enumerator)                                       " " #enumerator
#define MOE_NAME_IF_BIASED(enumerator, name, key, value, over, selection) MOE_NAME_##selection(enumerator)
#define MOE_BIASED_SCORES                                                 MOE_SCORES(MOE_NAME_IF_BIASED)

#define MOE_COUNT_SCORE(enumerator, name, key, value, over, selection) +1
enum { MOE_SCORE_COUNT = 0 MOE_SCORES(MOE_COUNT_SCORE) };
#undef MOE_COUNT_SCORE

#define MOE_HAS_CURVE(enumerator, name, key, value, over, selection)                                         \
    case enumerator:                                                                                         \
        return MOE_CURVE_##value;
#define MOE_IS_OVER_ALL(enumerator, name, key, value, over, selection)                                       \
    case enumerator:                                                                                         \
        return MOE_OVER_##over == MOE_OVER_all;
#define MOE_IS_OVER_KEPT(enumerator, name, key, value, over, selection)                                      \
    case enumerator:                                                                                         \
        return MOE_OVER_##over == MOE_OVER_kept;
#define MOE_IS_BIASED(enumerator, name, key, value, over, selection)                                         \
    case enumerator:                                                                                         \
        return MOE_SELECTION_##selection;
#define MOE_SCORE_PROPERTY(function, property)                                                               \
    MOE_HOST_DEVICE int function(smoe_score score)                                                           \
    {                                                                                                        \
        switch (score) {                                                                                     \
            MOE_SCORES(property)                                                                             \
        }                                                                                                    \
        return 0;                                                                                            \
    }

/* If the list lacks an enumerator of smoe.h, every file that includes this header fails to compile. */
#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Wswitch"
MOE_SCORE_PROPERTY(moe_score_has_curve, MOE_HAS_CURVE)  /* a function of one logit, rather than a softmax? */
MOE_SCORE_PROPERTY(moe_score_over_all, MOE_IS_OVER_ALL) /* do the raw weights sum to 1 over all E? */
MOE_SCORE_PROPERTY(moe_score_over_kept, MOE_IS_OVER_KEPT) /* do they sum to 1 over the K kept experts? */
MOE_SCORE_PROPERTY(moe_score_takes_bias, MOE_IS_BIASED)   /* may a layer have a selection bias and groups? */
#pragma GCC diagnostic pop

/* Are the weights of the kept pairs divided by their sum? */
MOE_HOST_DEVICE int moe_weights_are_divided(const smoe_layer *layer)
{
    return moe_score_over_kept(layer->score) ? 1 : layer->renormalize;
}

/* Are the weights of the kept pairs p, the softmax over all E? Their dlogits are dense. */
MOE_HOST_DEVICE int moe_weights_are_p(const smoe_layer *layer)
{
    return moe_score_over_all(layer->score) && !layer->renormalize;
}

#endif
