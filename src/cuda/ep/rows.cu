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
// Where there are fewer rows than warps, each of these groups of vectors is a warp's. All its loads start
// before the first store. A row is loaded once for all ranks that need it. The grids have at most as many
// CTAs as the launch has SMs (collect: twice as many): a mover beside a GEMM gets few. Flags are set by the
// last CTA (wire.cuh). For few tokens one launch begins the call and sends routing and rows: one CTA the
// routing, up to FEW_CTAS the rows.
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

enum {
    THREADS = 1024,
    FEW_CTAS = 8,
    WAITING_TOKENS = 8 /* of a CTA */,
    COPIED = 4,
    SUMMED = 2 /* vectors of a lane */
};

MOE_DEVICE int first_warp()
{
    return (int)(threadIdx.x >> 5) * (int)gridDim.x + (int)blockIdx.x;
}

MOE_DEVICE int all_warps()
{
    return (int)(blockDim.x >> 5) * (int)gridDim.x;
}

// If there are fewer rows than warps, a warp for each group of 32 * each vectors of a row; else one.
MOE_DEVICE int warps_of_row(int64_t rows, int vectors, int each, int warps)
{
    return rows < warps ? (vectors + 32 * each - 1) / (32 * each) : 1;
}

// A warp's part of a row: every `warps`-th of these groups, from group `first` on.
struct row_part {
    int first, warps;
};

// ---- push

struct moved_rows {
    const moe_ep_view &view;
    const moe_ep_own_plan &plan;
    const char *rows;
    uint64_t region;
    int64_t row_bytes;
    bool own;
};

