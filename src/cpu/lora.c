/* LoRA: the products of small rank beside up, down, dh and dx_rows, and the gradients of the factors.
 *
 *   P1 = X A1^T, H += P1 B1^T              P2 = A A2^T, Y += P2 B2^T
 *   Q2 = dO B2, dA' += Q2 A2               Q1 = dH B1, dX~ += Q1 A1
 *   dB2 = dO^T s P2, dA2 = Q2^T A'         dB1 = dH^T P1, dA1 = Q1^T X
 *
 * P1 and P2 are rounded to dtype, as they are saved; Q1 and Q2 are f32 in scratch. A work item of the
 * gradients is an expert, whose panels are summed in ascending order in f32. */
#include "activation.h"
#include "blas.h"
#include "convert.h"
#include "experts.h"

#include <string.h>

/* The expert's part of a factor (E, rows, columns) in f32, rows `first` to `first` + `count`. */
static const float *factor_of(const moe_cpu_pass *pass, const moe_cpu_panels *at, const void *factor,
                              int64_t expert, int64_t rows, int64_t columns, int64_t first, int64_t count)
{
    int64_t ld; /* = columns */
    return moe_weights_f32(at->factor, factor, (expert * rows + first) * columns, count, columns, columns,
                           pass->problem->layer.dtype, &ld);
}

/* at->low (count, rank) = rows (count, width) A^T, rounded; stored at `keep` if a backward follows. */
static void reduce(const moe_cpu_pass *pass, const moe_row_panel *panel, const void *a, int64_t rank,
                   int64_t width, void *keep, const moe_cpu_panels *at)
{
    const smoe_layer *layer = &pass->problem->layer;
    const float *factor = factor_of(pass, at, a, panel->expert, rank, width, 0, rank);
    moe_sgemm(0, 1, panel->count, rank, width, at->gathered, width, factor, width, 0.0f, at->low, rank);
    moe_round_row(at->low, panel->count * rank, layer->dtype);
    if (!layer->inference) moe_store_row(keep, panel->row * rank, at->low, panel->count * rank, layer->dtype);
}

void moe_cpu_lora_up(const moe_cpu_pass *pass, const smoe_forward_args *args, const moe_row_panel *panel,
                     const moe_cpu_panels *at)
{
    const moe_problem *p = pass->problem;
    const int64_t rank = p->layer.lora_rank1, width = p->h_width;
    reduce(pass, panel, args->lora_a1, rank, p->layer.hidden, pass->plan->p1, at);
    const float *b1 = factor_of(pass, at, args->lora_b1, panel->expert, width, rank, 0, width);
    moe_sgemm(0, 1, panel->count, width, rank, at->low, rank, b1, rank, 1.0f, at->product, width);
}

void moe_cpu_lora_p2(const moe_cpu_pass *pass, const smoe_forward_args *args, const moe_row_panel *panel,
                     const moe_cpu_panels *at)
{
    const smoe_layer *layer = &pass->problem->layer;
    reduce(pass, panel, args->lora_a2, layer->lora_rank2, layer->intermediate, pass->plan->p2, at);
}

void moe_cpu_lora_down(const moe_cpu_pass *pass, const smoe_forward_args *args, const moe_row_panel *panel,
                       int64_t column, int64_t columns, const moe_cpu_panels *at, float *y)
{
    const moe_problem *p = pass->problem;
    const int64_t rank = p->layer.lora_rank2;
    const float *b2 =
        factor_of(pass, at, args->lora_b2, panel->expert, p->layer.hidden, rank, column, columns);
    moe_sgemm(0, 1, panel->count, columns, rank, at->low, rank, b2, rank, 1.0f, y, p->chunk_columns);
}

void moe_cpu_lora_dh(const moe_cpu_pass *pass, const smoe_backward_args *args, const moe_row_panel *panel,
                     const moe_cpu_panels *at)
{
    const smoe_layer *layer = &pass->problem->layer;
    const int64_t rank = layer->lora_rank2, n = layer->intermediate;
    const float *a2 = factor_of(pass, at, args->lora_a2, panel->expert, rank, n, 0, rank);
    moe_sgemm(0, 0, panel->count, n, rank, pass->q2 + panel->row * rank, rank, a2, n, 1.0f, at->product, n);
}

void moe_cpu_lora_dx(const moe_cpu_pass *pass, const smoe_backward_args *args, const moe_row_panel *panel,
                     int64_t column, int64_t columns, const moe_cpu_panels *at, float *dx)
{
    const moe_problem *p = pass->problem;
    const int64_t rank = p->layer.lora_rank1, d = p->layer.hidden;
    int64_t ld;
    const float *a1 = moe_weights_f32(at->factor, args->lora_a1, panel->expert * rank * d + column, rank, d,
                                      columns, p->layer.dtype, &ld);
    moe_sgemm(0, 0, panel->count, columns, rank, pass->q1 + panel->row * rank, rank, a1, ld, 1.0f, dx,
              p->chunk_columns);
}

/* ---- Gradients of the factors ---- */

/* With accumulate, an expert without rows keeps the old values. */
static void give(const moe_cpu_pass *pass, void *gradient, int64_t expert, int64_t elements, const float *sum)
{
    const smoe_layer *layer = &pass->problem->layer;
    if (!gradient) return;
    if (!layer->accumulate)
        moe_store_row(gradient, expert * elements, sum, elements, layer->gradient_type);
    else if (pass->plan->counts[expert] > 0)
        moe_add_row(gradient, expert * elements, sum, elements, layer->gradient_type);
}

