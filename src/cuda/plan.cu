// The plan from given top-K ids and weights, without sorts, atomics on global memory or a count read by the
// host.
//
// Two kernels, a CTA for a chunk of tokens. count: bit masks [32-token group][expert] in shared memory, their
// populations are the chunk's counts. scatter: masks again; every CTA sums the count matrix itself (it stands
// in L2) and so knows all offsets and its own share; pairs are sorted by expert in shared memory first and
// then written in runs, because scattered 4-byte stores would take most of the time. The padded row of a pair
// follows from offsets and popcounts alone, so the result does not depend on any order of execution.
//
// Bytes: ids twice, weights, 12 bytes a pair written; the count matrix once a CTA.
#define SMOE_PLAN_THREADS 1024
#include "plan_shared.cuh"
#include "plan_size.h"

namespace smoe
{
namespace plan
{
namespace
{

// Work space: counts uint16 [chunks][padded experts]; for many chunks also their sums before a chunk, uint32
// of the same shape, and each expert's total, uint32.
struct work_space {
    uint16_t *counts;
    uint32_t *before, *totals; // NULL for few chunks
};

struct problem {
    smoe_cuda_plan p;
    work_space work;
    smoe_plan_shared shared;
    int32_t chunk, chunks, padded_experts, padded_topk;
    uint32_t topk_reciprocal;
};

// Expert of pair i, -1 if it is none.
SMOE_DEVICE int read_id(const smoe_cuda_plan &p, int64_t i)
{
    if (p.wide_index) {
        const long long id = __ldg((const long long *)p.ids + i);
        return id >= 0 && id < p.experts ? (int)id : -1;
    }
    const int id = __ldg((const int *)p.ids + i);
    return id >= 0 && id < p.experts ? id : -1;
}

// Token (of the chunk) of its pair i.
SMOE_DEVICE int token_of(const problem &q, int i)
{
    return (int)smoe_divide(i, q.topk_reciprocal);
}

SMOE_DEVICE int pairs_of_chunk(const problem &q)
{
    return min(q.chunk, q.p.tokens - (int)blockIdx.x * q.chunk) * q.p.topk;
}

enum { IN_FLIGHT = 4 }; // loads of a thread

// ---- count

__global__ void __launch_bounds__(THREADS, 1) count(const __grid_constant__ problem q)
{
    extern __shared__ __align__(16) char memory[];
    uint32_t *masks = (uint32_t *)memory;
    const int experts = q.padded_experts, groups = q.chunk / 32;
#pragma unroll 1
    for (int i = threadIdx.x; i < groups * experts; i += THREADS) masks[i] = 0;
    __syncthreads();
    const int pairs = pairs_of_chunk(q);
    const int64_t first = (int64_t)blockIdx.x * q.chunk * q.p.topk;
    for (int i0 = threadIdx.x; i0 < pairs; i0 += THREADS * IN_FLIGHT) {
        int id[IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) {
            const int i = i0 + u * THREADS;
            id[u] = i < pairs ? read_id(q.p, first + i) : -1;
        }
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) {
            const int token = token_of(q, i0 + u * THREADS);
            if (id[u] >= 0) atomicOr(&masks[(token >> 5) * experts + id[u]], 1u << (token & 31));
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int e = threadIdx.x; e < experts; e += THREADS) {
        uint32_t sum = 0;
#pragma unroll 4
        for (int g = 0; g < groups; g++) sum += __popc(masks[g * experts + e]);
        q.work.counts[(int64_t)blockIdx.x * experts + e] = (uint16_t)sum;
    }
    __syncthreads();
    let_next_start();
}

// ---- columns, for many chunks: a warp-wide column of 32 experts, its chunks cut among the CTA's warps

__global__ void __launch_bounds__(1024) columns(const __grid_constant__ problem q)
{
    __shared__ uint32_t part[32][33];
    const int lane = threadIdx.x, warp = threadIdx.y, expert = blockIdx.x * 32 + lane;
    const bool real = expert < q.padded_experts;
    const int begin = smoe_cut(q.chunks, 32, warp), end = smoe_cut(q.chunks, 32, warp + 1);
    uint32_t sum = 0;
#pragma unroll 8
    for (int c = begin; c < end; c++) sum += real ? q.work.counts[(int64_t)c * q.padded_experts + expert] : 0;
    part[warp][lane] = sum;
    __syncthreads();
    uint32_t before = 0, total = 0;
    for (int w = 0; w < 32; w++) {
        before += w < warp ? part[w][lane] : 0;
        total += part[w][lane];
    }
    if (!real) return;
    if (warp == 0) q.work.totals[expert] = total;
#pragma unroll 8
    for (int c = begin; c < end; c++) {
        const int64_t at = (int64_t)c * q.padded_experts + expert;
        q.work.before[at] = before;
        before += q.work.counts[at];
    }
    let_next_start();
}

// ---- scatter

struct scatter_memory {
    uint32_t *masks, *summed;
    tables experts;
    int32_t *place;
    uint32_t *local, *token_first, *sorted;
    float *sorted_weight;
    uint16_t *ids, *group_before;
    uint32_t *scratch;
};

SMOE_DEVICE scatter_memory memory_at(char *at, const smoe_plan_shared &s)
{
    return {(uint32_t *)(at + s.masks),
            (uint32_t *)(at + s.summed),
            {(uint32_t *)(at + s.rows), (uint32_t *)(at + s.first_block), (uint32_t *)(at + s.first_tile),
             (uint32_t *)(at + s.first_piece)},
            (int32_t *)(at + s.place),
            (uint32_t *)(at + s.local),
            (uint32_t *)(at + s.token_first),
            (uint32_t *)(at + s.sorted),
            (float *)(at + s.sorted_weight),
            (uint16_t *)(at + s.ids),
            (uint16_t *)(at + s.group_before),
            (uint32_t *)(at + s.scratch)};
}

// Where pair i of the chunk stands in `ids`.
SMOE_DEVICE int slot_of(const problem &q, int i, int token)
{
    return token * q.padded_topk + i - token * q.p.topk;
}

// What a thread reads of its first pairs before anything else is known; the chunk's weights are called to L2.
struct early_pairs {
    int id[IN_FLIGHT];
    float weight; // of the first
};

SMOE_DEVICE early_pairs read_early(const problem &q, int pairs, int64_t first)
{
    early_pairs early;
#pragma unroll
    for (int u = 0; u < IN_FLIGHT; u++) {
        const int i = threadIdx.x + u * THREADS;
        early.id[u] = i < pairs ? read_id(q.p, first + i) : -1;
    }
    early.weight = (int)threadIdx.x < pairs ? __ldg(q.p.weights + first + threadIdx.x) : 0.0f;
    if ((int)threadIdx.x * 32 < pairs) prefetch_l2(q.p.weights + first + threadIdx.x * 32);
    return early;
}

// Pair i names expert id: into the token's ids and the mask. Was it there already?
SMOE_DEVICE bool mark_id(const problem &q, const scatter_memory &m, int i, int id)
{
    if (id < 0) return false;
    const int token = token_of(q, i);
    const uint32_t bit = 1u << (token & 31);
    m.ids[slot_of(q, i, token)] = (uint16_t)id;
    return (atomicOr(&m.masks[(token >> 5) * q.padded_experts + id], bit) & bit) != 0;
}

// Ids and masks of the chunk. True (in all threads) if a token names an expert twice.
SMOE_DEVICE bool mark_ids(const problem &q, const scatter_memory &m, int pairs, int64_t first,
                          const early_pairs &early)
{
    bool repeated = false;
#pragma unroll
    for (int u = 0; u < IN_FLIGHT; u++) repeated |= mark_id(q, m, threadIdx.x + u * THREADS, early.id[u]);
#pragma unroll 1
    for (int i = threadIdx.x + IN_FLIGHT * THREADS; i < pairs; i += THREADS)
        repeated |= mark_id(q, m, i, read_id(q.p, first + i));
    return __syncthreads_or(repeated) != 0;
}

// Of several pairs of a token with one expert the lowest k counts; the others are marked.
SMOE_DEVICE void mark_repeated(const problem &q, const scatter_memory &m, int pairs)
{
#pragma unroll 1
    for (int i = threadIdx.x; i < pairs; i += THREADS) {
        const int token = token_of(q, i), k = i - token * q.p.topk;
        uint16_t *ids = m.ids + token * q.padded_topk;
        const uint16_t id = ids[k];
        bool again = false;
#pragma unroll 1
        for (int j = 0; j < k; j++) again |= (ids[j] & ~SMOE_PLAN_REPEATED) == id;
        if (again) ids[k] = id | SMOE_PLAN_REPEATED;
    }
    __syncthreads();
}

// Counts of all chunks and of those before this one, two experts a word, eight a thread.
SMOE_DEVICE void sum_counts(const problem &q, const scatter_memory &m)
{
    const int columns = q.padded_experts / 8, column = threadIdx.x % columns, lines = THREADS / columns;
    const int line = threadIdx.x / columns;
    if (line >= lines) return;
    uint4 all = {0, 0, 0, 0}, before = {0, 0, 0, 0};
#pragma unroll 4
    for (int c = line; c < q.chunks; c += lines) {
        const uint4 v = __ldcg((const uint4 *)(q.work.counts + (int64_t)c * q.padded_experts) + column);
        all = {all.x + v.x, all.y + v.y, all.z + v.z, all.w + v.w};
        if (c < (int)blockIdx.x) before = {before.x + v.x, before.y + v.y, before.z + v.z, before.w + v.w};
    }
    uint32_t *to = m.summed + column * 4, *to_before = to + q.padded_experts / 2;
    atomicAdd(to, all.x);
    atomicAdd(to + 1, all.y);
    atomicAdd(to + 2, all.z);
    atomicAdd(to + 3, all.w);
    atomicAdd(to_before, before.x);
    atomicAdd(to_before + 1, before.y);
    atomicAdd(to_before + 2, before.z);
    atomicAdd(to_before + 3, before.w);
}

// Counts of one expert: in all, in this chunk, in the chunks before it.
SMOE_DEVICE sums sums_of_expert(const problem &q, const scatter_memory &m, int e)
{
    uint32_t all, before, local = 0;
    if (q.work.totals) {
        all = __ldcg(q.work.totals + e);
        before = __ldcg(q.work.before + (int64_t)blockIdx.x * q.padded_experts + e);
    } else {
        const uint16_t *summed = (const uint16_t *)m.summed;
        all = summed[e];
        before = summed[q.padded_experts + e];
    }
#pragma unroll 4
    for (int g = 0; g < q.chunk / 32; g++) local += __popc(m.masks[g * q.padded_experts + e]);
    m.experts.rows[e] = all;
    m.place[e] = (int32_t)before;
    m.local[e] = local;
    return sums_of(all, local, before, q.p.lists.piece_limit);
}

// Offsets of every expert; the sums over all of them. A thread owns neighbouring experts.
SMOE_DEVICE sums place_experts(const problem &q, const scatter_memory &m)
{
    const int experts = q.p.experts, each = (experts + THREADS - 1) / THREADS;
    const int begin = min((int)threadIdx.x * each, experts), end = min(begin + each, experts);
    sums own = {0, 0, 0, 0, 0, 0};
#pragma unroll 1
    for (int e = begin; e < end; e++) own = own + sums_of_expert(q, m, e);
    sums s = scan(own, m.scratch);
#pragma unroll 1
    for (int e = begin; e < end; e++) {
        const sums here = sums_of(m.experts.rows[e], m.local[e], (uint32_t)m.place[e], q.p.lists.piece_limit);
        m.experts.first_block[e] = s.blocks;
        m.experts.first_tile[e] = (s.blocks + s.odd) / 2;
        m.experts.first_piece[e] = s.pieces;
        m.place[e] = (int32_t)(s.blocks * SMOE_BLOCK_ROWS + here.before - s.local);
        uint32_t sorted = s.local;
#pragma unroll 4
        for (int g = 0; g < q.chunk / 32; g++) {
            m.group_before[g * q.padded_experts + e] = (uint16_t)sorted;
            sorted += __popc(m.masks[g * q.padded_experts + e]);
        }
        if (blockIdx.x == gridDim.x - 1) write_tables(q.p, e, s, here.rows);
        s = s + here;
    }
    sums *total = (sums *)(m.scratch + 6 * WARPS);
    if (threadIdx.x == THREADS - 1) *total = s; // experts past the last are nobody's
    __syncthreads();
    return *total;
}

// How many of a token's entries are below `id`.
SMOE_DEVICE uint32_t count_lower(const problem &q, const scatter_memory &m, int token, uint32_t id)
{
    uint32_t lower = 0;
    const uint4 *ids = (const uint4 *)(m.ids + token * q.padded_topk);
#pragma unroll 1
    for (int i = 0; i < q.padded_topk / 8; i++) {
        const uint4 v = ids[i];
        lower += smoe_plan_lower(id, v.x) + smoe_plan_lower(id, v.y) + smoe_plan_lower(id, v.z) +
                 smoe_plan_lower(id, v.w);
    }
    return smoe_plan_both(lower);
}

// First entry of token_rows of the chunk's tokens. `before`: pairs of the chunks before.
SMOE_DEVICE void place_tokens(const problem &q, const scatter_memory &m, int tokens, uint32_t before)
{
    const int token = threadIdx.x;
    const uint32_t own = token < tokens ? count_lower(q, m, token, SMOE_PLAN_REPEATED) : 0;
    const uint32_t first = before + scan(own, m.scratch);
    const int64_t at = (int64_t)blockIdx.x * q.chunk + token;
    if (token < tokens) {
        m.token_first[token] = first;
        q.p.token_offsets[at] = (int32_t)first;
        if (at == q.p.tokens - 1) q.p.token_offsets[at + 1] = (int32_t)(first + own);
    }
    __syncthreads();
}

// Every pair to its place in the chunk's sorted list, and its padded row to its token's list. Weights are
// read a round ahead; `next` is the first.
SMOE_DEVICE void sort_pairs(const problem &q, const scatter_memory &m, int pairs, const float *weights,
                            float next)
{
#pragma unroll 1
    for (int i = threadIdx.x; i < pairs; i += THREADS) {
        const float weight = next;
        if (i + THREADS < pairs) next = __ldg(weights + i + THREADS);
        const int token = token_of(q, i);
        const uint32_t id = m.ids[slot_of(q, i, token)];
        if (id >= SMOE_PLAN_REPEATED) continue;
        const int cell = (token >> 5) * q.padded_experts + (int)id;
        const uint32_t place = m.group_before[cell] + __popc(m.masks[cell] & ((1u << (token & 31)) - 1u));
        q.p.token_rows[m.token_first[token] + count_lower(q, m, token, id)] = m.place[id] + (int32_t)place;
        m.sorted[place] = id << 16 | (uint32_t)token;
        m.sorted_weight[place] = weight;
    }
    __syncthreads();
}

__global__ void __launch_bounds__(THREADS, 1) scatter(const __grid_constant__ problem q)
{
    extern __shared__ __align__(16) char memory[];
    const scatter_memory m = memory_at(memory, q.shared);
    const int pairs = pairs_of_chunk(q), tokens = pairs / q.p.topk;
    const int64_t first = (int64_t)blockIdx.x * q.chunk * q.p.topk;
    const early_pairs early = read_early(q, pairs, first);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < q.shared.rows / 4; i += THREADS)
        m.masks[i] = 0; // and the sums behind them
#pragma unroll 1
    for (int i = threadIdx.x; i < q.chunk * q.padded_topk / 2; i += THREADS)
        ((uint32_t *)m.ids)[i] = SMOE_PLAN_NO_ID * 0x00010001u;
    __syncthreads();
    if (mark_ids(q, m, pairs, first, early)) mark_repeated(q, m, pairs);
    wait_for_previous();
    if (!q.work.totals) {
        sum_counts(q, m);
        __syncthreads();
    }
    const sums total = place_experts(q, m);
    place_tokens(q, m, tokens, total.before);
    sort_pairs(q, m, pairs, q.p.weights + first, early.weight);
#pragma unroll 1
    for (int e = blockIdx.x + (threadIdx.x >> 5) * gridDim.x; e < q.p.experts; e += WARPS * gridDim.x)
        write_expert(q.p, m.experts, e);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < total.local; i += THREADS) {
        const uint32_t pair = m.sorted[i];
        const int row = m.place[pair >> 16] + (int)i;
        q.p.row_token[row] = (int32_t)(blockIdx.x * q.chunk + (pair & 0xffff));
        q.p.row_weight[row] = m.sorted_weight[i];
    }
    write_tail(q.p, total.blocks * SMOE_BLOCK_ROWS);
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) write_totals(q.p, total);
}

