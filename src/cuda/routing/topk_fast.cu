// Top-K of SOFTMAX_TOPK and TOPK_SOFTMAX for E a multiple of 8 up to 512 and K <= 16: ids and weights.
// Shapes: logits (T, E), ids and weights (T, K).
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Tile: a CTA takes a segment, a run of consecutive tokens. SHARE threads work on a token: four if a token's
// row of logits has 512 bytes or more, else two. One bulk copy brings a warp's rows of logits into shared
// memory. If the rows of a CTA take more than 128 KiB, they come in two steps.
//
// Most logits are never sorted. A row of logits is read as vectors of 16 bytes. Let P be the least of 4, 8,
// 16 that is at least K. Order the vectors by their largest logits, ties to the lower expert. The K best
// logits are all in the first P vectors: an expert in any other vector comes after the best expert of each of
// these P >= K vectors. So
// - a thread takes the largest logit of each vector that it reads, and sorts these;
// - the threads of a token merge their lists and take P / SHARE of the first P vectors each;
// - each thread sorts all logits of the vectors that it took;
// - the threads of a token merge their lists and share the computation of the K weights.
// A list has P elements. A thread sorts P new elements at a time with a sorting network, merges them with the
// P of its list, and keeps the best P of the 2 P. The networks have no branches and work on packed keys
// (route_math.h). The high bits of a packed key compare as the logit does; the low bits are the complement of
// the expert's id. Packed keys of bf16 logits are exact. Packed keys of f32 logits lose their lowest bits to
// the id, so neighbours in the list whose high bits are equal are put in order by their logits. In two cases
// the warp does the token again with exact keys: if the K-th best cannot be told from an expert that was left
// out, and if the row has a NaN.
//
// For later kernels the kernel also writes (sizes in bytes):
// - for the plan, the counts of each segment, 2 E for a segment;
// - for rounding, ranking keys, as many bytes as the logits;
// - for rounding and losses, the mask, E / 8 for each token: one bit for each expert, set if top-K selected
//   it;
// - for rounding and losses, the largest logit and the denominator of the softmax over E, 8 for each token.
//
// Bytes: the logits once, 8 K written for each token, and what the list above says.
// FLOPs: T E exp polynomials for the denominator of the softmax over E where it is needed, and as many again
// for the ranking keys of rounding; K exps and at most 2 K divisions for the weights of each token.
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "host/routing.h"
#include "routing/score_keys.cuh"
#include "sm90/mbarrier.cuh"
#include "sm90/tma.cuh"

