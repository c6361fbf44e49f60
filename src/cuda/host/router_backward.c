/* router_bwd: dlogits, dbr, dWr = dlogits^T X, and the router's term of dX, dlogits Wr.
 *
 * Both products use the experts' kernels: all tokens are the rows of one expert. dWr is computed as a dW1
 * in which the matrix dlogits takes the place of dH. The tokens are cut into pieces so that all pairs of a
 * piece and a tile run at the same time. If dlogits is dense, the router's term is computed as a dX~ in
 * which Wr takes the place of W1. It is written to dX, and the combine of dX starts from it. If dlogits is
 * sparse, combine.cu adds the term row by row; the list of nonzeros stays in scratch until then. */
#include "host/backward.h"

/* The arguments with which moe_split_limit cuts the tokens' work list: one tile, and as many CTAs as there
 * are pieces. */
enum { ONE_TILE = 1 };

static int32_t token_blocks(const smoe_layer *layer)
{
    return (int32_t)moe_divide_up(layer->tokens, MOE_BLOCK_ROWS);
}

router_scratch moe_cuda_router_scratch(const device_state *state, const moe_problem *p, uint64_t at)
{
    const smoe_layer *layer = &p->layer;
    const int32_t tiles = state->kernels->weight_tiles((int32_t)layer->hidden, (int32_t)layer->experts, 1);
    const int32_t blocks = token_blocks(layer);
    const uint64_t tokens = (uint64_t)layer->tokens, tile = state->kernels->weight_tile_bytes;
    router_scratch s = {.counts = at};
    s.stride = (int32_t)(moe_divide_up(layer->experts, 8) * 8);
    s.pieces_at_once = tiles < state->device.sms ? state->device.sms / tiles : 1;
    const int64_t pieces = moe_divide_up(blocks, moe_split_limit(blocks, ONE_TILE, s.pieces_at_once));
    s.parts_count = pieces > 1 ? (int32_t)pieces : 0;
    s.tiles = s.counts + moe_align_up(6 * sizeof(int32_t));
    s.pieces = s.tiles +
               moe_align_up(sizeof(moe_work) * (uint64_t)moe_work_bound(layer->tokens, 1, MOE_TILE_BLOCKS));
    s.splits = s.pieces + moe_align_up(sizeof(moe_piece) * (uint64_t)pieces);
    s.block_expert = s.splits + moe_align_up(sizeof(moe_split));
    s.terms = s.block_expert + moe_align_up(sizeof(int32_t) * (uint64_t)blocks);
    s.end = s.terms + (moe_dlogits_are_sparse(layer, 0)
                           ? moe_align_up(tokens * (uint64_t)layer->topk * sizeof(moe_cuda_term))
                           : 0);
    s.dense = s.end;
    s.bias_sums = s.dense + moe_align_up(tokens * (uint64_t)(s.stride * p->element));
    s.parts = s.bias_sums + moe_align_up((uint64_t)(moe_cuda_dlogits_ctas(layer) * s.stride) * sizeof(float));
    s.passing_end = s.parts + (uint64_t)s.parts_count * (uint64_t)tiles * tile;
    return s;
}

static int is_sparse(const backward_call *c)
{
    return moe_dlogits_are_sparse(&c->problem->layer, moe_has_losses(c->args));
}

/* Does dX contain the router's term? */
static int wants_term(const backward_call *c)
{
    return c->args->dx && c->args->router_weight;
}

/* Is dense dlogits read, by dWr or by the router's term of dX? */
static int wants_dense(const backward_call *c)
{
    return c->args->drouter_weight || (wants_term(c) && !is_sparse(c));
}

int moe_cuda_router_has_lists(const backward_call *c)
{
    return c->with_router && wants_dense(c);
}

static moe_cuda_backward_lists lists_at(const backward_call *c)
{
    const router_scratch *at = &c->at.router;
    const moe_cuda_backward_lists lists = {
        (int32_t *)(c->scratch + at->counts),       (moe_work *)(c->scratch + at->tiles),
        (moe_piece *)(c->scratch + at->pieces),     (moe_split *)(c->scratch + at->splits),
        (int32_t *)(c->scratch + at->block_expert), (int32_t *)(c->scratch + at->counts) + 4};
    return lists;
}

