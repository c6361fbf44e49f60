// The operands of down.cu and down_f8.cu. With e4m3 `intermediate` counts pairs of elements.
// Terms: docs/glossary.md; symbols: include/smoe.h.
#pragma once
#include "host/kernel_table.h"
#include "sm90/gemm_operands.cuh"

namespace moe
{

struct down_params {
    CUtensorMap a;                // 2-D: n columns, rows
    CUtensorMap w2;               // 2-D: n columns, E d rows
    CUtensorMap y;                // 2-D: the chunk's columns, rows
    const void *bias;             // b2 or NULL; gemm_cooperative_rows only
    const int32_t *block_offsets; // as in moe_up
    int32_t block_stride;
    moe_cuda_lists lists;
    int32_t hidden, intermediate;
    int32_t first_column, columns; // the chunk
    int32_t turn;                  // moe_turn, for the ping-pong core
};

// K = n, the weights K-major
template <> struct operands<down_params> {
    static constexpr operand_order WEIGHTS = K_MAJOR;
    static constexpr bool HAS_BIAS = true, LOW_RANK = false;
    enum { STEP = 64 };

    static MOE_DEVICE int steps(const down_params &p)
    {
        return (p.intermediate + STEP - 1) / STEP;
    }
    static MOE_DEVICE void prefetch(const down_params &p)
    {
        prefetch_map(&p.a);
        prefetch_map(&p.w2);
        prefetch_map(&p.y);
    }
    static MOE_DEVICE moe_work piece(const down_params &p, int i)
    {
        const int2 entry = __ldg((const int2 *)(p.lists.pieces + i));
        return {entry.x, entry.y};
    }
    static MOE_DEVICE void load_rows(const down_params &p, uint32_t to, uint32_t full, int k, moe_work tile)
    {
        load_box(to, &p.a, full, k * STEP, tile.row);
    }
    template <int COLUMNS>
    static MOE_DEVICE void load_weights(const down_params &p, uint32_t to, uint32_t full, int k,
                                        moe_work tile, int column)
    {
        load_box(to, &p.w2, full, k * STEP, moe_work_expert(tile) * p.hidden + p.first_column + column);
    }
};

} // namespace moe
