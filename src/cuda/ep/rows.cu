// Rows between ranks: push sends rows of X or dO, return sends sums of rows of Y or dX~, collect adds the
// sums of all ranks. Terms: docs/glossary.md; symbols: include/smoe.h. W ranks; D is the mean number of ranks
// that have an expert of a token; d2 = 2 d bytes.
//
//   kernel   mathematics                                       bytes
//   push     row s max_tokens + t of peer = row t              T d2 read, T D d2 sent
//   return   row r max_tokens + t of source =                  R d2 read, about T D d2 sent
//            sum over the slot's rows i, ascending, s(i) Y[i]
//   collect  O[t] = term + sum over ranks, ascending           T D d2 read, T d2 written
//
// Sums are in f32 and rounded once. A row has the same place whatever arrives when, so no bit depends on
// timing.
//
// Tile: a warp takes a token or slot, and of it 128 vectors of 16 bytes (push) or 64 (the others) at a time.
// All its loads start before the first store. A row is loaded once for all ranks that need it. The grids have
// as many CTAs as the launch has SMs: a mover beside a GEMM gets few. Flags are set by the last CTA
// (wire.cuh).
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "common/storage.cuh"
#include "ep/wire.cuh"

namespace moe
{
namespace ep
{
namespace
{

enum { THREADS = 1024, WAITING_WARPS = 8, COPIED = 4, SUMMED = 2 /* vectors of a lane */ };

MOE_DEVICE int first_warp()
{
    return (int)(threadIdx.x >> 5) * (int)gridDim.x + (int)blockIdx.x;
}

MOE_DEVICE int all_warps()
{
    return (int)(blockDim.x >> 5) * (int)gridDim.x;
}

// ---- push

// The row to the ranks of the lanes `to`.
MOE_DEVICE void send_row(const moe_ep_push &p, int64_t row, int rank, uint32_t to)
{
    const int lane = threadIdx.x & 31, vectors = (int)(p.row_bytes / 16);
    const uint4 *from = (const uint4 *)((const char *)p.rows + row * p.row_bytes);
#pragma unroll 1
    for (int first = lane; first - lane < vectors; first += 32 * COPIED) {
        uint4 v[COPIED];
#pragma unroll
        for (int i = 0; i < COPIED; i++)
            if (first + 32 * i < vectors) v[i] = __ldg(from + first + 32 * i);
#pragma unroll 1
        for (uint32_t left = to; left; left &= left - 1) {
            const int peer = __shfl_sync(~0u, rank, __ffs((int)left) - 1);
            uint4 *at = (uint4 *)row_at(p.view, peer, p.region, p.view.rank, row, p.row_bytes);
#pragma unroll
            for (int i = 0; i < COPIED; i++)
                if (first + 32 * i < vectors) at[first + 32 * i] = v[i];
        }
    }
}

__global__ void __launch_bounds__(THREADS, 1) push(const __grid_constant__ moe_ep_push p)
{
    __shared__ rank_rows rows;
    const moe_ep_view &v = p.view;
    if (has_failed(v)) return;
    load_rank_rows(rows, v, p.plan);
#pragma unroll 1
    for (int64_t t = p.first + first_warp(); t < p.end; t += all_warps()) {
        const int end = __ldg(p.plan.token_offsets + t + 1);
        int last = -1;
#pragma unroll 1
        for (int begin = __ldg(p.plan.token_offsets + t); begin < end; begin += 32) {
            const rank_batch ranks = next_ranks(rows, v, p.plan.token_rows, begin, end, last);
            const uint32_t own = __ballot_sync(~0u, ranks.rank == v.rank);
            send_row(p, t, ranks.rank, p.own ? ranks.firsts : ranks.firsts & ~own);
        }
    }
    signal_when_done(v, p.flag, moe_ep_mark(call_of(v), p.part));
}

// ---- Sums of vectors

template <typename T> MOE_DEVICE void add(float (&sum)[8], uint4 v, float weight)
{
    const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum[2 * i] = fmaf(weight, storage<T>::low(pairs[i]), sum[2 * i]);
        sum[2 * i + 1] = fmaf(weight, storage<T>::high(pairs[i]), sum[2 * i + 1]);
    }
}

template <typename T> MOE_DEVICE uint4 rounded(const float (&sum)[8])
{
    using S = storage<T>;
    return make_uint4(S::pack(sum[0], sum[1]), S::pack(sum[2], sum[3]), S::pack(sum[4], sum[5]),
                      S::pack(sum[6], sum[7]));
}

// sums += weight times the vectors of a row from `column` on, which are 32 apart. The row may have been
// written by another rank while this kernel waited, so it is not read through L1.
template <typename T>
MOE_DEVICE void add_row(float (&sums)[SUMMED][8], const uint4 *row, int column, int vectors, float weight)
{
    uint4 v[SUMMED];
#pragma unroll
    for (int i = 0; i < SUMMED; i++) {
        v[i] = make_uint4(0, 0, 0, 0);
        if (column + 32 * i < vectors) v[i] = __ldcg(row + column + 32 * i);
    }
#pragma unroll
    for (int i = 0; i < SUMMED; i++) add<T>(sums[i], v[i], weight);
}

template <typename T>
MOE_DEVICE void store_row(uint4 *row, int column, int vectors, const float (&sums)[SUMMED][8])
{
#pragma unroll
    for (int i = 0; i < SUMMED; i++)
        if (column + 32 * i < vectors) row[column + 32 * i] = rounded<T>(sums[i]);
}

// ---- return

template <typename T> MOE_DEVICE void return_slot(const moe_ep_return &p, int source, int64_t token)
{
    const int64_t slot = source * p.view.max_tokens + token;
    const int begin = __ldg(p.token_offsets + slot), end = __ldg(p.token_offsets + slot + 1);
    const int vectors = (int)(p.columns / 8), lane = threadIdx.x & 31;
    if (begin == end) return;
    const int last_block = __ldg(p.token_rows + end - 1) / MOE_BLOCK_ROWS; // the rows ascend
    if ((last_block >= p.past.kept) != (p.others != 0)) return;
    uint4 *to =
        (uint4 *)(row_at(p.view, source, p.view.sums, p.view.rank, token, p.hidden * 2) + p.first_column * 2);
#pragma unroll 1
    for (int column = lane; column - lane < vectors; column += 32 * SUMMED) {
        float sums[SUMMED][8] = {};
#pragma unroll 2
        for (int i = begin; i < end; i++) {
            const int row = __ldg(p.token_rows + i);
            const float weight = p.row_weight ? __ldg(p.row_weight + row) : 1.0f;
            add_row<T>(sums, (const uint4 *)((const char *)p.y + (int64_t)row * p.columns * 2), column,
                       vectors, weight);
        }
        store_row<T>(to, column, vectors, sums);
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) return_sums(const __grid_constant__ moe_ep_return p)
{
    const moe_ep_view &v = p.view;
    if (has_failed(v) || (p.others && __ldg(p.past.end) <= p.past.kept)) return;
#pragma unroll 1
    for (int s = 0; s < v.ranks; s++) { // from the next rank on, so that not all send to the same rank
        const int source = (v.rank + 1 + s) % v.ranks, own = source == v.rank;
        const int64_t tokens = __ldg((const long long *)p.tokens + source),
                      end = p.others ? tokens : moe_ep_wave_start(tokens, v.parts, own, p.wave + 1);
#pragma unroll 1
        for (int64_t t = first_warp() + (p.others ? 0 : moe_ep_wave_start(tokens, v.parts, own, p.wave));
             t < end; t += all_warps())
            return_slot<T>(p, source, t);
    }
    if (p.part >= 0) signal_when_done(v, MOE_EP_RETURN, moe_ep_mark(call_of(v), p.part));
}

// ---- collect

// The router's term of dlogits that are sparse.
template <typename T>
MOE_DEVICE void add_terms(float (&sums)[SUMMED][8], const moe_ep_collect &p, int begin, int end, int column,
                          int vectors)
{
#pragma unroll 1
    for (int i = begin; i < end; i++) {
        const int2 term = __ldg((const int2 *)p.terms + i);
        add_row<T>(sums, (const uint4 *)((const char *)p.router_weight + term.x * (p.hidden * 2)), column,
                   vectors, __uint_as_float((uint32_t)term.y));
    }
}

template <typename T> MOE_DEVICE void collect_token(const moe_ep_collect &p, const rank_rows &rows, int64_t t)
{
    const int lane = threadIdx.x & 31, vectors = (int)(p.hidden / 8);
    const int first = __ldg(p.plan.token_offsets + t), end = __ldg(p.plan.token_offsets + t + 1);
    uint4 *out = (uint4 *)((char *)p.out + t * p.hidden * 2);
#pragma unroll 1
    for (int column = lane; column - lane < vectors; column += 32 * SUMMED) {
        float sums[SUMMED][8] = {};
#pragma unroll
        for (int i = 0; i < SUMMED; i++)
            if (p.onto && column + 32 * i < vectors) add<T>(sums[i], out[column + 32 * i], 1.0f);
        if (p.terms) add_terms<T>(sums, p, first, end, column, vectors);
        int last = -1;
#pragma unroll 1
        for (int begin = first; begin < end; begin += 32) {
            const rank_batch ranks = next_ranks(rows, p.view, p.plan.token_rows, begin, end, last);
#pragma unroll 1
            for (uint32_t left = ranks.firsts; left; left &= left - 1) {
                const int rank = __shfl_sync(~0u, ranks.rank, __ffs((int)left) - 1);
                add_row<T>(sums,
                           (const uint4 *)row_at(p.view, p.view.rank, p.view.sums, rank, t, p.hidden * 2),
                           column, vectors, 1.0f);
            }
        }
        store_row<T>(out, column, vectors, sums);
    }
}

MOE_DEVICE void spoil_row(const moe_ep_collect &p, int64_t t)
{
    uint4 *out = (uint4 *)((char *)p.out + t * p.hidden * 2);
    for (int i = threadIdx.x & 31; i < p.hidden / 8; i += 32) out[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
}

// CTAs that wait themselves may find different ends: one has seen the last flag when another gives up.
template <typename T>
__global__ void __launch_bounds__(THREADS, 1) collect(const __grid_constant__ moe_ep_collect p)
{
    __shared__ rank_rows rows;
    if (p.waits && threadIdx.x < 32) wait_all(p.view, MOE_EP_RETURN, moe_ep_mark(call_of(p.view), 0));
    const bool failed = __syncthreads_or(threadIdx.x == 0 && has_failed(p.view)); // the lanes of a warp agree
    load_rank_rows(rows, p.view, p.plan);
#pragma unroll 1
    for (int64_t t = first_warp(); t < p.tokens; t += all_warps())
        if (failed)
            spoil_row(p, t);
        else
            collect_token<T>(p, rows, t);
    if (p.waits && gridDim.x > 1 && comes_last(p.view, MOE_EP_FAULT) && has_failed(p.view))
        for (int64_t t = 0; t < p.tokens; t++) spoil_row(p, t);
}

// ---- spoil

__global__ void __launch_bounds__(THREADS, 1)
    spoil(const __grid_constant__ moe_ep_view v, const __grid_constant__ moe_ep_outputs o)
{
    if (!has_failed(v)) return;
    for (int i = 0; i < MOE_EP_OUTPUTS; i++)
        for (int64_t j = (int64_t)blockIdx.x * THREADS + threadIdx.x; o.at[i] && j < o.bytes[i] / 2;
             j += (int64_t)gridDim.x * THREADS)
            ((uint16_t *)o.at[i])[j] = 0xffffu;
}

} // namespace
} // namespace ep
} // namespace moe

extern "C" cudaError_t moe_cuda_ep_push(const moe_launch *on, const moe_ep_push *p)
{
    return moe::enqueue(moe::ep::push, (unsigned)on->sms, moe::ep::THREADS, 0, on->stream, *p);
}

extern "C" cudaError_t moe_cuda_ep_return(const moe_launch *on, const moe_ep_return *p)
{
    using namespace moe;
    return for_type(storage_types(), on->dtype, [&](auto t) {
        return enqueue(ep::return_sums<typename decltype(t)::type>, (unsigned)on->sms, ep::THREADS, 0,
                       on->stream, *p);
    });
}

extern "C" cudaError_t moe_cuda_ep_collect(const moe_launch *on, const moe_ep_collect *p)
{
    using namespace moe;
    return for_type(storage_types(), on->dtype, [&](auto t) {
        const unsigned few = (unsigned)(p->tokens + ep::WAITING_WARPS - 1) / ep::WAITING_WARPS;
        const unsigned ctas = p->waits ? (few ? few : 1u) : 2u * (unsigned)on->sms;
        return enqueue(ep::collect<typename decltype(t)::type>, ctas,
                       p->waits ? 32u * ep::WAITING_WARPS : (unsigned)ep::THREADS, 0, on->stream, *p);
    });
}

extern "C" cudaError_t moe_cuda_ep_spoil(const moe_launch *on, const moe_ep_view *v, const moe_ep_outputs *o)
{
    return moe::enqueue(moe::ep::spoil, (unsigned)on->sms, moe::ep::THREADS, 0, on->stream, *v, *o);
}
