/* The launches of the backward: lists, dh and dS, dw2, dw1, router_bwd, then dx_rows and dx for one chunk
 * after another. docs/design.md describes the order and the scratch. */
#include "host/backward.h"
#include "host/f8_table.h"
#include "host/launch_lora.h"
#include "host/lora.h"
#include "wanted.h"

#include <assert.h>
#include <string.h>

static_assert(sizeof(backward_scratch) <= sizeof((moe_layout *)0)->parts, "a layout holds it");

static uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* The end of the memory with the four uses: that of the largest use, or of what dh reads and writes there.
 * tile: bytes of a weight gradient's. */
static uint64_t shared_end(const moe_problem *p, const backward_scratch *s, uint64_t tile, uint64_t of_dh)
{
    const uint64_t parts = (uint64_t)s->parts,
                   dx = (uint64_t)(p->padded_rows * p->chunk_columns * p->element);
    const uint64_t ends[SHARED_USES] = {
        [SHARED_FOR_DW2] = s->parts2 + larger(parts * (uint64_t)s->tiles2 * tile, s->pair2),
        [SHARED_FOR_DW1] = s->parts1 + larger(parts * (uint64_t)s->tiles1 * tile, s->pair1),
        [SHARED_FOR_ROUTER] = s->router.passing_end,
        [SHARED_FOR_DX] = s->shared + moe_align_up(dx),
    };
    uint64_t end = of_dh;
    for (int use = 0; use < SHARED_USES; use++)
        if (ends[use] > end) end = ends[use];
    return end;
}

/* A' and the sums of pieces, and fp8's operands of dh and dw. Returns where what dh reads and writes ends. */
static uint64_t lay_out_dw(const moe_problem *p, int dw_last, backward_scratch *s)
{
    if (moe_cuda_dw_is_f8(p)) return moe_cuda_lay_out_dw_f8(p, s);
    const uint64_t rows = (uint64_t)p->padded_rows,
                   a_end = s->shared + moe_align_up(rows * (uint64_t)(p->layer.intermediate * p->element));
    s->a = s->shared;
    s->parts1 = s->shared;
    s->parts2 = a_end;
    if (dw_last) { /* A' is read after dX~, and dX~ while dw2 runs */
        s->shared = a_end;
        s->parts1 = s->parts2 = a_end + moe_align_up(rows * (uint64_t)(p->chunk_columns * p->element));
    }
    return p->layer.compute == SMOE_COMPUTE_STORAGE ? a_end : moe_cuda_lay_out_do8(p, s->parts2, s);
}

static void lay_out(const device_state *state, const moe_problem *p, int dw_last, moe_layout *layout)
{
    layout->bytes = 0;
    if (p->layer.inference) return;
    const smoe_layer *layer = &p->layer;
    const uint64_t rows = (uint64_t)p->padded_rows, experts = (uint64_t)layer->experts;
    const int64_t blocks = p->padded_rows / MOE_BLOCK_ROWS;
    const int32_t d = (int32_t)layer->hidden, n = (int32_t)layer->intermediate;
    const moe_kernels *kernels = state->kernels;
    backward_scratch s = {0};
    const int dw_f8 = moe_cuda_dw_is_f8(p);
    int32_t (*const weight_tiles)(int32_t, int32_t, int32_t) =
        dw_f8 ? kernels->f8->weight_tiles : kernels->weight_tiles;
    s.tiles2 = weight_tiles(d, n, 1);
    s.tiles1 = weight_tiles(d, n, p->gated ? 2 : 1);
    s.parts = moe_split_bound(blocks, s.tiles2, state->device.sms);
    s.pair2 = moe_cuda_low_pair_bytes(&state->device, blocks, d, layer->lora_rank2);
    s.pair1 = moe_cuda_low_pair_bytes(&state->device, blocks, (int)p->h_width, layer->lora_rank1);
    s.ds_parts = (n + kernels->ds_columns - 1) / kernels->ds_columns;
    const uint64_t parts = (uint64_t)s.parts, tile = kernels->weight_tile_bytes;
    s.tiles = s.counts + moe_align_up(6 * sizeof(int32_t));
    s.pieces =
        s.tiles + moe_align_up(sizeof(moe_work) *
                               (uint64_t)moe_work_bound(p->padded_rows, layer->experts, MOE_TILE_BLOCKS));
    s.splits = s.pieces + moe_align_up(sizeof(moe_piece) * (experts + parts));
    s.block_expert = s.splits + moe_align_up(sizeof(moe_split) * (parts + 1));
    s.ds = s.block_expert + moe_align_up(sizeof(int32_t) * (uint64_t)(blocks + 1));
    s.dh = s.ds + moe_align_up(sizeof(float) * rows * (uint64_t)(s.ds_parts + 1));
    s.q1 =
        s.dh + (layer->reuse_saved || dw_f8 ? 0 : moe_align_up(rows * (uint64_t)(p->h_width * p->element)));
    s.q2 = s.q1 + moe_align_up(rows * (uint64_t)(layer->lora_rank1 * p->element));
    s.shared = s.q2 + moe_align_up(rows * (uint64_t)(layer->lora_rank2 * p->element));
    if (p->layer.compute != SMOE_COMPUTE_STORAGE) s.shared = moe_cuda_lay_out_dh8(p, &s);
    if (layer->entry == SMOE_ENTRY_FROM_LOGITS) {
        s.router = moe_cuda_router_scratch(state, p, s.shared);
        s.shared = s.router.end;
    }
    const uint64_t of_dh = lay_out_dw(p, dw_last, &s);
    layout->bytes = shared_end(p, &s, tile, of_dh);
    memcpy(layout->parts, &s, sizeof s);
}

