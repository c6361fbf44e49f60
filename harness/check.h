/* The library against the oracle: draws inputs, runs both, judges tensor by tensor. */
#ifndef HARNESS_CHECK_H
#define HARNESS_CHECK_H

#include "harness/run.h"

typedef struct check_options {
    run_options run;
    bool exact;    // small integers: every element the same. Otherwise within the limits of tensor_judge
    double looser; // times the cap of check_cap, for tensors of a few terms; 0: 1
    uint64_t seed;
} check_options;

/* Called for every tensor. exact: the error is a number of elements, or infinity if the shape differs. */
typedef void check_report(void *user, tensor_id id, const verdict *judged);

/* Inputs are drawn again, up to 40 times, as long as f32 and fp64 may decide the routing differently, or sums
 * cancel so much that rounding to the storage type alone reaches the limit. The last draw is used in any
 * case. RUN_OK: the tensors were reported. Otherwise text says why not. */
run_outcome check_layer(const device *on, smoe_context *context, const smoe_layer *layer,
                        const oracle_draw *draw, const check_options *options, check_report *report,
                        void *user, char text[RUN_TEXT]);

/* 5e-3 where bf16 is stored, 1e-3 for f16, 5e-6 for f32 alone; with fp8 0.02 from the oracle that quantises
 * too. */
double check_cap(const smoe_layer *layer);

/* tensor_judge or, with fp8, `got` against `stored` alone. */
verdict check_judge(const smoe_layer *layer, tensor_id id, const tensor *got, const tensor *want,
                    const tensor *stored, double cap);

#endif
