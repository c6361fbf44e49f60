/* The backward of a layer with ranks.
 * - dispatch_backward: dO, and X again for dW1 and for H that is computed again: no rank keeps the X that it
 *   received.
 * - experts_backward: dh; dx_rows, and sums over a token's rows to the token's rank; dS too; then dw2 and
 * dw1, while the sums travel.
 * - collect_backward: dS of this rank's pairs, router_bwd, dX[t] = router's term + sum over the ranks. */
#include "blas.h"
#include "ep_cpu.h"
#include "wanted.h"

#include <string.h>

static void dispatch(smoe_ep *ep, const moe_call *call, const smoe_backward_args *args,
                     const moe_ep_problem *received, int wanted)
{
    const moe_problem *problem = &call->problem;
    const moe_plan_arrays *plan = &call->plan;
    moe_stage_begin(ep->context, SMOE_STAGE_DISPATCH_BWD, call->stream);
    if (moe_cpu_ep_meet(ep)) {
        ep->backwards = ep->call;
        for (int r = 0; r < ep->ranks; r++) moe_cpu_ep_describe(ep, problem, 1, wanted, r);
        moe_cpu_ep_signal_all(ep, MOE_EP_HEADER, moe_ep_mark(ep->call, 0));
        if (wanted)
            moe_cpu_ep_send_rows(ep, problem, plan, args->dout, ep->window.dout, MOE_EP_INPUT,
                                 received->parts);
        if (moe_ep_sends_x(received, wanted))
            moe_cpu_ep_send_rows(ep, problem, plan, args->x, ep->window.x, MOE_EP_AGAIN, 1);
    }
    moe_stage_end(ep->context, SMOE_STAGE_DISPATCH_BWD, call->stream);
}

/* dS of a source's rows in the order in which it sent them. */
static void send_ds(const smoe_ep *ep, const moe_cpu_pass *pass, const moe_ep_arrays *a, int source)
{
    const int64_t experts = pass->problem->layer.experts;
    char *stripe = ep->windows[source] + ep->window.ds + (uint64_t)ep->rank * ep->window.ds_stripe;
    for (int64_t e = 0; e < experts; e++) {
        const int32_t *start = a->starts + e * ep->ranks + source;
        const int32_t expert_end = MOE_BLOCK_ROWS * a->plan.block_offsets[e] + a->plan.counts[e];
        const int32_t end = source + 1 < ep->ranks ? start[1] : expert_end;
        const size_t bytes = (size_t)(end - *start) * sizeof(float);
        memcpy(stripe, pass->ds + *start, bytes);
        stripe += bytes;
    }
}

/* The gradients that travel. With dX not wanted there are still flags, for dS. */
static void run_returned(smoe_ep *ep, const moe_cpu_pass *pass, const smoe_backward_args *args,
                         const moe_ep_arrays *arrays, int parts, int wants_ds)
{
    const smoe_layer *layer = &pass->problem->layer;
    if (wants_ds || moe_wants_dh(args)) moe_cpu_dh(pass, args);
    for (int s = 0; s < ep->ranks && wants_ds; s++) send_ds(ep, pass, arrays, s);
    for (int64_t column = 0; args->dx && column < layer->hidden; column += pass->problem->chunk_columns) {
        moe_cpu_dx_rows(pass, args, column);
        moe_stage_begin(pass->context, SMOE_STAGE_DX, pass->stream);
        moe_cpu_ep_send_sums(ep, pass, arrays->tokens, parts, moe_cpu_dx_token, column);
        moe_stage_end(pass->context, SMOE_STAGE_DX, pass->stream);
    }
    if (!args->dx) moe_cpu_ep_signal_all(ep, MOE_EP_RETURN, moe_ep_mark(ep->call, parts - 1));
}

/* H of the rows that were not kept. */
static void compute_again(const moe_cpu_pass *pass, const smoe_backward_args *args, const void *b1,
                          int64_t first)
{
    smoe_forward_args forward = SMOE_FORWARD_ARGS_INIT;
    forward.x = args->x;
    forward.w1 = args->w1;
    forward.b1 = b1;
    moe_cpu_up(pass, &forward, first);
}

/* Until it is done, or the group has failed. */
static void run_experts(smoe_ep *ep, const moe_call *call, const smoe_backward_args *args,
                        const moe_ep_problem *received, int wants_ds, int wanted)
{
    const moe_problem *problem = &call->problem;
    const moe_ep_arrays arrays = moe_ep_arrays_at(received, problem, args->saved);
    const moe_cpu_pass pass =
        moe_cpu_backward_pass(ep->context, &received->received, &arrays.plan, args->scratch, call->stream);
    smoe_backward_args local = *args;
    local.x = moe_cpu_ep_row(ep, problem, ep->rank, ep->window.x, 0, 0);
    local.dout = moe_cpu_ep_row(ep, problem, ep->rank, ep->window.dout, 0, 0);
    int64_t tokens[MOE_EP_MAX_RANKS];
    if (!moe_cpu_ep_take_headers(ep, problem, 1, wanted, tokens)) return;
    if (wanted && !moe_cpu_ep_wait_parts(ep, MOE_EP_INPUT, received->parts)) return;
    const int64_t kept = received->received.kept_rows;
    const int past = moe_ep_sends_x(received, wanted) && MOE_BLOCK_ROWS * moe_block_count(&pass) > kept;
    if (past && !moe_cpu_ep_wait_parts(ep, MOE_EP_AGAIN, 1)) return;
    moe_blas_enter();
    if (past) compute_again(&pass, &local, arrays.b1, kept);
    run_returned(ep, &pass, &local, &arrays, received->parts, wants_ds);
    if (moe_wants_dw2(args)) moe_cpu_dw2(&pass, &local);
    const int again = !args->dw1 || moe_cpu_ep_wait_parts(ep, MOE_EP_AGAIN, 1);
    if (again && moe_wants_dw1(args)) moe_cpu_dw1(&pass, &local);
    moe_blas_leave();
    if (again) moe_cpu_ep_signal_all(ep, MOE_EP_FREE, moe_ep_mark(ep->call, 0));
}

