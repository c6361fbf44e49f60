/* The kernels that run on any GPU, as the host side sees them: one launch function in plain C for each
 * kernel. It enqueues on the stream and returns the status. The kernels of one generation are in kernels.h.
 */
#ifndef MOE_CUDA_LAUNCH_H
#define MOE_CUDA_LAUNCH_H

#include "common/target.h"
#include "schedule/scheduler.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Work lists of one plan: device memory, in scratch. */
typedef struct moe_cuda_lists {
    int32_t *counts;  /* (2) entries of tiles and of pieces */
    moe_work *tiles;  /* limit MOE_TILE_BLOCKS */
    moe_work *pieces; /* limit piece_limit */
    int32_t piece_limit;
    int32_t *turn; /* (2) counters, zero between launches; see unit_ring.cuh */
} moe_cuda_lists;

/* ---- plan ---- */

typedef struct moe_cuda_plan {
    /* in, FROM_TOPK */
    const void *ids;      /* (T, K) int32 or int64 */
    const float *weights; /* (T, K); FROM_ROWS: (T), or NULL: all 1 */
    /* in, FROM_ROWS */
    const void *offsets; /* (E+1) int32 or int64 */
    int32_t wide_index;  /* int64 */
    int32_t tokens, experts, topk;
    int32_t padded_rows; /* of the arrays */
    int32_t segment;     /* FROM_TOPK, of plan_size.h */
    int32_t counted; /* the kernel before has written the segments' counts to `work`, and ids and weights */
    /* out, as in smoe_plan_view */
    int32_t *counts, *row_offsets, *block_offsets, *order, *row_token, *token_offsets, *token_rows;
    float *row_weight;
    int32_t *topk_counts; /* `counts` once more, or NULL */
    moe_cuda_lists lists;
    /* work space: moe_cuda_plan_work_bytes */
    void *work;
} moe_cuda_plan;

uint64_t moe_cuda_plan_work_bytes(int64_t tokens, int64_t experts, int32_t segment);
cudaError_t moe_cuda_plan_init(const moe_device *device);
cudaError_t moe_cuda_plan_rows_init(const moe_device *device);
cudaError_t moe_cuda_plan_topk(const moe_launch *on, const moe_cuda_plan *plan);
cudaError_t moe_cuda_plan_rows(const moe_launch *on, const moe_cuda_plan *plan);

/* ---- combine ---- */

/* A nonzero of dlogits. */
typedef struct moe_cuda_term {
    int32_t expert;
    float dlogit;
} moe_cuda_term;

/* The number of rows of every token if no pair was skipped; 0 if it differs between tokens. */
static inline int32_t moe_rows_of_a_token(const smoe_layer *layer)
{
    return layer->entry == SMOE_ENTRY_FROM_ROWS || layer->rounding != SMOE_ROUNDING_NONE
               ? 0
               : (int32_t)layer->topk;
}

typedef struct moe_cuda_combine {
    const void *y; /* (padded_rows, columns) */
    void *out;     /* (T, hidden), at the chunk's first column */
    const int32_t *token_offsets, *token_rows;
    const float *row_weight; /* NULL: ones */
    int32_t topk;            /* moe_rows_of_a_token */
    /* the router's term: the sum starts from the values in `out`, or dlogit Wr[expert] is added with every
     * row */
    int32_t onto;
    const moe_cuda_term *terms; /* as token_rows, or NULL */
    const void *router_weight;  /* Wr (E, hidden), at the chunk's first column; with terms */
    int64_t tokens, hidden, columns;
} moe_cuda_combine;

cudaError_t moe_cuda_combine_launch(const moe_launch *on, const moe_cuda_combine *combine);

#ifdef __cplusplus
}
#endif
#endif
