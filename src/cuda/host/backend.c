/* The CUDA backend: what it supports, its scratch, and the launches of the forward's stages. */
#include "check.h"
#include "host/device.h"
#include "host/launch.h"
#include "host/routing.h"
#include "schedule/few_rows.h"
#include "schedule/plan_size.h"

/* Offsets of the parts of the forward's scratch, counted from the end of the plan. */
typedef struct forward_scratch {
    uint64_t counts, tiles, pieces, a, y, routing,
        end; /* a's memory is also used by routing, or by the plan as work space */
} forward_scratch;

/* What route, round and plan use besides the work lists. */
static uint64_t routing_bytes(const moe_device *device, const moe_problem *p)
{
    const smoe_layer *l = &p->layer;
    switch (l->entry) {
    case SMOE_ENTRY_FROM_LOGITS: return moe_cuda_routing_scratch(device, p);
    case SMOE_ENTRY_FROM_TOPK:
        return moe_align_up(moe_cuda_plan_work_bytes(
            l->tokens, l->experts,
            moe_plan_segment(l->tokens, (int32_t)l->experts, (int32_t)l->topk, device->shared_bytes)));
    case SMOE_ENTRY_FROM_ROWS: return 0;
    }
    return 0;
}

static forward_scratch lay_out_forward(const device_state *state, const moe_problem *p)
{
    const uint64_t element = (uint64_t)p->element, rows = (uint64_t)p->padded_rows;
    const int64_t experts = p->layer.experts;
    const int32_t limit = moe_piece_limit(p->rows, experts);
    forward_scratch s = {0};
    s.tiles = s.counts + moe_align_up(4 * sizeof(int32_t));
    s.pieces = s.tiles + moe_align_up(sizeof(moe_work) *
                                      (uint64_t)moe_work_bound(p->padded_rows, experts, SMOE_TILE_BLOCKS));
    s.a =
        s.pieces + moe_align_up(sizeof(moe_work) * (uint64_t)moe_work_bound(p->padded_rows, experts, limit));
    s.routing = s.a;
    s.y = s.a + moe_align_up(rows * (uint64_t)p->layer.intermediate * element);
    const uint64_t experts_end = s.y + moe_align_up(rows * (uint64_t)p->chunk_columns * element);
    const uint64_t plan_end = s.routing + routing_bytes(&state->device, p);
    s.end = experts_end > plan_end ? experts_end : plan_end;
    return s;
}

static moe_cuda_lists lists_at(const moe_problem *p, const forward_scratch *s, char *scratch)
{
    const moe_cuda_lists lists = {
        (int32_t *)(scratch + s->counts), (moe_work *)(scratch + s->tiles), (moe_work *)(scratch + s->pieces),
        moe_piece_limit(p->rows, p->layer.experts), (int32_t *)(scratch + s->counts) + 2};
    return lists;
}

static smoe_status supports(smoe_context *context, const moe_problem *problem)
{
    const smoe_layer *layer = &problem->layer;
    const device_state *state = context->state;
    if (!state->kernels->stores(layer->dtype))
        return moe_fail(context, SMOE_ERROR_UNSUPPORTED,
                        "%s: dtype is %s, the cuda backend stores SMOE_TYPE_BF16 or SMOE_TYPE_F16",
                        context->function, moe_type_name(layer->dtype));
    if (problem->padded_rows > INT32_MAX - 256 || layer->tokens > INT32_MAX - 256)
        return moe_fail(context, SMOE_ERROR_UNSUPPORTED,
                        "%s: %lld padded rows, the limit is %d: the plan's indices are int32",
                        context->function, (long long)problem->padded_rows, INT32_MAX - 256);
    if (layer->hidden * layer->experts > INT32_MAX || layer->intermediate > (1 << 24) ||
        layer->hidden > (1 << 24))
        return moe_fail(context, SMOE_ERROR_UNSUPPORTED,
                        "%s: hidden is %lld and experts %lld, their product must be below 2^31: rows of W2 "
                        "are counted in int32",
                        context->function, (long long)layer->hidden, (long long)layer->experts);
    return SMOE_OK;
}

static smoe_status begin(smoe_context *context)
{
    (void)context;
    return SMOE_OK;
}

static void scratch_bytes(const smoe_context *context, const moe_problem *problem, uint64_t *forward,
                          uint64_t *backward)
{
    const device_state *state = context->state;
    *forward = (problem->layer.inference ? problem->plan_bytes : 0) + lay_out_forward(state, problem).end;
    *backward = moe_cuda_backward_scratch(state, problem);
}

/* ---- Forward ---- */

