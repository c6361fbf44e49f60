/* dw2: dW2[e] = sum_r dO[t(r)]^T A'[r], db2[e] = sum_r s[r] dO[t(r)], with A'[r] = s[r] act(H[r]) recomputed,
 * so that A' is never stored; dw1: dW1[e] = sum_r dH[r]^T X[t(r)],  db1[e] = sum_r dH[r].
 *
 * With SMOE_COMPUTE_F8 both read what dh has stored for them (f8_dw.c), db1 the quantised dH, db2 dO as
 * given.
 *
 * A work item is a tile of one expert's matrix, at most 512 of d by 256 features. It is summed over the
 * expert's row panels in ascending order in f32. With accumulate the old value is then added. The sum is
 * rounded once, to gradient_type. Experts are processed by descending count. An expert without rows gets
 * zeros. The gradient of a matrix or of its bias is NULL if it is not wanted. */
#include "activation.h"
#include "blas.h"
#include "convert.h"
#include "experts.h"

#include <string.h>

/* A tile: columns [hidden, hidden + hiddens) of d, and columns [feature, feature + features) of A' (for dW2)
 * or of dH (for dW1). */
typedef struct tile {
    int64_t expert;
    int64_t hidden, hiddens;
    int64_t feature, features;
} tile;

/* Cuts [0, total) into equal parts of at most `limit`. Every part but the last is a multiple of 64. */
static int64_t part_width(int64_t total, int64_t limit)
{
    const int64_t parts = (total + limit - 1) / limit;
    return ((total + parts - 1) / parts + 63) / 64 * 64;
}

static int64_t part_count(int64_t total, int64_t limit)
{
    const int64_t width = part_width(total, limit);
    return (total + width - 1) / width;
}

static int64_t tiles_of_expert(const moe_problem *p, int64_t features)
{
    return part_count(p->layer.hidden, MOE_TILE_HIDDEN) * part_count(features, MOE_PANEL_FEATURES);
}

/* Tile number `index` of all tiles, with the experts by descending count. `features` is n for dW2 and h_width
 * for dW1. */
static tile tile_at(const moe_cpu_pass *pass, int64_t features, int64_t tiles_each, int64_t index)
{
    const int64_t d = pass->problem->layer.hidden, inside = index % tiles_each;
    const int64_t hidden_parts = part_count(d, MOE_TILE_HIDDEN);
    const int64_t hidden_width = part_width(d, MOE_TILE_HIDDEN);
    const int64_t feature_width = part_width(features, MOE_PANEL_FEATURES);
    tile t;
    t.expert = pass->plan->order[index / tiles_each];
    t.hidden = inside % hidden_parts * hidden_width;
    t.hiddens = moe_min(hidden_width, d - t.hidden);
    t.feature = inside / hidden_parts * feature_width;
    t.features = moe_min(feature_width, features - t.feature);
    return t;
}

/* to[first + i] = from[i], or += with accumulate */
static void give_row(const moe_problem *p, void *to, int64_t first, const float *from, int64_t count)
{
    if (p->layer.accumulate)
        moe_add_row(to, first, from, count, p->layer.gradient_type);
    else
        moe_store_row(to, first, from, count, p->layer.gradient_type);
}

/* sum (columns) += the column sums of values (count, columns). With weights, each row is multiplied by its
 * weight. Each panel is first summed by itself, because long sums lose more bits. */
static void add_column_sums(float *restrict sum, float *restrict panel_sum, const float *values,
                            int64_t count, int64_t columns, const float *weights)
{
    memset(panel_sum, 0, (size_t)columns * sizeof *panel_sum);
    for (int64_t i = 0; i < count; i++) {
        const float *restrict row = values + i * columns;
        const float weight = weights ? weights[i] : 1.0f;
        for (int64_t j = 0; j < columns; j++) panel_sum[j] += weight * row[j];
    }
    for (int64_t j = 0; j < columns; j++) sum[j] += panel_sum[j];
}

