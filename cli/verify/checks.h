/* What the checks share. */
#ifndef CLI_VERIFY_CHECKS_H
#define CLI_VERIFY_CHECKS_H

#include "cli/verify/verify.h"
#include "harness/run.h"

/* Runs the library. If it fails or the case is skipped, reports this and returns false. context: NULL for
 * that of the verify run. */
bool check_run(verify *v, smoe_context *context, const smoe_layer *layer, const oracle_drawn *drawn,
               const run_options *options, tensors *got);

/* Another context of this device, with an optional callback. NULL when it cannot be made (reported). */
smoe_context *check_context(verify *v, int32_t threads, smoe_stage_callback on_stage, void *user);

/* Reports a line whose error is a count that must be 0. */
void check_zero(verify *v, const char *name, int64_t count, const char *note);

#endif
