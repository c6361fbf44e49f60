/* The launches of the forward: route, round and plan, whose kernels routing.c launches, then up, and down and
 * combine for one chunk after another. */
#include "host/forward.h"
#include "check.h"
#include "f8.h"
#include "host/ep_host.h"
#include "host/lora.h"
#include "schedule/few_rows.h"
#include "schedule/plan_size.h"

#include <assert.h>
#include <string.h>

/* Offsets of the parts of the forward's scratch, counted from the end of the plan. */
typedef struct forward_scratch {
    uint64_t counts, tiles, pieces, a, y, routing,
        end;                          /* a's memory is also used by routing, or by the plan as work space */
    uint64_t a_scale, x8, x_scale;    /* fp8; y overwrites X8 and its scales */
    moe_routing_layout routing_parts; /* FROM_LOGITS; offsets from `routing` */
} forward_scratch;

static_assert(sizeof(forward_scratch) <= sizeof((moe_layout *)0)->parts, "a layout holds it");

/* What route, round and plan use besides the work lists. Lays out the parts of routing, for layers from
 * logits. */
static uint64_t routing_bytes(const moe_device *device, const moe_problem *p, moe_routing_layout *parts)
{
    const smoe_layer *l = &p->layer;
    switch (l->entry) {
    case SMOE_ENTRY_FROM_LOGITS: *parts = moe_cuda_lay_out_routing(device, p); return parts->bytes;
    case SMOE_ENTRY_FROM_TOPK:
        return moe_align_up(moe_cuda_plan_work_bytes(
            l->tokens, l->experts,
            moe_plan_segment(l->tokens, (int32_t)l->experts, (int32_t)l->topk, device->shared_bytes)));
    case SMOE_ENTRY_FROM_ROWS: return 0;
    }
    return 0;
}

/* With fp8: the scales of A behind A8; X8 and its scales, which up reads, where down will write Y. Returns
 * where they end. */
static uint64_t lay_out_f8(const moe_problem *p, forward_scratch *s)
{
    const smoe_layer *l = &p->layer;
    const uint64_t groups = (uint64_t)moe_f8_groups(l->intermediate, MOE_F8_A_FEATURES);
    s->a_scale = s->a + moe_align_up((uint64_t)(p->padded_rows * l->intermediate));
    s->y = s->x8 = s->a_scale + moe_align_up((uint64_t)p->padded_rows * groups * sizeof(float));
    s->x_scale = s->x8 + moe_align_up((uint64_t)(l->tokens * l->hidden));
    return s->x_scale + moe_align_up((uint64_t)l->tokens * sizeof(float));
}

void moe_cuda_lay_out_forward(const device_state *state, const moe_problem *p, moe_layout *layout)
{
    const uint64_t element = (uint64_t)p->element, rows = (uint64_t)p->padded_rows;
    const int64_t experts = p->layer.experts;
    const int32_t limit = moe_piece_limit(p->rows, experts);
    forward_scratch s = {0};
    s.tiles = s.counts + moe_align_up(4 * sizeof(int32_t));
    s.pieces = s.tiles + moe_align_up(sizeof(moe_work) *
                                      (uint64_t)moe_work_bound(p->padded_rows, experts, MOE_TILE_BLOCKS));
    s.a =
        s.pieces + moe_align_up(sizeof(moe_work) * (uint64_t)moe_work_bound(p->padded_rows, experts, limit));
    s.routing = s.a;
    s.y = s.a + moe_align_up(rows * (uint64_t)p->layer.intermediate * element);
    const uint64_t f8_end = p->layer.compute == SMOE_COMPUTE_STORAGE ? 0 : lay_out_f8(p, &s);
    const uint64_t experts_end = s.y + moe_align_up(rows * (uint64_t)p->chunk_columns * element);
    const uint64_t plan_end = s.routing + routing_bytes(&state->device, p, &s.routing_parts);
    s.end = experts_end > plan_end ? experts_end : plan_end;
    if (f8_end > s.end) s.end = f8_end;
    layout->bytes = (p->layer.inference ? p->plan_bytes : 0) + s.end;
    memcpy(layout->parts, &s, sizeof s);
}

/* The plan of the layer's entry. */
static cudaError_t plan_rows(const forward_call *c)
{
    const moe_problem *problem = c->problem;
    const smoe_forward_args *args = c->args;
    const moe_plan_arrays *plan = c->plan;
    const smoe_layer *layer = &problem->layer;
    const int from_rows = layer->entry == SMOE_ENTRY_FROM_ROWS;
    if (layer->entry == SMOE_ENTRY_FROM_LOGITS)
        return moe_cuda_plan_from_logits(&c->on, problem, &c->routing, plan, &c->lists);
    const moe_cuda_plan p = {
        .ids = args->topk_ids,
        .weights = from_rows ? args->row_weights : args->topk_weights,
        .offsets = args->offsets,
        .wide_index = layer->index_type == SMOE_TYPE_I64,
        .tokens = (int32_t)layer->tokens,
        .experts = (int32_t)layer->experts,
        .topk = (int32_t)layer->topk,
        .padded_rows = (int32_t)problem->padded_rows,
        .segment = moe_plan_segment(layer->tokens, (int32_t)layer->experts, (int32_t)layer->topk,
                                    c->on.device->shared_bytes),
        .counts = plan->counts,
        .row_offsets = plan->offsets,
        .block_offsets = plan->block_offsets,
        .order = plan->order,
        .row_token = plan->row_token,
        .token_offsets = plan->token_offsets,
        .token_rows = plan->token_rows,
        .row_weight = plan->row_weight,
        .lists = c->lists,
        .work = c->work,
    };
    return from_rows ? moe_cuda_plan_rows(&c->on, &p) : moe_cuda_plan_topk(&c->on, &p);
}

