/* Which parts of a backward are needed. A gradient whose pointer is NULL is not wanted. Intermediate results
 * that only such gradients need are not computed. */
#ifndef SMOE_WANTED_H
#define SMOE_WANTED_H

#include <smoe.h>

/* dlogits of a layer from logits are needed for the caller, for the router's gradients and for the router's
 * term of dX. */
static inline int moe_wants_router(const smoe_backward_args *a)
{
    return a->dlogits || a->drouter_weight || a->drouter_bias || (a->dx && a->router_weight);
}

/* dS is needed for the gradients of the row weights and for dlogits. */
static inline int moe_wants_ds(const smoe_layer *layer, const smoe_backward_args *a, int with_router)
{
    return with_router || (layer->entry == SMOE_ENTRY_FROM_TOPK ? a->dtopk_weights : a->drow_weights) != NULL;
}

static inline int moe_wants_dh(const smoe_backward_args *a)
{
    return a->dx || a->dw1 || a->db1;
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
