/* When the kernels for few rows compute up and down (experts/few_rows.cu), and their grid. */
#ifndef SMOE_CUDA_FEW_ROWS_H
#define SMOE_CUDA_FEW_ROWS_H

#include "host/scheduler.h"

enum {
    SMOE_FEW_ROWS = 128,       /* the most rows of a layer for which these kernels run */
    SMOE_FEW_ROWS_MEAN = 4,    /* the most rows for each expert, on average */
    SMOE_FEW_ROWS_GROUP = 16,  /* rows that a CTA multiplies with one read of its weights */
    SMOE_FEW_ROWS_WEIGHTS = 16 /* rows of weights of a CTA: it computes so many columns of H or Y */
};

/* The kernels read an expert's weights once for every group of 8 of its rows. The host does not know the
 * counts. Up to 8 rows in all, no expert has a second group. With more rows there are few second groups as
 * long as the mean is well below 8: under random routing with mean 4, 1 of 50 experts has one. */
SMOE_HD int moe_few_rows(int64_t rows, int64_t experts)
{
    return rows <= SMOE_FEW_ROWS && (rows <= SMOE_FEW_ROWS_GROUP || rows <= SMOE_FEW_ROWS_MEAN * experts);
}

/* A bound on the row tiles of any routing of at most `rows` rows, 0 rows included: an expert with c > 0 rows
 * has 1 + floor((c - 1) / 128). The grid has so many CTAs in y. */
SMOE_HD int64_t moe_few_rows_tiles(int64_t rows, int64_t experts)
{
    const int64_t active = rows < experts ? rows : experts;
    return active + (rows > 0 ? (rows - 1) / (SMOE_TILE_BLOCKS * SMOE_BLOCK_ROWS) : 0);
}

#endif
