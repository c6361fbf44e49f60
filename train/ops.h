/* The operations that a model consists of: one table, filled by each kind of device (train/cpu, train/cuda).
 *
 * Activations, weights and gradients of activations have the device's `type`, gradients of weights
 * `grad_type`. Sums over rows, statistics and losses are f32. Matrices are row-major. Pointers are to memory
 * of the device (`allocate`). The device executes the operations one after another, and a call may return
 * before its operation is done. If an operation fails, the error is stored in `failure`. `finish` waits for
 * all operations and reports this error. The same inputs give the same bits, on every call.
 *
 * T rows of a pass (sequences * length), d hidden size. With `add`, results are added to what is there. */
#ifndef TRAIN_OPS_H
#define TRAIN_OPS_H

#include "base/error.h"
#include "smoe.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct train_ops train_ops;

/* What the gradients of the weights, and their sums, are chosen to be. */
typedef enum gradient_choice {
    GRADIENTS_DEFAULT, // bf16 if weights and states are and there is one pass a step, else f32
    GRADIENTS_F32,
    GRADIENTS_BF16
} gradient_choice;

/* The part of a device that the model uses. The backend's own state follows it in memory. */
typedef struct train_device {
    const train_ops *ops;
    const char *name; // "cpu", "cuda"
    int index;        // cuda: which GPU of this host
    smoe_backend backend;
    smoe_type type, grad_type;
    smoe_type state_type; // of AdamW's moments
    bool master;          // the optimiser keeps a copy of the weights in f32
    void *stream;         // what the library's calls are enqueued on
    bool adds_gradients;  // gradients are zero at the start of a step (else its first pass writes them)
    int64_t loss_rows;    // rows whose logits exist at a time, 0: all of a pass
    int backward_sms;     // of a GPU that the library's stages may take in a backward, 0: all
    int64_t most_hidden;  // limits of the hidden size and of a head's; 0: none
    int64_t most_head;
    error failure; // of the first operation that failed
} train_device;

/* The sequences of a pass, for attention and RoPE. d = heads * head_size. Rows of q and k have d elements. v
 * is a part of the projection, so its rows are 3 d elements apart. */
typedef struct pass_shape {
    int64_t sequences, length, heads, head_size;
    int64_t first;     // position of the first row; if not 0: one sequence, and earlier rows are in k and v
    bool forward_only; // no backward follows, so attention need not save anything for it
} pass_shape;

/* The tokens of one pass on the device. */
typedef struct device_batch {
    const int32_t *tokens, *targets; // (T); targets only for a pass with a loss
    const int32_t *order;            // (T) rows by token, those of one token ascending, and
    const int32_t *runs;             // (T + 2) where each token's rows begin in `order`, T, then -1; or NULL
} device_batch;

/* The parameters of AdamW that change from step to step, in device memory. */
typedef struct adamw_step {
    double lr, beta1, beta2, eps, weight_decay, clip; // clip: largest norm of the gradient
    int64_t step;                                     // counts from 1
} adamw_step;

/* Weights [first, first + count) in the layout of all weights, whose states begin at `state`. */
typedef struct state_run {
    int64_t first, count, state;
    bool copy; // other ranks have them too, and another one writes them to a checkpoint
} state_run;

/* The arrays of an optimiser, all in the layout of the weights. [0, matrices) has weight decay, [matrices,
 * total) has not.
 */
typedef struct adamw_arrays {
    void *weights; // type: what passes read
    float *master; // the weights in f32, or NULL if there are only `weights`
    void *first, *second;
    smoe_type state_type; // of the moments
    int64_t matrices, total;
    const state_run
        *runs; // the weights whose states are here, ascending; NULL: all. `weights` always has all
    int64_t run_count, states; // states: elements of first, second and master
} adamw_arrays;

/* Weights [first, first + count) of that layout and where their gradients are; both multiples of 8. */
typedef struct grad_span {
    void *grads; // grad_type
    int64_t first, count;
    int64_t state; // where their moments and master weights begin; `first`, unless the states are shared out
} grad_span;