// The row to the ranks of the lanes `to`.
MOE_DEVICE void send_row(const moved_rows &p, int64_t row, int rank, uint32_t to, row_part part)
{
    const int lane = threadIdx.x & 31, vectors = (int)(p.row_bytes / 16);
    const uint4 *from = (const uint4 *)(p.rows + row * p.row_bytes);
#pragma unroll 1
    for (int first = lane + 32 * COPIED * part.first; first - lane < vectors;
         first += 32 * COPIED * part.warps) {
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

// Rows first..end - 1 by `warps` warps, of which this is `warp`.
MOE_DEVICE void send_rows_of(const moved_rows &p, const rank_rows &rows, int64_t first, int64_t end, int warp,
                             int warps)
{
    const int each = warps_of_row(end - first, (int)(p.row_bytes / 16), COPIED, warps);
#pragma unroll 1
    for (int item = warp; item < (end - first) * each; item += warps) {
        const int64_t t = first + item / each;
        const int last_row = __ldg(p.plan.token_offsets + t + 1);
        int last = -1;
#pragma unroll 1
        for (int begin = __ldg(p.plan.token_offsets + t); begin < last_row; begin += 32) {
            const rank_batch ranks = next_ranks(rows, p.view, p.plan.token_rows, begin, last_row, last);
            const uint32_t own = __ballot_sync(~0u, ranks.rank == p.view.rank);
            send_row(p, t, ranks.rank, p.own ? ranks.firsts : ranks.firsts & ~own, {item % each, each});
        }
    }
}

__global__ void __launch_bounds__(THREADS, 1) push(const __grid_constant__ moe_ep_push p)
{
    __shared__ rank_rows rows;
    const moe_ep_view &v = p.view;
    if (has_failed(v)) return;
    load_rank_rows(rows, v, p.plan);
    const moved_rows moved = {v, p.plan, (const char *)p.moved.rows, p.moved.region, p.row_bytes, p.own != 0};
    send_rows_of(moved, rows, p.first, p.end, first_warp(), all_warps());
    signal_when_done(v, p.moved.flag, moe_ep_mark(call_of(v), p.part));
}

// For few tokens. Every CTA waits itself until the call may begin; the last to end counts it. CTA 0 describes
// the call and sends its routing, the others send the rows.
__global__ void __launch_bounds__(THREADS, 1) begin_few(const __grid_constant__ moe_ep_begin_few p)
{
    __shared__ rank_rows rows;
    const moe_ep_view &v = p.begin.view;
    wait_for_previous();
    const uint64_t call = call_of(v) + 1;
    const int warp = threadIdx.x >> 5;
    if (!__syncthreads_or(warp == 0 && may_begin(p.begin, call))) return;
    let_next_start();
    if (blockIdx.x == 0) {
        if (warp == 0) describe_call(p.begin);
        for (int i = threadIdx.x / 8; !p.begin.backward && i < p.plan.each * v.ranks; i += THREADS / 8)
            send_rows(v, p.plan, i, threadIdx.x % 8, 8);
        __syncthreads();
        if (warp == 0) signal_all(v, MOE_EP_HEADER, moe_ep_mark(call, 0));
    } else {
        const int ctas = (int)gridDim.x - 1;
        load_rank_rows(rows, v, p.plan);
        for (int i = 0; i < p.tensors; i++) {
            const moved_rows moved = {
                v, p.plan, (const char *)p.moved[i].rows, p.moved[i].region, p.begin.row_bytes, true};
            send_rows_of(moved, rows, 0, p.begin.tokens, warp * ctas + (int)blockIdx.x - 1, 32 * ctas);
        }
    }
    if (!comes_last(v, MOE_EP_INPUT)) return;
    count_call(p.begin, call);
    for (int i = 0; i < p.tensors; i++) signal_all(v, p.moved[i].flag, moe_ep_mark(call, 0));
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

template <typename T>
MOE_DEVICE void return_slot(const moe_ep_return &p, int source, int64_t token, row_part part)
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
    for (int column = lane + 32 * SUMMED * part.first; column - lane < vectors;
         column += 32 * SUMMED * part.warps) {
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
    let_next_start();
    if (has_failed(v) || (p.others && __ldg(p.past.end) <= p.past.kept)) return;
    const int warps = warps_of_row(v.ranks * v.max_tokens, (int)(p.columns / 8), SUMMED, all_warps());
    int64_t item = first_warp(); // of the slots of all sources
#pragma unroll 1
    for (int s = 0; s < v.ranks; s++) { // from the next rank on, so that not all send to the same rank
        const int source = (v.rank + 1 + s) % v.ranks, own = source == v.rank;
        const int64_t tokens = __ldg((const long long *)p.tokens + source),
                      first = p.others ? 0 : moe_ep_wave_start(tokens, v.parts, own, p.wave),
                      end = p.others ? tokens : moe_ep_wave_start(tokens, v.parts, own, p.wave + 1);
        const int64_t items = (end - first) * warps;
#pragma unroll 1
        for (; item < items; item += all_warps())
            return_slot<T>(p, source, first + (int)item / warps, {(int)item % warps, warps});
        item -= items;
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

template <typename T>
MOE_DEVICE void collect_token(const moe_ep_collect &p, const rank_rows &rows, int64_t t, row_part part)
{
    const int lane = threadIdx.x & 31, vectors = (int)(p.hidden / 8);
    const int first = __ldg(p.plan.token_offsets + t), end = __ldg(p.plan.token_offsets + t + 1);
    uint4 *out = (uint4 *)((char *)p.out + t * p.hidden * 2);
#pragma unroll 1
    for (int column = lane + 32 * SUMMED * part.first; column - lane < vectors;
         column += 32 * SUMMED * part.warps) {
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
    wait_for_previous();
    load_rank_rows(rows, p.view, p.plan);
    if (p.waits && threadIdx.x < 32) {
        if (p.frees && blockIdx.x == 0 && !__any_sync(~0u, has_failed(p.view)))
            signal_all(p.view, MOE_EP_FREE, moe_ep_mark(call_of(p.view), 0));
        wait_for_part(p.view, MOE_EP_RETURN, 0);
    }
    const bool failed = __syncthreads_or(threadIdx.x == 0 && has_failed(p.view)); // the lanes of a warp agree
    let_next_start();
    const int warps = warps_of_row(p.tokens, (int)(p.hidden / 8), SUMMED, all_warps());
#pragma unroll 1
    for (int item = first_warp(); item < p.tokens * warps; item += all_warps())
        if (failed)
            spoil_row(p, item / warps);
        else
            collect_token<T>(p, rows, item / warps, {item % warps, warps});
    if (p.waits && gridDim.x > 1 && comes_last(p.view, MOE_EP_FAULT) && has_failed(p.view))
        for (int64_t t = 0; t < p.tokens; t++) spoil_row(p, t);
}

// CTAs that wait for other ranks, 1 to `most`. Ranks may share a GPU; those that wait must leave SMs to the
// one that is waited for.
unsigned waiting_ctas(const moe_launch *on, int64_t most)
{
    const int64_t share = on->device->sms / 16, ctas = share < most ? share : most;
    return ctas > 1 ? (unsigned)ctas : 1u;
}

} // namespace
} // namespace ep
} // namespace moe

extern "C" cudaError_t moe_cuda_ep_push(const moe_launch *on, const moe_ep_push *p)
{
    return moe::enqueue(moe::ep::push, (unsigned)on->sms, moe::ep::THREADS, 0, on->stream, *p);
}

extern "C" cudaError_t moe_cuda_ep_begin_few(const moe_launch *on, const moe_ep_begin_few *p)
{
    using namespace moe::ep;
    return moe::launch_early(begin_few, 1 + waiting_ctas(on, FEW_CTAS), THREADS, 0, on, *p);
}

extern "C" cudaError_t moe_cuda_ep_return(const moe_launch *on, const moe_ep_return *p)
{
    using namespace moe;
    const int64_t warps_of_cta = ep::THREADS / 32, // no more CTAs than have work
        warps = p->view.ranks * p->view.max_tokens * moe_divide_up(p->columns / 8, 32 * ep::SUMMED);
    return for_type(storage_types(), on->dtype, [&](auto t) {
        return enqueue(
            ep::return_sums<typename decltype(t)::type>,
            (unsigned)(warps < on->sms * warps_of_cta ? moe_divide_up(warps, warps_of_cta) : on->sms),
            ep::THREADS, 0, on->stream, *p);
    });
}

extern "C" cudaError_t moe_cuda_ep_collect(const moe_launch *on, const moe_ep_collect *p)
{
    using namespace moe;
    return for_type(storage_types(), on->dtype, [&](auto t) {
        const unsigned ctas = p->waits ? ep::waiting_ctas(on, moe_divide_up(p->tokens, ep::WAITING_TOKENS))
                                       : 2u * (unsigned)on->sms;
        const auto kernel = ep::collect<typename decltype(t)::type>;
        return p->waits ? launch_early(kernel, ctas, ep::THREADS, 0, on, *p)
                        : enqueue(kernel, ctas, ep::THREADS, 0, on->stream, *p);
    });
}
