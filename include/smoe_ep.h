/* smoe: expert parallelism. The experts of a layer are spread over W ranks: GPUs of one host, or threads and
 * processes with the CPU backend. Rank r has the experts r E/W .. (r+1) E/W - 1 and its own tokens.
 *
 * A layer with ranks. smoe_layer.ranks is W, `experts` is E, the number of all experts, and W1, b1, W2, b2
 * and their gradients have the E/W experts of this rank. `tokens` is T of this rank; it may differ from rank
 * to rank and may be 0. X, Wr, the routing, O, dO and dX belong to this rank's tokens. The entry is
 * FROM_LOGITS or FROM_TOPK. Rounding and losses are those of this rank's tokens. smoe_view_plan shows the
 * plan of this rank's tokens for all E experts, without h. The bytes of smoe_sizes include the received rows.
 *
 * Windows. Each rank has a window: window_bytes (smoe_sizes) of memory that all ranks can read and write. The
 * library makes none and needs no communicator: windows may be memory of one process, shared memory, or GPU
 * memory opened by peer access or CUDA IPC. A window is zeroed, and all ranks have passed a barrier after
 * that, before any rank makes its group. Token t of rank s has row s max_tokens + t in the window of each
 * rank that has one of its experts, once for all of these experts. So no counts are exchanged before rows
 * travel, nothing is dropped, and the same inputs give the same bits whatever the timing.
 *
 * A group is what one rank knows about the others. Several layers may use one group, one after the other, if
 * their `ranks` and `max_tokens` are the same and none needs more room than the layer that made it. All ranks
 * make the same calls in the same order, with the same sizes and options, and want the same gradients: a
 * pointer of a gradient says that it is wanted, also where T is 0. What differs is found and named. A rank
 * may have another `layout`, accumulate, gradient_type, chunks, or number of threads.
 *
 * Memory. A rank may receive the rows of all tokens of all ranks. `saved` keeps H of row_capacity rows, and
 * the backward computes H of the others again from X, which travels again for dW1 anyway. No result depends
 * on it. The scratch has room for all rows, `chunks` makes it smaller; layers that run one after the other
 * share it.
 *
 * Results. Let G be the layer without ranks on the tokens of rank 0, 1, ... after each other. H, A, Y, dS and
 * the gradients of weights and biases are bit for bit those of G with the CPU backend. On a GPU this holds
 * for H, A, Y and dS where both take the same kernels, and for the gradients of weights and biases if also
 * `waves` is 1 and no expert has so many rows that several CTAs share it. O and dX are sums over the ranks,
 * ascending, of each rank's sum over its rows, which is rounded to dtype on its way: one rounding more than
 * in G.
 *
 * Failure. A wait for another rank ends after timeout_ms. It also ends when that rank has given up, or when
 * smoe_ep_abort was called. Then the call returns SMOE_ERROR_PEER, and smoe_last_error names the rank, the
 * call's number (the first forward or backward of a group is call 1) and the reason. What the call should
 * have written is NaN. The other ranks are told the reason, so they do not wait for their own timeout. Every
 * later call with this group returns the same. It cannot be repaired: destroy it and make another, with
 * zeroed windows.
 *
 * GPUs. The host waits for nothing; the stream waits for other ranks. So a call that fails may have returned
 * OK: its results are NaN, and smoe_ep_status and every later call return SMOE_ERROR_PEER. Windows are memory
 * of the GPUs of one host: of one process with peer access, or opened by CUDA IPC. A group has a stream of
 * its own, on which rows travel beside the layer's stages. Calls may be captured in a CUDA graph, a pass with
 * all its calls in one. If ranks are threads of one process, set CUDA_MODULE_LOADING=EAGER before CUDA
 * starts: a kernel that is loaded late could wait for one that waits for another rank. Threads that share a
 * GPU also need CUDA_DEVICE_MAX_CONNECTIONS=32 and non-blocking streams, and while a rank may wait for them
 * they allocate nothing and use no default stream. */
#ifndef SMOE_EP_H
#define SMOE_EP_H

#include <smoe.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct smoe_ep_options {
    size_t struct_size;
    int32_t rank;         /* of the caller, 0..ranks - 1 */
    uint32_t timeout_ms;  /* of each wait; 0: 120000 */
    void *const *windows; /* (ranks) windows[r]: the address at which the caller reaches the window of rank r;
                             aligned to 64. Only read during smoe_ep_create */
} smoe_ep_options;
#define SMOE_EP_OPTIONS_INIT                                                                                 \
    {                                                                                                        \
        sizeof(smoe_ep_options), 0, 0, NULL                                                                  \
    }

/* Makes the group of `context`. The windows have at least the window_bytes of `layer`. The call waits for
 * no other rank. On failure *ep is NULL. Errors: those of smoe_supports, ARGUMENT, ALIGNMENT, MEMORY, DEVICE.
 */
SMOE_API smoe_status smoe_ep_create(smoe_ep **ep, smoe_context *context, const smoe_layer *layer,
                                    const smoe_ep_options *options);

/* Destroys the group; NULL is allowed. On a GPU its calls must have ended, and its
 * context must be there. The caller frees no window before
 * all ranks have destroyed their groups: another rank may still write to it. */
SMOE_API void smoe_ep_destroy(smoe_ep *ep);

/* OK, or SMOE_ERROR_PEER with the reason in smoe_last_error of the group's context. Waits for nothing. */
SMOE_API smoe_status smoe_ep_status(smoe_ep *ep);

/* Ends the current wait of this rank and every later one. Any thread may call it at any time before
 * smoe_ep_destroy. */
SMOE_API void smoe_ep_abort(smoe_ep *ep);

/* smoe_layer_forward does what smoe_route, smoe_round, smoe_plan and then these three calls do. They are made
 * one by one when other work goes between them, or when one thread serves several ranks: each call for all
 * ranks, then the next call, so that no wait is longer than the work of other ranks.
 *   smoe_ep_dispatch      sends this rank's routing and X. Needs x
 *   smoe_experts_forward  computes the received rows and sends the sums. Needs the fields under "the experts"
 *                         but x and out
 *   smoe_ep_collect       O from the sums of all ranks. Needs out
 * Every call needs `ep`, `scratch`, and for training `saved`. */
SMOE_API smoe_status smoe_ep_dispatch(smoe_context *context, const smoe_layer *layer,
                                      const smoe_forward_args *args, void *stream);
SMOE_API smoe_status smoe_ep_collect(smoe_context *context, const smoe_layer *layer,
                                     const smoe_forward_args *args, void *stream);

/* smoe_layer_backward does what these three calls do; all take the args of the whole backward.
 *   smoe_ep_dispatch_backward  sends dO, and X again
 *   smoe_experts_backward      computes the received rows, sends the sums of dX and dS; then dw1, dw2, db1,
 * db2 smoe_ep_collect_backward   all other gradients */
SMOE_API smoe_status smoe_ep_dispatch_backward(smoe_context *context, const smoe_layer *layer,
                                               const smoe_backward_args *args, void *stream);
SMOE_API smoe_status smoe_ep_collect_backward(smoe_context *context, const smoe_layer *layer,
                                              const smoe_backward_args *args, void *stream);

#ifdef __cplusplus
}
#endif
#endif /* SMOE_EP_H */
