/* When the kernels for few rows compute up and down (experts/few_rows.cuh), and their grid. */
#ifndef MOE_CUDA_FEW_ROWS_H
#define MOE_CUDA_FEW_ROWS_H

#include "schedule/scheduler.h"

enum {
    MOE_FEW_ROWS = 128,        /* the most rows of a layer for which these kernels run */
    MOE_FEW_ROWS_MEAN = 8,     /* the most rows for each expert, on average */
    MOE_FEW_ROWS_GROUP = 16,   /* rows that are multiplied with one read of the weights */
    MOE_FEW_ROWS_WEIGHTS = 16, /* rows of weights of a unit: it computes so many columns of H or Y */
};

/* The kernels read an expert's weights once for every group of 16 of its rows. The host does not know the
 * counts. With at most 16 rows in all, no expert has a second group. With more rows few experts have one as
 * long as the mean is at most 8: under random routing 1 of 250. */
MOE_HOST_DEVICE int moe_few_rows(int64_t rows, int64_t experts)
{
    return rows <= MOE_FEW_ROWS && (rows <= MOE_FEW_ROWS_GROUP || rows <= MOE_FEW_ROWS_MEAN * experts);
}

/* A bound on the row tiles of any routing of at most `rows` rows: an expert with c > 0 rows has
 * 1 + floor((c - 1) / 128). The grid has no more CTAs than these tiles have units. */
MOE_HOST_DEVICE int64_t moe_few_rows_tiles(int64_t rows, int64_t experts)
{
    const int64_t active = rows < experts ? rows : experts;
    return active + (rows > 0 ? (rows - 1) / (MOE_TILE_BLOCKS * MOE_BLOCK_ROWS) : 0);
}

#endif
