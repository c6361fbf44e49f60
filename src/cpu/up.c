/* up: H[r] = X[t(r)] W1[e]^T + b1[e], rows by expert, to dtype in saved; for inference A[r] =
 * act(H[r]) to dtype in scratch instead, from the H that would have been stored, so that both ways
 * give the same output bits.
 *
 * A work item is a row panel: X's rows gathered (256, d), times W1's rows by panels of 256 features. */
#include "activation.h"
#include "blas.h"
#include "convert.h"
#include "experts.h"

/* row (h_width) = b1[e], in the order of H's columns */
static void load_bias(const smoe_problem *p, const void *b1, int64_t expert, float *row)
{
    const int64_t first = expert * p->h_width;
    for (int64_t j = 0; j < p->h_width; j++)
        smoe_load_row(row + j, b1, first + smoe_w1_row(p, j), 1, p->layer.dtype);
}

/* h (count, h_width) starts from the bias, which the products are then added to. */
static void spread_bias(const smoe_cpu_pass *pass, const smoe_row_panel *panel, const void *b1,
                        const smoe_cpu_panels *at)
{
    const int64_t width = pass->problem->h_width;
    load_bias(pass->problem, b1, panel->expert, at->row);
    for (int64_t i = 0; i < panel->count; i++)
        smoe_load_row(at->product + i * width, at->row, 0, width, SMOE_TYPE_F32);
}

static void multiply(const smoe_cpu_pass *pass, const smoe_forward_args *args, const smoe_row_panel *panel,
                     const smoe_cpu_panels *at)
{
    const smoe_problem *p = pass->problem;
    const int64_t d = p->layer.hidden, first_row = panel->expert * p->h_width;
    for (int64_t j = 0, next; j < p->h_width; j = next) {
        next = smoe_min(j + SMOE_PANEL_FEATURES, smoe_w1_run_end(p, j));
        int64_t ld;
        const float *w1 = smoe_weights_f32(at->weights, args->w1, (first_row + smoe_w1_row(p, j)) * d,
                                           next - j, smoe_w1_step(p) * d, d, p->layer.dtype, &ld);
        smoe_sgemm(0, 1, panel->count, next - j, d, at->gathered, d, w1, ld, args->b1 ? 1.0f : 0.0f,
                   at->product + j, p->h_width);
    }
}

static void store_h(const smoe_cpu_pass *pass, const smoe_row_panel *panel, const float *h)
{
    const smoe_problem *p = pass->problem;
    smoe_store_row(pass->plan->h, panel->row * p->h_width, h, panel->count * p->h_width, p->layer.dtype);
}

static void store_a(const smoe_cpu_pass *pass, const smoe_row_panel *panel, const smoe_cpu_panels *at)
{
    const smoe_problem *p = pass->problem;
    const int64_t n = p->layer.intermediate;
    float *a = at->row;
    for (int64_t i = 0; i < panel->count; i++) {
        float *h = at->product + i * p->h_width;
        smoe_round_row(h, p->h_width, p->layer.dtype);
        smoe_activate(p->layer.activation, n, h, a);
        smoe_store_row(pass->a, (panel->row + i) * n, a, n, p->layer.dtype);
    }
}

static void up_panel(const smoe_cpu_pass *pass, const smoe_forward_args *args, const smoe_row_panel *panel)
{
    const smoe_cpu_panels at = smoe_cpu_panels_of(pass);
    smoe_gather_tokens(pass, panel, args->x, 0, pass->problem->layer.hidden, at.gathered);
    if (args->b1) spread_bias(pass, panel, args->b1, &at);
    multiply(pass, args, panel, &at);
    if (pass->problem->layer.inference)
        store_a(pass, panel, &at);
    else
        store_h(pass, panel, at.product);
}

void smoe_cpu_up(const smoe_cpu_pass *pass, const smoe_forward_args *args)
{
    smoe_stage_begin(pass->context, SMOE_STAGE_UP, pass->stream);
    const int64_t blocks = smoe_block_count(pass);
#pragma omp parallel for schedule(dynamic) num_threads(pass->context->threads)
    for (int64_t block = 0; block < blocks; block++) {
        smoe_row_panel panel;
        if (smoe_row_panel_at(pass, block, &panel)) up_panel(pass, args, &panel);
    }
    smoe_stage_end(pass->context, SMOE_STAGE_UP, pass->stream);
}