static void set_nan(void *to, int64_t elements, smoe_type type)
{
    if (to) memset(to, MOE_NAN_BYTE, (size_t)(elements * moe_type_bytes(type)));
}

static void set_weights_nan(const moe_problem *problem, const smoe_backward_args *args)
{
    const smoe_layer *l = &problem->layer;
    const int64_t experts = problem->experts_here, width = problem->h_width;
    set_nan(args->dw1, experts * width * l->hidden, l->gradient_type);
    set_nan(args->dw2, experts * l->hidden * l->intermediate, l->gradient_type);
    set_nan(args->db1, experts * width, l->gradient_type);
    set_nan(args->db2, experts * l->hidden, l->gradient_type);
}

/* ds (padded_rows of this rank's plan) from what each rank returned. */
static void take_ds(const smoe_ep *ep, const moe_problem *problem, const moe_plan_arrays *plan, float *ds)
{
    const int64_t experts = problem->layer.experts / ep->ranks;
    memset(ds, 0, (size_t)problem->padded_rows * sizeof *ds);
    for (int r = 0; r < ep->ranks; r++) {
        const char *stripe = ep->windows[ep->rank] + ep->window.ds + (uint64_t)r * ep->window.ds_stripe;
        for (int64_t e = r * experts; e < (r + 1) * experts; e++) {
            const size_t bytes = (size_t)plan->counts[e] * sizeof *ds;
            memcpy(ds + (int64_t)MOE_BLOCK_ROWS * plan->block_offsets[e], stripe, bytes);
            stripe += bytes;
        }
    }
}

static void run_collect(smoe_ep *ep, const moe_call *call, const smoe_backward_args *args, int with_router,
                        int wants_ds)
{
    const moe_problem *problem = &call->problem;
    const moe_plan_arrays *plan = &call->plan;
    moe_cpu_pass pass = moe_cpu_backward_pass(ep->context, problem, plan, args->scratch, call->stream);
    pass.ep = ep;
    if (wants_ds) take_ds(ep, problem, plan, pass.ds);
    moe_cpu_give_weight_gradients(&pass, args);
    moe_blas_enter();
    if (with_router)
        moe_cpu_router_backward(ep->context, problem, args, plan, pass.ds, pass.dlogits, pass.router,
                                call->stream);
    for (int64_t column = 0; args->dx && column < problem->layer.hidden; column += problem->chunk_columns)
        moe_cpu_dx(&pass, args, with_router && args->router_weight, column);
    moe_blas_leave();
}

static void set_tokens_nan(const moe_problem *problem, const smoe_backward_args *args, int with_router)
{
    const smoe_layer *l = &problem->layer;
    const int topk = l->entry == SMOE_ENTRY_FROM_TOPK;
    set_nan(args->dx, l->tokens * l->hidden, l->dtype);
    set_nan(with_router ? args->dlogits : NULL, l->tokens * l->experts, l->logits_type);
    set_nan(with_router ? args->drouter_weight : NULL, l->experts * l->hidden, l->gradient_type);
    set_nan(with_router ? args->drouter_bias : NULL, l->experts, l->gradient_type);
    set_nan(topk ? args->dtopk_weights : NULL, l->tokens * l->topk, SMOE_TYPE_F32);
    set_nan(topk ? NULL : args->drow_weights, problem->padded_rows, SMOE_TYPE_F32);
}

static void collect(smoe_ep *ep, const moe_call *call, const smoe_backward_args *args, int with_router,
                    int wants_ds, int parts)
{
    moe_stage_begin(ep->context, SMOE_STAGE_COLLECT_BWD, call->stream);
    if (moe_cpu_ep_wait_parts(ep, MOE_EP_RETURN, parts))
        run_collect(ep, call, args, with_router, wants_ds);
    else
        set_tokens_nan(&call->problem, args, with_router);
    moe_stage_end(ep->context, SMOE_STAGE_COLLECT_BWD, call->stream);
}

smoe_status moe_cpu_ep_backward(smoe_context *context, const moe_call *call, const smoe_backward_args *args,
                                int with_router, int stages)
{
    smoe_ep *ep = args->ep;
    const smoe_layer *layer = &call->problem.layer;
    const int wanted = moe_ep_wanted(layer, args, with_router),
              wants_ds = moe_wants_ds(layer, args, with_router);
    moe_ep_problem received;
    moe_ep_problem_init(&received, layer);
    if (stages & MOE_DISPATCH) dispatch(ep, call, args, &received, wanted);
    if (stages & MOE_EXPERTS && !ep->fault.reason) run_experts(ep, call, args, &received, wants_ds, wanted);
    if (stages & MOE_COLLECT) collect(ep, call, args, with_router, wants_ds, received.parts);
    if (stages & MOE_EXPERTS && ep->fault.reason) set_weights_nan(&call->problem, args);
    return moe_ep_outcome(context, ep);
}

uint64_t moe_cpu_ep_backward_scratch(const smoe_context *context, const moe_problem *problem)
{
    moe_ep_problem received;
    moe_ep_problem_init(&received, &problem->layer);
    const uint64_t local = moe_cpu_backward_pass(context, &received.received, NULL, NULL, NULL).bytes;
    const uint64_t own = moe_cpu_backward_pass(context, problem, NULL, NULL, NULL).bytes;
    return local > own ? local : own;
}
