/* Tensor maps: how TMA finds the boxes of a tensor in global memory. All of 16-bit elements with the 128-byte
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

/* H (rows, halves, columns), halves 2 gated and 1 plain; boxes of 64 columns, one half and 64 rows. */
void smoe_map_h(smoe_map_maker *maker, CUtensorMap *map, const void *base, int64_t rows, int halves,
                int64_t columns);

/* W1 as the up-projection reads it: boxes of 64 columns and 256 rows of W1[e], gated eight gate rows, the
 * same features' eight up rows, and so on, in either layout; coordinates (column, 0, 0, feature / 8, expert).
 */
void smoe_map_w1(smoe_map_maker *maker, CUtensorMap *map, const void *base, const smoe_layer *layer,
                 int gated);

#endif
