/* The backward of a layer with ranks on a GPU.
 * - dispatch_backward: dO in parts, and X again for dW1 and for H that is computed again: no rank keeps the X
 *   that it received.
 * - experts_backward: dh, dS; dx_rows and sums over a token's rows to the token's rank; then dw2 and dw1,
 *   while the sums travel.
 * - collect_backward: dS of this rank's pairs, router_bwd, dX[t] = router's term + sum over the ranks. */
#include "host/backward.h"
#include "host/ep_host.h"
#include "host/forward.h"
#include "wanted.h"

static cudaError_t dispatch(const ep_call *c, const smoe_backward_args *args, int wanted)
{
    const moe_ep_window *w = &c->ep->window;
    const moe_ep_moved moved[2] = {{args->dout, w->dout, MOE_EP_INPUT}, {args->x, w->x, MOE_EP_AGAIN}};
    const int tensors = wanted ? 1 + moe_ep_sends_x(&c->received, wanted) : 0;
    moe_stage_begin(c->context, SMOE_STAGE_DISPATCH_BWD, c->main.stream);
    const cudaError_t status = moe_cuda_ep_start(c, moved, tensors);
    moe_stage_end(c->context, SMOE_STAGE_DISPATCH_BWD, c->main.stream);
    return status;
}

/* ---- experts ---- */

/* Behind the scratch of a backward of the received rows: the work lists of each wave, of the rows whose H is
 * not kept, and of all rows. */
typedef struct received_backward {
    moe_layout experts;
    uint64_t lists, list_bytes, tiles, pieces, kept_blocks, end;
    int32_t piece_limit;
} received_backward;

static received_backward lay_out(const device_state *state, const smoe_layer *layer, const moe_ep_problem *ep)
{
    const moe_problem *p = &ep->received;
    const int64_t waves = moe_ep_waves(ep->parts), runs = p->layer.experts * waves;
    received_backward s = {.piece_limit = moe_cuda_ep_piece_limit(layer, ep)};
    moe_cuda_lay_out_dw_last(state, p, &s.experts);
    s.tiles = moe_align_up(6 * sizeof(int32_t));
    s.pieces = s.tiles + moe_align_up(sizeof(moe_work) *
                                      (uint64_t)moe_work_bound(p->padded_rows, runs, MOE_TILE_BLOCKS));
    s.list_bytes = s.pieces + moe_align_up(sizeof(moe_piece) *
                                           (uint64_t)moe_work_bound(p->padded_rows, runs, s.piece_limit));
    s.lists = moe_align_up(s.experts.bytes);
    s.kept_blocks = s.lists + (uint64_t)(waves + 2) * s.list_bytes;
    s.end = s.experts.bytes ? s.kept_blocks + 4 * (uint64_t)(runs + 1) : 0; /* 0: inference */
    return s;
}

uint64_t moe_cuda_ep_backward_scratch(const device_state *state, const smoe_layer *layer,
                                      const moe_ep_problem *ep)
{
    return lay_out(state, layer, ep).end;
}

static cudaError_t send_ds(const ep_call *c, const backward_call *rows)
{
    const moe_ep_send_ds p = {
        .view = c->begin.view,
        .partial = (const float *)(rows->scratch + rows->at.ds),
        .starts = c->arrays.starts,
        .counts = rows->plan->counts,
        .block_offsets = rows->plan->block_offsets,
        .row_token = rows->plan->row_token,
        .padded_rows = rows->problem->padded_rows,
        .parts = rows->at.ds_parts + (rows->args->b2 ? 1 : 0),
        .experts = (int32_t)rows->problem->layer.experts,
        .part = c->waves == 1 ? 0 : -1,
    };
    return moe_cuda_ep_send_ds(&c->main, &p);
}

static moe_cuda_backward_lists lists_at(const backward_call *rows, const received_backward *s, int number)
{
    char *at = rows->scratch + s->lists + (uint64_t)number * s->list_bytes;
    moe_cuda_backward_lists lists = rows->lists;
    lists.counts = (int32_t *)at;
    lists.turn = (int32_t *)at + 4;
    lists.tiles = (moe_work *)(at + s->tiles);
    lists.pieces = (moe_piece *)(at + s->pieces);
    return lists;
}

