/* What the passes of layers with ranks share on a GPU: the description of a call, rows on their way, and
 * waits.
 *
 * The host waits for nothing and reads no count. With several waves rows travel on a stream of the group, by
 * kernels on few SMs or by copy engines, and the stages beside kernels use the other SMs. A kernel waits for
 * a part of the others' rows only when this rank's rows of the part have been sent. So no wait holds up what
 * another rank waits for, even if all streams share one queue. */
#include "host/ep_host.h"

enum {
    MOVER_SMS = 16, /* while stages run beside movers */
    FEW_TOKENS = 64 /* with at most so many and one wave collect waits itself, on at most 8 SMs */
};

static moe_ep_view view_of(const smoe_ep *ep, int parts)
{
    const moe_ep_window *w = &ep->window;
    moe_ep_view v = {
        .report = ((moe_cuda_group *)ep->backend)->report,
        .state = w->state,
        .hello = w->hello,
        .header = w->header,
        .routing = w->routing,
        .sums = w->sums,
        .ds = w->ds,
        .routing_stripe = w->routing_stripe,
        .ds_stripe = w->ds_stripe,
        .pairs = w->pairs,
        .max_tokens = w->max_tokens,
        .stripe_experts = (int32_t)w->experts,
        .ranks = ep->ranks,
        .rank = ep->rank,
        .parts = parts,
        .timeout_ms = ep->timeout_ms,
    };
    for (int r = 0; r < ep->ranks; r++) v.windows[r] = ep->windows[r];
    return v;
}

/* The stages beside movers leave them their SMs. */
static void share_sms(ep_call *c)
{
    const moe_cuda_group *group = c->ep->backend;
    c->beside = c->comm = c->main;
    if (c->waves == 1) return;
    const int sms = c->main.sms, movers = sms > 2 * MOVER_SMS ? MOVER_SMS : (sms + 1) / 2;
    c->beside.sms = sms - movers > 0 ? sms - movers : 1;
    c->comm.sms = movers;
    c->comm.stream = group->comm;
}

ep_call moe_cuda_ep_call(smoe_context *context, smoe_ep *ep, const moe_call *call, void *buffer, int backward,
                         int wanted)
{
    const smoe_layer *layer = &call->problem.layer;
    const moe_plan_arrays *plan = &call->plan;
    ep_call c = {
        .context = context,
        .ep = ep,
        .call = call,
        .problem = &call->problem,
        .state = context->state,
        .own = {plan->row_token, plan->token_rows, plan->token_offsets, plan->counts, plan->offsets,
                plan->block_offsets, plan->row_weight, (int32_t)call->problem.experts_here},
        .begin = {.tokens = layer->tokens,
                  .row_bytes = layer->hidden * call->problem.element,
                  .backward = backward},
        .main = launch_on(context->state, layer->dtype, call->stream),
        .row_bytes = layer->hidden * call->problem.element,
    };
    moe_ep_problem_init(&c.received, layer);
    c.waves = moe_ep_waves(c.received.parts);
    c.arrays = moe_ep_arrays_at(&c.received, c.problem, buffer);
    c.begin.view = view_of(ep, c.received.parts);
    moe_ep_group_values(ep, c.begin.group_values);
    moe_ep_call_values(c.problem, backward, wanted, c.begin.call_values);
    share_sms(&c);
    return c;
}

cudaError_t moe_cuda_ep_follow(const ep_call *c, cudaStream_t stream, cudaStream_t before)
{
    const cudaEvent_t event = ((moe_cuda_group *)c->ep->backend)->turn;
    if (stream == before) return cudaSuccess;
    const cudaError_t status = cudaEventRecord(event, before);
    return status == cudaSuccess ? cudaStreamWaitEvent(stream, event, 0) : status;
}

/* Whole stripes by the copy engines, peer after peer: (W - 1) rows a token and no SM, where kernels send the
 * D rows a token that are needed. Copies win where the transfer hides behind the layer, and where a token has
 * an expert on nearly every rank. On eight H200 a GPU sent 385 GB/s by copies, and the forward computes at
 * about 550 TFLOP/s; the figures are in the log of 2026-11-27. */
