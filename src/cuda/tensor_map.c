/* Tensor maps: how TMA finds the boxes of a tensor in global memory. */
#include "tensor_map.h"

enum { MOST_DIMENSIONS = 5, ELEMENT = 2, BOX_COLUMNS = 64 };

/* strides: bytes from one index of dimension i + 1 to the next. */
static void make(smoe_map_maker *maker, CUtensorMap *map, const void *base, cuuint32_t rank,
                 const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box)
{
    static const cuuint32_t every[MOST_DIMENSIONS] = {1, 1, 1, 1, 1};
    const CUresult status = maker->encode(
        map, maker->dtype == SMOE_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        rank, (void *)(uintptr_t)base, sizes, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (maker->status == CUDA_SUCCESS) maker->status = status;
}

void smoe_map_matrix(smoe_map_maker *maker, CUtensorMap *map, const void *base, int64_t rows, int64_t columns,
                     int box_rows)
{
    const cuuint64_t sizes[] = {(cuuint64_t)columns, (cuuint64_t)rows};
    const cuuint64_t strides[] = {(cuuint64_t)columns * ELEMENT};
    const cuuint32_t box[] = {BOX_COLUMNS, (cuuint32_t)box_rows};
    make(maker, map, base, 2, sizes, strides, box);
}

void smoe_map_h(smoe_map_maker *maker, CUtensorMap *map, const void *base, int64_t rows, int halves,
                int64_t columns)
{
    const cuuint64_t half = (cuuint64_t)columns * ELEMENT;
    const cuuint64_t sizes[] = {(cuuint64_t)columns, (cuuint64_t)halves, (cuuint64_t)rows};
    const cuuint64_t strides[] = {half, half * (cuuint64_t)halves};
    const cuuint32_t box[] = {BOX_COLUMNS, 1, 64};
    make(maker, map, base, 3, sizes, strides, box);
}

void smoe_map_w1(smoe_map_maker *maker, CUtensorMap *map, const void *base, const smoe_layer *layer,
                 int gated)
{
    const cuuint64_t d = (cuuint64_t)layer->hidden, n = (cuuint64_t)layer->intermediate, row = d * ELEMENT;
    const int interleaved = gated && layer->layout == SMOE_INTERLEAVED;
    const cuuint64_t feature = interleaved ? 2 * row : row;
    const cuuint64_t sizes[] = {d, 8, gated ? 2 : 1, n / 8, (cuuint64_t)layer->experts};
    const cuuint64_t strides[] = {feature, interleaved ? row : n * row, 8 * feature,
                                  (gated ? 2 * n : n) * row};
    const cuuint32_t box[] = {BOX_COLUMNS, 8, gated ? 2 : 1, gated ? 16 : 32, 1};
    make(maker, map, base, 5, sizes, strides, box);
}