/* For few rows also all waits before the sums of others. */
static cudaError_t make_lists(const ep_call *c, const backward_call *rows, const received_backward *s,
                              int wanted, moe_ep_backward_waves *waves)
{
    *waves = (moe_ep_backward_waves){
        .run_blocks = c->arrays.run_blocks,
        .past = {c->arrays.run_blocks + rows->problem->layer.experts * c->waves, INT32_MAX},
        .experts = (int32_t)rows->problem->layer.experts,
        .waves = c->waves,
        .piece_limit = s->piece_limit,
    };
    for (int w = 0; w < c->waves; w++) waves->lists[w] = lists_at(rows, s, w);
    if (c->received.b1_bytes) {
        waves->past.kept = (int32_t)(rows->problem->kept_rows / MOE_BLOCK_ROWS);
        waves->kept_blocks = (int32_t *)(rows->scratch + s->kept_blocks);
        waves->not_kept = lists_at(rows, s, c->waves);
        waves->all = lists_at(rows, s, c->waves + 1);
    }
    const cudaError_t status = moe_cuda_make_backward_lists(rows);
    if (status != cudaSuccess) return status;
    return moe_cuda_ep_has_few_rows(c) ? moe_cuda_ep_enter_few(&c->main, waves, &c->begin, c->arrays.tokens,
                                                               moe_ep_sends_x(&c->received, wanted))
                                       : moe_cuda_ep_backward_waves(&c->main, waves);
}

static cudaError_t run_dh(const ep_call *c, backward_call *rows)
{
    moe_stage_begin(c->context, SMOE_STAGE_DH, c->main.stream);
    const cudaError_t status = moe_cuda_run_dh(rows);
    moe_stage_end(c->context, SMOE_STAGE_DH, c->main.stream);
    return status;
}

/* dx_rows and return for one chunk after another. */
static cudaError_t run_dx(const ep_call *c, backward_call *rows, const moe_ep_past *past, int others,
                          int wave)
{
    const int64_t hidden = c->problem->layer.hidden, chunk = c->problem->chunk_columns;
    cudaError_t status = cudaSuccess;
    for (int64_t first = 0; rows->args->dx && first < hidden && status == cudaSuccess; first += chunk) {
        const int64_t columns = hidden - first < chunk ? hidden - first : chunk;
        moe_stage_begin(c->context, SMOE_STAGE_DX_ROWS, c->main.stream);
        status = moe_cuda_run_dx_rows(rows, first, columns);
        moe_stage_end(c->context, SMOE_STAGE_DX_ROWS, c->main.stream);
        if (status != cudaSuccess) return status;
        moe_stage_begin(c->context, SMOE_STAGE_DX, c->main.stream);
        moe_ep_return sums = moe_cuda_ep_return_of(c, rows->scratch + rows->at.shared, first, columns);
        sums.past = *past;
        sums.others = others;
        sums.wave = wave;
        status = moe_cuda_ep_return_sums(c, &sums);
        moe_stage_end(c->context, SMOE_STAGE_DX, c->main.stream);
    }
    return status;
}

/* H again in dH's place, of the rows whose H is not kept. */
static cudaError_t run_up_again(const ep_call *c, backward_call *rows)
{
    moe_problem problem = *rows->problem;
    problem.kept_rows = problem.padded_rows;
    smoe_forward_args args = SMOE_FORWARD_ARGS_INIT;
    args.x = rows->args->x;
    args.w1 = rows->args->w1;
    args.b1 = c->arrays.b1;
    forward_call up = {
        .problem = &problem,
        .args = &args,
        .plan = rows->plan,
        .state = rows->state,
        .lists = {rows->lists.counts, rows->lists.tiles, NULL, 0, rows->lists.turn},
        .a = rows->a,
        .rows = rows->rows,
        .few_rows = moe_cuda_ep_few_rows(c),
        .on = rows->on,
    };
    moe_stage_begin(c->context, SMOE_STAGE_UP, c->main.stream);
    const cudaError_t status = moe_cuda_up(&up);
    moe_stage_end(c->context, SMOE_STAGE_UP, c->main.stream);
    rows->on = up.on;
    return status;
}

