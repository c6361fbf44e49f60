// Top-K for E a multiple of 8 up to 512 and K <= 16, with up to 16 groups if E >= 128: ids and weights.
// Shapes: logits (T, E), ids and weights (T, K).
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Tile: a CTA takes a segment, a run of consecutive tokens. SHARE threads work on a token: four if a token's
// row in shared memory has 512 bytes or more, else two. A row has the numbers that experts are chosen by. For
// SOFTMAX_TOPK and TOPK_SOFTMAX these are the logits, and one bulk copy brings a warp's rows. For a curve
// they are selection scores in f32, which the warp computes from the logits; in groups that are not kept they
// become -inf. If the rows of a CTA take more than 128 KiB, they come in two steps.
//
// How the threads of a token find its K best experts: topk_best.cuh.
//
// For later kernels the kernel also writes (sizes in bytes):
// - for the plan, the counts of each segment, 2 E for a segment;
// - for rounding, ranking keys, as many bytes as the logits (for a curve scores.cu writes them);
// - for rounding and losses, the mask, E / 8 for each token: one bit for each expert, set if top-K selected
//   it;
// - for rounding and losses, the largest logit and the denominator of the softmax over E, 8 for each token.
//
// Bytes: the logits once, 8 K written for each token, and what the list above says.
// FLOPs: T E exp polynomials for the denominator of the softmax over E where it is needed, and as many again
// for the ranking keys of rounding; T E sigmoids for SIGMOID; K exps or sigmoids and at most 2 K divisions
// for the weights of each token.
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "host/routing.h"
#include "routing/score_keys.cuh"
#include "routing/topk_best.cuh"
#include "tma/mbarrier.cuh"
#include "tma/tma.cuh"

