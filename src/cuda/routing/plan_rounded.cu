// The plan after token rounding, from the mask of the pairs that remain or were added. A token may have any
// number of rows. The mask has one bit for each expert and token, in W words of 32 tokens for each expert.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Two kernels:
// - expert_rows: one CTA for each expert. The CTA sums the counts of all lower experts, which gives the
//   first row of its expert. Then it goes through the words of its expert's mask and writes a row for each
//   bit that is set. A pair that top-K selected has the weight that top-K gave it. A pair that rounding
//   added has the weight p (for SIGMOID: sigma) times route_scale. For each word the CTA also writes
//   word_rows: the first row of its expert, as a padded index, plus the number of bits that are set in
//   earlier words.
// - token_rows: one CTA for 128 tokens. It writes token_offsets and token_rows. To find where its tokens'
//   rows start, a CTA needs the number of rows of all earlier tokens. It is the sum, over the experts, of
//   (word_rows of the CTA's first word - first row of the expert). So a CTA need not wait for other CTAs.
//
// Bytes: the mask (4 E W) read twice, word_rows (4 E W) written and read, 12 written for each row, and for
// each row 8 K read: the ids and weights of its token. No FLOPs except for the weights of added pairs.
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "host/routing.h"
#include "routing/plan_shared.cuh"

#include "routing/logits.cuh"

