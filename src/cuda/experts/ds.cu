// The gradient of the row weights: dS[r] = <dA'[r], A[r]> + <dO[t(r)], b2[e]>.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// The dh kernel writes one partial sum of <dA'[r], A[r]> for each of its column tiles. With b2, the first
// kernel here writes <dO[t(r)], b2[e]> as one more partial sum. The second kernel adds the partial sums in a
// fixed order and writes dS for the caller:
//
//   entry         result         shape
//   FROM_TOPK     dtopk_weights  (T, K)
//   FROM_ROWS     drow_weights   (T)
//   FROM_LOGITS   drow_weights   (padded rows)
//
// The second kernel runs only if the caller wants this result. The kernel of dlogits does not need it: it
// adds the partial sums itself.
//
// FLOPs 2 R d for <dO[t(r)], b2[e]>. Bytes: 2 R d of dO gathered, 2 E d of b2, 4 R for each partial sum.
// Tile: in the first kernel a warp takes one row; in the second a thread computes one result.
#include "common/backward_shared.cuh"
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "host/launch_backward.h"

namespace moe
{
namespace
{

enum { THREADS = 256, WARPS = THREADS / 32 };

MOE_DEVICE float ds_of(const moe_cuda_ds &p, int64_t row)
{
    return sum_of_parts(p.partial, p.parts, p.padded_rows, row);
}

template <typename T> MOE_DEVICE float dot8(uint4 a, uint4 b, float sum)
{
    using S = storage<T>;
    const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum = fmaf(S::low(x[i]), S::low(y[i]), sum);
        sum = fmaf(S::high(x[i]), S::high(y[i]), sum);
    }
    return sum;
}

// The term with the bias: one warp for each row.
template <typename T> __global__ void __launch_bounds__(THREADS) bias_part(const moe_cuda_ds p)
{
    const int64_t row = (int64_t)blockIdx.x * WARPS + (threadIdx.x >> 5);
    if (row >= p.padded_rows) return;
    const int token = __ldg(p.row_token + row), lane = threadIdx.x & 31;
    float sum = 0.0f;
    if (token >= 0) {
        const int expert = __ldg(p.block_expert + row / MOE_BLOCK_ROWS);
        const uint4 *dout = (const uint4 *)((const T *)p.dout + (int64_t)token * p.hidden);
        const uint4 *bias = (const uint4 *)((const T *)p.bias + (int64_t)expert * p.hidden);
        for (int i = lane; i < p.hidden / 8; i += 32) sum = dot8<T>(__ldg(dout + i), __ldg(bias + i), sum);
    }
    sum = sum_of_lanes(sum);
    if (lane == 0) p.partial[(p.parts - 1) * p.padded_rows + row] = sum;
}

// (t, k) of the given top-K: of the token's rows, the one whose block belongs to that expert; 0 for a skipped
// or repeated id.
template <typename I> __global__ void __launch_bounds__(THREADS) give_topk(const moe_cuda_ds p)
{
    const int64_t index = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (index >= p.tokens * p.topk) return;
    const int64_t token = index / p.topk;
    const I *ids = (const I *)p.ids + token * p.topk, id = ids[index - token * p.topk];
    bool counts = true;
    for (int64_t k = 0; k < index - token * p.topk; k++) counts = counts && ids[k] != id;
    float sum = 0.0f;
    if (counts)
        for (int i = __ldg(p.token_offsets + token); i < __ldg(p.token_offsets + token + 1); i++) {
            const int row = __ldg(p.token_rows + i);
            if (p.block_expert[row / MOE_BLOCK_ROWS] == id) sum = ds_of(p, row);
        }
    p.topk_gradient[index] = sum;
}

// FROM_ROWS: each token has one row, or none if it is past the last row.
__global__ void __launch_bounds__(THREADS) give_tokens(const moe_cuda_ds p)
{
    const int64_t token = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (token >= p.tokens) return;
    const int i = p.token_offsets[token];
    p.token_gradient[token] = i < p.token_offsets[token + 1] ? ds_of(p, p.token_rows[i]) : 0.0f;
}

__global__ void __launch_bounds__(THREADS) give_rows(const moe_cuda_ds p)
{
    const int64_t row = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (row < p.padded_rows) p.row_gradient[row] = p.row_token[row] >= 0 ? ds_of(p, row) : 0.0f;
}

unsigned ctas_of(int64_t items, int64_t each)
{
    return (unsigned)moe_divide_up(items, each);
}

} // namespace
} // namespace moe

extern "C" cudaError_t moe_cuda_ds_launch(const moe_launch *on, const moe_cuda_ds *p)
{
    using namespace moe;
    cudaError_t status = cudaSuccess;
    if (p->bias)
        status = for_type(storage_types(), on->dtype, [&](auto t) {
            return enqueue(bias_part<typename decltype(t)::type>, ctas_of(p->padded_rows, WARPS), THREADS, 0,
                           on->stream, *p);
        });
    if (status == cudaSuccess && p->topk_gradient)
        status = enqueue(p->wide_index ? give_topk<int64_t> : give_topk<int32_t>,
                         ctas_of(p->tokens * p->topk, THREADS), THREADS, 0, on->stream, *p);
    if (status == cudaSuccess && p->token_gradient)
        status = enqueue(give_tokens, ctas_of(p->tokens, THREADS), THREADS, 0, on->stream, *p);
    if (status == cudaSuccess && p->row_gradient)
        status = enqueue(give_rows, ctas_of(p->padded_rows, THREADS), THREADS, 0, on->stream, *p);
    return status;
}
