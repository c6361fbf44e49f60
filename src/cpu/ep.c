/* The forward of a layer with ranks.
 *
 *   dispatch  routing and X to the ranks that have the experts
 *   experts   the plan of the received rows; up, down; sums over a token's rows to the token's rank
 *   collect   O[t] = sum over the ranks, ascending, of what they returned, in f32, rounded once
 *
 * Tokens travel in parts, each with its flag. The experts run once for all parts: the last bits of a product
 * of OpenBLAS depend on how many rows it has, so a product for each part would give other bits. */
#include "blas.h"
#include "convert.h"
#include "ep_cpu.h"

#include <string.h>

void moe_cpu_ep_send_rows(smoe_ep *ep, const moe_problem *problem, const moe_plan_arrays *plan,
                          const void *rows, uint64_t region, moe_ep_flag flag, int parts)
{
    const int64_t tokens = problem->layer.tokens, bytes = problem->layer.hidden * problem->element;
    for (int part = 0; part < parts; part++) {
        const int64_t end = moe_ep_part_start(tokens, parts, part + 1);
#pragma omp parallel for schedule(static) num_threads(ep->context->threads)
        for (int64_t t = moe_ep_part_start(tokens, parts, part); t < end; t++)
            for (int r = moe_cpu_ep_next_rank(problem, plan, t, -1); r < ep->ranks;
                 r = moe_cpu_ep_next_rank(problem, plan, t, r))
                memcpy(moe_cpu_ep_row(ep, problem, r, region, ep->rank, t), (const char *)rows + t * bytes,
                       (size_t)bytes);
        moe_cpu_ep_signal_all(ep, flag, moe_ep_mark(ep->call, part));
    }
}

int moe_cpu_ep_wait_parts(smoe_ep *ep, moe_ep_flag flag, int parts)
{
    for (int part = 0; part < parts; part++)
        if (!moe_cpu_ep_wait_all(ep, flag, moe_ep_mark(ep->call, part))) return 0;
    return 1;
}

static void send_sum(const smoe_ep *ep, const moe_cpu_pass *pass, int source, int64_t token,
                     moe_cpu_ep_sum *sum_rows, int64_t first_column)
{
    const moe_problem *p = pass->problem;
    const int64_t slot = source * ep->window.max_tokens + token;
    const int64_t columns = moe_min(p->chunk_columns, p->layer.hidden - first_column);
    if (pass->plan->token_offsets[slot] == pass->plan->token_offsets[slot + 1]) return;
    float *sum = moe_cpu_panels_of(pass).row;
    sum_rows(pass, slot, columns, sum);
    moe_store_row(moe_cpu_ep_row(ep, p, source, ep->window.sums, ep->rank, token), first_column, sum, columns,
                  p->layer.dtype);
}

void moe_cpu_ep_send_sums(smoe_ep *ep, const moe_cpu_pass *pass, const int64_t *tokens, int parts,
                          moe_cpu_ep_sum *sum_rows, int64_t first_column)
{
    const int last = first_column + pass->problem->chunk_columns >= pass->problem->layer.hidden;
    for (int part = 0; part < parts; part++) {
        for (int s = 0; s < ep->ranks; s++) {
            const int64_t end = moe_ep_part_start(tokens[s], parts, part + 1);
#pragma omp parallel for schedule(static) num_threads(ep->context->threads)
            for (int64_t t = moe_ep_part_start(tokens[s], parts, part); t < end; t++)
                send_sum(ep, pass, s, t, sum_rows, first_column);
        }
        if (last) moe_cpu_ep_signal_all(ep, MOE_EP_RETURN, moe_ep_mark(ep->call, part));
    }
}

void moe_cpu_ep_add_sums(const smoe_ep *ep, const moe_cpu_pass *pass, int64_t token, int64_t first_column,
                         int64_t columns, float *sum, float *row)
{
    const moe_problem *p = pass->problem;
    for (int r = moe_cpu_ep_next_rank(p, pass->plan, token, -1); r < ep->ranks;
         r = moe_cpu_ep_next_rank(p, pass->plan, token, r)) {
        moe_load_row(row, moe_cpu_ep_row(ep, p, ep->rank, ep->window.sums, r, token), first_column, columns,
                     p->layer.dtype);
        for (int64_t i = 0; i < columns; i++) sum[i] += row[i];
    }
}

/* ---- The three stages ---- */

static void dispatch(smoe_ep *ep, const moe_call *call, const smoe_forward_args *args, int parts)
{
    const moe_problem *problem = &call->problem;
    moe_stage_begin(ep->context, SMOE_STAGE_DISPATCH, call->stream);
    if (moe_cpu_ep_meet(ep)) {
        for (int r = 0; r < ep->ranks; r++) {
            moe_cpu_ep_describe(ep, problem, 0, 0, r);
            moe_cpu_ep_send_routing(ep, problem, &call->plan, r);
        }
        moe_cpu_ep_signal_all(ep, MOE_EP_HEADER, moe_ep_mark(ep->call, 0));
        moe_cpu_ep_send_rows(ep, problem, &call->plan, args->x, ep->window.x, MOE_EP_INPUT, parts);
    }
    moe_stage_end(ep->context, SMOE_STAGE_DISPATCH, call->stream);
}

