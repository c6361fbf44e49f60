/* One run of the library on a device: every buffer poisoned and between canaries, inputs remembered so that a
 * change shows, every result brought to the host. Buffers are slots, one for each pointer of the public API's
 * argument structs:
 *
 *   run_open       asks the library for sizes; run_make makes the wanted slots and fills the argument structs
 *   run_inputs     gives drawn inputs to their slots
 *   run_forward, run_backward, run_check     the calls, and: canaries in place, inputs unchanged?
 *   run_close
 *
 * run_library does all of it. With fp8 it quantises the weights before the forward, and gives no w1 and w2. A
 * function that returns false has left the reason in run.text. */
#ifndef HARNESS_RUN_H
#define HARNESS_RUN_H

#include "harness/buffer.h"
#include "harness/tensors.h"
#include "oracle/draw.h"

typedef enum slot_id {
    SLOT_X,
    SLOT_ROUTER_WEIGHT,
    SLOT_ROUTER_BIAS,
    SLOT_LOGITS,
    SLOT_SELECTION_BIAS,
    SLOT_LOSSES,
    SLOT_TOPK_IDS,
    SLOT_TOPK_WEIGHTS,
    SLOT_OFFSETS,
    SLOT_ROW_WEIGHTS,
    SLOT_W1,
    SLOT_B1,
    SLOT_W2,
    SLOT_B2,
    SLOT_WEIGHTS_F8,
    SLOT_OUT,
    SLOT_SAVED,
    SLOT_SCRATCH_FORWARD,
    SLOT_TOKEN_MASK,
    SLOT_SCRATCH_BACKWARD,
    SLOT_DOUT,
    SLOT_DX,
    SLOT_DW1,
    SLOT_DW2,
    SLOT_DB1,
    SLOT_DB2,
    SLOT_DROUTER_WEIGHT,
    SLOT_DROUTER_BIAS,
    SLOT_DLOGITS,
    SLOT_DTOPK_WEIGHTS,
    SLOT_DROW_WEIGHTS,
    SLOT_LOSS_GRADIENTS,
    SLOTS
} slot_id;

typedef struct slot {
    buffer memory; // all zero when the slot is not wanted
    void *start;   // what it holds when a run begins; NULL: poison
    bool input;    // and must still hold at the end
} slot;

enum { RUN_TEXT = 512 };

typedef struct run {
    const device *on;
    smoe_context *context;
    smoe_layer layer;
    smoe_sizes sizes;
    bool wanted[SLOTS];
    slot slots[SLOTS];
    smoe_forward_args forward;
    smoe_backward_args backward;
    smoe_status status; // of the call that failed
    char text[RUN_TEXT];
} run;

typedef struct run_options {
    bool stages;        // route, round, plan, experts one by one, and the experts' backward alone
    bool forward_only;  // for inference
    bool less_router;   // dlogits and drouter_bias are not asked for
    bool graph;         // both passes from a CUDA graph
    int backwards;      // backward calls on one forward, at least 1; with `accumulate` their gradients add up
    void *traffic;      // device.h: copies are enqueued right before every pass; or NULL
    int64_t repeats;    // how often both passes run again, with the same buffers and outputs poisoned anew
    int64_t *differing; // (TENSORS), added to: elements of each tensor with other bits in a repeat
    bool exact_da;      // the kernels keep dA' in f32; check_layer sets it
} run_options;

/* Which slots these inputs and options need. */
void run_wanted(const smoe_layer *layer, const oracle_drawn *drawn, const run_options *options,
                bool wanted[SLOTS]);

bool run_open(run *opened, const device *on, smoe_context *context, const smoe_layer *layer,
              const bool wanted[SLOTS]);
bool run_make(run *made);
bool run_quantize(run *r); // after the inputs, with fp8: weights_f8 of W1 and W2
void run_close(run *closed);

const char *slot_name(slot_id id);

/* Bytes of a wanted slot's tensor; 0 when it is not wanted. */
uint64_t slot_bytes(const run *r, slot_id id);

static inline const buffer *slot_memory(const run *r, slot_id id)
{
    return &r->slots[id].memory;
}

static inline void *slot_data(const run *r, slot_id id)
{
    return r->slots[id].memory.data;
}

/* A copy on the host of what the slot holds. Free with free(). */
void *slot_read(const run *r, slot_id id);

/* From now on the contents of the slot are an input, which must not change. */
bool slot_keep(run *r, slot_id id);

/* The drawn values in their storage types, and initial gradients where the layer accumulates. */
bool run_inputs(run *r, const oracle_drawn *drawn);

/* Runs the whole layer and waits for it. The scratch of the pass is poisoned first. */
bool run_forward(run *r, const run_options *options);
bool run_backward(run *r, const run_options *options);

bool run_intact(run *r); // the canaries alone
bool run_check(run *r);

/* What gradient buffers hold before a run that accumulates. */
double run_initial_gradient(int64_t i);

typedef enum run_outcome { RUN_OK, RUN_UNSUPPORTED, RUN_FAILED } run_outcome;

/* Fills *got (free with tensors_free). Otherwise the reason is in text: what the library said, a canary that
 * was overwritten, an input that changed. Between forward and backward everything is poisoned but X, the
 * weights, the logits and saved. */
run_outcome run_library(const device *on, smoe_context *context, const smoe_layer *layer,
                        const oracle_drawn *drawn, const run_options *options, tensors *got,
                        char text[RUN_TEXT]);

#endif
