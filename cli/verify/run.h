/* One run of the library on drawn inputs, forward and backward, on a device: every buffer poisoned and
 * between canaries, everything it computed brought back. */
#ifndef CLI_VERIFY_RUN_H
#define CLI_VERIFY_RUN_H

#include "cli/common/device.h"
#include "cli/verify/tensors.h"
#include "oracle/draw.h"

typedef struct run_options {
    bool stages;        // route, round, plan, experts one by one, and the experts' backward alone
    bool forward_only;  // for inference
    bool inside_16;     // the backend keeps in 16 bits what oracle.h's round_inside says
    int backwards;      // backward calls on one forward, at least 1; with `accumulate` their gradients add up
    void *traffic;      // device.h: copies get under way right before every pass; or NULL
    int64_t repeats;    // of both passes after the first time, with the same buffers, outputs poisoned anew
    int64_t *differing; // (TENSORS), added to: elements of each tensor whose bits a repeat had otherwise
} run_options;

typedef enum run_outcome { RUN_OK, RUN_UNSUPPORTED, RUN_FAILED } run_outcome;

enum { RUN_TEXT = 512 };

/* Does the backend have a backward for this layer? One that has asks for scratch. */
bool run_has_backward(smoe_context *context, const smoe_layer *layer);

/* Fills *got (free with tensors_free). Otherwise the reason is in text: what the library said, a canary that
 * was overwritten, an input that changed. Between forward and backward everything is poisoned but X, the
 * weights, the logits and saved. */
run_outcome run_library(const device *on, smoe_context *context, const smoe_layer *layer,
                        const oracle_drawn *drawn, const run_options *options, tensors *got,
                        char text[RUN_TEXT]);

/* What gradient buffers hold before a run that accumulates. */
double run_initial_gradient(int64_t i);

#endif
