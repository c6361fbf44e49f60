// Top-K of SOFTMAX_TOPK and TOPK_SOFTMAX for E a multiple of 8 up to 512 and K <= 16: ids, weights, selection
// mask, and the tokens' softmax when it is wanted.
//
// Two threads a token. A warp's 16 rows come to shared memory by one bulk copy. Each thread keeps its P = 4,
// 8 or 16 best packed keys in falling order and merges sorted batches of P into them by networks, no
// branches; the two lists of a token merge last. bf16 keys are exact. f32 keys lose low bits to the expert's
// id: where neighbours among the K + 1 best agree in what is left, and where a row holds a NaN, the warp
// redoes the token exactly.
//
// Bytes: the logits once, 8 K a token, E / 8 of mask.
#include "mbarrier.cuh"
#include "routing.h"

#include "logits.cuh"

namespace smoe
{
namespace topk
{
namespace
{

enum {
    THREADS = 512,
    TOKENS_OF_WARP = 16,
    MOST_TOPK = 16,
    MOST_EXPERTS = 512,
    ROWS_BYTES = 65536,
    MANY_CTAS = 128
};

// The mask in shared memory is [32 tokens][expert], a little wider, so that reading it by words hits all
// banks.
SMOE_DEVICE int mask_pitch(int experts)
{
    return experts + 4;
}

SMOE_DEVICE void bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// Packed keys of the 16 bytes of logits that start at expert `first`; what is not there ranks last.
struct f32_unit {
    enum { SIZE = 4 };
    static SMOE_DEVICE bool pack(int32_t *keys, uint4 v, bool there, uint32_t first, uint32_t mask)
    {
        const uint32_t bits[4] = {v.x, v.y, v.z, v.w};
        bool nan = false;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float logit = __fadd_rn(__uint_as_float(bits[i]), 0.0f); // -0 becomes 0
            nan |= logit != logit;
            keys[i] = there ? smoe_packed_f32(__float_as_uint(logit), first + i, mask) : INT32_MIN;
        }
        return nan;
    }
};

struct bf16_unit {
    enum { SIZE = 8 };
    static SMOE_DEVICE bool pack(int32_t *keys, uint4 v, bool there, uint32_t first, uint32_t)
    {
        const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
        uint32_t largest = 0; // NaN is 0x7fff after the sum, above every other as a signed number
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t pair;
            asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(pairs[i]), "r"(0u)); // -0 becomes 0
            largest = __vmaxs2(largest, pair);
            const int32_t low = smoe_packed_bf16(pair << 16, first + 2 * i);
            const int32_t high = smoe_packed_bf16(pair & 0xffff0000u, first + 2 * i + 1);
            keys[2 * i] = there ? low : INT32_MIN;
            keys[2 * i + 1] = there ? high : INT32_MIN;
        }
        return (largest & 0xffffu) == 0x7fffu || largest >> 16 == 0x7fffu;
    }
};

template <typename L> struct unit_of;
template <> struct unit_of<float> {
    using type = f32_unit;
};
template <> struct unit_of<__nv_bfloat16> {
    using type = bf16_unit;
};

