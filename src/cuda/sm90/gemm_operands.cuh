// What the two cores of gemm_tiles.cuh and gemm_ping_pong.cuh multiply, by the type of their parameters P:
//   rows of 64 elements of K, 128 at a time, and weights of COLUMNS columns, for step k of K.
// P has lists, y (the map of the result's chunk) and columns.
#pragma once
#include "host/launch.h"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

namespace smoe
{

template <class P> struct operands;

// Y = A W2^T: K = n, the weights K-major
template <> struct operands<smoe_cuda_down> {
    static constexpr operand_order WEIGHTS = K_MAJOR;
    static constexpr bool HAS_BIAS = true;
    enum { STEP = 64 };

    static SMOE_DEVICE int steps(const smoe_cuda_down &p)
    {
        return (p.intermediate + STEP - 1) / STEP;
    }
    static SMOE_DEVICE void prefetch(const smoe_cuda_down &p)
    {
        prefetch_map(&p.a);
        prefetch_map(&p.w2);
        prefetch_map(&p.y);
    }
    static SMOE_DEVICE void load_rows(const smoe_cuda_down &p, uint32_t to, uint32_t full, int k,
                                      smoe_work tile)
    {
        load_box(to, &p.a, full, k * STEP, tile.row);
    }
    template <int COLUMNS>
    static SMOE_DEVICE void load_weights(const smoe_cuda_down &p, uint32_t to, uint32_t full, int k,
                                         smoe_work tile, int column)
    {
        load_box(to, &p.w2, full, k * STEP, smoe_work_expert(tile) * p.hidden + p.first_column + column);
    }
};

} // namespace smoe
