// Down-projection in e4m3, for one column chunk of d: Y[r] = (sum over groups g of 128 features of
// (A8[r, g] W2_8[e, g]^T) scale_a[r, g]) scale2[e] + b2[e] (f8.h).
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Shapes: A8 (padded rows, n), its scales (padded rows, ceil(n / 128)), W2_8 (E, d, n), Y (padded rows,
// columns of the chunk) in dtype. FLOPs 2 R d n over all chunks.
//
// Bytes over all chunks: A8 R n and W2_8 E d n, each as often as in down.cu; Y 2 R d written.
//
// Tiles and cores: gemm_f8_rows.cuh. A group is a step of K.
#include "sm90/down_operands.cuh"
#include "sm90/f8_kernels.h"
#include "sm90/gemm_f8_rows.cuh"

namespace moe
{

struct down_f8_params : down_params { // intermediate: n / 2
    const float *a_scale;             // (padded_rows, groups)
    const float *w_scale;             // (experts)
    int32_t groups;                   // of a row
};

template <> struct operands<down_f8_params> : operands<down_params> {
    static MOE_DEVICE int group(const down_f8_params &, int k)
    {
        return k;
    }
};

namespace
{

int64_t steps_of(const moe_f8_down &d)
{
    return moe_f8_groups(d.down.intermediate, F8_STEP);
}
static_assert((int)F8_STEP == (int)MOE_F8_A_FEATURES, "a group is a step");

bool stays(const moe_f8_down &d)
{
    return f8_stays(steps_of(d), d.down.columns, d.down.b2 != NULL);
}

down_f8_params prepare(moe_launch *on, const moe_f8_down &f)
{
    const moe_down &d = f.down;
    const int64_t pairs = d.intermediate / 2; // bytes are moved as pairs
    down_f8_params p = {};
    moe_map_matrix(on, &p.a, d.a, d.rows, pairs,
                   stays(f) ? (int)MOE_BLOCK_ROWS : (int)gemm_f8_tiles::TILE_ROWS);
    moe_map_matrix(on, &p.w2, d.w2, d.experts * d.hidden, pairs, gemm_f8_tiles::TILE_COLUMNS);
    map_f8_result(on, &p.y, steps_of(f), stays(f), d.y, d.rows, d.columns);
    p.bias = d.b2;
    p.block_offsets = d.block_offsets;
    p.block_stride = d.block_stride;
    p.lists = d.lists;
    p.hidden = (int32_t)d.hidden;
    p.intermediate = (int32_t)pairs;
    p.first_column = (int32_t)d.first_column;
    p.columns = (int32_t)d.columns;
    p.a_scale = f.a_scale;
    p.w_scale = f.w_scale;
    p.groups = (int32_t)steps_of(f);
    return p;
}

} // namespace
} // namespace moe

extern "C" cudaError_t moe_sm90_f8_down_init(const moe_device *device)
{
    using namespace moe;
    return for_every_type(f8_storage_types(), [&](auto t) {
        return init_f8_rows<typename decltype(t)::type, down_f8_params>(device);
    });
}

extern "C" cudaError_t moe_sm90_f8_down(moe_launch *on, const moe_f8_down *d)
{
    using namespace moe;
    const down_f8_params p = prepare(on, *d);
    if (on->refused_call) return cudaErrorInvalidValue;
    return for_type(f8_storage_types(), on->dtype, [&](auto t) {
        return launch_f8_rows<typename decltype(t)::type>(on, steps_of(*d), stays(*d), p);
    });
}
