/* What the oracle expects of a run, tensor by tensor, in the shapes of run_library. */
#ifndef HARNESS_EXPECT_H
#define HARNESS_EXPECT_H

#include "harness/run.h"

/* The logits the library used stand in got, and are taken for every decision; `logits` itself is computed
 * from Wr where that is given. want is pure fp64, stored the same with every stored tensor rounded. Returns
 * how many decisions f32 might rightly take otherwise: above 0 draw again. Free both. want may be NULL. */
int64_t expect_tensors(const device *on, const smoe_layer *layer, const oracle_drawn *drawn,
                       const run_options *options, const tensors *got, tensors *want, tensors *stored);

#endif
