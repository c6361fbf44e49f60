// The plan from top-K ids and weights, (T, K) each. No atomics on global memory are needed, and the host
// reads no count.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Tile: one CTA for each segment, a run of consecutive tokens. In shared memory the CTA has one bit for each
// token and expert of its segment. Counting these bits gives every pair its place, so the T K pairs need no
// general sort. The kernels:
// - count: each CTA writes the counts of its segment, one row of the count matrix (segments, E). The kernel
//   is not launched in two cases: if the top-K kernel has written the matrix, and if there is only one
//   segment, because scatter then takes the counts from its own bits.
// - columns: a column of the count matrix has the counts of one expert. For each column the kernel computes
//   the sum of all its counts and, for each segment, the sum of its counts in the segments before. It is
//   launched only if the matrix is large.
// - scatter: a CTA needs two numbers for every expert: the expert's count over all segments, and the
//   expert's count over the segments before the CTA's own. The CTA reads both from the results of `columns`
//   or, if `columns` was not launched, sums the matrix itself. The first numbers give every expert's first
//   row; the second say where in the expert's rows the CTA's own pairs go. The CTA sorts its
//   pairs by expert in shared memory and writes them to global memory in runs of rows, because scattered
//   stores of 4 bytes would take most of the time.
//
// The padded index of a pair's row follows from counts of bits alone. So the result does not depend on the
// order in which threads run.
//
// A segment's time goes into instructions and round trips to L2 (docs/log/2026-11-21.md, "The small kernels
// again"). So:
// - A thread works on up to four pairs of one token at a time. It finds their token with one division, and
//   loads their ids and weights with the widest loads that K allows.
// - Counts, offsets, pad rows and work lists exist once for the whole plan. All CTAs write them together,
//   each for some experts.
// - A CTA requests all its ids and weights at its start.
//
// Bytes: the ids once for count and once for scatter, the weights once, 12 written for each pair, and the
// count matrix or its sums once for each CTA. No FLOPs.
#include "common/launch.cuh"
#include "routing/plan_shared.cuh"

