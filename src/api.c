/* The public calls. Each copies the caller's structs, checks them and calls the context's backend. */
#include "backend.h"
#include "check.h"
#include "ep.h"
#include "f8.h"
#include "pointers.h"
#include "wanted.h"

#include <stddef.h>

smoe_status moe_take_layer(smoe_context *context, const char *function, const smoe_layer *layer,
                           moe_problem *problem)
{
    context->function = function;
    smoe_layer taken = SMOE_LAYER_INIT;
    smoe_status status = moe_check_struct(context, function, "layer", "SMOE_LAYER_INIT", layer, sizeof taken);
    if (status != SMOE_OK) return status;
    moe_take_struct(&taken, sizeof taken, layer);
    status = moe_check_layer(context, function, &taken, problem);
    if (status == SMOE_OK) status = moe_check_compute(context, &taken);
    if (status == SMOE_OK && taken.ranks && !context->backend->ep)
        return moe_fail(context, SMOE_ERROR_UNSUPPORTED,
                        "%s: layer->ranks is %d, but the %s backend has no expert parallelism", function,
                        (int)taken.ranks, context->backend->name);
    return status == SMOE_OK ? context->backend->supports(context, problem) : status;
}

smoe_status smoe_supports(smoe_context *context, const smoe_layer *layer)
{
    if (!context) return SMOE_ERROR_ARGUMENT;
    moe_problem problem;
    return moe_take_layer(context, "smoe_supports", layer, &problem);
}

smoe_status smoe_query_sizes(smoe_context *context, const smoe_layer *layer, smoe_sizes *sizes)
{
    if (!context) return SMOE_ERROR_ARGUMENT;
    moe_problem problem;
    smoe_status status = moe_take_layer(context, "smoe_query_sizes", layer, &problem);
    if (status != SMOE_OK) return status;
    smoe_sizes known = SMOE_SIZES_INIT;
    known.rows = problem.rows;
    known.padded_rows = problem.padded_rows;
    known.saved_bytes = problem.saved_bytes;
    known.metadata_bytes = problem.metadata_bytes;
    known.saved_buffer_bytes = problem.saved_buffer_bytes;
    moe_ep_window window = {0};
    if (problem.layer.ranks) moe_ep_window_init(&window, &problem.layer);
    known.window_bytes = window.bytes;
    moe_layout forward, backward;
    context->backend->lay_out(context, &problem, &forward, &backward);
    known.scratch_forward_bytes = forward.bytes;
    known.scratch_backward_bytes = backward.bytes;
    moe_saved_bound(&problem, &known.saved_constant_bytes, &known.saved_token_bytes);
    const smoe_backward_args no_losses = SMOE_BACKWARD_ARGS_INIT;
    known.backward_reads_logits =
        problem.layer.entry == SMOE_ENTRY_FROM_LOGITS && moe_reads_logits(&problem.layer, &no_losses);
    if (problem.layer.compute != SMOE_COMPUTE_STORAGE)
        known.weights_f8_bytes = moe_f8_weights_at(&problem, NULL).bytes;
    status = moe_check_struct(context, "smoe_query_sizes", "sizes", "SMOE_SIZES_INIT", sizes, sizeof known);
    if (status == SMOE_OK) moe_give_struct(sizes, &known, sizeof known);
    return status;
}

/* Fields that contradict each other. */
static smoe_status check_forward_fields(smoe_context *context, const smoe_layer *layer,
                                        const smoe_forward_args *a)
{
    if (layer->entry != SMOE_ENTRY_FROM_LOGITS) return SMOE_OK;
    if (a->selection_bias && !moe_score_takes_bias(layer->score))
        return moe_fail(context, SMOE_ERROR_ARGUMENT,
                        "%s: selection_bias is given, but only" MOE_BIASED_SCORES " has one",
                        context->function);
    if (a->router_bias && !a->router_weight)
        return moe_fail(context, SMOE_ERROR_ARGUMENT, "%s: router_bias is given without router_weight",
                        context->function);
    return SMOE_OK;
}

