// dlogits[t] from dS of the token's rows through the score function, and from the losses. Shapes: dlogits
// (T, E); dS (padded rows), as one or more partial sums.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Names in the formulas:
// - c is route_scale, and w the weight of a pair before it is multiplied by c: s = c w.
// - g is dS of the pair's row. If rounding dropped the pair, g = 0.
// - A selected pair is one that top-K selected, also if rounding dropped it. An added pair is one that only
//   rounding routes. sum_sel is a sum over the selected pairs of the token.
// - A soft pair is a selected pair of SOFTMAX_TOPK without renormalize, or an added pair of a softmax score.
// - p is the softmax over E, sigma the sigmoid.
//
// dlogits[t][e] is the sum of two terms. The first term is there for all E experts if a loss has a
// coefficient or the token has a soft pair. j runs over all E experts:
//
//       p_e (v_e - sum_j v_j p_j + z), where
//       v_e = (c g_e if (t, e) is a soft pair, else 0) + balance * E count_e / C^2
//       z = 2 z_loss logsumexp / C
//       balance = balance_coefficient + loss_gradients[0],  z_loss = z_coefficient + loss_gradients[1]
//
// C is the number of tokens that token_mask counts. For all other tokens balance and z_loss are 0.
//
// The second term is there for the experts of selected and added pairs that are not soft:
//
//   selected pairs of SOFTMAX_TOPK with renormalize and of TOPK_SOFTMAX:
//       s_e (g_e - sum_sel g_j w_j)
//   selected pairs of SIGMOID without renormalize, added pairs of SIGMOID:
//       c g_e sigma_e (1 - sigma_e)
//   selected pairs of SIGMOID with renormalize:
//       c (g_e - sum_sel g_j w_j) sigma_e (1 - sigma_e) / sum_sel sigma_j
//
// count_e is the count under plain top-K. If a token has a row whose weight is NaN, all dlogits of this
// token are NaN. No other token changes.
//
// Two kernels:
// - sparse: for layers in which every token has K rows and dlogits are nonzero only for the experts of these
//   rows. 8, 16 or 32 lanes work on a token: the smallest of these numbers that is at least K, or 32 for
//   larger K. Each lane works on one pair, or on two if K > 32. The rows of a token ascend with the expert's
//   id. So the rank of an id among the token's ids tells which row the pair has.
// - general: for all other layers. One warp works on a token.
//
// Both build the dlogits of a CTA's tokens in shared memory. From there they write those of the following
// results that are wanted:
// - the matrix (T, E rounded up to a multiple of 8) in the storage type, for dWr = dlogits^T X and, if
//   dlogits is dense, for dX += dlogits Wr. The tensor cores need this type. In bf16 its rounding
//   error is 1.7e-3; the stored H has then left 2.5e-3 in dS already;
// - the caller's dlogits in logits_type;
// - sums over the CTA's tokens in f32, for dbr;
// - in the sparse kernel, the list of nonzeros (8 bytes each), for the combine of dX.
//
// In shared memory dlogits are f32. There is one exception: if neither the caller's dlogits nor dbr is
// wanted, the sparse kernel holds dlogits in the storage type. This saves accesses to shared memory and
// conversions, which bound the kernel's time.
//
// Bytes of the sparse kernel: 12 T K of rows, ids and weights read, 4 T K read for each partial sum of dS,
// 2 T E of the matrix and 8 T K of the list written. With SIGMOID it also reads 4 T K of logits (2 T K in
// bf16). The general kernel also reads all logits.
// FLOPs: the sparse kernel needs about 10 for each of the T K pairs. If the general kernel needs the softmax
// over E, it takes 2 T E exps and about 10 FLOPs for each of the T E logits; if not, it needs as many as the
// sparse kernel.
#include "common/backward_shared.cuh"
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "host/launch_backward.h"
#include "routing/logits.cuh"