/* The rows whose H is not kept: usually there are none. With several chunks dX~ of the other rows, which
 * their tokens also have, has been overwritten, so dx_rows computes all rows again. */
static cudaError_t run_past(const ep_call *c, backward_call *rows, const moe_ep_backward_waves *waves)
{
    const moe_plan_arrays *const plan = rows->plan;
    moe_plan_arrays again = *plan;
    again.h = rows->dh;
    rows->plan = &again;
    rows->lists = waves->not_kept;
    rows->block_offsets = NULL;
    cudaError_t status = moe_cuda_ep_has_few_rows(c) ? cudaSuccess : moe_cuda_ep_wait_past(c, &waves->past);
    if (status == cudaSuccess) status = run_up_again(c, rows);
    if (status == cudaSuccess) status = run_dh(c, rows);
    if (c->problem->chunk_columns < c->problem->layer.hidden) rows->lists = waves->all;
    if (status == cudaSuccess) status = run_dx(c, rows, &waves->past, 1, 0);
    rows->plan = plan;
    return status;
}

/* The gradients that travel. */
static cudaError_t run_returned(const ep_call *c, backward_call *rows, const received_backward *s,
                                int wants_ds, int wanted)
{
    const smoe_backward_args *args = rows->args;
    const moe_cuda_backward_lists all = rows->lists;
    moe_ep_backward_waves waves;
    cudaError_t status = make_lists(c, rows, s, wanted, &waves);
    const int wants_dh = wants_ds || moe_wants_dh(args) || args->dw2;
    for (int wave = 0; wave < c->waves && status == cudaSuccess; wave++) {
        rows->lists = waves.lists[wave];
        rows->block_offsets = (waves.kept_blocks ? waves.kept_blocks : c->arrays.run_blocks) + wave;
        rows->block_stride = c->waves;
        if (!moe_cuda_ep_has_few_rows(c)) status = moe_cuda_ep_enter_wave(c, wave);
        if (status == cudaSuccess && wants_dh) status = run_dh(c, rows);
        if (status == cudaSuccess && wants_dh) status = run_dx(c, rows, &waves.past, 0, wave);
    }
    if (status == cudaSuccess && wants_dh && waves.kept_blocks) status = run_past(c, rows, &waves);
    rows->lists = all;
    if (status == cudaSuccess && wants_ds) status = moe_cuda_run_ds(rows);
    return status == cudaSuccess && wants_ds ? send_ds(c, rows) : status;
}

/* Behind dS, which needs all of dO, and with one wave sets the flag itself. Also if no gradient travels: the
 * others wait for the flag. */
static cudaError_t signal_returned(const ep_call *c, int wants_ds)
{
    if (c->waves == 1 && wants_ds) return cudaSuccess;
    const cudaError_t status = moe_cuda_ep_follow(c, c->comm.stream, c->main.stream);
    return status == cudaSuccess
               ? moe_cuda_ep_signal(&c->comm, &c->begin.view, MOE_EP_RETURN, c->received.parts - 1)
               : status;
}

static cudaError_t run_weights(const ep_call *c, backward_call *rows)
{
    const smoe_backward_args *args = rows->args;
    cudaError_t status = moe_wants_dw2(args) ? moe_cuda_run_dw2(c->context, rows) : cudaSuccess;
    if (status == cudaSuccess && args->dw1 && !moe_cuda_ep_has_few_rows(c))
        status = moe_cuda_ep_wait_again(c);
    rows->on.sms = c->main.sms; /* nearly all rows have travelled */
    if (status == cudaSuccess && moe_wants_dw1(args)) status = moe_cuda_run_dw1(c->context, rows);
    if (status == cudaSuccess && c->waves > 1) /* with one wave collect sets it */
        status = moe_cuda_ep_signal(&c->main, &c->begin.view, MOE_EP_FREE, 0);
    return status;
}

