// The plan from rows that the caller gives sorted by expert (FROM_ROWS). The caller's offsets
// count no pad rows. So every CTA computes from them the padded index of every expert's first row. No CTA
// waits for another one.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Tile: a warp writes one block at a time and finds the expert of the block by bisection.
//
// Bytes: the E + 1 offsets once for each CTA, 16 written for each row, and 4 read for each row if there are
// row weights. No FLOPs.
#include "common/launch.cuh"
#include "routing/plan_shared.cuh"

namespace moe
{
namespace plan
{
namespace
{

MOE_DEVICE int read_offset(const moe_cuda_plan &p, int i)
{
    const long long at = p.wide_index ? __ldcg((const long long *)p.offsets + i)
                                      : (long long)__ldcg((const int *)p.offsets + i);
    return (int)min(max(at, 0ll), (long long)p.tokens);
}

// For every expert; in shared memory.
struct expert_runs {
    uint32_t *rows, *first_block, *first_row;
    uint32_t *scratch; // [WARPS]
};

struct totals {
    uint32_t blocks, rows;
};

// Each thread computes several neighbouring experts.
MOE_DEVICE totals place_runs(const moe_cuda_plan &p, const expert_runs &s)
{
    __shared__ totals all;
    const int experts = p.experts, each = (experts + THREADS - 1) / THREADS;
    const int begin = min((int)threadIdx.x * each, experts), end = min(begin + each, experts);
    uint32_t own_blocks = 0, own_rows = 0;
#pragma unroll 1
    for (int e = begin; e < end; e++) {
        s.rows[e] = (uint32_t)max(0, read_offset(p, e + 1) - read_offset(p, e));
        own_blocks += blocks_of(s.rows[e]);
        own_rows += s.rows[e];
    }
    uint32_t block = sum_of_threads_before(own_blocks, s.scratch),
             row = sum_of_threads_before(own_rows, s.scratch);
#pragma unroll 1
    for (int e = begin; e < end; e++) {
        s.first_block[e] = block;
        s.first_row[e] = row;
        block += blocks_of(s.rows[e]);
        row += s.rows[e];
    }
    if (threadIdx.x == THREADS - 1) all = {block, row};
    __syncthreads();
    return all;
}

// The expert of a block: the last one that starts at or before it. Empty experts start where the next one
// does.
MOE_DEVICE int expert_of(const uint32_t *first_block, int experts, uint32_t block)
{
    int low = 0, high = experts;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (first_block[middle] <= block)
            low = middle;
        else
            high = middle;
    }
    return low;
}

__global__ void __launch_bounds__(THREADS) rows(const __grid_constant__ moe_cuda_plan p)
{
    extern __shared__ __align__(16) char memory[];
    uint32_t *at = (uint32_t *)memory;
    const expert_runs s = {at, at + p.experts, at + 2 * p.experts, at + 3 * p.experts};
    wait_for_previous();
    const totals all = place_runs(p, s);
    const int lane = threadIdx.x & 31, warp = blockIdx.x * WARPS + (threadIdx.x >> 5),
              warps = gridDim.x * WARPS;
#pragma unroll 1
    for (uint32_t block = warp; block < all.blocks; block += warps) {
        const int expert = expert_of(s.first_block, p.experts, block);
        for (int i = lane; i < MOE_BLOCK_ROWS; i += 32) {
            const uint32_t within = (block - s.first_block[expert]) * MOE_BLOCK_ROWS + i;
            if (within >= s.rows[expert]) continue;
            const int row = (int)(block * MOE_BLOCK_ROWS + i), source = (int)(s.first_row[expert] + within);
            p.row_token[row] = source;
            p.row_weight[row] = p.weights ? __ldg(p.weights + source) : 1.0f;
            p.token_rows[source] = row;
        }
    }
#pragma unroll 1
    for (int e = warp; e < p.experts; e += warps) write_expert(p, s.rows, e);
#pragma unroll 1
    for (int64_t token = blockIdx.x * THREADS + threadIdx.x; token <= p.tokens; token += gridDim.x * THREADS)
        p.token_offsets[token] = (int32_t)min(token, (int64_t)all.rows);
    write_tail(p, all.blocks * MOE_BLOCK_ROWS);
}

} // namespace
} // namespace plan
} // namespace moe

extern "C" cudaError_t moe_cuda_plan_rows_init(const moe_device *device)
{
    return moe::allow_shared(device, moe::plan::rows, 4096 * 12 + 128);
}

extern "C" cudaError_t moe_cuda_plan_rows(const moe_launch *on, const moe_cuda_plan *p)
{
    using namespace moe::plan;
    const unsigned ctas = (unsigned)moe_plan_rows_ctas(p->padded_rows, on->sms);
    return moe::launch_early(rows, dim3(ctas), dim3(THREADS), (size_t)p->experts * 12 + 128, on, *p);
}