// ---- rows: the plan from rows that are already sorted by expert

SMOE_DEVICE int read_offset(const smoe_cuda_plan &p, int i)
{
    const long long at =
        p.wide_index ? __ldg((const long long *)p.offsets + i) : (long long)__ldg((const int *)p.offsets + i);
    return (int)min(max(at, 0ll), (long long)p.tokens);
}

SMOE_DEVICE sums sums_of_segment(const smoe_cuda_plan &p, int e)
{
    return sums_of((uint32_t)max(0, read_offset(p, e + 1) - read_offset(p, e)), 0, 0, p.lists.piece_limit);
}

// Every CTA knows all offsets; a warp writes blocks of 64 rows, their expert found by bisection.
__global__ void __launch_bounds__(THREADS, 1) rows(const __grid_constant__ smoe_cuda_plan p)
{
    extern __shared__ __align__(16) char memory[];
    const int experts = p.experts, each = (experts + THREADS - 1) / THREADS;
    uint32_t *at = (uint32_t *)memory;
    const tables t = {at, at + experts, at + 2 * experts, at + 3 * experts};
    uint32_t *row_first = at + 4 * experts, *scratch = row_first + experts;
    const int begin = min((int)threadIdx.x * each, experts), end = min(begin + each, experts);
    sums own = {0, 0, 0, 0, 0, 0};
#pragma unroll 1
    for (int e = begin; e < end; e++) own = own + sums_of_segment(p, e);
    sums s = scan(own, scratch);
#pragma unroll 1
    for (int e = begin; e < end; e++) {
        const sums here = sums_of_segment(p, e);
        t.rows[e] = here.rows;
        t.first_block[e] = s.blocks;
        t.first_tile[e] = (s.blocks + s.odd) / 2;
        t.first_piece[e] = s.pieces;
        row_first[e] = s.rows;
        if (blockIdx.x == 0) write_tables(p, e, s, here.rows);
        s = s + here;
    }
    sums *totals = (sums *)(scratch + 6 * WARPS);
    if (threadIdx.x == THREADS - 1) *totals = s;
    __syncthreads();
    const sums total = *totals;

    const int lane = threadIdx.x & 31, warp = blockIdx.x * WARPS + (threadIdx.x >> 5),
              warps = gridDim.x * WARPS;
#pragma unroll 1
    for (uint32_t block = warp; block < total.blocks; block += warps) {
        int low = 0,
            high = experts; // the last expert that starts at or before the block, empty ones passed over
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (t.first_block[middle] <= block)
                low = middle;
            else
                high = middle;
        }
        for (int i = lane; i < SMOE_BLOCK_ROWS; i += 32) {
            const uint32_t within = (block - t.first_block[low]) * SMOE_BLOCK_ROWS + i;
            if (within >= t.rows[low]) continue;
            const int row = (int)(block * SMOE_BLOCK_ROWS + i), source = (int)(row_first[low] + within);
            p.row_token[row] = source;
            p.row_weight[row] = p.weights ? __ldg(p.weights + source) : 1.0f;
            p.token_rows[source] = row;
        }
    }