struct train_ops {
    /* ---- the device ---- */
    void (*close)(train_device *dv);
    void *(*allocate)(train_device *dv, size_t bytes); // aligned to 256; NULL: no memory
    void (*release)(train_device *dv, void *memory);
    size_t (*available)(train_device *dv); // bytes that allocate can still give, 0: not known
    size_t (*used)(train_device *dv);      // bytes in use by the driver's count, 0: not known
    /* Host memory with fast copies to and from the device (pinned); NULL: no memory. */
    void *(*allocate_host)(train_device *dv, size_t bytes);
    void (*release_host)(train_device *dv, void *memory);
    /* Copies to the device. `host` may be changed after the return, or after `finish` if it is memory of
     * allocate_host. */
    void (*upload)(train_device *dv, void *to, const void *host, size_t bytes);
    void (*download)(train_device *dv, void *host, const void *from, size_t bytes); // done on return
    /* Copies f32 on the host to `type` on the device (as upload), and back */
    void (*store)(train_device *dv, void *to, smoe_type type, const float *host, int64_t count);
    void (*load)(train_device *dv, float *host, const void *from, smoe_type type, int64_t count);
    void (*clear)(train_device *dv, void *memory, size_t bytes);
    void (*copy)(train_device *dv, void *to, const void *from, size_t bytes); // on the device
    /* Writes values [first, first + count) of a seed's normal values (base/random.h) times deviation, or
     * ones if deviation is 0, in f32 to master and rounded to `to` (type), either of which may be NULL. NULL
     * on the CPU, where the caller draws. */
    void (*draw)(train_device *dv, void *to, smoe_type type, float *master, int64_t first, int64_t count,
                 double deviation, uint64_t seed);
    /* Prepares a batch with `rows` tokens for each of its `parts` passes. The device may still be working on
     * the batch before. targets may be NULL. to (parts) receives the device pointers to which load_batch will
     * copy the batch. The first call must have the most tokens of all calls, and the pointers stay the same.
     * On the CPU they point to the arguments themselves.
     */
    void (*stage_batch)(train_device *dv, device_batch *to, const int32_t *tokens, const int32_t *targets,
                        int64_t rows, int64_t parts, int64_t most, int64_t vocab);
    void (*load_batch)(train_device *dv);
    bool (*finish)(train_device *dv, error *err);
    /* Builds what passes of this shape need in addition to the caller's memory. To be called before the first
     * of them. */
    void (*prepare)(train_device *dv, const pass_shape *shape, bool backward);
    /* Recording. Between record and recorded, operations are recorded instead of executed. replay executes
     * them, any number of times, on the same memory. All three are NULL if the device cannot record. recorded
     * returns NULL on failure. */
    void (*record)(train_device *dv);
    void *(*recorded)(train_device *dv);
    void (*replay)(train_device *dv, void *recording);
    void (*forget)(train_device *dv, void *recording);

    /* ---- forward ---- */
    void (*embed)(train_device *dv, void *x, const void *weight, const int32_t *tokens, int64_t rows,
                  int64_t d);
    /* x += residual (unless NULL); y = x rstd w, rstd = 1 / sqrt(mean(x^2) + eps); all (rows, d), rstd (rows)
     */
    void (*norm)(train_device *dv, void *y, float *rstd, void *x, const void *residual, const void *w,
                 int64_t rows, int64_t d, double eps);
    /* y (rows, out) = x (rows, in) w (out, in)^T + residual (rows, out), which may be y itself or NULL */
    void (*linear)(train_device *dv, void *y, const void *x, const void *w, const void *residual,
                   int64_t rows, int64_t in, int64_t out);
    /* q and k (T, d): the first and second third of qkv (T, 3 d), each normalised over d and turned by RoPE;
     * rstd (2, T); rope: rope_table */
    void (*qk_norm_rope)(train_device *dv, void *q, void *k, float *rstd, const void *qkv, const void *wq,
                         const void *wk, const float *rope, const pass_shape *shape, double eps);
    /* Causal attention: out[i] = sum over j <= i of softmax(<q[i], k[j]> / sqrt(head_size)) v[j]. q and out
     * begin at position shape->first, k and v at position 0. The backward reads `saved` (attention_saved
     * bytes); with shape->forward_only it is scratch. */
    void (*attention)(train_device *dv, void *out, void *saved, const void *q, const void *k, const void *v,
                      const pass_shape *shape);
    size_t (*attention_saved)(train_device *dv, const pass_shape *shape);
    size_t (*attention_scratch)(train_device *dv, const pass_shape *shape);
    /* a (rows, width) = silu(gate) up, h (rows, 2 width) = gate | up */
    void (*swiglu)(train_device *dv, void *a, const void *h, int64_t rows, int64_t width);
    /* losses (rows) = -log softmax(logits[row])[target]; logits (rows, vocab) become scale times the gradient
     * of the sum of the losses */
    void (*cross_entropy)(train_device *dv, void *logits, float *losses, const int32_t *targets, float scale,
                          int64_t rows, int64_t vocab);
    void (*mean)(train_device *dv, double *mean, const float *values, int64_t count);