static smoe_status route_stage(smoe_context *context, const moe_problem *problem,
                               const smoe_forward_args *args, const moe_plan_arrays *plan, void *scratch,
                               void *stream)
{
    const device_state *state = context->state;
    int before;
    cudaError_t status = enter_device(state, &before);
    if (status != cudaSuccess) return device_error(context, status);
    void *routing = (char *)scratch + lay_out_forward(state, problem).routing;
    const moe_launch on = launch_on(state, problem->layer.dtype, stream);
    status = moe_cuda_route(context, &on, problem, args, plan, routing);
    leave_device(state, before);
    return status == cudaSuccess ? SMOE_OK : device_error(context, status);
}

static smoe_status round_stage(smoe_context *context, const moe_problem *problem,
                               const smoe_forward_args *args, const moe_plan_arrays *plan, void *scratch,
                               void *stream)
{
    const device_state *state = context->state;
    int before;
    cudaError_t status = enter_device(state, &before);
    if (status != cudaSuccess) return device_error(context, status);
    void *routing = (char *)scratch + lay_out_forward(state, problem).routing;
    moe_stage_begin(context, SMOE_STAGE_ROUND, stream);
    const moe_launch on = launch_on(state, problem->layer.dtype, stream);
    status = moe_cuda_round(&on, problem, args, plan, routing);
    moe_stage_end(context, SMOE_STAGE_ROUND, stream);
    leave_device(state, before);
    return status == cudaSuccess ? SMOE_OK : device_error(context, status);
}

/* The plan of the layer's entry. */
static cudaError_t run_plan(const device_state *state, const moe_problem *problem,
                            const smoe_forward_args *args, const moe_plan_arrays *plan, void *scratch,
                            cudaStream_t stream)
{
    const smoe_layer *layer = &problem->layer;
    const moe_launch on = launch_on(state, layer->dtype, stream);
    const forward_scratch s = lay_out_forward(state, problem);
    const int from_rows = layer->entry == SMOE_ENTRY_FROM_ROWS;
    const moe_cuda_lists lists = lists_at(problem, &s, scratch);
    void *work = (char *)scratch + s.routing;
    if (layer->entry == SMOE_ENTRY_FROM_LOGITS)
        return moe_cuda_plan_from_logits(&on, problem, args, plan, &lists, work);
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
                                    state->device.shared_bytes),
        .counts = plan->counts,
        .row_offsets = plan->offsets,
        .block_offsets = plan->block_offsets,
        .order = plan->order,
        .row_token = plan->row_token,
        .token_offsets = plan->token_offsets,
        .token_rows = plan->token_rows,
        .row_weight = plan->row_weight,
        .lists = lists,
        .work = work,
    };
    return from_rows ? moe_cuda_plan_rows(&on, &p) : moe_cuda_plan_topk(&on, &p);
}

