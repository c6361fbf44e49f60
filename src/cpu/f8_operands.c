/* What is quantised for the products of rows: X, dO, A, dH. Shapes, scales and equations: f8.h. */
#include "activation.h"
#include "convert.h"
#include "experts.h"

/* Scratch, part by part, as in experts.c. */
static void *take(char *base, uint64_t *used, uint64_t bytes)
{
    void *part = base ? base + *used : NULL;
    *used += moe_align_up(bytes);
    return part;
}

uint64_t moe_cpu_f8_lay_out(moe_cpu_pass *pass, void *scratch, int backward)
{
    const moe_problem *p = pass->problem;
    const uint64_t tokens = (uint64_t)p->layer.tokens, d = (uint64_t)p->layer.hidden;
    const uint64_t n = (uint64_t)p->layer.intermediate, rows = (uint64_t)p->padded_rows;
    const uint64_t groups = (uint64_t)moe_f8_groups(p->layer.intermediate, MOE_F8_DH_FEATURES);
    const uint64_t width[] = {(uint64_t)p->h_width, n}, experts = (uint64_t)p->layer.experts;
    moe_cpu_f8 *f8 = &pass->f8;
    uint64_t used = 0;
    if (!backward || moe_cpu_dw_is_f8(pass)) {
        f8->x = take(scratch, &used, tokens * d);
        f8->scale_x = take(scratch, &used, tokens * sizeof(float));
    }
    if (!backward) {
        f8->a = take(scratch, &used, rows * n);
        f8->scale_a = take(scratch, &used,
                           rows * (uint64_t)moe_f8_groups((int64_t)n, MOE_F8_A_FEATURES) * sizeof(float));
        return used;
    }
    f8->dout = take(scratch, &used, tokens * d);
    f8->scale_dout = take(scratch, &used, tokens * sizeof(float));
    f8->dh = take(scratch, &used, rows * width[0]);
    f8->scale_dh = take(scratch, &used, rows * groups * sizeof(float));
    for (int which = 0; which < 2 && moe_cpu_dw_is_f8(pass); which++) {
        f8->rows[which] = take(scratch, &used, rows * width[which]);
        f8->exponent[which] = take(scratch, &used, rows * groups * sizeof(int32_t));
        f8->largest[which] = take(scratch, &used, experts * groups * sizeof(int32_t));
        f8->expected[which] = take(scratch, &used, experts * groups * sizeof(int32_t));
    }
    return used;
}

static uint32_t amax_of(uint32_t amax, const float *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++) amax = moe_f8_amax(amax, values[i]);
    return amax;
}

static void quantize(uint8_t *to, const float *values, int64_t count, uint32_t amax)
{
    const float factor = moe_f8_factor(amax);
    for (int64_t i = 0; i < count; i++) to[i] = moe_f8_quantize(values[i], factor);
}

static void decode(float *to, const uint8_t *bytes, int64_t count, float scale)
{
    for (int64_t i = 0; i < count; i++) to[i] = moe_f8_value(bytes[i]) * scale;
}

/* ---- Tokens ---- */

void moe_cpu_f8_quantize_tokens(const moe_cpu_pass *pass, const void *from, uint8_t *to, float *scales)
{
    const smoe_layer *layer = &pass->problem->layer;
    const int64_t d = layer->hidden;
#pragma omp parallel for schedule(static) num_threads(pass->context->threads)
    for (int64_t token = 0; token < layer->tokens; token++) {
        float *row = moe_cpu_panels_of(pass).row;
        moe_load_row(row, from, token * d, d, layer->dtype);
        const uint32_t amax = amax_of(0, row, d);
        scales[token] = moe_f8_scale(amax);
        quantize(to + token * d, row, d, amax);
    }
}

static void gather(const moe_cpu_pass *pass, const moe_row_panel *panel, const uint8_t *bytes,
                   const float *scales, float expert_scale, float *to)
{
    const int64_t d = pass->problem->layer.hidden;
    for (int64_t i = 0; i < panel->count; i++) {
        const int64_t token = pass->plan->row_token[panel->row + i];
        decode(to + i * d, bytes + token * d, d, scales[token] * expert_scale);
    }
}

