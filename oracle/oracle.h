/* The fp64 oracle: every equation of smoe.h once more in plain loops, for tests and `smoe verify`. It shares
 * the header's enums and smoe_layer with the library, and no code.
 *
 * Inputs are doubles that the caller has rounded to their storage types. With `round_stores` every tensor
 * that an implementation keeps in memory (logits, weights, H, A, Y, O, A', dH, dX~ and the gradients) is
 * rounded to its storage type. The difference to the same call without it is the error that storage alone
 * causes. The cuda backend keeps two more tensors in 16 bits: dA' with 11 significant bits, and the dlogits
 * from which dWr and dX are computed. `round_inside` rounds these too. Its portable kernels keep dA' in f32
 * (`exact_da`).
 *
 * `undecided` counts the decisions that may differ between f32 and fp64 although both are right: two scores
 * differ by less than a few units in the last place, and their order matters. If it is not 0, draw other
 * inputs.
 *
 * The stages run in order, each on the results of the one before: oracle_logits, oracle_route, oracle_round,
 * oracle_plan, oracle_experts. Between them a caller may compare or replace the results. oracle_forward runs
 * all of them. Free with oracle_forward_free, oracle_backward_free. */
#ifndef ORACLE_ORACLE_H
#define ORACLE_ORACLE_H

#include <smoe.h>
#include <stdbool.h>

/* How the experts' matrices are multiplied: as they are, or quantised to e4m3 (f8.h); with F8_DGRAD dW1 and
 * dW2 are sums of products that are not quantised. */
typedef enum oracle_compute {
    ORACLE_COMPUTE_STORAGE = 0,
    ORACLE_COMPUTE_F8,
    ORACLE_COMPUTE_F8_DGRAD
} oracle_compute;

/* What a layer is given. w is the width of H: 2n with a gate, n without. */
typedef struct oracle_input {
    const double *x;              /* (T, d) */
    const double *router_weight;  /* (E, d), or NULL: then logits are given */
    const double *router_bias;    /* (E) or NULL */
    const double *logits;         /* (T, E); used instead of router_weight if both are given */
    const double *selection_bias; /* (E) or NULL */
    const int64_t *token_mask;    /* (T) or NULL; 0: the token is not in the losses and in topk_counts */
    uint64_t step;
    const int64_t *topk_ids;    /* (T, K): FROM_TOPK */
    const double *topk_weights; /* (T, K) */
    const int64_t *offsets;     /* (E+1): FROM_ROWS */
    const double *row_weights;  /* (T) or NULL */
    const double *w1, *b1;      /* (E, w, d) by layout; (E, w) or NULL */
    const double *w2, *b2;      /* (E, d, n); (E, d) or NULL */
    const double *dout;         /* (T, d); this and what follows: the backward */
    double balance_coefficient, z_coefficient;
    bool round_stores, round_inside; // the second needs the first, and has no effect for F32
    bool exact_da;
    oracle_compute compute;
    bool short_sums; // of e4m3 numbers: as wgmma adds them, see f8.h
} oracle_input;

enum { ORACLE_OUT = 0, ORACLE_KEPT = 1, ORACLE_ADDED = 2 };

typedef struct oracle_forward {
    /* route */
    double *logits;       /* (T, E); this and the other results of route: NULL unless FROM_LOGITS */
    double *probability;  /* (T, E) softmax over all E; NaN logits have 0 */
    double *score;        /* (T, E) what ranks a token inside an expert, before it is rounded to its key */
    int64_t *topk_ids;    /* (T, K) */
    double *topk_weights; /* (T, K) */
    int64_t *topk_counts; /* (E) */
    int64_t counted;      /* tokens in topk_counts and losses */
    double losses[2];
    /* round; for all entries except FROM_ROWS */
    unsigned char *pair; /* (T, E) ORACLE_OUT, _KEPT or _ADDED */
    double *pair_weight; /* (T, E) s of the pair, 0 if it is not routed */
    /* plan */
    int64_t rows;                    /* R */
    int64_t *counts, *offsets;       /* (E), (E+1) */
    int64_t *block_offsets;          /* (E+1) in blocks of 64 rows */
    int64_t *order;                  /* (E) */
    int64_t *row_token, *row_expert; /* (R) */
    int64_t *row_padded;             /* (R) padded index of the row */
    double *row_weight;              /* (R) */
    int64_t *token_offsets;          /* (T+1) */
    int64_t *token_rows;             /* (R) padded rows of each token, ascending */
    /* experts */
    double *h;   /* (R, w) gate columns, then up columns, whatever the layout of W1 */
    double *a;   /* (R, n) */
    double *out; /* (T, d) */
    int64_t undecided;
} oracle_forward;

