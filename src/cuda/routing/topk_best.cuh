// The K best experts of a token, found by SHARE threads of one warp from its row of logits in shared memory.
// Selection scores of SIGMOID take the place of f32 logits. Terms: docs/glossary.md; symbols: include/smoe.h.
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
// out, unless their logits are equal, and if the row has a NaN.
#pragma once
#include "common/storage.cuh"
#include "routing/logits.cuh"

namespace moe
{
namespace topk
{
namespace
{

enum { MOST_EXPERTS = 512 }; // of a row

// A vector of logits. `best` is the key of its largest logit; its id is the vector's first expert and stands
// for the whole vector. `largest` keeps the largest logit itself, to find NaN. `pack` gives the keys of all
// logits.
struct f32_vector {
    enum { SIZE = 4 };
    using largest = float;
    static constexpr uint32_t lowest = 0xff800000u; // -inf
    static MOE_DEVICE bool is_nan(float largest)
    {
        return largest != largest;
    }
    static MOE_DEVICE int32_t best(uint4 v, uint32_t first, uint32_t mask, float &largest)
    {
        const float most = larger_or_nan(larger_or_nan(__uint_as_float(v.x), __uint_as_float(v.y)),
                                         larger_or_nan(__uint_as_float(v.z), __uint_as_float(v.w)));
        largest = larger_or_nan(largest, most);
        return moe_packed_f32(__float_as_uint(__fadd_rn(most, 0.0f)), first, mask); // -0 becomes 0
    }
    static MOE_DEVICE void pack(int32_t *keys, uint4 v, uint32_t first, uint32_t mask)
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
    static MOE_DEVICE bool is_nan(uint32_t largest)
    {
        return (largest & 0xffffu) == 0x7fffu || largest >> 16 == 0x7fffu;
    }
    static MOE_DEVICE int32_t best(uint4 v, uint32_t first, uint32_t, uint32_t &largest)
    {
        const uint32_t most = larger_bf16_pairs(larger_bf16_pairs(v.x, v.y), larger_bf16_pairs(v.z, v.w));
        largest = larger_bf16_pairs(largest, most);
        const uint32_t pair = add_bf16_pairs(larger_bf16_pairs(most, most >> 16 | most << 16), 0u);
        return moe_packed_bf16(pair & 0xffff0000u, first);
    }
    static MOE_DEVICE void pack(int32_t *keys, uint4 v, uint32_t first, uint32_t)
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

enum : int32_t { NOBODY = INT32_MIN };    // below every key
enum : uint32_t { LOWEST = 0xff800000u }; // the bits of -inf

// The keys of P vectors of a token's row: batch `batch` of the thread's vectors. The thread has every
// SHARE-th vector of the row. Different tokens start at different vectors, so that lanes read different
// banks.
template <typename L, int P, int SHARE>
MOE_DEVICE void keys_of_vectors(int32_t (&keys)[P], typename vector_of<L>::type::largest &largest,
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
MOE_DEVICE bool best_vectors(int32_t (&own)[P / SHARE], int32_t &excluded, const L *row, int experts,
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
MOE_DEVICE void best_of_vectors(int32_t (&best)[P], int32_t &excluded, const int32_t (&own)[P / SHARE],
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
template <int P, int SHARE> MOE_DEVICE void merge_parts(int32_t (&best)[P], int32_t &excluded)
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
template <int P> MOE_DEVICE void order_exactly(int (&ids)[P], const float *row, int experts)
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
MOE_DEVICE bool best_experts(int (&ids)[P], const L *row, int experts, int topk, int lane)
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

// Whether the K-th best's logit equals those of all experts that its packed key is not told from. Then the
// packed keys have ordered them rightly, by id. False for a row with a NaN, and for -inf, which experts of
// groups that are not kept have too. Called by the whole warp. Sigmoids of bf16 logits often are equal.
MOE_DEVICE bool equals_its_neighbours(const float *row, int experts, int kth, int lane)
{
    kth = min(kth, experts - 1); // of a row with a NaN it may be no expert
    const uint32_t mask = moe_packed_mask(experts);
    const auto key_of = [&](int e) {
        return moe_packed_f32(__float_as_uint(__fadd_rn(row[e], 0.0f)), (uint32_t)e, mask);
    };
    const float logit = row[kth];
    const int32_t key = key_of(kth);
    bool equal = logit != __uint_as_float(LOWEST);
    for (int e = lane; e < experts; e += 32)
        equal &= row[e] == logit || (row[e] == row[e] && !moe_packed_collide(key_of(e), key, mask));
    return __all_sync(~0u, equal);
}

// The largest logit of a token's row, by its threads; -inf for a row of NaN.
template <typename L, int SHARE> MOE_DEVICE float largest_of_row(const L *row, int experts, int part)
{
    float largest = __uint_as_float(LOWEST);
    for (int e = part; e < experts; e += SHARE) {
        const float logit = logits_of<L>::value(row[e]);
        largest = logit > largest ? logit : largest; // false for NaN
    }
#pragma unroll
    for (int other = 1; other < SHARE; other *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, other));
    return largest;
}

// The sum of the softmax's terms over a token's row, by its threads.
template <typename L, int SHARE>
MOE_DEVICE float sum_of_row(const L *row, int experts, int part, int lane, float max)
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

// The exact top-K of one token by the whole warp; the token's own threads take the ids. `kept`: with GROUPS,
// a bit for each group of experts among which it chooses.
template <typename L, int P, bool GROUPS>
MOE_DEVICE void redo(int (&ids)[P], const L *row, const smoe_layer &layer, uint32_t kept, bool owner,
                     int lane)
{
    const int experts = (int)layer.experts, topk = (int)layer.topk, size = experts / layer.groups;
    uint32_t used = 0;
#pragma unroll 1
    for (int k = 0; k < topk; k++) {
        uint32_t best = 0;
        int best_expert = MOST_EXPERTS;
        for (int i = 0; i < (experts + 31) / 32; i++) {
            const int e = i * 32 + lane;
            if (e >= experts || (used >> i & 1) || (GROUPS && !(kept >> e / size & 1))) continue;
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

} // namespace
} // namespace topk
} // namespace moe