#pragma unroll 1
    for (int e = warp; e < experts; e += warps) write_expert(p, t, e);
#pragma unroll 1
    for (int64_t token = blockIdx.x * THREADS + threadIdx.x; token <= p.tokens; token += gridDim.x * THREADS)
        p.token_offsets[token] = (int32_t)min(token, (int64_t)total.rows);
    write_tail(p, total.blocks * SMOE_BLOCK_ROWS);
    if (blockIdx.x == 0 && threadIdx.x == 0) write_totals(p, total);
}

int64_t chunks_of(int64_t tokens, int64_t experts, int64_t topk)
{
    return smoe_divide_up(tokens, smoe_plan_chunk(tokens, (int32_t)experts, (int32_t)topk));
}

// scatter may start while its predecessor ends: it counts its own chunk meanwhile.
cudaError_t launch_scatter(const problem &q, cudaStream_t stream)
{
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)q.chunks);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = q.shared.end;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, scatter, q);
}

work_space work_at(void *work, int64_t chunks, int64_t padded_experts)
{
    const int64_t cells = chunks * padded_experts;
    if (chunks <= SMOE_PLAN_MOST_SUMMED) return {(uint16_t *)work, nullptr, nullptr};
    uint32_t *totals = (uint32_t *)work, *before = totals + padded_experts;
    return {(uint16_t *)(before + cells), before, totals};
}

} // namespace
} // namespace plan
} // namespace smoe