namespace moe
{
namespace topk
{
namespace
{

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr bool IS_HOPPER = true;
#else
constexpr bool IS_HOPPER = false;
#endif

enum {
    THREADS = 512,
    FEWER_THREADS = 256, // with K > 8 on GPUs other than Hopper, where these kernels spill with 512
    LONG_ROW = 512,
    MOST_TOPK = 16,
    MOST_GROUPS = 16,
    ROWS_BYTES = 131072,
    LONGEST_ROW = 1024, // with rounding, longer rows have small segments: several CTAs on an SM
    LONGEST_ROWS_BYTES = 65536,
    MOST_STEPS = 2,
    MANY_CTAS = 128,
    MOST_BYTES = ROWS_BYTES + 81920
};

// The type of a row's numbers: logits, or selection scores.
template <typename L, bool CURVE> struct row_of {
    using type = L;
};
template <typename L> struct row_of<L, true> {
    using type = float;
};

// The mask in shared memory is [32 tokens][expert]. Its rows are padded, so that reading it by words hits all
// banks.
__host__ MOE_DEVICE int mask_pitch(int experts)
{
    return experts + 4;
}

// `COUNT` values for ranks first..first+COUNT-1 of a token's row.
template <typename V, int COUNT>
MOE_DEVICE void store_ranks(V *row, const V (&values)[COUNT], int first, int topk)
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
template <int COUNT> MOE_DEVICE void divide(float (&x)[COUNT], float sum)
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

// What the threads of one token write: each writes ids, weights and mask bits of P / SHARE ranks. logits: the
// token's row.
template <typename L, bool CURVE, int P, int SHARE>
MOE_DEVICE void finish_token(const moe_cuda_routing &r, const int (&ids)[P], const L *logits, int64_t token,
                             bool there, uint32_t *mask_words, uint32_t bit, token_scale *scale, int lane)
{
    constexpr int OWN = P / SHARE;
    const int topk = (int)r.layer.topk, part = lane % SHARE, first = part * OWN;
    const bool of_all = !CURVE && moe_score_over_all(r.layer.score);
    const float first_logit = logits_of<L>::value(logits[ids[0]]);
    moe_token_softmax softmax = {softmax_max(first_logit), 1.0f};
    if (CURVE && r.softmax) softmax.max = largest_of_row<L, SHARE>(logits, (int)r.layer.experts, part);
    if (of_all || r.softmax)
        softmax.sum = sum_of_row<L, SHARE>(logits, (int)r.layer.experts, part, lane, softmax.max);

    int own_ids[OWN];
    float weights[OWN], sum = 0.0f;
    int nan = 0;
#pragma unroll
    for (int k = 0; k < P; k++)
        if (k / OWN == part) own_ids[k % OWN] = ids[k];
    const bool divided = moe_weights_are_divided(&r.layer);
#pragma unroll
    for (int i = 0; i < OWN; i++) { // as moe_raw_weight does it, for several ranks
        const float logit = logits_of<L>::value(logits[min(own_ids[i], (int)r.layer.experts - 1)]);
        nan |= first + i < topk && moe_is_nan(logit);
        weights[i] = CURVE ? moe_score_value(r.layer.score, logit)
                           : moe_softmax_term(logit, of_all ? softmax.max : first_logit);
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

// S: the type of a row's numbers
template <typename S>
__host__ MOE_DEVICE layout layout_of(const moe_cuda_routing &r, int of_step, int steps, int warps)
{
    const int segment = of_step * steps;
    layout at;
    at.masks = (uint32_t)(of_step * (int)r.layer.experts * (int)sizeof(S));
    at.scales = at.masks + (uint32_t)(segment / 32 * mask_pitch((int)r.layer.experts) * 4);
    at.staging = at.scales + (r.keys ? (uint32_t)segment * (uint32_t)sizeof(token_scale) : 0);
    at.barriers = at.staging + (r.keys ? (uint32_t)(warps * STAGING_BYTES) : 0);
    at.end = at.barriers + 8 * (uint32_t)warps;
    return at;
}

// Writes what later kernels read of the segment's masks.
MOE_DEVICE void write_masks(const moe_cuda_routing &r, const uint32_t *masks, int words)
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

// Copies a warp's rows, in step `step` of its segment.
template <typename L>
MOE_DEVICE void load_rows(L *rows, const moe_cuda_routing &r, int64_t first, int tokens, uint32_t barrier,
                          int step, int lane)
{
    const uint32_t bytes = (uint32_t)(tokens * (int)r.layer.experts * (int)sizeof(L)),
                   to = shared_address(rows);
    const char *from = (const char *)((const L *)r.logits + first * r.layer.experts);
    if (HAS_BULK_COPIES) {
        if (lane == 0) {
            if (step) fence_async_proxy();
            barrier_expect(barrier, bytes);
            if (bytes) load_bytes(to, from, bytes, barrier);
        }
        barrier_wait(barrier, step & 1);
    } else {
        for (uint32_t at = lane * 16; at < bytes; at += 32 * 16) copy16_async(to + at, from + at, 16);
        commit_copies();
        wait_copies<0>();
        __syncwarp();
    }
}

// Selection scores of a vector of logits: the value of the curve, plus the bias of its experts (NULL: none).
template <typename L>
MOE_DEVICE void score_vector(float *scores, smoe_score score, uint4 logits, const float *bias)
{
    constexpr int SIZE = vector_of<L>::type::SIZE;
    const uint32_t words[4] = {logits.x, logits.y, logits.z, logits.w};
    float s[SIZE];
#pragma unroll
    for (int i = 0; i < SIZE; i++) {
        const uint32_t word = words[i * 4 / SIZE];
        const float logit = __uint_as_float(SIZE == 4 ? word : i % 2 ? word & 0xffff0000u : word << 16);
        s[i] = moe_score_value(score, logit);
    }
#pragma unroll
    for (int i = 0; i < SIZE; i += 4) {
        const float4 b = bias ? *(const float4 *)(bias + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        *(float4 *)(scores + i) = make_float4(moe_add(s[i], b.x), moe_add(s[i + 1], b.y),
                                              moe_add(s[i + 2], b.z), moe_add(s[i + 3], b.w));
    }
}

// The rows of a warp's tokens for a score with a curve. BATCH vectors are loaded together.
template <typename L>
MOE_DEVICE void score_rows(float *rows, const moe_cuda_routing &r, int64_t first, int tokens, int lane)
{
    constexpr int SIZE = vector_of<L>::type::SIZE, BATCH = 4;
    const int experts = (int)r.layer.experts, vectors = tokens * experts / SIZE;
    const uint4 *logits = (const uint4 *)((const L *)r.logits + first * experts);
#pragma unroll 1
    for (int begin = lane; begin < vectors; begin += 32 * BATCH) {
        uint4 words[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) words[i] = logits[min(begin + 32 * i, vectors - 1)];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int at = (begin + 32 * i) * SIZE;
            if (at < tokens * experts)
                score_vector<L>(rows + at, r.layer.score, words[i],
                                r.selection_bias ? r.selection_bias + at % experts : NULL);
        }
    }
}

// The sum of the two best selection scores of a group, as a ranking key. Each lane starts elsewhere in its
// group, so that lanes read different banks.
MOE_DEVICE uint32_t group_key(const float *scores, int size, int lane)
{
    uint32_t first = 0, second = 0;
    int at = lane % size;
    for (int i = 0; i < size; i++) {
        const uint32_t key = moe_rank_key(scores[at]);
        second = max(second, min(key, first));
        first = max(first, key);
        at = at + 1 == size ? 0 : at + 1;
    }
    return moe_rank_key(moe_add(moe_rank_value(first), moe_rank_value(second)));
}

// Sets the scores of a token's groups that are not kept to -inf. If a kept expert's score is -inf too and one
// of the two is chosen, best_experts cannot tell them apart, and the token is done again with exact keys. The
// result has a bit for each kept group. A thread of the token has every SHARE-th group.
template <int SHARE> MOE_DEVICE uint32_t keep_groups(float *row, const smoe_layer &layer, int lane)
{
    constexpr int OWN = MOST_GROUPS / SHARE;
    const int groups = layer.groups, size = (int)layer.experts / groups, part = lane % SHARE;
    uint32_t keys[OWN], kept = 0;
    int better[OWN] = {0};
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int g = i * SHARE + part;
        keys[i] = g < groups ? group_key(row + g * size, size, lane) : 0;
    }
#pragma unroll
    for (int h = 0; h < MOST_GROUPS; h++) {
        const uint32_t key = __shfl_sync(~0u, keys[h / SHARE], lane - part + h % SHARE);
#pragma unroll
        for (int i = 0; i < OWN; i++)
            better[i] += h < groups && (key > keys[i] || (key == keys[i] && h < i * SHARE + part));
    }
    __syncwarp(); // lanes without a token have read the last token's row before it changes
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int g = i * SHARE + part;
        if (g >= groups) continue;
        if (better[i] < layer.groups_kept)
            kept |= 1u << g;
        else
            for (int at = 0; at < size; at++) row[g * size + (at + lane) % size] = __uint_as_float(LOWEST);
    }
#pragma unroll
    for (int other = 1; other < SHARE; other *= 2) kept |= __shfl_xor_sync(~0u, kept, other);
    return kept;
}

// A segment is done in `steps` steps. In each step a warp's rows take the memory of those of the step before.
template <typename L, bool CURVE, int P, int SHARE>
__global__ void __launch_bounds__(P > 8 && !IS_HOPPER ? FEWER_THREADS : THREADS, P > 8 && !IS_HOPPER ? 1 : 0)
    fast(const __grid_constant__ moe_cuda_routing r, int most_steps)
{
    using S = typename row_of<L, CURVE>::type;
    constexpr int TOKENS = 32 / SHARE;                               // of a warp
    const int steps = sizeof(S) == 4 && SHARE == 4 ? most_steps : 1; // shorter rows need no loop
    extern __shared__ __align__(128) char memory[];
    const int experts = (int)r.layer.experts, topk = (int)r.layer.topk, pitch = mask_pitch(experts);
    const int of_step = blockDim.x / SHARE, segment = steps * of_step;
    const int warp = warp_number(), lane = threadIdx.x & 31;
    const layout at = layout_of<S>(r, of_step, steps, blockDim.x / 32);
    S *rows = (S *)memory + warp * TOKENS * experts;
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
        const int within = min(lane / SHARE, tokens - 1), in_segment = begin + within;
        const S *row = rows + within * experts;
        const L *logits;
        constexpr bool GROUPS = CURVE && SHARE == 4; // can the layer have groups?
        uint32_t kept = ~0u;                         // of them
        if constexpr (CURVE) {
            score_rows<L>(rows, r, first, tokens, lane);
            __syncwarp();
            if (GROUPS && r.layer.groups > 1) {
                kept = keep_groups<SHARE>(rows + within * experts, r.layer, lane);
                __syncwarp();
            }
            logits = (const L *)r.logits + (first + within) * experts;
        } else {
            load_rows<L>(rows, r, first, tokens, barrier, step, lane);
            logits = row;
        }
        int ids[P];
        const bool again = best_experts<S, P, SHARE>(ids, row, experts, topk, lane);
        const uint32_t redone = __ballot_sync(~0u, again && lane / SHARE < tokens);
        int kth = 0;
#pragma unroll
        for (int k = 0; k < P; k++)
            kth = k < topk ? ids[k] : kth; // not ids[topk - 1], which would put ids into local memory
        for (int token = 0; redone && token < TOKENS; token++) {
            if (!(redone >> (token * SHARE) & ((1u << SHARE) - 1u))) continue;
            const S *again_row = rows + token * experts;
            if constexpr (sizeof(S) == 4)
                if (equals_its_neighbours((const float *)again_row, experts,
                                          __shfl_sync(~0u, kth, token * SHARE), lane))
                    continue;
            redo<S, P, GROUPS>(ids, again_row, r.layer, GROUPS ? __shfl_sync(~0u, kept, token * SHARE) : kept,
                               lane / SHARE == token, lane);
        }
        finish_token<L, CURVE, P, SHARE>(r, ids, logits, first + within, lane / SHARE < tokens,
                                         masks + (in_segment >> 5) * pitch, 1u << (in_segment & 31),
                                         scales + in_segment, lane);
    }
    __syncthreads();
    write_masks(r, masks, segment / 32);
    if constexpr (!CURVE)
        if (r.keys) write_keys<L>(r, (const L *)memory, scales, memory + at.staging, segment);
    let_next_start();
}

int64_t row_bytes(const smoe_layer &layer)
{
    return layer.experts * (moe_score_has_curve(layer.score) ? 4 : moe_type_bytes(layer.logits_type));
}

int share_of(const smoe_layer &layer)
{
    return row_bytes(layer) >= LONG_ROW ? 4 : 2;
}

// The most bytes of rows in shared memory.
int64_t rows_bytes(const moe_device *device)
{
    return device->shared_bytes >= MOST_BYTES ? ROWS_BYTES : LONGEST_ROWS_BYTES;
}

// Tokens of a CTA. If there are few tokens, segments are smaller, so that more SMs have one. The keys for
// rounding need all rows of a segment in shared memory at the same time.
int segment_of(const moe_device *device, const smoe_layer &layer)
{
    const int64_t bytes = row_bytes(layer), rows = rows_bytes(device);
    const int64_t most = layer.rounding == SMOE_ROUNDING_NONE ? MOST_STEPS * rows
                         : bytes > LONGEST_ROW                ? LONGEST_ROWS_BYTES
                                                              : rows;
    const int threads = layer.topk > 8 && device->major != 9 ? FEWER_THREADS : THREADS;
    int segment = threads / share_of(layer);
    while (segment > 32 && (segment * bytes > most || layer.tokens < (int64_t)segment * MANY_CTAS))
        segment /= 2;
    return segment;
}

template <typename L, bool CURVE, int P, int SHARE>
cudaError_t launch(const moe_cuda_routing &r, const moe_launch *on)
{
    const int segment = segment_of(on->device, r.layer),
              steps = segment * row_bytes(r.layer) > rows_bytes(on->device) ? MOST_STEPS : 1;
    const int of_step = segment / steps, threads = SHARE * of_step;
    const int64_t tokens = r.mask ? r.panels * MOE_ROUTE_PANEL : r.layer.tokens; // the mask has no gaps
    const unsigned ctas = (unsigned)moe_divide_up(tokens, segment);
    const layout at = layout_of<typename row_of<L, CURVE>::type>(r, of_step, steps, threads / 32);
    return launch_early(fast<L, CURVE, P, SHARE>, dim3(ctas), dim3((unsigned)threads), at.end, on, r, steps);
}

template <typename L, bool CURVE, int P> cudaError_t launch(const moe_cuda_routing &r, const moe_launch *on)
{
    return share_of(r.layer) == 4 ? launch<L, CURVE, P, 4>(r, on) : launch<L, CURVE, P, 2>(r, on);
}

template <typename L, bool CURVE> cudaError_t launch(const moe_cuda_routing &r, const moe_launch *on)
{
    return r.layer.topk <= 4   ? launch<L, CURVE, 4>(r, on)
           : r.layer.topk <= 8 ? launch<L, CURVE, 8>(r, on)
                               : launch<L, CURVE, 16>(r, on);
}

template <typename L, int P> cudaError_t raise_limits(const moe_device *device)
{
    cudaError_t status = cudaSuccess;
    const auto raise = [&](auto *kernel) {
        if (status == cudaSuccess) status = allow_shared(device, kernel, MOST_BYTES);
    };
    raise(fast<L, false, P, 2>), raise(fast<L, false, P, 4>);
    raise(fast<L, true, P, 2>), raise(fast<L, true, P, 4>);
    return status;
}

} // namespace
} // namespace topk
} // namespace moe

