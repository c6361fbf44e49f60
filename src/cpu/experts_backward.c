/* The backward: dw2, dh, the router's part, dw1, then dx_rows and dx chunk by chunk. dw2 comes first because
 * it computes A' from H, and dh may then overwrite H with dH. So A' is never stored. A stage runs only if a
 * wanted gradient needs it. With LoRA dA2, dB2 and Q2 come before dh, for the same reason, and dA1, dB1 and
 * Q1 after dw1.
 *
 * With SMOE_COMPUTE_F8 dh runs first, because it stores what dw2 reads.
 *
 * Scratch: dH (padded_rows, h_width) dtype unless reuse_saved; dX~ of one chunk, padded_rows chunk_columns 4
 * bytes (before it, in the same place, the router's work space); dS; with LoRA Q1 and Q2 in f32; from logits
 * dlogits (T, E) f32; and each thread's panels: 256 (max(d, h_width) + h_width) floats, a tile of 512 by 256,
 * for bf16 256 d floats of weights as well. With fp8 also what is quantised (moe_cpu_f8). */
#include "blas.h"
#include "convert.h"
#include "experts.h"
#include "wanted.h"

#include <string.h>

uint64_t moe_cpu_backward_scratch(const smoe_context *context, const moe_problem *problem)
{
    return moe_cpu_backward_pass(context, problem, NULL, NULL, NULL).bytes;
}

/* dtopk_weights[t, k] = dS of the row of the pair (t, ids[t, k]). If a token repeats an id, its lowest k gets
 * dS. All other entries are 0. */
static void give_topk_gradients(const moe_cpu_pass *pass, const smoe_backward_args *args)
{
    const smoe_layer *layer = &pass->problem->layer;
    const moe_plan_arrays *plan = pass->plan;
    memset(args->dtopk_weights, 0, (size_t)(layer->tokens * layer->topk) * sizeof *args->dtopk_weights);
    for (int64_t token = 0; token < layer->tokens; token++) {
        const int64_t first = token * layer->topk;
        for (int64_t i = plan->token_offsets[token]; i < plan->token_offsets[token + 1]; i++) {
            const int64_t row = plan->token_rows[i];
            const int64_t expert = moe_expert_of_block(plan, layer->experts, row / MOE_BLOCK_ROWS);
            int64_t k = 0;
            while (k < layer->topk && moe_load_index(args->topk_ids, layer->index_type, first + k) != expert)
                k++;
            if (k < layer->topk) args->dtopk_weights[first + k] = pass->ds[row];
        }
    }
}

/* For layers from logits drow_weights is dS of the padded rows, unchanged. */
static void give_padded_gradients(const moe_cpu_pass *pass, const smoe_backward_args *args)
{
    memcpy(args->drow_weights, pass->ds, (size_t)pass->problem->padded_rows * sizeof *pass->ds);
}

/* For layers from rows drow_weights has T values; rows past the last one get 0. */
static void give_row_gradients(const moe_cpu_pass *pass, const smoe_backward_args *args)
{
    const smoe_layer *layer = &pass->problem->layer;
    const moe_plan_arrays *plan = pass->plan;
    for (int64_t token = 0; token < layer->tokens; token++) {
        const int64_t i = plan->token_offsets[token];
        const int has_row = i < plan->token_offsets[token + 1];
        args->drow_weights[token] = has_row ? pass->ds[plan->token_rows[i]] : 0.0f;
    }
}

void moe_cpu_give_weight_gradients(const moe_cpu_pass *pass, const smoe_backward_args *args)
{
    switch (pass->problem->layer.entry) {
    case SMOE_ENTRY_FROM_TOPK:
        if (args->dtopk_weights) give_topk_gradients(pass, args);
        break;
    case SMOE_ENTRY_FROM_LOGITS:
        if (args->drow_weights) give_padded_gradients(pass, args);
        break;
    case SMOE_ENTRY_FROM_ROWS:
        if (args->drow_weights) give_row_gradients(pass, args);
        break;
    }
}

/* Quantises dO, and for dw X. What dw does not read is not stored. */
static void start_f8(moe_cpu_pass *pass, const smoe_backward_args *args)
{
    moe_cpu_f8 *f8 = &pass->f8;
    moe_cpu_f8_quantize_tokens(pass, args->dout, f8->dout, f8->scale_dout);
    if (!args->dw1) f8->rows[MOE_F8_OF_DW1] = NULL;
    if (!args->dw2) f8->rows[MOE_F8_OF_DW2] = NULL;
    if (!f8->rows[MOE_F8_OF_DW1] && !f8->rows[MOE_F8_OF_DW2]) return;
    moe_cpu_f8_quantize_tokens(pass, args->x, f8->x, f8->scale_x);
    moe_cpu_f8_expect(pass);
}

smoe_status moe_cpu_backward(smoe_context *context, const moe_problem *problem,
                             const smoe_backward_args *args, const moe_plan_arrays *plan, int with_router,
                             void *stream)
{
    moe_cpu_pass pass = moe_cpu_backward_pass(context, problem, plan, args->scratch, stream);
    pass.f8.weights = moe_f8_weights_at(problem, args->weights_f8);
    moe_blas_enter();
    const smoe_layer *layer = &problem->layer;
    const int dw_is_f8 = moe_cpu_dw_is_f8(&pass);
    const int dh = moe_wants_ds(layer, args, with_router) || moe_wants_dh(args) || (dw_is_f8 && args->dw2);
    if (moe_wants_dw2(args) && !dw_is_f8) moe_cpu_dw2(&pass, args);
    if (dh && layer->lora_rank2) moe_cpu_lora2(&pass, args);
    if (dh && moe_cpu_is_f8(&pass)) start_f8(&pass, args);
    if (dh) moe_cpu_dh(&pass, args);
    if (dh && dw_is_f8) moe_cpu_f8_find_largest(&pass);
    if (moe_wants_dw2(args) && dw_is_f8) moe_cpu_dw2(&pass, args);
    moe_cpu_give_weight_gradients(&pass, args);
    if (with_router)
        moe_cpu_router_backward(context, problem, args, plan, pass.ds, pass.dlogits, pass.router, stream);
    if (moe_wants_dw1(args)) moe_cpu_dw1(&pass, args);
    if (layer->lora_rank1 && (args->dx || moe_wants_lora1(args))) moe_cpu_lora1(&pass, args);
    for (int64_t column = 0; args->dx && column < layer->hidden; column += problem->chunk_columns) {
        moe_cpu_dx_rows(&pass, args, column);
        moe_cpu_dx(&pass, args, with_router && args->router_weight, column);
    }
    moe_blas_leave();
    return SMOE_OK;
}
