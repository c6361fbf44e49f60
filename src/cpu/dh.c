/* dh: dA'[r] = dO[t(r)] W2[e]; dS[r] = <dA'[r], A[r]> + <dO[t(r)], b2[e]>; dH[r] = dact(H[r], s[r] dA'[r]),
 * stored as dtype in scratch, or in H's place with reuse_saved. A is recomputed from the stored H. Pad rows
 * have dS 0.
 *
 * With fp8 dO and W2 are decoded from bytes (the term of b2 takes dO as given), and dH is quantised to
 * scratch. With SMOE_COMPUTE_F8 what dw reads is stored too, and dH not as dtype.
 *
 * A work item is a row panel: up to 256 rows of dO are gathered (256, d) and multiplied by W2[e], 256 of its
 * n columns at a time. */
#include "activation.h"
#include "blas.h"
#include "convert.h"
#include "experts.h"

#include <string.h>

static void multiply(const moe_cpu_pass *pass, const smoe_backward_args *args, const moe_row_panel *panel,
                     const moe_cpu_panels *at)
{
    const smoe_layer *layer = &pass->problem->layer;
    const int64_t n = layer->intermediate, d = layer->hidden;
    for (int64_t j = 0; j < n; j += MOE_PANEL_FEATURES) {
        const int64_t columns = moe_min(MOE_PANEL_FEATURES, n - j);
        int64_t ld;
        const float *w2 = moe_cpu_w2(pass, args->w2, panel->expert, 0, d, j, columns, at->weights, &ld);
        moe_sgemm(0, 0, panel->count, columns, d, at->gathered, d, w2, ld, 0.0f, at->product + j, n);
    }
}

/* dS[r] = <dO[t(r)], b2[e]>, the term of the bias */
static void start_ds(const moe_cpu_pass *pass, const void *b2, const moe_row_panel *panel,
                     const moe_cpu_panels *at)
{
    const smoe_layer *layer = &pass->problem->layer;
    if (b2) moe_load_row(at->row, b2, panel->expert * layer->hidden, layer->hidden, layer->dtype);
    for (int64_t i = 0; i < panel->count; i++)
        pass->ds[panel->row + i] =
            b2 ? moe_dot(layer->hidden, at->gathered + i * layer->hidden, at->row) : 0.0f;
}

static void activate_row(const moe_cpu_pass *pass, int64_t expert, int64_t row, const float *da,
                         const moe_cpu_panels *at)
{
    const moe_problem *p = pass->problem;
    const int64_t n = p->layer.intermediate, first = row * p->h_width;
    float *h = at->row, *dh = h + p->h_width, *a = dh + p->h_width;
    moe_load_row(h, moe_h_of_row(pass, row), 0, p->h_width, p->layer.dtype);
    moe_activate_backward(&p->layer, n, h, da, pass->plan->row_weight[row], a, dh);
    pass->ds[row] += moe_dot(n, da, a);
    if (!moe_cpu_dw_is_f8(pass)) moe_store_row(pass->dh, first, dh, p->h_width, p->layer.dtype);
    if (moe_cpu_is_f8(pass)) moe_cpu_f8_store_dh(pass, row, dh);
    if (pass->f8.rows[MOE_F8_OF_DW1]) moe_cpu_f8_store_row(pass, MOE_F8_OF_DW1, row, expert, dh);
    if (!pass->f8.rows[MOE_F8_OF_DW2]) return;
    for (int64_t j = 0; j < n; j++) a[j] *= pass->plan->row_weight[row];
    moe_cpu_f8_store_row(pass, MOE_F8_OF_DW2, row, expert, a);
}

static void dh_panel(const moe_cpu_pass *pass, const smoe_backward_args *args, const moe_row_panel *panel)
{
    const smoe_layer *layer = &pass->problem->layer;
    const int64_t n = layer->intermediate;
    const moe_cpu_panels at = moe_cpu_panels_of(pass);
    if (moe_cpu_is_f8(pass))
        moe_cpu_f8_gather_dout(pass, panel, at.gathered);
    else
        moe_gather_tokens(pass, panel, args->dout, 0, layer->hidden, at.gathered);
    multiply(pass, args, panel, &at);
    if (layer->lora_rank2) moe_cpu_lora_dh(pass, args, panel, &at);
    if (moe_cpu_is_f8(pass) && args->b2)
        moe_gather_tokens(pass, panel, args->dout, 0, layer->hidden, at.gathered);
    start_ds(pass, args->b2, panel, &at);
    for (int64_t i = 0; i < panel->count; i++)
        activate_row(pass, panel->expert, panel->row + i, at.product + i * n, &at);
}

void moe_cpu_dh(const moe_cpu_pass *pass, const smoe_backward_args *args)
{
    moe_stage_begin(pass->context, SMOE_STAGE_DH, pass->stream);
    memset(pass->ds, 0, (size_t)pass->problem->padded_rows * sizeof *pass->ds);
    const int64_t blocks = moe_block_count(pass);
#pragma omp parallel for schedule(dynamic) num_threads(pass->context->threads)
    for (int64_t block = 0; block < blocks; block++) {
        moe_row_panel panel;
        if (moe_row_panel_at(pass, block, &panel)) dh_panel(pass, args, &panel);
    }
    moe_stage_end(pass->context, SMOE_STAGE_DH, pass->stream);
}
