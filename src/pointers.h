/* The memory that a call is given. Are the pointers there that the call needs, are they aligned, are saved
 * and scratch large enough, and does what the call writes overlap nothing else? */
#ifndef MOE_POINTERS_H
#define MOE_POINTERS_H

#include "backend.h"

/* Which fields a call of the forward needs. scratch_bytes: of the call's layout. */
enum {
    MOE_NEEDS_ROUTER = 1,
    MOE_NEEDS_ROUTING = 2,
    MOE_NEEDS_X = 4,
    MOE_NEEDS_WEIGHTS = 8,
    MOE_NEEDS_OUT = 16,
    MOE_NEEDS_EXPERTS = MOE_NEEDS_X | MOE_NEEDS_WEIGHTS | MOE_NEEDS_OUT
};

smoe_status moe_check_forward_pointers(smoe_context *context, const moe_problem *problem,
                                       const smoe_forward_args *args, uint64_t scratch_bytes, int needs);

/* `router`: a gradient of the router is wanted. */
smoe_status moe_check_backward_pointers(smoe_context *context, const moe_problem *problem,
                                        const smoe_backward_args *args, uint64_t scratch_bytes, int router);

smoe_status moe_check_quantize_pointers(smoe_context *context, const moe_problem *problem,
                                        const smoe_quantize_args *args);

/* For smoe_view_plan: the buffer that has the plan, which is `saved`, or for inference scratch. */
smoe_status moe_check_plan_pointer(smoe_context *context, const moe_problem *problem,
                                   const smoe_forward_args *args, uint64_t scratch_bytes);

smoe_status moe_check_bias_pointers(smoe_context *context, const moe_problem *problem, const int32_t *counts,
                                    const float *bias);

#endif
