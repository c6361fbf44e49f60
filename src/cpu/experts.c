/* The layout of the expert stages' scratch, how rows are cut into panels, and the functions that fill a
 * panel. */
#include "experts.h"

#include "convert.h"

#include <assert.h>
#include <omp.h>

static_assert(MOE_PANEL_ROWS % MOE_BLOCK_ROWS == 0, "a panel of rows starts at a block");
static_assert(MOE_BLOCK_ROWS % MOE_PANEL_COLUMNS == 0,
              "a chunk's columns, a multiple of 64, are whole panels");

enum { BLOCKS_A_PANEL = MOE_PANEL_ROWS / MOE_BLOCK_ROWS };

/* Scratch, part by part. */
typedef struct carver {
    char *base;
    uint64_t used;
} carver;

static void *carve(carver *at, uint64_t bytes)
{
    void *part = at->base ? at->base + at->used : NULL;
    at->used += moe_align_up(bytes);
    return part;
}

static float *carve_floats(carver *at, int64_t count)
{
    return carve(at, 4 * (uint64_t)count);
}

/* With ranks this rank's own rows are computed elsewhere. */
static int64_t rows_here(const moe_problem *p)
{
    return p->layer.ranks ? 0 : p->padded_rows;
}

static void *carve_past(const moe_problem *p, carver *at)
{
    return carve(
        at, p->layer.inference ? 0 : (uint64_t)((p->padded_rows - p->kept_rows) * p->h_width * p->element));
}

static int64_t panel_rows(const moe_problem *p)
{
    return moe_min(MOE_PANEL_ROWS, moe_max(p->rows, p->layer.tokens));
}

/* The most floats of weights that one product reads: a panel of W1 or W2 (features, d), of W1 or W2 by 64
 * columns, or of Wr by 64 columns. */
static int64_t weight_floats(const moe_problem *p)
{
    if (p->layer.dtype == SMOE_TYPE_F32 && p->layer.compute == SMOE_COMPUTE_STORAGE) return 0;
    const int64_t by_features = moe_min(MOE_PANEL_FEATURES, p->h_width) * p->layer.hidden;
    const int64_t by_columns = MOE_PANEL_COLUMNS * moe_max(p->h_width, p->layer.experts);
    return moe_max(by_features, by_columns);
}

static moe_cpu_panels carve_panels(const moe_problem *p, carver *at)
{
    const int64_t rows = panel_rows(p), widest = moe_max(p->h_width, p->layer.hidden);
    moe_cpu_panels panels;
    panels.gathered = carve_floats(at, rows * widest);
    panels.product = carve_floats(at, rows * p->h_width);
    panels.weights = carve_floats(at, weight_floats(p));
    panels.tile = carve_floats(at, p->layer.inference ? 0 : MOE_TILE_HIDDEN * MOE_PANEL_FEATURES);
    panels.row = carve_floats(at, 3 * widest);
    const int64_t rank = moe_max(p->layer.lora_rank1, p->layer.lora_rank2);
    panels.low = carve_floats(at, rows * rank);
    panels.factor = carve_floats(at, p->layer.dtype == SMOE_TYPE_F32 ? 0 : rank * widest);
    panels.factors = carve_floats(at, p->layer.inference ? 0 : 2 * rank * widest);
    return panels;
}

static void carve_threads(moe_cpu_pass *pass, carver *at)
{
    carver one = {NULL, 0};
    carve_panels(pass->problem, &one);
    pass->panel_bytes = one.used;
    pass->panels = carve(at, one.used * (uint64_t)pass->context->threads);
    pass->bytes = at->used;
}

static void carve_f8(moe_cpu_pass *pass, carver *at, int backward)
{
    if (!moe_cpu_is_f8(pass)) return;
    carve(at, moe_cpu_f8_lay_out(pass, at->base ? at->base + at->used : NULL, backward));
    pass->bytes = at->used;
}

moe_cpu_pass moe_cpu_forward_pass(const smoe_context *context, const moe_problem *problem,
                                  const moe_plan_arrays *plan, void *scratch, void *stream)
{
    const moe_problem *p = problem;
    moe_cpu_pass pass = {.context = context, .problem = problem, .plan = plan, .stream = stream};
    carver at = {scratch, 0};
    if (p->layer.inference && !moe_cpu_is_f8(&pass))
        pass.a = carve(&at, (uint64_t)(rows_here(p) * p->layer.intermediate * p->element));
    pass.past = carve_past(p, &at);
    pass.chunk = carve_floats(&at, rows_here(p) * p->chunk_columns);
    carve_threads(&pass, &at);
    carve_f8(&pass, &at, 0);
    return pass;
}