// One half of a token's row: the P best of it, in `best`. Lanes start at different batches, so that they read
// different banks. True if it met a NaN.
template <typename L, int P>
SMOE_DEVICE bool best_of_half(int32_t (&best)[P], int32_t &excluded, const L *row, int experts, int half,
                              int lane, uint32_t mask)
{
    using unit = typename unit_of<L>::type;
    constexpr int UNITS = P > unit::SIZE ? P / unit::SIZE : 1; // of a batch
    constexpr int KEYS = UNITS * unit::SIZE;
    const int units = experts / unit::SIZE, batches = (units + UNITS - 1) / UNITS, rounds = (batches + 1) / 2;
    const int own = half ? batches / 2 : rounds, first = half ? rounds : 0;
    bool nan = false;
    int at = lane % rounds;
    for (int i = 0; i < rounds; i++) {
        int32_t keys[KEYS];
#pragma unroll
        for (int q = 0; q < UNITS; q++) {
            const int turned = UNITS == 1 ? 0 : (q + lane / (8 / UNITS)) & (UNITS - 1);
            const int u = (first + at) * UNITS + turned;
            const bool there = at < own && u < units;
            uint4 v = {0, 0, 0, 0};
            if (there) v = *(const uint4 *)(row + u * unit::SIZE);
            nan |= unit::pack(keys + q * unit::SIZE, v, there, (uint32_t)(u * unit::SIZE), mask);
        }
#pragma unroll
        for (int part = 0; part < KEYS / P; part++) {
            smoe_sort_falling(keys + part * P, P);
            smoe_merge_best(best, keys + part * P, P, &excluded);
        }
        at = at + 1 == rounds ? 0 : at + 1;
    }
    return nan;
}

// The fixed-point sum of the softmax's terms over one half of a row.
template <typename L>
SMOE_DEVICE uint64_t sum_of_half(const L *row, int experts, int half, int lane, float max)
{
    constexpr int SIZE = unit_of<L>::type::SIZE;
    const int units = experts / SIZE, rounds = (units + 1) / 2;
    const int own = half ? units / 2 : rounds, first = half ? rounds : 0;
    uint64_t sum = 0;
    int at = lane % rounds;
    for (int i = 0; i < rounds; i++) {
        if (at < own) {
            const uint4 v = *(const uint4 *)(row + (first + at) * SIZE);
            const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (SIZE == 8) {
                    sum += smoe_softmax_fixed_fast(smoe_softmax_term(__uint_as_float(words[j] << 16), max));
                    sum += smoe_softmax_fixed_fast(
                        smoe_softmax_term(__uint_as_float(words[j] & 0xffff0000u), max));
                } else
                    sum += smoe_softmax_fixed_fast(smoe_softmax_term(__uint_as_float(words[j]), max));
            }
        }
        at = at + 1 == rounds ? 0 : at + 1;
    }
    return sum;
}

// The exact top-K of one token by the whole warp; the two threads `owner` names take the ids.
template <typename L, int P>
SMOE_DEVICE void redo(int (&ids)[P], const L *row, int experts, int topk, bool owner, int lane)
{
    uint32_t used = 0;
#pragma unroll
    for (int k = 0; k < P; k++) {
        if (k >= topk) break;
        uint32_t best = 0;
        int best_expert = MOST_EXPERTS;
        for (int i = 0; i < (experts + 31) / 32; i++) {
            const int e = i * 32 + lane;
            if (e >= experts || (used >> i & 1)) continue;
            const uint32_t key = smoe_rank_key(logits_of<L>::value(row[e])) + 1;
            if (key > best) {
                best = key;
                best_expert = e;
            }
        }
        const uint32_t top = __reduce_max_sync(~0u, best);
        const int expert = (int)__reduce_min_sync(~0u, (uint32_t)(best == top ? best_expert : MOST_EXPERTS));
        if (expert % 32 == lane) used |= 1u << (expert / 32);
        if (owner) ids[k] = expert;
    }
}

