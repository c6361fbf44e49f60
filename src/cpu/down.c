/* down: Y[r] = A[r] W2[e]^T + b2[e] for the columns of one chunk, to scratch (padded_rows, chunk_columns). Y
 * is f32 for every dtype, so that O is rounded only once. A is act(H) of the stored H, rounded to dtype.
 *
 * A work item is a row panel: A (256, n) is multiplied by rows of W2, 64 columns of Y at a time. With several
 * chunks A is recomputed for each chunk, because this costs less than to keep A. */
#include "activation.h"
#include "blas.h"
#include "convert.h"
#include "experts.h"

static void load_a(const moe_cpu_pass *pass, const moe_row_panel *panel, const moe_cpu_panels *at)
{
    const moe_problem *p = pass->problem;
    const int64_t n = p->layer.intermediate;
    if (moe_cpu_is_f8(pass)) {
        moe_cpu_f8_load_a(pass, panel, at->gathered);
        return;
    }
    if (p->layer.inference) {
        moe_load_row(at->gathered, pass->a, panel->row * n, panel->count * n, p->layer.dtype);
        return;
    }
    for (int64_t i = 0; i < panel->count; i++) {
        moe_load_row(at->row, moe_h_of_row(pass, panel->row + i), 0, p->h_width, p->layer.dtype);
        moe_activate(&p->layer, n, at->row, at->gathered + i * n);
    }
    moe_round_row(at->gathered, panel->count * n, p->layer.dtype);
}

/* Fills y (count, columns) with b2[e] from column `column` on. The product is added to it later. */
static void spread_bias(const moe_cpu_pass *pass, const moe_row_panel *panel, const void *b2, int64_t column,
                        int64_t columns, float *y)
{
    const moe_problem *p = pass->problem;
    for (int64_t i = 0; i < panel->count; i++)
        moe_load_row(y + i * p->chunk_columns, b2, panel->expert * p->layer.hidden + column, columns,
                     p->layer.dtype);
}

static void down_panel(const moe_cpu_pass *pass, const smoe_forward_args *args, const moe_row_panel *panel,
                       int64_t first_column)
{
    const moe_problem *p = pass->problem;
    const int64_t n = p->layer.intermediate, d = p->layer.hidden;
    const int64_t end = moe_min(first_column + p->chunk_columns, d);
    const moe_cpu_panels at = moe_cpu_panels_of(pass);
    load_a(pass, panel, &at);
    if (p->layer.lora_rank2) moe_cpu_lora_p2(pass, args, panel, &at);
    for (int64_t column = first_column; column < end; column += MOE_PANEL_COLUMNS) {
        const int64_t columns = moe_min(MOE_PANEL_COLUMNS, end - column);
        float *y = pass->chunk + panel->row * p->chunk_columns + (column - first_column);
        int64_t ld;
        const float *w2 = moe_cpu_w2(pass, args->w2, panel->expert, column, columns, 0, n, at.weights, &ld);
        if (args->b2) spread_bias(pass, panel, args->b2, column, columns, y);
        moe_sgemm(0, 1, panel->count, columns, n, at.gathered, n, w2, ld, args->b2 ? 1.0f : 0.0f, y,
                  p->chunk_columns);
        if (p->layer.lora_rank2) moe_cpu_lora_down(pass, args, panel, column, columns, &at, y);
    }
}

void moe_cpu_down(const moe_cpu_pass *pass, const smoe_forward_args *args, int64_t first_column)
{
    moe_stage_begin(pass->context, SMOE_STAGE_DOWN, pass->stream);
    const int64_t blocks = moe_block_count(pass);
#pragma omp parallel for schedule(dynamic) num_threads(pass->context->threads)
    for (int64_t block = 0; block < blocks; block++) {
        moe_row_panel panel;
        if (moe_row_panel_at(pass, block, &panel)) down_panel(pass, args, &panel, first_column);
    }
    moe_stage_end(pass->context, SMOE_STAGE_DOWN, pass->stream);
}