static cudaError_t experts(ep_call *c, const smoe_backward_args *args, int wants_ds, int wanted)
{
    const received_backward s = lay_out(c->state, &c->problem->layer, &c->received);
    const char *window = c->ep->windows[c->ep->rank];
    smoe_backward_args local = *args;
    local.x = window + c->ep->window.x;
    local.dout = window + c->ep->window.dout;
    local.dtopk_weights = local.drow_weights = NULL;
    backward_call rows = moe_cuda_backward_call(c->state, &c->received.received, &s.experts, &c->arrays.plan,
                                                &local, args->scratch, 0, c->main.stream);
    rows.on = c->beside;
    rows.sends_ds = wants_ds;
    if (c->waves > 1) rows.bias_counts = c->arrays.spans;
    cudaError_t status = cudaSuccess;
    if (!wanted || !moe_cuda_ep_has_few_rows(c))
        status = moe_cuda_ep_take_headers(&c->main, &c->begin, c->arrays.tokens);
    if (status == cudaSuccess && wanted) status = run_returned(c, &rows, &s, wants_ds, wanted);
    if (status == cudaSuccess) status = signal_returned(c, wants_ds);
    if (status == cudaSuccess) status = run_weights(c, &rows);
    if (status == cudaSuccess) status = moe_cuda_ep_follow(c, c->main.stream, c->comm.stream);
    c->main.refused_call = rows.on.refused_call;
    c->main.refusal = rows.on.refusal;
    return status;
}

/* ---- collect ---- */

/* No token, no gradient. */
static cudaError_t clear_router(const ep_call *c, const smoe_backward_args *args)
{
    const smoe_layer *l = &c->problem->layer;
    const size_t experts = (size_t)(l->experts * moe_type_bytes(l->gradient_type));
    cudaError_t status = cudaSuccess;
    if (l->accumulate) return cudaSuccess;
    if (args->drouter_weight)
        status = cudaMemsetAsync(args->drouter_weight, 0, experts * (size_t)l->hidden, c->main.stream);
    if (status == cudaSuccess && args->drouter_bias)
        status = cudaMemsetAsync(args->drouter_bias, 0, experts, c->main.stream);
    return status;
}

/* With one wave the end of a rank's reading is told here, where a launch has room for it. */
static cudaError_t wait_for_sums(const ep_call *c)
{
    if (c->waves == 1) return moe_cuda_ep_free_and_gate(&c->main, &c->begin.view, MOE_EP_RETURN, 0);
    return moe_cuda_ep_gate(&c->main, &c->begin.view, MOE_EP_RETURN, c->received.parts - 1, NULL);
}

static cudaError_t collect_dx(const ep_call *c, const backward_call *own, int waits)
{
    moe_cuda_combine term = {0};
    if (own->with_router && own->args->router_weight) moe_cuda_router_term(own, 0, &term);
    const moe_ep_collect p = {
        .view = c->begin.view,
        .plan = c->own,
        .out = own->args->dx,
        .onto = term.onto,
        .terms = term.terms,
        .router_weight = term.router_weight,
        .tokens = c->problem->layer.tokens,
        .hidden = c->problem->layer.hidden,
        .waits = waits,
        .frees = waits,
    };
    moe_stage_begin(c->context, SMOE_STAGE_DX, c->main.stream);
    const cudaError_t status = moe_cuda_ep_collect(&c->main, &p);
    moe_stage_end(c->context, SMOE_STAGE_DX, c->main.stream);
    return status;
}

/* For the router, dS of all pairs in the order of the rank's rows, as one part with the term of b2. */
static cudaError_t take_ds(const ep_call *c, const backward_call *own)
{
    cudaError_t status = moe_cuda_make_backward_lists(own);
    if (status == cudaSuccess)
        status = moe_cuda_ep_take_ds(&c->main, &c->begin.view, &c->own, (float *)(own->scratch + own->at.ds));
    return status == cudaSuccess ? moe_cuda_run_ds(own) : status;
}