static smoe_status take_forward(smoe_context *context, const char *function, const smoe_layer *layer,
                                const smoe_forward_args *given, moe_call *call, smoe_forward_args *args)
{
    smoe_status status = moe_take_layer(context, function, layer, &call->problem);
    if (status != SMOE_OK) return status;
    *args = (smoe_forward_args)SMOE_FORWARD_ARGS_INIT;
    status = moe_check_struct(context, function, "args", "SMOE_FORWARD_ARGS_INIT", given, sizeof *args);
    if (status != SMOE_OK) return status;
    moe_take_struct(args, sizeof *args, given);
    context->backend->lay_out(context, &call->problem, &call->layout, NULL);
    return SMOE_OK;
}

static void find_plan(moe_call *call, const smoe_forward_args *args)
{
    const moe_problem *p = &call->problem;
    call->plan = moe_plan_at(p, p->layer.inference ? args->scratch : args->saved);
    call->scratch = args->scratch; /* may be NULL if no stage needs scratch */
    if (p->layer.inference) call->scratch = (char *)args->scratch + p->plan_bytes;
}

static smoe_status check_plan(smoe_context *context, const moe_call *call)
{
    return context->backend->check_plan ? context->backend->check_plan(context, &call->problem, &call->plan)
                                        : SMOE_OK;
}

/* Does the layer have these stages? Of a whole forward, those that it lacks are left out. */
static smoe_status check_stages(smoe_context *context, const smoe_layer *layer, int stages)
{
    if (stages == MOE_ROUTE && layer->entry != SMOE_ENTRY_FROM_LOGITS)
        return moe_fail(context, SMOE_ERROR_ARGUMENT, "%s: entry is %s, routing needs SMOE_ENTRY_FROM_LOGITS",
                        context->function, moe_entry_name(layer->entry));
    if (stages == MOE_ROUND && layer->rounding == SMOE_ROUNDING_NONE)
        return moe_fail(context, SMOE_ERROR_ARGUMENT,
                        "%s: rounding is SMOE_ROUNDING_NONE, there is nothing to do", context->function);
    if ((stages == MOE_DISPATCH || stages == MOE_COLLECT) && !layer->ranks)
        return moe_fail(context, SMOE_ERROR_ARGUMENT, "%s: layer->ranks is 0, this call needs ranks",
                        context->function);
    return SMOE_OK;
}

static int stages_of(const smoe_layer *layer)
{
    return (layer->entry == SMOE_ENTRY_FROM_LOGITS ? MOE_ROUTE : 0) |
           (layer->rounding != SMOE_ROUNDING_NONE ? MOE_ROUND : 0) | MOE_PLAN |
           (layer->ranks ? MOE_DISPATCH | MOE_COLLECT : 0) | MOE_EXPERTS;
}

enum { WITH_RANKS = MOE_DISPATCH | MOE_EXPERTS | MOE_COLLECT }; /* stages that need the other ranks */

static smoe_status run_stages(smoe_context *context, const moe_call *call, const smoe_forward_args *args,
                              int stages)
{
    if (!call->problem.layer.ranks) return context->backend->forward(context, call, args, stages);
    const int alone = stages & ~WITH_RANKS, together = stages & WITH_RANKS;
    smoe_status status = alone ? context->backend->forward(context, call, args, alone) : SMOE_OK;
    if (status != SMOE_OK || !together) return status;
    status = moe_ep_begin(context, &call->problem, args->ep, together, 0);
    return status == SMOE_OK ? context->backend->ep->forward(context, call, args, together) : status;
}

/* Runs one stage of a forward, or with all of them what the layer has. */
static smoe_status run_forward(smoe_context *context, const char *function, const smoe_layer *layer,
                               const smoe_forward_args *given, int needs, int stages, void *stream)
{
    if (!context) return SMOE_ERROR_ARGUMENT;
    moe_call call = {.stream = stream};
    smoe_forward_args taken_args;
    const smoe_forward_args *args = &taken_args;
    smoe_status status = take_forward(context, function, layer, given, &call, &taken_args);
    const smoe_layer *taken = &call.problem.layer;
    if (status == SMOE_OK && taken->ranks && stages == MOE_EXPERTS) needs = MOE_NEEDS_WEIGHTS;
    if (status == SMOE_OK)
        status = moe_check_forward_pointers(context, &call.problem, args, call.layout.bytes, needs);
    if (status == SMOE_OK && needs & MOE_NEEDS_ROUTER) status = check_forward_fields(context, taken, args);
    if (status != SMOE_OK) return status;
    find_plan(&call, args);
    status = context->backend->begin(context);
    if (status == SMOE_OK) status = check_stages(context, taken, stages);
    if (status == SMOE_OK && stages & WITH_RANKS && !(stages & MOE_PLAN)) status = check_plan(context, &call);
    return status == SMOE_OK ? run_stages(context, &call, args, stages & stages_of(taken)) : status;
}

