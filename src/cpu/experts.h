/* What the expert stages share: the pass they work on, how rows are cut into work items, and
 * each thread's panels.
 *
 * How work is cut follows from the plan alone. A row panel is up to 256 rows of one expert. Columns are cut
 * into fixed panels too. Those of Y and dX~ are 64 columns wide and start at column 0, so a chunk (a multiple
 * of 64 columns) consists of whole panels. Every product is then the same sgemm call for any number of chunks
 * and threads. */
#ifndef MOE_CPU_EXPERTS_H
#define MOE_CPU_EXPERTS_H

#include "cpu.h"
#include "f8.h"

enum {
    MOE_PANEL_ROWS = 256,     /* rows of an expert, or tokens, in one work item */
    MOE_PANEL_FEATURES = 256, /* columns of H, dA' and A' in one product */
    MOE_PANEL_COLUMNS = 64,   /* columns of Y, dX~ and dX in one product */
    MOE_TILE_HIDDEN = 512     /* the most d columns of a tile of dW */
};

/* What fp8 adds to a pass (f8.h has shapes and equations). NULL where the pass does not need it. */
typedef struct moe_cpu_f8 {
    moe_f8_weights weights;
    uint8_t *x, *dout;           /* (T, d) */
    float *scale_x, *scale_dout; /* (T) */
    uint8_t *a;                  /* forward: (padded_rows, n) */
    float *scale_a;              /* (padded_rows, groups of A) */
    uint8_t *dh;                 /* backward: (padded_rows, h_width) */
    float *scale_dh;             /* (padded_rows, groups of dH) */
    /* What dw reads with SMOE_COMPUTE_F8: of dH, then of A' */
    uint8_t *rows[2];     /* (padded_rows, h_width), (padded_rows, n) */
    int32_t *exponent[2]; /* (padded_rows, groups of dH): w */
    int32_t *largest[2];  /* (E, groups of dH): C */
    int32_t *expected[2]; /* (E, groups of dH) */
} moe_cpu_f8;
enum { MOE_F8_OF_DW1 = 0, MOE_F8_OF_DW2 = 1 };

/* The parts of scratch, and what the stages of one pass read. From `panels` on each thread has `panel_bytes`,
 * which moe_cpu_panels_of divides. */
typedef struct moe_cpu_pass {
    const smoe_context *context;
    const moe_problem *problem;
    const moe_plan_arrays *plan;
    void *stream;
    void *a;           /* inference without fp8: (padded_rows, n) dtype */
    char *past;        /* H from row kept_rows on, (padded_rows - kept_rows, h_width) dtype */
    void *dh;          /* backward: (padded_rows, h_width) dtype; H's own place with reuse_saved; NULL with
                          SMOE_COMPUTE_F8 */
    float *chunk;      /* Y or dX~, (padded_rows, chunk_columns) */
    float *ds;         /* backward: (padded_rows), 0 in pad rows */
    float *q1, *q2;    /* backward with LoRA: (padded_rows, r1) and (padded_rows, r2) */
    float *dlogits;    /* backward from logits: (T, E) */
    const smoe_ep *ep; /* collect_backward: dX is the sum of what ranks returned; else NULL */
    void *router;      /* backward from logits: the router's work space, in the memory of `chunk`, which
                          is used later */
    moe_cpu_f8 f8;
    char *panels;
    uint64_t panel_bytes; /* of one thread */
    uint64_t bytes;       /* of all */
} moe_cpu_pass;

/* One thread's panels. Each stage describes what it keeps in them. */
typedef struct moe_cpu_panels {
    float *gathered; /* (256, d or n or h_width); in dx the router's term (256, chunk_columns) */
    float *product;  /* (256, h_width) */
    float *weights;  /* a panel of weights in f32; only for bf16 and fp8 */
    float *tile;     /* backward: a tile of dW, (512, 256) */
    float *row;      /* 3 rows of max(h_width, d) */
    float *low;      /* LoRA: (256, r) of P1, P2, Q1 or Q2, where r is the larger rank */
    float *factor;   /* a factor of LoRA in f32 (r, max(h_width, d)); only for bf16 */
    float *factors;  /* backward: two gradients of factors, (r, max(h_width, d)) each */
} moe_cpu_panels;

/* Lays scratch out. With scratch NULL only the sizes are valid. */
moe_cpu_pass moe_cpu_forward_pass(const smoe_context *context, const moe_problem *problem,
                                  const moe_plan_arrays *plan, void *scratch, void *stream);
moe_cpu_pass moe_cpu_backward_pass(const smoe_context *context, const moe_problem *problem,
                                   const moe_plan_arrays *plan, void *scratch, void *stream);

static inline int moe_cpu_is_f8(const moe_cpu_pass *pass)
{
    return pass->problem->layer.compute != SMOE_COMPUTE_STORAGE;
}

/* Are dw2 and dw1 computed in fp8 too? */
static inline int moe_cpu_dw_is_f8(const moe_cpu_pass *pass)
{
    return pass->problem->layer.compute == SMOE_COMPUTE_F8;
}

