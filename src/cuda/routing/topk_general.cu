// Top-K of every layer that the header describes: E up to 4096, K up to 64, every score function, selection
// bias, groups. Shapes: logits (T, E), ids and weights (T, K).
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Tile: a CTA of 8 warps takes 32 tokens; a warp works on one token at a time. With many experts a GPU with
// less shared memory has fewer warps in a CTA.
//
// A ranking key is 0 for an expert that cannot be chosen. For any other expert it is k + 1, where the integer
// k compares as the score does. A warp keeps the ranking key of every expert in shared memory, and the
// largest key of every 32 consecutive experts in registers. Each of K rounds finds the largest key of all,
// and thereby in which 32 experts it is. Each lane reads the key of one of these 32, and a ballot finds the
// expert. The warp removes this expert and computes the largest key of the 32 again. A round is a few dozen
// instructions, for any E.
//
// Bytes: the logits read, and 8 K written for each token. If a later kernel needs them, two more results are
// written for each token: the mask with one bit for each expert (E / 8 bytes), and the largest logit with the
// denominator of the softmax (8 bytes).
// FLOPs: T E sigmoids for SIGMOID, or T E exp polynomials for the denominator where it is needed; K exps or
// sigmoids and at most 2 K divisions for the weights of each token.
#include "host/routing.h"

#include "common/instances.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "routing/logits.cuh"