typedef struct oracle_backward {
    double *ds;             /* (R) */
    double *dx;             /* (T, d) */
    double *dw1, *db1;      /* as w1, b1 */
    double *dw2, *db2;      /* as w2, b2 */
    double *dlogits;        /* (T, E): FROM_LOGITS */
    double *drouter_weight; /* (E, d) */
    double *drouter_bias;   /* (E) */
    double *dtopk_weights;  /* (T, K): FROM_TOPK */
    double *drow_weights;   /* (T): FROM_ROWS */
} oracle_backward;

void oracle_forward_run(const smoe_layer *layer, const oracle_input *input, oracle_forward *forward);
void oracle_forward_free(oracle_forward *forward);

/* with_router: dlogits, the router's gradients and its term of dx as well (FROM_LOGITS). */
void oracle_backward_run(const smoe_layer *layer, const oracle_input *input, const oracle_forward *forward,
                         bool with_router, oracle_backward *backward);
void oracle_backward_free(oracle_backward *backward);

/* The weight of a pair, t E + e, that rounding adds. */
double oracle_added_weight(const smoe_layer *layer, const oracle_forward *forward, int64_t pair);

/* ---- The stages of oracle_forward_run, on a zeroed *forward ---- */

void oracle_logits(const smoe_layer *layer, const oracle_input *input, oracle_forward *forward);
void oracle_route(const smoe_layer *layer, const oracle_input *input, oracle_forward *forward);
void oracle_round(const smoe_layer *layer, const oracle_input *input, oracle_forward *forward);
void oracle_plan(const smoe_layer *layer, const oracle_input *input, oracle_forward *forward);
void oracle_experts(const smoe_layer *layer, const oracle_input *input, oracle_forward *forward);

/* ---- Parts ---- */

bool oracle_gated(smoe_activation activation);
int64_t oracle_h_width(const smoe_layer *layer); /* w */

/* a = act(g, u) with the layer's activation and its values; without a gate g is h and u is ignored. Also the
 * gradients of a, times da. */
double oracle_activate(const smoe_layer *layer, double g, double u);
void oracle_activate_backward(const smoe_layer *layer, double g, double u, double da, double *dg, double *du);

/* The row of W1[e] that gives the gate (part 0) or up (part 1) of feature j. Without a gate part is 0. */
int64_t oracle_w1_row(const smoe_layer *layer, int part, int64_t j);

/* One row of the backward. da (n) is dO W2, before the row weight; oracle_through_activation rounds it if
 * round_inside says so, returns dS[r] = <dA', A> + <dO, b2> and sets dh (w) = dact(H, s dA') and weighted_a
 * (n) = s A, both exact. */
typedef struct oracle_row {
    double *da, *dh, *weighted_a;
} oracle_row;
double oracle_through_activation(const smoe_layer *layer, const oracle_input *input, const oracle_forward *f,
                                 int64_t r, oracle_row *row);

/* What oracle_experts and oracle_backward_run do with quantised operands: H, A and O; dS, dX and the
 * gradients of the experts, to which the backward adds. */
void oracle_f8_experts(const smoe_layer *layer, const oracle_input *input, oracle_forward *forward);
void oracle_f8_backward(const smoe_layer *layer, const oracle_input *input, const oracle_forward *forward,
                        oracle_backward *backward);

/* How many tokens an expert with c tokens under plain top-K gets: lo or hi. NR_S reads `added` and `dropped`,
 * which are S(hi) - S(c) and S(c) - S(lo). BALANCE_F reads the residual r before this expert. */
typedef struct oracle_round_facts {
    uint64_t step, expert;
    double added, dropped;
    int64_t residual;
} oracle_round_facts;
int64_t oracle_round_count(const smoe_layer *layer, int64_t c, const oracle_round_facts *facts);

/* dlogits (T, E) from dS of the rows and the losses. */
void oracle_router_backward(const smoe_layer *layer, const oracle_input *input, const oracle_forward *forward,
                            const double *ds, double *dlogits);

#endif