/* The calling thread's panels, inside a parallel region of context->threads. */
moe_cpu_panels moe_cpu_panels_of(const moe_cpu_pass *pass);

/* Up to 256 rows of one expert. */
typedef struct moe_row_panel {
    int64_t expert;
    int64_t row;   /* the first, among the padded rows */
    int64_t count; /* 1..256, no pad rows */
} moe_row_panel;

/* The number of blocks in use. moe_row_panel_at says for each of them whether a panel starts there. */
int64_t moe_block_count(const moe_cpu_pass *pass);
int moe_row_panel_at(const moe_cpu_pass *pass, int64_t block, moe_row_panel *panel);

/* Iterates over the panels of one expert: sets the first panel, then the one after it; returns 0 at the
 * end. */
int moe_first_row_panel(const moe_cpu_pass *pass, int64_t expert, moe_row_panel *panel);
int moe_next_row_panel(const moe_cpu_pass *pass, moe_row_panel *panel);

/* The expert of a block. */
int64_t moe_expert_of_block(const moe_plan_arrays *plan, int64_t experts, int64_t block);

/* to (count, columns) = columns first.. of the rows' tokens in a (T, d) tensor */
void moe_gather_tokens(const moe_cpu_pass *pass, const moe_row_panel *panel, const void *from,
                       int64_t first_column, int64_t columns, float *to);

/* H of a padded row. */
static inline void *moe_h_of_row(const moe_cpu_pass *pass, int64_t row)
{
    const moe_problem *p = pass->problem;
    const int64_t bytes = p->h_width * p->element;
    return row < p->kept_rows ? (char *)pass->plan->h + row * bytes
                              : pass->past + (row - p->kept_rows) * bytes;
}

/* A matrix of weights in f32 (rows, columns). If it is stored in f32, the result points to the matrix itself,
 * else to a converted copy in `panel`. `row_step` is the stride of the stored rows in elements; `ld` receives
 * the stride of the result. */
const float *moe_weights_f32(float *panel, const void *weights, int64_t first_element, int64_t rows,
                             int64_t row_step, int64_t columns, smoe_type type, int64_t *ld);

/* Rows of W1[e] for columns j .. j + rows - 1 of H, at most up to moe_w1_run_end, and rows of W2[e] from
 * `row` on; `columns` columns from `column` on, in f32. With fp8 the decoded bytes, without their scale. As
 * for moe_weights_f32. */
const float *moe_cpu_w1(const moe_cpu_pass *pass, const void *w1, int64_t expert, int64_t j, int64_t rows,
                        int64_t column, int64_t columns, float *panel, int64_t *ld);
const float *moe_cpu_w2(const moe_cpu_pass *pass, const void *w2, int64_t expert, int64_t row, int64_t rows,
                        int64_t column, int64_t columns, float *panel, int64_t *ld);

/* Which row of W1[e] gives column j of H, and how many rows after it is the row of the next column. This step
 * is the same up to column moe_w1_run_end. */
static inline int moe_interleaved(const moe_problem *p)
{
    switch (p->layer.layout) {
    case SMOE_LAYOUT_CONCATENATED: return 0;
    case SMOE_LAYOUT_INTERLEAVED: return p->gated;
    }
    return 0;
}

static inline int64_t moe_w1_row(const moe_problem *p, int64_t j)
{
    const int64_t n = p->layer.intermediate;
    if (!moe_interleaved(p)) return j;
    return j < n ? 2 * j : 2 * (j - n) + 1;
}

static inline int64_t moe_w1_step(const moe_problem *p)
{
    return moe_interleaved(p) ? 2 : 1;
}

static inline int64_t moe_w1_run_end(const moe_problem *p, int64_t j)
{
    return moe_interleaved(p) && j < p->layer.intermediate ? p->layer.intermediate : p->h_width;
}

static inline int64_t moe_max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* ---- LoRA (lora.c). `low`: the panel's rows of P1, P2, Q1 or Q2 ---- */

/* P1 of X's rows, which are in at->gathered, is added to at->product as P1 B1^T, and stored in the plan. */
void moe_cpu_lora_up(const moe_cpu_pass *pass, const smoe_forward_args *args, const moe_row_panel *panel,
                     const moe_cpu_panels *at);

/* at->low = P2 of A's rows, which are in at->gathered; stored in the plan. Then y (count, chunk_columns) +=
 * P2 B2^T for `columns` columns from `column` on. */
void moe_cpu_lora_p2(const moe_cpu_pass *pass, const smoe_forward_args *args, const moe_row_panel *panel,
                     const moe_cpu_panels *at);
void moe_cpu_lora_down(const moe_cpu_pass *pass, const smoe_forward_args *args, const moe_row_panel *panel,
                       int64_t column, int64_t columns, const moe_cpu_panels *at, float *y);

/* Q2, and those of dA2 and dB2 that are wanted. Reads H, so it comes before dh. */
void moe_cpu_lora2(const moe_cpu_pass *pass, const smoe_backward_args *args);
/* at->product (count, n) += Q2 A2 */
void moe_cpu_lora_dh(const moe_cpu_pass *pass, const smoe_backward_args *args, const moe_row_panel *panel,
                     const moe_cpu_panels *at);
