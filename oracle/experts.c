/* The experts forward: H, A, Y and the combined output, row by row. */
#include "oracle/number.h"
#include "oracle/oracle.h"

#include <stdlib.h>

int64_t oracle_h_width(const smoe_layer *layer)
{
    return oracle_gated(layer->activation) ? 2 * layer->intermediate : layer->intermediate;
}

int64_t oracle_w1_row(const smoe_layer *layer, int part, int64_t j)
{
    if (!oracle_gated(layer->activation)) return j;
    return layer->layout == SMOE_LAYOUT_INTERLEAVED ? 2 * j + part : part * layer->intermediate + j;
}

static double stored(const smoe_layer *layer, const oracle_input *input, double value)
{
    return input->round_stores ? oracle_round_to(value, layer->dtype) : value;
}

/* H[r] = X[t] W1[e]^T + b1[e] */
static void up(const smoe_layer *layer, const oracle_input *input, const oracle_forward *f, int64_t r)
{
    const int64_t hidden = layer->hidden, n = layer->intermediate, width = oracle_h_width(layer);
    const double *x = input->x + f->row_token[r] * hidden;
    for (int64_t column = 0; column < width; column++) {
        const int64_t row = f->row_expert[r] * width + oracle_w1_row(layer, (int)(column / n), column % n);
        double sum = input->b1 ? input->b1[row] : 0.0;
        for (int64_t i = 0; i < hidden; i++) sum += x[i] * input->w1[row * hidden + i];
        f->h[r * width + column] = stored(layer, input, sum);
    }
}

void oracle_experts(const smoe_layer *layer, const oracle_input *input, oracle_forward *f)
{
    if (input->compute != ORACLE_COMPUTE_STORAGE) {
        oracle_f8_experts(layer, input, f);
        return;
    }
    const int64_t hidden = layer->hidden, n = layer->intermediate, width = oracle_h_width(layer);
    const bool gated = oracle_gated(layer->activation);
    f->h = oracle_alloc((size_t)(f->rows * width), sizeof(double));
    f->a = oracle_alloc((size_t)(f->rows * n), sizeof(double));
    f->out = oracle_alloc((size_t)(layer->tokens * hidden), sizeof(double));
    double *y = oracle_alloc((size_t)(f->rows * hidden), sizeof *y);
#pragma omp parallel for schedule(dynamic, 8)
    for (int64_t r = 0; r < f->rows; r++) {
        const int64_t e = f->row_expert[r];
        up(layer, input, f, r);
        const double *h = f->h + r * width;
        double *a = f->a + r * n;
        for (int64_t j = 0; j < n; j++)
            a[j] = stored(layer, input, oracle_activate(layer, h[j], gated ? h[n + j] : 0.0));
        for (int64_t i = 0; i < hidden; i++) {
            const double *w2 = input->w2 + (e * hidden + i) * n;
            double sum = input->b2 ? input->b2[e * hidden + i] : 0.0;
            for (int64_t j = 0; j < n; j++) sum += a[j] * w2[j];
            y[r * hidden + i] = stored(layer, input, sum);
        }
    }
    for (int64_t r = 0; r < f->rows; r++)
        for (int64_t i = 0; i < hidden; i++)
            f->out[f->row_token[r] * hidden + i] += f->row_weight[r] * y[r * hidden + i];
    free(y);
    for (int64_t i = 0; i < layer->tokens * hidden; i++) f->out[i] = stored(layer, input, f->out[i]);
}

void oracle_forward_run(const smoe_layer *layer, const oracle_input *input, oracle_forward *forward)
{
    *forward = (oracle_forward){0};
    if (layer->entry == SMOE_ENTRY_FROM_LOGITS) {
        oracle_logits(layer, input, forward);
        oracle_route(layer, input, forward);
    }
    if (layer->entry != SMOE_ENTRY_FROM_ROWS) oracle_round(layer, input, forward);
    oracle_plan(layer, input, forward);
    oracle_experts(layer, input, forward);
}

void oracle_forward_free(oracle_forward *f)
{
    void *all[] = {
        f->logits,    f->probability, f->score,      f->topk_ids,   f->topk_weights,  f->topk_counts,
        f->pair,      f->pair_weight, f->counts,     f->offsets,    f->block_offsets, f->order,
        f->row_token, f->row_expert,  f->row_padded, f->row_weight, f->token_offsets, f->token_rows,
        f->h,         f->a,           f->out};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
    *f = (oracle_forward){0};
}
