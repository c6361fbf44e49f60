/* Layers with ranks: ep_call.c, ep.c (groups, the forward) and ep_backward.c. */
#ifndef MOE_CUDA_EP_H
#define MOE_CUDA_EP_H

#include "ep.h"
#include "host/device.h"
#include "host/ep_launch.h"

/* smoe_ep.backend */
typedef struct moe_cuda_group {
    moe_ep_report *report;
    /* Beside the stages of a layer with several waves, rows travel on `comm`, and a rank's own rows are
     * copied into its window on `aside`. */
    cudaStream_t comm, aside;
    cudaEvent_t turn;                   /* for moe_cuda_ep_follow */
    cudaEvent_t sent[MOE_EP_MAX_PARTS]; /* this rank's rows of a part have been sent, ... */
    cudaEvent_t again;                  /* ... and all of X again */
    cudaEvent_t own, own_again;         /* the own rows are in the window */
} moe_cuda_group;

/* What the three stages of a pass share. */
typedef struct ep_call {
    smoe_context *context;
    smoe_ep *ep;
    const moe_call *call;
    const moe_problem *problem;
    const device_state *state;
    moe_ep_problem received;
    moe_ep_arrays arrays;
    moe_ep_own_plan own;
    moe_ep_begin_call begin; /* has the view */
    moe_launch main, beside; /* beside: for what runs while rows travel; the same with one wave */
    moe_launch comm;         /* for movers */
    int waves;
    int64_t row_bytes;
} ep_call;

extern const moe_ep_table moe_cuda_ep;

/* buffer: saved, or for inference the start of scratch. */
ep_call moe_cuda_ep_call(smoe_context *context, smoe_ep *ep, const moe_call *call, void *buffer, int backward,
                         int wanted);

/* What is enqueued on `stream` from now on starts after what `before` has now. */
cudaError_t moe_cuda_ep_follow(const ep_call *c, cudaStream_t stream, cudaStream_t before);

/* So few that several of the small kernels are one launch. */
int moe_cuda_ep_has_few_rows(const ep_call *c);

/* So few tokens that collect waits for the sums itself. */
int moe_cuda_ep_collect_waits(const ep_call *c);

/* Begins the call and sends the routing (in a forward) and these tensors, of which there are at most two. */
cudaError_t moe_cuda_ep_start(const ep_call *c, const moe_ep_moved moved[2], int tensors);

/* Waits for the rows of a wave, and for all of X again. */
cudaError_t moe_cuda_ep_enter_wave(const ep_call *c, int wave);
cudaError_t moe_cuda_ep_wait_again(const ep_call *c);

/* Waits for all of X again if there are rows whose H is not kept. */
cudaError_t moe_cuda_ep_wait_past(const ep_call *c, const moe_ep_past *past);

/* Sums over the rows of y for columns first..first + columns - 1, in wave 0, without weights or a flag. */
moe_ep_return moe_cuda_ep_return_of(const ep_call *c, const void *y, int64_t first, int64_t columns);
cudaError_t moe_cuda_ep_return_sums(const ep_call *c, const moe_ep_return *sums);

/* The kernels for few rows run if they would without ranks. */
int moe_cuda_ep_few_rows(const ep_call *c);

smoe_status moe_cuda_ep_backward(smoe_context *context, const moe_call *call, const smoe_backward_args *args,
                                 int with_router, int stages);

/* Of the work lists of a wave: those of even routing, in which a rank receives as many rows as its tokens
 * have pairs. */
int32_t moe_cuda_ep_piece_limit(const smoe_layer *layer, const moe_ep_problem *ep);

uint64_t moe_cuda_ep_backward_scratch(const device_state *state, const smoe_layer *layer,
                                      const moe_ep_problem *ep);

/* Room for the received rows. NULL: not wanted. */
void moe_cuda_ep_add_scratch(const device_state *state, const moe_problem *problem, moe_layout *forward,
                             moe_layout *backward);

/* route, round and plan of a rank without tokens. */
smoe_status moe_cuda_no_tokens(smoe_context *context, const moe_call *call, const smoe_forward_args *args);

#endif