moe_cuda_make_lists moe_cuda_router_lists(const backward_call *c)
{
    const moe_cuda_make_lists p = {
        .lists = lists_at(c),
        .experts = 1,
        .padded_blocks = token_blocks(&c->problem->layer),
        .weight_tiles = ONE_TILE,
        .ctas = c->at.router.pieces_at_once,
    };
    return p;
}

static cudaError_t run_dlogits(const backward_call *c)
{
    const smoe_backward_args *args = c->args;
    const moe_cuda_dlogits p = {
        .layer = c->problem->layer,
        .logits = args->logits,
        .ds = (const float *)(c->scratch + c->at.ds),
        .padded_rows = c->problem->padded_rows,
        .token_offsets = c->plan->token_offsets,
        .token_rows = c->plan->token_rows,
        .block_expert = c->lists.block_expert,
        .topk_ids = c->plan->topk_ids,
        .topk_counts = c->plan->topk_counts,
        .topk_weights = c->plan->topk_weights,
        .token_mask = args->token_mask,
        .balance = args->balance_coefficient,
        .z = args->z_coefficient,
        .loss_gradients = args->loss_gradients,
        .ds_parts = c->at.ds_parts + (args->b2 ? 1 : 0),
        .stride = c->at.router.stride,
        .dense = wants_dense(c) ? c->scratch + c->at.router.dense : NULL,
        .dlogits = args->dlogits,
        .terms = wants_term(c) && is_sparse(c) ? (moe_cuda_term *)(c->scratch + c->at.router.terms) : NULL,
        .bias_sums = args->drouter_bias ? (float *)(c->scratch + c->at.router.bias_sums) : NULL,
        .bias_gradient = args->drouter_bias,
    };
    return moe_cuda_dlogits_launch(&c->on, &p);
}

static cudaError_t run_dwr(backward_call *c)
{
    const smoe_layer *layer = &c->problem->layer;
    const moe_dw dw = {
        .features = c->scratch + c->at.router.dense,
        .tokens = c->args->x,
        .gradient = c->args->drouter_weight,
        .parts = c->at.router.parts_count ? (float *)(c->scratch + c->at.router.parts) : NULL,
        .lists = lists_at(c),
        .rows = layer->tokens,
        .hidden = layer->hidden,
        .intermediate = layer->experts,
        .row_width = c->at.router.stride,
        .experts = 1,
        .halves = 1,
        .accumulate = layer->accumulate,
        .transposed = 1,
        .gradient_type = layer->gradient_type,
    };
    return c->state->kernels->dw(&c->on, &dw);
}

/* dx = dlogits Wr */
static cudaError_t run_dense_dx(backward_call *c)
{
    const smoe_layer *layer = &c->problem->layer;
    const moe_dx_rows dx = {
        .dh = c->scratch + c->at.router.dense,
        .w1 = c->args->router_weight,
        .dx = c->args->dx,
        .lists = lists_at(c),
        .rows = layer->tokens,
        .hidden = layer->hidden,
        .intermediate = layer->experts,
        .row_width = c->at.router.stride,
        .experts = 1,
        .halves = 1,
        .columns = layer->hidden,
    };
    return c->state->kernels->dx_rows(&c->on, &dx);
}

cudaError_t moe_cuda_router_backward(backward_call *c)
{
    cudaError_t status = run_dlogits(c);
    if (status == cudaSuccess && c->args->drouter_weight) status = run_dwr(c);
    return status == cudaSuccess && wants_term(c) && !is_sparse(c) ? run_dense_dx(c) : status;
}

void moe_cuda_router_term(const backward_call *c, int64_t first_column, moe_cuda_combine *combine)
{
    combine->onto = !is_sparse(c);
    if (combine->onto) return;
    combine->terms = (const moe_cuda_term *)(c->scratch + c->at.router.terms);
    combine->router_weight = (const char *)c->args->router_weight + first_column * c->problem->element;
}