/* Copies the offsets to the host and checks them. */
static smoe_status check_offsets(smoe_context *context, const smoe_layer *layer, const void *offsets,
                                 cudaStream_t stream)
{
    int64_t values[SMOE_MAX_EXPERTS + 1];
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

static smoe_status plan_stage(smoe_context *context, const moe_problem *problem,
                              const smoe_forward_args *args, const moe_plan_arrays *plan, void *scratch,
                              void *stream)
{
    const device_state *state = context->state;
    int before;
    cudaError_t status = enter_device(state, &before);
    if (status != cudaSuccess) return device_error(context, status);
    smoe_status result = SMOE_OK;
    if (context->check_offsets && problem->layer.entry == SMOE_ENTRY_FROM_ROWS)
        result = check_offsets(context, &problem->layer, args->offsets, stream);
    moe_stage_begin(context, SMOE_STAGE_PLAN, stream);
    if (result == SMOE_OK) status = run_plan(state, problem, args, plan, scratch, stream);
    moe_stage_end(context, SMOE_STAGE_PLAN, stream);
    leave_device(state, before);
    return status == cudaSuccess ? result : device_error(context, status);
}

/* What up, down and combine share. */
typedef struct experts_call {
    const moe_problem *problem;
    const smoe_forward_args *args;
    const moe_plan_arrays *plan;
    const device_state *state;
    moe_cuda_lists lists;
    char *a, *y;
    int64_t rows; /* whole blocks of the padded rows */
    int few_rows; /* the kernels for few rows run */
    int64_t few_rows_tiles;
    moe_launch on;
    cudaStream_t stream;
} experts_call;

static cudaError_t run_up(experts_call *c)
{
    const smoe_layer *layer = &c->problem->layer;
    const moe_up up = {
        .x = c->args->x,
        .w1 = c->args->w1,
        .b1 = c->args->b1,
        .h = c->plan->h,
        .a = c->a,
        .row_token = c->plan->row_token,
        .block_offsets = c->plan->block_offsets,
        .lists = c->lists,
        .rows = c->rows,
        .hidden = layer->hidden,
        .intermediate = layer->intermediate,
        .experts = layer->experts,
        .gated = c->problem->gated,
        .interleaved = c->problem->gated && layer->layout == SMOE_LAYOUT_INTERLEAVED,
        .activation = layer->activation,
        .values = moe_gate_values_of(layer),
    };
    if (c->few_rows) return c->state->kernels->up_few_rows(&c->on, &up, c->few_rows_tiles);
    return c->state->kernels->up(&c->on, &up);
}

static cudaError_t run_down(experts_call *c, int64_t first_column, int64_t columns)
{
    const smoe_layer *layer = &c->problem->layer;
    const moe_down down = {
        .a = c->a,
        .w2 = c->args->w2,
        .b2 = c->args->b2,
        .y = c->y,
        .row_token = c->plan->row_token,
        .block_offsets = c->plan->block_offsets,
        .lists = c->lists,
        .rows = c->rows,
        .hidden = layer->hidden,
        .intermediate = layer->intermediate,
        .experts = layer->experts,
        .first_column = first_column,
        .columns = columns,
    };
    if (c->few_rows) return c->state->kernels->down_few_rows(&c->on, &down, c->few_rows_tiles);
    return c->state->kernels->down(&c->on, &down);
}

static cudaError_t run_combine(const experts_call *c, int64_t first_column, int64_t columns)
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

static cudaError_t run_stages(smoe_context *context, experts_call *c)
{
    const int64_t hidden = c->problem->layer.hidden, chunk = c->problem->chunk_columns;
    moe_stage_begin(context, SMOE_STAGE_UP, c->stream);
    cudaError_t status = run_up(c);
    moe_stage_end(context, SMOE_STAGE_UP, c->stream);
    for (int64_t first = 0; first < hidden && status == cudaSuccess; first += chunk) {
        const int64_t columns = hidden - first < chunk ? hidden - first : chunk;
        moe_stage_begin(context, SMOE_STAGE_DOWN, c->stream);
        status = run_down(c, first, columns);
        moe_stage_end(context, SMOE_STAGE_DOWN, c->stream);
        if (status != cudaSuccess) return status;
        moe_stage_begin(context, SMOE_STAGE_COMBINE, c->stream);
        status = run_combine(c, first, columns);
        moe_stage_end(context, SMOE_STAGE_COMBINE, c->stream);
    }
    return status;
}

static smoe_status experts_forward(smoe_context *context, const moe_problem *problem,
                                   const smoe_forward_args *args, const moe_plan_arrays *plan, void *scratch,
                                   void *stream)
{
    const device_state *state = context->state;
    const forward_scratch s = lay_out_forward(state, problem);
    experts_call call = {
        .problem = problem,
        .args = args,
        .plan = plan,
        .state = state,
        .lists = lists_at(problem, &s, scratch),
        .a = (char *)scratch + s.a,
        .y = (char *)scratch + s.y,
        .rows = problem->padded_rows / SMOE_BLOCK_ROWS * SMOE_BLOCK_ROWS,
        .few_rows = state->kernels->few_rows(problem->rows, problem->layer.experts),
        .few_rows_tiles = moe_few_rows_tiles(problem->rows, problem->layer.experts),
        .on = launch_on(state, problem->layer.dtype, stream),
        .stream = stream,
    };
    int before;
    cudaError_t status = enter_device(state, &before);
    if (status != cudaSuccess) return device_error(context, status);
    status = run_stages(context, &call);
    leave_device(state, before);
    return launch_result(context, &call.on, status);
}

static smoe_status update_selection_bias(smoe_context *context, const moe_problem *problem,
                                         const int32_t *counts, float *bias, float gamma, void *stream)
{
    const device_state *state = context->state;
    int before;
    cudaError_t status = enter_device(state, &before);
    if (status != cudaSuccess) return device_error(context, status);
    const moe_launch on = launch_on(state, problem->layer.dtype, stream);
    status = moe_cuda_selection_bias(&on, counts, bias, problem->layer.experts, gamma);
    leave_device(state, before);
    return status == cudaSuccess ? SMOE_OK : device_error(context, status);
}

const moe_backend_table moe_cuda_backend = {
    .id = SMOE_BACKEND_CUDA,
    .name = "cuda",
    .create = moe_cuda_create,
    .destroy = moe_cuda_destroy,
    .supports = supports,
    .begin = begin,
    .scratch = scratch_bytes,
    .route = route_stage,
    .round = round_stage,
    .plan = plan_stage,
    .experts_forward = experts_forward,
    .backward = moe_cuda_backward,
    .update_selection_bias = update_selection_bias,
};
