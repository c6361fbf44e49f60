/* Layers with ranks on GPUs: groups, and the forward. docs/design.md describes the protocol; the kernels are
 * in ep/.
 *
 *   dispatch  begins the call; routing, then X in parts
 *   experts   the plan of the received rows; up, down and return for one wave after another
 *   collect   O from the sums of all ranks */
#include "host/ep_host.h"
#include "host/forward.h"
#include "schedule/scheduler.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static_assert((int)MOE_EP_MAX_PARTS + 2 == sizeof((moe_ep_received_plan *)0)->lists / sizeof(moe_cuda_lists),
              "a work list for each wave");

/* ---- Groups ---- */

static const char no_memory[] = "%s: no pinned memory, stream or event for the group: %s";

static cudaError_t open_group(moe_cuda_group *group)
{
    int lowest, highest;
    cudaError_t status = cudaMallocHost((void **)&group->report, sizeof *group->report);
    if (status != cudaSuccess) return status;
    memset(group->report, 0, sizeof *group->report);
    status = cudaDeviceGetStreamPriorityRange(&lowest, &highest);
    if (status == cudaSuccess)
        status = cudaStreamCreateWithPriority(&group->comm, cudaStreamNonBlocking, highest);
    if (status == cudaSuccess) status = cudaStreamCreateWithFlags(&group->aside, cudaStreamNonBlocking);
    cudaEvent_t *const events[] = {&group->turn, &group->again, &group->own, &group->own_again};
    for (size_t i = 0; i < sizeof events / sizeof *events && status == cudaSuccess; i++)
        status = cudaEventCreateWithFlags(events[i], cudaEventDisableTiming);
    for (int i = 0; i < MOE_EP_MAX_PARTS && status == cudaSuccess; i++)
        status = cudaEventCreateWithFlags(&group->sent[i], cudaEventDisableTiming);
    return status;
}

static void close_group(moe_cuda_group *group)
{
    const cudaEvent_t events[] = {group->turn, group->again, group->own, group->own_again};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
        if (events[i]) cudaEventDestroy(events[i]);
    for (int i = 0; i < MOE_EP_MAX_PARTS; i++)
        if (group->sent[i]) cudaEventDestroy(group->sent[i]);
    if (group->comm) cudaStreamDestroy(group->comm);
    if (group->aside) cudaStreamDestroy(group->aside);
    if (group->report) cudaFreeHost(group->report);
    free(group);
}

/* The values first: copies of one stream are in order. */
static cudaError_t say_hello(const smoe_ep *ep)
{
    int64_t values[MOE_EP_GROUP_VALUES];
    const uint64_t flag = 1;
    moe_ep_group_values(ep, values);
    cudaError_t status = cudaSuccess;
    for (int i = 0; i < 2 * ep->ranks && status == cudaSuccess; i++) {
        const int rank = i % ep->ranks;
        char *window = ep->windows[rank];
        if (i < ep->ranks)
            status = cudaMemcpy(window + ep->window.hello + (size_t)ep->rank * 8 * MOE_EP_VALUES, values,
                                sizeof values, cudaMemcpyDefault);
        else if (rank != ep->rank)
            status = cudaMemcpy(window + (MOE_EP_HELLO * MOE_EP_MAX_RANKS + ep->rank) * MOE_EP_LINE, &flag,
                                sizeof flag, cudaMemcpyDefault);
    }
    return status;
}

static smoe_status open(smoe_ep *ep)
{
    const device_state *state = ep->context->state;
    moe_cuda_group *group = ep->backend = calloc(1, sizeof *group);
    if (!group) return moe_fail(ep->context, SMOE_ERROR_MEMORY, no_memory, ep->context->function, "calloc");
    int before;
    cudaError_t status = enter_device(state, &before);
    if (status != cudaSuccess) return device_error(ep->context, status);
    status = open_group(group);
    const int made = status == cudaSuccess;
    if (made) status = say_hello(ep);
    leave_device(state, before);
    if (!made)
        return moe_fail(ep->context, SMOE_ERROR_MEMORY, no_memory, ep->context->function,
                        cudaGetErrorString(status));
    return status == cudaSuccess ? SMOE_OK : device_error(ep->context, status);
}

static void close(smoe_ep *ep)
{
    const device_state *state = ep->context->state;
    int before;
    if (!ep->backend) return;
    enter_device(state, &before);
    close_group(ep->backend);
    leave_device(state, before);
}

