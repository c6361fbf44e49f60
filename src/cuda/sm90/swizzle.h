/* Where elements stand in shared memory. A panel is a run of rows of 64 elements of 16 bits (128 bytes, eight
 * chunks of 16 bytes) whose chunks are exchanged inside each row as TMA's and wgmma's 128-byte swizzle does.
 * Panels start at multiples of 1024 bytes. */
#ifndef SMOE_CUDA_SWIZZLE_H
#define SMOE_CUDA_SWIZZLE_H

#include "common/hd.h"

enum {
    SMOE_PANEL_COLUMNS = 64,
    SMOE_PANEL_ROW_BYTES = 128,
    SMOE_PANEL_BYTES = 64 * SMOE_PANEL_ROW_BYTES /* of 64 rows */
};

/* Byte of chunk `chunk` (0..7) of row `row`. */
SMOE_HD uint32_t moe_panel_offset(uint32_t row, uint32_t chunk)
{
    return row * SMOE_PANEL_ROW_BYTES + ((chunk ^ (row & 7)) << 4);
}

/* The up-projection's tile has 256 columns. Gated: they stand for 128 features, eight gate columns, then the
 * same features' eight up columns, and so on, so that both halves of a feature land in the same thread. Half
 * h of the tile (128 columns, 16 blocks of 8) fills one staging slot of two panels: gated a gate and an up
 * panel of 64 features, plain two panels of 64 columns. Block b of the half goes to this panel and chunk. */
SMOE_HD uint32_t moe_block_panel(uint32_t block, int gated)
{
    return gated ? block & 1 : block >> 3;
}

SMOE_HD uint32_t moe_block_chunk(uint32_t block, int gated)
{
    return gated ? block >> 1 : block & 7;
}

/* First feature (gated) or column (plain) of block b of half h of column tile `tile`. */
SMOE_HD uint32_t moe_block_feature(uint32_t tile, uint32_t half, uint32_t block, int gated)
{
    return gated ? tile * 128 + half * 64 + (block >> 1) * 8 : tile * 256 + half * 128 + block * 8;
}

#endif
