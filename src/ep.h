/* Expert parallelism, for both backends: a group, the values that ranks compare, and what follows from a
 * layer with ranks. What ranks write into each other's windows is in ep_window.h. */
#ifndef MOE_EP_INTERNAL_H
#define MOE_EP_INTERNAL_H

#include "backend.h"
#include "ep_window.h"

#include <smoe_ep.h>
#include <stdatomic.h>

void moe_ep_window_init(moe_ep_window *window, const smoe_layer *layer);

/* What a rank does with the rows that it receives: a layer FROM_TOPK with E/W experts and ranks * max_tokens
 * tokens. Its part of saved (for inference: of scratch) is behind the plan of the rank's own tokens. */
typedef struct moe_ep_problem {
    moe_problem received;
    int parts; /* in which tokens travel */
    uint64_t starts_at, tokens_at, spans_at, blocks_at,
        b1_at;               /* offsets from the received part's first byte */
    uint64_t b1_bytes;       /* 0: H of all rows is kept */
    uint64_t bytes;          /* of this part */
    uint64_t metadata_bytes; /* unpadded */
} moe_ep_problem;

void moe_ep_problem_init(moe_ep_problem *ep, const smoe_layer *layer);

typedef struct moe_ep_arrays {
    moe_plan_arrays plan; /* of the received rows */
    int32_t *starts;      /* (E/W, waves, ranks) the first padded row of an expert that comes from a source */
    int32_t *spans;       /* (E/W) rows and pad rows of an expert; this and the next: cuda */
    int32_t *run_blocks;  /* (E/W waves + 1) the first block of an expert's rows of a wave */
    int64_t *tokens;      /* (ranks) T of each source */
    char *b1;             /* NULL, or b1 (E/W, h_width) dtype, zeros if there is none: to compute H again */
} moe_ep_arrays;

/* The received part of `buffer`: saved, or for inference the start of scratch. */
moe_ep_arrays moe_ep_arrays_at(const moe_ep_problem *ep, const moe_problem *problem, void *buffer);

struct smoe_ep {
    smoe_context *context;
    const moe_ep_table *table; /* of the context's backend; a group of the CPU may outlive its context */
    int32_t ranks, rank;
    uint32_t timeout_ms;
    moe_ep_window window;
    char *windows[MOE_EP_MAX_RANKS];
    int met;               /* the groups of all ranks have been compared */
    uint64_t call;         /* the number of the current forward or backward */
    uint64_t backwards;    /* the number of the last backward: others may still read its X and dO */
    int next, in_backward; /* MOE_DISPATCH: of any pass; else the stage that comes next */
    atomic_int aborted;
    void *backend;      /* the backend's own */
    moe_ep_fault fault; /* reason 0: none */
    char error[MOE_ERROR_TEXT];
};

/* The values that are compared between ranks. */
void moe_ep_group_values(const smoe_ep *ep, int64_t values[MOE_EP_GROUP_VALUES]);
void moe_ep_call_values(const moe_problem *problem, int backward, int wanted,
                        int64_t values[MOE_EP_CALL_VALUES]);

/* Which gradients a backward wants, as a set of bits. */
int moe_ep_wanted(const smoe_layer *layer, const smoe_backward_args *args, int with_router);

/* Does a backward send X? For dW1, and to compute H again. All ranks find the same. */
int moe_ep_sends_x(const moe_ep_problem *ep, int wanted);

/* Notes the fault and makes ep->error. */
void moe_ep_note(smoe_ep *ep, const moe_ep_fault *fault);

/* OK, or SMOE_ERROR_PEER with the group's error text. */
smoe_status moe_ep_outcome(smoe_context *context, smoe_ep *ep);

/* Checks that the first of these stages comes next in the group, and that the layer fits. */
smoe_status moe_ep_begin(smoe_context *context, const moe_problem *problem, smoe_ep *ep, int stages,
                         int backward);

#endif
