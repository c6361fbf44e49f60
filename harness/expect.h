/* What the oracle expects of a run, tensor by tensor, in the shapes of run_library. */
#ifndef HARNESS_EXPECT_H
#define HARNESS_EXPECT_H

#include "harness/run.h"

/* All decisions are made with the logits that the library used, which are in got. The expected tensor
 * `logits` is computed from Wr if Wr is given. `want` is computed in fp64; `stored` is the same with every
 * stored tensor rounded. Returns the number of decisions that f32 might take differently and still rightly.
 * If it is above 0, draw other inputs. The caller frees both. want may be NULL. */
int64_t expect_tensors(const device *on, const smoe_layer *layer, const oracle_drawn *drawn,
                       const run_options *options, const tensors *got, tensors *want, tensors *stored);

#endif