static void look(smoe_ep *ep)
{
    moe_ep_report *report = ((moe_cuda_group *)ep->backend)->report;
    if (__atomic_load_n(&report->fault.reason, __ATOMIC_ACQUIRE)) moe_ep_note(ep, &report->fault);
}

static void abort_group(smoe_ep *ep)
{
    __atomic_store_n(&((moe_cuda_group *)ep->backend)->report->aborted, 1, __ATOMIC_RELEASE);
}

/* ---- The forward ---- */

/* Behind the scratch of a layer FROM_TOPK that has the received rows. */
typedef struct received_scratch {
    moe_layout experts;
    uint64_t lists, list_bytes, tiles,
        pieces; /* of a wave: counts, then tiles and pieces from its start on */
    uint64_t run_counts, sent, mask, end;
    int32_t piece_limit, words;
} received_scratch;

int32_t moe_cuda_ep_piece_limit(const smoe_layer *layer, const moe_ep_problem *ep)
{
    return moe_piece_limit(layer->max_tokens * layer->topk / moe_ep_waves(ep->parts),
                           ep->received.layer.experts);
}

static received_scratch lay_out_received(const device_state *state, const smoe_layer *layer,
                                         const moe_ep_problem *ep)
{
    const moe_problem *p = &ep->received;
    const int64_t experts = p->layer.experts, slots = p->layer.tokens, waves = moe_ep_waves(ep->parts);
    const uint64_t runs = 4 * (uint64_t)(experts * waves * layer->ranks);
    received_scratch s = {.words = (int32_t)moe_divide_up(experts, 32)};
    s.piece_limit = moe_cuda_ep_piece_limit(layer, ep);
    moe_cuda_lay_out_forward(state, p, &s.experts);
    s.tiles = moe_align_up(4 * sizeof(int32_t));
    s.pieces = s.tiles + moe_align_up(sizeof(moe_work) *
                                      (uint64_t)moe_work_bound(p->padded_rows, experts, MOE_TILE_BLOCKS));
    s.list_bytes = s.pieces + moe_align_up(sizeof(moe_work) *
                                           (uint64_t)moe_work_bound(p->padded_rows, experts, s.piece_limit));
    s.lists = moe_align_up(s.experts.bytes - (p->layer.inference ? p->plan_bytes : 0));
    s.run_counts = s.lists + (uint64_t)waves * s.list_bytes;
    s.sent = s.run_counts + moe_align_up(runs);
    s.mask = s.sent + moe_align_up(runs);
    s.end = s.mask + moe_align_up(4 * (uint64_t)(slots * s.words));
    return s;
}

static uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

void moe_cuda_ep_add_scratch(const device_state *state, const moe_problem *problem, moe_layout *forward,
                             moe_layout *backward)
{
    moe_ep_problem ep;
    moe_ep_problem_init(&ep, &problem->layer);
    const uint64_t plan = problem->layer.inference ? problem->plan_bytes : 0;
    if (forward)
        forward->bytes = larger(forward->bytes, plan + lay_out_received(state, &problem->layer, &ep).end);
    if (backward)
        backward->bytes = larger(backward->bytes, moe_cuda_ep_backward_scratch(state, &problem->layer, &ep));
}

static cudaError_t dispatch(const ep_call *c, const smoe_forward_args *args)
{
    const moe_ep_moved x[2] = {{args->x, c->ep->window.x, MOE_EP_INPUT}};
    moe_stage_begin(c->context, SMOE_STAGE_DISPATCH, c->main.stream);
    const cudaError_t status = moe_cuda_ep_start(c, x, 1);
    moe_stage_end(c->context, SMOE_STAGE_DISPATCH, c->main.stream);
    return status;
}