namespace moe
{
namespace topk
{
namespace
{

enum { GENERAL_THREADS = 256, GENERAL_WARPS = GENERAL_THREADS / 32, GENERAL_TOKENS = 32, MOST_BATCHES = 128 };

struct warp_memory {
    uint32_t *keys;       // [experts, padded to 32]
    uint32_t *group_keys; // [groups]
};

// Keys of all experts, and the largest logit.
template <typename L>
MOE_DEVICE float rank_experts(const moe_cuda_routing &r, const L *logits, const warp_memory &m, int lane)
{
    const int experts = (int)r.layer.experts, padded = (experts + 31) / 32 * 32;
    const bool curve = moe_score_has_curve(r.layer.score);
    uint32_t largest = 0;
    for (int e = lane; e < padded; e += 32) {
        uint32_t key = 0;
        if (e < experts) {
            const float logit = logits_of<L>::value(logits[e]);
            const uint32_t logit_key = moe_rank_key(logit);
            largest = max(largest, logit_key);
            key = logit_key + 1;
            if (curve) {
                const float value = moe_score_value(r.layer.score, logit);
                key = moe_rank_key(r.selection_bias ? moe_add(value, r.selection_bias[e]) : value) + 1;
            }
        }
        m.keys[e] = key;
    }
    return softmax_max(moe_rank_value(__reduce_max_sync(~0u, largest)));
}

template <typename L> MOE_DEVICE float sum_terms(const L *logits, int experts, float max, int lane)
{
    unsigned long long sum = 0;
    for (int e = lane; e < experts; e += 32)
        sum += moe_softmax_fixed_fast(moe_softmax_term(logits_of<L>::value(logits[e]), max));
    return moe_softmax_sum(sum_of_lanes(sum));
}

// Experts outside the groups_kept best groups get the key 0.
MOE_DEVICE void keep_groups(const smoe_layer &layer, const warp_memory &m, int lane)
{
    const int groups = layer.groups, size = (int)(layer.experts / groups);
    for (int g = lane; g < groups; g += 32) {
        uint32_t first = 0, second = 0;
        for (int i = 0; i < size; i++) {
            const uint32_t key = m.keys[g * size + i] - 1;
            second = max(second, min(key, first));
            first = max(first, key);
        }
        m.group_keys[g] = moe_rank_key(moe_add(moe_rank_value(first), moe_rank_value(second)));
    }
    __syncwarp();
    for (int g = lane; g < groups; g += 32) {
        const uint32_t key = m.group_keys[g];
        int better = 0;
        for (int h = 0; h < groups; h++) better += m.group_keys[h] > key || (m.group_keys[h] == key && h < g);
        if (better < layer.groups_kept) continue;
        for (int i = 0; i < size; i++) m.keys[g * size + i] = 0;
    }
    __syncwarp();
}

// Lane k % 32 gets the expert of rank k: in ids[0] for k < 32, in ids[1] for k >= 32.
MOE_DEVICE void choose(int (&ids)[2], const warp_memory &m, int experts, int topk, int lane)
{
    const int batches = (experts + 31) / 32;
    uint32_t batch_max[MOST_BATCHES / 32]; // of batch lane + 32 j
#pragma unroll
    for (int j = 0; j < MOST_BATCHES / 32; j++) {
        batch_max[j] = 0;
        for (int i = 0; i < 32 && j * 32 + i < batches; i++) {
            const uint32_t largest = __reduce_max_sync(~0u, m.keys[(j * 32 + i) * 32 + lane]);
            if (i == lane) batch_max[j] = largest;
        }
    }
    for (int k = 0; k < topk; k++) {
        uint32_t own = 0;
        int own_batch = MOST_BATCHES;
#pragma unroll
        for (int j = 0; j < MOST_BATCHES / 32; j++)
            if (batch_max[j] > own) {
                own = batch_max[j];
                own_batch = j * 32 + lane;
            }
        const uint32_t top = __reduce_max_sync(~0u, own);
        const int batch = (int)__reduce_min_sync(~0u, (uint32_t)(own == top ? own_batch : MOST_BATCHES));
        uint32_t key = m.keys[batch * 32 + lane];
        const int at = __ffs(__ballot_sync(~0u, key == top)) - 1;
        if (lane == at) m.keys[batch * 32 + lane] = key = 0;
        const uint32_t rest = __reduce_max_sync(~0u, key);
#pragma unroll
        for (int j = 0; j < MOST_BATCHES / 32; j++)
            if (batch == j * 32 + lane) batch_max[j] = rest;
        if (lane == k % 32 && k < 32) ids[0] = batch * 32 + at;
        if (lane == k % 32 && k >= 32) ids[1] = batch * 32 + at;
        __syncwarp();
    }
}

template <typename L>
MOE_DEVICE void route_token(const moe_cuda_routing &r, const warp_memory &m, uint32_t *mask, int64_t token,
                            int lane)
{
    const int experts = (int)r.layer.experts, topk = (int)r.layer.topk;
    const L *logits = (const L *)r.logits + token * experts;
    moe_token_softmax softmax = {rank_experts(r, logits, m, lane), 1.0f};
    __syncwarp();
    if (r.softmax || moe_score_over_all(r.layer.score))
        softmax.sum = sum_terms(logits, experts, softmax.max, lane);
    if (r.softmax && lane == 0) r.softmax[token] = softmax;
    if (r.layer.groups > 1) keep_groups(r.layer, m, lane);
    int ids[2] = {0, 0};
    choose(ids, m, experts, topk, lane);

    const float first_logit = logits_of<L>::value(logits[__shfl_sync(~0u, ids[0], 0)]);
    float weights[2] = {0.0f, 0.0f}, sum = 0.0f;
    bool nan = false;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        if (j * 32 + lane < topk) {
            const float logit = logits_of<L>::value(logits[ids[j]]);
            nan |= moe_is_nan(logit);
            weights[j] = moe_raw_weight(r.layer.score, logit, first_logit, softmax.max, softmax.sum);
        }
        for (int k = j * 32; k < min(topk, j * 32 + 32); k++)
            sum = moe_add(sum, __shfl_sync(~0u, weights[j], k % 32));
    }
    nan = __any_sync(~0u, nan);
    const bool divided = moe_weights_are_divided(&r.layer);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const int k = j * 32 + lane;
        if (k >= topk) continue;
        r.topk_ids[token * topk + k] = ids[j];
        r.topk_weights[token * topk + k] = finish_weight(r.layer, weights[j], sum, divided, nan);
        atomicOr(mask + ids[j], 1u << (token & 31));
    }
}

template <typename L>
__global__ void __launch_bounds__(GENERAL_THREADS) general(const __grid_constant__ moe_cuda_routing r)
{
    extern __shared__ __align__(16) uint32_t words[];
    const int experts = (int)r.layer.experts, padded = (experts + 31) / 32 * 32;
    const int warp = warp_number(), lane = threadIdx.x & 31, warps = (int)blockDim.x / 32;
    uint32_t *mask = words, *keys = words + padded;
    const warp_memory m = {keys + warp * padded, keys + warps * padded + warp * r.layer.groups};
    for (int e = threadIdx.x; e < experts; e += blockDim.x) mask[e] = 0;
    __syncthreads();
    for (int i = warp; i < GENERAL_TOKENS; i += warps) {
        const int64_t token = (int64_t)blockIdx.x * GENERAL_TOKENS + i;
        if (token < r.layer.tokens) route_token<L>(r, m, mask, token, lane);
        __syncwarp();
    }
    __syncthreads();
    if (!r.mask) return;
    for (int e = threadIdx.x; e < experts; e += blockDim.x)
        r.mask[(int64_t)e * r.words + blockIdx.x] = mask[e];
}

size_t general_memory(const smoe_layer &layer, int warps)
{
    const size_t padded = (size_t)(layer.experts + 31) / 32 * 32;
    return 4 * (padded * (size_t)(1 + warps) + (size_t)layer.groups * (size_t)warps);
}

// Warps of a CTA: as many as have room. One has room everywhere: it needs at most 40 KB.
int general_warps(const moe_device *device, const smoe_layer &layer)
{
    int warps = GENERAL_WARPS;
    while (warps > 1 && general_memory(layer, warps) > (size_t)device->shared_bytes) warps--;
    return warps;
}

} // namespace
} // namespace topk
} // namespace moe

extern "C" cudaError_t moe_cuda_topk_general(const moe_launch *on, const moe_cuda_routing *r)
{
    using namespace moe::topk;
    const int warps = general_warps(on->device, r->layer);
    const size_t memory = general_memory(r->layer, warps);
    return moe::for_type(moe::logits_types(), r->layer.logits_type, [&](auto l) {
        return moe::enqueue(general<typename decltype(l)::type>, (unsigned)r->words, 32 * warps, memory,
                            on->stream, *r);
    });
}

extern "C" cudaError_t moe_cuda_topk_general_init(const moe_device *device)
{
    using namespace moe::topk;
    enum { MOST = 4 * (4096 * (1 + GENERAL_WARPS) + 2048 * GENERAL_WARPS) };
    return moe::for_every_type(moe::logits_types(), [&](auto l) {
        return moe::allow_shared(device, general<typename decltype(l)::type>, MOST);
    });
}