/* Copies the offsets to the host and checks them. */
static smoe_status check_offsets(smoe_context *context, const smoe_layer *layer, const void *offsets,
                                 void *stream)
{
    int64_t values[MOE_MAX_EXPERTS + 1];
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cudaError_t status = cudaStreamIsCapturing(stream, &capture);
    if (status == cudaSuccess && capture != cudaStreamCaptureStatusNone)
        return moe_fail(
            context, SMOE_ERROR_UNSUPPORTED,
            "%s: the stream is being captured, but the context's option check_offsets is set, which "
            "waits for the stream",
            context->function);
    const size_t bytes = (size_t)((layer->experts + 1) * moe_type_bytes(layer->index_type));
    if (status == cudaSuccess)
        status = cudaMemcpyAsync(values, offsets, bytes, cudaMemcpyDeviceToHost, stream);
    if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
    return status == cudaSuccess ? moe_check_offsets(context, layer, values) : device_error(context, status);
}

/* A bound on the row tiles, for the grid of the kernels for few rows. */
static int64_t few_rows_tiles(const forward_call *c)
{
    return moe_few_rows_tiles(c->problem->rows, c->problem->layer.experts);
}

cudaError_t moe_cuda_up(forward_call *c)
{
    const smoe_layer *layer = &c->problem->layer;
    const moe_up up = {
        .x = c->args->x,
        .w1 = c->args->w1,
        .b1 = c->args->b1,
        .h = c->plan->h,
        .a = c->a,
        .row_token = c->plan->row_token,
        .block_offsets = c->block_offsets,
        .block_stride = c->block_stride,
        .lists = c->lists,
        .rows = c->rows,
        .hidden = layer->hidden,
        .intermediate = layer->intermediate,
        .experts = layer->experts,
        .h_rows = c->problem->kept_rows < c->rows ? c->problem->kept_rows : c->rows,
        .gated = c->problem->gated,
        .interleaved = c->problem->gated && layer->layout == SMOE_LAYOUT_INTERLEAVED,
        .activation = layer->activation,
        .values = moe_gate_values_of(layer),
        .lora = {c->plan->p1, c->args->lora_b1, layer->lora_rank1},
    };
    if (c->problem->layer.compute != SMOE_COMPUTE_STORAGE) return moe_cuda_up_f8(c, &up);
    const cudaError_t status = moe_cuda_lora_p1(c);
    if (status != cudaSuccess) return status;
    if (c->few_rows) return c->state->kernels->up_few_rows(&c->on, &up, few_rows_tiles(c));
    return c->state->kernels->up(&c->on, &up);
}

cudaError_t moe_cuda_down(forward_call *c, int64_t first_column, int64_t columns)
{
    const smoe_layer *layer = &c->problem->layer;
    const moe_down down = {
        .a = c->a,
        .w2 = c->args->w2,
        .b2 = c->args->b2,
        .y = c->y,
        .row_token = c->plan->row_token,
        .block_offsets = c->block_offsets,
        .block_stride = c->block_stride,
        .lists = c->lists,
        .rows = c->rows,
        .hidden = layer->hidden,
        .intermediate = layer->intermediate,
        .experts = layer->experts,
        .first_column = first_column,
        .columns = columns,
        .lora = {c->plan->p2, c->args->lora_b2, layer->lora_rank2},
    };
    if (c->problem->layer.compute != SMOE_COMPUTE_STORAGE) return moe_cuda_down_f8(c, &down);
    const cudaError_t status = first_column ? cudaSuccess : moe_cuda_lora_p2(c);
    if (status != cudaSuccess) return status;
    if (c->few_rows) return c->state->kernels->down_few_rows(&c->on, &down, few_rows_tiles(c));
    return c->state->kernels->down(&c->on, &down);
}

static cudaError_t run_combine(const forward_call *c, int64_t first_column, int64_t columns)
{
    const smoe_layer *layer = &c->problem->layer;
    const moe_cuda_combine p = {
        .y = c->y,
        .out = (char *)c->args->out + first_column * c->problem->element,
        .token_offsets = c->plan->token_offsets,
        .token_rows = c->plan->token_rows,
        .row_weight = c->plan->row_weight,
        .topk = moe_rows_of_a_token(layer),
        .tokens = layer->tokens,
        .hidden = layer->hidden,
        .columns = columns,
    };
    return moe_cuda_combine_launch(&c->on, &p);
}