moe_cpu_pass moe_cpu_backward_pass(const smoe_context *context, const moe_problem *problem,
                                   const moe_plan_arrays *plan, void *scratch, void *stream)
{
    const moe_problem *p = problem;
    moe_cpu_pass pass = {.context = context, .problem = problem, .plan = plan, .stream = stream};
    carver at = {scratch, 0};
    if (p->layer.reuse_saved)
        pass.dh = plan ? plan->h : NULL;
    else if (!moe_cpu_dw_is_f8(&pass))
        pass.dh = carve(&at, (uint64_t)(rows_here(p) * p->h_width * p->element));
    pass.past = carve_past(p, &at);
    pass.ds = carve_floats(&at, p->padded_rows);
    pass.q1 = carve_floats(&at, p->padded_rows * p->layer.lora_rank1);
    pass.q2 = carve_floats(&at, p->padded_rows * p->layer.lora_rank2);
    uint64_t shared = 4 * (uint64_t)(rows_here(p) * p->chunk_columns);
    if (p->layer.entry == SMOE_ENTRY_FROM_LOGITS) {
        const uint64_t router = moe_cpu_router_backward_scratch(context, problem);
        pass.dlogits = carve_floats(&at, p->layer.tokens * p->layer.experts);
        shared = router > shared ? router : shared;
    }
    pass.chunk = carve(&at, shared);
    pass.router = pass.chunk;
    carve_threads(&pass, &at);
    carve_f8(&pass, &at, 1);
    return pass;
}

moe_cpu_panels moe_cpu_panels_of(const moe_cpu_pass *pass)
{
    carver at = {pass->panels + pass->panel_bytes * (uint64_t)omp_get_thread_num(), 0};
    return carve_panels(pass->problem, &at);
}

int64_t moe_block_count(const moe_cpu_pass *pass)
{
    return pass->plan->block_offsets[pass->problem->layer.experts];
}

/* The last expert whose first block is at or before `block`. An expert without rows has the same first block
 * as the next expert, and then the later one is returned. */
int64_t moe_expert_of_block(const moe_plan_arrays *plan, int64_t experts, int64_t block)
{
    int64_t low = 0, high = experts;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (plan->block_offsets[middle] <= block)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static int fill_panel(const moe_cpu_pass *pass, int64_t expert, int64_t rows_before, moe_row_panel *panel)
{
    const int64_t left = pass->plan->counts[expert] - rows_before;
    panel->expert = expert;
    panel->row = (int64_t)pass->plan->block_offsets[expert] * MOE_BLOCK_ROWS + rows_before;
    panel->count = moe_min(left, MOE_PANEL_ROWS);
    return left > 0;
}

int moe_row_panel_at(const moe_cpu_pass *pass, int64_t block, moe_row_panel *panel)
{
    const int64_t expert = moe_expert_of_block(pass->plan, pass->problem->layer.experts, block);
    const int64_t inside = block - pass->plan->block_offsets[expert];
    return inside % BLOCKS_A_PANEL == 0 && fill_panel(pass, expert, inside * MOE_BLOCK_ROWS, panel);
}

int moe_first_row_panel(const moe_cpu_pass *pass, int64_t expert, moe_row_panel *panel)
{
    return fill_panel(pass, expert, 0, panel);
}

int moe_next_row_panel(const moe_cpu_pass *pass, moe_row_panel *panel)
{
    const int64_t first = (int64_t)pass->plan->block_offsets[panel->expert] * MOE_BLOCK_ROWS;
    return fill_panel(pass, panel->expert, panel->row + panel->count - first, panel);
}

void moe_gather_tokens(const moe_cpu_pass *pass, const moe_row_panel *panel, const void *from,
                       int64_t first_column, int64_t columns, float *to)
{
    const smoe_layer *layer = &pass->problem->layer;
    for (int64_t i = 0; i < panel->count; i++) {
        const int64_t token = pass->plan->row_token[panel->row + i];
        moe_load_row(to + i * columns, from, token * layer->hidden + first_column, columns, layer->dtype);
    }
}

const float *moe_weights_f32(float *panel, const void *weights, int64_t first_element, int64_t rows,
                             int64_t row_step, int64_t columns, smoe_type type, int64_t *ld)
{
    if (type == SMOE_TYPE_F32) {
        *ld = row_step;
        return (const float *)weights + first_element;
    }
    for (int64_t i = 0; i < rows; i++)
        moe_load_row(panel + i * columns, weights, first_element + i * row_step, columns, type);
    *ld = columns;
    return panel;
}

static const float *decoded_f32(float *panel, const uint8_t *bytes, int64_t rows, int64_t row_step,
                                int64_t columns, int64_t *ld)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) panel[i * columns + j] = moe_f8_value(bytes[i * row_step + j]);
    *ld = columns;
    return panel;
}

const float *moe_cpu_w1(const moe_cpu_pass *pass, const void *w1, int64_t expert, int64_t j, int64_t rows,
                        int64_t column, int64_t columns, float *panel, int64_t *ld)
{
    const moe_problem *p = pass->problem;
    const int64_t d = p->layer.hidden, first_row = expert * p->h_width;
    if (moe_cpu_is_f8(pass))
        return decoded_f32(panel, pass->f8.weights.w1 + (first_row + j) * d + column, rows, d, columns, ld);
    return moe_weights_f32(panel, w1, (first_row + moe_w1_row(p, j)) * d + column, rows, moe_w1_step(p) * d,
                           columns, p->layer.dtype, ld);
}

const float *moe_cpu_w2(const moe_cpu_pass *pass, const void *w2, int64_t expert, int64_t row, int64_t rows,
                        int64_t column, int64_t columns, float *panel, int64_t *ld)
{
    const smoe_layer *layer = &pass->problem->layer;
    const int64_t n = layer->intermediate, first = (expert * layer->hidden + row) * n + column;
    if (moe_cpu_is_f8(pass)) return decoded_f32(panel, pass->f8.weights.w2 + first, rows, n, columns, ld);
    return moe_weights_f32(panel, w2, first, rows, n, columns, layer->dtype, ld);
}