static int copies_are_better(const smoe_layer *l)
{
    const double sent = (double)((l->ranks - 1) * l->hidden * 2) / 385e9;
    const double computed = 6.0 * (double)(l->topk * l->hidden * l->intermediate) / 550e12;
    return sent <= 0.75 * computed || l->topk >= 2 * l->ranks;
}

/* The place of this rank's row `row` in the region of a window. */
static char *place_in(const ep_call *c, int rank, uint64_t region, int64_t row)
{
    return c->ep->windows[rank] + region + (c->ep->rank * c->ep->window.max_tokens + row) * c->row_bytes;
}

/* Rows first..end - 1 to the same place of all other windows. */
static cudaError_t copy_stripes(const ep_call *c, const moe_ep_push *p)
{
    const smoe_ep *ep = c->ep;
    const char *from = (const char *)p->moved.rows + p->first * p->row_bytes;
    const size_t bytes = (size_t)((p->end - p->first) * p->row_bytes);
    cudaError_t status = cudaSuccess;
    for (int i = 1; i < ep->ranks && bytes && status == cudaSuccess; i++)
        status = cudaMemcpyAsync(place_in(c, (ep->rank + i) % ep->ranks, p->moved.region, p->first), from,
                                 bytes, cudaMemcpyDefault, c->comm.stream);
    return status == cudaSuccess ? moe_cuda_ep_signal(&c->comm, &c->begin.view, p->moved.flag, p->part)
                                 : status;
}

static cudaError_t copy_own(const ep_call *c, const void *rows, uint64_t region, cudaEvent_t done)
{
    const moe_cuda_group *group = c->ep->backend;
    const size_t bytes = (size_t)(c->problem->layer.tokens * c->row_bytes);
    cudaError_t status = moe_cuda_ep_follow(c, group->aside, c->main.stream);
    if (status == cudaSuccess && bytes)
        status = cudaMemcpyAsync(place_in(c, c->ep->rank, region, 0), rows, bytes, cudaMemcpyDeviceToDevice,
                                 group->aside);
    return status == cudaSuccess ? cudaEventRecord(done, group->aside) : status;
}

int moe_cuda_ep_has_few_rows(const ep_call *c)
{
    const moe_problem *p = &c->received.received;
    return c->waves == 1 && p->layer.tokens <= MOE_EP_FEW_SLOTS && p->padded_rows <= MOE_EP_FEW_ROWS;
}

int moe_cuda_ep_collect_waits(const ep_call *c)
{
    return c->waves == 1 && c->ep->window.max_tokens <= FEW_TOKENS;
}

static cudaError_t push_parts(const ep_call *c, const moe_ep_moved *moved, int parts)
{
    const int64_t tokens = c->problem->layer.tokens;
    const moe_cuda_group *group = c->ep->backend;
    const int again = moved->flag == MOE_EP_AGAIN,
              copies = c->waves > 1 && copies_are_better(&c->problem->layer);
    moe_ep_push p = {.view = c->begin.view,
                     .plan = c->own,
                     .moved = *moved,
                     .row_bytes = c->row_bytes,
                     .own = c->waves == 1};
    cudaError_t status = moe_cuda_ep_follow(c, c->comm.stream, c->main.stream);
    if (status == cudaSuccess && c->waves > 1)
        status = copy_own(c, moved->rows, moved->region, again ? group->own_again : group->own);
    for (p.part = 0; p.part < parts && status == cudaSuccess; p.part++) {
        p.first = moe_ep_part_start(tokens, parts, p.part);
        p.end = moe_ep_part_start(tokens, parts, p.part + 1);
        status = copies ? copy_stripes(c, &p) : moe_cuda_ep_push(&c->comm, &p);
        if (status == cudaSuccess && c->waves > 1)
            status = cudaEventRecord(again ? group->again : group->sent[p.part], c->comm.stream);
    }
    return status;
}

