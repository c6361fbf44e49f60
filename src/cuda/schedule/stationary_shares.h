/* How the weight-stationary core shares its units among the CTAs. A unit is a piece (a run of
 * blocks of one expert) and a column tile; consecutive units have consecutive column tiles.
 * Terms: docs/glossary.md.
 *
 * The first waves are full: in wave w, CTA c has the whole unit w * ctas + c. Experts have different counts,
 * so pieces have different lengths. The number of full waves is the highest with which no CTA has more blocks
 * than an equal share of all blocks. The units after the full waves are the rest. Each CTA gets as many
 * blocks of the rest as it lacks to its equal share. The CTAs' shares of the rest follow each other in order.
 */
#ifndef MOE_CUDA_STATIONARY_SHARES_H
#define MOE_CUDA_STATIONARY_SHARES_H

#include "schedule/scheduler.h"

typedef struct moe_stationary_units {
    const int32_t *before; /* (pieces + 1) blocks of the pieces before this one */
    int32_t pieces, column_tiles, ctas;
} moe_stationary_units;

/* A CTA's full waves: how many it has, and their blocks. */
typedef struct moe_whole_units {
    int32_t waves, blocks;
} moe_whole_units;

MOE_HOST_DEVICE int32_t moe_stationary_blocks(const moe_stationary_units *units)
{
    return units->before[units->pieces] * units->column_tiles;
}

/* CTA `cta`'s equal share of all blocks. */
MOE_HOST_DEVICE int32_t moe_equal_share(const moe_stationary_units *units, int32_t cta)
{
    const int32_t blocks = moe_stationary_blocks(units);
    return moe_cut(blocks, units->ctas, cta + 1) - moe_cut(blocks, units->ctas, cta);
}

/* The most waves, but not more than `waves`, in which CTA `cta` has at most `most` blocks. */
MOE_HOST_DEVICE moe_whole_units moe_waves_within(const moe_stationary_units *units, int32_t cta,
                                                 int32_t waves, int32_t most)
{
    const int32_t tiles = units->column_tiles, columns = units->ctas % tiles;
    int32_t piece = cta / tiles, column = cta % tiles;
    moe_whole_units whole = {0, 0};
    while (whole.waves < waves) {
        const int32_t blocks = whole.blocks + units->before[piece + 1] - units->before[piece];
        if (blocks > most) break;
        whole.blocks = blocks;
        whole.waves++;
        piece += units->ctas / tiles;
        column += columns;
        if (column >= tiles) {
            column -= tiles;
            piece++;
        }
    }
    return whole;
}

/* The blocks of the units before unit `unit`. */
MOE_HOST_DEVICE int32_t moe_blocks_before(const moe_stationary_units *units, int32_t unit)
{
    const int32_t piece = unit / units->column_tiles, column = unit % units->column_tiles;
    const int32_t before = units->before[piece] * units->column_tiles;
    return column ? before + (units->before[piece + 1] - units->before[piece]) * column : before;
}

/* A CTA's share of the rest: `length` blocks from block `block` of unit `unit` on. */
typedef struct moe_share {
    int32_t unit, block, length;
} moe_share;

/* Whether block `at` of the blocks of all units is in piece `piece`; then *share begins there. */
MOE_HOST_DEVICE int moe_share_begins(const moe_stationary_units *units, int32_t piece, int32_t at,
                                     moe_share *share)
{
    const int32_t tiles = units->column_tiles, before = units->before[piece] * tiles;
    const int32_t blocks = units->before[piece + 1] - units->before[piece];
    if (at < before || at >= before + blocks * tiles) return 0;
    share->unit = piece * tiles + (at - before) / blocks;
    share->block = (at - before) % blocks;
    return 1;
}

#endif
