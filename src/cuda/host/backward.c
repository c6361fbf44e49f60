/* The backward as launches: lists, dh and dS, dw2, dw1, the router's, then dx_rows and dx chunk by chunk.
 *
 * Scratch: the work lists; dS's parts; dH unless it takes H's place; the nonzeros of sparse dlogits; then one
 * place for what is never there at the same time: A' and the tiles of split experts of dw2, those of dw1,
 * dense dlogits and dWr's tiles, dX~ of one chunk. */
#include "host/backward.h"

enum { DH_COLUMNS = 256 }; /* of a column tile: a part of dS each */

static uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static backward_scratch lay_out(const device_state *state, const smoe_problem *p)
{
    const smoe_layer *layer = &p->layer;
    const uint64_t rows = (uint64_t)p->padded_rows, experts = (uint64_t)layer->experts;
    const int64_t blocks = p->padded_rows / SMOE_BLOCK_ROWS;
    const int32_t d = (int32_t)layer->hidden, n = (int32_t)layer->intermediate;
    backward_scratch s = {0};
    s.tiles2 = smoe_weight_tiles(d, n, 1);
    s.tiles1 = smoe_weight_tiles(d, n, p->gated ? 2 : 1);
    s.parts = smoe_split_bound(blocks, s.tiles2, state->ctas);
    s.ds_parts = (n + DH_COLUMNS - 1) / DH_COLUMNS;
    const uint64_t parts = (uint64_t)s.parts, tile = SMOE_WEIGHT_TILE * sizeof(float);
    s.tiles = s.counts + smoe_align_up(6 * sizeof(int32_t));
    s.pieces =
        s.tiles + smoe_align_up(sizeof(smoe_work) *
                                (uint64_t)smoe_work_bound(p->padded_rows, layer->experts, SMOE_TILE_BLOCKS));
    s.splits = s.pieces + smoe_align_up(sizeof(smoe_piece) * (experts + parts));
    s.block_expert = s.splits + smoe_align_up(sizeof(smoe_split) * (parts + 1));
    s.ds = s.block_expert + smoe_align_up(sizeof(int32_t) * (uint64_t)(blocks + 1));
    s.dh = s.ds + smoe_align_up(sizeof(float) * rows * (uint64_t)(s.ds_parts + 1));
    s.shared = s.dh + (layer->reuse_saved ? 0 : smoe_align_up(rows * (uint64_t)(p->h_width * p->element)));
    if (layer->entry == SMOE_ENTRY_FROM_LOGITS) {
        s.router = smoe_cuda_router_scratch(state, p, s.shared);
        s.shared = s.router.end;
    }
    s.a = s.shared;
    s.parts2 = s.a + smoe_align_up(rows * (uint64_t)(layer->intermediate * p->element));
    const uint64_t dw2_end = s.parts2 + parts * (uint64_t)s.tiles2 * tile;
    const uint64_t dw1_end = s.shared + parts * (uint64_t)s.tiles1 * tile;
    const uint64_t dx_end = s.shared + smoe_align_up(rows * (uint64_t)(p->chunk_columns * p->element));
    s.end = larger(larger(dw2_end, dw1_end), larger(dx_end, s.router.passing_end));
    return s;
}

/* Why a layer has no backward, or NULL. */
static const char *why_no_backward(const smoe_layer *layer)
{
    return layer->inference ? "inference is 1: nothing was saved for a backward" : NULL;
}

uint64_t smoe_cuda_backward_scratch(const device_state *state, const smoe_problem *problem)
{
    return why_no_backward(&problem->layer) ? 0 : lay_out(state, problem).end;
}

cudaError_t smoe_cuda_backward_init(void)
{
    cudaError_t status = smoe_cuda_dh_init();
    if (status == cudaSuccess) status = smoe_cuda_dw_init();
    return status == cudaSuccess ? smoe_cuda_dx_rows_init() : status;
}

