/* Can a plan stage have left this plan in saved or scratch for this layer? The stages that read a plan use
 * its values as indices, so memory that holds something else would make them read and write outside of their
 * arrays. Every value that is used as an index is checked, by sweeps over the plan's arrays that read 4 bytes
 * for each row, token or pair. */
#include "cpu.h"

#include <string.h>

typedef struct plan_check {
    smoe_context *context;
    const moe_problem *problem;
    const moe_plan_arrays *plan;
} plan_check;

static smoe_status refuse(const plan_check *c, const char *array, int64_t at, int64_t value)
{
    return moe_fail(c->context, SMOE_ERROR_ARGUMENT,
                    "%s: the memory of the plan is not as a forward of this layer left it: %s[%lld] is %lld",
                    c->context->function, array, (long long)at, (long long)value);
}

/* counts, offsets and block_offsets agree with each other and with the bound on rows. */
static smoe_status check_counts(const plan_check *c)
{
    const moe_problem *p = c->problem;
    const moe_plan_arrays *plan = c->plan;
    if (plan->offsets[0]) return refuse(c, "offsets", 0, plan->offsets[0]);
    if (plan->block_offsets[0]) return refuse(c, "block_offsets", 0, plan->block_offsets[0]);
    for (int64_t e = 0; e < p->layer.experts; e++) {
        const int64_t count = plan->counts[e];
        if (count < 0 || count > p->rows - plan->offsets[e]) return refuse(c, "counts", e, count);
        const int64_t blocks = ((uint32_t)count + MOE_BLOCK_ROWS - 1) / MOE_BLOCK_ROWS;
        if (plan->offsets[e + 1] != plan->offsets[e] + count)
            return refuse(c, "offsets", e + 1, plan->offsets[e + 1]);
        if (plan->block_offsets[e + 1] != plan->block_offsets[e] + blocks)
            return refuse(c, "block_offsets", e + 1, plan->block_offsets[e + 1]);
    }
    const int exact = p->layer.entry == SMOE_ENTRY_FROM_LOGITS && p->layer.rounding == SMOE_ROUNDING_NONE;
    const int64_t rows = plan->offsets[p->layer.experts];
    return exact && rows != p->rows ? refuse(c, "offsets", p->layer.experts, rows) : SMOE_OK;
}

/* Every expert is once in `order`. */
static smoe_status check_order(const plan_check *c)
{
    const int64_t experts = c->problem->layer.experts;
    const int32_t *order = c->plan->order;
    unsigned char seen[MOE_MAX_EXPERTS];
    memset(seen, 0, (size_t)experts);
    for (int64_t i = 0; i < experts; i++)
        if ((uint32_t)order[i] >= experts || seen[order[i]]++) return refuse(c, "order", i, order[i]);
    return SMOE_OK;
}

/* Checks that values[first], ... values[first + count - 1] are in [0, limit). */
static smoe_status check_indices(const plan_check *c, const char *array, const int32_t *values, int64_t first,
                                 int64_t count, int64_t limit)
{
    for (int64_t i = first; i < first + count; i++)
        if ((uint32_t)values[i] >= limit) return refuse(c, array, i, values[i]);
    return SMOE_OK;
}

/* The tokens of all rows. Nothing reads those of pad rows. */
static smoe_status check_rows(const plan_check *c)
{
    const moe_plan_arrays *plan = c->plan;
    smoe_status status = SMOE_OK;
    for (int64_t e = 0; e < c->problem->layer.experts && status == SMOE_OK; e++) {
        const int64_t first = (int64_t)MOE_BLOCK_ROWS * plan->block_offsets[e];
        status =
            check_indices(c, "row_token", plan->row_token, first, plan->counts[e], c->problem->layer.tokens);
    }
    return status;
}

/* The rows of all tokens: token_offsets never falls, and ends at the number of rows. */
static smoe_status check_tokens(const plan_check *c)
{
    const int64_t tokens = c->problem->layer.tokens, experts = c->problem->layer.experts;
    const int32_t *offsets = c->plan->token_offsets, rows = c->plan->offsets[experts];
    if (offsets[0]) return refuse(c, "token_offsets", 0, offsets[0]);
    if (offsets[tokens] != rows) return refuse(c, "token_offsets", tokens, offsets[tokens]);
    for (int64_t t = 0; t < tokens; t++)
        if (offsets[t + 1] < offsets[t]) return refuse(c, "token_offsets", t + 1, offsets[t + 1]);
    return check_indices(c, "token_rows", c->plan->token_rows, 0, rows,
                         (int64_t)MOE_BLOCK_ROWS * c->plan->block_offsets[experts]);
}

static smoe_status check_topk(const plan_check *c)
{
    const smoe_layer *l = &c->problem->layer;
    if (l->entry != SMOE_ENTRY_FROM_LOGITS) return SMOE_OK;
    return check_indices(c, "topk_ids", c->plan->topk_ids, 0, l->tokens * l->topk, l->experts);
}

smoe_status moe_cpu_check_plan(smoe_context *context, const moe_problem *problem, const moe_plan_arrays *plan)
{
    const plan_check c = {context, problem, plan};
    smoe_status status = check_counts(&c);
    if (status == SMOE_OK) status = check_order(&c);
    if (status == SMOE_OK) status = check_rows(&c);
    if (status == SMOE_OK) status = check_tokens(&c);
    if (status == SMOE_OK) status = check_topk(&c);
    return status;
}
