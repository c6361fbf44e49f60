// The expected exponents of dH_w and A'_w (f8.h), which dh needs before it runs, for each expert and group of
// 256 features. They follow from the largest of the expert's rows and from the weights' groups.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Bytes: 16 R read, of which 8 R are gathered scales of tokens; 8 E ceil(n / 256) read, 16 E ceil(n / 256)
// written. One CTA has one expert. The largest of integers does not depend on their order.
#include "common/launch.cuh"
#include "sm90/f8.cuh"
#include "sm90/f8_kernels.h"

namespace moe
{
namespace
{

enum { THREADS = 512, AT_ONCE = 4 /* rows of a thread */ };

// Of the expert. `largest` is shared memory.
MOE_DEVICE int32_t size_of(const moe_f8_expect &p, int expert, int32_t *largest)
{
    if (threadIdx.x == 0) *largest = MOE_F8_NO_ROWS;
    __syncthreads();
    const int64_t first = (int64_t)__ldg(p.block_offsets + expert) * MOE_BLOCK_ROWS;
    const int count = __ldg(p.counts + expert);
    int32_t size = MOE_F8_NO_ROWS;
    for (int i = threadIdx.x; i < count; i += AT_ONCE * THREADS)
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int64_t row = first + min(i + j * THREADS, count - 1);
            const int32_t token = __ldg(p.row_token + row);
            size = max(size, moe_f8_row_size(__ldg(p.x_scale + token), __ldg(p.do_scale + token),
                                             __ldg(p.row_weight + row), p.degree));
        }
    size = (int32_t)__reduce_max_sync(~0u, (uint32_t)(size - MOE_F8_NO_ROWS)) + MOE_F8_NO_ROWS;
    if ((threadIdx.x & 31) == 0) atomicMax(largest, size);
    __syncthreads();
    return *largest;
}

__global__ void __launch_bounds__(THREADS) expect(const __grid_constant__ moe_f8_expect p)
{
    __shared__ int32_t largest;
    const int expert = blockIdx.x;
    const int32_t size = size_of(p, expert, &largest);
    for (int g = threadIdx.x; g < p.groups; g += THREADS) {
        const int64_t at = (int64_t)expert * p.groups + g;
        const float group1 = __ldg(p.group1 + at), group2 = __ldg(p.group2 + at);
        p.expected[0][at] = p.largest[0][at] = moe_f8_expected(size, group1, group2, p.degree, p.of_size, 1);
        p.expected[1][at] = p.largest[1][at] = moe_f8_expected(size, group1, group2, p.degree, p.of_size, 0);
    }
}

} // namespace
} // namespace moe

extern "C" cudaError_t moe_sm90_f8_expect(const moe_launch *on, const moe_f8_expect *e)
{
    using namespace moe;
    return enqueue(expect, (unsigned)e->experts, THREADS, 0, on->stream, *e);
}