static moe_ep_received_plan plan_of(const ep_call *c, const received_scratch *s, char *scratch)
{
    const moe_problem *p = &c->received.received;
    const moe_plan_arrays *plan = &c->arrays.plan;
    moe_ep_received_plan r = {
        .view = c->begin.view,
        .tokens = c->arrays.tokens,
        .experts = (int32_t)p->layer.experts,
        .padded_rows = (int32_t)p->padded_rows,
        .piece_limit = s->piece_limit,
        .counts = plan->counts,
        .offsets = plan->offsets,
        .block_offsets = plan->block_offsets,
        .order = plan->order,
        .row_token = plan->row_token,
        .token_offsets = plan->token_offsets,
        .token_rows = plan->token_rows,
        .row_weight = plan->row_weight,
        .starts = c->arrays.starts,
        .spans = c->arrays.spans,
        .run_blocks = c->arrays.run_blocks,
        .run_counts = (int32_t *)(scratch + s->run_counts),
        .sent = (int32_t *)(scratch + s->sent),
        .mask = (uint32_t *)(scratch + s->mask),
        .words = s->words,
    };
    for (int w = 0; w < c->waves; w++) {
        char *at = scratch + s->lists + (uint64_t)w * s->list_bytes;
        const moe_cuda_lists lists = {(int32_t *)at, (moe_work *)(at + s->tiles),
                                      (moe_work *)(at + s->pieces), s->piece_limit, (int32_t *)at + 2};
        r.lists[w] = lists;
    }
    return r;
}

static cudaError_t plan_received(const ep_call *c, const moe_ep_received_plan *plan)
{
    moe_stage_begin(c->context, SMOE_STAGE_PLAN, c->main.stream);
    cudaError_t status;
    if (moe_cuda_ep_has_few_rows(c)) {
        status = moe_cuda_ep_plan_few(&c->main, plan, &c->begin, c->arrays.tokens);
    } else {
        status = moe_cuda_ep_take_headers(&c->main, &c->begin, c->arrays.tokens);
        if (status == cudaSuccess) status = moe_cuda_ep_plan(&c->main, plan);
    }
    moe_stage_end(c->context, SMOE_STAGE_PLAN, c->main.stream);
    return status;
}

/* up, and down and return for one chunk after another. */
static cudaError_t run_wave(const ep_call *c, forward_call *rows, int wave)
{
    smoe_context *context = c->context;
    const int64_t hidden = c->problem->layer.hidden, chunk = c->problem->chunk_columns;
    moe_stage_begin(context, SMOE_STAGE_UP, c->main.stream);
    cudaError_t status = moe_cuda_up(rows);
    moe_stage_end(context, SMOE_STAGE_UP, c->main.stream);
    for (int64_t first = 0; first < hidden && status == cudaSuccess; first += chunk) {
        const int64_t columns = hidden - first < chunk ? hidden - first : chunk;
        moe_stage_begin(context, SMOE_STAGE_DOWN, c->main.stream);
        status = moe_cuda_down(rows, first, columns);
        moe_stage_end(context, SMOE_STAGE_DOWN, c->main.stream);
        if (status != cudaSuccess) return status;
        moe_stage_begin(context, SMOE_STAGE_COMBINE, c->main.stream);
        moe_ep_return sums = moe_cuda_ep_return_of(c, rows->y, first, columns);
        const int part = c->waves == 1 ? 0 : wave - 1;
        sums.row_weight = c->arrays.plan.row_weight;
        sums.wave = wave;
        if (first + columns == hidden && part < c->received.parts) sums.part = part;
        status = moe_cuda_ep_return_sums(c, &sums);
        moe_stage_end(context, SMOE_STAGE_COMBINE, c->main.stream);
    }
    return status;
}

/* For a backward that computes H again. */
static cudaError_t keep_b1(const ep_call *c, const void *b1)
{
    const size_t bytes = c->received.b1_bytes;
    if (!bytes) return cudaSuccess;
    if (!b1) return cudaMemsetAsync(c->arrays.b1, 0, bytes, c->main.stream);
    return cudaMemcpyAsync(c->arrays.b1, b1, bytes, cudaMemcpyDeviceToDevice, c->main.stream);
}

int moe_cuda_ep_few_rows(const ep_call *c)
{
    const smoe_layer *layer = &c->problem->layer;
    return c->state->kernels->few_rows(layer->ranks * layer->max_tokens * layer->topk, layer->experts);
}