/* at->low = s P2 */
static void load_scaled_p2(const moe_cpu_pass *pass, const moe_row_panel *panel, const moe_cpu_panels *at)
{
    const smoe_layer *layer = &pass->problem->layer;
    const int64_t rank = layer->lora_rank2;
    moe_load_row(at->low, pass->plan->p2, panel->row * rank, panel->count * rank, layer->dtype);
    for (int64_t i = 0; i < panel->count; i++)
        for (int64_t j = 0; j < rank; j++) at->low[i * rank + j] *= pass->plan->row_weight[panel->row + i];
}

/* at->product (count, n) = A' */
static void load_scaled_a(const moe_cpu_pass *pass, const moe_row_panel *panel, const moe_cpu_panels *at)
{
    const moe_problem *p = pass->problem;
    const int64_t n = p->layer.intermediate;
    for (int64_t i = 0; i < panel->count; i++) {
        float *a = at->product + i * n;
        moe_load_row(at->row, moe_h_of_row(pass, panel->row + i), 0, p->h_width, p->layer.dtype);
        moe_activate(&p->layer, n, at->row, a);
        for (int64_t j = 0; j < n; j++) a[j] *= pass->plan->row_weight[panel->row + i];
    }
}

static void lora2_expert(const moe_cpu_pass *pass, const smoe_backward_args *args, int64_t expert)
{
    const smoe_layer *layer = &pass->problem->layer;
    const int64_t rank = layer->lora_rank2, n = layer->intermediate, d = layer->hidden;
    const moe_cpu_panels at = moe_cpu_panels_of(pass);
    float *da2 = at.factors, *db2 = da2 + rank * n;
    memset(at.factors, 0, (size_t)(rank * (n + d)) * sizeof *at.factors);
    moe_row_panel panel;
    for (int more = moe_first_row_panel(pass, expert, &panel); more;
         more = moe_next_row_panel(pass, &panel)) {
        float *q2 = pass->q2 + panel.row * rank;
        moe_gather_tokens(pass, &panel, args->dout, 0, d, at.gathered);
        const float *b2 = factor_of(pass, &at, args->lora_b2, expert, d, rank, 0, d);
        moe_sgemm(0, 0, panel.count, rank, d, at.gathered, d, b2, rank, 0.0f, q2, rank);
        if (args->dlora_b2) {
            load_scaled_p2(pass, &panel, &at);
            moe_sgemm(1, 0, d, rank, panel.count, at.gathered, d, at.low, rank, 1.0f, db2, rank);
        }
        if (!args->dlora_a2) continue;
        load_scaled_a(pass, &panel, &at);
        moe_sgemm(1, 0, rank, n, panel.count, q2, rank, at.product, n, 1.0f, da2, n);
    }
    give(pass, args->dlora_a2, expert, rank * n, da2);
    give(pass, args->dlora_b2, expert, rank * d, db2);
}

static void lora1_expert(const moe_cpu_pass *pass, const smoe_backward_args *args, int64_t expert)
{
    const moe_problem *p = pass->problem;
    const int64_t rank = p->layer.lora_rank1, width = p->h_width, d = p->layer.hidden;
    const moe_cpu_panels at = moe_cpu_panels_of(pass);
    float *da1 = at.factors, *db1 = da1 + rank * d;
    memset(at.factors, 0, (size_t)(rank * (width + d)) * sizeof *at.factors);
    moe_row_panel panel;
    for (int more = moe_first_row_panel(pass, expert, &panel); more;
         more = moe_next_row_panel(pass, &panel)) {
        float *q1 = pass->q1 + panel.row * rank;
        moe_load_row(at.gathered, pass->dh, panel.row * width, panel.count * width, p->layer.dtype);
        if (args->dx || args->dlora_a1) {
            const float *b1 = factor_of(pass, &at, args->lora_b1, expert, width, rank, 0, width);
            moe_sgemm(0, 0, panel.count, rank, width, at.gathered, width, b1, rank, 0.0f, q1, rank);
        }
        if (args->dlora_b1) {
            moe_load_row(at.low, pass->plan->p1, panel.row * rank, panel.count * rank, p->layer.dtype);
            moe_sgemm(1, 0, width, rank, panel.count, at.gathered, width, at.low, rank, 1.0f, db1, rank);
        }
        if (!args->dlora_a1) continue;
        moe_gather_tokens(pass, &panel, args->x, 0, d, at.gathered);
        moe_sgemm(1, 0, rank, d, panel.count, q1, rank, at.gathered, d, 1.0f, da1, d);
    }
    give(pass, args->dlora_a1, expert, rank * d, da1);
    give(pass, args->dlora_b1, expert, rank * width, db1);
}

typedef void (*expert_function)(const moe_cpu_pass *pass, const smoe_backward_args *args, int64_t expert);

static void each_expert(const moe_cpu_pass *pass, const smoe_backward_args *args, smoe_stage stage,
                        expert_function run)
{
    moe_stage_begin(pass->context, stage, pass->stream);
    const int64_t experts = pass->problem->layer.experts;
#pragma omp parallel for schedule(dynamic) num_threads(pass->context->threads)
    for (int64_t i = 0; i < experts; i++) run(pass, args, pass->plan->order[i]);
    moe_stage_end(pass->context, stage, pass->stream);
}

void moe_cpu_lora2(const moe_cpu_pass *pass, const smoe_backward_args *args)
{
    each_expert(pass, args, SMOE_STAGE_DH, lora2_expert);
}

void moe_cpu_lora1(const moe_cpu_pass *pass, const smoe_backward_args *args)
{
    each_expert(pass, args, SMOE_STAGE_DW1, lora1_expert);
}