static int plan_received(smoe_ep *ep, const moe_call *call, const moe_ep_problem *received,
                         const moe_ep_arrays *arrays)
{
    moe_stage_begin(ep->context, SMOE_STAGE_PLAN, call->stream);
    int planned = moe_cpu_ep_take_headers(ep, &call->problem, 0, 0, arrays->tokens);
    if (planned) moe_cpu_ep_plan(ep, received, arrays);
    planned = planned && moe_cpu_ep_wait_parts(ep, MOE_EP_INPUT, received->parts);
    moe_stage_end(ep->context, SMOE_STAGE_PLAN, call->stream);
    return planned;
}

/* For a backward that computes H again. */
static void keep_b1(void *to, const void *b1, uint64_t bytes)
{
    if (b1)
        memcpy(to, b1, bytes);
    else
        memset(to, 0, bytes);
}

static void experts(smoe_ep *ep, const moe_call *call, const smoe_forward_args *args,
                    const moe_ep_problem *received)
{
    const moe_problem *problem = &call->problem;
    const moe_ep_arrays arrays =
        moe_ep_arrays_at(received, problem, problem->layer.inference ? args->scratch : args->saved);
    if (!plan_received(ep, call, received, &arrays)) return;
    const moe_cpu_pass pass =
        moe_cpu_forward_pass(ep->context, &received->received, &arrays.plan, call->scratch, call->stream);
    smoe_forward_args local = *args;
    local.x = moe_cpu_ep_row(ep, problem, ep->rank, ep->window.x, 0, 0);
    if (arrays.b1) keep_b1(arrays.b1, args->b1, received->b1_bytes);
    moe_blas_enter();
    moe_cpu_up(&pass, &local, 0);
    for (int64_t column = 0; column < problem->layer.hidden; column += problem->chunk_columns) {
        moe_cpu_down(&pass, &local, column);
        moe_stage_begin(ep->context, SMOE_STAGE_COMBINE, call->stream);
        moe_cpu_ep_send_sums(ep, &pass, arrays.tokens, received->parts, moe_cpu_combine_token, column);
        moe_stage_end(ep->context, SMOE_STAGE_COMBINE, call->stream);
    }
    moe_blas_leave();
}

static void collect_token(const smoe_ep *ep, const moe_cpu_pass *pass, void *out, int64_t token)
{
    const smoe_layer *layer = &pass->problem->layer;
    float *sum = moe_cpu_panels_of(pass).row;
    memset(sum, 0, (size_t)layer->hidden * sizeof *sum);
    moe_cpu_ep_add_sums(ep, pass, token, 0, layer->hidden, sum, sum + layer->hidden);
    moe_store_row(out, token * layer->hidden, sum, layer->hidden, layer->dtype);
}

static void collect(smoe_ep *ep, const moe_call *call, const smoe_forward_args *args, int parts)
{
    const moe_problem *problem = &call->problem;
    const int64_t tokens = problem->layer.tokens;
    moe_stage_begin(ep->context, SMOE_STAGE_COLLECT, call->stream);
    if (moe_cpu_ep_wait_parts(ep, MOE_EP_RETURN, parts)) {
        const moe_cpu_pass pass =
            moe_cpu_forward_pass(ep->context, problem, &call->plan, call->scratch, call->stream);
#pragma omp parallel for schedule(static) num_threads(ep->context->threads)
        for (int64_t token = 0; token < tokens; token++) collect_token(ep, &pass, args->out, token);
    } else if (args->out) {
        memset(args->out, MOE_NAN_BYTE, (size_t)(tokens * problem->layer.hidden * problem->element));
    }
    moe_stage_end(ep->context, SMOE_STAGE_COLLECT, call->stream);
}

static smoe_status forward(smoe_context *context, const moe_call *call, const smoe_forward_args *args,
                           int stages)
{
    moe_ep_problem received;
    moe_ep_problem_init(&received, &call->problem.layer);
    if (stages & MOE_DISPATCH) dispatch(args->ep, call, args, received.parts);
    if (stages & MOE_EXPERTS) experts(args->ep, call, args, &received);
    if (stages & MOE_COLLECT) collect(args->ep, call, args, received.parts);
    return moe_ep_outcome(context, args->ep);
}

uint64_t moe_cpu_ep_forward_scratch(const smoe_context *context, const moe_problem *problem)
{
    moe_ep_problem received;
    moe_ep_problem_init(&received, &problem->layer);
    const uint64_t local = moe_cpu_forward_pass(context, &received.received, NULL, NULL, NULL).bytes;
    const uint64_t own = moe_cpu_forward_pass(context, problem, NULL, NULL, NULL).bytes;
    return local > own ? local : own;
}

const moe_ep_table moe_cpu_ep = {
    .open = moe_cpu_ep_open,
    .forward = forward,
    .backward = moe_cpu_ep_backward,
};
