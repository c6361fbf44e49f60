/* The kernels of the backward, as the host side sees them; see launch.h. */
#ifndef MOE_CUDA_LAUNCH_BACKWARD_H
#define MOE_CUDA_LAUNCH_BACKWARD_H

#include "host/launch.h"
#include "routing_decisions.h"
#include "wanted.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- lists: the work lists of a plan, made anew, because the forward's were in its scratch ---- */

typedef struct moe_cuda_backward_lists {
    int32_t *counts;       /* (4) entries of tiles, of pieces with blocks, of splits, and of pieces */
    moe_work *tiles;       /* limit MOE_TILE_BLOCKS */
    moe_piece *pieces;     /* (experts + bound on the pieces of split experts) */
    moe_split *splits;     /* (experts) */
    int32_t *block_expert; /* (padded blocks) the expert of each block of rows, -1 past the last */
    int32_t *turn;         /* (2) as in moe_cuda_lists */
} moe_cuda_backward_lists;

typedef struct moe_cuda_make_lists {
    const int32_t *block_offsets, *order; /* of the plan; NULL: one expert of padded_blocks blocks */
    moe_cuda_backward_lists lists;
    int32_t experts, padded_blocks;
    int32_t weight_tiles, ctas; /* moe_split_limit */
} moe_cuda_make_lists;

/* router: the lists of a second problem, which are made in the same launch, or NULL. */
cudaError_t moe_cuda_lists_launch(const moe_launch *on, const moe_cuda_make_lists *experts,
                                  const moe_cuda_make_lists *router);

/* ---- ds ---- */

typedef struct moe_cuda_ds {
    float *partial; /* (parts, padded_rows); with bias this launch first writes the last part */
    int32_t parts;
    const void *dout, *bias; /* (T, hidden), b2 (E, hidden) or NULL */
    const int32_t *row_token, *block_expert, *token_offsets, *token_rows;
    const void *ids;       /* FROM_TOPK: (T, topk) */
    float *topk_gradient;  /* (T, topk) or NULL */
    float *token_gradient; /* FROM_ROWS: (T) or NULL */
    float *row_gradient;   /* FROM_LOGITS: (padded_rows) or NULL */
    int64_t padded_rows, tokens;
    int32_t hidden, topk, wide_index;
} moe_cuda_ds;

cudaError_t moe_cuda_ds_launch(const moe_launch *on, const moe_cuda_ds *ds);

/* ---- db2 and db1 ---- */

typedef struct moe_cuda_db {
    const void *values;       /* (rows or tokens, columns): dH, or dO with row_token */
    const int32_t *row_token; /* NULL: the values are rows */
    const float *row_weight;  /* NULL: ones */
    const int32_t *counts, *block_offsets, *order;
    void *gradient; /* (E, columns) */
    int32_t columns, experts;
    int32_t half, interleaved; /* interleaved: column j is element 2j or, from `half` on, 2 (j - half) + 1 */
    int32_t accumulate;
} moe_cuda_db;

cudaError_t moe_cuda_db_launch(const moe_launch *on, const moe_cuda_db *db, smoe_type gradient_type);

/* ---- dlogits ---- */

typedef struct moe_cuda_dlogits {
    smoe_layer layer;
    const void *logits; /* (T, E) logits_type */
    const float *ds;    /* (ds_parts, padded_rows) */
    int64_t padded_rows;
    const int32_t *token_offsets, *token_rows, *block_expert, *topk_ids, *topk_counts;
    const float *topk_weights;
    const uint8_t *token_mask;   /* (T) or NULL: the losses count all tokens */
    float balance, z;            /* coefficients of the losses */
    const float *loss_gradients; /* (2), added to them; or NULL */
    int32_t ds_parts;
    int32_t stride;       /* E to the next multiple of 8 */
    void *dense;          /* (T, stride) dtype, zeros past E; or NULL */
    void *dlogits;        /* (T, E) logits_type, or NULL */
    moe_cuda_term *terms; /* (T, K) in the order of token_rows; sparse only, or NULL */
    float *bias_sums;     /* (moe_cuda_dlogits_ctas, stride), or NULL */
    void *bias_gradient;  /* dbr (E), with bias_sums */
} moe_cuda_dlogits;

/* The number of CTAs, each of which takes several tokens. It is a bound for all coefficients of the
 * losses. */
int64_t moe_cuda_dlogits_ctas(const smoe_layer *layer);
cudaError_t moe_cuda_dlogits_launch(const moe_launch *on, const moe_cuda_dlogits *dlogits);

#ifdef __cplusplus
}
#endif
#endif