extern "C" uint64_t smoe_cuda_plan_work_bytes(int64_t tokens, int64_t experts, int64_t topk)
{
    const int64_t chunks = smoe::plan::chunks_of(tokens, experts, topk);
    const uint64_t padded = (uint64_t)smoe_plan_padded_experts((int32_t)experts),
                   cells = (uint64_t)chunks * padded;
    return chunks <= SMOE_PLAN_MOST_SUMMED ? cells * 2 : cells * 6 + padded * 4;
}

extern "C" cudaError_t smoe_cuda_plan_init(void)
{
    cudaError_t status = cudaFuncSetAttribute((const void *)smoe::plan::scatter,
                                              cudaFuncAttributeMaxDynamicSharedMemorySize, SMOE_PLAN_SHARED);
    if (status == cudaSuccess)
        status = cudaFuncSetAttribute((const void *)smoe::plan::count,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, SMOE_PLAN_SHARED);
    return status == cudaSuccess ? cudaFuncSetAttribute((const void *)smoe::plan::rows,
                                                        cudaFuncAttributeMaxDynamicSharedMemorySize, 131072)
                                 : status;
}

extern "C" cudaError_t smoe_cuda_plan_topk(const smoe_cuda_plan *p, cudaStream_t stream)
{
    using namespace smoe::plan;
    problem q = {};
    q.p = *p;
    q.chunk = smoe_plan_chunk(p->tokens, p->experts, p->topk);
    q.chunks = (int32_t)smoe_divide_up(p->tokens, q.chunk);
    q.padded_experts = smoe_plan_padded_experts(p->experts);
    q.padded_topk = smoe_plan_padded_topk(p->topk);
    q.topk_reciprocal = smoe_reciprocal(p->topk);
    q.shared = smoe_plan_shared_of(q.chunk, p->experts, p->topk);
    q.work = work_at(p->work, q.chunks, q.padded_experts);
    count<<<q.chunks, THREADS, q.shared.summed, stream>>>(q); // its masks alone
    if (q.work.totals) columns<<<(q.padded_experts + 31) / 32, dim3(32, 32), 0, stream>>>(q);
    return launch_scatter(q, stream);
}

extern "C" cudaError_t smoe_cuda_plan_rows(const smoe_cuda_plan *p, cudaStream_t stream)
{
    using namespace smoe::plan;
    const int64_t wanted = smoe_divide_up(p->padded_rows, (int64_t)WARPS * SMOE_BLOCK_ROWS);
    const unsigned ctas = (unsigned)(wanted < 1 ? 1 : wanted > 132 ? 132 : wanted);
    rows<<<ctas, THREADS, (size_t)p->experts * 20 + 1024, stream>>>(*p);
    return cudaGetLastError();
}