namespace moe
{
namespace topk
{
namespace
{

enum {
    THREADS = 512,
    LONG_ROW = 512,
    MOST_TOPK = 16,
    MOST_EXPERTS = 512,
    ROWS_BYTES = 131072,
    LONGEST_ROW = 1024, // with rounding, longer rows have small segments: several CTAs on an SM
    LONGEST_ROWS_BYTES = 65536,
    MOST_STEPS = 2,
    MANY_CTAS = 128,
    MOST_BYTES = ROWS_BYTES + 81920
};

// The mask in shared memory is [32 tokens][expert]. Its rows are padded, so that reading it by words hits all
// banks.
__host__ SMOE_DEVICE int mask_pitch(int experts)
{
    return experts + 4;
}

// A vector of logits. `best` is the key of its largest logit; its id is the vector's first expert and stands
// for the whole vector. `largest` keeps the largest logit itself, to find NaN. `pack` gives the keys of all
// logits.
struct f32_vector {
    enum { SIZE = 4 };
    using largest = float;
    static constexpr uint32_t lowest = 0xff800000u; // -inf
    static SMOE_DEVICE bool is_nan(float largest)
    {
        return largest != largest;
    }
    static SMOE_DEVICE int32_t best(uint4 v, uint32_t first, uint32_t mask, float &largest)
    {
        const float most = larger_or_nan(larger_or_nan(__uint_as_float(v.x), __uint_as_float(v.y)),
                                         larger_or_nan(__uint_as_float(v.z), __uint_as_float(v.w)));
        largest = larger_or_nan(largest, most);
        return moe_packed_f32(__float_as_uint(__fadd_rn(most, 0.0f)), first, mask); // -0 becomes 0
    }
    static SMOE_DEVICE void pack(int32_t *keys, uint4 v, uint32_t first, uint32_t mask)
    {
        const uint32_t bits[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
            keys[i] =
                moe_packed_f32(__float_as_uint(__fadd_rn(__uint_as_float(bits[i]), 0.0f)), first + i, mask);
    }
};

struct bf16_vector {
    enum { SIZE = 8 };
    using largest = uint32_t; // of a pair; a NaN result is 0x7fff
    static constexpr uint32_t lowest = 0xff80ff80u;
    static SMOE_DEVICE bool is_nan(uint32_t largest)
    {
        return (largest & 0xffffu) == 0x7fffu || largest >> 16 == 0x7fffu;
    }
    static SMOE_DEVICE int32_t best(uint4 v, uint32_t first, uint32_t, uint32_t &largest)
    {
        const uint32_t most = larger_bf16_pairs(larger_bf16_pairs(v.x, v.y), larger_bf16_pairs(v.z, v.w));
        largest = larger_bf16_pairs(largest, most);
        const uint32_t pair = add_bf16_pairs(larger_bf16_pairs(most, most >> 16 | most << 16), 0u);
        return moe_packed_bf16(pair & 0xffff0000u, first);
    }
    static SMOE_DEVICE void pack(int32_t *keys, uint4 v, uint32_t first, uint32_t)
    {
        const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t pair = add_bf16_pairs(pairs[i], 0u); // -0 becomes 0
            keys[2 * i] = moe_packed_bf16(pair << 16, first + 2 * i);
            keys[2 * i + 1] = moe_packed_bf16(pair & 0xffff0000u, first + 2 * i + 1);
        }
    }
};

template <typename L> struct vector_of;
template <> struct vector_of<float> {
    using type = f32_vector;
};
template <> struct vector_of<__nv_bfloat16> {
    using type = bf16_vector;
};

enum : int32_t { NOBODY = INT32_MIN }; // below every key

// The keys of P vectors of a token's row: batch `batch` of the thread's vectors. The thread has every
// SHARE-th vector of the row. Different tokens start at different vectors, so that lanes read different
// banks.
template <typename L, int P, int SHARE>
SMOE_DEVICE void keys_of_vectors(int32_t (&keys)[P], typename vector_of<L>::type::largest &largest,
                                 const L *row, int experts, int batch, int lane, uint32_t mask)
{
    using vector = typename vector_of<L>::type;
#pragma unroll
    for (int j = 0; j < P; j++) {
        const int u = (batch * P + ((j + lane / SHARE) & (P - 1))) * SHARE + lane % SHARE;
        const int first = min(u * vector::SIZE, experts - vector::SIZE);
        const int32_t key = vector::best(*(const uint4 *)(row + first), (uint32_t)first, mask, largest);
        keys[j] = first == u * vector::SIZE ? key : NOBODY;
    }
}

// The P best vectors of a token; each of its threads gets P / SHARE of them. True if the thread met a NaN.
template <typename L, int P, int SHARE>
SMOE_DEVICE bool best_vectors(int32_t (&own)[P / SHARE], int32_t &excluded, const L *row, int experts,
                              int lane, uint32_t mask)
{
    using vector = typename vector_of<L>::type;
    constexpr int OWN = P / SHARE;
    typename vector::largest largest = 0; // any value but NaN
    int32_t best[P];
    keys_of_vectors<L, P, SHARE>(best, largest, row, experts, 0, lane, mask);
    moe_sort_falling(best, P);
#pragma unroll 1
    for (int batch = 1; batch * P * SHARE * vector::SIZE < experts; batch++) {
        int32_t keys[P];
        keys_of_vectors<L, P, SHARE>(keys, largest, row, experts, batch, lane, mask);
        moe_sort_falling(keys, P);
        moe_merge_best(best, keys, P, &excluded);
    }
#pragma unroll
    for (int other = 1; other < SHARE / 2; other *= 2) {
        int32_t theirs[P];
#pragma unroll
        for (int k = 0; k < P; k++) theirs[k] = __shfl_xor_sync(~0u, best[k], other);
        moe_merge_best(best, theirs, P, &excluded);
    }
    // Both halves of the token's threads have a falling list each: the k-th of one against the k-th last of
    // the other, the larger is one of the P best. A thread compares only those that it keeps.
    const bool second = SHARE == 4 && (lane & 1);
#pragma unroll
    for (int k = 0; k < OWN; k++) {
        const int32_t mine = second ? best[(OWN + k) % P] : best[k];
        const int32_t for_other = second ? best[(2 * P - 1 - OWN - k) % P] : best[P - 1 - k];
        const int32_t theirs = __shfl_xor_sync(~0u, for_other, SHARE / 2);
        own[k] = moe_larger(mine, theirs);
        excluded = moe_larger(excluded, moe_smaller(mine, theirs));
    }
    return vector::is_nan(largest);
}

// The P best logits of the thread's vectors. A vector that does not exist counts as -inf, with ids that rank
// below all others. (With f32 its keys can collide with others; then the token is done again.)
template <typename L, int P, int SHARE>
SMOE_DEVICE void best_of_vectors(int32_t (&best)[P], int32_t &excluded, const int32_t (&own)[P / SHARE],
                                 const L *row, uint32_t mask)
{
    using vector = typename vector_of<L>::type;
    constexpr int VECTORS = P > vector::SIZE ? P / vector::SIZE : 1; // of a batch
    constexpr int KEYS = VECTORS * vector::SIZE, SETS = KEYS / P, BATCHES = P / SHARE / VECTORS;
    static_assert(BATCHES >= 1 && BATCHES * VECTORS * SHARE == P, "vectors of a thread are whole batches");
#pragma unroll
    for (int i = 0; i < BATCHES; i++) {
        int32_t keys[KEYS];
#pragma unroll
        for (int q = 0; q < VECTORS; q++) {
            uint4 v = {vector::lowest, vector::lowest, vector::lowest, vector::lowest};
            uint32_t first = mask - (vector::SIZE - 1);
            if (own[i * VECTORS + q] != NOBODY) {
                first = mask - ((uint32_t)own[i * VECTORS + q] & mask);
                v = *(const uint4 *)(row + first);
            }
            vector::pack(keys + q * vector::SIZE, v, first, mask);
        }
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            moe_sort_falling(keys + set * P, P);
            if (i == 0 && set == 0)
#pragma unroll
                for (int k = 0; k < P; k++) best[k] = keys[k];
            else
                moe_merge_best(best, keys + set * P, P, &excluded);
        }
    }
}

// Merges the lists of a token's threads; each thread gets the result.
template <int P, int SHARE> SMOE_DEVICE void merge_parts(int32_t (&best)[P], int32_t &excluded)
{
#pragma unroll
    for (int other = 1; other < SHARE; other *= 2) {
        int32_t theirs[P];
        excluded = max(excluded, __shfl_xor_sync(~0u, excluded, other));
#pragma unroll
        for (int k = 0; k < P; k++) theirs[k] = __shfl_xor_sync(~0u, best[k], other);
        moe_merge_best(best, theirs, P, &excluded);
    }
}

// Neighbours whose f32 keys are equal in all bits above the id are ordered by their logits. Called by the
// whole warp.
template <int P> SMOE_DEVICE void order_exactly(int (&ids)[P], const float *row, int experts)
{
    int32_t value[P];
#pragma unroll
    for (int k = 0; k < P; k++)
        value[k] =
            ids[k] < experts ? moe_signed_order(__float_as_uint(__fadd_rn(row[ids[k]], 0.0f))) : NOBODY;
    bool moved = true;
#pragma unroll 1
    while (__any_sync(~0u, moved)) {
        moved = false;
#pragma unroll
        for (int k = 0; k + 1 < P; k++) {
            const int32_t v = value[k], next = value[k + 1];
            const int id = ids[k], next_id = ids[k + 1];
            value[k] = max(v, next), value[k + 1] = min(v, next);
            ids[k] = v < next ? next_id : id, ids[k + 1] = v < next ? id : next_id;
            moved |= v < next;
        }
    }
}

// A token's P best experts by falling rank. True if they are not certain: the row has a NaN, or its f32 keys
// do not tell the K-th best from an expert that was left out.
template <typename L, int P, int SHARE>
SMOE_DEVICE bool best_experts(int (&ids)[P], const L *row, int experts, int topk, int lane)
{
    const uint32_t mask = sizeof(L) == 4 ? moe_packed_mask(experts) : 0xffffu;
    int32_t own[P / SHARE], best[P], excluded = NOBODY;
    bool again = best_vectors<L, P, SHARE>(own, excluded, row, experts, lane, mask);
    best_of_vectors<L, P, SHARE>(best, excluded, own, row, mask);
    merge_parts<P, SHARE>(best, excluded);
    bool close = false;
    int32_t last = INT32_MAX;
#pragma unroll
    for (int k = 0; k < P; k++) {
        ids[k] = (int)(mask - ((uint32_t)best[k] & mask));
        if (k < topk) last = moe_smaller(last, best[k]);
        if (sizeof(L) == 4 && k + 1 < P)
            close |= k < topk && moe_packed_collide(best[k], best[k + 1 < P ? k + 1 : k], mask);
    }
    if (sizeof(L) == 4) again |= moe_packed_collide(last, excluded, mask);
    if constexpr (sizeof(L) == 4)
        if (__any_sync(~0u, close)) order_exactly<P>(ids, row, experts);
    return again;
}

// The sum of the softmax's terms over a token's row, by its threads.
template <typename L, int SHARE>
SMOE_DEVICE float sum_of_row(const L *row, int experts, int part, int lane, float max)
{
    constexpr int SIZE = vector_of<L>::type::SIZE;
    const int vectors = experts / SIZE, rounds = (vectors + SHARE - 1) / SHARE;
    unsigned long long sum = 0;
    int at = lane % rounds;
    for (int i = 0; i < rounds; i++) {
        const int u = part * rounds + at;
        if (u < vectors) {
            const uint4 v = *(const uint4 *)(row + u * SIZE);
            const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float high = __uint_as_float(SIZE == 8 ? words[j] & 0xffff0000u : words[j]);
                sum += moe_softmax_fixed_fast(moe_softmax_term(high, max));
                if (SIZE == 8)
                    sum += moe_softmax_fixed_fast(moe_softmax_term(__uint_as_float(words[j] << 16), max));
            }
        }
        at = at + 1 == rounds ? 0 : at + 1;
    }
#pragma unroll
    for (int other = 1; other < SHARE; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
    return moe_softmax_sum(sum);
}

// The exact top-K of one token by the whole warp; the token's own threads take the ids.
template <typename L, int P>
SMOE_DEVICE void redo(int (&ids)[P], const L *row, int experts, int topk, bool owner, int lane)
{
    uint32_t used = 0;
#pragma unroll 1
    for (int k = 0; k < topk; k++) {
        uint32_t best = 0;
        int best_expert = MOST_EXPERTS;
        for (int i = 0; i < (experts + 31) / 32; i++) {
            const int e = i * 32 + lane;
            if (e >= experts || (used >> i & 1)) continue;
            const uint32_t key = moe_rank_key(logits_of<L>::value(row[e])) + 1;
            if (key > best) {
                best = key;
                best_expert = e;
            }
        }
        const uint32_t top = __reduce_max_sync(~0u, best);
        const int expert = (int)__reduce_min_sync(~0u, (uint32_t)(best == top ? best_expert : MOST_EXPERTS));
        if (expert % 32 == lane) used |= 1u << (expert / 32);
#pragma unroll
        for (int j = 0; j < P; j++)
            if (owner && j == k) ids[j] = expert;
    }
}

// `COUNT` values for ranks first..first+COUNT-1 of a token's row.
template <typename V, int COUNT>
SMOE_DEVICE void store_ranks(V *row, const V (&values)[COUNT], int first, int topk)
{
    constexpr int TOGETHER = COUNT < 4 ? COUNT : 4;
    struct alignas(sizeof(V) * TOGETHER) together {
        V v[TOGETHER];
    };
#pragma unroll
    for (int k = 0; k < COUNT; k += TOGETHER) {
        if (topk % TOGETHER == 0) {
            together t;
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) t.v[i] = values[k + i];
            if (first + k < topk) *(together *)(row + first + k) = t;
        } else
#pragma unroll
            for (int i = 0; i < TOGETHER; i++)
                if (first + k + i < topk) row[first + k + i] = values[k + i];
    }
}

// Divides terms or weights, none above 1, by their sum: by one reciprocal where that gives the same bits.
template <int COUNT> SMOE_DEVICE void divide(float (&x)[COUNT], float sum)
{
    float least = x[0];
#pragma unroll
    for (int i = 1; i < COUNT; i++) least = fminf(least, x[i]);
    if (sum >= 1.0f && sum <= 4096.0f && moe_quotient_is_exact(least)) {
        const float reciprocal = __frcp_rn(sum);
#pragma unroll
        for (int i = 0; i < COUNT; i++) x[i] = moe_quotient(x[i], sum, reciprocal);
    } else
#pragma unroll
        for (int i = 0; i < COUNT; i++) x[i] = moe_div(x[i], sum);
}

// What the threads of one token write: each writes ids, weights and mask bits of P / SHARE ranks.
template <typename L, int P, int SHARE>
SMOE_DEVICE void finish_token(const moe_cuda_routing &r, const int (&ids)[P], const L *row, int64_t token,
                              bool there, uint32_t *mask_words, uint32_t bit, token_scale *scale, int lane)
{
    constexpr int OWN = P / SHARE;
    const int topk = (int)r.layer.topk, part = lane % SHARE, first = part * OWN;
    const float first_logit = logits_of<L>::value(row[ids[0]]);
    moe_token_softmax softmax = {softmax_max(first_logit), 1.0f};
    if (moe_weights_from_softmax(r.layer.score) || r.softmax)
        softmax.sum = sum_of_row<L, SHARE>(row, (int)r.layer.experts, part, lane, softmax.max);

    int own_ids[OWN];
    float weights[OWN], sum = 0.0f;
    int nan = 0;
#pragma unroll
    for (int k = 0; k < P; k++)
        if (k / OWN == part) own_ids[k % OWN] = ids[k];
    const bool of_all = moe_weights_from_softmax(r.layer.score), divided = moe_weights_are_divided(&r.layer);
#pragma unroll
    for (int i = 0; i < OWN; i++) { // as moe_raw_weight does it, for several ranks
        const float logit = logits_of<L>::value(row[min(own_ids[i], (int)r.layer.experts - 1)]);
        nan |= first + i < topk && moe_is_nan(logit);
        weights[i] = moe_softmax_term(logit, of_all ? softmax.max : first_logit);
        if (first + i >= topk) weights[i] = 1.0f; // unused
    }
    if (of_all) divide<OWN>(weights, softmax.sum);
#pragma unroll
    for (int other = 1; other < SHARE; other *= 2) nan |= __shfl_xor_sync(~0u, nan, other);
    if (divided) {
#pragma unroll
        for (int k = 0; k < P; k++) {
            const float weight = __shfl_sync(~0u, weights[k % OWN], lane - part + k / OWN);
            if (k < topk) sum = moe_add(sum, weight);
        }
        divide<OWN>(weights, sum);
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const float weight = divided && sum == 0.0f ? 0.0f : weights[i];
        weights[i] = nan ? moe_float_of(0x7fc00000u) : moe_mul(weight, r.layer.route_scale);
    }
    if (!there) return;
    store_ranks<int, OWN>(r.topk_ids + token * topk, own_ids, first, topk);
    store_ranks<float, OWN>(r.topk_weights + token * topk, weights, first, topk);
    if (r.softmax && part == 0) r.softmax[token] = softmax;
    if (r.keys && part == 0) *scale = {softmax.max, softmax.sum, __frcp_rn(softmax.sum)};
#pragma unroll
    for (int i = 0; i < OWN; i++)
        if (first + i < topk) atomicOr(mask_words + own_ids[i], bit);
}

// Offsets into shared memory: the rows first; last, one mbarrier for each warp.
struct layout {
    uint32_t masks, scales, staging, barriers, end;
};

template <typename L>
__host__ SMOE_DEVICE layout layout_of(const moe_cuda_routing &r, int of_step, int steps, int warps)
{
    const int segment = of_step * steps;
    layout at;
    at.masks = (uint32_t)(of_step * (int)r.layer.experts * (int)sizeof(L));
    at.scales = at.masks + (uint32_t)(segment / 32 * mask_pitch((int)r.layer.experts) * 4);
    at.staging = at.scales + (r.keys ? (uint32_t)segment * (uint32_t)sizeof(token_scale) : 0);
    at.barriers = at.staging + (r.keys ? (uint32_t)(warps * STAGING_BYTES) : 0);
    at.end = at.barriers + 8 * (uint32_t)warps;
    return at;
}

// Writes what later kernels read of the segment's masks.
SMOE_DEVICE void write_masks(const moe_cuda_routing &r, const uint32_t *masks, int words)
{
    const int experts = (int)r.layer.experts, pitch = mask_pitch(experts), shift = __ffs(words) - 1;
    if (r.segment_counts && (int64_t)blockIdx.x * words * 32 < r.layer.tokens) // the mask covers whole panels
        for (int e = threadIdx.x; e < experts; e += blockDim.x) {
            int tokens = 0;
#pragma unroll 4
            for (int word = 0; word < words; word++) tokens += __popc(masks[word * pitch + e]);
            r.segment_counts[(int64_t)blockIdx.x * experts + e] = (uint16_t)tokens;
        }
    if (r.mask)
        for (int i = threadIdx.x; i < experts * words; i += blockDim.x) {
            const int expert = i >> shift, word = i & (words - 1);
            r.mask[(int64_t)expert * r.words + (int64_t)blockIdx.x * words + word] =
                masks[word * pitch + expert];
        }
}

// Starts the copy of a warp's rows.
template <typename L>
SMOE_DEVICE void load_rows(L *rows, const moe_cuda_routing &r, int64_t first, int tokens, uint32_t barrier)
{
    const uint32_t bytes = (uint32_t)(tokens * (int)r.layer.experts * (int)sizeof(L));
    barrier_expect(barrier, bytes);
    if (bytes)
        load_bytes(shared_address(rows), (const L *)r.logits + first * r.layer.experts, bytes, barrier);
}

// A segment is done in `steps` steps. In each step a warp's rows take the memory of those of the step before.
template <typename L, int P, int SHARE>
__global__ void __launch_bounds__(THREADS) fast(const __grid_constant__ moe_cuda_routing r, int most_steps)
{
    constexpr int TOKENS = 32 / SHARE;                               // of a warp
    const int steps = sizeof(L) == 4 && SHARE == 4 ? most_steps : 1; // shorter rows need no loop
    extern __shared__ __align__(128) char memory[];
    const int experts = (int)r.layer.experts, topk = (int)r.layer.topk, pitch = mask_pitch(experts);
    const int of_step = blockDim.x / SHARE, segment = steps * of_step;
    const int warp = warp_number(), lane = threadIdx.x & 31;
    const layout at = layout_of<L>(r, of_step, steps, blockDim.x / 32);
    L *rows = (L *)memory + warp * TOKENS * experts;
    uint32_t *masks = (uint32_t *)(memory + at.masks);
    token_scale *scales = (token_scale *)(memory + at.scales);
    const uint32_t barrier = shared_address(memory + at.barriers) + 8 * warp;
    for (int i = threadIdx.x; i < segment / 32 * pitch; i += blockDim.x) masks[i] = 0;
    if (lane == 0) {
        barrier_init(barrier, 1);
        barrier_init_done();
    }
    wait_for_previous();
    __syncthreads();

#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        const int begin = step * of_step + warp * TOKENS; // of the warp's tokens in the segment
        const int64_t first = (int64_t)blockIdx.x * segment + begin;
        const int tokens = (int)min(r.layer.tokens - first, (int64_t)TOKENS);
        if (tokens <= 0) break;
        __syncwarp();
        if (lane == 0) {
            if (step) fence_async_proxy();
            load_rows<L>(rows, r, first, tokens, barrier);
        }
        barrier_wait(barrier, step & 1);
        const int within = min(lane / SHARE, tokens - 1), in_segment = begin + within;
        const L *row = rows + within * experts;
        int ids[P];
        const bool again = best_experts<L, P, SHARE>(ids, row, experts, topk, lane);
        const uint32_t redone = __ballot_sync(~0u, again && lane / SHARE < tokens);
        for (int token = 0; redone && token < TOKENS; token++)
            if (redone >> (token * SHARE) & ((1u << SHARE) - 1u))
                redo<L, P>(ids, rows + token * experts, experts, topk, lane / SHARE == token, lane);
        finish_token<L, P, SHARE>(r, ids, row, first + within, lane / SHARE < tokens,
                                  masks + (in_segment >> 5) * pitch, 1u << (in_segment & 31),
                                  scales + in_segment, lane);
    }
    __syncthreads();
    write_masks(r, masks, segment / 32);
    if (r.keys) write_keys<L>(r, (const L *)memory, scales, memory + at.staging, segment);
    let_next_start();
}

