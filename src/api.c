/* The public calls. Each copies the caller's structs, checks them and calls the context's backend. */
#include "backend.h"
#include "check.h"
#include "pointers.h"
#include "wanted.h"

#include <stddef.h>

/* What a call works with after its checks. */
typedef struct forward_call {
    moe_problem problem;
    smoe_forward_args args;
    moe_plan_arrays plan;
    void *scratch; /* past the plan */
} forward_call;

static smoe_status take_layer(smoe_context *context, const char *function, const smoe_layer *layer,
                              moe_problem *problem)
{
    context->function = function;
    smoe_layer taken = SMOE_LAYER_INIT;
    smoe_status status = moe_check_struct(context, function, "layer", "SMOE_LAYER_INIT", layer, sizeof taken);
    if (status != SMOE_OK) return status;
    moe_take_struct(&taken, sizeof taken, layer);
    status = moe_check_layer(context, function, &taken);
    if (status != SMOE_OK) return status;
    moe_problem_init(problem, &taken);
    return context->backend->supports(context, problem);
}

smoe_status smoe_supports(smoe_context *context, const smoe_layer *layer)
{
    if (!context) return SMOE_ERROR_ARGUMENT;
    moe_problem problem;
    return take_layer(context, "smoe_supports", layer, &problem);
}

smoe_status smoe_query_sizes(smoe_context *context, const smoe_layer *layer, smoe_sizes *sizes)
{
    if (!context) return SMOE_ERROR_ARGUMENT;
    moe_problem problem;
    smoe_status status = take_layer(context, "smoe_query_sizes", layer, &problem);
    if (status != SMOE_OK) return status;
    smoe_sizes known = SMOE_SIZES_INIT;
    known.rows = problem.rows;
    known.padded_rows = problem.padded_rows;
    known.saved_bytes = problem.saved_bytes;
    known.metadata_bytes = problem.metadata_bytes;
    known.saved_buffer_bytes = problem.saved_buffer_bytes;
    context->backend->scratch(context, &problem, &known.scratch_forward_bytes, &known.scratch_backward_bytes);
    status = moe_check_struct(context, "smoe_query_sizes", "sizes", "SMOE_SIZES_INIT", sizes, sizeof known);
    if (status == SMOE_OK) moe_give_struct(sizes, &known, sizeof known);
    return status;
}

/* Fields that contradict each other. */
static smoe_status check_forward_fields(smoe_context *context, const smoe_layer *layer,
                                        const smoe_forward_args *a)
{
    if (layer->entry != SMOE_ENTRY_FROM_LOGITS) return SMOE_OK;
    if (a->selection_bias && layer->score != SMOE_SCORE_SIGMOID)
        return moe_fail(context, SMOE_ERROR_ARGUMENT,
                        "%s: selection_bias is given, but only SMOE_SCORE_SIGMOID has one",
                        context->function);
    if (a->router_bias && !a->router_weight)
        return moe_fail(context, SMOE_ERROR_ARGUMENT, "%s: router_bias is given without router_weight",
                        context->function);
    return SMOE_OK;
}

static smoe_status take_forward(smoe_context *context, const char *function, const smoe_layer *layer,
                                const smoe_forward_args *args, forward_call *call)
{
    smoe_status status = take_layer(context, function, layer, &call->problem);
    if (status != SMOE_OK) return status;
    call->args = (smoe_forward_args)SMOE_FORWARD_ARGS_INIT;
    status = moe_check_struct(context, function, "args", "SMOE_FORWARD_ARGS_INIT", args, sizeof call->args);
    if (status == SMOE_OK) moe_take_struct(&call->args, sizeof call->args, args);
    return status;
}

static void find_plan(forward_call *call)
{
    const moe_problem *p = &call->problem;
    call->plan = moe_plan_at(p, p->layer.inference ? call->args.scratch : call->args.saved);
    call->scratch = (char *)call->args.scratch + (p->layer.inference ? p->plan_bytes : 0);
}

