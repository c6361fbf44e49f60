// dX~[r] = (sum over groups g of 256 features of (dH8[r, g] W1_8[e, g]) scale_dh[r, g]) scale1[e] in e4m3,
// for one column chunk of d (f8.h). Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Shapes: dH8 (padded rows, h), its scales (padded rows, ceil(n / 256)), W1_8 transposed (E, d, h) with gate
// columns before up columns, dX~ (padded rows, columns of the chunk) in dtype, where h is the number of
// columns of H. FLOPs 2 R d h over all chunks.
//
// Bytes over all chunks: dH8 R h and W1_8 E d h, each as often as in dx_rows.cu; dX~ 2 R d written.
//
// Tiles and cores: gemm_f8_rows.cuh. A step is 128 columns of the gate half or of the up half. The steps go
// group by group, first its gate columns, then its up columns, so that the scale changes once a group.
#include "sm90/f8_kernels.h"
#include "sm90/gemm_f8_rows.cuh"

namespace moe
{

struct dx_rows_f8_params {
    CUtensorMap a;                // dH8, moe_map_halves of pairs
    CUtensorMap w1;               // the same of W1_8 transposed, (E d) rows
    CUtensorMap y;                // 2-D: the chunk's columns, rows
    const int32_t *block_offsets; // as in moe_up
    int32_t block_stride;
    moe_cuda_backward_lists lists;
    int32_t hidden, halves;
    int32_t half_steps;            // of a half of dH
    int32_t first_column, columns; // the chunk
    const float *a_scale;          // (padded_rows, groups)
    const float *w_scale;          // (experts)
    int32_t groups;                // of a row
};

template <> struct operands<dx_rows_f8_params> {
    static constexpr bool HAS_BIAS = false;
    enum { STEP = 64, GROUP = MOE_F8_DH_FEATURES / F8_STEP }; // pairs of a step; steps of half a group
    static_assert(GROUP == 2,
                  "place_of: only the last group can be shorter, and then it has one step a half");

    static MOE_DEVICE int steps(const dx_rows_f8_params &p)
    {
        return p.half_steps * p.halves;
    }
    // Step k: its group, half and step of the half.
    struct place {
        int group, half, step;
    };
    static MOE_DEVICE place place_of(const dx_rows_f8_params &p, int k)
    {
        if (p.halves == 1) return {k / GROUP, 0, k};
        const int group = k / (2 * GROUP), rest = k % (2 * GROUP);
        const bool whole = group * GROUP + GROUP <= p.half_steps;
        return {group, whole ? rest / GROUP : rest, group * GROUP + (whole ? rest % GROUP : 0)};
    }
    static MOE_DEVICE int group(const dx_rows_f8_params &p, int k)
    {
        return place_of(p, k).group;
    }
    static MOE_DEVICE void prefetch(const dx_rows_f8_params &p)
    {
        prefetch_map(&p.a);
        prefetch_map(&p.w1);
        prefetch_map(&p.y);
    }
    static MOE_DEVICE moe_work piece(const dx_rows_f8_params &p, int i)
    {
        const int4 v = __ldg((const int4 *)(p.lists.pieces + i)); // moe_piece
        return moe_work_make(v.x, v.y, v.z);
    }
    static MOE_DEVICE void load_rows(const dx_rows_f8_params &p, uint32_t to, uint32_t full, int k,
                                     moe_work tile)
    {
        const place at = place_of(p, k);
        load_box(to, &p.a, full, at.step * STEP, at.half, tile.row);
    }
    template <int COLUMNS>
    static MOE_DEVICE void load_weights(const dx_rows_f8_params &p, uint32_t to, uint32_t full, int k,
                                        moe_work tile, int column)
    {
        const place at = place_of(p, k);
        load_box(to, &p.w1, full, at.step * STEP, at.half,
                 moe_work_expert(tile) * p.hidden + p.first_column + column);
    }
};

namespace
{

int64_t steps_of(const moe_f8_dx_rows &d)
{
    return d.dx.halves * moe_f8_groups(d.dx.intermediate, F8_STEP);
}

bool stays(const moe_f8_dx_rows &d)
{
    return f8_stays(steps_of(d), d.dx.columns, false);
}

dx_rows_f8_params prepare(moe_launch *on, const moe_f8_dx_rows &f)
{
    const moe_dx_rows &d = f.dx;
    const int64_t pairs = d.intermediate / 2; // bytes are moved as pairs
    dx_rows_f8_params p = {};
    moe_map_halves(on, &p.a, d.dh, d.rows, d.halves, pairs,
                   stays(f) ? (int)MOE_BLOCK_ROWS : (int)gemm_f8_tiles::TILE_ROWS);
    moe_map_halves(on, &p.w1, d.w1, d.experts * d.hidden, d.halves, pairs, gemm_f8_tiles::TILE_COLUMNS);
    map_f8_result(on, &p.y, steps_of(f), stays(f), d.dx, d.rows, d.columns);
    p.block_offsets = d.block_offsets;
    p.block_stride = d.block_stride;
    p.lists = d.lists;
    p.hidden = (int32_t)d.hidden;
    p.halves = d.halves;
    p.half_steps = (int32_t)moe_f8_groups(d.intermediate, F8_STEP);
    p.first_column = (int32_t)d.first_column;
    p.columns = (int32_t)d.columns;
    p.a_scale = f.dh_scale;
    p.w_scale = f.w_scale;
    p.groups = (int32_t)moe_f8_groups(d.intermediate, MOE_F8_DH_FEATURES);
    return p;
}

} // namespace
} // namespace moe

extern "C" cudaError_t moe_sm90_f8_dx_rows_init(const moe_device *device)
{
    using namespace moe;
    return for_every_type(f8_storage_types(), [&](auto t) {
        return init_f8_rows<typename decltype(t)::type, dx_rows_f8_params>(device);
    });
}

extern "C" cudaError_t moe_sm90_f8_dx_rows(moe_launch *on, const moe_f8_dx_rows *d)
{
    using namespace moe;
    const dx_rows_f8_params p = prepare(on, *d);
    if (on->refused_call) return cudaErrorInvalidValue;
    return for_type(f8_storage_types(), on->dtype, [&](auto t) {
        return launch_f8_rows<typename decltype(t)::type>(on, steps_of(*d), stays(*d), p);
    });
}
