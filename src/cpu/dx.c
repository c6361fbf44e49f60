/* dx_rows: dX~[r] = dH[r] W1[e] for the columns of one chunk, f32 in scratch (padded_rows, chunk_columns);
 * dx: dX[t] = dlogits[t] Wr (when the router's term is asked for) + sum over the rows r of t of dX~[r], rows
 *     ascending, in f32, rounded once to dtype. A token without rows gets the router's term, or zeros.
 *
 * Both work on fixed panels of 256 rows or tokens and 64 columns. */
#include "blas.h"
#include "convert.h"
#include "ep_cpu.h"

#include <string.h>

/* One panel of columns: a sum over the columns of H. It is one product if the gate and up rows of W1 are
 * concatenated, and two if they are interleaved. */
static void multiply(const moe_cpu_pass *pass, const void *w1, const moe_row_panel *panel, int64_t column,
                     int64_t columns, float *dx, const moe_cpu_panels *at)
{
    const moe_problem *p = pass->problem;
    for (int64_t j = 0, next; j < p->h_width; j = next) {
        next = moe_w1_run_end(p, j);
        int64_t ld;
        const float *w = moe_cpu_w1(pass, w1, panel->expert, j, next - j, column, columns, at->weights, &ld);
        moe_sgemm(0, 0, panel->count, columns, next - j, at->gathered + j, p->h_width, w, ld,
                  j > 0 ? 1.0f : 0.0f, dx, p->chunk_columns);
    }
}

static void dx_rows_panel(const moe_cpu_pass *pass, const smoe_backward_args *args,
                          const moe_row_panel *panel, int64_t first_column)
{
    const moe_problem *p = pass->problem;
    const int64_t end = moe_min(first_column + p->chunk_columns, p->layer.hidden);
    const moe_cpu_panels at = moe_cpu_panels_of(pass);
    if (moe_cpu_is_f8(pass))
        moe_cpu_f8_load_dh(pass, panel, 0, p->h_width, pass->f8.weights.scale1[panel->expert], at.gathered);
    else
        moe_load_row(at.gathered, pass->dh, panel->row * p->h_width, panel->count * p->h_width,
                     p->layer.dtype);
    for (int64_t column = first_column; column < end; column += MOE_PANEL_COLUMNS) {
        float *dx = pass->chunk + panel->row * p->chunk_columns + (column - first_column);
        const int64_t columns = moe_min(MOE_PANEL_COLUMNS, end - column);
        multiply(pass, args->w1, panel, column, columns, dx, &at);
        if (p->layer.lora_rank1) moe_cpu_lora_dx(pass, args, panel, column, columns, &at, dx);
    }
}

void moe_cpu_dx_rows(const moe_cpu_pass *pass, const smoe_backward_args *args, int64_t first_column)
{
    moe_stage_begin(pass->context, SMOE_STAGE_DX_ROWS, pass->stream);
    const int64_t blocks = moe_block_count(pass);
#pragma omp parallel for schedule(dynamic) num_threads(pass->context->threads)
    for (int64_t block = 0; block < blocks; block++) {
        moe_row_panel panel;
        if (moe_row_panel_at(pass, block, &panel)) dx_rows_panel(pass, args, &panel, first_column);
    }
    moe_stage_end(pass->context, SMOE_STAGE_DX_ROWS, pass->stream);
}

/* The router's term of `count` tokens: sums (count, columns) = dlogits Wr, for the chunk's columns. */
static void multiply_router(const moe_cpu_pass *pass, const void *router_weight, int64_t token, int64_t count,
                            int64_t first_column, int64_t columns, const moe_cpu_panels *at, float *sums)
{
    const smoe_layer *layer = &pass->problem->layer;
    const int64_t experts = layer->experts;
    for (int64_t i = 0; i < columns; i += MOE_PANEL_COLUMNS) {
        const int64_t width = moe_min(MOE_PANEL_COLUMNS, columns - i);
        int64_t ld;
        const float *wr = moe_weights_f32(at->weights, router_weight, first_column + i, experts,
                                          layer->hidden, width, layer->dtype, &ld);
        moe_sgemm(0, 0, count, width, experts, pass->dlogits + token * experts, experts, wr, ld, 0.0f,
                  sums + i, columns);
    }
}

/* sum (columns) += the token's rows of dX~ */
static void add_rows(const moe_cpu_pass *pass, int64_t token, int64_t columns, float *restrict sum)
{
    const moe_plan_arrays *plan = pass->plan;
    for (int64_t i = plan->token_offsets[token]; i < plan->token_offsets[token + 1]; i++) {
        const float *restrict dx = pass->chunk + plan->token_rows[i] * pass->problem->chunk_columns;
        for (int64_t j = 0; j < columns; j++) sum[j] += dx[j];
    }
}

void moe_cpu_dx_token(const moe_cpu_pass *pass, int64_t token, int64_t columns, float *sum)
{
    memset(sum, 0, (size_t)columns * sizeof *sum);
    add_rows(pass, token, columns, sum);
}

/* The chunk's columns of tokens [token, token + count). */
static void dx_panel(const moe_cpu_pass *pass, const smoe_backward_args *args, int router_term, int64_t token,
                     int64_t count, int64_t first_column)
{
    const smoe_layer *layer = &pass->problem->layer;
    const int64_t columns = moe_min(pass->problem->chunk_columns, layer->hidden - first_column);
    const moe_cpu_panels at = moe_cpu_panels_of(pass);
    float *sums = at.gathered;
    if (router_term)
        multiply_router(pass, args->router_weight, token, count, first_column, columns, &at, sums);
    for (int64_t i = 0; i < count; i++) {
        float *sum = router_term ? sums + i * columns : at.row;
        if (!router_term) memset(sum, 0, (size_t)columns * sizeof *sum);
        if (pass->ep)
            moe_cpu_ep_add_sums(pass->ep, pass, token + i, first_column, columns, sum, at.row + columns);
        else
            add_rows(pass, token + i, columns, sum);
        moe_store_row(args->dx, (token + i) * layer->hidden + first_column, sum, columns, layer->dtype);
    }
}

void moe_cpu_dx(const moe_cpu_pass *pass, const smoe_backward_args *args, int router_term,
                int64_t first_column)
{
    const smoe_layer *layer = &pass->problem->layer;
    moe_stage_begin(pass->context, SMOE_STAGE_DX, pass->stream);
#pragma omp parallel for schedule(static, 1) num_threads(pass->context->threads)
    for (int64_t token = 0; token < layer->tokens; token += MOE_PANEL_ROWS)
        dx_panel(pass, args, router_term, token, moe_min(MOE_PANEL_ROWS, layer->tokens - token),
                 first_column);
    moe_stage_end(pass->context, SMOE_STAGE_DX, pass->stream);
}
