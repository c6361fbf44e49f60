/* What dw reads with SMOE_COMPUTE_F8: copies of dH and A' whose bytes make up for the scales of X and dO, so
 * that all rows of an expert have one exponent, or nearly all (f8.h). */
#include "blas.h"
#include "experts.h"

static int64_t groups_of(const moe_problem *p)
{
    return moe_f8_groups(p->layer.intermediate, MOE_F8_DH_FEATURES);
}

void moe_cpu_f8_expect(const moe_cpu_pass *pass)
{
    const moe_problem *p = pass->problem;
    const moe_cpu_f8 *f8 = &pass->f8;
    const int degree = moe_f8_degree(p);
    const int32_t of_size = moe_f8_expected_of_size(p);
    const int64_t groups = groups_of(p);
#pragma omp parallel for schedule(dynamic) num_threads(pass->context->threads)
    for (int64_t e = 0; e < p->layer.experts; e++) {
        const int64_t first = (int64_t)pass->plan->block_offsets[e] * MOE_BLOCK_ROWS;
        int32_t size = MOE_F8_NO_ROWS;
        for (int64_t row = first; row < first + pass->plan->counts[e]; row++) {
            const int32_t token = pass->plan->row_token[row];
            const int32_t of_row = moe_f8_row_size(f8->scale_x[token], f8->scale_dout[token],
                                                   pass->plan->row_weight[row], degree);
            size = of_row > size ? of_row : size;
        }
        for (int64_t g = e * groups; g < (e + 1) * groups; g++)
            for (int which = 0; which < 2; which++)
                f8->expected[which][g] = moe_f8_expected(size, f8->weights.group1[g], f8->weights.group2[g],
                                                         degree, of_size, which == MOE_F8_OF_DW1);
    }
}

void moe_cpu_f8_find_largest(const moe_cpu_pass *pass)
{
    const int64_t groups = groups_of(pass->problem);
    const moe_cpu_f8 *f8 = &pass->f8;
    for (int which = 0; which < 2; which++)
        for (int64_t e = 0; f8->rows[which] && e < pass->problem->layer.experts; e++)
            for (int64_t g = 0; g < groups; g++) {
                const int64_t first = (int64_t)pass->plan->block_offsets[e] * MOE_BLOCK_ROWS;
                int32_t largest = f8->expected[which][e * groups + g];
                for (int64_t row = first; row < first + pass->plan->counts[e]; row++) {
                    const int32_t w = f8->exponent[which][row * groups + g];
                    largest = w > largest ? w : largest;
                }
                f8->largest[which][e * groups + g] = largest;
            }
}

void moe_cpu_f8_store_row(const moe_cpu_pass *pass, int which, int64_t row, int64_t expert,
                          const float *values)
{
    const moe_problem *p = pass->problem;
    const moe_cpu_f8 *f8 = &pass->f8;
    const int64_t n = p->layer.intermediate, groups = groups_of(p);
    const int64_t halves = which == MOE_F8_OF_DW1 && p->gated ? 2 : 1;
    const int32_t token = pass->plan->row_token[row];
    const float token_scale = which == MOE_F8_OF_DW1 ? f8->scale_x[token] : f8->scale_dout[token];
    uint8_t *to = f8->rows[which] + row * halves * n;
    for (int64_t g = 0, j = 0; g < groups; g++, j += MOE_F8_DH_FEATURES) {
        const int64_t count = moe_min(MOE_F8_DH_FEATURES, n - j);
        uint32_t amax = 0;
        for (int64_t half = 0; half < halves; half++)
            for (int64_t i = 0; i < count; i++) amax = moe_f8_amax(amax, values[half * n + j + i]);
        const int32_t w = moe_f8_row_exponent(f8->expected[which][expert * groups + g], amax, token_scale);
        const float factor = moe_f8_row_factor(w, amax, token_scale);
        f8->exponent[which][row * groups + g] = w;
        for (int64_t half = 0; half < halves; half++)
            for (int64_t i = 0; i < count; i++)
                to[half * n + j + i] = moe_f8_quantize(values[half * n + j + i], factor);
    }
}

