/* The CPU backend: one file for each stage, f32 arithmetic on f32 or bf16 storage.
 *
 * Threads share fixed panels. How work is cut does not depend on the number of threads, so neither do the
 * results. GEMMs are single-threaded OpenBLAS calls on panels that a thread gathers and converts;
 * moe_blas_enter/leave (blas.h) keep OpenBLAS single-threaded around them. With fp8 the panels are decoded
 * from the bytes that the CUDA kernels have too (f8.h), and sums are those of sgemm: this is the reference
 * for fp8. */
#ifndef MOE_CPU_H
#define MOE_CPU_H

#include "backend.h"

static inline int64_t moe_min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* ---- router.c, rounding.c, plan.c: scratch begins with the selection mask, which plan reads after round;
 * work space follows ---- */

/* Scratch of route, round and plan together, mask included. */
uint64_t moe_cpu_routing_scratch(const smoe_context *context, const moe_problem *problem);

smoe_status moe_cpu_route(smoe_context *context, const moe_problem *problem, const smoe_forward_args *args,
                          const moe_plan_arrays *plan, void *scratch, void *stream);
smoe_status moe_cpu_round(smoe_context *context, const moe_problem *problem, const smoe_forward_args *args,
                          const moe_plan_arrays *plan, void *scratch, void *stream);
smoe_status moe_cpu_plan(smoe_context *context, const moe_problem *problem, const smoe_forward_args *args,
                         const moe_plan_arrays *plan, void *scratch, void *stream);
/* check_plan.c. The error is ARGUMENT. */
smoe_status moe_cpu_check_plan(smoe_context *context, const moe_problem *problem,
                               const moe_plan_arrays *plan);

smoe_status moe_cpu_update_selection_bias(smoe_context *context, const moe_problem *problem,
                                          const int32_t *counts, float *bias, float gamma, void *stream);

/* ---- router_backward.c ---- */

/* The work space of router_bwd, without dlogits. */
uint64_t moe_cpu_router_backward_scratch(const smoe_context *context, const moe_problem *problem);

/* dlogits (T, E) f32, dense, from dS of the padded rows; then args->dlogits, drouter_weight and drouter_bias,
 * those that are not NULL. */
void moe_cpu_router_backward(smoe_context *context, const moe_problem *problem,
                             const smoe_backward_args *args, const moe_plan_arrays *plan, const float *ds,
                             float *dlogits, void *scratch, void *stream);

/* ---- experts_forward.c, experts_backward.c ---- */

uint64_t moe_cpu_experts_forward_scratch(const smoe_context *context, const moe_problem *problem);
smoe_status moe_cpu_experts_forward(smoe_context *context, const moe_problem *problem,
                                    const smoe_forward_args *args, const moe_plan_arrays *plan, void *scratch,
                                    void *stream);

/* With the router: dlogits (T, E) f32 and moe_cpu_router_backward_scratch included. */
uint64_t moe_cpu_backward_scratch(const smoe_context *context, const moe_problem *problem);
smoe_status moe_cpu_backward(smoe_context *context, const moe_problem *problem,
                             const smoe_backward_args *args, const moe_plan_arrays *plan, int with_router,
                             void *stream);

/* ---- f8_weights.c ---- */

smoe_status moe_cpu_quantize_weights(smoe_context *context, const moe_problem *problem,
                                     const smoe_quantize_args *args, void *stream);

#endif
