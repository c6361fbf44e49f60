/* One table of cases: layers with the inputs to draw for them. `smoe verify` runs it on every backend and on
 * the emulator. A new case is one line, in cases.c, or in kernel_cases.c if it is made for one kernel. */
#ifndef HARNESS_CASES_H
#define HARNESS_CASES_H

#include "oracle/draw.h"

/* What is checked. `smoe verify --check` runs any of the first four on a case that names one of them. */
typedef enum case_check {
    CASE_COMPARE,     /* every tensor against the oracle; if integers are drawn, every element is equal */
    CASE_BITS,        /* equivalent calls give the same bits */
    CASE_GRADIENTS,   /* any subset of the gradients has the bits that it has if all are computed */
    CASE_SUPPORT,     /* does the backend take this layer? */
    CASE_REPEATS,     /* the same bits in many runs while another stream copies memory */
    CASE_ISOLATION,   /* a NaN of one expert does not reach others */
    CASE_NAN_LOGITS,  /* exactly the tokens that keep a NaN logit are NaN */
    CASE_BIAS_UPDATE, /* smoe_update_selection_bias */
    CASE_SAVED_BYTES  /* the formula for the bytes kept */
} case_check;

typedef struct layer_case {
    const char *name;
    case_check check;
    bool quick;        /* part of `smoe verify --quick` */
    bool kernel;       /* of kernel_cases.c: only `smoe verify --all` runs it; on the CPU never to equality */
    unsigned types;    /* bits 1 << smoe_type; 0: every storage type */
    bool stages;       /* the stages one by one instead of the whole layer */
    bool forward_only; /* no backward */
    bool inexact;      /* although integers are drawn */
    bool other_ways;   /* after the comparison: the ways of check_other_ways give the same bits */
    smoe_layer layer;  /* fields that are 0 have their default, see case_layer */
    oracle_draw draw;
} layer_case;

/* The i-th case; NULL past the last. */
const layer_case *case_at(size_t i);

/* The case's layer with defaults: T = 150, d = 64, n = 32, E = 8, K = 2 (rows: 1), tile 16. */
smoe_layer case_layer(const layer_case *c, smoe_type dtype);

/* The table of kernel_cases.c. */
extern const layer_case moe_kernel_cases[];
extern const size_t moe_kernel_case_count;

#endif