void moe_cpu_f8_gather_x(const moe_cpu_pass *pass, const moe_row_panel *panel, float *to)
{
    const moe_cpu_f8 *f8 = &pass->f8;
    gather(pass, panel, f8->x, f8->scale_x, f8->weights.scale1[panel->expert], to);
}

void moe_cpu_f8_gather_dout(const moe_cpu_pass *pass, const moe_row_panel *panel, float *to)
{
    const moe_cpu_f8 *f8 = &pass->f8;
    gather(pass, panel, f8->dout, f8->scale_dout, f8->weights.scale2[panel->expert], to);
}

/* ---- A ---- */

void moe_cpu_f8_store_a(const moe_cpu_pass *pass, const moe_row_panel *panel, float *h, float *a)
{
    const moe_problem *p = pass->problem;
    const int64_t n = p->layer.intermediate, groups = moe_f8_groups(n, MOE_F8_A_FEATURES);
    for (int64_t i = 0; i < panel->count; i++) {
        const int64_t row = panel->row + i;
        moe_round_row(h + i * p->h_width, p->h_width, p->layer.dtype);
        moe_activate(&p->layer, n, h + i * p->h_width, a);
        for (int64_t g = 0, j = 0; g < groups; g++, j += MOE_F8_A_FEATURES) {
            const int64_t count = moe_min(MOE_F8_A_FEATURES, n - j);
            const uint32_t amax = amax_of(0, a + j, count);
            pass->f8.scale_a[row * groups + g] = moe_f8_scale(amax);
            quantize(pass->f8.a + row * n + j, a + j, count, amax);
        }
    }
}

void moe_cpu_f8_load_a(const moe_cpu_pass *pass, const moe_row_panel *panel, float *to)
{
    const int64_t n = pass->problem->layer.intermediate, groups = moe_f8_groups(n, MOE_F8_A_FEATURES);
    const float scale2 = pass->f8.weights.scale2[panel->expert];
    for (int64_t i = 0; i < panel->count; i++)
        for (int64_t g = 0, j = 0; g < groups; g++, j += MOE_F8_A_FEATURES) {
            const int64_t row = panel->row + i;
            decode(to + i * n + j, pass->f8.a + row * n + j, moe_min(MOE_F8_A_FEATURES, n - j),
                   pass->f8.scale_a[row * groups + g] * scale2);
        }
}

/* ---- dH: the gate and the up columns of 256 features have one scale ---- */

void moe_cpu_f8_store_dh(const moe_cpu_pass *pass, int64_t row, const float *dh)
{
    const moe_problem *p = pass->problem;
    const int64_t n = p->layer.intermediate, groups = moe_f8_groups(n, MOE_F8_DH_FEATURES);
    uint8_t *to = pass->f8.dh + row * p->h_width;
    for (int64_t g = 0, j = 0; g < groups; g++, j += MOE_F8_DH_FEATURES) {
        const int64_t count = moe_min(MOE_F8_DH_FEATURES, n - j);
        uint32_t amax = amax_of(0, dh + j, count);
        if (p->gated) amax = amax_of(amax, dh + n + j, count);
        pass->f8.scale_dh[row * groups + g] = moe_f8_scale(amax);
        quantize(to + j, dh + j, count, amax);
        if (p->gated) quantize(to + n + j, dh + n + j, count, amax);
    }
}

void moe_cpu_f8_load_dh(const moe_cpu_pass *pass, const moe_row_panel *panel, int64_t column, int64_t columns,
                        float factor, float *to)
{
    const moe_problem *p = pass->problem;
    const int64_t n = p->layer.intermediate, groups = moe_f8_groups(n, MOE_F8_DH_FEATURES);
    for (int64_t i = 0; i < panel->count; i++) {
        const uint8_t *from = pass->f8.dh + (panel->row + i) * p->h_width + column;
        const float *scales = pass->f8.scale_dh + (panel->row + i) * groups;
        for (int64_t j = 0; j < columns; j++)
            to[i * columns + j] =
                moe_f8_value(from[j]) * (scales[(column + j) % n / MOE_F8_DH_FEATURES] * factor);
    }
}