void moe_cuda_lay_out_backward(const device_state *state, const moe_problem *problem, moe_layout *layout)
{
    lay_out(state, problem, 0, layout);
}

void moe_cuda_lay_out_dw_last(const device_state *state, const moe_problem *problem, moe_layout *layout)
{
    lay_out(state, problem, 1, layout);
}

/* Refuses to go back to a use whose memory a later one has overwritten. */
static cudaError_t begin_use(backward_call *c, shared_use use)
{
    if (use < c->use) return cudaErrorIllegalState;
    c->use = use;
    return cudaSuccess;
}

cudaError_t moe_cuda_make_backward_lists(const backward_call *c)
{
    const moe_cuda_make_lists experts = {
        .block_offsets = c->plan->block_offsets,
        .order = c->plan->order,
        .lists = c->lists,
        .experts = (int32_t)c->problem->layer.experts,
        .padded_blocks = (int32_t)(c->rows / MOE_BLOCK_ROWS),
        .weight_tiles = c->at.tiles2,
        .ctas = c->state->device.sms,
    };
    if (!moe_cuda_router_has_lists(c)) return moe_cuda_lists_launch(&c->on, &experts, NULL);
    const moe_cuda_make_lists router = moe_cuda_router_lists(c);
    return moe_cuda_lists_launch(&c->on, &experts, &router);
}

cudaError_t moe_cuda_run_dh(backward_call *c)
{
    const smoe_layer *layer = &c->problem->layer;
    const moe_dh dh = {
        .dout = c->args->dout,
        .w2 = c->args->w2,
        .h = c->plan->h,
        .dh = c->dh,
        .a = c->a,
        .ds = (float *)(c->scratch + c->at.ds),
        .row_token = c->plan->row_token,
        .row_weight = c->plan->row_weight,
        .lists = c->lists,
        .padded_rows = c->problem->padded_rows,
        .hidden = layer->hidden,
        .intermediate = layer->intermediate,
        .experts = layer->experts,
        .gated = c->problem->gated,
        .activation = layer->activation,
        .values = moe_gate_values_of(layer),
        .lora = {c->scratch + c->at.q2, c->args->lora_a2, layer->lora_rank2},
    };
    if (c->problem->layer.compute != SMOE_COMPUTE_STORAGE) return moe_cuda_dh_f8(c, &dh);
    return c->state->kernels->dh(&c->on, &dh);
}