namespace moe
{
namespace plan
{
namespace
{

enum {
    STRIP_TOKENS = THREADS * 32,
    MAP_WORDS = 4,
    MAP_TOKENS = 32 * MAP_WORDS,
    MAP_BUFFER = 4096,
    MOST_EXPERTS = 4096,
    IN_FLIGHT = 2
};

// ---- expert_rows

// One of the rows that a thread works on at the same time.
struct row_in_flight {
    bool there;
    int64_t token;
    bool kept; // top-K chose the expert, with this weight
    float weight;
};

MOE_DEVICE void look_for(row_in_flight &row, int expert, int id, float weight)
{
    row.kept |= id == expert;
    row.weight = id == expert ? weight : row.weight;
}

MOE_DEVICE void look_for(row_in_flight &row, int expert, int4 id, float4 weight)
{
    look_for(row, expert, id.x, weight.x);
    look_for(row, expert, id.y, weight.y);
    look_for(row, expert, id.z, weight.z);
    look_for(row, expert, id.w, weight.w);
}

// Looks for the expert among the tokens' ids, one or four at a time. The loads of all rows are in flight
// together.
template <typename I, typename W>
MOE_DEVICE void find_pairs(const moe_cuda_routing &r, row_in_flight (&rows)[IN_FLIGHT], int expert)
{
    constexpr int TOGETHER = (int)sizeof(I) / 4;
    const int topk = (int)r.layer.topk;
#pragma unroll 2
    for (int k = 0; k < topk; k += TOGETHER) {
        I ids[IN_FLIGHT] = {};
        W weights[IN_FLIGHT] = {};
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++)
            if (rows[u].there) {
                ids[u] = __ldcg((const I *)(r.topk_ids + rows[u].token * topk + k));
                weights[u] = __ldcg((const W *)(r.topk_weights + rows[u].token * topk + k));
            }
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) look_for(rows[u], expert, ids[u], weights[u]);
    }
}

// What the weight of an added pair needs: the pair's logit, as it is stored, and its token's softmax.
template <typename L> struct pair_score {
    L logit;
    moe_token_softmax softmax;
};

// The weight of a pair that rounding added.
template <typename L> MOE_DEVICE float added_weight(const smoe_layer &layer, const pair_score<L> &pair)
{
    const float logit = logits_of<L>::value(pair.logit);
    const float score = moe_score_has_curve(layer.score)
                            ? moe_score_value(layer.score, logit)
                            : moe_div(moe_softmax_term(logit, pair.softmax.max), pair.softmax.sum);
    return moe_mul(score, layer.route_scale);
}

// In padded rows: where the CTA's expert begins, and where the last expert ends.
struct row_range {
    uint32_t first, end;
};

// Every CTA sums all counts. `rows` gets the counts, or only zeros if a count is negative or above T, or if
// the blocks of all experts exceed the padded rows.
MOE_DEVICE row_range place_expert(const moe_cuda_plan &p, uint32_t *rows, uint32_t *scratch)
{
    __shared__ row_range place;
    const int experts = p.experts, each = (experts + THREADS - 1) / THREADS;
    const int begin = min((int)threadIdx.x * each, experts), end = min(begin + each, experts);
    const uint32_t too_many =
        (uint32_t)p.padded_rows / MOE_BLOCK_ROWS + 1; // sums that stop here cannot overflow
    uint32_t own = 0;
    for (int e = begin; e < end; e++) {
        rows[e] = (uint32_t)__ldcg(p.counts + e);
        own = rows[e] > (uint32_t)p.tokens ? too_many : min(own + blocks_of(rows[e]), too_many);
        if (own == too_many) break;
    }
    const uint32_t of_warp = min(__reduce_add_sync(~0u, own), too_many);
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = of_warp;
    __syncthreads();
    const uint32_t lanes = (threadIdx.x & 31) < WARPS ? scratch[threadIdx.x & 31] : 0;
    const bool fits = __reduce_add_sync(~0u, lanes) < too_many;
    __syncthreads();
    if (!fits)
        for (int e = begin; e < end; e++) rows[e] = 0;
    uint32_t block = sum_of_threads_before(fits ? own : 0, scratch);
    for (int e = begin; e < end; e++) {
        if (e == (int)blockIdx.x) place.first = block * MOE_BLOCK_ROWS;
        block += blocks_of(rows[e]);
    }
    if (threadIdx.x == THREADS - 1) place.end = block * MOE_BLOCK_ROWS;
    __syncthreads();
    return place;
}

template <typename L>
__global__ void __launch_bounds__(THREADS, 2)
    expert_rows(const __grid_constant__ moe_cuda_routing r, const __grid_constant__ moe_cuda_plan p)
{
    extern __shared__ __align__(16) uint32_t memory[];
    __shared__ uint16_t within[STRIP_TOKENS];
    __shared__ int strip_rows;
    const int expert = blockIdx.x, experts = p.experts, topk = (int)r.layer.topk;
    uint32_t *scratch = memory + experts;
    wait_for_previous();
    const uint32_t *mask = r.mask + (int64_t)expert * r.words;
    uint32_t next = threadIdx.x < r.words ? mask[threadIdx.x] : 0; // one strip ahead of its use
    const row_range place = place_expert(p, memory, scratch);
    write_tail(p, place.end);

    int32_t *word_rows = r.word_rows + (int64_t)expert * r.words;
    int row = (int)place.first;
    const int last_row = row + (int)memory[expert];
    for (int64_t strip = 0; strip < r.words; strip += THREADS) {
        const int64_t w = strip + threadIdx.x;
        uint32_t word = next;
        next = w + THREADS < r.words ? mask[w + THREADS] : 0;
        const int rows = __popc(word);
        int at = (int)sum_of_threads_before((uint32_t)rows, scratch);
        if (w < r.words) word_rows[w] = row + at;
        if (threadIdx.x == THREADS - 1) strip_rows = at + rows;
        for (; word; word &= word - 1) within[at++] = (uint16_t)(threadIdx.x * 32 + __ffs(word) - 1);
        __syncthreads();
        const int all = strip_rows;
        if (strip == 0 && threadIdx.x >= THREADS - 32) write_expert<true>(p, memory, expert);
        for (int i0 = threadIdx.x; i0 < all; i0 += THREADS * IN_FLIGHT) {
            row_in_flight rows_here[IN_FLIGHT];
            pair_score<L> scores[IN_FLIGHT]; // read before it is known which rows need them, so that there is
                                             // one round trip to L2 instead of two
#pragma unroll
            for (int u = 0; u < IN_FLIGHT; u++) {
                const int i = i0 + u * THREADS;
                rows_here[u] = {i < all && row + i < last_row, strip * 32 + within[min(i, all - 1)], false,
                                0.0f};
                if (i >= all) continue;
                scores[u].logit = ((const L *)r.logits)[rows_here[u].token * r.layer.experts + expert];
                if (r.softmax) scores[u].softmax = r.softmax[rows_here[u].token];
            }
            if (topk % 4 == 0)
                find_pairs<int4, float4>(r, rows_here, expert);
            else
                find_pairs<int, float>(r, rows_here, expert);
#pragma unroll
            for (int u = 0; u < IN_FLIGHT; u++) {
                const row_in_flight &here = rows_here[u];
                if (!here.there) continue;
                p.row_token[row + i0 + u * THREADS] = (int32_t)here.token;
                p.row_weight[row + i0 + u * THREADS] =
                    here.kept ? here.weight : added_weight(r.layer, scores[u]);
            }
        }
        row += all;
        __syncthreads();
    }
    for (int i = row + threadIdx.x; i < last_row; i += THREADS) p.row_token[i] = -1, p.row_weight[i] = 0.0f;
    let_next_start();
}

// ---- token_rows

__host__ MOE_DEVICE int map_experts(int64_t experts)
{
    return (int)(experts + 127) / 128 * 128; // quarters of whole warps
}

// Bits and first rows of four words of every expert, [word][padded experts].
struct map_memory {
    uint32_t *bits;
    int32_t *rows;
    int experts;
};

// Loads them. Returns the number of rows of all tokens before. *before is 0 at the call.
MOE_DEVICE int load_words(const moe_cuda_routing &r, const moe_cuda_plan &p, const map_memory &m, int *before)
{
    int part = 0;
    const bool empty = __ldcg(p.block_offsets + p.experts) == 0;
    for (int e = threadIdx.x; e < m.experts; e += THREADS) {
        uint4 bits = {0, 0, 0, 0};
        int4 rows = {0, 0, 0, 0};
        if (empty && e < p.experts && blockIdx.x == 0) p.counts[e] = 0;
        if (e < p.experts && !empty) {
            const int64_t at = (int64_t)e * r.words + (int64_t)blockIdx.x * MAP_WORDS;
            bits = *(const uint4 *)(r.mask + at);
            rows = *(const int4 *)(r.word_rows + at);
            part += rows.x - p.block_offsets[e] * MOE_BLOCK_ROWS;
        }
        m.bits[e] = bits.x, m.bits[m.experts + e] = bits.y;
        m.bits[2 * m.experts + e] = bits.z, m.bits[3 * m.experts + e] = bits.w;
        m.rows[e] = rows.x, m.rows[m.experts + e] = rows.y;
        m.rows[2 * m.experts + e] = rows.z, m.rows[3 * m.experts + e] = rows.w;
    }
    part = __reduce_add_sync(~0u, part);
    if ((threadIdx.x & 31) == 0 && part) atomicAdd(before, part);
    __syncthreads();
    return *before;
}

// Bit i of lane j becomes bit j of lane i.
MOE_DEVICE uint32_t transpose(uint32_t bits, int lane)
{
    const uint32_t kept[5] = {0x55555555u, 0x33333333u, 0x0f0f0f0fu, 0x00ff00ffu, 0x0000ffffu};
#pragma unroll
    for (int i = 4; i >= 0; i--) {
        const uint32_t other = __shfl_xor_sync(~0u, bits, 1 << i);
        bits = lane >> i & 1 ? (bits & ~kept[i]) | (other >> (1 << i) & kept[i])
                             : (bits & kept[i]) | (other & kept[i]) << (1 << i);
    }
    return bits;
}

// Warp w takes word w % 4 and quarter w / 4 of the experts. Its lanes are 32 experts where it reads words of
// the mask, and the word's 32 tokens afterwards. In between the 32 x 32 bits are transposed, so that a token
// visits only its own set bits; these are few.
__global__ void __launch_bounds__(THREADS)
    token_rows(const __grid_constant__ moe_cuda_routing r, const __grid_constant__ moe_cuda_plan p)
{
    extern __shared__ __align__(16) uint32_t memory[];
    __shared__ uint32_t scratch[WARPS];
    __shared__ int before_memory, quarter_rows[4][MAP_TOKENS], first_of[MAP_TOKENS], tokens_rows;
    __shared__ int buffer[MAP_BUFFER];
    const int experts = map_experts(p.experts), lane = threadIdx.x & 31, warp = warp_number();
    const int word = warp % MAP_WORDS, quarter = warp / MAP_WORDS, token = word * 32 + lane;
    const map_memory m = {memory, (int32_t *)memory + MAP_WORDS * experts, experts};
    if (threadIdx.x == 0) before_memory = 0;
    __syncthreads();
    wait_for_previous();
    const int before = load_words(r, p, m, &before_memory);

    const int begin = quarter * (experts / 4), end = begin + experts / 4;
    const uint32_t *bits = m.bits + word * experts;
    const int32_t *rows = m.rows + word * experts;
    int own = 0;
#pragma unroll 2
    for (int e = begin; e < end; e += 32) own += __popc(transpose(bits[e + lane], lane));
    quarter_rows[quarter][token] = own;
    __syncthreads();
    int all = 0;
    if (threadIdx.x < MAP_TOKENS)
        for (int q = 0; q < 4; q++) all += quarter_rows[q][threadIdx.x];
    const int first = (int)sum_of_threads_before((uint32_t)all, scratch);
    if (threadIdx.x < MAP_TOKENS) { // its quarter is 0, its token threadIdx.x
        const int64_t t = (int64_t)blockIdx.x * MAP_TOKENS + threadIdx.x;
        first_of[threadIdx.x] = first;
        if (t < p.tokens) p.token_offsets[t] = before + first;
        if (t == p.tokens - 1) p.token_offsets[t + 1] = before + first + all;
        if (threadIdx.x == MAP_TOKENS - 1) tokens_rows = first + all;
    }
    __syncthreads();

    const int count = tokens_rows;
    const bool fits = count <= MAP_BUFFER;
    int *to = fits ? buffer : p.token_rows + before;
    int at = first_of[token];
    for (int q = 0; q < quarter; q++) at += quarter_rows[q][token];
    const uint32_t lower = (1u << lane) - 1u;
#pragma unroll 1
    for (int first = begin; first < end; first += 32)
        for (uint32_t chosen = transpose(bits[first + lane], lane); chosen; chosen &= chosen - 1) {
            const int e = first + __ffs((int)chosen) - 1;
            to[at++] = min(rows[e] + __popc(bits[e] & lower), p.padded_rows - 1);
        }
    __syncthreads();
    if (fits)
        for (int i = threadIdx.x; i < count; i += THREADS) p.token_rows[before + i] = buffer[i];
}

// Dynamic shared memory of expert_rows.
size_t expert_rows_bytes(int64_t experts)
{
    return (size_t)experts * 4 + 128;
}

} // namespace
} // namespace plan
} // namespace moe

