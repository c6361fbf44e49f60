/* What the expert stages share: the pass they work on, the cut of the rows into work items, and
 * each thread's panels.
 *
 * Work is cut by the plan alone. A row panel is up to 256 rows of one expert; columns go in fixed panels as
 * well, and those of Y and dX~ are 64 wide from column 0 on, so that a chunk (a multiple of 64 columns) is
 * made of whole panels: every product is the same sgemm call whatever the chunks and the threads. */
#ifndef SMOE_CPU_EXPERTS_H
#define SMOE_CPU_EXPERTS_H

#include "cpu.h"

enum {
    SMOE_PANEL_ROWS = 256,     /* rows of an expert, or tokens, in one work item */
    SMOE_PANEL_FEATURES = 256, /* columns of H, dA' and A' in one product */
    SMOE_PANEL_COLUMNS = 64,   /* columns of Y, dX~ and dX in one product */
    SMOE_TILE_HIDDEN = 512     /* the most d columns of a tile of dW */
};

/* The parts of scratch, and what the stages of one pass read. Threads have `panel_bytes` each from `panels`
 * on, cut by smoe_cpu_panels_of. */
typedef struct smoe_cpu_pass {
    const smoe_context *context;
    const smoe_problem *problem;
    const smoe_plan_arrays *plan;
    void *stream;
    void *a;        /* inference: (padded_rows, n) dtype */
    void *dh;       /* backward: (padded_rows, h_width) dtype; H's own place with reuse_saved */
    float *chunk;   /* Y or dX~, (padded_rows, chunk_columns) */
    float *ds;      /* backward: (padded_rows), 0 in pad rows */
    float *dlogits; /* backward from logits: (T, E) */
    void *router;   /* backward from logits: the router's work space; over before, and in the place of,
                       `chunk` */
    char *panels;
    uint64_t panel_bytes; /* of one thread */
    uint64_t bytes;       /* of all */
} smoe_cpu_pass;

/* One thread's panels; each stage says what it keeps in them. */
typedef struct smoe_cpu_panels {
    float *gathered; /* (256, d or n or h_width); in dx the router's term (256, chunk_columns) */
    float *product;  /* (256, h_width) */
    float *weights;  /* a panel of weights in f32; only for bf16 */
    float *tile;     /* backward: a tile of dW, (512, 256) */
    float *row;      /* 3 rows of max(h_width, d) */
} smoe_cpu_panels;

/* Lays scratch out; with scratch NULL only the sizes mean something. */
smoe_cpu_pass smoe_cpu_forward_pass(const smoe_context *context, const smoe_problem *problem,
                                    const smoe_plan_arrays *plan, void *scratch, void *stream);
smoe_cpu_pass smoe_cpu_backward_pass(const smoe_context *context, const smoe_problem *problem,
                                     const smoe_plan_arrays *plan, void *scratch, void *stream);

/* The calling thread's panels, inside a parallel region of context->threads. */
smoe_cpu_panels smoe_cpu_panels_of(const smoe_cpu_pass *pass);

/* Up to 256 rows of one expert. */
typedef struct smoe_row_panel {
    int64_t expert;
    int64_t row;   /* the first, among the padded rows */
    int64_t count; /* 1..256, no pad rows */
} smoe_row_panel;

/* The number of 64-row blocks in use; for each of them smoe_row_panel_at says whether a panel starts there.
 */
int64_t smoe_block_count(const smoe_cpu_pass *pass);
int smoe_row_panel_at(const smoe_cpu_pass *pass, int64_t block, smoe_row_panel *panel);

/* The panels of one expert, first row on: the first one, then what follows it; 0 at the end. */
int smoe_first_row_panel(const smoe_cpu_pass *pass, int64_t expert, smoe_row_panel *panel);
int smoe_next_row_panel(const smoe_cpu_pass *pass, smoe_row_panel *panel);

/* The expert of a 64-row block. */
int64_t smoe_expert_of_block(const smoe_plan_arrays *plan, int64_t experts, int64_t block);

/* to (count, columns) = columns first.. of the rows' tokens in a (T, d) tensor */
void smoe_gather_tokens(const smoe_cpu_pass *pass, const smoe_row_panel *panel, const void *from,
                        int64_t first_column, int64_t columns, float *to);

/* A matrix of weights in f32 (rows, columns): in place when it is stored so, else converted into `panel`.
 * `row_step` is its rows' stride in elements; `ld` gets the stride of what is returned. */
const float *smoe_weights_f32(float *panel, const void *weights, int64_t first_element, int64_t rows,
                              int64_t row_step, int64_t columns, smoe_type type, int64_t *ld);

/* Where column j of H stands among the rows of W1[e]: the row, and how many rows on the next column's is.
 * Runs with one step end at smoe_w1_run_end. */
static inline int smoe_interleaved(const smoe_problem *p)
{
    return p->gated && p->layer.layout == SMOE_LAYOUT_INTERLEAVED;
}

static inline int64_t smoe_w1_row(const smoe_problem *p, int64_t j)
{
    const int64_t n = p->layer.intermediate;
    if (!smoe_interleaved(p)) return j;
    return j < n ? 2 * j : 2 * (j - n) + 1;
}

static inline int64_t smoe_w1_step(const smoe_problem *p)
{
    return smoe_interleaved(p) ? 2 : 1;
}

static inline int64_t smoe_w1_run_end(const smoe_problem *p, int64_t j)
{
    return smoe_interleaved(p) && j < p->layer.intermediate ? p->layer.intermediate : p->h_width;
}

static inline int64_t smoe_max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* ---- The stages ---- */

void smoe_cpu_up(const smoe_cpu_pass *pass, const smoe_forward_args *args);
void smoe_cpu_down(const smoe_cpu_pass *pass, const smoe_forward_args *args, int64_t first_column);
void smoe_cpu_combine(const smoe_cpu_pass *pass, void *out, int64_t first_column);

void smoe_cpu_dw2(const smoe_cpu_pass *pass, const smoe_backward_args *args);
void smoe_cpu_dh(const smoe_cpu_pass *pass, const smoe_backward_args *args);
void smoe_cpu_dw1(const smoe_cpu_pass *pass, const smoe_backward_args *args);
void smoe_cpu_dx_rows(const smoe_cpu_pass *pass, const smoe_backward_args *args, int64_t first_column);
void smoe_cpu_dx(const smoe_cpu_pass *pass, const smoe_backward_args *args, int router_term,
                 int64_t first_column);

#endif
