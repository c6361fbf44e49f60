/* Which parts of a backward are needed. A gradient whose pointer is NULL is not wanted. Intermediate results
 * that only such gradients need are not computed. */
#ifndef MOE_WANTED_H
#define MOE_WANTED_H

#include "routing_decisions.h"

#include <smoe.h>

/* dlogits of a layer from logits are needed for the caller, for the router's gradients and for the router's
 * term of dX. */
static inline int moe_wants_router(const smoe_backward_args *a)
{
    return a->dlogits || a->drouter_weight || a->drouter_bias || (a->dx && a->router_weight);
}

/* Do dlogits include the gradient of a loss? */
static inline int moe_has_losses(const smoe_backward_args *a)
{
    return a->balance_coefficient != 0.0f || a->z_coefficient != 0.0f || a->loss_gradients;
}

/* Is dlogits sparse: nonzero only at the K experts of each token? This holds if the weights depend only on
 * the logits of the kept experts, without rounding and without a loss. */
static inline int moe_dlogits_are_sparse(const smoe_layer *layer, int losses)
{
    return layer->rounding == SMOE_ROUNDING_NONE && !moe_weights_are_p(layer) && !losses;
}

/* Does router_bwd read the logits? Sparse dlogits of a softmax follow from the weights that the plan keeps.
 */
static inline int moe_reads_logits(const smoe_layer *layer, const smoe_backward_args *a)
{
    return moe_score_has_curve(layer->score) || !moe_dlogits_are_sparse(layer, moe_has_losses(a));
}

/* dS is needed for the gradients of the row weights and for dlogits. */
static inline int moe_wants_ds(const smoe_layer *layer, const smoe_backward_args *a, int with_router)
{
    return with_router || (layer->entry == SMOE_ENTRY_FROM_TOPK ? a->dtopk_weights : a->drow_weights) != NULL;
}

static inline int moe_wants_lora1(const smoe_backward_args *a)
{
    return a->dlora_a1 || a->dlora_b1;
}

static inline int moe_wants_lora2(const smoe_backward_args *a)
{
    return a->dlora_a2 || a->dlora_b2;
}

static inline int moe_wants_dh(const smoe_backward_args *a)
{
    return a->dx || a->dw1 || a->db1 || moe_wants_lora1(a) || moe_wants_lora2(a);
}

static inline int moe_wants_dw2(const smoe_backward_args *a)
{
    return a->dw2 || a->db2;
}

static inline int moe_wants_dw1(const smoe_backward_args *a)
{
    return a->dw1 || a->db1;
}

#endif
