/* What the host side of the backward shares: backward.c (the experts) and router_backward.c. */
#ifndef MOE_CUDA_BACKWARD_H
#define MOE_CUDA_BACKWARD_H

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

/* fp8's parts of scratch. dh and dx_rows read dH8; with SMOE_COMPUTE_F8 dw reads the bytes of tokens, and
 * `dh` and `a` of backward_scratch are dH_w and A'_w. */
typedef struct f8_scratch {
    uint64_t dh8, dh_scale;
    uint64_t do8, do_scale;
    uint64_t x8, x_scale; /* these and the next: SMOE_COMPUTE_F8 */
    uint64_t exponent[2]; /* w: (padded_rows, groups), of dH_w and A'_w */
    uint64_t expected;    /* expected[2], largest[2]: (E, groups) each */
} f8_scratch;

/* The uses of the memory at the end of the scratch, in their order. A use begins when no kernel reads what
 * the use before has left there. */
typedef enum shared_use {
    SHARED_FOR_DW2 = 0, /* A', dO8 and the sums of dW2's pieces: dh, dw2; SMOE_COMPUTE_F8: also dH_w and X8 */
    SHARED_FOR_DW1 = 1, /* the sums of dW1's pieces: dw1. dH_w and X8 are still there */
    SHARED_FOR_ROUTER = 2, /* dense dlogits, bias sums and the sums of dWr's pieces: router_bwd */
    SHARED_FOR_DX = 3,     /* dX~ of one chunk: dx_rows, dx */
    SHARED_USES = 4
} shared_use;

/* Offsets from the start of scratch. */
typedef struct backward_scratch {
    uint64_t counts, tiles, pieces, splits, block_expert, ds, dh;
    uint64_t q1, q2; /* LoRA */
    f8_scratch f8;
    uint64_t shared;        /* where the memory with the four uses begins; SMOE_COMPUTE_F8: dh, too */
    uint64_t a, parts2;     /* SHARED_FOR_DW2; a is at its begin, or before it if dw2 comes after dx */
    uint64_t parts1;        /* SHARED_FOR_DW1 */
    uint64_t pair2, pair1;  /* bytes of LoRA's sums at parts2 and parts1; 0: two kernels */
    int64_t parts;          /* bound on pieces of split experts */
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
    const int32_t *block_offsets; /* as in moe_up, for dx_rows: the plan's */
    int32_t block_stride;
    const int32_t *bias_counts; /* (E) rows of an expert that db1 and db2 add: the plan's counts */
    int64_t rows;               /* whole blocks of the padded rows */
    int halves, with_router;
    int sends_ds;   /* dS is for other ranks */
    shared_use use; /* that has begun last */
    moe_launch on;
} backward_call;

static inline int moe_cuda_dw_is_f8(const moe_problem *problem)
{
    return problem->layer.compute == SMOE_COMPUTE_F8;
}

/* ---- backward.c; those of fp8: backward_f8.c ---- */

/* 0 bytes for inference, which saves nothing for a backward. */
void moe_cuda_lay_out_backward(const device_state *state, const moe_problem *problem, moe_layout *layout);

/* The same for a backward whose dw2 and dw1 come after dx. */
void moe_cuda_lay_out_dw_last(const device_state *state, const moe_problem *problem, moe_layout *layout);
backward_call moe_cuda_backward_call(const device_state *state, const moe_problem *problem,
                                     const moe_layout *layout, const moe_plan_arrays *plan,
                                     const smoe_backward_args *args, char *scratch, int with_router,
                                     void *stream);

/* Each lays out from s->shared on, or from `at` on, and returns where that ends: dH8 and its scales; dO8 and
 * its scales; with SMOE_COMPUTE_F8 what dh leaves for dw, and where the sums of pieces begin. */
uint64_t moe_cuda_lay_out_dh8(const moe_problem *problem, backward_scratch *s);
uint64_t moe_cuda_lay_out_do8(const moe_problem *problem, uint64_t at, backward_scratch *s);
uint64_t moe_cuda_lay_out_dw_f8(const moe_problem *problem, backward_scratch *s);

/* The stages; those that are not wanted do nothing. Not all memory in scratch is there at all times: see
 * shared_use. */
cudaError_t moe_cuda_make_backward_lists(const backward_call *call);
cudaError_t moe_cuda_run_dh(backward_call *call);
cudaError_t moe_cuda_dh_f8(backward_call *call, const moe_dh *dh);
cudaError_t moe_cuda_dw_f8(backward_call *call, const moe_dw *dw);
cudaError_t moe_cuda_db1_f8(const backward_call *call, const moe_cuda_db *db1);
cudaError_t moe_cuda_run_ds(const backward_call *call);
cudaError_t moe_cuda_run_dx_rows(backward_call *call, int64_t first_column, int64_t columns);
cudaError_t moe_cuda_dx_rows_f8(backward_call *call, const moe_dx_rows *dx);
cudaError_t moe_cuda_run_dw2(smoe_context *context, backward_call *call);
cudaError_t moe_cuda_run_dw1(smoe_context *context, backward_call *call);
cudaError_t moe_cuda_run_router(smoe_context *context, backward_call *call);
smoe_status moe_cuda_backward(smoe_context *context, const moe_call *call, const smoe_backward_args *args,
                              int with_router);

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