namespace moe
{
namespace dlogits
{
namespace
{

enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    STAGING_BYTES = 40 << 10,     // of a CTA's rows
    MOST_EACH = MOE_MAX_TOPK / 32 // pairs a lane
};
static_assert(STAGING_BYTES >= MOE_MAX_EXPERTS * 4, "a token's row");
static_assert(STAGING_BYTES + WARPS * MOE_MAX_TOPK * 8 <= 48 << 10, "shared memory without asking for more");

// ---- From shared to global memory

MOE_DEVICE void write4(float *to, float4 v)
{
    *(float4 *)to = v;
}
template <typename T> MOE_DEVICE void write4(T *to, float4 v)
{
    using H = storage<T>;
    *(uint2 *)to = make_uint2(H::pack(v.x, v.y), H::pack(v.z, v.w));
}
MOE_DEVICE void write1(float *to, float v)
{
    *to = v;
}
MOE_DEVICE void write1(__nv_bfloat16 *to, float v)
{
    *to = __float2bfloat16_rn(v);
}
MOE_DEVICE void write1(__half *to, float v)
{
    *to = __float2half_rn(v);
}

// Writes the first `columns` elements of f32 rows of `stride` elements.
template <typename O>
MOE_DEVICE void write_as(O *to, const float *staging, int tokens, int stride, int columns)
{
    if (columns == stride)
#pragma unroll 1
        for (int i = threadIdx.x * 4; i < tokens * stride; i += blockDim.x * 4)
            write4(to + i, *(const float4 *)(staging + i));
    else
#pragma unroll 1
        for (int i = threadIdx.x; i < tokens * columns; i += blockDim.x)
            write1(to + i, staging[i / columns * stride + i % columns]);
}

static_assert(length_of(logits_types()) == 2, "write_rows and logit_at know f32 and bf16");

// Writes the CTA's rows: `tokens` tokens from `first` on, staging (tokens, stride).
template <typename T>
MOE_DEVICE void write_rows(const moe_cuda_dlogits &p, const float *staging, int first, int tokens)
{
    const int stride = p.stride, experts = (int)p.layer.experts;
    if (p.dense) write_as((T *)p.dense + (int64_t)first * stride, staging, tokens, stride, stride);
    const int64_t given = (int64_t)first * experts;
    if (p.dlogits && p.layer.logits_type == SMOE_TYPE_F32)
        write_as((float *)p.dlogits + given, staging, tokens, stride, experts);
    else if (p.dlogits)
        write_as((__nv_bfloat16 *)p.dlogits + given, staging, tokens, stride, experts);
    if (!p.bias_sums) return;
#pragma unroll 1
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        float sum = 0.0f;
        for (int t = 0; t < tokens; t++) sum += staging[t * stride + e];
        p.bias_sums[(int64_t)blockIdx.x * stride + e] = sum;
    }
}

// With staging in the storage type, only dense is written.
template <typename T>
MOE_DEVICE void write_rows(const moe_cuda_dlogits &p, const T *staging, int first, int tokens)
{
    char *to = (char *)p.dense + (int64_t)first * (p.stride * 2);
#pragma unroll 1
    for (int i = threadIdx.x * 16; i < tokens * p.stride * 2; i += THREADS * 16)
        store_global16(to + i, *(const uint4 *)((const char *)staging + i));
}

// ---- Scores

// The value of a curve of scores.h, and its slope.
struct curve_at {
    float value, slope;
};

// sigma and sigma (1 - sigma), computed without overflow or cancellation.
MOE_DEVICE curve_at at_sigmoid(float logit)
{
    const float e = __expf(-fabsf(logit)), divisor = 1.0f / (1.0f + e);
    return {(logit < 0.0f ? e : 1.0f) * divisor, e * divisor * divisor};
}

#define MOE_AT_softmax break
#define MOE_AT_sigmoid return at_sigmoid(logit)

MOE_DEVICE curve_at at_curve(smoe_score score, float logit)
{
    switch (score) {
#define MOE_CASE(enumerator, name, key, value, over, selection)                                              \
    case enumerator: MOE_AT_##value;
        MOE_SCORES(MOE_CASE)
#undef MOE_CASE
    }
    return at_sigmoid(logit);
}

// w of a pair from s = c w. Exact where c is 1.
MOE_DEVICE float unscaled(float weight, float scale)
{
    return scale == 1.0f ? weight : weight / scale;
}

MOE_DEVICE float softmax_term(float logit, float max)
{
    return logit == max ? 1.0f : logit < max ? __expf(logit - max) : 0.0f; // 0 for NaN
}

// ---- The kernel of sparse dlogits

// The ids of a token's pairs as 16 bits, by k; NO_ID from K on. Rank of an id: how many ids are below it.
constexpr int NO_ID = 0x7fff;
static_assert(MOE_MAX_EXPERTS <= NO_ID, "a bit free for the comparisons, two at a time");

// Bits 15 and 31: set if that half of `ids` is at most `id`.
MOE_DEVICE uint32_t at_most(uint32_t ids, uint32_t id)
{
    return (id * 0x10001u + 0x80008000u - ids) & 0x80008000u;
}

template <int PLACES> MOE_DEVICE uint32_t rank_of(const uint4 *ids, int id)
{
    uint32_t below = ~0u; // -1: the id itself is counted too
#pragma unroll
    for (int i = 0; i < PLACES / 8; i++) {
        const uint4 v = ids[i];
        below +=
            __popc(at_most(v.x, id) | at_most(v.y, id) >> 1 | at_most(v.z, id) >> 2 | at_most(v.w, id) >> 3);
    }
    return below;
}

MOE_DEVICE float logit_at(const moe_cuda_dlogits &p, int64_t i)
{
    return p.layer.logits_type == SMOE_TYPE_F32
               ? ((const float *)p.logits)[i]
               : logits_of<__nv_bfloat16>::value(((const __nv_bfloat16 *)p.logits)[i]);
}

// PLACES: 8, 16, 32 or 64, the least that is at least K. tokens: of a CTA. S: element type of the rows in
// shared memory; T where only dense is written. A lane loads dS of the row at its own position in token_rows,
// not of its pair's row, so this load need not wait for the ids.
template <typename T, typename S, int PLACES>
__global__ void __launch_bounds__(THREADS, (PLACES > 32 ? 1024 : (int)SM_THREADS) / THREADS)
    sparse(const __grid_constant__ moe_cuda_dlogits p, const int tokens)
{
    constexpr int LANES = PLACES < 32 ? PLACES : 32, EACH = PLACES / LANES;
    extern __shared__ __align__(16) float memory[];
    __shared__ uint4 lists[THREADS / LANES][PLACES / 8];
    S *const staging = (S *)memory; // (tokens, stride)
    const int local = threadIdx.x / LANES, lane = threadIdx.x % LANES,
              leader = threadIdx.x & 31 & ~(LANES - 1);
    const int first = blockIdx.x * tokens, topk = (int)p.layer.topk, experts = (int)p.layer.experts;
    const uint32_t token = first + local, pair = token * topk; // the token's first
    const int count = min(tokens, (int)p.layer.tokens - first), pairs = local < count ? topk : 0;
    const bool curve = moe_score_has_curve(p.layer.score), divided = moe_weights_are_divided(&p.layer);
    wait_for_previous();

    int id[EACH];
    uint32_t row[EACH], rank[EACH];
    float weight[EACH], of_rank[EACH]; // w, dS
#pragma unroll
    for (int m = 0; m < EACH; m++) {
        const int k = lane + LANES * m;
        row[m] = k < pairs ? (uint32_t)p.token_rows[pair + k] : 0;
        id[m] = k < pairs ? p.topk_ids[pair + k] : NO_ID;
        weight[m] = k < pairs ? p.topk_weights[pair + k] : 0.0f;
    }
#pragma unroll 1
    for (int i = threadIdx.x * 16; i < tokens * p.stride * (int)sizeof(S); i += THREADS * 16)
        *(uint4 *)((char *)staging + i) = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int m = 0; m < EACH; m++) {
        const int k = lane + LANES * m;
        of_rank[m] = k < pairs ? sum_of_parts(p.ds, p.ds_parts, p.padded_rows, row[m]) : 0.0f;
        ((uint16_t *)lists[local])[k] = (uint16_t)id[m];
    }
    __syncthreads(); // the zeros and the lists are complete
    float inner = 0.0f, divisor = 0.0f, gradient[EACH], slope[EACH];
#pragma unroll
    for (int m = 0; m < EACH; m++) {
        rank[m] = rank_of<PLACES>(lists[local], id[m]);
        gradient[m] = __shfl_sync(~0u, of_rank[0], leader + rank[m] % LANES);
        if (EACH > 1) {
            const float upper = __shfl_sync(~0u, of_rank[EACH - 1], leader + rank[m] % LANES);
            if (rank[m] >= LANES) gradient[m] = upper;
        }
        weight[m] = unscaled(weight[m], p.layer.route_scale);
        slope[m] = 0.0f;
        if (curve && lane + LANES * m < pairs) {
            const curve_at f = at_curve(p.layer.score, logit_at(p, (int64_t)token * experts + id[m]));
            divisor += f.value;
            slope[m] = f.slope;
        }
        inner += gradient[m] * weight[m];
    }
    inner = divided ? sum_of_lanes(inner, LANES) : 0.0f;
    divisor = curve && divided ? sum_of_lanes(divisor, LANES) : 1.0f;
    const bool nan = __ballot_sync(~0u, moe_is_nan(weight[0])) >> leader & 1;
#pragma unroll
    for (int m = 0; m < EACH; m++) {
        if (lane + LANES * m >= pairs) continue;
        const float factor = !curve ? weight[m] : divisor == 0.0f ? 0.0f : slope[m] / divisor;
        float value = p.layer.route_scale * ((gradient[m] - inner) * factor);
        if (nan) value = __uint_as_float(0x7fc00000u);
        write1(staging + local * p.stride + id[m], value);
        if (p.terms) *(int2 *)(p.terms + (pair + rank[m])) = make_int2(id[m], (int)__float_as_uint(value));
    }
    if (nan && pairs)
#pragma unroll 1
        for (int e = lane; e < experts; e += LANES)
            write1(staging + local * p.stride + e, __uint_as_float(0x7fc00000u));
    __syncthreads();
    write_rows<T>(p, staging, first, count);
    let_next_start();
}

