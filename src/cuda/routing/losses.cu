// Three results: the counts under plain top-K (before rounding), the two losses, and the updated selection
// bias.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
//   count_e    = number of bits set in the mask of expert e, for the tokens that token_mask counts; the
//                update of bias_e instead reads count_e from memory that the caller gives
//   C          = number of these tokens; sums over t are over them
//   losses[0]  = E sum_e (count_e / C) (sum_t p[t,e] / C), 0 if C = 0
//   losses[1]  = sum_t logsumexp_t^2 / C, 0 if C = 0
//   bias_e    += gamma if count_e is below the mean count; bias_e -= gamma if it is above
//
// scores.cu has summed p and logsumexp^2 over panels of 256 tokens. Sums are taken in a fixed order, so the
// same inputs give the same bits.
//
// Bytes: the mask (E T / 8) once, and token_mask (T) once for each expert; for each panel 8 E of sums of p
// and 8 of the sum of logsumexp^2. Tile: a warp takes an expert; one CTA adds up the losses. FLOPs: with P
// panels, P (E + 1) additions in f64, one for each sum that scores.cu has written.
#include "host/routing.h"

#include "common/launch.cuh"
#include "common/reduce.cuh"

namespace moe
{
namespace losses
{
namespace
{

enum { THREADS = 256, WARPS = THREADS / 32 };

// How many of an expert's tokens are counted; for every lane. A lane reads the byte of one token of a word.
MOE_DEVICE int counted_tokens(const moe_cuda_routing &r, const uint32_t *words, int lane)
{
    int tokens = 0;
#pragma unroll 4
    for (int64_t i = 0; i < r.words; i++) {
        const int64_t token = 32 * i + lane;
        tokens += __popc(words[i] & __ballot_sync(~0u, token < r.layer.tokens && r.token_mask[token]));
    }
    return tokens;
}

// C: each counted token has K pairs in topk_counts. Called by whole warps.
MOE_DEVICE double count_of_tokens(const moe_cuda_routing &r, int lane)
{
    if (!r.token_mask) return (double)r.layer.tokens;
    long long pairs = 0;
    for (int64_t e = lane; e < r.layer.experts; e += 32) pairs += r.topk_counts[e];
    return (double)(sum_of_lanes(pairs) / r.layer.topk);
}

// One warp for each expert.
__global__ void __launch_bounds__(THREADS) count(const __grid_constant__ moe_cuda_routing r)
{
    const int64_t expert = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x & 31;
    if (expert >= r.layer.experts) return;
    const uint32_t *mask = r.mask + expert * r.words;
    const uint4 *words = (const uint4 *)mask;
    int tokens = 0;
#pragma unroll 4
    for (int64_t i = lane; i < r.words / 4; i += 32) {
        const uint4 v = words[i];
        tokens += __popc(v.x) + __popc(v.y) + __popc(v.z) + __popc(v.w);
    }
    tokens = __reduce_add_sync(~0u, tokens);
    const int counted = r.token_mask ? counted_tokens(r, mask, lane) : tokens;
    if (lane != 0) return;
    r.topk_counts[expert] = counted;
    if (r.all_counts) r.all_counts[expert] = tokens;
}

// expert_balance; one warp for each expert.
__global__ void __launch_bounds__(THREADS) balance_experts(const __grid_constant__ moe_cuda_routing r)
{
    const int64_t expert = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x & 31;
    if (expert >= r.layer.experts) return;
    double sum = 0.0;
    for (int64_t panel = lane; panel < r.panels; panel += 32)
        sum += r.panel_probability[panel * r.layer.experts + expert];
    sum = sum_of_lanes(sum);
    const double all = count_of_tokens(r, lane);
    if (lane == 0) r.expert_balance[expert] = (double)r.topk_counts[expert] / all * (sum / all);
}

__global__ void __launch_bounds__(THREADS) sum_losses(const __grid_constant__ moe_cuda_routing r)
{
    __shared__ double memory[WARPS];
    double balance = 0.0, z = 0.0;
    for (int64_t e = threadIdx.x; e < r.layer.experts; e += THREADS) balance += r.expert_balance[e];
    for (int64_t panel = threadIdx.x; panel < r.panels; panel += THREADS) z += r.panel_z[panel];
    balance = sum_of_threads<WARPS>(balance, memory);
    z = sum_of_threads<WARPS>(z, memory);
    const double all = count_of_tokens(r, threadIdx.x & 31);
    if (threadIdx.x != 0) return;
    r.losses[0] = all == 0.0 ? 0.0f : (float)((double)r.layer.experts * balance);
    r.losses[1] = all == 0.0 ? 0.0f : (float)(z / all);
}

__global__ void __launch_bounds__(THREADS)
    move_bias(const int32_t *counts, float *bias, int64_t experts, float gamma)
{
    __shared__ long long memory[WARPS];
    long long total = 0;
    for (int64_t e = threadIdx.x; e < experts; e += THREADS) total += counts[e];
    total = sum_of_threads<WARPS>(total, memory);
    for (int64_t e = threadIdx.x; e < experts; e += THREADS) {
        const long long excess = counts[e] * experts - total; // E (count - mean)
        bias[e] = __fadd_rn(bias[e], excess < 0 ? gamma : excess > 0 ? -gamma : 0.0f);
    }
}

} // namespace
} // namespace losses
} // namespace moe

extern "C" cudaError_t moe_cuda_count(const moe_launch *on, const moe_cuda_routing *r)
{
    using namespace moe::losses;
    return moe::enqueue(count, (unsigned)((r->layer.experts + WARPS - 1) / WARPS), THREADS, 0, on->stream,
                        *r);
}

extern "C" cudaError_t moe_cuda_losses(const moe_launch *on, const moe_cuda_routing *r)
{
    using namespace moe::losses;
    const unsigned ctas = (unsigned)((r->layer.experts + WARPS - 1) / WARPS);
    const cudaError_t status = moe::enqueue(balance_experts, ctas, THREADS, 0, on->stream, *r);
    return status == cudaSuccess ? moe::enqueue(sum_losses, 1, THREADS, 0, on->stream, *r) : status;
}

extern "C" cudaError_t moe_cuda_selection_bias(const moe_launch *on, const int32_t *counts, float *bias,
                                               int64_t experts, float gamma)
{
    using namespace moe::losses;
    return moe::enqueue(move_bias, 1, THREADS, 0, on->stream, counts, bias, experts, gamma);
}