static cudaError_t run_experts(smoe_context *context, forward_call *c)
{
    const int64_t hidden = c->problem->layer.hidden, chunk = c->problem->chunk_columns;
    moe_stage_begin(context, SMOE_STAGE_UP, c->on.stream);
    cudaError_t status = moe_cuda_up(c);
    moe_stage_end(context, SMOE_STAGE_UP, c->on.stream);
    for (int64_t first = 0; first < hidden && status == cudaSuccess; first += chunk) {
        const int64_t columns = hidden - first < chunk ? hidden - first : chunk;
        moe_stage_begin(context, SMOE_STAGE_DOWN, c->on.stream);
        status = moe_cuda_down(c, first, columns);
        moe_stage_end(context, SMOE_STAGE_DOWN, c->on.stream);
        if (status != cudaSuccess) return status;
        moe_stage_begin(context, SMOE_STAGE_COMBINE, c->on.stream);
        status = run_combine(c, first, columns);
        moe_stage_end(context, SMOE_STAGE_COMBINE, c->on.stream);
    }
    return status;
}

static cudaError_t run_round(smoe_context *context, const forward_call *c)
{
    moe_stage_begin(context, SMOE_STAGE_ROUND, c->on.stream);
    const cudaError_t status = moe_cuda_rounding(&c->on, &c->routing);
    moe_stage_end(context, SMOE_STAGE_ROUND, c->on.stream);
    return status;
}

static cudaError_t run_plan(smoe_context *context, const forward_call *c)
{
    moe_stage_begin(context, SMOE_STAGE_PLAN, c->on.stream);
    const cudaError_t status = plan_rows(c);
    moe_stage_end(context, SMOE_STAGE_PLAN, c->on.stream);
    return status;
}

static cudaError_t run_stages(smoe_context *context, forward_call *c, int stages)
{
    cudaError_t status = cudaSuccess;
    if (stages & MOE_ROUTE) status = moe_cuda_route(context, &c->on, &c->routing, c->args);
    if (status == cudaSuccess && stages & MOE_ROUND) status = run_round(context, c);
    if (status == cudaSuccess && stages & MOE_PLAN) status = run_plan(context, c);
    return status == cudaSuccess && stages & MOE_EXPERTS ? run_experts(context, c) : status;
}

forward_call moe_cuda_forward_call(const device_state *state, const moe_problem *problem,
                                   const moe_layout *layout, const moe_plan_arrays *plan,
                                   const smoe_forward_args *args, char *scratch, void *stream)
{
    forward_scratch s;
    memcpy(&s, layout->parts, sizeof s);
    const forward_call c = {
        .problem = problem,
        .args = args,
        .plan = plan,
        .state = state,
        .work = scratch + s.routing,
        .lists = {(int32_t *)(scratch + s.counts), (moe_work *)(scratch + s.tiles),
                  (moe_work *)(scratch + s.pieces), moe_piece_limit(problem->rows, problem->layer.experts),
                  (int32_t *)(scratch + s.counts) + 2},
        .a = scratch + s.a,
        .y = scratch + s.y,
        .x8 = (uint8_t *)scratch + s.x8,
        .x_scale = (float *)(void *)(scratch + s.x_scale),
        .a_scale = (float *)(void *)(scratch + s.a_scale),
        .block_offsets = plan->block_offsets,
        .block_stride = 1,
        .rows = problem->padded_rows / MOE_BLOCK_ROWS * MOE_BLOCK_ROWS,
        .few_rows = !problem->layer.lora_rank1 && !problem->layer.lora_rank2 &&
                    state->kernels->few_rows(problem->rows, problem->layer.experts),
        .on = launch_on(state, problem->layer.dtype, stream),
    };
    return c;
}

smoe_status moe_cuda_forward(smoe_context *context, const moe_call *call, const smoe_forward_args *args,
                             int stages)
{
    const device_state *state = context->state;
    const moe_problem *problem = &call->problem;
    if (!problem->layer.tokens) return moe_cuda_no_tokens(context, call, args);
    forward_call c =
        moe_cuda_forward_call(state, problem, &call->layout, &call->plan, args, call->scratch, call->stream);
    forward_scratch s;
    memcpy(&s, call->layout.parts, sizeof s);
    if (stages != MOE_EXPERTS && problem->layer.entry == SMOE_ENTRY_FROM_LOGITS)
        c.routing = moe_cuda_routing_of(problem, &s.routing_parts, args, &call->plan, c.work);
    int before;
    cudaError_t status = enter_device(state, &before);
    if (status != cudaSuccess) return device_error(context, status);
    smoe_status result = SMOE_OK;
    if (stages & MOE_PLAN && context->check_offsets && problem->layer.entry == SMOE_ENTRY_FROM_ROWS)
        result = check_offsets(context, &problem->layer, args->offsets, call->stream);
    if (result == SMOE_OK) {
        status = run_stages(context, &c, stages);
        result = launch_result(context, &c.on, status);
    }
    leave_device(state, before);
    return result;
}
