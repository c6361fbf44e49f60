/* The sizes of a layer with ranks: windows, and the received part of saved. */
#include "ep.h"

enum { LEAST_KEPT = 16384 };

/* The most rows that the tokens of one rank have among the experts of one rank. A rounding rule adds less
 * than a tile to each expert. */
static int64_t pairs_at_most(const smoe_layer *l)
{
    const int64_t experts = l->experts / l->ranks, all = l->max_tokens * experts;
    const int64_t kept = l->max_tokens * (l->topk < experts ? l->topk : experts);
    const int adds = l->rounding != SMOE_ROUNDING_NONE && l->rounding != SMOE_ROUNDING_DOWN;
    const int64_t rows = kept + (adds ? experts * (l->tile - 1) : 0);
    return rows < all ? rows : all;
}

static uint64_t place(uint64_t *used, uint64_t bytes)
{
    const uint64_t at = *used;
    *used += moe_align_up(bytes);
    return at;
}

void moe_ep_window_init(moe_ep_window *window, const smoe_layer *l)
{
    moe_ep_window *w = window;
    *w = (moe_ep_window){
        .max_tokens = l->max_tokens,
        .row_bytes = l->hidden * moe_type_bytes(l->dtype),
        .experts = l->experts / l->ranks,
        .pairs = pairs_at_most(l),
        .training = !l->inference,
    };
    const uint64_t ranks = (uint64_t)l->ranks, values = 8 * MOE_EP_MAX_RANKS * MOE_EP_VALUES;
    w->routing_stripe = moe_align_up(4 * (uint64_t)(w->experts + 2 * w->pairs));
    w->ds_stripe = moe_align_up(4 * (uint64_t)w->pairs);
    const uint64_t rows = ranks * (uint64_t)(w->max_tokens * w->row_bytes);
    w->bytes = moe_align_up(MOE_EP_LINE * MOE_EP_FLAGS * MOE_EP_MAX_RANKS);
    w->hello = place(&w->bytes, values);
    w->header = place(&w->bytes, values);
    w->state = place(&w->bytes, MOE_EP_STATE_BYTES);
    w->routing = place(&w->bytes, ranks * w->routing_stripe);
    w->x = place(&w->bytes, rows);
    w->sums = place(&w->bytes, rows);
    w->dout = place(&w->bytes, w->training ? rows : 0);
    w->ds = place(&w->bytes, w->training ? ranks * w->ds_stripe : 0);
}

/* By the rows of other ranks that an expert then has in each part: at least 1024 with four parts, 512 with
 * two. More parts hide more of the transfers, but each takes launches; measured in the log of 2026-11-27. */
static int parts_of(const smoe_layer *l)
{
    if (l->waves) return l->waves;
    const int64_t rows = l->max_tokens * l->topk * (l->ranks - 1) / l->experts;
    return rows >= 4 * 1024 ? 4 : rows >= 2 * 512 ? 2 : 1;
}

/* Padded rows whose H is kept. The default is rarely exceeded: a rank's experts together get much the same
 * number of rows on all ranks. Small layers keep all, so that nothing of theirs is computed again. */
static int64_t kept_rows(const smoe_layer *l)
{
    const int64_t mean = l->max_tokens * l->topk, usual = mean + mean / 4;
    const int64_t rows = l->row_capacity ? l->row_capacity : usual > LEAST_KEPT ? usual : LEAST_KEPT;
    return (rows + MOE_BLOCK_ROWS - 1) / MOE_BLOCK_ROWS * MOE_BLOCK_ROWS;
}

void moe_ep_problem_init(moe_ep_problem *ep, const smoe_layer *layer)
{
    const int64_t pairs = layer->ranks * pairs_at_most(layer), ranks = layer->ranks;
    smoe_layer received = *layer;
    received.tokens = ranks * layer->max_tokens;
    received.experts = layer->experts / ranks;
    received.topk = layer->topk < received.experts ? layer->topk : received.experts;
    received.entry = SMOE_ENTRY_FROM_TOPK;
    received.rounding = SMOE_ROUNDING_NONE;
    received.reuse_saved = 0; /* dw2 comes after dh and reads H */
    received.ranks = 0;
    *ep = (moe_ep_problem){.parts = parts_of(layer)};
    const int64_t runs = received.experts * moe_ep_waves(ep->parts); /* each begins at a block */
    moe_problem_of_runs(&ep->received, &received, pairs, runs, kept_rows(layer));
    const moe_problem *r = &ep->received;
    const uint64_t starts = 4 * (uint64_t)(runs * ranks), tokens = 8 * (uint64_t)ranks;
    const uint64_t spans = 4 * (uint64_t)received.experts, blocks = 4 * (uint64_t)(runs + 1);
    ep->b1_bytes = layer->inference || r->kept_rows == r->padded_rows
                       ? 0
                       : (uint64_t)(received.experts * r->h_width * r->element);
    ep->bytes = layer->inference ? r->plan_bytes : r->saved_buffer_bytes;
    ep->starts_at = place(&ep->bytes, starts);
    ep->tokens_at = place(&ep->bytes, tokens);
    ep->spans_at = place(&ep->bytes, spans);
    ep->blocks_at = place(&ep->bytes, blocks);
    ep->b1_at = place(&ep->bytes, ep->b1_bytes);
    ep->metadata_bytes = r->metadata_bytes + starts + tokens + spans + blocks + ep->b1_bytes;
}

moe_ep_arrays moe_ep_arrays_at(const moe_ep_problem *ep, const moe_problem *problem, void *buffer)
{
    char *at = (char *)buffer + problem->received_at;
    return (moe_ep_arrays){
        .plan = moe_plan_at(&ep->received, at),
        .starts = (int32_t *)(void *)(at + ep->starts_at),
        .tokens = (int64_t *)(void *)(at + ep->tokens_at),
        .spans = (int32_t *)(void *)(at + ep->spans_at),
        .run_blocks = (int32_t *)(void *)(at + ep->blocks_at),
        .b1 = ep->b1_bytes ? at + ep->b1_at : NULL,
    };
}