extern "C" cudaError_t moe_cuda_plan_rounded(const moe_launch *on, const moe_cuda_routing *r,
                                             const moe_cuda_plan *p)
{
    using namespace moe::plan;
    const size_t counts_bytes = expert_rows_bytes(p->experts),
                 map_bytes = (size_t)map_experts(p->experts) * 32;
    const dim3 experts((unsigned)p->experts), threads(THREADS),
        maps((unsigned)moe_divide_up(r->layer.tokens, MAP_TOKENS));
    const cudaError_t status = moe::for_type(moe::logits_types(), r->layer.logits_type, [&](auto l) {
        return moe::launch_early(expert_rows<typename decltype(l)::type>, experts, threads, counts_bytes, on,
                                 *r, *p);
    });
    return status == cudaSuccess ? moe::launch_early(token_rows, maps, threads, map_bytes, on, *r, *p)
                                 : status;
}

extern "C" cudaError_t moe_cuda_plan_rounded_init(const moe_device *device)
{
    using namespace moe::plan;
    // With the kernels' static memory it can exceed the 48 KB that need no permission.
    const cudaError_t status = moe::allow_shared(device, token_rows, MOST_EXPERTS * 32);
    if (status != cudaSuccess) return status;
    return moe::for_every_type(moe::logits_types(), [&](auto l) {
        return moe::allow_shared(device, expert_rows<typename decltype(l)::type>,
                                 (int)expert_rows_bytes(MOST_EXPERTS));
    });
}