static cudaError_t experts(ep_call *c, const smoe_forward_args *args, const char **refused, int *refusal)
{
    const smoe_layer *layer = &c->problem->layer;
    const received_scratch s = lay_out_received(c->state, layer, &c->received);
    const moe_ep_received_plan plan = plan_of(c, &s, c->call->scratch);
    smoe_forward_args local = *args;
    local.x = c->ep->windows[c->ep->rank] + c->ep->window.x;
    forward_call rows = moe_cuda_forward_call(c->state, &c->received.received, &s.experts, &c->arrays.plan,
                                              &local, c->call->scratch, c->main.stream);
    rows.on = c->beside;
    rows.few_rows = moe_cuda_ep_few_rows(c);
    cudaError_t status = plan_received(c, &plan);
    if (status == cudaSuccess) status = keep_b1(c, args->b1);
    for (int wave = 0; wave < c->waves && status == cudaSuccess; wave++) {
        if (!moe_cuda_ep_has_few_rows(c)) status = moe_cuda_ep_enter_wave(c, wave);
        rows.lists = plan.lists[wave];
        rows.block_offsets = c->arrays.run_blocks + wave;
        rows.block_stride = c->waves;
        if (status == cudaSuccess) status = run_wave(c, &rows, wave);
    }
    if (status == cudaSuccess && c->waves > 1)
        status = moe_cuda_ep_signal(&c->main, &c->begin.view, MOE_EP_FREE, 0);
    *refused = rows.on.refused_call;
    *refusal = rows.on.refusal;
    return status == cudaSuccess ? moe_cuda_ep_follow(c, c->main.stream, c->comm.stream) : status;
}

static cudaError_t collect(const ep_call *c, const smoe_forward_args *args)
{
    const moe_ep_collect p = {
        .view = c->begin.view,
        .plan = c->own,
        .out = args->out,
        .tokens = c->problem->layer.tokens,
        .hidden = c->problem->layer.hidden,
        .waits = moe_cuda_ep_collect_waits(c),
    };
    moe_stage_begin(c->context, SMOE_STAGE_COLLECT, c->main.stream);
    cudaError_t status = cudaSuccess;
    if (!p.waits)
        status = moe_cuda_ep_gate(&c->main, &c->begin.view, MOE_EP_RETURN, c->received.parts - 1, NULL);
    if (status == cudaSuccess) status = moe_cuda_ep_collect(&c->main, &p);
    moe_stage_end(c->context, SMOE_STAGE_COLLECT, c->main.stream);
    return status;
}

static smoe_status forward(smoe_context *context, const moe_call *call, const smoe_forward_args *args,
                           int stages)
{
    ep_call c = moe_cuda_ep_call(context, args->ep, call,
                                 call->problem.layer.inference ? args->scratch : args->saved, 0, 0);
    int before;
    cudaError_t status = enter_device(c.state, &before);
    if (status != cudaSuccess) return device_error(context, status);
    if (stages & MOE_DISPATCH) status = dispatch(&c, args);
    if (status == cudaSuccess && stages & MOE_EXPERTS)
        status = experts(&c, args, &c.main.refused_call, &c.main.refusal);
    if (status == cudaSuccess && stages & MOE_COLLECT) status = collect(&c, args);
    leave_device(c.state, before);
    const smoe_status result = launch_result(context, &c.main, status);
    return result == SMOE_OK ? moe_ep_outcome(context, args->ep) : result;
}

const moe_ep_table moe_cuda_ep = {
    .open = open,
    .close = close,
    .look = look,
    .abort = abort_group,
    .forward = forward,
    .backward = moe_cuda_ep_backward,
};

/* ---- A rank without tokens ---- */

smoe_status moe_cuda_no_tokens(smoe_context *context, const moe_call *call, const smoe_forward_args *args)
{
    const device_state *state = context->state;
    const moe_plan_arrays *plan = &call->plan;
    const size_t experts = (size_t)call->problem.layer.experts;
    const struct {
        void *at;
        size_t bytes;
    } zeros[] = {
        {plan->counts, 4 * experts},
        {plan->offsets, 4 * (experts + 1)},
        {plan->block_offsets, 4 * (experts + 1)},
        {plan->token_offsets, 4},
        {plan->topk_counts, 4 * experts},
        {args->losses, 2 * sizeof(float)},
    };
    int before;
    cudaError_t status = enter_device(state, &before);
    if (status != cudaSuccess) return device_error(context, status);
    for (size_t i = 0; i < sizeof zeros / sizeof *zeros && status == cudaSuccess; i++)
        if (zeros[i].at) status = cudaMemsetAsync(zeros[i].at, 0, zeros[i].bytes, call->stream);
    leave_device(state, before);
    return status == cudaSuccess ? SMOE_OK : device_error(context, status);
}