static cudaError_t make_lists(const backward_call *c)
{
    const smoe_cuda_make_lists experts = {
        .block_offsets = c->plan->block_offsets,
        .order = c->plan->order,
        .lists = c->lists,
        .experts = (int32_t)c->problem->layer.experts,
        .padded_blocks = (int32_t)(c->rows / SMOE_BLOCK_ROWS),
        .weight_tiles = c->at.tiles2,
        .ctas = c->state->ctas,
    };
    if (!smoe_cuda_router_has_lists(c)) return smoe_cuda_lists_launch(&experts, NULL, c->stream);
    const smoe_cuda_make_lists router = smoe_cuda_router_lists(c);
    return smoe_cuda_lists_launch(&experts, &router, c->stream);
}

static cudaError_t run_dh(backward_call *c)
{
    const smoe_layer *layer = &c->problem->layer;
    const int64_t d = layer->hidden, n = layer->intermediate, row_bytes = n * c->problem->element;
    const smoe_panels w2 = {n, d, row_bytes, layer->experts, d * row_bytes};
    smoe_cuda_dh p = {
        .dout = c->args->dout,
        .h = c->plan->h,
        .dh = c->dh,
        .a = c->a,
        .ds = (float *)(c->scratch + c->at.ds),
        .row_token = c->plan->row_token,
        .row_weight = c->plan->row_weight,
        .lists = c->lists,
        .padded_rows = c->problem->padded_rows,
        .hidden = (int32_t)d,
        .intermediate = (int32_t)n,
        .gated = c->problem->gated,
        .panels_apart = smoe_panels_apart(n),
        .activation = layer->activation,
    };
    smoe_map_panels(&c->maker, &p.w2, c->args->w2, &w2, 4);
    if (c->maker.status != CUDA_SUCCESS) return cudaErrorInvalidValue;
    return smoe_cuda_dh_launch(&p, layer->dtype, c->state->ctas, c->stream);
}