extern "C" int32_t moe_cuda_topk_segment(const moe_device *device, const smoe_layer *layer)
{
    using namespace moe::topk;
    const bool fast = layer->experts % 8 == 0 && layer->experts <= MOST_EXPERTS && layer->topk <= MOST_TOPK;
    const bool grouped = layer->groups > 1, few_groups = layer->groups <= MOST_GROUPS;
    return fast && (!grouped || (few_groups && share_of(*layer) == 4)) ? segment_of(device, *layer) : 0;
}

extern "C" cudaError_t moe_cuda_topk(const moe_launch *on, const moe_cuda_routing *r)
{
    if (!moe_cuda_topk_segment(on->device, &r->layer)) return moe_cuda_topk_general(on, r);
    moe_cuda_routing routing = *r;
    if (!moe_cuda_topk_writes_keys(on->device, &r->layer)) routing.keys = NULL; // scores.cu writes them
    return moe::for_type(moe::logits_types(), r->layer.logits_type, [&](auto l) {
        using L = typename decltype(l)::type;
        return moe_score_has_curve(r->layer.score) ? moe::topk::launch<L, true>(routing, on)
                                                   : moe::topk::launch<L, false>(routing, on);
    });
}

extern "C" cudaError_t moe_cuda_topk_fast_init(const moe_device *device)
{
    using namespace moe::topk;
    return moe::for_every_type(moe::logits_types(), [&](auto l) {
        using L = typename decltype(l)::type;
        cudaError_t status = raise_limits<L, 4>(device);
        if (status == cudaSuccess) status = raise_limits<L, 8>(device);
        return status == cudaSuccess ? raise_limits<L, 16>(device) : status;
    });
}
