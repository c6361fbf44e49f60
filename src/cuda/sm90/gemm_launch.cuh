// The host's side of the GEMM cores, for down.cu and dx_rows.cu: which kernel of a core multiplies rows by an
// expert's weights, what its tensor maps need to know, and its launch.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// P is the type of the kernel's parameters. steps: of 64 columns of the GEMM's K.
#pragma once
#include "common/launch.cuh"
#include "sm90/gemm_choice.h"
#include "sm90/gemm_cooperative_rows.cuh"
#include "sm90/gemm_ping_pong.cuh"
#include "sm90/gemm_stationary.cuh"
#include "tma/tensor_map.h"

namespace moe
{

struct gemm_core {
    int shared_bytes, most_ctas;
    int rows, columns; // of a box of rows; of a tile
};

inline gemm_core core_of(moe_gemm kind)
{
    constexpr int ANY = 1 << 30;
    switch (kind) {
    case MOE_GEMM_COOPERATIVE:
        return {gemm_cooperative_rows::SHARED_BYTES, ANY, gemm_cooperative_rows::TILE_ROWS,
                gemm_cooperative_rows::TILE_COLUMNS};
    case MOE_GEMM_PING_PONG:
        return {gemm_ping_pong::SHARED_BYTES, ANY, gemm_ping_pong::TILE_ROWS, gemm_ping_pong::TILE_COLUMNS};
    case MOE_GEMM_STATIONARY: break;
    }
    return {gemm_stationary::SHARED_BYTES, gemm_stationary::MAX_CTAS, MOE_BLOCK_ROWS,
            gemm_stationary::TILE_COLUMNS};
}

template <class P> using gemm_kernel = void (*)(P);

template <typename T, class P> gemm_kernel<P> kernel_of(moe_gemm kind, int64_t steps)
{
    if constexpr (!operands<P>::LOW_RANK) {
        const int slices = moe_stationary_slices(steps);
        if (kind == MOE_GEMM_PING_PONG) return gemm_ping_pong::kernel<T, P>;
        if (kind == MOE_GEMM_STATIONARY && slices == 1) return gemm_stationary::kernel<T, 1, P>;
        if (kind == MOE_GEMM_STATIONARY && slices == 2) return gemm_stationary::kernel<T, 2, P>;
        if (kind == MOE_GEMM_STATIONARY) return gemm_stationary::kernel<T, 4, P>;
    }
    return gemm_cooperative_rows::kernel<T, P>;
}

// For the ping-pong core (moe_turn). 0 if all column tiles are equal.
inline int32_t turn_of(const moe_launch *on, int64_t columns)
{
    const int64_t tiles = moe_divide_up(columns, gemm_ping_pong::TILE_COLUMNS);
    return columns % gemm_ping_pong::TILE_COLUMNS ? moe_turn(on->sms, (int32_t)tiles) : 0;
}

// Makes the tensor map y of the result, (rows, columns).
inline void map_result(moe_launch *on, CUtensorMap *y, moe_gemm kind, int64_t steps, const void *base,
                       int64_t rows, int64_t columns)
{
    using wide = gemm_stationary::stored_box<2>;
    using low = gemm_stationary::stored_box<4>;
    if (kind != MOE_GEMM_STATIONARY)
        moe_map_matrix(on, y, base, rows, columns, MOE_BLOCK_ROWS);
    else if (moe_stationary_slices(steps) <= 2)
        moe_map_side_by_side(on, y, base, rows, columns, wide::SUBTILES, wide::ROWS);
    else
        moe_map_side_by_side(on, y, base, rows, columns, low::SUBTILES, low::ROWS);
}

// Before the first launch: every kernel may use the shared memory that it needs.
template <typename T, class P> cudaError_t init_gemms(const moe_device *device)
{
    for (const moe_gemm kind : {MOE_GEMM_COOPERATIVE, MOE_GEMM_PING_PONG, MOE_GEMM_STATIONARY})
        for (const int64_t steps : {1, 2, 4}) { // the number matters to one core only
            if (operands<P>::LOW_RANK && kind != MOE_GEMM_COOPERATIVE) continue;
            const cudaError_t status =
                allow_shared(device, kernel_of<T, P>(kind, steps), core_of(kind).shared_bytes);
            if (status != cudaSuccess) return status;
        }
    return cudaSuccess;
}

template <typename T, class P>
cudaError_t enqueue_gemm(const moe_launch *on, moe_gemm kind, int64_t steps, const P &p)
{
    const gemm_core core = core_of(kind);
    const int ctas = on->sms < core.most_ctas ? on->sms : core.most_ctas;
    return enqueue(kernel_of<T, P>(kind, steps), ctas, gemm_cooperative::THREADS, core.shared_bytes,
                   on->stream, p);
}

} // namespace moe
