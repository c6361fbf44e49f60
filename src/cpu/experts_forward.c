/* The experts forward: up, then down and combine chunk by chunk.
 *
 * Scratch: Y of one chunk, padded_rows chunk_columns 4 bytes; for inference A, padded_rows n in dtype (half
 * of what H would take); with fp8 the bytes and scales of X and A
 * instead; and each thread's panels: 256 (max(d, h_width) + h_width) floats, for bf16 256 d
 * floats of weights as well. */
#include "blas.h"
#include "experts.h"

uint64_t moe_cpu_experts_forward_scratch(const smoe_context *context, const moe_problem *problem)
{
    return moe_cpu_forward_pass(context, problem, NULL, NULL, NULL).bytes;
}

smoe_status moe_cpu_experts_forward(smoe_context *context, const moe_problem *problem,
                                    const smoe_forward_args *args, const moe_plan_arrays *plan, void *scratch,
                                    void *stream)
{
    moe_cpu_pass pass = moe_cpu_forward_pass(context, problem, plan, scratch, stream);
    pass.f8.weights = moe_f8_weights_at(problem, args->weights_f8);
    moe_blas_enter();
    if (moe_cpu_is_f8(&pass)) moe_cpu_f8_quantize_tokens(&pass, args->x, pass.f8.x, pass.f8.scale_x);
    moe_cpu_up(&pass, args, 0);
    for (int64_t column = 0; column < problem->layer.hidden; column += problem->chunk_columns) {
        moe_cpu_down(&pass, args, column);
        moe_cpu_combine(&pass, args->out, column);
    }
    moe_blas_leave();
    return SMOE_OK;
}