int64_t row_bytes(const smoe_layer &layer)
{
    return layer.experts * moe_type_bytes(layer.logits_type);
}

int share_of(const smoe_layer &layer)
{
    return row_bytes(layer) >= LONG_ROW ? 4 : 2;
}

// Tokens of a CTA. If there are few tokens, segments are smaller, so that more SMs have one. The keys for
// rounding need all rows of a segment in shared memory at the same time.
int segment_of(const smoe_layer &layer)
{
    const int64_t bytes = row_bytes(layer);
    const int64_t most = layer.rounding == SMOE_ROUNDING_NONE ? MOST_STEPS * ROWS_BYTES
                         : bytes > LONGEST_ROW                ? LONGEST_ROWS_BYTES
                                                              : ROWS_BYTES;
    int segment = THREADS / share_of(layer);
    while (segment > 32 && (segment * bytes > most || layer.tokens < (int64_t)segment * MANY_CTAS))
        segment /= 2;
    return segment;
}

template <typename L, int P, int SHARE> cudaError_t launch(const moe_cuda_routing &r, cudaStream_t stream)
{
    const int segment = segment_of(r.layer),
              steps = segment * row_bytes(r.layer) > ROWS_BYTES ? MOST_STEPS : 1;
    const int of_step = segment / steps, threads = SHARE * of_step;
    const int64_t tokens = r.mask ? r.panels * SMOE_ROUTE_PANEL : r.layer.tokens; // the mask has no gaps
    const unsigned ctas = (unsigned)moe_divide_up(tokens, segment);
    return launch_early(fast<L, P, SHARE>, dim3(ctas), dim3((unsigned)threads),
                        layout_of<L>(r, of_step, steps, threads / 32).end, stream, r, steps);
}

