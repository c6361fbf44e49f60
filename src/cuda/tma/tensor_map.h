/* Tensor maps: how TMA finds the boxes of a tensor in global memory. All have the 128-byte swizzle, so a
 * subtile is 128 bytes wide; a box has one or several side by side. The kernels say how high a box is. What
 * lies outside of the tensor reads as zero and is not written. If the driver refuses a map, on->refusal has
 * the reason. Elements are of on->dtype. on->state is a moe_maps. */
#ifndef MOE_CUDA_TENSOR_MAP_H
#define MOE_CUDA_TENSOR_MAP_H

#include "common/target.h"
#include <cuda.h>

#ifdef __cplusplus
extern "C" {
#endif

/* cuTensorMapEncodeTiled, found at run time so that the library can be loaded on a machine without a
 * driver. */
typedef struct moe_maps {
    CUresult (*encode)(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base,
                       const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                       const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                       CUtensorMapFloatOOBfill fill);
} moe_maps;

cudaError_t moe_open_maps(moe_maps *maps);

/* Describes a map. strides: bytes from one index of dimension i + 1 to the next. */
typedef struct moe_boxes {
    const void *base;
    cuuint32_t rank; /* up to 5 */
    cuuint64_t sizes[5], strides[4];
    cuuint32_t box[5];
} moe_boxes;

void moe_map_boxes(moe_launch *on, CUtensorMap *map, smoe_type type, const moe_boxes *boxes);

/* (rows, columns), columns contiguous; boxes of box_rows rows. */
void moe_map_matrix(moe_launch *on, CUtensorMap *map, const void *base, int64_t rows, int64_t columns,
                    int box_rows);

/* (rows, columns), columns contiguous and a multiple of 64; boxes of `subtiles` times 64 columns and box_rows
 * rows at coordinates (0, column / 64, row). A row of a box is `subtiles` rows of 128 bytes in shared memory.
 */
void moe_map_side_by_side(moe_launch *on, CUtensorMap *map, const void *base, int64_t rows, int64_t columns,
                          int subtiles, int box_rows);

/* H (rows, halves, columns), halves 2 gated and 1 plain; boxes of one half and box_rows rows. */
void moe_map_halves(moe_launch *on, CUtensorMap *map, const void *base, int64_t rows, int halves,
                    int64_t columns, int box_rows);

/* W1 (experts, halves x intermediate, hidden). */
typedef struct moe_w1 {
    const void *base;
    int64_t experts, hidden, intermediate;
    int halves, interleaved;
} moe_w1;

/* Bytes from a feature of W1[e] to the next, from the gate half to the up half, and of W1[e]. */
typedef struct moe_w1_strides {
    cuuint64_t feature, half, expert;
} moe_w1_strides;

moe_w1_strides moe_strides_of_w1(const moe_w1 *w1, int64_t element);

/* W1 as the up-projection reads it: boxes of box_rows rows of W1[e], gated eight gate rows, the same
 * features' eight up rows, and so on, in either layout; coordinates (column, 0, 0, feature / 8, expert). */
void moe_map_w1(moe_launch *on, CUtensorMap *map, const moe_w1 *w1, int box_rows);

/* A tensor (groups, rows, columns) whose boxes are MN-major operands: subtiles of 64 columns by 64 rows of
 * one group, side by side. When columns is a multiple of 64 a box is `subtiles` subtiles, at coordinates (0,
 * row, column / 64, group); else subtiles come apart, a box each, at (column, row, 0, group). */
typedef struct moe_subtiles {
    const void *base;
    int64_t columns, rows, row_bytes; /* from a row to the next */
    int64_t groups, group_bytes;
} moe_subtiles;

static inline int moe_subtiles_apart(int64_t columns)
{
    return columns % 64 != 0;
}

void moe_map_subtiles(moe_launch *on, CUtensorMap *map, const moe_subtiles *tensor, int subtiles);

/* W1 the same way, (experts, halves, features, d) in either layout; coordinates (0, feature, column / 64,
 * half, expert), apart (column, feature, 0, half, expert). */
void moe_map_w1_subtiles(moe_launch *on, CUtensorMap *map, const moe_w1 *w1, int subtiles);

#ifdef __cplusplus
}
#endif
#endif