cudaError_t moe_cuda_run_ds(const backward_call *c)
{
    const smoe_layer *layer = &c->problem->layer;
    const smoe_backward_args *args = c->args;
    const smoe_entry entry = layer->entry;
    const moe_cuda_ds p = {
        .partial = (float *)(c->scratch + c->at.ds),
        .parts = c->at.ds_parts + (args->b2 ? 1 : 0),
        .dout = args->dout,
        .bias = args->b2,
        .row_token = c->plan->row_token,
        .block_expert = c->lists.block_expert,
        .token_offsets = c->plan->token_offsets,
        .token_rows = c->plan->token_rows,
        .ids = args->topk_ids,
        .topk_gradient = entry == SMOE_ENTRY_FROM_TOPK ? args->dtopk_weights : NULL,
        .token_gradient = entry == SMOE_ENTRY_FROM_ROWS ? args->drow_weights : NULL,
        .row_gradient = entry == SMOE_ENTRY_FROM_LOGITS ? args->drow_weights : NULL,
        .padded_rows = c->problem->padded_rows,
        .tokens = layer->tokens,
        .hidden = (int32_t)layer->hidden,
        .topk = (int32_t)layer->topk,
        .wide_index = layer->index_type == SMOE_TYPE_I64,
    };
    return p.topk_gradient || p.token_gradient || p.row_gradient || c->with_router || c->sends_ds
               ? moe_cuda_ds_launch(&c->on, &p)
               : cudaSuccess;
}

/* What dW2 and dW1 share; `features` is A' or dH, or with SMOE_COMPUTE_F8 their copy for dw. */
static moe_dw weight_gradient(const backward_call *c, const void *features, int halves)
{
    const smoe_layer *layer = &c->problem->layer;
    const moe_dw dw = {
        .features = features,
        .row_token = c->plan->row_token,
        .lists = c->lists,
        .rows = c->rows,
        .hidden = layer->hidden,
        .intermediate = layer->intermediate,
        .row_width = layer->intermediate,
        .experts = layer->experts,
        .halves = halves,
        .interleaved = halves == 2 && layer->layout == SMOE_LAYOUT_INTERLEAVED,
        .accumulate = layer->accumulate,
        .gradient_type = layer->gradient_type,
    };
    return dw;
}

static cudaError_t run_dw2(backward_call *c)
{
    if (!c->args->dw2) return cudaSuccess;
    moe_dw dw = weight_gradient(c, c->a, 1);
    dw.tokens = c->args->dout;
    dw.gradient = c->args->dw2;
    dw.parts = c->at.parts ? (float *)(c->scratch + c->at.parts2) : NULL;
    if (moe_cuda_dw_is_f8(c->problem)) return moe_cuda_dw_f8(c, &dw);
    return c->state->kernels->dw(&c->on, &dw);
}

static cudaError_t run_db2(const backward_call *c)
{
    if (!c->args->db2) return cudaSuccess;
    const smoe_layer *layer = &c->problem->layer;
    const moe_cuda_db bias = {
        .values = c->args->dout,
        .row_token = c->plan->row_token,
        .row_weight = c->plan->row_weight,
        .counts = c->bias_counts,
        .block_offsets = c->plan->block_offsets,
        .order = c->plan->order,
        .gradient = c->args->db2,
        .columns = (int32_t)layer->hidden,
        .experts = (int32_t)layer->experts,
        .accumulate = layer->accumulate,
    };
    return moe_cuda_db_launch(&c->on, &bias, layer->gradient_type);
}

static cudaError_t run_dw1(backward_call *c)
{
    if (!c->args->dw1) return cudaSuccess;
    moe_dw dw = weight_gradient(c, c->dh, c->halves);
    dw.tokens = c->args->x;
    dw.gradient = c->args->dw1;
    dw.parts = c->at.parts ? (float *)(c->scratch + c->at.parts1) : NULL;
    dw.transposed = 1;
    if (moe_cuda_dw_is_f8(c->problem)) return moe_cuda_dw_f8(c, &dw);
    return c->state->kernels->dw(&c->on, &dw);
}

