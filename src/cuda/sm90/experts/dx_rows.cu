// dX~[r] = dH[r] W1[e], for one column chunk of d.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Shapes: dH (padded rows, h), W1 (E, h, d), dX~ (padded rows, columns of the chunk), where h is the number
// of columns of H. FLOPs 2 R d h over all chunks.
//
// Bytes over all chunks, of 16-bit elements:
// - dH: 2 R h, read once for each column tile. L2 can serve every column tile after the first.
// - W1: 2 E d h, read once if L2 serves all row tiles of each expert except its first.
// - dX~: 2 R d written.
//
// Tile: 128 x 256 on the cooperative core (gemm_cooperative.cuh), 128 x 192 on the ping-pong core
// (gemm_ping_pong.cuh; the last column tile may be narrower) or 64 x 256 on the weight-stationary core
// (gemm_stationary.cuh); see gemm_choice.h. With LoRA always the first. W1 is MN-major, as it is in memory.
// The GEMM sums over the gate rows of W1 and then over the up rows, in both layouts of W1. With LoRA Q1[r]
// A1[e] is added to dX~[r].
#include "common/instances.cuh"
#include "sm90/gemm_launch.cuh"
#include "sm90/kernels.h"

namespace moe
{

struct dx_rows_params {
    CUtensorMap a;                // dH, moe_map_halves
    CUtensorMap w1;               // moe_map_w1_subtiles: a tile's columns
    CUtensorMap y;                // 2-D: the chunk's columns, rows
    const int32_t *block_offsets; // as in moe_up, or NULL: one expert
    int32_t block_stride;
    moe_cuda_backward_lists lists;
    int32_t hidden, intermediate, halves; // intermediate: columns of a half of dH
    int32_t subtiles_apart;
    int32_t first_column, columns; // the chunk
    int32_t turn;                  // moe_turn, for the ping-pong core
};

template <> struct operands<dx_rows_params> {
    static constexpr operand_order WEIGHTS = MN_MAJOR;
    static constexpr bool HAS_BIAS = false, LOW_RANK = false;
    enum { STEP = 64 };

    static MOE_DEVICE int steps_of_half(const dx_rows_params &p)
    {
        return (p.intermediate + STEP - 1) / STEP;
    }
    static MOE_DEVICE int steps(const dx_rows_params &p)
    {
        return steps_of_half(p) * p.halves;
    }
    static MOE_DEVICE void prefetch(const dx_rows_params &p)
    {
        prefetch_map(&p.a);
        prefetch_map(&p.w1);
        prefetch_map(&p.y);
    }
    static MOE_DEVICE moe_work piece(const dx_rows_params &p, int i)
    {
        const int4 v = __ldg((const int4 *)(p.lists.pieces + i)); // moe_piece
        return moe_work_make(v.x, v.y, v.z);
    }
    static MOE_DEVICE void load_rows(const dx_rows_params &p, uint32_t to, uint32_t full, int k,
                                     moe_work tile)
    {
        const int half = k >= steps_of_half(p);
        load_box(to, &p.a, full, (k - half * steps_of_half(p)) * STEP, half, tile.row);
    }
    template <int COLUMNS>
    static MOE_DEVICE void load_weights(const dx_rows_params &p, uint32_t to, uint32_t full, int k,
                                        moe_work tile, int column)
    {
        const int half = k >= steps_of_half(p), feature = (k - half * steps_of_half(p)) * STEP;
        const int expert = moe_work_expert(tile), first = p.first_column + column;
        if (!p.subtiles_apart)
            return load_box(to, &p.w1, full, 0, feature, first / MOE_SUBTILE_COLUMNS, half, expert);
        for (int i = 0; i < COLUMNS / MOE_SUBTILE_COLUMNS; i++)
            load_box(to + i * MOE_SUBTILE_BYTES, &p.w1, full, first + i * MOE_SUBTILE_COLUMNS, feature, 0,
                     half, expert);
    }
};

// With LoRA: Q1 and A1 are more columns of K, behind those of dH and W1.
struct dx_rows_lora_params : dx_rows_params {
    CUtensorMap q1; // 2-D: `rank` columns, rows
    CUtensorMap a1; // moe_map_subtiles of (E, rank, hidden): a tile's columns
    int32_t rank;
};

template <> struct operands<dx_rows_lora_params> : operands<dx_rows_params> {
    using plain = operands<dx_rows_params>;
    static constexpr bool LOW_RANK = true;

    static MOE_DEVICE int steps(const dx_rows_lora_params &p)
    {
        return plain::steps(p) + (p.rank + STEP - 1) / STEP;
    }
    static MOE_DEVICE void prefetch(const dx_rows_lora_params &p)
    {
        plain::prefetch(p);
        prefetch_map(&p.q1);
        prefetch_map(&p.a1);
    }
    static MOE_DEVICE void load_rows(const dx_rows_lora_params &p, uint32_t to, uint32_t full, int k,
                                     moe_work tile)
    {
        const int low = k - plain::steps(p);
        if (low < 0) return plain::load_rows(p, to, full, k, tile);
        load_box(to, &p.q1, full, low * STEP, tile.row);
    }
    template <int COLUMNS>
    static MOE_DEVICE void load_weights(const dx_rows_lora_params &p, uint32_t to, uint32_t full, int k,
                                        moe_work tile, int column)
    {
        const int low = k - plain::steps(p), expert = moe_work_expert(tile), first = p.first_column + column;
        if (low < 0) return plain::load_weights<COLUMNS>(p, to, full, k, tile, column);
        if (!p.subtiles_apart)
            return load_box(to, &p.a1, full, 0, low * STEP, first / MOE_SUBTILE_COLUMNS, expert);
        for (int i = 0; i < COLUMNS / MOE_SUBTILE_COLUMNS; i++)
            load_box(to + i * MOE_SUBTILE_BYTES, &p.a1, full, first + i * MOE_SUBTILE_COLUMNS, low * STEP, 0,
                     expert);
    }
};

namespace
{

// Of the GEMM.
int64_t steps_of(const moe_dx_rows &d)
{
    return d.halves * moe_divide_up(d.row_width, operands<dx_rows_params>::STEP) +
           moe_divide_up(d.lora.rank, operands<dx_rows_params>::STEP);
}

moe_gemm core_for(const moe_dx_rows &d)
{
    return d.lora.rank ? MOE_GEMM_COOPERATIVE : moe_gemm_choose_dx(d.halves * d.row_width, d.columns);
}

void map_lora(moe_launch *on, dx_rows_lora_params *p, const moe_dx_rows &d, const gemm_core &core)
{
    const int64_t row_bytes = d.hidden * moe_type_bytes(on->dtype);
    const moe_subtiles a1 = {d.lora.factor, d.hidden,  d.lora.rank,
                             row_bytes,     d.experts, d.lora.rank * row_bytes};
    moe_map_matrix(on, &p->q1, d.lora.low, d.rows, d.lora.rank, core.rows);
    moe_map_subtiles(on, &p->a1, &a1, core.columns / MOE_SUBTILE_COLUMNS);
    p->rank = (int32_t)d.lora.rank;
}

dx_rows_lora_params prepare(moe_launch *on, const moe_dx_rows &d, moe_gemm kind)
{
    const moe_w1 w1 = {d.w1, d.experts, d.hidden, d.intermediate, d.halves, d.interleaved};
    const gemm_core core = core_of(kind);
    dx_rows_lora_params p = {};
    moe_map_halves(on, &p.a, d.dh, d.rows, d.halves, d.row_width, core.rows);
    moe_map_w1_subtiles(on, &p.w1, &w1, core.columns / MOE_SUBTILE_COLUMNS);
    map_result(on, &p.y, kind, steps_of(d), d.dx, d.rows, d.columns);
    p.block_offsets = d.block_offsets;
    p.block_stride = d.block_stride;
    p.lists = d.lists;
    p.hidden = (int32_t)d.hidden;
    p.intermediate = (int32_t)d.row_width;
    p.halves = d.halves;
    p.subtiles_apart = moe_subtiles_apart(d.hidden);
    p.first_column = (int32_t)d.first_column;
    p.columns = (int32_t)d.columns;
    p.turn = turn_of(on, d.columns);
    if (d.lora.rank) map_lora(on, &p, d, core);
    return p;
}

} // namespace
} // namespace moe

extern "C" cudaError_t moe_sm90_dx_rows_init(const moe_device *device)
{
    using namespace moe;
    return for_every_type(storage_types(), [&](auto t) {
        using T = typename decltype(t)::type;
        const cudaError_t status = init_gemms<T, dx_rows_params>(device);
        return status != cudaSuccess ? status : init_gemms<T, dx_rows_lora_params>(device);
    });
}

extern "C" cudaError_t moe_sm90_dx_rows(moe_launch *on, const moe_dx_rows *d)
{
    using namespace moe;
    const moe_gemm kind = core_for(*d);
    const dx_rows_lora_params p = prepare(on, *d, kind);
    if (on->refused_call) return cudaErrorInvalidValue;
    return for_type(storage_types(), on->dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        return p.rank ? enqueue_gemm<T>(on, kind, steps_of(*d), p)
                      : enqueue_gemm<T>(on, kind, steps_of(*d), (const dx_rows_params &)p);
    });
}
