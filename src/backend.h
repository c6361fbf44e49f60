/* The table of functions that a backend fills, and the context, which points to it. api.c checks every
 * argument before it calls one of them. */
#ifndef SMOE_BACKEND_H
#define SMOE_BACKEND_H

#include "problem.h"

typedef struct moe_backend_table {
    smoe_backend id;
    const char *name;
    /* Fills context->state; on failure the error text says why. */
    smoe_status (*create)(smoe_context *context, const smoe_context_options *options);
    void (*destroy)(smoe_context *context);
    smoe_status (*supports)(smoe_context *context, const moe_problem *problem);
    /* Sizes of the scratch of forward and backward. For inference the forward's scratch starts with the plan
     * (problem->plan_bytes). */
    void (*scratch)(const smoe_context *context, const moe_problem *problem, uint64_t *forward,
                    uint64_t *backward);
    /* Called before the stages of a call. Can the calling thread run them? */
    smoe_status (*begin)(smoe_context *context);
    /* The stages. `plan` points into saved or scratch, `scratch` past the plan. */
    smoe_status (*route)(smoe_context *context, const moe_problem *problem, const smoe_forward_args *args,
                         const moe_plan_arrays *plan, void *scratch, void *stream);
    smoe_status (*round)(smoe_context *context, const moe_problem *problem, const smoe_forward_args *args,
                         const moe_plan_arrays *plan, void *scratch, void *stream);
    smoe_status (*plan)(smoe_context *context, const moe_problem *problem, const smoe_forward_args *args,
                        const moe_plan_arrays *plan, void *scratch, void *stream);
    /* Called before a stage that reads a plan which another call of the API has made. Can a plan stage have
     * left these values? NULL: the backend's stages read the plan on the device. */
    smoe_status (*check_plan)(smoe_context *context, const moe_problem *problem, const moe_plan_arrays *plan);
    smoe_status (*experts_forward)(smoe_context *context, const moe_problem *problem,
                                   const smoe_forward_args *args, const moe_plan_arrays *plan, void *scratch,
                                   void *stream);
    /* with_router: dlogits, the router's gradients or its term of dx are wanted too. A gradient whose pointer
     * is NULL is not wanted; see wanted.h. */
    smoe_status (*backward)(smoe_context *context, const moe_problem *problem, const smoe_backward_args *args,
                            const moe_plan_arrays *plan, int with_router, void *stream);
    smoe_status (*update_selection_bias)(smoe_context *context, const moe_problem *problem,
                                         const int32_t *counts, float *bias, float gamma, void *stream);
} moe_backend_table;

extern const moe_backend_table moe_cpu_backend;
#ifdef SMOE_HAVE_CUDA
extern const moe_backend_table moe_cuda_backend;
#endif

enum { SMOE_ERROR_TEXT = 512 };

struct smoe_context {
    const moe_backend_table *backend;
    void *state;          /* the backend's own */
    const char *function; /* the public function that was called last, for error texts */
    int32_t threads;
    int32_t check_offsets;
    smoe_stage_callback on_stage;
    void *on_stage_user;
    char error[SMOE_ERROR_TEXT];
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