// ---- The kernel of any dlogits: one warp for each token

struct token_work {
    int id[MOE_MAX_TOPK];
    float kept[MOE_MAX_TOPK]; // c dS by k, 0 for dropped pairs
};

struct row_counts {
    bool kept, added;
};

// Puts c dS of the token's rows into w.kept (kept pairs) and row[e] (added pairs). For SIGMOID row[e] gets
// the added pair's dlogit.
template <typename L>
MOE_DEVICE row_counts gather_rows(const moe_cuda_dlogits &p, const L *logits, int64_t token, float *row,
                                  token_work &w, int lane)
{
    const int topk = (int)p.layer.topk, end = __ldg(p.token_offsets + token + 1);
    uint32_t kept = 0, added = 0;
    for (int i = __ldg(p.token_offsets + token) + lane; i < end; i += 32) {
        const int at = __ldg(p.token_rows + i), expert = __ldg(p.block_expert + at / MOE_BLOCK_ROWS);
        float g = p.layer.route_scale * sum_of_parts(p.ds, p.ds_parts, p.padded_rows, at);
        int k = 0;
        while (k < topk && w.id[k] != expert) k++;
        if (k < topk) {
            w.kept[k] = g;
            kept = 1;
        } else {
            if (moe_score_has_curve(p.layer.score))
                g *= at_curve(p.layer.score, logits_of<L>::value(logits[expert])).slope;
            row[expert] = g;
            added = 1;
        }
    }
    kept = __reduce_add_sync(~0u, kept);
    added = __reduce_add_sync(~0u, added);
    return {kept > 0, added > 0};
}

