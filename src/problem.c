/* Row bounds and the layout of `saved`. One table lists the parts; sizes and pointers both follow from it. */
#include "problem.h"
#include "activations.h"
#include "ep.h"

int64_t moe_type_bytes(smoe_type type)
{
    switch (type) {
    case SMOE_TYPE_BF16:
    case SMOE_TYPE_F16: return 2;
    case SMOE_TYPE_F32:
    case SMOE_TYPE_I32: return 4;
    case SMOE_TYPE_I64: return 8;
    }
    return 0;
}

int64_t moe_load_index(const void *indices, smoe_type type, int64_t at)
{
    switch (type) {
    case SMOE_TYPE_I32: return ((const int32_t *)indices)[at];
    case SMOE_TYPE_I64: return ((const int64_t *)indices)[at];
    case SMOE_TYPE_F32:
    case SMOE_TYPE_BF16:
    case SMOE_TYPE_F16: break;
    }
    return -1;
}

/* The most rows that a rounding rule can add to T K. NR_F adds less than half a tile to each expert. SR_F,
 * NR_S and UP add less than a tile to each. BALANCE_F adds at most half a tile to all experts together,
 * because its running residual stays within M/2. */
static int64_t rows_added_at_most(const smoe_layer *layer)
{
    const int64_t tile = layer->tile, experts = layer->experts;
    switch (layer->rounding) {
    case SMOE_ROUNDING_NONE:
    case SMOE_ROUNDING_DOWN: return 0;
    case SMOE_ROUNDING_NR_F: return experts * ((tile - 1) / 2);
    case SMOE_ROUNDING_BALANCE_F: return tile / 2;
    case SMOE_ROUNDING_SR_F:
    case SMOE_ROUNDING_NR_S:
    case SMOE_ROUNDING_UP: return experts * (tile - 1);
    }
    return 0;
}

static int64_t rows_at_most(const smoe_layer *layer)
{
    const int64_t pairs = layer->tokens * layer->experts;
    const int64_t rows = layer->tokens * layer->topk + rows_added_at_most(layer);
    switch (layer->entry) {
    case SMOE_ENTRY_FROM_LOGITS:
    case SMOE_ENTRY_FROM_TOPK: return rows < pairs ? rows : pairs;
    case SMOE_ENTRY_FROM_ROWS: break;
    }
    return rows;
}

/* One part of the plan: where its pointer is stored, and its number of elements (4 bytes each) without
 * padding and as laid out. */
typedef struct plan_part {
    void **pointer;
    int64_t elements;
    int64_t elements_laid_out;
} plan_part;

enum { PLAN_PARTS = 11 };

static int list_plan_parts(const moe_problem *p, moe_plan_arrays *plan, plan_part parts[PLAN_PARTS])
{
    const int64_t tokens = p->layer.tokens, experts = p->layer.experts, pairs = tokens * p->layer.topk;
    const int from_logits = p->layer.entry == SMOE_ENTRY_FROM_LOGITS;
    const plan_part all[PLAN_PARTS] = {
        {(void **)&plan->row_token, p->rows, p->padded_rows},
        {(void **)&plan->row_weight, p->rows, p->padded_rows},
        {(void **)&plan->token_rows, p->rows, p->rows},
        {(void **)&plan->token_offsets, tokens + 1, tokens + 1},
        {(void **)&plan->counts, experts, experts},
        {(void **)&plan->offsets, experts + 1, experts + 1},
        {(void **)&plan->block_offsets, experts + 1, experts + 1},
        {(void **)&plan->order, experts, experts},
        {(void **)&plan->topk_ids, pairs, pairs},
        {(void **)&plan->topk_weights, pairs, pairs},
        {(void **)&plan->topk_counts, experts, experts},
    };
    const int count = from_logits ? PLAN_PARTS : PLAN_PARTS - 3;
    for (int i = 0; i < count; i++) parts[i] = all[i];
    return count;
}

static uint64_t h_bytes(const moe_problem *p, int64_t rows)
{
    return (uint64_t)(rows * p->h_width) * (uint64_t)p->element;
}

/* Bytes of P1 or P2. */
static uint64_t low_rank_bytes(const moe_problem *p, int64_t rows, int32_t rank)
{
    return (uint64_t)(rows * rank) * (uint64_t)p->element;
}

/* Bytes of H, P1, P2 and the plan without what their alignment adds, with bounds on the rows that are affine
 * in T. */
static uint64_t affine_bytes(const moe_problem *of, int64_t tokens)
{
    moe_problem p = *of;
    p.layer.tokens = tokens;
    p.rows = tokens * p.layer.topk + rows_added_at_most(&p.layer);
    p.padded_rows = p.rows + (MOE_BLOCK_ROWS - 1) * p.layer.experts;
    moe_plan_arrays plan;
    plan_part parts[PLAN_PARTS];
    const int count = list_plan_parts(&p, &plan, parts);
    uint64_t bytes = h_bytes(&p, p.padded_rows) +
                     low_rank_bytes(&p, p.padded_rows, p.layer.lora_rank1 + p.layer.lora_rank2);
    for (int i = 0; i < count; i++) bytes += 4 * (uint64_t)parts[i].elements_laid_out;
    return bytes;
}

