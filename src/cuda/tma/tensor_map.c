#include "tma/tensor_map.h"
#include "problem.h"

#include <string.h>

enum { BOX_BYTES = 128, SUBTILE_ROWS = 64 };

cudaError_t moe_open_maps(moe_maps *maps)
{
    void *function = NULL;
    enum cudaDriverEntryPointQueryResult found;
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                                cudaEnableDefault, &found);
    memcpy(&maps->encode, &function, sizeof function);
    if (status != cudaSuccess) return status;
    return found == cudaDriverEntryPointSuccess && function ? cudaSuccess : cudaErrorInsufficientDriver;
}

/* False for a type that no map has. */
static int type_of(smoe_type type, CUtensorMapDataType *of)
{
    switch (type) {
    case SMOE_TYPE_F32: *of = CU_TENSOR_MAP_DATA_TYPE_FLOAT32; return 1;
    case SMOE_TYPE_BF16: *of = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16; return 1;
    case SMOE_TYPE_F16: *of = CU_TENSOR_MAP_DATA_TYPE_FLOAT16; return 1;
    case SMOE_TYPE_I32:
    case SMOE_TYPE_I64: break;
    }
    return 0;
}

void moe_map_boxes(moe_launch *on, CUtensorMap *map, smoe_type type, const moe_boxes *b)
{
    static const cuuint32_t every[] = {1, 1, 1, 1, 1};
    const moe_maps *maps = on->state;
    CUtensorMapDataType of;
    const CUresult status =
        type_of(type, &of)
            ? maps->encode(map, of, b->rank, (void *)(uintptr_t)b->base, b->sizes, b->strides, b->box, every,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
            : CUDA_ERROR_INVALID_VALUE;
    if (status == CUDA_SUCCESS || on->refused_call) return;
    on->refused_call = "cuTensorMapEncodeTiled";
    on->refusal = (int)status;
}

static cuuint64_t element_of(const moe_launch *on)
{
    return (cuuint64_t)moe_type_bytes(on->dtype);
}

static cuuint32_t box_columns(const moe_launch *on)
{
    return (cuuint32_t)(BOX_BYTES / element_of(on));
}

void moe_map_matrix(moe_launch *on, CUtensorMap *map, const void *base, int64_t rows, int64_t columns,
                    int box_rows)
{
    const moe_boxes boxes = {
        .base = base,
        .rank = 2,
        .sizes = {(cuuint64_t)columns, (cuuint64_t)rows},
        .strides = {(cuuint64_t)columns * element_of(on)},
        .box = {box_columns(on), (cuuint32_t)box_rows},
    };
    moe_map_boxes(on, map, on->dtype, &boxes);
}

void moe_map_side_by_side(moe_launch *on, CUtensorMap *map, const void *base, int64_t rows, int64_t columns,
                          int subtiles, int box_rows)
{
    const cuuint64_t wide = box_columns(on);
    const moe_boxes boxes = {
        .base = base,
        .rank = 3,
        .sizes = {wide, (cuuint64_t)columns / wide, (cuuint64_t)rows},
        .strides = {BOX_BYTES, (cuuint64_t)columns * element_of(on)},
        .box = {(cuuint32_t)wide, (cuuint32_t)subtiles, (cuuint32_t)box_rows},
    };
    moe_map_boxes(on, map, on->dtype, &boxes);
}

void moe_map_halves(moe_launch *on, CUtensorMap *map, const void *base, int64_t rows, int halves,
                    int64_t columns, int box_rows)
{
    const cuuint64_t half = (cuuint64_t)columns * element_of(on);
    const moe_boxes boxes = {
        .base = base,
        .rank = 3,
        .sizes = {(cuuint64_t)columns, (cuuint64_t)halves, (cuuint64_t)rows},
        .strides = {half, half * (cuuint64_t)halves},
        .box = {box_columns(on), 1, (cuuint32_t)box_rows},
    };
    moe_map_boxes(on, map, on->dtype, &boxes);
}

moe_w1_strides moe_strides_of_w1(const moe_w1 *w1, int64_t element)
{
    const cuuint64_t row = (cuuint64_t)(w1->hidden * element), n = (cuuint64_t)w1->intermediate;
    const moe_w1_strides s = {w1->interleaved ? 2 * row : row, w1->interleaved ? row : n * row,
                              (cuuint64_t)w1->halves * n * row};
    return s;
}

void moe_map_w1(moe_launch *on, CUtensorMap *map, const moe_w1 *w1, int box_rows)
{
    const moe_w1_strides s = moe_strides_of_w1(w1, moe_type_bytes(on->dtype));
    const cuuint32_t halves = (cuuint32_t)w1->halves;
    const moe_boxes boxes = {
        .base = w1->base,
        .rank = 5,
        .sizes = {(cuuint64_t)w1->hidden, 8, halves, (cuuint64_t)w1->intermediate / 8,
                  (cuuint64_t)w1->experts},
        .strides = {s.feature, s.half, 8 * s.feature, s.expert},
        .box = {box_columns(on), 8, halves, (cuuint32_t)box_rows / (8 * halves), 1},
    };
    moe_map_boxes(on, map, on->dtype, &boxes);
}

void moe_map_subtiles(moe_launch *on, CUtensorMap *map, const moe_subtiles *t, int subtiles)
{
    const int apart = moe_subtiles_apart(t->columns);
    const cuuint64_t row = (cuuint64_t)t->row_bytes, wide = box_columns(on);
    const moe_boxes boxes = {
        .base = t->base,
        .rank = 4,
        .sizes = {apart ? (cuuint64_t)t->columns : wide, (cuuint64_t)t->rows,
                  apart ? 1 : (cuuint64_t)t->columns / wide, (cuuint64_t)t->groups},
        .strides = {row, apart ? row : BOX_BYTES, (cuuint64_t)t->group_bytes},
        .box = {(cuuint32_t)wide, SUBTILE_ROWS, apart ? 1 : (cuuint32_t)subtiles, 1},
    };
    moe_map_boxes(on, map, on->dtype, &boxes);
}

void moe_map_w1_subtiles(moe_launch *on, CUtensorMap *map, const moe_w1 *w1, int subtiles)
{
    const cuuint64_t d = (cuuint64_t)w1->hidden, wide = box_columns(on);
    const moe_w1_strides s = moe_strides_of_w1(w1, moe_type_bytes(on->dtype));
    const int apart = moe_subtiles_apart(w1->hidden);
    const moe_boxes boxes = {
        .base = w1->base,
        .rank = 5,
        .sizes = {apart ? d : wide, (cuuint64_t)w1->intermediate, apart ? 1 : d / wide,
                  (cuuint64_t)w1->halves, (cuuint64_t)w1->experts},
        .strides = {s.feature, apart ? s.feature : BOX_BYTES, s.half, s.expert},
        .box = {(cuuint32_t)wide, SUBTILE_ROWS, apart ? 1 : (cuuint32_t)subtiles, 1, 1},
    };
    moe_map_boxes(on, map, on->dtype, &boxes);
}