smoe_status smoe_route(smoe_context *context, const smoe_layer *layer, const smoe_forward_args *args,
                       void *stream)
{
    return run_forward(context, "smoe_route", layer, args, MOE_NEEDS_ROUTER, MOE_ROUTE, stream);
}

smoe_status smoe_round(smoe_context *context, const smoe_layer *layer, const smoe_forward_args *args,
                       void *stream)
{
    return run_forward(context, "smoe_round", layer, args, MOE_NEEDS_ROUTER, MOE_ROUND, stream);
}

smoe_status smoe_plan(smoe_context *context, const smoe_layer *layer, const smoe_forward_args *args,
                      void *stream)
{
    return run_forward(context, "smoe_plan", layer, args, MOE_NEEDS_ROUTER | MOE_NEEDS_ROUTING, MOE_PLAN,
                       stream);
}

smoe_status smoe_experts_forward(smoe_context *context, const smoe_layer *layer,
                                 const smoe_forward_args *args, void *stream)
{
    return run_forward(context, "smoe_experts_forward", layer, args, MOE_NEEDS_EXPERTS, MOE_EXPERTS, stream);
}

smoe_status smoe_layer_forward(smoe_context *context, const smoe_layer *layer, const smoe_forward_args *args,
                               void *stream)
{
    return run_forward(context, "smoe_layer_forward", layer, args,
                       MOE_NEEDS_ROUTER | MOE_NEEDS_ROUTING | MOE_NEEDS_EXPERTS,
                       MOE_ROUTE | MOE_ROUND | MOE_PLAN | WITH_RANKS, stream);
}

smoe_status smoe_ep_dispatch(smoe_context *context, const smoe_layer *layer, const smoe_forward_args *args,
                             void *stream)
{
    return run_forward(context, "smoe_ep_dispatch", layer, args, MOE_NEEDS_X, MOE_DISPATCH, stream);
}

smoe_status smoe_ep_collect(smoe_context *context, const smoe_layer *layer, const smoe_forward_args *args,
                            void *stream)
{
    return run_forward(context, "smoe_ep_collect", layer, args, MOE_NEEDS_OUT, MOE_COLLECT, stream);
}

smoe_status smoe_view_plan(smoe_context *context, const smoe_layer *layer, const smoe_forward_args *args,
                           smoe_plan_view *view)
{
    if (!context) return SMOE_ERROR_ARGUMENT;
    const char *function = "smoe_view_plan";
    moe_call call;
    smoe_forward_args taken;
    smoe_status status = take_forward(context, function, layer, args, &call, &taken);
    if (status == SMOE_OK) status = moe_check_plan_pointer(context, &call.problem, &taken, call.layout.bytes);
    if (status != SMOE_OK) return status;
    find_plan(&call, &taken);
    const moe_plan_arrays *p = &call.plan;
    const smoe_plan_view known = {
        .topk_ids = p->topk_ids,
        .topk_weights = p->topk_weights,
        .topk_counts = p->topk_counts,
        .counts = p->counts,
        .offsets = p->offsets,
        .block_offsets = p->block_offsets,
        .order = p->order,
        .row_token = p->row_token,
        .row_weight = p->row_weight,
        .token_offsets = p->token_offsets,
        .token_rows = p->token_rows,
        .h = p->h,
    };
    status = moe_check_struct(context, function, "view", "SMOE_PLAN_VIEW_INIT", view, sizeof known);
    if (status == SMOE_OK) moe_give_struct(view, &known, sizeof known);
    return status;
}

smoe_status smoe_update_selection_bias(smoe_context *context, const smoe_layer *layer, const int32_t *counts,
                                       float *bias, float gamma, void *stream)
{
    if (!context) return SMOE_ERROR_ARGUMENT;
    const char *function = "smoe_update_selection_bias";
    moe_problem problem;
    smoe_status status = moe_take_layer(context, function, layer, &problem);
    if (status != SMOE_OK) return status;
    status = moe_check_bias_pointers(context, &problem, counts, bias);
    if (status != SMOE_OK) return status;
    return context->backend->update_selection_bias(context, &problem, counts, bias, gamma, stream);
}