void moe_saved_bound(const moe_problem *p, uint64_t *constant, uint64_t *of_a_token)
{
    *constant = *of_a_token = 0;
    if (p->layer.inference || p->layer.ranks) return;
    const uint64_t without_tokens = affine_bytes(p, 0);
    *constant = without_tokens + (PLAN_PARTS + 3) * (MOE_PART_ALIGN - 1);
    *of_a_token = affine_bytes(p, 1) - without_tokens;
}

/* H is in `saved`, unless nothing is saved, or the rows are on the ranks of their experts. */
static int keeps_h(const smoe_layer *layer)
{
    return !layer->inference && !layer->ranks;
}

/* What a layer with ranks adds: the rows that its experts receive, behind the plan of its own tokens. */
static void add_received(moe_problem *p)
{
    moe_ep_problem ep;
    moe_ep_problem_init(&ep, &p->layer);
    p->received_at = p->plan_bytes;
    p->plan_bytes += ep.bytes;
    if (p->layer.inference) return;
    p->saved_buffer_bytes = p->plan_bytes;
    p->metadata_bytes += ep.metadata_bytes;
    const moe_problem *r = &ep.received;
    p->saved_bytes += ep.metadata_bytes + h_bytes(r, r->rows < r->kept_rows ? r->rows : r->kept_rows);
    p->recomputes = r->kept_rows < r->padded_rows;
}

void moe_problem_init(moe_problem *problem, const smoe_layer *layer)
{
    moe_problem_of_runs(problem, layer, rows_at_most(layer), layer->experts, INT64_MAX);
    if (layer->ranks) add_received(problem);
}

void moe_problem_of_runs(moe_problem *problem, const smoe_layer *layer, int64_t rows, int64_t runs,
                         int64_t kept)
{
    moe_problem *p = problem;
    *p = (moe_problem){.layer = *layer};
    p->gated = moe_activation_halves(layer->activation) == 2;
    p->h_width = moe_h_width(layer);
    p->element = moe_type_bytes(layer->dtype);
    p->experts_here = layer->ranks ? layer->experts / layer->ranks : layer->experts;
    p->rows = rows;
    p->padded_rows = moe_padded_rows(p->rows, runs);
    p->kept_rows = kept < p->padded_rows ? kept : p->padded_rows;
    const int64_t per_chunk = (int64_t)MOE_BLOCK_ROWS * layer->chunks;
    p->chunk_columns = MOE_BLOCK_ROWS * ((layer->hidden + per_chunk - 1) / per_chunk);
    if (p->chunk_columns > layer->hidden) p->chunk_columns = layer->hidden;

    moe_plan_arrays plan;
    plan_part parts[PLAN_PARTS];
    const int count = list_plan_parts(p, &plan, parts);
    for (int i = 0; i < count; i++) {
        p->metadata_bytes += 4 * (uint64_t)parts[i].elements;
        p->plan_bytes += moe_align_up(4 * (uint64_t)parts[i].elements_laid_out);
    }
    p->plan_bytes += moe_align_up(low_rank_bytes(p, p->padded_rows, layer->lora_rank1)) +
                     moe_align_up(low_rank_bytes(p, p->padded_rows, layer->lora_rank2));
    const uint64_t x_bytes = (uint64_t)(layer->tokens * layer->hidden * p->element);
    p->saved_bytes =
        x_bytes + p->metadata_bytes + low_rank_bytes(p, p->rows, layer->lora_rank1 + layer->lora_rank2);
    p->saved_buffer_bytes = layer->inference ? 0 : p->plan_bytes;
    if (keeps_h(layer)) p->saved_bytes += h_bytes(p, p->rows);
    if (keeps_h(layer)) p->saved_buffer_bytes += moe_align_up(h_bytes(p, p->kept_rows));
    if (layer->inference) p->saved_bytes = p->metadata_bytes = 0;
}

moe_plan_arrays moe_plan_at(const moe_problem *problem, void *buffer)
{
    moe_plan_arrays plan = {0};
    char *at = buffer;
    if (keeps_h(&problem->layer)) {
        plan.h = at;
        at += moe_align_up(h_bytes(problem, problem->kept_rows));
    }
    const int32_t ranks[] = {problem->layer.lora_rank1, problem->layer.lora_rank2};
    void **const low[] = {&plan.p1, &plan.p2};
    for (int i = 0; i < 2; i++) {
        if (ranks[i]) *low[i] = at;
        at += moe_align_up(low_rank_bytes(problem, problem->padded_rows, ranks[i]));
    }
    plan_part parts[PLAN_PARTS];
    const int count = list_plan_parts(problem, &plan, parts);
    for (int i = 0; i < count; i++) {
        *parts[i].pointer = at;
        at += moe_align_up(4 * (uint64_t)parts[i].elements_laid_out);
    }
    return plan;
}