static cudaError_t run_db1(const backward_call *c)
{
    if (!c->args->db1) return cudaSuccess;
    const smoe_layer *layer = &c->problem->layer;
    const moe_cuda_db bias = {
        .values = c->dh,
        .counts = c->bias_counts,
        .block_offsets = c->plan->block_offsets,
        .order = c->plan->order,
        .gradient = c->args->db1,
        .columns = (int32_t)c->problem->h_width,
        .experts = (int32_t)layer->experts,
        .half = (int32_t)layer->intermediate,
        .interleaved = c->halves == 2 && layer->layout == SMOE_LAYOUT_INTERLEAVED,
        .accumulate = layer->accumulate,
    };
    if (moe_cuda_dw_is_f8(c->problem)) return moe_cuda_db1_f8(c, &bias);
    return moe_cuda_db_launch(&c->on, &bias, layer->gradient_type);
}

cudaError_t moe_cuda_run_dx_rows(backward_call *c, int64_t first_column, int64_t columns)
{
    const smoe_layer *layer = &c->problem->layer;
    const moe_dx_rows dx = {
        .dh = c->dh,
        .w1 = c->args->w1,
        .dx = c->scratch + c->at.shared,
        .block_offsets = c->block_offsets,
        .block_stride = c->block_stride,
        .lists = c->lists,
        .rows = c->rows,
        .hidden = layer->hidden,
        .intermediate = layer->intermediate,
        .row_width = layer->intermediate,
        .experts = layer->experts,
        .halves = c->halves,
        .interleaved = c->halves == 2 && layer->layout == SMOE_LAYOUT_INTERLEAVED,
        .first_column = first_column,
        .columns = columns,
        .lora = {c->scratch + c->at.q1, c->args->lora_a1, layer->lora_rank1},
    };
    if (c->problem->layer.compute != SMOE_COMPUTE_STORAGE) return moe_cuda_dx_rows_f8(c, &dx);
    return c->state->kernels->dx_rows(&c->on, &dx);
}

static cudaError_t run_dx(const backward_call *c, int64_t first_column, int64_t columns)
{
    const smoe_layer *layer = &c->problem->layer;
    moe_cuda_combine p = {
        .y = c->scratch + c->at.shared,
        .out = (char *)c->args->dx + first_column * c->problem->element,
        .token_offsets = c->plan->token_offsets,
        .token_rows = c->plan->token_rows,
        .topk = moe_rows_of_a_token(layer),
        .tokens = layer->tokens,
        .hidden = layer->hidden,
        .columns = columns,
    };
    if (c->with_router && c->args->router_weight) moe_cuda_router_term(c, first_column, &p);
    return moe_cuda_combine_launch(&c->on, &p);
}

static cudaError_t run_chunks(smoe_context *context, backward_call *c)
{
    const int64_t hidden = c->problem->layer.hidden, chunk = c->problem->chunk_columns;
    cudaError_t status = begin_use(c, SHARED_FOR_DX);
    for (int64_t first = 0; first < hidden && status == cudaSuccess; first += chunk) {
        const int64_t columns = hidden - first < chunk ? hidden - first : chunk;
        moe_stage_begin(context, SMOE_STAGE_DX_ROWS, c->on.stream);
        status = moe_cuda_run_dx_rows(c, first, columns);
        moe_stage_end(context, SMOE_STAGE_DX_ROWS, c->on.stream);
        if (status != cudaSuccess) return status;
        moe_stage_begin(context, SMOE_STAGE_DX, c->on.stream);
        status = run_dx(c, first, columns);
        moe_stage_end(context, SMOE_STAGE_DX, c->on.stream);
    }
    return status;
}

static cudaError_t run_lists_dh_ds(smoe_context *context, backward_call *c)
{
    moe_stage_begin(context, SMOE_STAGE_DH, c->on.stream);
    cudaError_t status = moe_cuda_make_backward_lists(c);
    if (status == cudaSuccess) status = moe_cuda_lora_q2(c);
    if (status == cudaSuccess) status = moe_cuda_run_dh(c);
    if (status == cudaSuccess) status = moe_cuda_run_ds(c);
    if (status == cudaSuccess) status = moe_cuda_lora_gradients2(c);
    moe_stage_end(context, SMOE_STAGE_DH, c->on.stream);
    return status;
}

cudaError_t moe_cuda_run_dw2(smoe_context *context, backward_call *c)
{
    moe_stage_begin(context, SMOE_STAGE_DW2, c->on.stream);
    cudaError_t status = run_dw2(c);
    if (status == cudaSuccess) status = run_db2(c);
    moe_stage_end(context, SMOE_STAGE_DW2, c->on.stream);
    return status;
}

