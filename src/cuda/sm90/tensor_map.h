/* Tensor maps: how TMA finds the boxes of a tensor in global memory. All with the 128-byte
 * swizzle; what lies outside reads as zero and is not written. */
#ifndef SMOE_CUDA_TENSOR_MAP_H
#define SMOE_CUDA_TENSOR_MAP_H

#include <cuda.h>
#include <smoe.h>

/* cuTensorMapEncodeTiled, found at run time so that the library loads where no driver is. */
typedef CUresult (*smoe_encode_map)(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base,
                                    const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                    const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                    CUtensorMapFloatOOBfill fill);

/* A map under construction; the first error stays. */
typedef struct smoe_map_maker {
    smoe_encode_map encode;
    smoe_type dtype;
    CUresult status;
} smoe_map_maker;

/* (rows, columns), columns contiguous; boxes of 64 columns and box_rows rows. */
void smoe_map_matrix(smoe_map_maker *maker, CUtensorMap *map, const void *base, int64_t rows, int64_t columns,
                     int box_rows);

/* H (rows, halves, columns), halves 2 gated and 1 plain; boxes of 64 columns, one half and
 * box_rows rows. */
void smoe_map_h(smoe_map_maker *maker, CUtensorMap *map, const void *base, int64_t rows, int halves,
                int64_t columns, int box_rows);

/* W1 as the up-projection reads it: boxes of 64 columns and 256 rows of W1[e], gated eight gate rows, the
 * same features' eight up rows, and so on, in either layout; coordinates (column, 0, 0, feature / 8, expert).
 */
void smoe_map_w1(smoe_map_maker *maker, CUtensorMap *map, const void *base, const smoe_layer *layer,
                 int gated);

/* A tensor (groups, rows, columns) whose boxes are MN-major operands: panels of 64 columns by 64 rows of one
 * group, side by side. When columns is a multiple of 64 a box is `panels` panels, at coordinates (0, row,
 * column / 64, group); else panels come apart, a box each, at (column, row, 0, group). */
typedef struct smoe_panels {
    int64_t columns, rows, row_bytes; /* from a row to the next */
    int64_t groups, group_bytes;
} smoe_panels;

static inline int smoe_panels_apart(int64_t columns)
{
    return columns % 64 != 0;
}

void smoe_map_panels(smoe_map_maker *maker, CUtensorMap *map, const void *base, const smoe_panels *tensor,
                     int panels);

/* W1 the same way, (experts, halves, features, d) in either layout; coordinates (0, feature, column / 64,
 * half, expert), apart (column, feature, 0, half, expert). */
void smoe_map_w1_panels(smoe_map_maker *maker, CUtensorMap *map, const void *base, const smoe_layer *layer,
                        int gated, int panels);

/* dW2: boxes of 128 bytes of n by 64 of d; coordinates (feature, d, 0, expert). dW1: 128 bytes of d by 128
 * features of 16 bits or 64 of 32; coordinates (d, feature, half, expert). In the layer's gradient type. */
void smoe_map_dw2(smoe_map_maker *maker, CUtensorMap *map, const void *base, const smoe_layer *layer);
void smoe_map_dw1(smoe_map_maker *maker, CUtensorMap *map, const void *base, const smoe_layer *layer,
                  int gated);

#endif