namespace moe
{
namespace plan
{
namespace
{

// Work space: counts uint16 [segments][padded experts]; where CTAs do not sum them also the sums before a
// segment, uint32 of the same shape, and each expert's total, uint32.
struct work_space {
    uint16_t *counts;
    uint32_t *before, *totals; // or NULL
};

struct problem {
    moe_cuda_plan p;
    work_space work;
    moe_plan_shared shared;
    int32_t segments, padded_experts, quads; // of a token
    uint32_t quads_reciprocal, columns_reciprocal;
};

// Four neighbouring pairs of a token of the segment.
struct quad {
    int token, k; // k of the first
};

MOE_DEVICE quad quad_at(const problem &q, int i)
{
    const int token = (int)moe_divide(i, q.quads_reciprocal);
    return {token, 4 * (i - token * q.quads)};
}

MOE_DEVICE int tokens_of_segment(const problem &q)
{
    return min(q.p.segment, q.p.tokens - (int)blockIdx.x * q.p.segment);
}

// The pair's place in ids and weights.
MOE_DEVICE int64_t pair_at(const problem &q, int token, int k)
{
    return ((int64_t)blockIdx.x * q.p.segment + token) * q.p.topk + k;
}

// Four neighbouring values of a row of K, the first `left` of which exist, by the widest loads that are
// aligned.
MOE_DEVICE uint4 load_four(const uint32_t *from, int topk, int left)
{
    if (topk % 4 == 0) return __ldcg((const uint4 *)from);
    if (topk % 2 == 0) {
        const uint2 low = __ldcg((const uint2 *)from), none = {0, 0};
        const uint2 high = left > 2 ? __ldcg((const uint2 *)from + 1) : none;
        return {low.x, low.y, high.x, high.y};
    }
    return {__ldcg(from), left > 1 ? __ldcg(from + 1) : 0, left > 2 ? __ldcg(from + 2) : 0,
            left > 3 ? __ldcg(from + 3) : 0};
}

// Ids of 64 bits. An id that does not fit 32 bits is no expert's.
MOE_DEVICE uint4 load_four_wide(const long long *from, int left)
{
    uint32_t id[4] = {0, 0, 0, 0};
#pragma unroll
    for (int u = 0; u < 4; u++) {
        const long long wide = u < left ? __ldcg(from + u) : 0;
        id[u] = wide == (long long)(uint32_t)wide ? (uint32_t)wide : ~0u;
    }
    return {id[0], id[1], id[2], id[3]};
}

// The thread's quads of ids, as the caller gave them.
MOE_DEVICE void load_ids(const problem &q, uint4 (&ids)[MOE_PLAN_EACH], int quads)
{
#pragma unroll
    for (int j = 0; j < MOE_PLAN_EACH; j++) {
        const int i = threadIdx.x + j * THREADS;
        if (i >= quads) continue;
        const quad t = quad_at(q, i);
        const int64_t pair = pair_at(q, t.token, t.k);
        ids[j] = q.p.wide_index ? load_four_wide((const long long *)q.p.ids + pair, q.p.topk - t.k)
                                : load_four((const uint32_t *)q.p.ids + pair, q.p.topk, q.p.topk - t.k);
    }
}

// Writes them to shared memory as 16 bits.
MOE_DEVICE void store_ids(const problem &q, uint2 *to, const uint4 (&ids)[MOE_PLAN_EACH], int quads)
{
#pragma unroll
    for (int j = 0; j < MOE_PLAN_EACH; j++) {
        const int i = threadIdx.x + j * THREADS;
        if (i >= quads) continue;
        const int left = q.p.topk - quad_at(q, i).k;
        uint32_t id[4] = {ids[j].x, ids[j].y, ids[j].z, ids[j].w};
#pragma unroll
        for (int u = 0; u < 4; u++) {
            const bool real = id[u] < (uint32_t)q.p.experts && u < left;
            id[u] = real ? id[u] : MOE_PLAN_NO_ID;
        }
        to[i] = {id[0] | id[1] << 16, id[2] | id[3] << 16};
    }
}

MOE_DEVICE void load_weights(const problem &q, uint4 (&weights)[MOE_PLAN_EACH], int quads)
{
#pragma unroll
    for (int j = 0; j < MOE_PLAN_EACH; j++) {
        const int i = threadIdx.x + j * THREADS;
        if (i >= quads) continue;
        const quad t = quad_at(q, i);
        weights[j] =
            load_four((const uint32_t *)q.p.weights + pair_at(q, t.token, t.k), q.p.topk, q.p.topk - t.k);
    }
}

MOE_DEVICE uint32_t id_of(uint2 ids, int u)
{
    const uint32_t two = u < 2 ? ids.x : ids.y;
    return u % 2 ? two >> 16 : two & 0xffffu;
}

// Sets the pairs' bits.
MOE_DEVICE void mark(const problem &q, uint32_t *masks, const uint2 *ids, int quads)
{
#pragma unroll 1
    for (int i = threadIdx.x; i < quads; i += THREADS) {
        const int token = quad_at(q, i).token;
        const uint32_t bit = 1u << (token & 31);
        uint32_t *row = masks + (token >> 5) * q.padded_experts;
        const uint2 v = ids[i];
#pragma unroll
        for (int u = 0; u < 4; u++) { // without branches, so that no atomicOr waits for the one before
            const bool real = id_of(v, u) != MOE_PLAN_NO_ID;
            atomicOr(row + (real ? id_of(v, u) : 0), real ? bit : 0);
        }
    }
}

MOE_DEVICE void clear(uint32_t *words, int count)
{
    const uint4 zeros = {0, 0, 0, 0};
#pragma unroll 1
    for (int i = threadIdx.x; i < count / 4; i += THREADS) ((uint4 *)words)[i] = zeros;
}

// ---- count

__global__ void __launch_bounds__(THREADS) count(const __grid_constant__ problem q)
{
    extern __shared__ __align__(16) char memory[];
    uint32_t *masks = (uint32_t *)(memory + q.shared.masks);
    uint2 *ids = (uint2 *)(memory + q.shared.ids);
    const int experts = q.padded_experts, groups = q.p.segment / 32, quads = tokens_of_segment(q) * q.quads;
    clear(masks, groups * experts);
    wait_for_previous();
    uint4 loaded[MOE_PLAN_EACH];
    load_ids(q, loaded, quads);
    store_ids(q, ids, loaded, quads);
    __syncthreads();
    mark(q, masks, ids, quads);
    __syncthreads();
#pragma unroll 1
    for (int e = threadIdx.x; e < experts; e += THREADS) {
        uint32_t sum = 0;
#pragma unroll 4
        for (int g = 0; g < groups; g++) sum += __popc(masks[g * experts + e]);
        q.work.counts[(int64_t)blockIdx.x * experts + e] = (uint16_t)sum;
    }
    let_next_start();
}

// ---- columns, for a large matrix: a CTA sums the columns of 32 experts; each warp takes a part of the
// segments

__global__ void __launch_bounds__(1024) columns(const __grid_constant__ problem q)
{
    __shared__ uint32_t part[32][33];
    const int lane = threadIdx.x, warp = threadIdx.y, expert = blockIdx.x * 32 + lane;
    const bool real = expert < q.padded_experts;
    const int begin = moe_cut(q.segments, 32, warp), end = moe_cut(q.segments, 32, warp + 1);
    wait_for_previous();
    uint32_t sum = 0;
#pragma unroll 8
    for (int c = begin; c < end; c++)
        sum += real ? __ldcg(q.work.counts + (int64_t)c * q.padded_experts + expert) : 0;
    part[warp][lane] = sum;
    __syncthreads();
    uint32_t before = 0, total = 0;
    for (int w = 0; w < 32; w++) {
        before += w < warp ? part[w][lane] : 0;
        total += part[w][lane];
    }
    if (real) {
        if (warp == 0) q.work.totals[expert] = total;
#pragma unroll 8
        for (int c = begin; c < end; c++) {
            const int64_t at = (int64_t)c * q.padded_experts + expert;
            q.work.before[at] = before;
            before += __ldcg(q.work.counts + at);
        }
    }
    let_next_start();
}

// ---- scatter

struct scatter_memory {
    uint32_t *masks, *summed, *rows, *before;
    int2 *place;
    uint32_t *local, *token_first;
    uint2 *sorted;
    int32_t *token_rows;
    uint2 *ids;
    uint16_t *group_before;
    uint32_t *pairs_before, *blocks, *pairs; // of all segments before; of all experts; of the segment
    uint32_t *scratch;
};

MOE_DEVICE scatter_memory memory_at(char *at, const moe_plan_shared &s)
{
    return {(uint32_t *)(at + s.masks),
            (uint32_t *)(at + s.summed),
            (uint32_t *)(at + s.rows),
            (uint32_t *)(at + s.before),
            (int2 *)(at + s.place),
            (uint32_t *)(at + s.local),
            (uint32_t *)(at + s.token_first),
            (uint2 *)(at + s.sorted),
            (int32_t *)(at + s.token_rows),
            (uint2 *)(at + s.ids),
            (uint16_t *)(at + s.group_before),
            (uint32_t *)(at + s.totals),
            (uint32_t *)(at + s.totals) + 1,
            (uint32_t *)(at + s.totals) + 2,
            (uint32_t *)(at + s.scratch)};
}

// For each group of 32 tokens the number of pairs in the groups before, and the segment's counts.
MOE_DEVICE void rank_groups(const problem &q, const scatter_memory &m, int warp, int lane)
{
    const int experts = q.padded_experts, groups = q.p.segment / 32;
#pragma unroll 1
    for (int first = warp * 32; first < experts; first += THREADS) {
        const int e = first + lane;
        uint32_t sum = 0;
        if (e < experts) {
#pragma unroll 4
            for (int g = 0; g < groups; g++) {
                m.group_before[g * experts + e] = (uint16_t)sum;
                sum += __popc(m.masks[g * experts + e]);
            }
            m.local[e] = sum;
        }
        const uint32_t pairs = __reduce_add_sync(~0u, sum);
        if (lane == 0) atomicAdd(m.pairs, pairs);
    }
}

// If a token has several pairs with one expert, the lowest k counts; the others are marked.
MOE_DEVICE void mark_repeated(const problem &q, const scatter_memory &m, int quads)
{
    uint16_t *ids = (uint16_t *)m.ids;
#pragma unroll 1
    for (int i = threadIdx.x; i < quads * 4; i += THREADS) {
        const int first = quad_at(q, i / 4).token * q.quads * 4;
        const uint16_t id = ids[i];
        bool again = false;
#pragma unroll 1
        for (int j = first; j < i; j++) again |= (ids[j] & ~MOE_PLAN_REPEATED) == id;
        if (again && id != MOE_PLAN_NO_ID) ids[i] = id | MOE_PLAN_REPEATED;
    }
    __syncthreads();
}

// For four ids: how many of the token's pairs have a lower expert.
MOE_DEVICE void count_lower(const problem &q, const scatter_memory &m, int token, const uint32_t (&id)[4],
                            uint32_t (&lower)[4])
{
    const uint2 *ids = m.ids + token * q.quads;
    uint32_t both[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int j = 0; j < q.quads; j++) {
        const uint2 v = ids[j];
#pragma unroll
        for (int u = 0; u < 4; u++) both[u] += moe_plan_lower(id[u], v.x) + moe_plan_lower(id[u], v.y);
    }
#pragma unroll
    for (int u = 0; u < 4; u++) lower[u] = moe_plan_both(both[u]);
}

// For each token the number of pairs of the tokens before it. Every token has K pairs, unless the segment is
// irregular (skipped or repeated ids).
MOE_DEVICE void place_tokens(const problem &q, const scatter_memory &m, int tokens, bool irregular)
{
    const int token = threadIdx.x;
    uint32_t first = (uint32_t)(token * q.p.topk);
    if (irregular) {
        const uint32_t id[4] = {MOE_PLAN_REPEATED, 0, 0, 0};
        uint32_t own[4] = {0, 0, 0, 0};
        if (token < tokens) count_lower(q, m, token, id, own);
        first = sum_of_threads_before(own[0], m.scratch);
    }
    if (token <= tokens) m.token_first[token] = first;
}

// Sums of the counts of all segments and of the segments before this one. A word holds two experts; a thread
// sums eight experts over neighbouring segments.
MOE_DEVICE void sum_counts(const problem &q, const scatter_memory &m)
{
    const int columns = q.padded_experts / 8, lines = (int)moe_divide(THREADS, q.columns_reciprocal);
    const int line = (int)moe_divide(threadIdx.x, q.columns_reciprocal),
              column = threadIdx.x - line * columns;
    if (line >= lines) return;
    const int begin = moe_cut(q.segments, lines, line), end = moe_cut(q.segments, lines, line + 1);
    const uint4 *from = (const uint4 *)(q.work.counts + (int64_t)begin * q.padded_experts) + column;
    constexpr int TOGETHER = 8; // loads in flight
    const uint4 none = {0, 0, 0, 0};
    uint4 all = none, before = none;
#pragma unroll 1
    for (int c0 = begin; c0 < end; c0 += TOGETHER, from += TOGETHER * columns) {
        uint4 v[TOGETHER];
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) v[j] = c0 + j < end ? __ldcg(from + j * columns) : none;
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
            all = {all.x + v[j].x, all.y + v[j].y, all.z + v[j].z, all.w + v[j].w};
            if (c0 + j < (int)blockIdx.x)
                before = {before.x + v[j].x, before.y + v[j].y, before.z + v[j].z, before.w + v[j].w};
        }
    }
    uint32_t *to = m.summed + column, *to_before = to + 4 * columns;
    atomicAdd(to, all.x);
    atomicAdd(to + columns, all.y);
    atomicAdd(to + 2 * columns, all.z);
    atomicAdd(to + 3 * columns, all.w);
    if (begin >= (int)blockIdx.x) return;
    atomicAdd(to_before, before.x);
    atomicAdd(to_before + columns, before.y);
    atomicAdd(to_before + 2 * columns, before.z);
    atomicAdd(to_before + 3 * columns, before.w);
}

// For every expert the number of its rows, and of those in the segments before.
MOE_DEVICE void take_sums(const problem &q, const scatter_memory &m, int warp, int lane)
{
    const int columns = q.padded_experts / 8;
#pragma unroll 1
    for (int first = warp * 32; first < q.padded_experts; first += THREADS) {
        const int e = first + lane;
        uint32_t rows = 0, before = 0;
        if (e >= q.padded_experts) {
        } else if (q.segments == 1) {
            rows = m.local[e]; // this thread has written it
        } else if (q.work.totals) {
            rows = __ldcg(q.work.totals + e);
            before = __ldcg(q.work.before + (int64_t)blockIdx.x * q.padded_experts + e);
        } else {
            const uint16_t *summed = (const uint16_t *)(m.summed + (e / 2 % 4) * columns + e / 8) + e % 2;
            rows = summed[0];
            before = summed[q.padded_experts]; // the upper half, so many words later
        }
        const uint32_t pairs = __reduce_add_sync(~0u, before);
        if (lane == 0) atomicAdd(m.pairs_before, pairs);
        if (e >= q.padded_experts) continue;
        m.rows[e] = rows;
        m.before[e] = before;
    }
}

// For every expert, where the segment's pairs go. A warp takes 32 experts at a time and sums the experts
// before them itself, so that it need not wait for other warps.
MOE_DEVICE void place_experts(const problem &q, const scatter_memory &m, int warp, int lane)
{
    uint32_t blocks = 0, local = 0; // this lane's part of the sums over the experts before
    int summed = 0;
#pragma unroll 1
    for (int first = warp * 32; first < q.padded_experts; first += THREADS) {
#pragma unroll 4
        for (; summed < first; summed += 32) {
            blocks += blocks_of(m.rows[summed + lane]);
            local += m.local[summed + lane];
        }
        const int e = first + lane;
        const bool real = e < q.padded_experts;
        const uint32_t own_blocks = real ? blocks_of(m.rows[e]) : 0, own_local = real ? m.local[e] : 0;
        const uint32_t blocks_end = __reduce_add_sync(~0u, blocks) + sum_up_to_lane(own_blocks, lane);
        const uint32_t local_end = __reduce_add_sync(~0u, local) + sum_up_to_lane(own_local, lane);
        const uint32_t sorted = local_end - own_local;
        if (!real) continue;
        const uint32_t row = (blocks_end - own_blocks) * MOE_BLOCK_ROWS + m.before[e];
        m.place[e] = {(int)(row - sorted), (int)sorted};
        if (e == q.padded_experts - 1) *m.blocks = blocks_end;
    }
}

// Writes every pair of the quad to its place in the sorted list, and its padded row to the token's list.
MOE_DEVICE void sort_quad(const problem &q, const scatter_memory &m, int i, uint4 weights)
{
    const quad t = quad_at(q, i);
    const uint2 ids = m.ids[i];
    const uint32_t id[4] = {id_of(ids, 0), id_of(ids, 1), id_of(ids, 2), id_of(ids, 3)};
    const uint32_t weight[4] = {weights.x, weights.y, weights.z, weights.w};
    uint32_t lower[4];
    count_lower(q, m, t.token, id, lower);
    int32_t *token_rows = m.token_rows + m.token_first[t.token];
    const uint32_t tokens_before = (1u << (t.token & 31)) - 1u;
    const int group = (t.token >> 5) * q.padded_experts;
#pragma unroll
    for (int u = 0; u < 4; u++) {
        if (id[u] >= MOE_PLAN_REPEATED) continue;
        const int cell = group + (int)id[u];
        const int2 place = m.place[id[u]];
        const int at = place.y + m.group_before[cell] + __popc(m.masks[cell] & tokens_before);
        m.sorted[at] = {id[u] << 16 | (uint32_t)t.token, weight[u]};
        token_rows[lower[u]] = place.x + at;
    }
}

// Writes the segment's rows, expert by expert, and its tokens' lists of rows.
MOE_DEVICE void write_pairs(const problem &q, const scatter_memory &m, int tokens)
{
    const int pairs = (int)m.token_first[tokens], first_token = (int)blockIdx.x * q.p.segment;
    int32_t *token_rows = q.p.token_rows + *m.pairs_before;
#pragma unroll 2
    for (int i = threadIdx.x; i < pairs; i += THREADS) {
        const uint2 pair = m.sorted[i];
        const int row = m.place[pair.x >> 16].x + i;
        q.p.row_token[row] = first_token + (int)(pair.x & 0xffffu);
        q.p.row_weight[row] = __uint_as_float(pair.y);
        token_rows[i] = m.token_rows[i];
    }
    const int token = threadIdx.x, at = first_token + token;
    if (token < tokens || at == q.p.tokens)
        if (token <= tokens) q.p.token_offsets[at] = (int32_t)(*m.pairs_before + m.token_first[token]);
}

__global__ void __launch_bounds__(THREADS, 2) scatter(const __grid_constant__ problem q)
{
    extern __shared__ __align__(16) char memory[];
    static_assert(MOE_PLAN_EACH == 2, "the quads of a thread are named");
    const scatter_memory m = memory_at(memory, q.shared);
    const int lane = threadIdx.x & 31, warp = warp_number();
    const int tokens = tokens_of_segment(q), quads = tokens * q.quads;
    const bool alone = q.segments == 1, counted = q.p.counted && !alone; // alone: its own counts are all
    const bool sums = !alone && !q.work.totals;
    clear(m.masks, (int)(q.shared.rows / 4));  // and the sums and totals behind them
    if (alone || counted) wait_for_previous(); // for top-K or the caller; count has waited for the caller
    uint4 ids[MOE_PLAN_EACH], weights[MOE_PLAN_EACH]; // on their way, as the counts, all at once
    load_ids(q, ids, quads);
    load_weights(q, weights, quads);
    __syncthreads();
    if (counted && sums) sum_counts(q, m);
    store_ids(q, m.ids, ids, quads);
    __syncthreads();
    mark(q, m.masks, m.ids, quads);
    __syncthreads();
    rank_groups(q, m, warp, lane);
    if (!alone && !counted) {
        wait_for_previous();
        if (sums) sum_counts(q, m);
        __syncthreads();
    }
    take_sums(q, m, warp, lane);
    __syncthreads();
    const bool irregular = *m.pairs != (uint32_t)(tokens * q.p.topk); // there are repeated or skipped ids
    if (irregular) mark_repeated(q, m, quads);
    place_tokens(q, m, tokens, irregular);
    place_experts(q, m, warp, lane);
#pragma unroll 1
    for (int e = blockIdx.x + (WARPS - 1 - warp) * gridDim.x; e < q.p.experts; e += WARPS * gridDim.x)
        write_expert(q.p, m.rows, e);
    __syncthreads();
#pragma unroll 1
    for (int j = 0; j < MOE_PLAN_EACH; j++) {
        const int i = threadIdx.x + j * THREADS;
        if (i < quads) sort_quad(q, m, i, j ? weights[1] : weights[0]);
    }
    __syncthreads();
    write_pairs(q, m, tokens);
    write_tail(q.p, *m.blocks * MOE_BLOCK_ROWS);
    let_next_start();
}

work_space work_at(const moe_cuda_plan &p, int64_t segments, int64_t padded_experts)
{
    const int64_t cells = segments * padded_experts;
    uint32_t *totals = (uint32_t *)p.work, *before = totals + padded_experts;
    if (moe_plan_is_summed(p.tokens, p.experts, p.segment)) return {(uint16_t *)p.work, nullptr, nullptr};
    return {(uint16_t *)(before + cells), before, totals};
}

} // namespace
} // namespace plan
} // namespace moe