/* Q1, and those of dA1 and dB1 that are wanted. Reads dH. */
void moe_cpu_lora1(const moe_cpu_pass *pass, const smoe_backward_args *args);
/* dx (count, chunk_columns) += Q1 A1 for `columns` columns from `column` on */
void moe_cpu_lora_dx(const moe_cpu_pass *pass, const smoe_backward_args *args, const moe_row_panel *panel,
                     int64_t column, int64_t columns, const moe_cpu_panels *at, float *dx);

/* ---- fp8: f8_operands.c has what is quantised for the GEMMs of rows, f8_dw.c what dw reads ---- */

/* The fields of pass->f8 in scratch, and their bytes. With scratch NULL only the bytes are valid. */
uint64_t moe_cpu_f8_lay_out(moe_cpu_pass *pass, void *scratch, int backward);

/* to (T, d), scales (T) = the quantised rows of X or dO */
void moe_cpu_f8_quantize_tokens(const moe_cpu_pass *pass, const void *from, uint8_t *to, float *scales);

/* to (count, d) = the tokens' rows of X (or of dO), times the scale of W1[e] (of W2[e]) */
void moe_cpu_f8_gather_x(const moe_cpu_pass *pass, const moe_row_panel *panel, float *to);
void moe_cpu_f8_gather_dout(const moe_cpu_pass *pass, const moe_row_panel *panel, float *to);

/* Quantises A of h (count, h_width), which is rounded to dtype; to (count, n) = A times the scale of W2[e].
 */
void moe_cpu_f8_store_a(const moe_cpu_pass *pass, const moe_row_panel *panel, float *h, float *a);
void moe_cpu_f8_load_a(const moe_cpu_pass *pass, const moe_row_panel *panel, float *to);

/* Quantises a row of dH (h_width); to (count, columns) = columns of dH from `column` on, times `factor`. */
void moe_cpu_f8_store_dh(const moe_cpu_pass *pass, int64_t row, const float *dh);
void moe_cpu_f8_load_dh(const moe_cpu_pass *pass, const moe_row_panel *panel, int64_t column, int64_t columns,
                        float factor, float *to);

/* Before the rows are stored: the expected exponents of all experts. After: the largest of each expert. */
void moe_cpu_f8_expect(const moe_cpu_pass *pass);
void moe_cpu_f8_find_largest(const moe_cpu_pass *pass);

/* Stores a row for dw: `which` is MOE_F8_OF_DW1 and values dH (h_width), or MOE_F8_OF_DW2 and A' (n). */
void moe_cpu_f8_store_row(const moe_cpu_pass *pass, int which, int64_t row, int64_t expert,
                          const float *values);

/* A tile of dW: `features` columns of dH or A' from `feature` on, `hiddens` of d from `hidden` on. */
typedef struct moe_cpu_f8_tile {
    int which;
    int64_t expert, hidden, hiddens, feature, features;
} moe_cpu_f8_tile;

/* at->tile += the panel's products; (features, hiddens) for dW1, (hiddens, features) for dW2. After the last
 * panel the tile is multiplied by its scales. */
void moe_cpu_f8_add_to_tile(const moe_cpu_pass *pass, const moe_row_panel *panel, const moe_cpu_f8_tile *t,
                            const moe_cpu_panels *at);
void moe_cpu_f8_scale_tile(const moe_cpu_pass *pass, const moe_cpu_f8_tile *t, float *tile);

/* ---- The stages ---- */

/* H of the padded rows from `first` on. */
void moe_cpu_up(const moe_cpu_pass *pass, const smoe_forward_args *args, int64_t first);
void moe_cpu_down(const moe_cpu_pass *pass, const smoe_forward_args *args, int64_t first_column);
void moe_cpu_combine(const moe_cpu_pass *pass, void *out, int64_t first_column);

/* sum (columns) = the sum over the token's rows of s(r) Y[r], or of dX~[r] */
void moe_cpu_combine_token(const moe_cpu_pass *pass, int64_t token, int64_t columns, float *sum);
void moe_cpu_dx_token(const moe_cpu_pass *pass, int64_t token, int64_t columns, float *sum);

void moe_cpu_dw2(const moe_cpu_pass *pass, const smoe_backward_args *args);
void moe_cpu_dh(const moe_cpu_pass *pass, const smoe_backward_args *args);
void moe_cpu_dw1(const moe_cpu_pass *pass, const smoe_backward_args *args);
void moe_cpu_dx_rows(const moe_cpu_pass *pass, const smoe_backward_args *args, int64_t first_column);
void moe_cpu_dx(const moe_cpu_pass *pass, const smoe_backward_args *args, int router_term,
                int64_t first_column);

/* dtopk_weights or drow_weights, if wanted, from ds */
void moe_cpu_give_weight_gradients(const moe_cpu_pass *pass, const smoe_backward_args *args);

#endif