template <typename V, int P> SMOE_DEVICE void store_row(V *to, const V (&values)[P], int topk)
{
    if (topk % 4 == 0) {
#pragma unroll
        for (int k = 0; k < P; k += 4) {
            const struct alignas(16) {
                V v[4];
            } four = {values[k], values[k + 1], values[k + 2], values[k + 3]};
            if (k < topk) *(uint4 *)(to + k) = *(const uint4 *)&four;
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < P; k++)
        if (k < topk) to[k] = values[k];
}

template <typename L, int P>
__global__ void __launch_bounds__(THREADS) fast(const __grid_constant__ smoe_cuda_routing r)
{
    extern __shared__ __align__(128) char memory[];
    const int experts = (int)r.layer.experts, topk = (int)r.layer.topk, pitch = mask_pitch(experts);
    const int chunk = blockDim.x / 2, warp = warp_number(), lane = threadIdx.x & 31, half = lane & 1;
    L *rows = (L *)memory + (size_t)warp * TOKENS_OF_WARP * experts;
    uint32_t *masks = (uint32_t *)(memory + (size_t)chunk * experts * sizeof(L));
    const uint32_t barrier = shared_address(masks + chunk / 32 * pitch) + 8 * warp;
    const int64_t first = (int64_t)blockIdx.x * chunk + warp * TOKENS_OF_WARP;
    const int tokens = (int)max(min(r.layer.tokens - first, (int64_t)TOKENS_OF_WARP), (int64_t)0);
    if (lane == 0) {
        barrier_init(barrier, 1);
        barrier_init_done();
        const uint32_t bytes = (uint32_t)(tokens * experts * sizeof(L));
        barrier_expect(barrier, bytes);
        if (bytes) bulk_load(shared_address(rows), (const L *)r.logits + first * experts, bytes, barrier);
    }
    for (int i = threadIdx.x; i < chunk / 32 * pitch; i += blockDim.x) masks[i] = 0;
    clear_counts(r);
    __syncthreads();
    barrier_wait(barrier, 0);

    if (tokens > 0) {
        const int within = min(lane / 2, tokens - 1);
        const L *row = rows + within * experts;
        const uint32_t mask = sizeof(L) == 4 ? smoe_packed_mask(experts) : 0xffffu;
        int32_t best[P], other[P], excluded = INT32_MIN;
#pragma unroll
        for (int k = 0; k < P; k++) best[k] = INT32_MIN;
        const bool nan_here = best_of_half<L, P>(best, excluded, row, experts, half, lane, mask);
        excluded = max(excluded, __shfl_xor_sync(~0u, excluded, 1));
#pragma unroll
        for (int k = 0; k < P; k++) other[k] = __shfl_xor_sync(~0u, best[k], 1);
        smoe_merge_best(best, other, P, &excluded);

        int ids[P];
        bool again = nan_here;
#pragma unroll
        for (int k = 0; k < P; k++) {
            ids[k] = (int)(mask - ((uint32_t)best[k] & mask));
            if (sizeof(L) == 4)
                again |= k < topk && smoe_packed_collide(
                                         best[k], k + 1 < P ? best[k + 1 < P ? k + 1 : k] : excluded, mask);
        }
        uint32_t redone = __ballot_sync(~0u, again);
        redone = (redone | redone >> 1) & 0x55555555u & (uint32_t)((1ull << (2 * tokens)) - 1);
        for (; redone; redone &= redone - 1) {
            const int token = (__ffs(redone) - 1) / 2;
            redo<L, P>(ids, rows + token * experts, experts, topk, lane / 2 == token, lane);
        }

        const bool whole_softmax = r.layer.score == SMOE_SOFTMAX_TOPK || r.softmax;
        const float first_logit = logits_of<L>::value(row[ids[0]]);
        smoe_token_softmax softmax = {softmax_max(first_logit), 1.0f};
        if (whole_softmax) {
            uint64_t sum = sum_of_half(row, experts, half, lane, softmax.max);
            sum += __shfl_xor_sync(~0u, (unsigned long long)sum, 1);
            softmax.sum = smoe_softmax_sum(sum);
        }
        const bool divided = weights_are_divided(r.layer);
        float weights[P], sum = 0.0f;
        bool nan = false;
#pragma unroll
        for (int k = 0; k < P; k++) {
            weights[k] = 0.0f;
            if (k >= topk) continue;
            const float logit = logits_of<L>::value(row[ids[k]]);
            nan |= smoe_is_nan(logit);
            weights[k] = raw_weight(r.layer, logit, first_logit, softmax);
            sum = smoe_add(sum, weights[k]);
        }
#pragma unroll
        for (int k = 0; k < P; k++) weights[k] = finish_weight(r.layer, weights[k], sum, divided, nan);

        if (lane / 2 < tokens) {
            const int64_t token = first + within;
            const int in_chunk = warp * TOKENS_OF_WARP + within;
            if (half == 0) {
                store_row<int, P>(r.topk_ids + token * topk, ids, topk);
                if (r.softmax) r.softmax[token] = softmax;
            } else
                store_row<float, P>(r.topk_weights + token * topk, weights, topk);
#pragma unroll
            for (int k = 0; k < P; k++)
                if (k < topk && (k & 1) == half)
                    atomicOr(masks + (in_chunk >> 5) * pitch + ids[k], 1u << (in_chunk & 31));
        }
    }
    __syncthreads();
    const int words = chunk / 32, shift = __ffs(words) - 1;
    for (int i = threadIdx.x; i < experts * words; i += blockDim.x) {
        const int expert = i >> shift, word = i & (words - 1);
        r.mask[(int64_t)expert * r.words + (int64_t)blockIdx.x * words + word] = masks[word * pitch + expert];
    }
}

// Tokens of a CTA: their rows take at most ROWS_BYTES, so that two CTAs or more share an SM, and few tokens
// spread over many SMs.
int chunk_of(const smoe_layer &layer)
{
    const int64_t row = layer.experts * (layer.logits_type == SMOE_F32 ? 4 : 2);
    int chunk = SMOE_ROUTE_PANEL;
    while (chunk > 32 && (chunk * row > ROWS_BYTES || layer.tokens < (int64_t)chunk * MANY_CTAS)) chunk /= 2;
    return chunk;
}

template <typename L, int P> cudaError_t launch(const smoe_cuda_routing &r, cudaStream_t stream)
{
    const int chunk = chunk_of(r.layer);
    const size_t memory =
        (size_t)chunk * r.layer.experts * sizeof(L) + chunk / 32 * (r.layer.experts + 4) * 4 + 128;
    const unsigned ctas = (unsigned)(r.panels * SMOE_ROUTE_PANEL / chunk);
    fast<L, P><<<ctas, 2 * chunk, memory, stream>>>(r);
    return cudaGetLastError();
}

template <typename L> cudaError_t launch(const smoe_cuda_routing &r, cudaStream_t stream)
{
    if (r.layer.topk <= 4) return launch<L, 4>(r, stream);
    return r.layer.topk <= 8 ? launch<L, 8>(r, stream) : launch<L, 16>(r, stream);
}

template <typename L, int P> cudaError_t raise_limit()
{
    return cudaFuncSetAttribute((const void *)fast<L, P>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                ROWS_BYTES + 32768);
}

} // namespace
} // namespace topk
} // namespace smoe

extern "C" int smoe_cuda_topk_is_fast(const smoe_layer *layer)
{
    return layer->score != SMOE_SIGMOID && layer->experts % 8 == 0 &&
           layer->experts <= smoe::topk::MOST_EXPERTS && layer->topk <= smoe::topk::MOST_TOPK;
}

extern "C" cudaError_t smoe_cuda_topk(const smoe_cuda_routing *r, cudaStream_t stream)
{
    if (!smoe_cuda_topk_is_fast(&r->layer)) return smoe_cuda_topk_general(r, stream);
    return r->layer.logits_type == SMOE_F32 ? smoe::topk::launch<float>(*r, stream)
                                            : smoe::topk::launch<__nv_bfloat16>(*r, stream);
}

extern "C" cudaError_t smoe_cuda_topk_fast_init(void)
{
    using namespace smoe::topk;
    cudaError_t status[] = {raise_limit<float, 4>(),         raise_limit<float, 8>(),
                            raise_limit<float, 16>(),        raise_limit<__nv_bfloat16, 4>(),
                            raise_limit<__nv_bfloat16, 8>(), raise_limit<__nv_bfloat16, 16>()};
    for (cudaError_t s : status)
        if (s != cudaSuccess) return s;
    return cudaSuccess;
}
