/* The table of functions that a backend fills, and the context, which points to it. api.c checks every
 * argument before it calls one of them. */
#ifndef MOE_BACKEND_H
#define MOE_BACKEND_H

#include "problem.h"

/* The layout of a scratch: its bytes, and the backend's own description of its parts. */
typedef struct moe_layout {
    uint64_t bytes;
    uint64_t parts[40];
} moe_layout;

/* What every call of a forward or a backward works with after its checks. */
typedef struct moe_call {
    moe_problem problem;
    moe_layout layout;
    moe_plan_arrays plan; /* in saved, for inference in scratch */
    void *scratch;        /* a forward's begins past the plan */
    void *stream;
} moe_call;

/* The stages of a forward, in their order. A layer with ranks (ep.h) has all, and its backward the last
 * three. */
enum { MOE_ROUTE = 1, MOE_ROUND = 2, MOE_PLAN = 4, MOE_DISPATCH = 8, MOE_EXPERTS = 16, MOE_COLLECT = 32 };

/* Layers with ranks. `args->ep` is the group, and the call's plan is that of the rank's own tokens. stages:
 * MOE_DISPATCH, MOE_EXPERTS, MOE_COLLECT or all three. After a failure of a rank they set what they would
 * write to NaN. */
typedef struct moe_ep_table {
    smoe_status (*open)(smoe_ep *ep); /* describes the group in all windows */
    void (*close)(smoe_ep *ep);
    void (*look)(smoe_ep *ep);  /* notes a fault that the device has found. NULL: all are noted at once */
    void (*abort)(smoe_ep *ep); /* tells the device. NULL: the host waits */
    smoe_status (*forward)(smoe_context *context, const moe_call *call, const smoe_forward_args *args,
                           int stages);
    smoe_status (*backward)(smoe_context *context, const moe_call *call, const smoe_backward_args *args,
                            int with_router, int stages);
} moe_ep_table;

typedef struct moe_backend_table {
    smoe_backend id;
    const char *name;
    /* Fills context->state; on failure the error text says why. */
    smoe_status (*create)(smoe_context *context, const smoe_context_options *options);
    void (*destroy)(smoe_context *context);
    smoe_status (*supports)(smoe_context *context, const moe_problem *problem);
    /* Lays out the scratch of a forward and of a backward; NULL: not wanted. For inference the forward's
     * scratch starts with the plan (problem->plan_bytes), and the backward's has 0 bytes. */
    void (*lay_out)(const smoe_context *context, const moe_problem *problem, moe_layout *forward,
                    moe_layout *backward);
    /* Called before a forward or a backward. Can the calling thread run them? */
    smoe_status (*begin)(smoe_context *context);
    /* Called before a stage that reads a plan which another call of the API has made. Can a plan stage have
     * left these values? NULL: the backend's stages read the plan on the device. */
    smoe_status (*check_plan)(smoe_context *context, const moe_problem *problem, const moe_plan_arrays *plan);
    /* stages: MOE_ROUTE and so on; they run up to the first one that fails. */
    smoe_status (*forward)(smoe_context *context, const moe_call *call, const smoe_forward_args *args,
                           int stages);
    /* with_router: dlogits, the router's gradients or its term of dx are wanted too. A gradient whose pointer
     * is NULL is not wanted; see wanted.h. */
    smoe_status (*backward)(smoe_context *context, const moe_call *call, const smoe_backward_args *args,
                            int with_router);
    smoe_status (*update_selection_bias)(smoe_context *context, const moe_problem *problem,
                                         const int32_t *counts, float *bias, float gamma, void *stream);
    const moe_ep_table *ep; /* NULL: no layers with ranks */
    /* NULL: no fp8 */
    smoe_status (*quantize_weights)(smoe_context *context, const moe_problem *problem,
                                    const smoe_quantize_args *args, void *stream);
} moe_backend_table;

extern const moe_backend_table moe_cpu_backend;
#ifdef SMOE_HAVE_CUDA
extern const moe_backend_table moe_cuda_backend;
#endif

enum { MOE_ERROR_TEXT = 512 };

struct smoe_context {
    const moe_backend_table *backend;
    void *state;          /* the backend's own */
    const char *kernels;  /* smoe_kernels_string, or NULL */
    const char *function; /* the public function that was called last, for error texts */
    int32_t threads;
    int32_t check_offsets;
    smoe_stage_callback on_stage;
    void *on_stage_user;
    char error[MOE_ERROR_TEXT];
};

/* Writes the error text and returns the status; a backend names the function that was called:
 *     return moe_fail(context, SMOE_ERROR_SHAPE, "%s: ...", context->function, ...); */
smoe_status moe_fail(smoe_context *context, smoe_status status, const char *format, ...)
#ifdef __GNUC__
    __attribute__((format(printf, 3, 4)))
#endif
    ;

static inline void moe_stage_begin(const smoe_context *context, smoe_stage stage, void *stream)
{
    if (context->on_stage) context->on_stage(context->on_stage_user, stage, 0, stream);
}

static inline void moe_stage_end(const smoe_context *context, smoe_stage stage, void *stream)
{
    if (context->on_stage) context->on_stage(context->on_stage_user, stage, 1, stream);
}

#endif