/* at->product (count, features) = A' of the tile's features */
static void load_scaled_a(const moe_cpu_pass *pass, const moe_row_panel *panel, const tile *t,
                          const moe_cpu_panels *at)
{
    const moe_problem *p = pass->problem;
    const int64_t n = p->layer.intermediate;
    float *h = at->row;
    for (int64_t i = 0; i < panel->count; i++) {
        const void *kept = moe_h_of_row(pass, panel->row + i);
        float *a = at->product + i * t->features;
        moe_load_row(h, kept, t->feature, t->features, p->layer.dtype);
        if (p->gated) moe_load_row(h + t->features, kept, t->feature + n, t->features, p->layer.dtype);
        moe_activate(&p->layer, t->features, h, a);
        const float weight = pass->plan->row_weight[panel->row + i];
        for (int64_t j = 0; j < t->features; j++) a[j] *= weight;
    }
}

static moe_cpu_f8_tile f8_tile(int which, const tile *t)
{
    return (moe_cpu_f8_tile){which, t->expert, t->hidden, t->hiddens, t->feature, t->features};
}

static void dw2_tile(const moe_cpu_pass *pass, const smoe_backward_args *args, const tile *t)
{
    const moe_problem *p = pass->problem;
    const int64_t n = p->layer.intermediate, d = p->layer.hidden;
    const moe_cpu_panels at = moe_cpu_panels_of(pass);
    const moe_cpu_f8_tile f8 = f8_tile(MOE_F8_OF_DW2, t);
    const int with_matrix = args->dw2 != NULL, with_bias = args->db2 && t->feature == 0;
    if (!with_matrix && !with_bias) return;
    float *bias = at.row + 2 * moe_max(p->h_width, d);
    memset(at.tile, 0, (size_t)(t->hiddens * t->features) * sizeof *at.tile);
    memset(bias, 0, (size_t)t->hiddens * sizeof *bias);
    moe_row_panel panel;
    for (int more = moe_first_row_panel(pass, t->expert, &panel); more;
         more = moe_next_row_panel(pass, &panel)) {
        if (with_matrix && moe_cpu_dw_is_f8(pass)) moe_cpu_f8_add_to_tile(pass, &panel, &f8, &at);
        if (with_bias || !moe_cpu_dw_is_f8(pass))
            moe_gather_tokens(pass, &panel, args->dout, t->hidden, t->hiddens, at.gathered);
        if (with_matrix && !moe_cpu_dw_is_f8(pass)) {
            load_scaled_a(pass, &panel, t, &at);
            moe_sgemm(1, 0, t->hiddens, t->features, panel.count, at.gathered, t->hiddens, at.product,
                      t->features, 1.0f, at.tile, t->features);
        }
        if (with_bias)
            add_column_sums(bias, at.row, at.gathered, panel.count, t->hiddens,
                            pass->plan->row_weight + panel.row);
    }
    if (with_matrix && moe_cpu_dw_is_f8(pass)) moe_cpu_f8_scale_tile(pass, &f8, at.tile);
    for (int64_t i = 0; i < t->hiddens && with_matrix; i++)
        give_row(p, args->dw2, (t->expert * d + t->hidden + i) * n + t->feature, at.tile + i * t->features,
                 t->features);
    if (with_bias) give_row(p, args->db2, t->expert * d + t->hidden, bias, t->hiddens);
}

/* at->product (count, features) = the tile's columns of dH */
static void load_dh(const moe_cpu_pass *pass, const moe_row_panel *panel, const tile *t,
                    const moe_cpu_panels *at)
{
    const moe_problem *p = pass->problem;
    if (moe_cpu_dw_is_f8(pass)) {
        moe_cpu_f8_load_dh(pass, panel, t->feature, t->features, 1.0f, at->product);
        return;
    }
    for (int64_t i = 0; i < panel->count; i++)
        moe_load_row(at->product + i * t->features, pass->dh, (panel->row + i) * p->h_width + t->feature,
                     t->features, p->layer.dtype);
}