static smoe_status check_plan(smoe_context *context, const moe_problem *problem, const moe_plan_arrays *plan)
{
    return context->backend->check_plan ? context->backend->check_plan(context, problem, plan) : SMOE_OK;
}

/* Everything that a forward stage does before it calls the backend's function. */
static smoe_status begin_forward(smoe_context *context, const char *function, const smoe_layer *layer,
                                 const smoe_forward_args *args, int needs, forward_call *call)
{
    smoe_status status = take_forward(context, function, layer, args, call);
    if (status == SMOE_OK) status = moe_check_forward_pointers(context, &call->problem, &call->args, needs);
    if (status == SMOE_OK && needs & MOE_NEEDS_ROUTER)
        status = check_forward_fields(context, &call->problem.layer, &call->args);
    if (status != SMOE_OK) return status;
    find_plan(call);
    return context->backend->begin(context);
}

/* The stages on checked arguments. */

static smoe_status run_route(smoe_context *context, const forward_call *c, void *stream)
{
    return context->backend->route(context, &c->problem, &c->args, &c->plan, c->scratch, stream);
}

static smoe_status run_round(smoe_context *context, const forward_call *c, void *stream)
{
    return context->backend->round(context, &c->problem, &c->args, &c->plan, c->scratch, stream);
}

static smoe_status run_plan(smoe_context *context, const forward_call *c, void *stream)
{
    return context->backend->plan(context, &c->problem, &c->args, &c->plan, c->scratch, stream);
}

static smoe_status run_experts(smoe_context *context, const forward_call *c, void *stream)
{
    return context->backend->experts_forward(context, &c->problem, &c->args, &c->plan, c->scratch, stream);
}

smoe_status smoe_route(smoe_context *context, const smoe_layer *layer, const smoe_forward_args *args,
                       void *stream)
{
    if (!context) return SMOE_ERROR_ARGUMENT;
    forward_call call;
    const smoe_status status = begin_forward(context, "smoe_route", layer, args, MOE_NEEDS_ROUTER, &call);
    if (status != SMOE_OK) return status;
    if (call.problem.layer.entry != SMOE_ENTRY_FROM_LOGITS)
        return moe_fail(context, SMOE_ERROR_ARGUMENT,
                        "smoe_route: entry is %s, routing needs SMOE_ENTRY_FROM_LOGITS",
                        moe_entry_name(call.problem.layer.entry));
    return run_route(context, &call, stream);
}

smoe_status smoe_round(smoe_context *context, const smoe_layer *layer, const smoe_forward_args *args,
                       void *stream)
{
    if (!context) return SMOE_ERROR_ARGUMENT;
    forward_call call;
    const smoe_status status = begin_forward(context, "smoe_round", layer, args, MOE_NEEDS_ROUTER, &call);
    if (status != SMOE_OK) return status;
    if (call.problem.layer.rounding == SMOE_ROUNDING_NONE)
        return moe_fail(context, SMOE_ERROR_ARGUMENT,
                        "smoe_round: rounding is SMOE_ROUNDING_NONE, there is nothing to do");
    return run_round(context, &call, stream);
}

smoe_status smoe_plan(smoe_context *context, const smoe_layer *layer, const smoe_forward_args *args,
                      void *stream)
{
    if (!context) return SMOE_ERROR_ARGUMENT;
    forward_call call;
    const smoe_status status =
        begin_forward(context, "smoe_plan", layer, args, MOE_NEEDS_ROUTER | MOE_NEEDS_ROUTING, &call);
    return status == SMOE_OK ? run_plan(context, &call, stream) : status;
}

smoe_status smoe_experts_forward(smoe_context *context, const smoe_layer *layer,
                                 const smoe_forward_args *args, void *stream)
{
    if (!context) return SMOE_ERROR_ARGUMENT;
    forward_call call;
    smoe_status status =
        begin_forward(context, "smoe_experts_forward", layer, args, MOE_NEEDS_EXPERTS, &call);
    if (status == SMOE_OK) status = check_plan(context, &call.problem, &call.plan);
    return status == SMOE_OK ? run_experts(context, &call, stream) : status;
}

