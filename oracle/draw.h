/* Seeded inputs for a layer: values rounded to their storage types, and routings of every kind. */
#ifndef ORACLE_DRAW_H
#define ORACLE_DRAW_H

#include "oracle/oracle.h"

/* How the tokens are distributed over the experts. */
typedef enum oracle_routing {
    ORACLE_RANDOM = 0,    /* normal logits; distinct random ids; random offsets */
    ORACLE_ONE_TAKES_ALL, /* expert 0 is every token's first choice */
    ORACLE_HALF_EMPTY,    /* odd experts get no tokens, if K allows it */
    ORACLE_TIES,          /* all logits equal */
    ORACLE_COUNTS         /* K = 1 or rows: expert e gets counts[e] tokens in turn, the other tokens none */
} oracle_routing;

typedef struct oracle_draw {
    oracle_routing routing;
    const int64_t *counts; /* (E), their sum T (FROM_ROWS: at most T); COUNTS only */
    bool router;           /* Wr and its product instead of given logits */
    bool router_bias, selection_bias, b1, b2;
    bool row_weights; /* FROM_ROWS: weights other than one */
    bool broken_ids;  /* FROM_TOPK: some ids are out of range or repeated */
    int integers;     /* 0: normally distributed numbers. Otherwise small integers, for which f32 and bf16
                       * arithmetic is exact: one value in this many is -1, 0 or 1, the others are 0 */
    double shift;     /* added to given logits */
    double balance_coefficient, z_coefficient;
    bool loss_gradients; /* these coefficients are given in part through loss_gradients */
    uint64_t step;
    int masked; /* token_mask: 0: none; otherwise one token in this many is left out, 1: all are */
} oracle_draw;

/* Owns the arrays of its input. They are doubles, and may be changed before they are used. */
typedef struct oracle_drawn {
    oracle_input input;
    double *x, *router_weight, *router_bias, *logits, *selection_bias, *topk_weights, *row_weights;
    double *w1, *b1, *w2, *b2, *dout;
    int64_t *topk_ids, *offsets, *token_mask;
    bool loss_gradients;
} oracle_drawn;

void oracle_draw_inputs(const smoe_layer *layer, const oracle_draw *draw, uint64_t seed, oracle_drawn *drawn);
void oracle_drawn_free(oracle_drawn *drawn);

#endif