/* at->gathered (count, hiddens) = the tokens' bytes of X or dO times 2^(w - C) of the group, decoded */
static void load_lefts(const moe_cpu_pass *pass, const moe_row_panel *panel, const moe_cpu_f8_tile *t,
                       int64_t group, const moe_cpu_panels *at)
{
    const moe_cpu_f8 *f8 = &pass->f8;
    const int64_t d = pass->problem->layer.hidden, groups = groups_of(pass->problem);
    const uint8_t *tokens = t->which == MOE_F8_OF_DW1 ? f8->x : f8->dout;
    const int32_t largest = f8->largest[t->which][t->expert * groups + group];
    for (int64_t i = 0; i < panel->count; i++) {
        const int64_t row = panel->row + i;
        const uint8_t *from = tokens + pass->plan->row_token[row] * d + t->hidden;
        const int32_t shift = f8->exponent[t->which][row * groups + group] - largest;
        for (int64_t j = 0; j < t->hiddens; j++)
            at->gathered[i * t->hiddens + j] = moe_f8_value(moe_f8_shifted(from[j], shift));
    }
}

/* at->product (count, features) = the tile's columns of the copy, decoded */
static void load_rights(const moe_cpu_pass *pass, const moe_row_panel *panel, const moe_cpu_f8_tile *t,
                        const moe_cpu_panels *at)
{
    const moe_problem *p = pass->problem;
    const int64_t width = t->which == MOE_F8_OF_DW1 ? p->h_width : p->layer.intermediate;
    for (int64_t i = 0; i < panel->count; i++) {
        const uint8_t *from = pass->f8.rows[t->which] + (panel->row + i) * width + t->feature;
        for (int64_t j = 0; j < t->features; j++) at->product[i * t->features + j] = moe_f8_value(from[j]);
    }
}

/* Of a column of dH or A', and where in the tile the next group or half begins. */
static int64_t group_of(const moe_problem *p, int64_t column)
{
    return column % p->layer.intermediate / MOE_F8_DH_FEATURES;
}

static int64_t next_group(const moe_problem *p, const moe_cpu_f8_tile *t, int64_t j)
{
    const int64_t n = p->layer.intermediate, inside = (t->feature + j) % n;
    const int64_t left = moe_min(MOE_F8_DH_FEATURES - inside % MOE_F8_DH_FEATURES, n - inside);
    return moe_min(j + left, t->features);
}

void moe_cpu_f8_add_to_tile(const moe_cpu_pass *pass, const moe_row_panel *panel, const moe_cpu_f8_tile *t,
                            const moe_cpu_panels *at)
{
    const moe_problem *p = pass->problem;
    load_rights(pass, panel, t, at);
    for (int64_t j = 0, next; j < t->features; j = next) {
        next = next_group(p, t, j);
        load_lefts(pass, panel, t, group_of(p, t->feature + j), at);
        if (t->which == MOE_F8_OF_DW1)
            moe_sgemm(1, 0, next - j, t->hiddens, panel->count, at->product + j, t->features, at->gathered,
                      t->hiddens, 1.0f, at->tile + j * t->hiddens, t->hiddens);
        else
            moe_sgemm(1, 0, t->hiddens, next - j, panel->count, at->gathered, t->hiddens, at->product + j,
                      t->features, 1.0f, at->tile + j, t->features);
    }
}

void moe_cpu_f8_scale_tile(const moe_cpu_pass *pass, const moe_cpu_f8_tile *t, float *tile)
{
    const moe_problem *p = pass->problem;
    const int64_t groups = groups_of(p);
    const int64_t of_feature = t->which == MOE_F8_OF_DW1 ? t->hiddens : 1;
    const int64_t of_hidden = t->which == MOE_F8_OF_DW1 ? 1 : t->features;
    for (int64_t j = 0; j < t->features; j++) {
        const int64_t group = group_of(p, t->feature + j);
        const float scale = moe_f8_power(pass->f8.largest[t->which][t->expert * groups + group]);
        for (int64_t i = 0; i < t->hiddens; i++) tile[j * of_feature + i * of_hidden] *= scale;
    }
}