template <typename L, int P> cudaError_t launch(const moe_cuda_routing &r, cudaStream_t stream)
{
    return share_of(r.layer) == 4 ? launch<L, P, 4>(r, stream) : launch<L, P, 2>(r, stream);
}

template <typename L> cudaError_t launch(const moe_cuda_routing &r, cudaStream_t stream)
{
    return r.layer.topk <= 4   ? launch<L, 4>(r, stream)
           : r.layer.topk <= 8 ? launch<L, 8>(r, stream)
                               : launch<L, 16>(r, stream);
}

template <typename L, int P> cudaError_t raise_limits()
{
    const cudaError_t status = allow_shared(fast<L, P, 2>, MOST_BYTES);
    return status == cudaSuccess ? allow_shared(fast<L, P, 4>, MOST_BYTES) : status;
}

} // namespace
} // namespace topk
} // namespace moe

extern "C" int32_t moe_cuda_topk_segment(const smoe_layer *layer)
{
    const bool fast = !moe_ranks_by_sigmoid(layer->score) && layer->experts % 8 == 0 &&
                      layer->experts <= moe::topk::MOST_EXPERTS && layer->topk <= moe::topk::MOST_TOPK;
    return fast ? moe::topk::segment_of(*layer) : 0;
}

extern "C" cudaError_t moe_cuda_topk(const moe_cuda_routing *r, cudaStream_t stream)
{
    if (!moe_cuda_topk_segment(&r->layer)) return moe_cuda_topk_general(r, stream);
    return moe::for_type(moe::logits_types(), r->layer.logits_type,
                         [&](auto l) { return moe::topk::launch<typename decltype(l)::type>(*r, stream); });
}

extern "C" cudaError_t moe_cuda_topk_fast_init(void)
{
    using namespace moe::topk;
    return moe::for_every_type(moe::logits_types(), [](auto l) {
        using L = typename decltype(l)::type;
        cudaError_t status = raise_limits<L, 4>();
        if (status == cudaSuccess) status = raise_limits<L, 8>();
        return status == cudaSuccess ? raise_limits<L, 16>() : status;
    });
}