cudaError_t moe_cuda_run_dw1(smoe_context *context, backward_call *c)
{
    moe_stage_begin(context, SMOE_STAGE_DW1, c->on.stream);
    cudaError_t status = run_dw1(c);
    if (status == cudaSuccess) status = run_db1(c);
    if (status == cudaSuccess && moe_cuda_wants_lora1(c)) status = moe_cuda_lora1(c);
    moe_stage_end(context, SMOE_STAGE_DW1, c->on.stream);
    return status;
}

cudaError_t moe_cuda_run_router(smoe_context *context, backward_call *c)
{
    moe_stage_begin(context, SMOE_STAGE_ROUTER_BWD, c->on.stream);
    const cudaError_t status = moe_cuda_router_backward(c);
    moe_stage_end(context, SMOE_STAGE_ROUTER_BWD, c->on.stream);
    return status;
}

static cudaError_t run_stages(smoe_context *context, backward_call *c)
{
    const smoe_backward_args *args = c->args;
    const int ds = moe_wants_ds(&c->problem->layer, args, c->with_router);
    cudaError_t status = cudaSuccess;
    if (ds || moe_wants_dh(args) || args->dw2) { /* dh leaves A' to dw2 */
        status = begin_use(c, SHARED_FOR_DW2);
        if (status == cudaSuccess) status = run_lists_dh_ds(context, c);
    }
    if (status == cudaSuccess && moe_wants_dw2(args)) {
        status = begin_use(c, SHARED_FOR_DW2);
        if (status == cudaSuccess) status = moe_cuda_run_dw2(context, c);
    }
    if (status == cudaSuccess && (moe_wants_dw1(args) || moe_cuda_wants_lora1(c))) {
        status = begin_use(c, SHARED_FOR_DW1);
        if (status == cudaSuccess) status = moe_cuda_run_dw1(context, c);
    }
    if (status == cudaSuccess && c->with_router) {
        status = begin_use(c, SHARED_FOR_ROUTER);
        if (status == cudaSuccess) status = moe_cuda_run_router(context, c);
    }
    return status == cudaSuccess && args->dx ? run_chunks(context, c) : status;
}

backward_call moe_cuda_backward_call(const device_state *state, const moe_problem *problem,
                                     const moe_layout *layout, const moe_plan_arrays *plan,
                                     const smoe_backward_args *args, char *scratch, int with_router,
                                     void *stream)
{
    backward_scratch at;
    memcpy(&at, layout->parts, sizeof at);
    const backward_call c = {
        .problem = problem,
        .args = args,
        .plan = plan,
        .state = state,
        .at = at,
        .lists = {(int32_t *)(scratch + at.counts), (moe_work *)(scratch + at.tiles),
                  (moe_piece *)(scratch + at.pieces), (moe_split *)(scratch + at.splits),
                  (int32_t *)(scratch + at.block_expert), (int32_t *)(scratch + at.counts) + 4},
        .scratch = scratch,
        .dh = problem->layer.reuse_saved && !moe_cuda_dw_is_f8(problem) ? plan->h : scratch + at.dh,
        .a = scratch + at.a,
        .block_offsets = plan->block_offsets,
        .block_stride = 1,
        .bias_counts = plan->counts,
        .rows = problem->padded_rows / MOE_BLOCK_ROWS * MOE_BLOCK_ROWS,
        .halves = problem->gated ? 2 : 1,
        .with_router = with_router,
        .on = launch_on(state, problem->layer.dtype, stream),
    };
    return c;
}

smoe_status moe_cuda_backward(smoe_context *context, const moe_call *call, const smoe_backward_args *args,
                              int with_router)
{
    const device_state *state = context->state;
    backward_call c = moe_cuda_backward_call(state, &call->problem, &call->layout, &call->plan, args,
                                             call->scratch, with_router, call->stream);
    int before;
    cudaError_t status = enter_device(state, &before);
    if (status != cudaSuccess) return device_error(context, status);
    status = run_stages(context, &c);
    leave_device(state, before);
    return launch_result(context, &c.on, status);
}
