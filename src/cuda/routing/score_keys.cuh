// Ranking keys of the pairs of a segment by softmax scores, transposed to (E, T). A ranking key is an
// integer that compares as the score does. The logits come from shared memory, where top-K has put them.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Tile: a warp takes 32 tokens and, of each token's row of logits, 32 words of 32 bits. A lane reads one
// word of a token: two bf16 logits or one f32 logit. The keys go through 4 KB of shared memory, so that they
// are written as whole sectors of the experts' rows.
//
// With bf16 logits a key holds 8 bits of the score. The hardware's exp2 gives a lower and an upper bound of
// the score (route_math.h). If both bounds round to the same key, that is the key. Otherwise the exact score
// is computed.
//
// Bytes: 2 E T of keys written with bf16 logits, 4 E T with f32 logits.
#pragma once
#include "common/storage.cuh"
#include "routing/logits.cuh"

namespace moe
{
namespace topk
{

enum { STAGING_BYTES = 4096 }; // of a warp

// A token's softmax with the reciprocal of its sum.
struct alignas(16) token_scale {
    float max, sum, reciprocal;
};

// The key of one logit, exactly.
template <typename L> MOE_DEVICE uint32_t exact_key(float logit, const token_scale &s)
{
    const float term = moe_softmax_term(logit, s.max);
    return logits_of<L>::key_of(moe_quotient_is_exact(term) ? moe_quotient(term, s.sum, s.reciprocal)
                                                            : moe_div(term, s.sum));
}

// A lane's 128 bytes of the staging memory are eight vectors. Their order is permuted from lane to lane, so
// that the lanes hit all banks.
MOE_DEVICE uint4 *vector_at(uint4 *staging, int lane, int vector)
{
    return staging + lane * 8 + (vector ^ (lane & 7));
}

// Keys of 8 tokens from `first` on (of 32): words[i] holds the lane's logit of token i.
MOE_DEVICE void write_eight(uint4 *staging, int lane, int first, const uint32_t (&words)[8],
                            const token_scale *scales, float)
{
    uint32_t keys[8];
#pragma unroll
    for (int i = 0; i < 8; i++) keys[i] = exact_key<float>(__uint_as_float(words[i]), scales[i]);
    *vector_at(staging, lane, first / 4) = make_uint4(keys[0], keys[1], keys[2], keys[3]);
    *vector_at(staging, lane, first / 4 + 1) = make_uint4(keys[4], keys[5], keys[6], keys[7]);
}

// The same with two bf16 logits a word. The first expert's keys are vectors 0 to 3, the second's 4 to 7.
MOE_DEVICE void write_eight(uint4 *staging, int lane, int first, const uint32_t (&words)[8],
                            const token_scale *scales, __nv_bfloat16)
{
    using pairs = storage<__nv_bfloat16>;
    uint32_t low[4], high[4], unsure = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const moe_score_bounds a = moe_bound_score(pairs::low(words[i]), scales[i].max, scales[i].reciprocal);
        const moe_score_bounds b =
            moe_bound_score(pairs::high(words[i]), scales[i].max, scales[i].reciprocal);
        const uint32_t keys = pairs::pack(a.low, b.low) | 0x80008000u;
        if (!(a.known && b.known) || keys != (pairs::pack(a.high, b.high) | 0x80008000u)) unsure |= 1u << i;
        low[i / 2] = i % 2 ? (low[i / 2] & 0xffffu) | keys << 16 : keys;
        high[i / 2] = i % 2 ? high[i / 2] >> 16 | (keys & 0xffff0000u) : keys;
    }
    uint4 *const vectors[2] = {vector_at(staging, lane, first / 8), vector_at(staging, lane, first / 8 + 4)};
    *vectors[0] = make_uint4(low[0], low[1], low[2], low[3]);
    *vectors[1] = make_uint4(high[0], high[1], high[2], high[3]);
#pragma unroll 1
    for (; unsure; unsure &= unsure - 1) {
        const int i = __ffs(unsure) - 1;
        uint32_t word = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) word = i == j ? words[j] : word;
        ((uint16_t *)vectors[0])[i] = (uint16_t)exact_key<__nv_bfloat16>(pairs::low(word), scales[i]);
        ((uint16_t *)vectors[1])[i] = (uint16_t)exact_key<__nv_bfloat16>(pairs::high(word), scales[i]);
    }
}

// Called by the whole CTA. rows: (segment, E) logits; scales: (segment); staging: STAGING_BYTES for each
// warp.
template <typename L>
MOE_DEVICE void write_keys(const moe_cuda_routing &r, const L *rows, const token_scale *scales,
                           char *all_staging, int segment)
{
    constexpr int PER = 4 / (int)sizeof(L), SPAN = 32 * PER, TOKENS = 16 / (int)sizeof(L); // of a vector
    const int experts = (int)r.layer.experts, spans = (experts + SPAN - 1) / SPAN;
    const int warp = warp_number(), lane = threadIdx.x & 31;
    uint4 *staging = (uint4 *)(all_staging + warp * STAGING_BYTES);
#pragma unroll 1
    for (int job = warp; job < segment / 32 * spans; job += blockDim.x / 32) {
        const int first_token = job / spans * 32, first_expert = job % spans * SPAN;
        const int expert = min(first_expert + lane * PER, experts - PER);
        const L *from = rows + first_token * experts + expert;
#pragma unroll 1
        for (int first = 0; first < 32; first += 8) {
            uint32_t words[8];
#pragma unroll
            for (int i = 0; i < 8; i++) words[i] = *(const uint32_t *)(from + (first + i) * experts);
            write_eight(staging, lane, first, words, scales + first_token + first, L());
        }
        __syncwarp();
        using key = typename logits_of<L>::key;
        key *to = (key *)r.keys + (int64_t)blockIdx.x * segment + first_token;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int row = i * 4 + lane / 8, vector = lane % 8; // 8 / PER vectors an expert
            const int64_t of = first_expert + row * PER + vector * PER / 8;
            if (of < experts)
                *(uint4 *)(to + of * r.panels * MOE_ROUTE_PANEL + vector % (8 / PER) * TOKENS) =
                    *vector_at(staging, row, vector);
        }
        __syncwarp();
    }
}

} // namespace topk
} // namespace moe
