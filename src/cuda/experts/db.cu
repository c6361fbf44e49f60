// Bias gradients of expert e, as sums over its rows r: db2[e] = sum of s(r) dO[t(r)], db1[e] = sum of dH[r].
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Shapes: dO (T, d), dH (padded rows, h), db2 (E, d), db1 (E, h), where h is the number of columns of H.
// FLOPs: 2 R d for db2, R h for db1.
//
// Bytes: db2 gathers 2 R d of dO; db1 reads 2 R h of dH, or R h of dH8 (f8.h). E d or E h elements are
// written; with accumulate they are also read.
//
// Tile: one CTA sums 64 columns over all rows of one expert, in f32 and in a fixed order. So CTAs share no
// sum, and no atomics are needed.
#include "common/backward_shared.cuh"
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "host/f8_table.h"

namespace moe
{
namespace
{

enum { COLUMNS = 64, LANES = COLUMNS / 8, ROWS = 32, THREADS = LANES * ROWS };

template <typename T> MOE_DEVICE void add(float (&sum)[8], uint4 v, float weight)
{
    const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum[2 * i] = fmaf(weight, storage<T>::low(pairs[i]), sum[2 * i]);
        sum[2 * i + 1] = fmaf(weight, storage<T>::high(pairs[i]), sum[2 * i + 1]);
    }
}

// Eight elements of dH8.
MOE_DEVICE void add_dh8(float (&sum)[8], const moe_cuda_db &p, int64_t row, int column)
{
    const int64_t groups = moe_f8_groups(p.half, MOE_F8_DH_FEATURES);
    const float scale = __ldg(p.row_weight + row * groups + column % p.half / MOE_F8_DH_FEATURES);
    const uint2 v = __ldg((const uint2 *)((const uint8_t *)p.values + row * p.columns + column));
#pragma unroll
    for (int i = 0; i < 8; i++)
        sum[i] = fmaf(scale, moe_f8_value((uint8_t)((i < 4 ? v.x : v.y) >> i % 4 * 8)), sum[i]);
}

// T is uint8_t for dH8.
template <typename T, typename G> __global__ void __launch_bounds__(THREADS) column_sums(const moe_cuda_db p)
{
    __shared__ float sums[ROWS][COLUMNS + 1];
    const int expert = p.order[blockIdx.y], count = p.counts[expert];
    if (p.accumulate && count == 0) return;
    const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
    const int column = blockIdx.x * COLUMNS + lane * 8;
    const int64_t first = (int64_t)p.block_offsets[expert] * MOE_BLOCK_ROWS;
    float sum[8] = {};
    if (column < p.columns)
#pragma unroll 4
        for (int i = row; i < count; i += ROWS) {
            const int64_t from = p.row_token ? (int64_t)__ldg(p.row_token + first + i) : first + i;
            if (from < 0) continue; // a pad row between an expert's rows (ep/ep_plan.cu)
            if constexpr (sizeof(T) == 1) {
                add_dh8(sum, p, from, column);
            } else {
                const float weight = p.row_weight ? __ldg(p.row_weight + first + i) : 1.0f;
                add<T>(sum, __ldg((const uint4 *)((const T *)p.values + from * p.columns + column)), weight);
            }
        }
#pragma unroll
    for (int i = 0; i < 8; i++) sums[row][lane * 8 + i] = sum[i];
    for (int half = ROWS / 2; half; half /= 2) {
        __syncthreads();
        for (int i = threadIdx.x; i < half * COLUMNS; i += THREADS)
            sums[i / COLUMNS][i % COLUMNS] += sums[i / COLUMNS + half][i % COLUMNS];
    }
    __syncthreads();
    const int j = blockIdx.x * COLUMNS + threadIdx.x;
    if (threadIdx.x >= COLUMNS || j >= p.columns) return;
    const int element = !p.interleaved ? j : j < p.half ? 2 * j : 2 * (j - p.half) + 1;
    give((G *)p.gradient + (int64_t)expert * p.columns + element, sums[0][threadIdx.x], p.accumulate);
}

template <typename T, typename G> cudaError_t launch(const moe_cuda_db &p, const moe_launch *on)
{
    const dim3 grid((unsigned)moe_divide_up(p.columns, COLUMNS), (unsigned)p.experts);
    return enqueue(column_sums<T, G>, grid, THREADS, 0, on->stream, p);
}

} // namespace
} // namespace moe

extern "C" cudaError_t moe_cuda_db_launch(const moe_launch *on, const moe_cuda_db *p, smoe_type gradient_type)
{
    using namespace moe;
    return for_type(storage_types(), on->dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        return for_type(gradient_types<T>(), gradient_type,
                        [&](auto g) { return launch<T, typename decltype(g)::type>(*p, on); });
    });
}

extern "C" cudaError_t moe_cuda_db_f8_launch(const moe_launch *on, const moe_cuda_db *p,
                                             smoe_type gradient_type)
{
    using namespace moe;
    return for_type(storage_types(), on->dtype, [&](auto t) {
        return for_type(gradient_types<typename decltype(t)::type>(), gradient_type,
                        [&](auto g) { return launch<uint8_t, typename decltype(g)::type>(*p, on); });
    });
}
