/* How the work of the grouped GEMMs is cut. An expert's rows stand in blocks of 64; a work list has one entry
 * for every run of at most `limit` blocks of one expert, in row order. The plan writes two lists on the
 * device: tiles (limit 2: the 128 rows of a CTA) and pieces (a long limit: what streams past resident
 * weights). A unit of work is an entry and a column tile, the column tile fastest. */
#ifndef SMOE_CUDA_SCHEDULER_H
#define SMOE_CUDA_SCHEDULER_H

#include "common/hd.h"

enum { SMOE_BLOCK_ROWS = 64, SMOE_TILE_BLOCKS = 2 };

typedef struct smoe_work {
    int32_t row;  /* first padded row */
    int32_t what; /* expert in the low 12 bits, blocks above them */
} smoe_work;

SMOE_HD smoe_work smoe_work_make(int32_t row, int32_t expert, int32_t blocks)
{
    const smoe_work work = {row, (int32_t)(expert | blocks << 12)};
    return work;
}

SMOE_HD int32_t smoe_work_expert(smoe_work work)
{
    return work.what & 4095;
}

SMOE_HD int32_t smoe_work_blocks(smoe_work work)
{
    return work.what >> 12;
}

SMOE_HD int64_t smoe_divide_up(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* Where entry `i` of the `entries` that `blocks` blocks of an expert are cut into begins: as equal as they
 * can be, the longer ones first. */
SMOE_HD int32_t smoe_cut(int32_t blocks, int32_t entries, int32_t i)
{
    const int32_t each = blocks / entries, longer = blocks % entries;
    return i * each + (i < longer ? i : longer);
}

/* More entries than any routing of `rows` rows can make with this limit. */
SMOE_HD int64_t smoe_work_bound(int64_t padded_rows, int64_t experts, int32_t limit)
{
    return padded_rows / SMOE_BLOCK_ROWS / limit + experts + 1;
}

/* The limit of the pieces: whole experts under even routing, so that weights are loaded once an expert; what
 * is a quarter above the mean is cut, so that a skewed routing still spreads over the CTAs. */
SMOE_HD int32_t smoe_piece_limit(int64_t rows, int64_t experts)
{
    const int64_t blocks = smoe_divide_up(rows * 5, experts * 4 * SMOE_BLOCK_ROWS);
    return (int32_t)(blocks < 16 ? 16 : blocks > 4096 ? 4096 : blocks);
}

/* ---- Exact division of small numbers by one factor: i / divisor for i divisor < 2^24 ---- */

SMOE_HD uint32_t smoe_reciprocal(uint32_t divisor)
{
    return ((1u << 24) + divisor - 1) / divisor;
}

SMOE_HD uint32_t smoe_divide(uint32_t i, uint32_t reciprocal)
{
    return (uint32_t)((uint64_t)i * reciprocal >> 24);
}

/* ---- Shares of the weight-stationary down-projection ----
 * Whole units go round the CTAs in full waves; the blocks of the units left over are shared out so that all
 * CTAs end alike: CTA c lacks max(0, target - whole units of c) blocks and gets the rest in that proportion.
 */

/* Blocks of the rest before the CTA whose predecessors lack `lacking_before` of `lacking` blocks in all. */
SMOE_HD int64_t smoe_rest_share(int64_t rest, int64_t lacking_before, int64_t lacking, int32_t cta,
                                int32_t ctas)
{
    return lacking > 0 ? rest * lacking_before / lacking : rest * cta / ctas;
}

/* ---- The order of an expert's tiles ----
 * Column tiles fastest, so that a row tile is fetched once. The weights of an expert with many column tiles
 * do not stay in L2 beside its rows: then row tiles are fastest, and a column tile's weights are done with
 * before the next; of an expert with many of those too, in bands whose rows stay in L2. */

enum { SMOE_MOST_COLUMNS_FIRST = 8, SMOE_BAND = 16 };

typedef struct smoe_place {
    int32_t row_tile, column_tile;
} smoe_place;

/* Place `unit` of so many tiles, either columns or rows fastest. */
SMOE_HD smoe_place smoe_place_in(int32_t unit, int32_t row_tiles, int32_t column_tiles, int columns_first)
{
    const int32_t fast = columns_first ? column_tiles : row_tiles, slow = unit / fast,
                  rest = unit - slow * fast;
    const smoe_place place = {columns_first ? slow : rest, columns_first ? rest : slow};
    return place;
}

/* Row tiles of a band: about SMOE_BAND, all bands alike but the last. */
SMOE_HD int32_t smoe_band_height(int32_t row_tiles)
{
    const int32_t bands = (row_tiles + SMOE_BAND / 2) / SMOE_BAND;
    return bands > 1 ? (row_tiles + bands - 1) / bands : row_tiles;
}

SMOE_HD smoe_place smoe_place_of(int32_t unit, int32_t row_tiles, int32_t column_tiles)
{
    if (column_tiles <= SMOE_MOST_COLUMNS_FIRST) return smoe_place_in(unit, row_tiles, column_tiles, 1);
    const int32_t height = smoe_band_height(row_tiles), first = unit / (height * column_tiles) * height;
    const int32_t left = row_tiles - first;
    smoe_place place =
        smoe_place_in(unit - first * column_tiles, left < height ? left : height, column_tiles, 0);
    place.row_tile += first;
    return place;
}

/* ---- Which kernel multiplies A by W2 ---- */

typedef enum smoe_gemm {
    SMOE_GEMM_TILES = 0,      /* 128 x 256 tiles, any shape, bias */
    SMOE_GEMM_PING_PONG = 1,  /* 128 x 192 tiles, the two warpgroups take turns */
    SMOE_GEMM_STATIONARY = 2, /* 256 columns of weights stay in shared memory, K <= 256 */
} smoe_gemm;

/* Relative speed of the three on full tiles (docs/lab-notebook.md) times the share of columns that is real.
 */
static inline double smoe_gemm_merit(smoe_gemm kind, int64_t intermediate, int64_t columns)
{
    const int64_t width = kind == SMOE_GEMM_PING_PONG ? 192 : 256;
    const double real = (double)columns / (double)(smoe_divide_up(columns, width) * width);
    switch (kind) {
    case SMOE_GEMM_TILES: return real;
    case SMOE_GEMM_PING_PONG: return real * (intermediate <= 512 ? 1.06 : intermediate <= 1024 ? 1.05 : 0.99);
    case SMOE_GEMM_STATIONARY: return intermediate > 192 && intermediate <= 256 ? real * 1.13 : 0.0;
    }
    return 0.0;
}

static inline smoe_gemm smoe_gemm_choose(int64_t intermediate, int64_t columns, int bias)
{
    smoe_gemm best = SMOE_GEMM_TILES;
    if (bias) return best;
    for (int kind = SMOE_GEMM_PING_PONG; kind <= SMOE_GEMM_STATIONARY; kind++)
        if (smoe_gemm_merit((smoe_gemm)kind, intermediate, columns) >
            smoe_gemm_merit(best, intermediate, columns))
            best = (smoe_gemm)kind;
    return best;
}

#endif
