/* Expert parallelism, for both backends: a group, the layout of its windows, the values that ranks compare,
 * and what follows from a layer with ranks. */
#ifndef SMOE_EP_INTERNAL_H
#define SMOE_EP_INTERNAL_H

#include "backend.h"

#include <smoe_ep.h>
#include <stdatomic.h>

enum {
    MOE_EP_MAX_RANKS = 72,
    MOE_EP_MAX_PARTS = 8,
    MOE_EP_LINE = 64, /* bytes of a flag's line */
    MOE_EP_GROUP_VALUES = 7,
    MOE_EP_CALL_VALUES = 15,
    MOE_EP_FLOATS = 11, /* the first value of a call that is the bits of a float */
    MOE_EP_VALUES = 16, /* int64 of a description in a window: T, and the above */
    MOE_EP_VERSION = 1  /* of everything in this file */
};

/* The flags. A window has a line for each flag and each source rank, which alone writes it. All but the first
 * two hold moe_ep_mark of the newest call. */
typedef enum moe_ep_flag {
    MOE_EP_FAULT,  /* the source has given up: the line holds a moe_ep_fault */
    MOE_EP_HELLO,  /* 1: the source's description of its group is there */
    MOE_EP_HEADER, /* its description of the call is there, in a forward also its routing */
    MOE_EP_INPUT,  /* a part of its X is there, in a backward of its dO */
    MOE_EP_AGAIN,  /* all of its X is there again, in a backward */
    MOE_EP_RETURN, /* a part of its sums is there: of O, or of dX. With the last part also dS */
    MOE_EP_FREE,   /* it has read all X and dO of the backward */
    MOE_EP_FLAGS
} moe_ep_flag;

/* Marks grow: a flag that is at least a mark says that this part of this call, and all before, are there. */
static inline uint64_t moe_ep_mark(uint64_t call, int part)
{
    return call * (2 * MOE_EP_MAX_PARTS) + (uint64_t)part + 1;
}

/* Part `part` of `parts` of a rank's tokens starts here and ends where the next one starts. */
static inline int64_t moe_ep_part_start(int64_t tokens, int parts, int part)
{
    return tokens * part / parts;
}

/* Why a rank gave up. Every rank that learns it passes it on. */
typedef enum moe_ep_reason {
    MOE_EP_LATE = 1,     /* waited values[1] ms for values[0] (a moe_ep_flag) of `other` */
    MOE_EP_ABORTED = 2,  /* smoe_ep_abort */
    MOE_EP_MISMATCH = 3, /* value number values[0] of the call is values[1], that of `other` values[2] */
    MOE_EP_STRANGER = 4, /* the same for a value of the group */
    MOE_EP_FULL = 5      /* received values[0] rows, row_capacity is values[1] */
} moe_ep_reason;

typedef struct moe_ep_fault {
    uint64_t reason; /* 0: no fault; written last */
    uint64_t call;
    int32_t origin, other; /* ranks */
    int64_t values[3];
} moe_ep_fault;

/* A window: flags, descriptions of all source ranks, then regions. The rows of
 * X, sums (of O, or of dX) and dO are tensors (ranks, max_tokens, d); routing and ds have a stripe for each
 * rank. */
typedef struct moe_ep_window {
    int64_t max_tokens, row_bytes;
    int64_t experts; /* E / W */
    int64_t pairs;   /* the most rows that one rank can send to one other */
    int training;
    uint64_t routing_stripe; /* counts (experts) i32; tokens (pairs) i32 and weights (pairs) f32, by expert */
    uint64_t ds_stripe;      /* (pairs) f32, in the order of the routing that this rank sent to the source */
    uint64_t hello, header;  /* offsets: (72, MOE_EP_VALUES) int64 each */
    uint64_t routing, x, dout, sums, ds;
    uint64_t bytes;
} moe_ep_window;

void moe_ep_window_init(moe_ep_window *window, const smoe_layer *layer);

/* What a rank does with the rows that it receives: a layer FROM_TOPK with E/W experts and ranks * max_tokens
 * tokens. Its part of saved (for inference: of scratch) is behind the plan of the rank's own tokens. */
typedef struct moe_ep_problem {
    moe_problem received;
    int parts;                     /* in which tokens travel */
    uint64_t starts_at, tokens_at; /* offsets from the received part's first byte */
    uint64_t bytes;                /* of this part */
    uint64_t metadata_bytes;       /* unpadded */
} moe_ep_problem;

void moe_ep_problem_init(moe_ep_problem *ep, const smoe_layer *layer);

typedef struct moe_ep_arrays {
    moe_plan_arrays plan; /* of the received rows */
    int32_t *starts;      /* (E/W, ranks) the first padded row of an expert that comes from a source */
    int64_t *tokens;      /* (ranks) T of each source */
} moe_ep_arrays;

/* The received part of `buffer`: saved, or for inference the start of scratch. */
moe_ep_arrays moe_ep_arrays_at(const moe_ep_problem *ep, const moe_problem *problem, void *buffer);

struct smoe_ep {
    smoe_context *context;
    int32_t ranks, rank;
    uint32_t timeout_ms;
    moe_ep_window window;
    char *windows[MOE_EP_MAX_RANKS];
    int met;               /* the groups of all ranks have been compared */
    uint64_t call;         /* the number of the current forward or backward */
    uint64_t backwards;    /* the number of the last backward: others may still read its X and dO */
    int next, in_backward; /* MOE_DISPATCH: of any pass; else the stage that comes next */
    atomic_int aborted;
    moe_ep_fault fault; /* reason 0: none */
    char error[SMOE_ERROR_TEXT];
};

/* The values that are compared between ranks. */
void moe_ep_group_values(const smoe_ep *ep, int64_t values[MOE_EP_GROUP_VALUES]);
void moe_ep_call_values(const moe_problem *problem, int backward, int wanted,
                        int64_t values[MOE_EP_CALL_VALUES]);

/* Which gradients a backward wants, as a set of bits. */
int moe_ep_wanted(const smoe_layer *layer, const smoe_backward_args *args, int with_router);

/* Notes the fault and makes ep->error. */
void moe_ep_note(smoe_ep *ep, const moe_ep_fault *fault);

/* OK, or SMOE_ERROR_PEER with the group's error text. */
smoe_status moe_ep_outcome(smoe_context *context, const smoe_ep *ep);

/* Checks that the first of these stages comes next in the group, and that the layer fits. */
smoe_status moe_ep_begin(smoe_context *context, const moe_problem *problem, smoe_ep *ep, int stages,
                         int backward);

#endif
