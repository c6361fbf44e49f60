// The scores of all pairs of a token and an expert. There are two results:
// - for rounding: keys (E, T), integers that compare as the scores do. They are not computed here if
//   topk_fast.cu has chosen the experts, because it has written them already;
// - for the losses: sums of p (the softmax over E) and of logsumexp^2 over a panel of 256 tokens, without the
//   tokens that token_mask leaves out.
//
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Tile: one CTA takes a panel and 32 experts. The lanes of a warp are experts, so that logits are read in
// whole sectors. Each warp collects the keys of 32 tokens in shared memory. For each expert the CTA then
// writes the keys of the whole panel as one run of 512 bytes (1 KB with f32 logits).
//
// Bytes: the logits are read once. If keys are made, as many bytes of keys are written. With losses, 8 E
// bytes of sums of p are written for each panel. FLOPs: for each of the E T scores one exp polynomial and one
// division, with losses one addition in f64.
#include "host/routing.h"

#include "common/instances.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "routing/logits.cuh"

namespace moe
{
namespace scores
{
namespace
{

enum { WARPS = 8, THREADS = 32 * WARPS, STRIP = MOE_ROUTE_PANEL / WARPS, GROUP = 8 };

template <typename L> struct tile_of {
    static constexpr int WORD_KEYS = 4 / (int)sizeof(typename logits_of<L>::key); // keys in 32 bits
    static constexpr int WORDS = MOE_ROUTE_PANEL / WORD_KEYS, PITCH = WORDS + 4;  // of an expert
};

// Keys of 8 tokens to the tile, as 16-byte vectors.
MOE_DEVICE void store_keys(uint32_t *to, const uint32_t (&keys)[GROUP], uint16_t)
{
    *(uint4 *)to = make_uint4(keys[0] | keys[1] << 16, keys[2] | keys[3] << 16, keys[4] | keys[5] << 16,
                              keys[6] | keys[7] << 16);
}

MOE_DEVICE void store_keys(uint32_t *to, const uint32_t (&keys)[GROUP], uint32_t)
{
    *(uint4 *)to = make_uint4(keys[0], keys[1], keys[2], keys[3]);
    *(uint4 *)(to + 4) = make_uint4(keys[4], keys[5], keys[6], keys[7]);
}

// Writes the CTA's keys to global memory, one row of the panel for each expert.
template <typename L> MOE_DEVICE void write_tile(const moe_cuda_routing &r, const uint32_t *tile)
{
    using key = typename logits_of<L>::key;
    constexpr int VECTORS = tile_of<L>::WORDS / 4;
    for (int i = threadIdx.x; i < 32 * VECTORS; i += THREADS) {
        const int row = i / VECTORS, vector = i % VECTORS;
        const int64_t expert = (int64_t)blockIdx.y * 32 + row;
        if (expert >= r.layer.experts) return;
        key *to = (key *)r.keys + (expert * r.panels + blockIdx.x) * MOE_ROUTE_PANEL;
        ((uint4 *)to)[vector] = *(const uint4 *)(tile + row * tile_of<L>::PITCH + vector * 4);
    }
}

template <typename L>
__global__ void __launch_bounds__(THREADS) panel(const __grid_constant__ moe_cuda_routing r)
{
    __shared__ moe_token_softmax scales[MOE_ROUTE_PANEL];
    __shared__ __align__(16) uint32_t tile[32 * tile_of<L>::PITCH];
    __shared__ double part[WARPS][32];
    __shared__ bool counted[MOE_ROUTE_PANEL];
    const int warp = warp_number(), lane = threadIdx.x & 31;
    const int64_t first = (int64_t)blockIdx.x * MOE_ROUTE_PANEL, expert = (int64_t)blockIdx.y * 32 + lane;
    const int tokens = (int)min(r.layer.tokens - first, (int64_t)MOE_ROUTE_PANEL);
    const int experts = (int)r.layer.experts;
    const bool curve = moe_score_has_curve(r.layer.score), real = expert < experts;
    if (r.softmax && (int)threadIdx.x < tokens) scales[threadIdx.x] = r.softmax[first + threadIdx.x];
    if ((int)threadIdx.x < tokens) counted[threadIdx.x] = !r.token_mask || r.token_mask[first + threadIdx.x];
    __syncthreads();

    const L *logits = (const L *)r.logits + (first + warp * STRIP) * experts + expert;
    const float bias = r.selection_bias && real ? r.selection_bias[expert] : 0.0f;
    double sum = 0.0;
#pragma unroll 1
    for (int group = 0; group < STRIP; group += GROUP) {
        float logit[GROUP];
        uint32_t keys[GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            const bool there = real && warp * STRIP + group + i < tokens;
            logit[i] = there ? logits_of<L>::value(logits[(group + i) * experts]) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            const int token = warp * STRIP + group + i;
            float score = 0.0f;
            if (r.softmax && token < tokens) {
                score = moe_div(moe_softmax_term(logit[i], scales[token].max), scales[token].sum);
                if (counted[token]) sum += (double)score;
            }
            if (curve) {
                const float value = moe_score_value(r.layer.score, logit[i]);
                score = r.selection_bias ? moe_add(value, bias) : value;
            }
            keys[i] = logits_of<L>::key_of(score);
        }
        constexpr int PER = tile_of<L>::WORD_KEYS;
        store_keys(tile + lane * tile_of<L>::PITCH + (warp * STRIP + group) / PER, keys,
                   (typename logits_of<L>::key)0);
    }
    part[warp][lane] = sum;
    __syncthreads();
    if (r.keys) write_tile<L>(r, tile);
    if (!r.losses) return;

    if (warp == 0 && real) {
        double total = 0.0;
        for (int w = 0; w < WARPS; w++) total += part[w][lane];
        r.panel_probability[(int64_t)blockIdx.x * experts + expert] = total;
    }
    if (blockIdx.y != 0) return;
    double z = 0.0;
    if ((int)threadIdx.x < tokens && counted[threadIdx.x])
        z = (double)scales[threadIdx.x].max + log((double)scales[threadIdx.x].sum);
    __syncthreads();
    const double squares = sum_of_threads<WARPS>(z * z, &part[0][0]);
    if (threadIdx.x == 0) r.panel_z[blockIdx.x] = squares;
}

template <typename L> cudaError_t launch(const moe_cuda_routing &r, const moe_launch *on)
{
    const dim3 ctas((unsigned)r.panels, (unsigned)((r.layer.experts + 31) / 32));
    return enqueue(panel<L>, ctas, THREADS, 0, on->stream, r);
}

} // namespace
} // namespace scores
} // namespace moe

extern "C" cudaError_t moe_cuda_scores(const moe_launch *on, const moe_cuda_routing *r)
{
    using namespace moe::scores;
    return moe::for_type(moe::logits_types(), r->layer.logits_type,
                         [&](auto l) { return launch<typename decltype(l)::type>(*r, on); });
}
