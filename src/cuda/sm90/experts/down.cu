// Down-projection: Y[r] = A[r] W2[e]^T + b2[e], for one column chunk of d.
// For few rows few_rows.cu computes it. With LoRA P2[r] B2[e]^T is added to Y[r].
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Shapes: A (padded rows, n), W2 (E, d, n), Y (padded rows, columns of the chunk). FLOPs 2 R d n over all
// chunks.
//
// Bytes over all chunks, of 16-bit elements:
// - A: 2 R n, read once for each column tile. L2 can serve every column tile after the first.
// - W2: 2 E d n, read once if L2 serves all row tiles of each expert except its first.
// - Y: 2 R d written.
//
// Three cores can compute Y:
//
//   core               file                 tile
//   cooperative        gemm_cooperative.cuh 128 x 256
//   ping-pong          gemm_ping_pong.cuh   128 x 192, the last column tile may be narrower
//   weight-stationary  gemm_stationary.cuh  64 x 256
//
// Only the cooperative core can add a bias or LoRA's product, so layers with them use it. For other layers
// moe_gemm_choose estimates from n and from the columns of the chunk which core is fastest.
#include "common/instances.cuh"
#include "sm90/down_operands.cuh"
#include "sm90/gemm_launch.cuh"
#include "sm90/kernels.h"

namespace moe
{

// With LoRA: P2 and B2 are more columns of K, behind those of A and W2.
struct down_lora_params : down_params {
    CUtensorMap p2, b2; // as a and w2, of `rank` columns
    int32_t rank;
};

template <> struct operands<down_lora_params> : operands<down_params> {
    using plain = operands<down_params>;
    static constexpr bool LOW_RANK = true;

    static MOE_DEVICE int steps(const down_lora_params &p)
    {
        return plain::steps(p) + (p.rank + STEP - 1) / STEP;
    }
    static MOE_DEVICE void prefetch(const down_lora_params &p)
    {
        plain::prefetch(p);
        prefetch_map(&p.p2);
        prefetch_map(&p.b2);
    }
    static MOE_DEVICE void load_rows(const down_lora_params &p, uint32_t to, uint32_t full, int k,
                                     moe_work tile)
    {
        const int low = k - plain::steps(p);
        if (low < 0) return plain::load_rows(p, to, full, k, tile);
        load_box(to, &p.p2, full, low * STEP, tile.row);
    }
    template <int COLUMNS>
    static MOE_DEVICE void load_weights(const down_lora_params &p, uint32_t to, uint32_t full, int k,
                                        moe_work tile, int column)
    {
        const int low = k - plain::steps(p);
        if (low < 0) return plain::load_weights<COLUMNS>(p, to, full, k, tile, column);
        load_box(to, &p.b2, full, low * STEP, moe_work_expert(tile) * p.hidden + p.first_column + column);
    }
};

namespace
{

int64_t steps_of(const moe_down &d)
{
    return moe_divide_up(d.intermediate, operands<down_params>::STEP) +
           moe_divide_up(d.lora.rank, operands<down_params>::STEP);
}

moe_gemm core_for(const moe_down &d)
{
    return d.lora.rank ? MOE_GEMM_COOPERATIVE : moe_gemm_choose(d.intermediate, d.columns, d.b2 != NULL);
}

down_lora_params prepare(moe_launch *on, const moe_down &d, moe_gemm kind)
{
    const gemm_core core = core_of(kind);
    down_lora_params p = {};
    moe_map_matrix(on, &p.a, d.a, d.rows, d.intermediate, core.rows);
    moe_map_matrix(on, &p.w2, d.w2, d.experts * d.hidden, d.intermediate, core.columns);
    map_result(on, &p.y, kind, steps_of(d), d.y, d.rows, d.columns);
    p.bias = d.b2;
    p.block_offsets = d.block_offsets;
    p.block_stride = d.block_stride;
    p.lists = d.lists;
    p.hidden = (int32_t)d.hidden;
    p.intermediate = (int32_t)d.intermediate;
    p.first_column = (int32_t)d.first_column;
    p.columns = (int32_t)d.columns;
    p.turn = turn_of(on, d.columns);
    p.rank = (int32_t)d.lora.rank;
    if (!p.rank) return p;
    moe_map_matrix(on, &p.p2, d.lora.low, d.rows, d.lora.rank, core.rows);
    moe_map_matrix(on, &p.b2, d.lora.factor, d.experts * d.hidden, d.lora.rank, core.columns);
    return p;
}

} // namespace
} // namespace moe

extern "C" cudaError_t moe_sm90_down_init(const moe_device *device)
{
    using namespace moe;
    return for_every_type(storage_types(), [&](auto t) {
        using T = typename decltype(t)::type;
        const cudaError_t status = init_gemms<T, down_params>(device);
        return status != cudaSuccess ? status : init_gemms<T, down_lora_params>(device);
    });
}

extern "C" cudaError_t moe_sm90_down(moe_launch *on, const moe_down *d)
{
    using namespace moe;
    const moe_gemm kind = core_for(*d);
    const down_lora_params p = prepare(on, *d, kind);
    if (on->refused_call) return cudaErrorInvalidValue;
    return for_type(storage_types(), on->dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        return p.rank ? enqueue_gemm<T>(on, kind, steps_of(*d), p)
                      : enqueue_gemm<T>(on, kind, steps_of(*d), (const down_params &)p);
    });
}
