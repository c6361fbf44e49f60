/* up: H[r] = X[t(r)] W1[e]^T + b1[e], with the rows sorted by expert, stored as dtype in saved. For inference
 * A[r] = act(H[r]) is stored as dtype in scratch instead. It is computed from H rounded to dtype, so that
 * inference gives the same output bits.
 *
 * With fp8 X and W1 are decoded from bytes, and A is quantised to scratch, for inference or not.
 *
 * A work item is a row panel: up to 256 rows of X are gathered (256, d) and multiplied by rows of W1, 256
 * columns of H at a time. */
#include "activation.h"
#include "blas.h"
#include "convert.h"
#include "experts.h"

/* row (h_width) = b1[e], in the order of H's columns */
static void load_bias(const moe_problem *p, const void *b1, int64_t expert, float *row)
{
    const int64_t first = expert * p->h_width;
    for (int64_t j = 0; j < p->h_width; j++)
        moe_load_row(row + j, b1, first + moe_w1_row(p, j), 1, p->layer.dtype);
}

/* Fills h (count, h_width) with the bias. The products are added to it later. */
static void spread_bias(const moe_cpu_pass *pass, const moe_row_panel *panel, const void *b1,
                        const moe_cpu_panels *at)
{
    const int64_t width = pass->problem->h_width;
    load_bias(pass->problem, b1, panel->expert, at->row);
    for (int64_t i = 0; i < panel->count; i++)
        moe_load_row(at->product + i * width, at->row, 0, width, SMOE_TYPE_F32);
}

static void multiply(const moe_cpu_pass *pass, const smoe_forward_args *args, const moe_row_panel *panel,
                     const moe_cpu_panels *at)
{
    const moe_problem *p = pass->problem;
    const int64_t d = p->layer.hidden;
    for (int64_t j = 0, next; j < p->h_width; j = next) {
        next = moe_min(j + MOE_PANEL_FEATURES, moe_w1_run_end(p, j));
        int64_t ld;
        const float *w1 = moe_cpu_w1(pass, args->w1, panel->expert, j, next - j, 0, d, at->weights, &ld);
        moe_sgemm(0, 1, panel->count, next - j, d, at->gathered, d, w1, ld, args->b1 ? 1.0f : 0.0f,
                  at->product + j, p->h_width);
    }
}

static void store_h(const moe_cpu_pass *pass, const moe_row_panel *panel, const float *h, int64_t first)
{
    const moe_problem *p = pass->problem;
    for (int64_t row = moe_max(first, panel->row); row < panel->row + panel->count; row++)
        moe_store_row(moe_h_of_row(pass, row), 0, h + (row - panel->row) * p->h_width, p->h_width,
                      p->layer.dtype);
}

static void store_a(const moe_cpu_pass *pass, const moe_row_panel *panel, const moe_cpu_panels *at)
{
    const moe_problem *p = pass->problem;
    const int64_t n = p->layer.intermediate;
    float *a = at->row;
    for (int64_t i = 0; i < panel->count; i++) {
        float *h = at->product + i * p->h_width;
        moe_round_row(h, p->h_width, p->layer.dtype);
        moe_activate(&p->layer, n, h, a);
        moe_store_row(pass->a, (panel->row + i) * n, a, n, p->layer.dtype);
    }
}

static void up_panel(const moe_cpu_pass *pass, const smoe_forward_args *args, const moe_row_panel *panel,
                     int64_t first)
{
    const moe_cpu_panels at = moe_cpu_panels_of(pass);
    if (moe_cpu_is_f8(pass))
        moe_cpu_f8_gather_x(pass, panel, at.gathered);
    else
        moe_gather_tokens(pass, panel, args->x, 0, pass->problem->layer.hidden, at.gathered);
    if (args->b1) spread_bias(pass, panel, args->b1, &at);
    multiply(pass, args, panel, &at);
    if (pass->problem->layer.lora_rank1) moe_cpu_lora_up(pass, args, panel, &at);
    const int inference = pass->problem->layer.inference;
    if (!inference) store_h(pass, panel, at.product, first);
    if (moe_cpu_is_f8(pass))
        moe_cpu_f8_store_a(pass, panel, at.product, at.row);
    else if (inference)
        store_a(pass, panel, &at);
}

/* A panel that begins before `first` is multiplied as a whole: the last bits of a product depend on how many
 * rows it has. */
void moe_cpu_up(const moe_cpu_pass *pass, const smoe_forward_args *args, int64_t first)
{
    moe_stage_begin(pass->context, SMOE_STAGE_UP, pass->stream);
    const int64_t blocks = moe_block_count(pass);
#pragma omp parallel for schedule(dynamic) num_threads(pass->context->threads)
    for (int64_t block = 0; block < blocks; block++) {
        moe_row_panel panel;
        if (moe_row_panel_at(pass, block, &panel) && panel.row + panel.count > first)
            up_panel(pass, args, &panel, first);
    }
    moe_stage_end(pass->context, SMOE_STAGE_UP, pass->stream);
}
