/* What the host side of the backward shares: backward.c (the experts) and router_backward.c. */
#ifndef SMOE_CUDA_BACKWARD_H
#define SMOE_CUDA_BACKWARD_H

#include "host/device.h"
#include "host/launch_backward.h"

/* The router's parts of scratch, offsets from its start. */
typedef struct router_scratch {
    uint64_t counts, tiles, pieces, splits, block_expert; /* work lists: the tokens are one expert's rows */
    uint64_t terms;                                       /* (T, K), layers that may be sparse */
    uint64_t end;                                         /* of the parts that dx still reads */
    uint64_t dense;                                       /* dlogits (T, stride) dtype */
    uint64_t bias_sums;                                   /* (moe_cuda_dlogits_ctas, stride) */
    uint64_t parts;                                       /* dWr's tiles of each piece of the tokens */
    uint64_t passing_end;                                 /* of the parts that only router_bwd uses */
    int32_t stride;                                       /* E to the next multiple of 8 */
    int32_t pieces_at_once; /* number of pieces whose units of dWr fit on the SMs at once */
    int32_t parts_count;    /* 0: the tokens are one piece */
} router_scratch;

/* Offsets from the start of scratch. */
typedef struct backward_scratch {
    uint64_t counts, tiles, pieces, splits, block_expert, ds, dh, a, parts2, end;
    int64_t parts;          /* bound on pieces of split experts */
    uint64_t shared;        /* a; later dw1's tiles of split experts, the router's parts, and dX~ */
    int32_t tiles2, tiles1; /* of an expert's dW2 and dW1 */
    int32_t ds_parts;       /* without b2's */
    router_scratch router;  /* FROM_LOGITS */
} backward_scratch;

/* What the stages share. */
typedef struct backward_call {
    const moe_problem *problem;
    const smoe_backward_args *args;
    const moe_plan_arrays *plan;
    const device_state *state;
    backward_scratch at;
    moe_cuda_backward_lists lists;
    char *scratch, *dh, *a;
    int64_t rows; /* whole blocks of the padded rows */
    int halves, with_router;
    moe_launch on;
    cudaStream_t stream;
} backward_call;

/* ---- router_backward.c ---- */

/* Lays out the parts from `at` on. The parts that only router_bwd uses start at `end`, in memory that other
 * stages use too. */
router_scratch moe_cuda_router_scratch(const device_state *state, const moe_problem *problem, uint64_t at);

/* Does router_bwd need its work lists? For dWr and for dense dlogits Wr. */
int moe_cuda_router_has_lists(const backward_call *call);
moe_cuda_make_lists moe_cuda_router_lists(const backward_call *call);

/* Computes those of dlogits, dbr and dWr that are wanted. If dlogits is dense, it also writes the router's
 * term of dX to dx. */
cudaError_t moe_cuda_router_backward(backward_call *call);

/* What dx adds to the sums over rows, for the chunk from first_column on. */
void moe_cuda_router_term(const backward_call *call, int64_t first_column, moe_cuda_combine *combine);

#endif
