/* Tensor maps: how TMA finds the boxes of a tensor in global memory. */
#include "sm90/tensor_map.h"

enum { MOST_DIMENSIONS = 5, ELEMENT = 2, BOX_COLUMNS = 64 };

static CUtensorMapDataType type_of(smoe_type type)
{
    return type == SMOE_TYPE_F32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
           : type == SMOE_TYPE_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                    : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

/* strides: bytes from one index of dimension i + 1 to the next. */
static void make_of(smoe_map_maker *maker, CUtensorMap *map, smoe_type type, const void *base,
                    cuuint32_t rank, const cuuint64_t *sizes, const cuuint64_t *strides,
                    const cuuint32_t *box)
{
    static const cuuint32_t every[MOST_DIMENSIONS] = {1, 1, 1, 1, 1};
    const CUresult status =
        maker->encode(map, type_of(type), rank, (void *)(uintptr_t)base, sizes, strides, box, every,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (maker->status == CUDA_SUCCESS) maker->status = status;
}

static void make(smoe_map_maker *maker, CUtensorMap *map, const void *base, cuuint32_t rank,
                 const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box)
{
    make_of(maker, map, maker->dtype, base, rank, sizes, strides, box);
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
                int64_t columns, int box_rows)
{
    const cuuint64_t half = (cuuint64_t)columns * ELEMENT;
    const cuuint64_t sizes[] = {(cuuint64_t)columns, (cuuint64_t)halves, (cuuint64_t)rows};
    const cuuint64_t strides[] = {half, half * (cuuint64_t)halves};
    const cuuint32_t box[] = {BOX_COLUMNS, 1, (cuuint32_t)box_rows};
    make(maker, map, base, 3, sizes, strides, box);
}

void smoe_map_w1(smoe_map_maker *maker, CUtensorMap *map, const void *base, const smoe_layer *layer,
                 int gated)
{
    const cuuint64_t d = (cuuint64_t)layer->hidden, n = (cuuint64_t)layer->intermediate, row = d * ELEMENT;
    const int interleaved = gated && layer->layout == SMOE_LAYOUT_INTERLEAVED;
    const cuuint64_t feature = interleaved ? 2 * row : row;
    const cuuint64_t sizes[] = {d, 8, gated ? 2 : 1, n / 8, (cuuint64_t)layer->experts};
    const cuuint64_t strides[] = {feature, interleaved ? row : n * row, 8 * feature,
                                  (gated ? 2 * n : n) * row};
    const cuuint32_t box[] = {BOX_COLUMNS, 8, gated ? 2 : 1, gated ? 16 : 32, 1};
    make(maker, map, base, 5, sizes, strides, box);
}

void smoe_map_panels(smoe_map_maker *maker, CUtensorMap *map, const void *base, const smoe_panels *t,
                     int panels)
{
    const int apart = t->columns % BOX_COLUMNS != 0;
    const cuuint64_t row = (cuuint64_t)t->row_bytes, group = (cuuint64_t)t->group_bytes;
    const cuuint64_t sizes[] = {apart ? (cuuint64_t)t->columns : BOX_COLUMNS, (cuuint64_t)t->rows,
                                apart ? 1 : (cuuint64_t)t->columns / BOX_COLUMNS, (cuuint64_t)t->groups};
    const cuuint64_t strides[] = {row, apart ? row : BOX_COLUMNS * ELEMENT, group};
    const cuuint32_t box[] = {BOX_COLUMNS, 64, apart ? 1 : (cuuint32_t)panels, 1};
    make(maker, map, base, 4, sizes, strides, box);
}

/* Bytes from a feature of W1[e] to the next, from the gate half to the up half, and of W1[e]. */
typedef struct w1_strides {
    cuuint64_t feature, half, expert;
} w1_strides;

static w1_strides strides_of_w1(const smoe_layer *layer, int gated, cuuint64_t element)
{
    const cuuint64_t row = (cuuint64_t)layer->hidden * element, n = (cuuint64_t)layer->intermediate;
    const int interleaved = gated && layer->layout == SMOE_LAYOUT_INTERLEAVED;
    const w1_strides s = {interleaved ? 2 * row : row, interleaved ? row : n * row,
                          (gated ? 2 * n : n) * row};
    return s;
}

void smoe_map_w1_panels(smoe_map_maker *maker, CUtensorMap *map, const void *base, const smoe_layer *layer,
                        int gated, int panels)
{
    const cuuint64_t d = (cuuint64_t)layer->hidden;
    const w1_strides s = strides_of_w1(layer, gated, ELEMENT);
    const int apart = d % BOX_COLUMNS != 0;
    const cuuint64_t sizes[] = {apart ? d : BOX_COLUMNS, (cuuint64_t)layer->intermediate,
                                apart ? 1 : d / BOX_COLUMNS, gated ? 2 : 1, (cuuint64_t)layer->experts};
    const cuuint64_t strides[] = {s.feature, apart ? s.feature : BOX_COLUMNS * ELEMENT, s.half, s.expert};
    const cuuint32_t box[] = {BOX_COLUMNS, 64, apart ? 1 : (cuuint32_t)panels, 1, 1};
    make(maker, map, base, 5, sizes, strides, box);
}

enum { BOX_BYTES = BOX_COLUMNS * ELEMENT };

void smoe_map_dw2(smoe_map_maker *maker, CUtensorMap *map, const void *base, const smoe_layer *layer)
{
    const cuuint64_t element = layer->gradient_type == SMOE_TYPE_F32 ? 4 : ELEMENT;
    const cuuint64_t d = (cuuint64_t)layer->hidden, n = (cuuint64_t)layer->intermediate, row = n * element;
    const cuuint64_t sizes[] = {n, d, 1, (cuuint64_t)layer->experts}, strides[] = {row, row, d * row};
    const cuuint32_t box[] = {BOX_BYTES / (cuuint32_t)element, 64, 1, 1};
    make_of(maker, map, layer->gradient_type, base, 4, sizes, strides, box);
}

void smoe_map_dw1(smoe_map_maker *maker, CUtensorMap *map, const void *base, const smoe_layer *layer,
                  int gated)
{
    const cuuint64_t element = layer->gradient_type == SMOE_TYPE_F32 ? 4 : ELEMENT;
    const w1_strides s = strides_of_w1(layer, gated, element);
    const cuuint64_t sizes[] = {(cuuint64_t)layer->hidden, (cuuint64_t)layer->intermediate, gated ? 2 : 1,
                                (cuuint64_t)layer->experts};
    const cuuint64_t strides[] = {s.feature, s.half, s.expert};
    const cuuint32_t box[] = {BOX_BYTES / (cuuint32_t)element, element == ELEMENT ? 128 : 64, 1, 1};
    make_of(maker, map, layer->gradient_type, base, 4, sizes, strides, box);
}