/* ---- Backward ---- */

/* Fields that contradict each other. */
static smoe_status check_backward_fields(smoe_context *context, const smoe_layer *layer,
                                         const smoe_backward_args *a, int router)
{
    if (layer->inference)
        return moe_fail(context, SMOE_ERROR_ARGUMENT,
                        "%s: layer->inference is 1, nothing was saved for a backward", context->function);
    if (a->db2 && !a->b2)
        return moe_fail(context, SMOE_ERROR_ARGUMENT, "%s: db2 is given without b2", context->function);
    if ((moe_wants_lora1(a) && !layer->lora_rank1) || (moe_wants_lora2(a) && !layer->lora_rank2))
        return moe_fail(context, SMOE_ERROR_ARGUMENT,
                        "%s: a gradient of LoRA's factors is given, but layer->%s is 0", context->function,
                        moe_wants_lora1(a) && !layer->lora_rank1 ? "lora_rank1" : "lora_rank2");
    if (router && !a->router_weight && (a->drouter_weight || a->drouter_bias))
        return moe_fail(context, SMOE_ERROR_ARGUMENT, "%s: %s is given without router_weight",
                        context->function, a->drouter_weight ? "drouter_weight" : "drouter_bias");
    return SMOE_OK;
}

/* With ranks `stages` of the backward, which all know whether the router is wanted. */
static smoe_status run_backward(smoe_context *context, const char *function, const smoe_layer *layer,
                                const smoe_backward_args *given, int with_router, int stages, void *stream)
{
    if (!context) return SMOE_ERROR_ARGUMENT;
    moe_call call = {.stream = stream};
    const moe_problem *problem = &call.problem;
    smoe_status status = moe_take_layer(context, function, layer, &call.problem);
    if (status != SMOE_OK) return status;
    smoe_backward_args taken = SMOE_BACKWARD_ARGS_INIT;
    const smoe_backward_args *args = &taken;
    status = moe_check_struct(context, function, "args", "SMOE_BACKWARD_ARGS_INIT", given, sizeof taken);
    if (status != SMOE_OK) return status;
    moe_take_struct(&taken, sizeof taken, given);
    with_router = (with_router || problem->layer.ranks) && problem->layer.entry == SMOE_ENTRY_FROM_LOGITS &&
                  moe_wants_router(args);
    context->backend->lay_out(context, problem, NULL, &call.layout);
    status = moe_check_backward_pointers(context, problem, args, call.layout.bytes, with_router);
    if (status == SMOE_OK) status = check_backward_fields(context, &problem->layer, args, with_router);
    if (status == SMOE_OK) status = check_stages(context, &problem->layer, stages);
    if (status == SMOE_OK) status = context->backend->begin(context);
    if (status != SMOE_OK) return status;
    call.plan = moe_plan_at(problem, args->saved);
    call.scratch = args->scratch;
    status = check_plan(context, &call);
    if (status == SMOE_OK && !problem->layer.ranks)
        return context->backend->backward(context, &call, args, with_router);
    if (status == SMOE_OK) status = moe_ep_begin(context, problem, args->ep, stages, 1);
    return status == SMOE_OK ? context->backend->ep->backward(context, &call, args, with_router, stages)
                             : status;
}

smoe_status smoe_layer_backward(smoe_context *context, const smoe_layer *layer,
                                const smoe_backward_args *args, void *stream)
{
    return run_backward(context, "smoe_layer_backward", layer, args, 1, WITH_RANKS, stream);
}

smoe_status smoe_experts_backward(smoe_context *context, const smoe_layer *layer,
                                  const smoe_backward_args *args, void *stream)
{
    return run_backward(context, "smoe_experts_backward", layer, args, 0, MOE_EXPERTS, stream);
}

smoe_status smoe_ep_dispatch_backward(smoe_context *context, const smoe_layer *layer,
                                      const smoe_backward_args *args, void *stream)
{
    return run_backward(context, "smoe_ep_dispatch_backward", layer, args, 1, MOE_DISPATCH, stream);
}

smoe_status smoe_ep_collect_backward(smoe_context *context, const smoe_layer *layer,
                                     const smoe_backward_args *args, void *stream)
{
    return run_backward(context, "smoe_ep_collect_backward", layer, args, 1, MOE_COLLECT, stream);
}
