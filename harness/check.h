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

/* Told of every tensor in turn. exact: the error is a number of elements, infinity for another shape. */
typedef void check_report(void *user, tensor_id id, const verdict *judged);

/* Inputs are drawn again, up to 40 times, while f32 may decide some routing otherwise than fp64, or while
 * sums cancel so far that rounding at the stores alone reaches the cap. The last draw is used in any case.
 * RUN_OK: the tensors were reported. Otherwise text says why not. */
run_outcome check_layer(const device *on, smoe_context *context, const smoe_layer *layer,
                        const oracle_draw *draw, const check_options *options, check_report *report,
                        void *user, char text[RUN_TEXT]);

/* 5e-3 where bf16 is stored, 1e-3 for f16, 5e-6 for f32 alone. */
double check_cap(const smoe_layer *layer);

#endif