static cudaError_t run_ds(const backward_call *c)
{
    const smoe_layer *layer = &c->problem->layer;
    const smoe_backward_args *args = c->args;
    const smoe_entry entry = layer->entry;
    const smoe_cuda_ds p = {
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
    return p.topk_gradient || p.token_gradient || p.row_gradient || c->with_router
               ? smoe_cuda_ds_launch(&p, layer->dtype, c->stream)
               : cudaSuccess;
}

/* What dW2 and dW1 share; `features` is A' or dH. */
static smoe_cuda_dw weight_gradient(backward_call *c, const void *features, int halves)
{
    const smoe_layer *layer = &c->problem->layer;
    const int64_t n = layer->intermediate, half_bytes = n * c->problem->element;
    const smoe_panels tensor = {n, c->rows, halves * half_bytes, halves, half_bytes};
    smoe_cuda_dw p = {
        .row_token = c->plan->row_token,
        .lists = c->lists,
        .hidden = (int32_t)layer->hidden,
        .intermediate = (int32_t)n,
        .halves = halves,
        .panels_apart = smoe_panels_apart(n),
        .interleaved = halves == 2 && layer->layout == SMOE_LAYOUT_INTERLEAVED,
        .accumulate = layer->accumulate,
    };
    smoe_map_panels(&c->maker, &p.features, features, &tensor, 2);
    return p;
}

static cudaError_t run_dw2(backward_call *c)
{
    const smoe_layer *layer = &c->problem->layer;
    smoe_cuda_dw p = weight_gradient(c, c->a, 1);
    p.tokens = c->args->dout;
    p.weight_gradient = c->args->dw2;
    p.parts = c->at.parts ? (float *)(c->scratch + c->at.parts2) : NULL;
    smoe_map_dw2(&c->maker, &p.gradient, c->args->dw2, layer);
    if (c->maker.status != CUDA_SUCCESS) return cudaErrorInvalidValue;
    const cudaError_t status =
        smoe_cuda_dw_launch(&p, layer->dtype, layer->gradient_type, 0, c->state->ctas, c->stream);
    if (status != cudaSuccess || !c->args->db2) return status;
    const smoe_cuda_db bias = {
        .values = c->args->dout,
        .row_token = c->plan->row_token,
        .row_weight = c->plan->row_weight,
        .counts = c->plan->counts,
        .block_offsets = c->plan->block_offsets,
        .order = c->plan->order,
        .gradient = c->args->db2,
        .columns = (int32_t)layer->hidden,
        .experts = (int32_t)layer->experts,
        .accumulate = layer->accumulate,
    };
    return smoe_cuda_db_launch(&bias, layer->dtype, layer->gradient_type, c->stream);
}

static cudaError_t run_dw1(backward_call *c)
{
    const smoe_layer *layer = &c->problem->layer;
    smoe_cuda_dw p = weight_gradient(c, c->dh, c->halves);
    p.tokens = c->args->x;
    p.weight_gradient = c->args->dw1;
    p.parts = c->at.parts ? (float *)(c->scratch + c->at.shared) : NULL;
    smoe_map_dw1(&c->maker, &p.gradient, c->args->dw1, layer, c->problem->gated);
    if (c->maker.status != CUDA_SUCCESS) return cudaErrorInvalidValue;
    const cudaError_t status =
        smoe_cuda_dw_launch(&p, layer->dtype, layer->gradient_type, 1, c->state->ctas, c->stream);
    if (status != cudaSuccess || !c->args->db1) return status;
    const smoe_cuda_db bias = {
        .values = c->dh,
        .counts = c->plan->counts,
        .block_offsets = c->plan->block_offsets,
        .order = c->plan->order,
        .gradient = c->args->db1,
        .columns = (int32_t)c->problem->h_width,
        .experts = (int32_t)layer->experts,
        .half = (int32_t)layer->intermediate,
        .interleaved = p.interleaved,
        .accumulate = layer->accumulate,
    };
    return smoe_cuda_db_launch(&bias, layer->dtype, layer->gradient_type, c->stream);
}

static smoe_gemm choose_dx_rows(const smoe_problem *p, int64_t columns)
{
    const double tiles = smoe_gemm_merit(SMOE_GEMM_TILES, p->h_width, columns);
    const double ping_pong = smoe_gemm_merit(SMOE_GEMM_PING_PONG, p->h_width, columns);
    return ping_pong > tiles ? SMOE_GEMM_PING_PONG : SMOE_GEMM_TILES;
}

static cudaError_t run_dx_rows(backward_call *c, int64_t first_column, int64_t columns)
{
    const smoe_layer *layer = &c->problem->layer;
    const smoe_gemm kind = choose_dx_rows(c->problem, columns);
    smoe_cuda_dx_rows p = {
        .block_offsets = c->plan->block_offsets,
        .lists = c->lists,
        .hidden = (int32_t)layer->hidden,
        .intermediate = (int32_t)layer->intermediate,
        .halves = c->halves,
        .panels_apart = smoe_panels_apart(layer->hidden),
        .first_column = (int32_t)first_column,
        .columns = (int32_t)columns,
    };
    smoe_map_h(&c->maker, &p.a, c->dh, c->rows, c->halves, layer->intermediate, 2 * SMOE_BLOCK_ROWS);
    smoe_map_w1_panels(&c->maker, &p.w1, c->args->w1, layer, c->problem->gated,
                       kind == SMOE_GEMM_PING_PONG ? 3 : 4);
    smoe_map_matrix(&c->maker, &p.y, c->scratch + c->at.shared, c->rows, columns, SMOE_BLOCK_ROWS);
    if (c->maker.status != CUDA_SUCCESS) return cudaErrorInvalidValue;
    return smoe_cuda_dx_rows_launch(&p, kind, layer->dtype, c->state->ctas, c->stream);
}

static cudaError_t run_dx(const backward_call *c, int64_t first_column, int64_t columns)
{
    const smoe_layer *layer = &c->problem->layer;
    smoe_cuda_combine p = {
        .y = c->scratch + c->at.shared,
        .out = (char *)c->args->dx + first_column * c->problem->element,
        .token_offsets = c->plan->token_offsets,
        .token_rows = c->plan->token_rows,
        .topk = smoe_rows_of_a_token(layer),
        .tokens = layer->tokens,
        .hidden = layer->hidden,
        .columns = columns,
    };
    if (c->with_router && c->args->router_weight) smoe_cuda_router_term(c, first_column, &p);
    return smoe_cuda_combine_launch(&p, layer->dtype, c->stream);
}

static cudaError_t run_chunks(smoe_context *context, backward_call *c)
{
    const int64_t hidden = c->problem->layer.hidden, chunk = c->problem->chunk_columns;
    cudaError_t status = cudaSuccess;
    for (int64_t first = 0; first < hidden && status == cudaSuccess; first += chunk) {
        const int64_t columns = hidden - first < chunk ? hidden - first : chunk;
        smoe_stage_begin(context, SMOE_STAGE_DX_ROWS, c->stream);
        status = run_dx_rows(c, first, columns);
        smoe_stage_end(context, SMOE_STAGE_DX_ROWS, c->stream);
        if (status != cudaSuccess) return status;
        smoe_stage_begin(context, SMOE_STAGE_DX, c->stream);
        status = run_dx(c, first, columns);
        smoe_stage_end(context, SMOE_STAGE_DX, c->stream);
    }
    return status;
}

static cudaError_t run_stages(smoe_context *context, backward_call *c)
{
    smoe_stage_begin(context, SMOE_STAGE_DH, c->stream);
    cudaError_t status = make_lists(c);
    if (status == cudaSuccess) status = run_dh(c);
    if (status == cudaSuccess) status = run_ds(c);
    smoe_stage_end(context, SMOE_STAGE_DH, c->stream);
    if (status != cudaSuccess) return status;
    smoe_stage_begin(context, SMOE_STAGE_DW2, c->stream);
    status = run_dw2(c);
    smoe_stage_end(context, SMOE_STAGE_DW2, c->stream);
    if (status != cudaSuccess) return status;
    smoe_stage_begin(context, SMOE_STAGE_DW1, c->stream);
    status = run_dw1(c);
    smoe_stage_end(context, SMOE_STAGE_DW1, c->stream);
    if (status == cudaSuccess && c->with_router) {
        smoe_stage_begin(context, SMOE_STAGE_ROUTER_BWD, c->stream);
        status = smoe_cuda_router_backward(c);
        smoe_stage_end(context, SMOE_STAGE_ROUTER_BWD, c->stream);
    }
    return status == cudaSuccess ? run_chunks(context, c) : status;
}

smoe_status smoe_cuda_backward(smoe_context *context, const smoe_problem *problem,
                               const smoe_backward_args *args, const smoe_plan_arrays *plan, int with_router,
                               void *stream)
{
    const device_state *state = context->state;
    const char *const function = with_router ? "smoe_layer_backward" : "smoe_experts_backward";
    const char *missing = why_no_backward(&problem->layer);
    if (missing) return smoe_fail(context, SMOE_ERROR_UNSUPPORTED, "%s: %s", function, missing);
    const backward_scratch at = lay_out(state, problem);
    char *scratch = args->scratch;
    backward_call call = {
        .problem = problem,
        .args = args,
        .plan = plan,
        .state = state,
        .at = at,
        .lists = {(int32_t *)(scratch + at.counts), (smoe_work *)(scratch + at.tiles),
                  (smoe_piece *)(scratch + at.pieces), (smoe_split *)(scratch + at.splits),
                  (int32_t *)(scratch + at.block_expert), (int32_t *)(scratch + at.counts) + 4},
        .scratch = scratch,
        .dh = problem->layer.reuse_saved ? plan->h : scratch + at.dh,
        .a = scratch + at.a,
        .rows = problem->padded_rows / SMOE_BLOCK_ROWS * SMOE_BLOCK_ROWS,
        .halves = problem->gated ? 2 : 1,
        .with_router = with_router,
        .maker = {state->encode, problem->layer.dtype, CUDA_SUCCESS},
        .stream = stream,
    };
    int before;
    cudaError_t status = enter_device(state, &before);
    if (status != cudaSuccess) return device_error(context, function, status);
    status = run_stages(context, &call);
    leave_device(state, before);
    if (call.maker.status != CUDA_SUCCESS)
        return smoe_fail(context, SMOE_ERROR_DEVICE, "%s: cuTensorMapEncodeTiled failed with driver error %d",
                         function, (int)call.maker.status);
    return status == cudaSuccess ? SMOE_OK : device_error(context, function, status);
}