    /* ---- backward ---- */
    void (*embed_backward)(train_device *dv, void *dweight, const void *dx, const device_batch *batch,
                           int64_t rows, int64_t vocab, int64_t d, bool add);
    /* dx = (with add_dx, +=) the gradient of x, dw = (with add_dw, +=) that of w; y, unless NULL: the norm's
     * output again, with the bits of `norm`; scratch: norm_scratch floats */
    void (*norm_backward)(train_device *dv, void *dx, void *dw, void *y, const void *dy, const void *x,
                          const float *rstd, const void *w, int64_t rows, int64_t d, bool add_dx, bool add_dw,
                          float *scratch);
    int64_t (*norm_scratch)(train_device *dv, int64_t rows, int64_t d);
    void (*linear_dx)(train_device *dv, void *dx, const void *dy, const void *w, int64_t rows, int64_t in,
                      int64_t out, bool add); // dx = dy w
    void (*linear_dw)(train_device *dv, void *dw, smoe_type dw_type, const void *dy, const void *x,
                      int64_t rows, int64_t in, int64_t out, bool add); // dw = dy^T x
    /* to (grad_type) = (with add, +=) f32 values, as the sum of several linear_dw is kept; asked only of
     * devices whose grad_type is not f32 */
    void (*narrow)(train_device *dv, void *to, const float *from, int64_t count, bool add);
    /* Computes the q and k thirds of dqkv from dq and dk, which it may overwrite, and dwq and dwk (d) */
    void (*qk_norm_rope_backward)(train_device *dv, void *dqkv, void *dwq, void *dwk, void *dq, void *dk,
                                  const void *qkv, const float *rstd, const void *wq, const void *wk,
                                  const float *rope, const pass_shape *shape, bool add, float *scratch);
    /* dq, dk (T, d); dv rows have 3 d elements. Only for shape->first = 0. */
    void (*attention_backward)(train_device *dv, void *dq, void *dk, void *dvalue, const void *dout,
                               const void *out, const void *saved, const void *q, const void *k,
                               const void *v, const pass_shape *shape, void *scratch);
    /* Overwrites h with its gradient, computed from da (rows, width) */
    void (*swiglu_backward)(train_device *dv, void *h, const void *da, int64_t rows, int64_t width);

    /* to += from, (count) f32 each */
    void (*add)(train_device *dv, float *to, const float *from, int64_t count);
    /* to += from, (count) each */
    void (*add_counts)(train_device *dv, int32_t *to, const int32_t *from, int64_t count);

    /* ---- the optimiser ---- */
    /* *square = the sum of the squares of count gradients */
    void (*gradient_square)(train_device *dv, double *square, const void *grads, int64_t count);
    /* Called once before the updates of a step, each of which takes some of the weights. If step->clip is not
     * 0 and the gradient's norm, the root of *square, is larger, they scale the gradient to norm step->clip.
     */
    void (*begin_update)(train_device *dv, const adamw_step *step, const double *square);
    /* Updates the weights of a span. If the device has adds_gradients, their gradients are then set to zero.
     * Unless `square` is NULL, *square += the sum of the squares of the gradients. scratch: update_scratch
     * bytes. */
    void (*update)(train_device *dv, const adamw_arrays *arrays, const grad_span *span, double *square,
                   void *scratch);
    size_t (*update_scratch)(train_device *dv, int64_t count);
};

/* Bytes of an element. */
static inline size_t type_size(smoe_type type)
{
    return type == SMOE_TYPE_F32 ? 4 : 2;
}

#endif
