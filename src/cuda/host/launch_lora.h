/* LoRA's kernels that run on any GPU, as the host side sees them; see launch.h and experts/lora.cu. */
#ifndef MOE_CUDA_LAUNCH_LORA_H
#define MOE_CUDA_LAUNCH_LORA_H

#include "common/target.h"
#include "schedule/scheduler.h"

#ifdef __cplusplus
extern "C" {
#endif

/* low[r] = rows[r] factor[e], for the row tiles of a work list. */
typedef struct moe_cuda_project {
    const void *rows;         /* (T, width) with row_token, else (padded_rows, width) */
    const int32_t *row_token; /* or NULL: row r is row r */
    const void *factor;       /* (experts, rank, width) if rank_major, else (experts, width, rank) */
    void *low;                /* (padded_rows, rank), written; 0 in pad rows of tokens */
    const moe_work *tiles;
    const int32_t *tile_count;
    int64_t tile_bound;
    int32_t width, rank, rank_major;
} moe_cuda_project;

/* gradient[e] = sum over the rows r of e of rows[r] and row_weight[r] low[r]. NULL: not wanted. */
typedef struct moe_cuda_low_sum {
    const void *rows; /* as in moe_cuda_project */
    const int32_t *row_token;
    const void *low;         /* (padded_rows, rank) */
    const float *row_weight; /* (padded_rows), or NULL: all are 1 */
    void *gradient;          /* (experts, rank, width) if rank_major, else (experts, width, rank) */
    int32_t width, rank_major;
} moe_cuda_low_sum;

/* The sums of one launch; one of them at least is wanted. */
typedef struct moe_cuda_low_sums {
    moe_cuda_low_sum a, b;
    const int32_t *block_offsets, *order;
    int32_t rank, experts, accumulate;
} moe_cuda_low_sums;

/* Both products of the same rows, with one read of them: experts/lora_pair.cu. One of them may be NULL, which
 * does not change the other's bits. */
typedef struct moe_cuda_low_pair {
    const void *rows; /* as in moe_cuda_project */
    const int32_t *row_token;
    const void *factor;      /* (experts, width, rank); not read if low is NULL */
    void *low;               /* (padded_rows, rank) = rows[r] factor[e], written */
    const void *other;       /* (padded_rows, rank) */
    const float *row_weight; /* (padded_rows), or NULL: all are 1 */
    void *gradient;          /* (experts, width, rank): the sum of rows[r] and row_weight[r] other[r] */
    float *parts;            /* moe_cuda_low_pair_bytes */
    const int32_t *block_offsets, *block_expert;
    int32_t width, rank, experts, accumulate;
} moe_cuda_low_pair;

cudaError_t moe_cuda_low_pair_init(const moe_device *device);
cudaError_t moe_cuda_low_pair_launch(const moe_launch *on, const moe_cuda_low_pair *pair,
                                     smoe_type gradient_type);

/* For so many blocks of rows. 0: this width and rank have no such kernel. */
uint64_t moe_cuda_low_pair_bytes(const moe_device *device, int64_t blocks, int width, int rank);

cudaError_t moe_cuda_lora_init(const moe_device *device);
cudaError_t moe_cuda_project_launch(const moe_launch *on, const moe_cuda_project *project);
cudaError_t moe_cuda_low_sum_launch(const moe_launch *on, const moe_cuda_low_sums *sums,
                                    smoe_type gradient_type);

#ifdef __cplusplus
}
#endif
#endif
