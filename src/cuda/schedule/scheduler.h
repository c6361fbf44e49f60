/* How the work of the grouped GEMMs is cut. Terms: docs/glossary.md. A work list of the forward has one
 * entry for every run of at most `limit` blocks of one expert, in row order. The plan writes two such
 * lists on the device: row tiles (limit 2, the 128 rows of a CTA's tile) and pieces (a higher limit, for
 * the weight-stationary core). A unit is an entry and a column tile; consecutive units have consecutive
 * column tiles. */
#ifndef MOE_CUDA_SCHEDULER_H
#define MOE_CUDA_SCHEDULER_H

#include "host_device.h"
#include "problem.h"

enum { MOE_TILE_BLOCKS = 2 };

typedef struct moe_work {
    int32_t row;  /* first padded row */
    int32_t what; /* expert in the low 12 bits, blocks above them */
} moe_work;

MOE_HOST_DEVICE moe_work moe_work_make(int32_t row, int32_t expert, int32_t blocks)
{
    const moe_work work = {row, (int32_t)(expert | blocks << 12)};
    return work;
}

MOE_HOST_DEVICE int32_t moe_work_expert(moe_work work)
{
    return work.what & 4095;
}

MOE_HOST_DEVICE int32_t moe_work_blocks(moe_work work)
{
    return work.what >> 12;
}

MOE_HOST_DEVICE int64_t moe_divide_up(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* The `blocks` blocks of an expert are cut into `entries` entries, as equal as possible, the longer ones
 * first. Returns the first block of entry `i`. */
MOE_HOST_DEVICE int32_t moe_cut(int32_t blocks, int32_t entries, int32_t i)
{
    const int32_t each = blocks / entries, longer = blocks % entries;
    return i * each + (i < longer ? i : longer);
}

/* A bound on the number of entries that any routing of `rows` rows makes with this limit. */
MOE_HOST_DEVICE int64_t moe_work_bound(int64_t padded_rows, int64_t experts, int32_t limit)
{
    return padded_rows / MOE_BLOCK_ROWS / limit + experts + 1;
}

/* The limit of the pieces. Under even routing a piece is a whole expert, so that weights are loaded once for
 * each expert. An expert more than a quarter above the mean is cut, so that skewed routing is still spread
 * over the CTAs. */
MOE_HOST_DEVICE int32_t moe_piece_limit(int64_t rows, int64_t experts)
{
    const int64_t blocks = moe_divide_up(rows * 5, experts * 4 * MOE_BLOCK_ROWS);
    return (int32_t)(blocks < 16 ? 16 : blocks > 4096 ? 4096 : blocks);
}

/* ---- Exact division of small numbers by one factor: i / divisor for i divisor < 2^24 ---- */

MOE_HOST_DEVICE uint32_t moe_reciprocal(uint32_t divisor)
{
    return ((1u << 24) + divisor - 1) / divisor;
}

MOE_HOST_DEVICE uint32_t moe_divide(uint32_t i, uint32_t reciprocal)
{
    return (uint32_t)((uint64_t)i * reciprocal >> 24);
}

/* ---- Pieces of experts for the weight gradients. An expert is one piece, unless it has more than a CTA's
 * share of all the work. Then it has several pieces, whose sums are stored in f32, and a second kernel adds
 * these sums in order. The pieces are in the plan's order: experts by descending count. ---- */

enum {
    MOE_LEAST_SPLIT = 16,     /* blocks: shorter pieces are not worth the second kernel */
    MOE_MOST_SPLIT = 1 << 18, /* blocks that a piece may have */
};

/* A piece: consecutive blocks of one expert. 16 bytes. */
typedef struct moe_piece {
    int32_t row; /* first padded row */
    int32_t expert;
    int32_t blocks; /* 0: an expert without rows; such pieces are the last */
    int32_t part;   /* -1: the expert's only piece; else its number among the pieces of split experts */
} moe_piece;

/* A split expert. */
typedef struct moe_split {
    int32_t expert, first_part, parts;
} moe_split;

/* The most blocks of a piece: a CTA's share of the work of `blocks` blocks times `tiles` tiles. */
MOE_HOST_DEVICE int32_t moe_split_limit(int64_t blocks, int32_t tiles, int32_t ctas)
{
    const int64_t share = moe_divide_up(blocks * tiles, ctas);
    return (int32_t)(share < MOE_LEAST_SPLIT  ? MOE_LEAST_SPLIT
                     : share > MOE_MOST_SPLIT ? MOE_MOST_SPLIT
                                              : share);
}

/* A bound on the pieces of split experts, for any routing of at most `blocks` blocks. A split expert has more
 * than limit blocks, so it has fewer than 2 blocks / limit pieces. */
static inline int64_t moe_split_bound(int64_t blocks, int32_t tiles, int32_t ctas)
{
    const int64_t by_share = 2 * (int64_t)ctas / tiles, by_least = 2 * blocks / MOE_LEAST_SPLIT;
    const int64_t by_most = 2 * blocks / MOE_MOST_SPLIT;
    const int64_t most = by_share > by_most ? by_share : by_most;
    const int64_t bound = most < by_least ? most : by_least;
    return bound < 2 ? 0 : bound; /* one piece is no split */
}

#endif