cudaError_t moe_cuda_ep_start(const ep_call *c, const moe_ep_moved moved[2], int tensors)
{
    cudaError_t status;
    if (moe_cuda_ep_has_few_rows(c)) {
        moe_ep_begin_few p = {.begin = c->begin, .plan = c->own, .tensors = tensors};
        for (int i = 0; i < tensors; i++) p.moved[i] = moved[i];
        return moe_cuda_ep_begin_few(&c->main, &p);
    }
    status = moe_cuda_ep_begin(&c->main, &c->begin);
    if (status == cudaSuccess && !c->begin.backward)
        status = moe_cuda_ep_send_routing(&c->main, &c->begin.view, &c->own);
    for (int i = 0; i < tensors && status == cudaSuccess; i++)
        status = push_parts(c, &moved[i], moved[i].flag == MOE_EP_AGAIN ? 1 : c->received.parts);
    return status;
}

/* Waits for the flag of all others. Before, this rank's own rows have been sent. */
static cudaError_t wait_for(const ep_call *c, cudaEvent_t sent, moe_ep_flag flag, int part)
{
    cudaError_t status = cudaSuccess;
    if (c->waves > 1) status = cudaStreamWaitEvent(c->main.stream, sent, 0);
    return status == cudaSuccess ? moe_cuda_ep_gate(&c->main, &c->begin.view, flag, part, NULL) : status;
}

static int is_own(const ep_call *c, int wave)
{
    return c->waves > 1 && (wave == 0 || wave == c->waves - 1);
}

cudaError_t moe_cuda_ep_enter_wave(const ep_call *c, int wave)
{
    const moe_cuda_group *group = c->ep->backend;
    if (is_own(c, wave)) return cudaStreamWaitEvent(c->main.stream, group->own, 0);
    const int part = c->waves == 1 ? 0 : wave - 1;
    return wait_for(c, group->sent[part], MOE_EP_INPUT, part);
}

cudaError_t moe_cuda_ep_wait_again(const ep_call *c)
{
    const moe_cuda_group *group = c->ep->backend;
    cudaError_t status = cudaSuccess;
    if (c->waves > 1) status = cudaStreamWaitEvent(c->main.stream, group->own_again, 0);
    return status == cudaSuccess ? wait_for(c, group->again, MOE_EP_AGAIN, 0) : status;
}

/* While a graph is captured, the own X has been sent before, because a graph's branches may run in any order
 * (see the top). Else it was enqueued before. So the stages beside it do not wait. */
cudaError_t moe_cuda_ep_wait_past(const ep_call *c, const moe_ep_past *past)
{
    const moe_cuda_group *group = c->ep->backend;
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cudaError_t status = cudaSuccess;
    if (c->waves > 1) status = cudaStreamIsCapturing(c->main.stream, &capture);
    if (status == cudaSuccess && c->waves > 1)
        status = cudaStreamWaitEvent(c->main.stream, group->own_again, 0);
    if (status == cudaSuccess && capture != cudaStreamCaptureStatusNone)
        status = cudaStreamWaitEvent(c->main.stream, group->again, 0);
    return status == cudaSuccess ? moe_cuda_ep_gate(&c->main, &c->begin.view, MOE_EP_AGAIN, 0, past) : status;
}

moe_ep_return moe_cuda_ep_return_of(const ep_call *c, const void *y, int64_t first, int64_t columns)
{
    const moe_ep_return p = {
        .view = c->begin.view,
        .y = y,
        .token_offsets = c->arrays.plan.token_offsets,
        .token_rows = c->arrays.plan.token_rows,
        .tokens = c->arrays.tokens,
        .hidden = c->problem->layer.hidden,
        .first_column = first,
        .columns = columns,
        .past = {c->arrays.run_blocks, INT32_MAX},
        .part = -1,
    };
    return p;
}

/* The sums of a rank's own tokens travel nowhere, so all SMs make them. */
cudaError_t moe_cuda_ep_return_sums(const ep_call *c, const moe_ep_return *p)
{
    if (!p->others && is_own(c, p->wave)) return moe_cuda_ep_return(&c->main, p);
    cudaError_t status = moe_cuda_ep_follow(c, c->comm.stream, c->main.stream);
    if (status == cudaSuccess) status = moe_cuda_ep_return(&c->comm, p);
    if (status == cudaSuccess && p->columns < p->hidden) /* the next columns take the place of these */
        status = moe_cuda_ep_follow(c, c->main.stream, c->comm.stream);
    return status;
}
