/* What the ranks of a group write into each other's windows: for the host (C11) and the device (CUDA). */
#ifndef MOE_EP_WINDOW_H
#define MOE_EP_WINDOW_H

#include "routing_decisions.h"

#include <stdint.h>

enum {
    MOE_EP_MAX_RANKS = 72,
    MOE_EP_MAX_PARTS = 8,
    MOE_EP_LINE = 64, /* bytes of a flag's line */
    MOE_EP_GROUP_VALUES = 7,
    MOE_EP_CALL_VALUES = 16,
    MOE_EP_FLOATS = 12, /* the first value of a call that is the bits of a float */
    MOE_EP_VALUES = 17, /* int64 of a description in a window: T, and the above */
    MOE_EP_STATE_BYTES = 256,
    MOE_EP_VERSION = 2 /* of everything in this file */
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
    MOE_EP_FREE,   /* it has read all X and dO of a backward; on a GPU also all X of a forward in waves */
    MOE_EP_FLAGS
} moe_ep_flag;

/* Marks grow: a flag that is at least a mark says that this part of this call, and all before, are there. */
MOE_HOST_DEVICE uint64_t moe_ep_mark(uint64_t call, int part)
{
    return call * (2 * MOE_EP_MAX_PARTS) + (uint64_t)part + 1;
}

/* Part `part` of `parts` of a rank's tokens starts here and ends where the next one starts. */
MOE_HOST_DEVICE int64_t moe_ep_part_start(int64_t tokens, int parts, int part)
{
    return tokens * part / parts;
}

/* In what order a GPU computes the rows that it receives. With one part there is one wave. With more, wave 0
 * has the first half of the rank's own tokens and the last wave the second half, and wave p + 1 has part p of
 * the tokens of all others. A rank's own rows travel nowhere, so the first and the last transfer pass while
 * they are computed. */
MOE_HOST_DEVICE int moe_ep_waves(int parts)
{
    return parts == 1 ? 1 : parts + 2;
}

/* The first token of a source in a wave; those of the wave end where those of the next wave start. */
MOE_HOST_DEVICE int64_t moe_ep_wave_start(int64_t tokens, int parts, int own, int wave)
{
    if (parts == 1) return wave ? tokens : 0;
    if (own) return wave == 0 ? 0 : wave < parts + 2 ? tokens / 2 : tokens;
    return moe_ep_part_start(tokens, parts, wave < 1 ? 0 : wave > parts ? parts : wave - 1);
}

/* Why a rank gave up. Every rank that learns it passes it on. */
typedef enum moe_ep_reason {
    MOE_EP_LATE = 1,     /* waited values[1] ms for values[0] (a moe_ep_flag) of `other` */
    MOE_EP_ABORTED = 2,  /* smoe_ep_abort */
    MOE_EP_MISMATCH = 3, /* value number values[0] of the call is values[1], that of `other` values[2] */
    MOE_EP_STRANGER = 4  /* the same for a value of the group */
} moe_ep_reason;

typedef struct moe_ep_fault {
    uint64_t reason; /* 0: no fault; written last */
    uint64_t call;
    int32_t origin, other; /* ranks */
    int64_t values[3];
} moe_ep_fault;

/* A window: flags, descriptions of all source ranks, what a GPU keeps for its own rank, then regions. The
 * rows of X, sums (of O, or of dX) and dO are tensors (ranks, max_tokens, d); routing and ds have a stripe
 * for each rank. */
typedef struct moe_ep_window {
    int64_t max_tokens, row_bytes;
    int64_t experts; /* E / W */
    int64_t pairs;   /* the most rows that one rank can send to one other */
    int training;
    uint64_t routing_stripe; /* counts (experts) i32; tokens (pairs) i32 and weights (pairs) f32, by expert */
    uint64_t ds_stripe;      /* (pairs) f32, in the order of the routing that this rank sent to the source */
    uint64_t hello, header;  /* offsets: (72, MOE_EP_VALUES) int64 each */
    uint64_t state;          /* offset: MOE_EP_STATE_BYTES, which only the window's owner uses */
    uint64_t routing, x, dout, sums, ds;
    uint64_t bytes;
} moe_ep_window;

#endif
