/* The kernels of layers with ranks, as the host side sees them: see launch.h. They move rows between windows
 * and wait for flags. A kernel that waits has one warp, or for few rows a few CTAs, so that no SM or few are
 * held: another rank's kernels may need them. Once the group has failed, kernels that send or wait do
 * nothing, and the plan of received rows is empty. */
#ifndef MOE_CUDA_EP_LAUNCH_H
#define MOE_CUDA_EP_LAUNCH_H

#include "ep_window.h"
#include "host/launch_backward.h"

#ifdef __cplusplus
extern "C" {
#endif

/* In the owner's window. Kernels count the calls, so that a graph may be launched again and again. */
typedef struct moe_ep_state {
    uint64_t call;     /* the number of the current forward or backward */
    uint64_t reading;  /* the number of the last call whose rows others may still read: MOE_EP_FREE ends it */
    int64_t row_bytes; /* of that call, if it was a forward; else 0 */
    uint32_t met;      /* the groups of all ranks have been compared */
    uint32_t failed;   /* the group has failed on this rank */
    uint32_t arrived[MOE_EP_FLAGS]; /* CTAs that are done, of the grid that will set the flag, or with
                                       MOE_EP_FAULT of collect; 0 between grids */
} moe_ep_state;

/* In pinned host memory. */
typedef struct moe_ep_report {
    moe_ep_fault fault; /* written by the device */
    uint32_t aborted;   /* written by the host */
} moe_ep_report;

/* The group and the windows' layout, as kernels see them. */
typedef struct moe_ep_view {
    char *windows[MOE_EP_MAX_RANKS];
    moe_ep_report *report;
    uint64_t state; /* offsets as in moe_ep_window */
    uint64_t hello, header, routing, sums, ds;
    uint64_t routing_stripe, ds_stripe;
    int64_t pairs, max_tokens;
    int32_t stripe_experts; /* of the window, for the places in a stripe of routing */
    int32_t ranks, rank, parts;
    uint32_t timeout_ms;
} moe_ep_view;

/* ---- meet.cu ---- */

typedef struct moe_ep_begin_call {
    moe_ep_view view;
    int64_t group_values[MOE_EP_GROUP_VALUES], call_values[MOE_EP_CALL_VALUES];
    int64_t tokens; /* of this rank */
    int64_t row_bytes;
    int32_t backward;
} moe_ep_begin_call;

/* Starts a call: waits until all groups exist and nobody reads rows whose place this call's may take, then
 * describes the call to all ranks. A backward's flag MOE_EP_HEADER is set here, a forward's by
 * moe_cuda_ep_send_routing. */
cudaError_t moe_cuda_ep_begin(const moe_launch *on, const moe_ep_begin_call *call);

/* Waits for the descriptions of all ranks and compares them; tokens (ranks) receives T of each, 0 after a
 * failure. */
cudaError_t moe_cuda_ep_take_headers(const moe_launch *on, const moe_ep_begin_call *call, int64_t *tokens);

/* The received rows whose H is not kept: those of the blocks kept..*end - 1. */
typedef struct moe_ep_past {
    const int32_t *end;
    int32_t kept; /* INT32_MAX: H of all rows is kept */
} moe_ep_past;

/* Waits for a part of all other ranks. past: only if there are such rows; NULL: always. */
cudaError_t moe_cuda_ep_gate(const moe_launch *on, const moe_ep_view *view, moe_ep_flag flag, int part,
                             const moe_ep_past *past);
/* Sets MOE_EP_FREE in all other windows, then waits as moe_cuda_ep_gate. */
cudaError_t moe_cuda_ep_free_and_gate(const moe_launch *on, const moe_ep_view *view, moe_ep_flag flag,
                                      int part);
/* Sets a flag in all other windows. */
cudaError_t moe_cuda_ep_signal(const moe_launch *on, const moe_ep_view *view, moe_ep_flag flag, int part);

/* ---- ep_plan.cu ---- */

/* What is read of the plan of a rank's own tokens. */
typedef struct moe_ep_own_plan {
    const int32_t *row_token, *token_rows, *token_offsets, *counts, *offsets, *block_offsets;
    const float *row_weight;
    int32_t each; /* experts of a rank */
} moe_ep_own_plan;

/* To every rank its rows: counts, tokens and weights. Sets MOE_EP_HEADER. */
cudaError_t moe_cuda_ep_send_routing(const moe_launch *on, const moe_ep_view *view,
                                     const moe_ep_own_plan *plan);

/* The plan of the received rows: see ep_plan.cu. Experts are those of this rank. */
typedef struct moe_ep_received_plan {
    moe_ep_view view;
    const int64_t *tokens; /* (ranks) */
    int32_t experts, padded_rows, piece_limit;
    /* out, as in smoe_plan_view */
    int32_t *counts, *offsets, *block_offsets, *order, *row_token, *token_offsets, *token_rows;
    float *row_weight;
    int32_t *starts, *spans, *run_blocks;       /* as in moe_ep_arrays */
    moe_cuda_lists lists[MOE_EP_MAX_PARTS + 2]; /* of each wave */
    /* work space */
    int32_t *run_counts; /* (experts, waves, ranks) */
    int32_t *sent;       /* (experts, waves, ranks) place of a run's first row in its source's stripe */
    uint32_t *mask;      /* (slots, words) bit e % 32 of word e / 32: expert e has the slot */
    int32_t words;
} moe_ep_received_plan;

cudaError_t moe_cuda_ep_plan(const moe_launch *on, const moe_ep_received_plan *plan);

/* For at most so many slots and padded rows, and one wave: take_headers, the plan and the gate of X in one
 * launch. */
enum { MOE_EP_FEW_SLOTS = 4095, MOE_EP_FEW_ROWS = 8192 };
cudaError_t moe_cuda_ep_plan_few(const moe_launch *on, const moe_ep_received_plan *plan,
                                 const moe_ep_begin_call *call, int64_t *tokens);

/* The work lists of each wave for dh and dx_rows, without the rows whose H is not kept. */
typedef struct moe_ep_backward_waves {
    const int32_t *run_blocks;
    int32_t experts, waves, piece_limit;
    moe_ep_past past;
    int32_t *kept_blocks; /* (experts waves + 1) run_blocks, each at most past.kept; NULL: H of all rows is
                             kept. With the next two: */
    moe_cuda_backward_lists not_kept; /* the other rows, of all waves */
    moe_cuda_backward_lists all;      /* all rows if there are others, else none */
    moe_cuda_backward_lists lists[MOE_EP_MAX_PARTS + 2];
} moe_ep_backward_waves;
cudaError_t moe_cuda_ep_backward_waves(const moe_launch *on, const moe_ep_backward_waves *waves);
/* For few rows and one wave the same, take_headers, and the gates of dO and, with `again`, of X. */
cudaError_t moe_cuda_ep_enter_few(const moe_launch *on, const moe_ep_backward_waves *waves,
                                  const moe_ep_begin_call *call, int64_t *tokens, int again);

/* ---- rows.cu ---- */

/* A (T, d) tensor, its place in windows, and the flag that says that it is there. */
typedef struct moe_ep_moved {
    const void *rows;
    uint64_t region;
    moe_ep_flag flag;
} moe_ep_moved;

/* Rows first..end - 1 to the ranks that need them; own: also to this rank's window. Sets the flag for `part`.
 */
typedef struct moe_ep_push {
    moe_ep_view view;
    moe_ep_own_plan plan;
    moe_ep_moved moved;
    int64_t first, end, row_bytes;
    int32_t part, own;
} moe_ep_push;
cudaError_t moe_cuda_ep_push(const moe_launch *on, const moe_ep_push *push);

/* For few rows (above) and one wave: begin, send_routing in a forward, and push of all rows of `tensors`
 * tensors, in one launch. */
typedef struct moe_ep_begin_few {
    moe_ep_begin_call begin;
    moe_ep_own_plan plan;
    moe_ep_moved moved[2];
    int32_t tensors;
} moe_ep_begin_few;
cudaError_t moe_cuda_ep_begin_few(const moe_launch *on, const moe_ep_begin_few *begin);

/* Sums over the rows of each received token of a wave, to the token's rank: of the tokens that have only rows
 * whose H is kept; or, not for a wave but for all, of the others. */
typedef struct moe_ep_return {
    moe_ep_view view;
    const void *y;           /* (padded_rows, columns) */
    const float *row_weight; /* NULL: ones */
    const int32_t *token_offsets, *token_rows;
    const int64_t *tokens; /* (ranks) */
    int64_t hidden, first_column, columns;
    moe_ep_past past;
    int32_t others; /* 1: the others; wave is not used */
    int32_t wave;
    int32_t part; /* MOE_EP_RETURN is set for it; -1: not set */
} moe_ep_return;
cudaError_t moe_cuda_ep_return(const moe_launch *on, const moe_ep_return *call);

/* out[t] = router's term + the sums of all ranks, ascending. NaN after a failure. */
typedef struct moe_ep_collect {
    moe_ep_view view;
    moe_ep_own_plan plan;
    void *out;    /* (T, hidden) */
    int32_t onto; /* as in moe_cuda_combine */
    const moe_cuda_term *terms;
    const void *router_weight;
    int64_t tokens, hidden;
    int32_t waits; /* 1: the kernel itself waits for the sums: for few tokens, on few SMs */
    int32_t frees; /* 1, with waits: it sets MOE_EP_FREE before */
} moe_ep_collect;
cudaError_t moe_cuda_ep_collect(const moe_launch *on, const moe_ep_collect *collect);

/* ---- ep_ds.cu ---- */

/* dS of received rows, the sum of `parts` parts, to the ranks of their tokens. */
typedef struct moe_ep_send_ds {
    moe_ep_view view;
    const float *partial; /* (parts, padded_rows) */
    const int32_t *starts, *counts, *block_offsets, *row_token;
    const int64_t *tokens; /* (ranks) */
    int64_t padded_rows;
    int32_t parts, experts;
    int32_t part; /* MOE_EP_RETURN is set for it; -1: not set */
} moe_ep_send_ds;
cudaError_t moe_cuda_ep_send_ds(const moe_launch *on, const moe_ep_send_ds *ds);

/* ds (padded rows of the own plan) from what all ranks returned. Pad rows are not written. */
cudaError_t moe_cuda_ep_take_ds(const moe_launch *on, const moe_ep_view *view, const moe_ep_own_plan *plan,
                                float *ds);

/* The same for each pair of the given top-K, instead of take_ds. */
typedef struct moe_ep_take_topk {
    moe_ep_own_plan plan;
    const void *ids; /* (T, K) */
    float *gradient; /* (T, K) */
    int64_t tokens;
    int32_t topk, wide_index;
} moe_ep_take_topk;

enum { MOE_EP_OUTPUTS = 9 };

/* What a call writes becomes NaN if the group has failed. Else dS is taken; topk may be NULL. */
typedef struct moe_ep_outputs {
    void *at[MOE_EP_OUTPUTS];      /* NULL: none */
    int64_t bytes[MOE_EP_OUTPUTS]; /* multiples of 2 */
} moe_ep_outputs;
cudaError_t moe_cuda_ep_finish(const moe_launch *on, const moe_ep_view *view, const moe_ep_outputs *outputs,
                               const moe_ep_take_topk *topk);

#ifdef __cplusplus
}
#endif
#endif