// The coefficients of the two losses for a token.
struct loss_coefficients {
    float balance, z;
    MOE_DEVICE loss_coefficients(const moe_cuda_dlogits &p, int64_t token) : balance(0.0f), z(0.0f)
    {
        if (p.token_mask && !__ldg(p.token_mask + token)) return;
        balance = p.balance;
        z = p.z;
        if (!p.loss_gradients) return;
        balance += p.loss_gradients[0];
        z += p.loss_gradients[1];
    }
};

MOE_DEVICE float balance_of(const moe_cuda_dlogits &p, float balance, int expert)
{
    return balance == 0.0f ? 0.0f : balance * (float)__ldg(p.topk_counts + expert);
}

// C: each counted token has K pairs in topk_counts. Called by whole warps.
MOE_DEVICE float count_of_tokens(const moe_cuda_dlogits &p, int lane)
{
    if (!p.token_mask) return (float)p.layer.tokens;
    uint32_t pairs = 0;
    for (int e = lane; e < (int)p.layer.experts; e += 32) pairs += (uint32_t)__ldg(p.topk_counts + e);
    return (float)(__reduce_add_sync(~0u, pairs) / (uint32_t)p.layer.topk);
}

// row[e] = p_e (v_e - sum v p + z), v from row[e] and the losses. For SIGMOID v is from the
// losses alone, and the result is added to row[e].
template <typename L>
MOE_DEVICE void through_softmax(const moe_cuda_dlogits &p, const loss_coefficients &losses, const L *logits,
                                float *row, int lane)
{
    const int experts = (int)p.layer.experts;
    const bool curve = moe_score_has_curve(p.layer.score);
    const bool counted = losses.balance != 0.0f || losses.z != 0.0f;
    const float tokens = counted ? count_of_tokens(p, lane) : 1.0f;
    const float balance = losses.balance * (float)experts / tokens / tokens;
    float max = __uint_as_float(0xff800000u), sum = 0.0f, inner = 0.0f;
    for (int e = lane; e < experts; e += 32) {
        const float logit = logits_of<L>::value(logits[e]);
        max = logit > max ? logit : max;
    }
#pragma unroll
    for (int step = 16; step; step /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
    for (int e = lane; e < experts; e += 32) {
        const float term = softmax_term(logits_of<L>::value(logits[e]), max);
        const float v = (curve ? 0.0f : row[e]) + balance_of(p, balance, e);
        sum += term;
        inner += term * v;
    }
    sum = sum_of_lanes(sum);
    const float reciprocal = 1.0f / sum;
    inner = sum_of_lanes(inner) * reciprocal;
    const float z = losses.z == 0.0f ? 0.0f : 2.0f * losses.z * (max + logf(sum)) / tokens;
    for (int e = lane; e < experts; e += 32) {
        const float term = softmax_term(logits_of<L>::value(logits[e]), max);
        const float v = (curve ? 0.0f : row[e]) + balance_of(p, balance, e);
        row[e] = (curve ? row[e] : 0.0f) + term * reciprocal * (v - inner + z);
    }
}

// Adds the gradient through the weights of the kept pairs, where these are not p itself. weight: w by k.
template <typename L>
MOE_DEVICE void through_kept(const moe_cuda_dlogits &p, const L *logits, const float (&weight)[MOST_EACH],
                             float *row, const token_work &w, int lane)
{
    const bool curve = moe_score_has_curve(p.layer.score), divided = moe_weights_are_divided(&p.layer);
    float inner = 0.0f, divisor = 0.0f, slope[MOST_EACH];
#pragma unroll
    for (int m = 0; m < MOST_EACH; m++) {
        const int k = lane + 32 * m;
        slope[m] = 0.0f;
        if (k >= p.layer.topk) continue;
        inner += w.kept[k] * weight[m];
        if (!curve) continue;
        const curve_at f = at_curve(p.layer.score, logits_of<L>::value(logits[w.id[k]]));
        divisor += f.value;
        slope[m] = f.slope;
    }
    inner = divided ? sum_of_lanes(inner) : 0.0f;
    divisor = curve && divided ? sum_of_lanes(divisor) : 1.0f;
#pragma unroll
    for (int m = 0; m < MOST_EACH; m++) {
        const int k = lane + 32 * m;
        if (k >= p.layer.topk) continue;
        const float factor = !curve ? weight[m] : divisor == 0.0f ? 0.0f : slope[m] / divisor;
        row[w.id[k]] += (w.kept[k] - inner) * factor;
    }
}

template <typename L>
MOE_DEVICE void token_dlogits(const moe_cuda_dlogits &p, int64_t token, float *row, token_work &w, int lane)
{
    const int topk = (int)p.layer.topk, experts = (int)p.layer.experts;
    const L *logits = (const L *)p.logits + token * experts;
    const bool plain = moe_weights_are_p(&p.layer);
    float weight[MOST_EACH];
#pragma unroll
    for (int m = 0; m < MOST_EACH; m++) {
        const int k = lane + 32 * m;
        weight[m] = 0.0f;
        if (k >= topk) continue;
        w.id[k] = __ldg(p.topk_ids + token * topk + k);
        w.kept[k] = 0.0f;
        weight[m] = unscaled(__ldg(p.topk_weights + token * topk + k), p.layer.route_scale);
    }
    for (int e = lane; e < p.stride; e += 32) row[e] = 0.0f;
    __syncwarp();
    const row_counts rows = gather_rows(p, logits, token, row, w, lane);
    __syncwarp();
    if (plain)
        for (int k = lane; k < topk; k += 32) row[w.id[k]] = w.kept[k];
    __syncwarp();
    const loss_coefficients losses(p, token);
    if (losses.balance != 0.0f || losses.z != 0.0f || (rows.added && !moe_score_has_curve(p.layer.score)) ||
        (rows.kept && plain))
        through_softmax(p, losses, logits, row, lane);
    __syncwarp();
    if (!rows.kept) return;
    if (!plain) through_kept(p, logits, weight, row, w, lane);
    __syncwarp();
    if (moe_is_nan(__shfl_sync(~0u, weight[0], 0)))
#pragma unroll 1
        for (int e = lane; e < experts; e += 32) row[e] = __uint_as_float(0x7fc00000u);
}

template <typename L, typename T>
__global__ void __launch_bounds__(THREADS) general(const __grid_constant__ moe_cuda_dlogits p)
{
    extern __shared__ __align__(16) float memory[];
    __shared__ token_work work[WARPS];
    float *const staging = memory; // (tokens, stride)
    const int warp = warp_number(), tokens = (int)blockDim.x / 32;
    const int first = blockIdx.x * tokens, count = min(tokens, (int)p.layer.tokens - first);
    if (warp < count)
        token_dlogits<L>(p, first + warp, staging + warp * p.stride, work[warp], threadIdx.x & 31);
    __syncthreads();
    write_rows<T>(p, staging, first, count);
}

// ---- dbr: adds the sums of the CTAs in a fixed order. A CTA has 32 experts and 32 threads for each.

template <typename G>
__global__ void __launch_bounds__(1024)
    add_bias_sums(const __grid_constant__ moe_cuda_dlogits p, int64_t ctas)
{
    __shared__ float sums[32][33];
    const int lane = threadIdx.x & 31, part = threadIdx.x >> 5, expert = blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (expert < p.layer.experts)
#pragma unroll 8
        for (int64_t i = part; i < ctas; i += 32) sum += p.bias_sums[i * p.stride + expert];
    sums[part][lane] = sum;
    __syncthreads();
    sum = sum_of_lanes(sums[lane][part]);
    const int column = blockIdx.x * 32 + part;
    if (lane == 0 && column < p.layer.experts) give((G *)p.bias_gradient + column, sum, p.layer.accumulate);
}

// ---- Launches

// Tokens of a CTA, whose rows fit into shared memory: a power of two.
int tokens_that_fit(int stride, int most)
{
    int tokens = most;
    while (tokens * stride * 4 > STAGING_BYTES) tokens /= 2;
    return tokens;
}

// Each sets *ctas to the number of CTAs that it launched; their sums for dbr are added up afterwards.

template <typename L, typename T>
cudaError_t launch_general(const moe_cuda_dlogits &p, const moe_launch *on, int64_t *ctas)
{
    const int tokens = tokens_that_fit(p.stride, WARPS);
    *ctas = moe_divide_up(p.layer.tokens, tokens);
    return enqueue(general<L, T>, (unsigned)*ctas, 32 * tokens, tokens * p.stride * 4, on->stream, p);
}

template <typename T, typename S, int PLACES>
cudaError_t launch_places(const moe_cuda_dlogits &p, const moe_launch *on, int64_t *ctas)
{
    const int tokens = tokens_that_fit(p.stride, THREADS / (PLACES < 32 ? PLACES : 32));
    *ctas = moe_divide_up(p.layer.tokens, tokens);
    return launch_early(sparse<T, S, PLACES>, dim3((unsigned)*ctas), dim3(THREADS),
                        (size_t)(tokens * p.stride) * sizeof(S), on, p, tokens);
}

template <typename T, typename S>
cudaError_t launch_sparse(const moe_cuda_dlogits &p, const moe_launch *on, int64_t *ctas)
{
    return p.layer.topk <= 8    ? launch_places<T, S, 8>(p, on, ctas)
           : p.layer.topk <= 16 ? launch_places<T, S, 16>(p, on, ctas)
           : p.layer.topk <= 32 ? launch_places<T, S, 32>(p, on, ctas)
                                : launch_places<T, S, MOE_MAX_TOPK>(p, on, ctas);
}

template <typename L, typename T>
cudaError_t launch(const moe_cuda_dlogits &p, const moe_launch *on, int64_t *ctas)
{
    const int losses = p.balance != 0.0f || p.z != 0.0f || p.loss_gradients;
    if (!moe_dlogits_are_sparse(&p.layer, losses)) return launch_general<L, T>(p, on, ctas);
    return p.dense && !p.dlogits && !p.bias_sums ? launch_sparse<T, T>(p, on, ctas)
                                                 : launch_sparse<T, float>(p, on, ctas);
}

template <typename G> cudaError_t launch_bias(const moe_cuda_dlogits &p, int64_t ctas, const moe_launch *on)
{
    return enqueue(add_bias_sums<G>, (unsigned)moe_divide_up(p.layer.experts, 32), 1024, 0, on->stream, p,
                   ctas);
}

} // namespace
} // namespace dlogits
} // namespace moe

extern "C" int64_t moe_cuda_dlogits_ctas(const smoe_layer *layer)
{
    using namespace moe::dlogits;
    const int stride = (int)moe_divide_up(layer->experts, 8) * 8;
    return moe_divide_up(layer->tokens, tokens_that_fit(stride, WARPS));
}

extern "C" cudaError_t moe_cuda_dlogits_launch(const moe_launch *on, const moe_cuda_dlogits *p)
{
    using namespace moe::dlogits;
    const smoe_layer &layer = p->layer;
    return moe::for_type(moe::storage_types(), layer.dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        int64_t ctas = 0;
        const cudaError_t status = moe::for_type(moe::logits_types(), layer.logits_type, [&](auto l) {
            return launch<typename decltype(l)::type, T>(*p, on, &ctas);
        });
        if (status != cudaSuccess || !p->bias_sums) return status;
        return moe::for_type(moe::gradient_types<T>(), layer.gradient_type,
                             [&](auto g) { return launch_bias<typename decltype(g)::type>(*p, ctas, on); });
    });
}