static void dw1_tile(const moe_cpu_pass *pass, const smoe_backward_args *args, const tile *t)
{
    const moe_problem *p = pass->problem;
    const int64_t d = p->layer.hidden;
    const moe_cpu_panels at = moe_cpu_panels_of(pass);
    const moe_cpu_f8_tile f8 = f8_tile(MOE_F8_OF_DW1, t);
    const int with_matrix = args->dw1 != NULL, with_bias = args->db1 && t->hidden == 0;
    if (!with_matrix && !with_bias) return;
    float *bias = at.row + 2 * moe_max(p->h_width, d);
    memset(at.tile, 0, (size_t)(t->hiddens * t->features) * sizeof *at.tile);
    memset(bias, 0, (size_t)t->features * sizeof *bias);
    moe_row_panel panel;
    for (int more = moe_first_row_panel(pass, t->expert, &panel); more;
         more = moe_next_row_panel(pass, &panel)) {
        if (with_matrix && moe_cpu_dw_is_f8(pass)) moe_cpu_f8_add_to_tile(pass, &panel, &f8, &at);
        load_dh(pass, &panel, t, &at);
        if (with_matrix && !moe_cpu_dw_is_f8(pass)) {
            moe_gather_tokens(pass, &panel, args->x, t->hidden, t->hiddens, at.gathered);
            moe_sgemm(1, 0, t->features, t->hiddens, panel.count, at.product, t->features, at.gathered,
                      t->hiddens, 1.0f, at.tile, t->hiddens);
        }
        if (with_bias) add_column_sums(bias, at.row, at.product, panel.count, t->features, NULL);
    }
    if (with_matrix && moe_cpu_dw_is_f8(pass)) moe_cpu_f8_scale_tile(pass, &f8, at.tile);
    for (int64_t j = 0; j < t->features; j++) {
        const int64_t w1_row = t->expert * p->h_width + moe_w1_row(p, t->feature + j);
        if (with_matrix) give_row(p, args->dw1, w1_row * d + t->hidden, at.tile + j * t->hiddens, t->hiddens);
        if (with_bias) give_row(p, args->db1, w1_row, bias + j, 1);
    }
}

typedef void (*tile_function)(const moe_cpu_pass *pass, const smoe_backward_args *args, const tile *t);

/* With accumulate, experts without rows stay as they are: adding zeros could turn a -0 there into a 0. */
static void each_tile(const moe_cpu_pass *pass, const smoe_backward_args *args, int64_t features,
                      tile_function run)
{
    const smoe_layer *layer = &pass->problem->layer;
    const int64_t tiles_each = tiles_of_expert(pass->problem, features), tiles = layer->experts * tiles_each;
#pragma omp parallel for schedule(dynamic) num_threads(pass->context->threads)
    for (int64_t index = 0; index < tiles; index++) {
        const tile t = tile_at(pass, features, tiles_each, index);
        if (!layer->accumulate || pass->plan->counts[t.expert] > 0) run(pass, args, &t);
    }
}

void moe_cpu_dw2(const moe_cpu_pass *pass, const smoe_backward_args *args)
{
    moe_stage_begin(pass->context, SMOE_STAGE_DW2, pass->stream);
    each_tile(pass, args, pass->problem->layer.intermediate, dw2_tile);
    moe_stage_end(pass->context, SMOE_STAGE_DW2, pass->stream);
}

void moe_cpu_dw1(const moe_cpu_pass *pass, const smoe_backward_args *args)
{
    moe_stage_begin(pass->context, SMOE_STAGE_DW1, pass->stream);
    each_tile(pass, args, pass->problem->h_width, dw1_tile);
    moe_stage_end(pass->context, SMOE_STAGE_DW1, pass->stream);
}
