/* The routing between ranks. A rank's plan has its rows sorted by expert, so the rows for one rank are one
 * run of it: counts (E/W), then their tokens and weights without pad rows. The receiver puts the runs of all
 * sources together, expert by expert; nothing is sorted. */
#include "ep_cpu.h"
#include "routing.h"

#include <string.h>

typedef struct run {
    int32_t *counts, *tokens;
    float *weights;
} run;

static run run_at(const smoe_ep *ep, int rank, int source)
{
    const moe_ep_window *w = &ep->window;
    int32_t *at = (int32_t *)(void *)(ep->windows[rank] + w->routing + (uint64_t)source * w->routing_stripe);
    return (run){at, at + w->experts, (float *)(void *)(at + w->experts + w->pairs)};
}

void moe_cpu_ep_send_routing(const smoe_ep *ep, const moe_problem *problem, const moe_plan_arrays *plan,
                             int rank)
{
    const int64_t experts = problem->layer.experts / ep->ranks;
    const run to = run_at(ep, rank, ep->rank);
    int64_t sent = 0;
    for (int64_t e = 0; e < experts; e++) {
        const int64_t global = rank * experts + e, count = plan->counts[global];
        const int64_t row = (int64_t)MOE_BLOCK_ROWS * plan->block_offsets[global];
        to.counts[e] = (int32_t)count;
        memcpy(to.tokens + sent, plan->row_token + row, (size_t)count * sizeof *to.tokens);
        memcpy(to.weights + sent, plan->row_weight + row, (size_t)count * sizeof *to.weights);
        sent += count;
    }
}

/* The rows of each expert. */
static void count_rows(const smoe_ep *ep, int64_t experts, int32_t *counts)
{
    memset(counts, 0, (size_t)experts * sizeof *counts);
    for (int s = 0; s < ep->ranks; s++) {
        const run from = run_at(ep, ep->rank, s);
        for (int64_t e = 0; e < experts; e++) counts[e] += from.counts[e];
    }
}

/* Copies the runs of one source to their places. token_offsets[slot + 1] counts the rows of a slot, a token
 * of a source. */
static void place_run(const smoe_ep *ep, const moe_ep_problem *p, const moe_ep_arrays *a, int source,
                      int32_t *next)
{
    const int64_t experts = p->received.layer.experts;
    const int64_t first_slot = source * ep->window.max_tokens;
    const run from = run_at(ep, ep->rank, source);
    int64_t taken = 0;
    for (int64_t e = 0; e < experts; e++) {
        a->starts[e * ep->ranks + source] = next[e];
        for (int32_t i = 0; i < from.counts[e]; i++, taken++, next[e]++) {
            const int64_t slot = first_slot + from.tokens[taken];
            a->plan.row_token[next[e]] = (int32_t)slot;
            a->plan.row_weight[next[e]] = from.weights[taken];
            a->plan.token_offsets[slot + 1]++;
        }
    }
}

/* token_offsets from the counts of place_run, and token_rows: experts ascend, so do the rows of a slot. */
static void map_slots(const moe_problem *p, const moe_plan_arrays *plan)
{
    const int64_t slots = p->layer.tokens;
    for (int64_t t = 0; t < slots; t++) plan->token_offsets[t + 1] += plan->token_offsets[t];
    const int64_t padded = (int64_t)MOE_BLOCK_ROWS * plan->block_offsets[p->layer.experts];
    for (int64_t row = 0; row < padded; row++)
        if (plan->row_token[row] >= 0)
            plan->token_rows[plan->token_offsets[plan->row_token[row]]++] = (int32_t)row;
    for (int64_t t = slots; t > 0; t--) plan->token_offsets[t] = plan->token_offsets[t - 1];
    plan->token_offsets[0] = 0;
}

void moe_cpu_ep_plan(const smoe_ep *ep, const moe_ep_problem *p, const moe_ep_arrays *a)
{
    const moe_plan_arrays *plan = &a->plan;
    const int64_t experts = p->received.layer.experts;
    count_rows(ep, experts, plan->counts);
    moe_place_experts(plan, experts);
    int32_t next[MOE_MAX_EXPERTS];
    for (int64_t e = 0; e < experts; e++) next[e] = MOE_BLOCK_ROWS * plan->block_offsets[e];
    memset(plan->token_offsets, 0, (size_t)(p->received.layer.tokens + 1) * sizeof *plan->token_offsets);
    for (int s = 0; s < ep->ranks; s++) place_run(ep, p, a, s, next);
    moe_order_experts(plan, next, experts);
    moe_write_pads(plan, experts, p->received.padded_rows);
    map_slots(&p->received, plan);
}

int moe_cpu_ep_next_rank(const moe_problem *problem, const moe_plan_arrays *plan, int64_t token, int after)
{
    const int64_t experts = problem->layer.experts, each = experts / problem->layer.ranks;
    for (int64_t i = plan->token_offsets[token]; i < plan->token_offsets[token + 1]; i++) {
        const int64_t block = plan->token_rows[i] / MOE_BLOCK_ROWS;
        const int rank = (int)(moe_expert_of_block(plan, experts, block) / each);
        if (rank > after) return rank;
    }
    return problem->layer.ranks;
}