extern "C" uint64_t moe_cuda_plan_work_bytes(int64_t tokens, int64_t experts, int32_t segment)
{
    const int64_t segments = moe_divide_up(tokens, segment);
    const uint64_t padded = (uint64_t)moe_plan_padded_experts((int32_t)experts),
                   cells = (uint64_t)segments * padded;
    return moe_plan_is_summed(tokens, (int32_t)experts, segment) ? cells * 2 : cells * 6 + padded * 4;
}

extern "C" cudaError_t moe_cuda_plan_init(const moe_device *device)
{
    using namespace moe::plan;
    const cudaError_t status = moe::allow_shared(device, scatter, device->shared_bytes);
    return status == cudaSuccess ? moe::allow_shared(device, count, device->shared_bytes) : status;
}

extern "C" cudaError_t moe_cuda_plan_topk(const moe_launch *on, const moe_cuda_plan *p)
{
    using namespace moe::plan;
    problem q = {};
    q.p = *p;
    q.segments = (int32_t)moe_divide_up(p->tokens, p->segment);
    q.padded_experts = moe_plan_padded_experts(p->experts);
    q.quads = moe_plan_quads(p->topk);
    q.quads_reciprocal = moe_reciprocal((uint32_t)q.quads);
    q.columns_reciprocal = moe_reciprocal((uint32_t)q.padded_experts / 8);
    q.shared = moe_plan_shared_of(p->segment, p->experts, p->topk);
    q.work = work_at(*p, q.segments, q.padded_experts);
    const dim3 ctas((unsigned)q.segments);
    cudaError_t status = cudaSuccess;
    if (!p->counted && q.segments > 1)
        status = moe::launch_early(count, ctas, dim3(THREADS), q.shared.end, on, q);
    if (status == cudaSuccess && q.work.totals)
        status =
            moe::launch_early(columns, dim3((unsigned)(q.padded_experts + 31) / 32), dim3(32, 32), 0, on, q);
    return status == cudaSuccess ? moe::launch_early(scatter, ctas, dim3(THREADS), q.shared.end, on, q)
                                 : status;
}