smoe_status smoe_layer_forward(smoe_context *context, const smoe_layer *layer, const smoe_forward_args *args,
                               void *stream)
{
    if (!context) return SMOE_ERROR_ARGUMENT;
    forward_call call;
    smoe_status status = begin_forward(context, "smoe_layer_forward", layer, args,
                                       MOE_NEEDS_ROUTER | MOE_NEEDS_ROUTING | MOE_NEEDS_EXPERTS, &call);
    if (status == SMOE_OK && call.problem.layer.entry == SMOE_ENTRY_FROM_LOGITS) {
        status = run_route(context, &call, stream);
        if (status == SMOE_OK && call.problem.layer.rounding != SMOE_ROUNDING_NONE)
            status = run_round(context, &call, stream);
    }
    if (status == SMOE_OK) status = run_plan(context, &call, stream);
    if (status == SMOE_OK) status = run_experts(context, &call, stream);
    return status;
}

smoe_status smoe_view_plan(smoe_context *context, const smoe_layer *layer, const smoe_forward_args *args,
                           smoe_plan_view *view)
{
    if (!context) return SMOE_ERROR_ARGUMENT;
    const char *function = "smoe_view_plan";
    forward_call call;
    smoe_status status = take_forward(context, function, layer, args, &call);
    if (status == SMOE_OK) status = moe_check_plan_pointer(context, &call.problem, &call.args);
    if (status != SMOE_OK) return status;
    find_plan(&call);
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
    smoe_status status = take_layer(context, function, layer, &problem);
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
    if (router && !a->router_weight && (a->drouter_weight || a->drouter_bias))
        return moe_fail(context, SMOE_ERROR_ARGUMENT, "%s: %s is given without router_weight",
                        context->function, a->drouter_weight ? "drouter_weight" : "drouter_bias");
    return SMOE_OK;
}

static smoe_status run_backward(smoe_context *context, const char *function, const smoe_layer *layer,
                                const smoe_backward_args *given, int with_router, void *stream)
{
    if (!context) return SMOE_ERROR_ARGUMENT;
    moe_problem problem;
    smoe_status status = take_layer(context, function, layer, &problem);
    if (status != SMOE_OK) return status;
    smoe_backward_args args = SMOE_BACKWARD_ARGS_INIT;
    status = moe_check_struct(context, function, "args", "SMOE_BACKWARD_ARGS_INIT", given, sizeof args);
    if (status != SMOE_OK) return status;
    moe_take_struct(&args, sizeof args, given);
    with_router = with_router && problem.layer.entry == SMOE_ENTRY_FROM_LOGITS && moe_wants_router(&args);
    status = moe_check_backward_pointers(context, &problem, &args, with_router);
    if (status != SMOE_OK) return status;
    status = check_backward_fields(context, &problem.layer, &args, with_router);
    if (status != SMOE_OK) return status;
    status = context->backend->begin(context);
    if (status != SMOE_OK) return status;
    const moe_plan_arrays plan = moe_plan_at(&problem, args.saved);
    status = check_plan(context, &problem, &plan);
    if (status != SMOE_OK) return status;
    return context->backend->backward(context, &problem, &args, &plan, with_router, stream);
}

smoe_status smoe_layer_backward(smoe_context *context, const smoe_layer *layer,
                                const smoe_backward_args *args, void *stream)
{
    return run_backward(context, "smoe_layer_backward", layer, args, 1, stream);
}

smoe_status smoe_experts_backward(smoe_context *context, const smoe_layer *layer,
                                  const smoe_backward_args *args, void *stream)
{
    return run_backward(context, "smoe_experts_backward", layer, args, 0, stream);
}