static cudaError_t collect_tokens(ep_call *c, const smoe_backward_args *args, int with_router, int wants_ds)
{
    smoe_backward_args local = *args;
    local.b2 = NULL;
    backward_call own = moe_cuda_backward_call(c->state, c->problem, &c->call->layout, &c->call->plan, &local,
                                               args->scratch, with_router, c->main.stream);
    own.at.ds_parts = 1;
    const int from_topk = c->problem->layer.entry == SMOE_ENTRY_FROM_TOPK;
    const int waits = from_topk && args->dx && moe_cuda_ep_collect_waits(c);
    cudaError_t status = waits ? cudaSuccess : wait_for_sums(c);
    if (status == cudaSuccess && wants_ds && !from_topk) status = take_ds(c, &own);
    if (status == cudaSuccess && with_router) status = moe_cuda_run_router(c->context, &own);
    if (status == cudaSuccess && args->dx) status = collect_dx(c, &own, waits);
    c->main.refused_call = own.on.refused_call;
    c->main.refusal = own.on.refusal;
    return status;
}

static cudaError_t collect(ep_call *c, const smoe_backward_args *args, int with_router, int wants_ds)
{
    moe_stage_begin(c->context, SMOE_STAGE_COLLECT_BWD, c->main.stream);
    cudaError_t status = cudaSuccess;
    if (c->problem->layer.tokens) {
        status = collect_tokens(c, args, with_router, wants_ds);
    } else {
        status = wait_for_sums(c);
        if (status == cudaSuccess) status = clear_router(c, args);
    }
    moe_stage_end(c->context, SMOE_STAGE_COLLECT_BWD, c->main.stream);
    return status;
}

/* Behind all waits of these stages. */
static cudaError_t finish(const ep_call *c, const smoe_backward_args *args, int with_router, int stages)
{
    const smoe_layer *l = &c->problem->layer;
    const int64_t size = moe_type_bytes(l->gradient_type), here = c->problem->experts_here,
                  width = c->problem->h_width;
    const int collects = stages & MOE_COLLECT, topk = collects && l->entry == SMOE_ENTRY_FROM_TOPK,
              rows = collects && !topk, router = collects && with_router, weights = stages & MOE_EXPERTS;
    const moe_ep_outputs outputs = {
        .at = {router ? args->dlogits : NULL, router ? args->drouter_weight : NULL,
               router ? args->drouter_bias : NULL, topk ? args->dtopk_weights : NULL,
               rows ? args->drow_weights : NULL, weights ? args->dw1 : NULL, weights ? args->dw2 : NULL,
               weights ? args->db1 : NULL, weights ? args->db2 : NULL},
        .bytes = {l->tokens * l->experts * moe_type_bytes(l->logits_type), l->experts * l->hidden * size,
                  l->experts * size, l->tokens * l->topk * 4, c->problem->padded_rows * 4,
                  here * width * l->hidden * size, here * l->hidden * l->intermediate * size,
                  here * width * size, here * l->hidden * size},
    };
    const moe_ep_take_topk ds = {
        .plan = c->own,
        .ids = args->topk_ids,
        .gradient = args->dtopk_weights,
        .tokens = l->tokens,
        .topk = (int32_t)l->topk,
        .wide_index = l->index_type == SMOE_TYPE_I64,
    };
    return moe_cuda_ep_finish(&c->main, &c->begin.view, &outputs, topk && ds.gradient ? &ds : NULL);
}

smoe_status moe_cuda_ep_backward(smoe_context *context, const moe_call *call, const smoe_backward_args *args,
                                 int with_router, int stages)
{
    const smoe_layer *layer = &call->problem.layer;
    const int wanted = moe_ep_wanted(layer, args, with_router),
              wants_ds = moe_wants_ds(layer, args, with_router);
    ep_call c = moe_cuda_ep_call(context, args->ep, call, args->saved, 1, wanted);
    int before;
    cudaError_t status = enter_device(c.state, &before);
    if (status != cudaSuccess) return device_error(context, status);
    if (stages & MOE_DISPATCH) status = dispatch(&c, args, wanted);
    if (status == cudaSuccess && stages & MOE_EXPERTS) status = experts(&c, args, wants_ds, wanted);
    if (status == cudaSuccess && stages & MOE_COLLECT) status = collect(&c, args, with_router, wants_ds);
    if (status == cudaSuccess && stages & (MOE_EXPERTS | MOE_COLLECT))
        status = finish(&c, args, with_router, stages);
    leave_device(c.state, before);
    const smoe_status result = launch_result(context, &c.main, status);
    return result == SMOE_OK ? moe_ep_outcome(context, args->ep) : result;
}
