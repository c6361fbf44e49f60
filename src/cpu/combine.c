/* combine: O[t] = sum over the rows r of t of s[r] Y[r], for the columns of one chunk. The rows are added in
 * ascending order in f32, and the sum is rounded once to dtype. A token without rows gets zeros. */
#include "convert.h"
#include "experts.h"

#include <string.h>

/* sum (columns) += weight y */
static void add_weighted(float *restrict sum, const float *restrict y, float weight, int64_t columns)
{
    for (int64_t i = 0; i < columns; i++) sum[i] += weight * y[i];
}

void moe_cpu_combine_token(const moe_cpu_pass *pass, int64_t token, int64_t columns, float *sum)
{
    const moe_plan_arrays *plan = pass->plan;
    memset(sum, 0, (size_t)columns * sizeof *sum);
    for (int64_t i = plan->token_offsets[token]; i < plan->token_offsets[token + 1]; i++) {
        const int64_t row = plan->token_rows[i];
        add_weighted(sum, pass->chunk + row * pass->problem->chunk_columns, plan->row_weight[row], columns);
    }
}

void moe_cpu_combine(const moe_cpu_pass *pass, void *out, int64_t first_column)
{
    const moe_problem *p = pass->problem;
    const int64_t columns = moe_min(p->chunk_columns, p->layer.hidden - first_column);
    moe_stage_begin(pass->context, SMOE_STAGE_COMBINE, pass->stream);
#pragma omp parallel for schedule(static) num_threads(pass->context->threads)
    for (int64_t token = 0; token < p->layer.tokens; token++) {
        float *sum = moe_cpu_panels_of(pass).row;
        moe_cpu_combine_token(pass, token, columns, sum);
        moe_store_row(out, token * p->layer.hidden + first_column, sum, columns, p->layer.dtype);
    }
    moe_stage_end(pass->context, SMOE_STAGE_COMBINE, pass->stream);
}
