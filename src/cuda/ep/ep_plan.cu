// The routing between ranks, and the plan of the rows that a rank receives. The host reads no count.
// Terms: docs/glossary.md; symbols: include/smoe.h. Here E is the number of this rank's experts, W that of
// ranks, V that of waves (ep_window.h), and a slot is a token of a source: slot s max_tokens + t.
//
// A rank's own plan has its rows sorted by expert, so what another rank needs of it is one run: counts (E),
// and then tokens and weights, by expert, each expert's in ascending order of tokens. The receiver sorts its
// rows by (expert, wave, source, token), and starts each (expert, wave) at a block of 64 rows. So an expert's
// rows are one range of blocks, and a wave has work lists of its own. With one wave this is the plan of the
// layer without ranks on the tokens of rank 0, 1, ... after each other. The kernels:
// - send: a CTA copies the rows of one expert into the window of its rank.
// - count: one CTA. Finds the part of each run that belongs to each wave by bisection of its tokens, and from
//   these counts every start, the offsets and the work lists.
// - place: a CTA copies one expert's run of one source to its rows, and sets the bits (slot, expert).
// - offsets: sums the bits of the slots before a slot.
// - map: a row's place in its slot's list is the number of lower experts, which follows from the bits. So no
//   result depends on the order in which threads run.
// For few rows one launch does the last four, and begin_few (rows.cu) what send does.
//
// Bytes: 8 R sent and read, 16 R written, W max_tokens E / 8 of bits written once and read twice. No FLOPs.
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "ep/wire.cuh"

namespace moe
{
namespace ep
{
namespace
{

enum {
    THREADS = 256,
    COUNT_THREADS = 1024,
    SLOTS_A_THREAD = 4,
    SEGMENT = COUNT_THREADS * SLOTS_A_THREAD,
    FEW_LANES = 8 /* that take a run, if there are few rows */
};

// ---- send: CTA g copies the rows of expert g of all ranks' experts

__global__ void __launch_bounds__(THREADS)
    send(const __grid_constant__ moe_ep_view v, const __grid_constant__ moe_ep_own_plan plan)
{
    if (has_failed(v)) return;
    send_rows(v, plan, blockIdx.x, threadIdx.x, THREADS);
    signal_when_done(v, MOE_EP_HEADER, moe_ep_mark(call_of(v), 0));
}

// ---- count

MOE_DEVICE int run_of(const moe_ep_received_plan &p, int waves, int expert, int wave, int source)
{
    return (expert * waves + wave) * p.view.ranks + source;
}

// The number of the run's tokens below `token`.
MOE_DEVICE int tokens_below(const int32_t *tokens, int count, int64_t token)
{
    int low = 0, high = count;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (__ldcg(tokens + middle) < token)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// sent[expert, 0, source]: where the expert's run begins in the source's stripe. A warp takes a source.
MOE_DEVICE void find_runs(const moe_ep_received_plan &p, int waves)
{
    const int lane = threadIdx.x & 31;
    for (int s = threadIdx.x >> 5; s < p.view.ranks; s += COUNT_THREADS / 32) {
        const int32_t *counts = stripe_at(p.view, p.view.rank, s).counts;
        int before = 0;
        for (int first = 0; first < p.experts; first += 32) {
            const int e = first + lane, own = e < p.experts ? __ldcg(counts + e) : 0;
            const int sum = (int)sum_up_to_lane((uint32_t)own, lane);
            if (e < p.experts) p.sent[run_of(p, waves, e, 0, s)] = before + sum - own;
            before += __shfl_sync(~0u, sum, 31);
        }
    }
}

// Cuts the run of each (expert, source) into waves, a thread for each part: first where it begins in the run,
// then its rows.
MOE_DEVICE void cut_runs(const moe_ep_received_plan &p, int waves)
{
    const moe_ep_view &v = p.view;
    const int runs = p.experts * v.ranks;
    for (int i = threadIdx.x; waves > 1 && i < runs * waves; i += COUNT_THREADS) {
        const int w = i / runs, e = (i - w * runs) / v.ranks, s = i - w * runs - e * v.ranks;
        const stripe from = stripe_at(v, v.rank, s);
        const int count = __ldcg(from.counts + e), first = p.sent[run_of(p, waves, e, 0, s)];
        const int64_t token = moe_ep_wave_start(p.tokens[s], v.parts, s == v.rank, w);
        if (w) p.run_counts[run_of(p, waves, e, w, s)] = tokens_below(from.tokens + first, count, token);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < runs; i += COUNT_THREADS) {
        const int e = i / v.ranks, s = i - e * v.ranks;
        const int count = __ldcg(stripe_at(v, v.rank, s).counts + e),
                  first = p.sent[run_of(p, waves, e, 0, s)];
        for (int w = 0; w < waves; w++) {
            int32_t *rows = p.run_counts + run_of(p, waves, e, w, s);
            const int begin = w ? *rows : 0, end = w + 1 < waves ? rows[v.ranks] : count;
            p.sent[run_of(p, waves, e, w, s)] = first + begin;
            *rows = end - begin;
        }
    }
}

MOE_DEVICE int blocks_of(int rows)
{
    return (rows + MOE_BLOCK_ROWS - 1) / MOE_BLOCK_ROWS;
}

// Rows of an (expert, wave).
MOE_DEVICE int rows_of(const moe_ep_received_plan &p, int place)
{
    int rows = 0;
#pragma unroll 4
    for (int s = 0; s < p.view.ranks; s++) rows += p.run_counts[place * p.view.ranks + s];
    return rows;
}

// starts, offsets, block_offsets and counts. Each thread takes neighbouring (expert, wave).
MOE_DEVICE void place_runs(const moe_ep_received_plan &p, int waves, uint32_t *scratch)
{
    const int places = p.experts * waves, each = (places + COUNT_THREADS - 1) / COUNT_THREADS;
    const int begin = min((int)threadIdx.x * each, places), end = min(begin + each, places);
    uint32_t own_rows = 0, own_blocks = 0;
    for (int i = begin; i < end; i++) {
        const int rows = rows_of(p, i);
        own_rows += rows;
        own_blocks += blocks_of(rows);
    }
    uint32_t row = sum_of_threads_before(own_rows, scratch),
             block = sum_of_threads_before(own_blocks, scratch);
    for (int i = begin; i < end; i++) {
        if (i % waves == 0) {
            p.offsets[i / waves] = (int32_t)row;
            p.block_offsets[i / waves] = (int32_t)block;
        }
        p.run_blocks[i] = (int32_t)block;
        uint32_t at = block * MOE_BLOCK_ROWS;
        for (int s = 0; s < p.view.ranks; s++) {
            p.starts[i * p.view.ranks + s] = (int32_t)at;
            at += p.run_counts[i * p.view.ranks + s];
        }
        const uint32_t rows = at - block * MOE_BLOCK_ROWS;
        row += rows;
        block += blocks_of((int)rows);
    }
    if (threadIdx.x == COUNT_THREADS - 1) {
        p.offsets[p.experts] = (int32_t)row;
        p.block_offsets[p.experts] = p.run_blocks[places] = (int32_t)block;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < p.experts; e += COUNT_THREADS)
        p.counts[e] = p.offsets[e + 1] - p.offsets[e];
}

// A piece of the forward's lists, and one of the backward's.
MOE_DEVICE void write_piece(moe_work *to, int row, int expert, int blocks)
{
    *to = moe_work_make(row, expert, blocks);
}

MOE_DEVICE void write_piece(moe_piece *to, int row, int expert, int blocks)
{
    *to = {row, expert, blocks, -1};
}

// Runs first, first + step, ... below `end`, and of each the blocks low..high - 1. Run i is of expert i /
// waves.
struct some_runs {
    const int32_t *blocks; // the first of each run
    int first, step, end, waves, low, high;
    MOE_DEVICE int block(int run) const
    {
        return min(max(blocks[run], low), high);
    }
};

// Their work lists, by one warp.
template <typename L> MOE_DEVICE void list_runs(const L &lists, const some_runs &runs, int piece_limit)
{
    const int lane = threadIdx.x & 31;
    int tiles = 0, pieces = 0;
    for (int first = runs.first; first < runs.end; first += 32 * runs.step) {
        const int run = first + lane * runs.step, e = run / runs.waves;
        const int first_block = run < runs.end ? runs.block(run) : 0;
        const int blocks = run < runs.end ? runs.block(run + 1) - first_block : 0;
        const int row = first_block * MOE_BLOCK_ROWS;
        const int own_tiles = (blocks + MOE_TILE_BLOCKS - 1) / MOE_TILE_BLOCKS,
                  own_pieces = (blocks + piece_limit - 1) / piece_limit;
        const int sum_tiles = (int)sum_up_to_lane((uint32_t)own_tiles, lane),
                  sum_pieces = (int)sum_up_to_lane((uint32_t)own_pieces, lane);
        for (int i = 0; i < own_tiles; i++)
            lists.tiles[tiles + sum_tiles - own_tiles + i] =
                moe_work_make(row + i * MOE_TILE_BLOCKS * MOE_BLOCK_ROWS, e,
                              min((int)MOE_TILE_BLOCKS, blocks - i * MOE_TILE_BLOCKS));
        for (int i = 0; i < own_pieces; i++) {
            const int begin = moe_cut(blocks, own_pieces, i), next = moe_cut(blocks, own_pieces, i + 1);
            write_piece(lists.pieces + pieces + sum_pieces - own_pieces + i, row + begin * MOE_BLOCK_ROWS, e,
                        next - begin);
        }
        tiles += __shfl_sync(~0u, sum_tiles, 31);
        pieces += __shfl_sync(~0u, sum_pieces, 31);
    }
    if (lane) return;
    lists.counts[0] = tiles;
    lists.counts[1] = pieces;
    lists.turn[0] = lists.turn[1] = 0;
}

MOE_DEVICE void count_rows(const moe_ep_received_plan &p, uint32_t *scratch)
{
    const moe_ep_view &v = p.view;
    const int waves = moe_ep_waves(v.parts), runs = p.experts * waves * v.ranks;
    const bool failed = __syncthreads_or(threadIdx.x == 0 && has_failed(v));
    if (!failed) {
        find_runs(p, waves);
        __syncthreads();
        cut_runs(p, waves);
    } else {
        for (int i = threadIdx.x; i < runs; i += COUNT_THREADS) p.run_counts[i] = p.sent[i] = 0;
    }
    __syncthreads();
    place_runs(p, waves, scratch);
    __syncthreads();
    const int wave = threadIdx.x >> 5;
    if (wave < waves)
        list_runs(p.lists[wave], {p.run_blocks, wave, waves, p.experts * waves, waves, 0, INT32_MAX},
                  p.piece_limit);
}

__global__ void __launch_bounds__(COUNT_THREADS, 1) count(const __grid_constant__ moe_ep_received_plan p)
{
    __shared__ uint32_t scratch[32];
    count_rows(p, scratch);
}

MOE_DEVICE void list_wave(const moe_ep_backward_waves &p, int list)
{
    const int runs = p.experts * p.waves, kept = p.past.kept;
    const bool none = p.run_blocks[runs] <= kept;
    if (list < p.waves)
        list_runs(p.lists[list], {p.run_blocks, list, p.waves, runs, p.waves, 0, kept}, p.piece_limit);
    else if (list == p.waves)
        list_runs(p.not_kept, {p.run_blocks, 0, 1, runs, p.waves, kept, INT32_MAX}, p.piece_limit);
    else
        list_runs(p.all, {p.run_blocks, 0, 1, none ? 0 : runs, p.waves, 0, INT32_MAX}, p.piece_limit);
    for (int i = threadIdx.x & 31; list == p.waves && i <= runs; i += 32)
        p.kept_blocks[i] = min(p.run_blocks[i], kept);
}

__global__ void __launch_bounds__(32) backward_waves(const __grid_constant__ moe_ep_backward_waves p)
{
    list_wave(p, blockIdx.x);
}

// ---- place, offsets and map

// Number of the experts first, first + step, ... that come before the expert: by descending count, equal
// counts by ascending id.
MOE_DEVICE int experts_before(const moe_ep_received_plan &p, int expert, int first, int step)
{
    const int own = p.counts[expert];
    int before = 0;
    for (int e = first; e < p.experts; e += step) {
        const int other = p.counts[e];
        before += other > own || (other == own && e < expert);
    }
    return before;
}

MOE_DEVICE void write_order(const moe_ep_received_plan &p, int expert, int before)
{
    p.order[before] = expert;
    p.spans[expert] = MOE_BLOCK_ROWS * (p.block_offsets[expert + 1] - p.block_offsets[expert]);
}

MOE_DEVICE void write_pads(const moe_ep_received_plan &p, int first, int end, int thread, int threads)
{
    for (int row = first + thread; row < end; row += threads) {
        p.row_token[row] = -1;
        p.row_weight[row] = 0.0f;
    }
}

// The rows of an expert that come from a source, by `threads` threads.
MOE_DEVICE void place_rows(const moe_ep_received_plan &p, int waves, int expert, int s, int thread,
                           int threads)
{
    const moe_ep_view &v = p.view;
    const stripe from = stripe_at(v, v.rank, s);
    for (int w = 0; w < waves; w++) {
        const int run = run_of(p, waves, expert, w, s), rows = p.run_counts[run];
        const int first = p.starts[run], sent = p.sent[run];
        for (int i = thread; i < rows; i += threads) {
            const int64_t slot = s * v.max_tokens + __ldcg(from.tokens + sent + i);
            p.row_token[first + i] = (int32_t)slot;
            p.row_weight[first + i] = __ldcg(from.weights + sent + i);
            atomicOr(p.mask + slot * p.words + expert / 32, 1u << (expert & 31));
        }
        const int end = first + rows;
        if (s == v.ranks - 1)
            write_pads(p, end, (end + MOE_BLOCK_ROWS - 1) / MOE_BLOCK_ROWS * MOE_BLOCK_ROWS, thread, threads);
    }
}

__global__ void __launch_bounds__(THREADS) place(const __grid_constant__ moe_ep_received_plan p)
{
    __shared__ uint32_t scratch[THREADS / 32];
    const int ranks = p.view.ranks, expert = blockIdx.x / ranks, s = blockIdx.x - expert * ranks;
    place_rows(p, moe_ep_waves(p.view.parts), expert, s, threadIdx.x, THREADS);
    if (s == 0) {
        const uint32_t before = (uint32_t)experts_before(p, expert, threadIdx.x, THREADS);
        const uint32_t all = sum_of_threads<THREADS / 32>(before, scratch);
        if (threadIdx.x == 0) write_order(p, expert, (int)all);
    }
    write_pads(p, MOE_BLOCK_ROWS * p.block_offsets[p.experts], p.padded_rows,
               (int)(blockIdx.x * THREADS + threadIdx.x), (int)gridDim.x * THREADS);
}

MOE_DEVICE uint32_t rows_of_slot(const moe_ep_received_plan &p, int64_t slot)
{
    uint32_t rows = 0;
    for (int i = 0; i < p.words; i++) rows += __popc(p.mask[slot * p.words + i]);
    return rows;
}

MOE_DEVICE void sum_slots(const moe_ep_received_plan &p, int segment, uint32_t *scratch)
{
    const int64_t slots = p.view.ranks * p.view.max_tokens, first = (int64_t)segment * SEGMENT;
    uint32_t before = 0, own[SLOTS_A_THREAD], sum = 0;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < first * p.words; i += COUNT_THREADS) before += __popc(p.mask[i]);
    before = sum_of_threads<COUNT_THREADS / 32>(before, scratch);
#pragma unroll
    for (int i = 0; i < SLOTS_A_THREAD; i++) {
        const int64_t slot = first + threadIdx.x * SLOTS_A_THREAD + i;
        own[i] = slot < slots ? rows_of_slot(p, slot) : 0;
        sum += own[i];
    }
    uint32_t at = before + sum_of_threads_before(sum, scratch);
#pragma unroll
    for (int i = 0; i < SLOTS_A_THREAD; i++) {
        const int64_t slot = first + threadIdx.x * SLOTS_A_THREAD + i;
        if (slot <= slots) p.token_offsets[slot] = (int32_t)at;
        at += own[i];
    }
}

__global__ void __launch_bounds__(COUNT_THREADS, 1) offsets(const __grid_constant__ moe_ep_received_plan p)
{
    __shared__ uint32_t scratch[32];
    sum_slots(p, blockIdx.x, scratch);
}

// As place_rows.
MOE_DEVICE void map_rows(const moe_ep_received_plan &p, int waves, int expert, int s, int thread, int threads)
{
    for (int w = 0; w < waves; w++) {
        const int run = run_of(p, waves, expert, w, s), rows = p.run_counts[run], first = p.starts[run];
        for (int i = thread; i < rows; i += threads) {
            const int64_t slot = p.row_token[first + i];
            const uint32_t *bits = p.mask + slot * p.words;
            int at = p.token_offsets[slot];
            for (int j = 0; j < expert / 32; j++) at += __popc(bits[j]);
            at += __popc(bits[expert / 32] & ((1u << (expert & 31)) - 1));
            p.token_rows[at] = first + i;
        }
    }
}

__global__ void __launch_bounds__(THREADS) map(const __grid_constant__ moe_ep_received_plan p)
{
    const int ranks = p.view.ranks, expert = blockIdx.x / ranks, s = blockIdx.x - expert * ranks;
    map_rows(p, moe_ep_waves(p.view.parts), expert, s, threadIdx.x, THREADS);
}

// ---- few: for few rows and one wave all of the above in one CTA, and both waits

__global__ void __launch_bounds__(COUNT_THREADS, 1)
    few(const __grid_constant__ moe_ep_received_plan p, const __grid_constant__ moe_ep_begin_call c,
        int64_t *tokens)
{
    __shared__ uint32_t scratch[32];
    const int ranks = p.view.ranks, warp = threadIdx.x >> 5, group = threadIdx.x / FEW_LANES,
              lane = threadIdx.x % FEW_LANES, runs = p.experts * ranks;
    wait_for_previous();
    if (warp == 0) wait_for_headers(c, tokens);
    for (int i = threadIdx.x; i < ranks * p.view.max_tokens * p.words; i += COUNT_THREADS) p.mask[i] = 0;
    __syncthreads();
    count_rows(p, scratch);
    for (int i = group; i < runs; i += COUNT_THREADS / FEW_LANES)
        place_rows(p, 1, i / ranks, i % ranks, lane, FEW_LANES);
    for (int e = warp; e < p.experts; e += COUNT_THREADS / 32) {
        const uint32_t before = __reduce_add_sync(~0u, (uint32_t)experts_before(p, e, threadIdx.x & 31, 32));
        if ((threadIdx.x & 31) == 0) write_order(p, e, (int)before);
    }
    write_pads(p, MOE_BLOCK_ROWS * p.block_offsets[p.experts], p.padded_rows, threadIdx.x, COUNT_THREADS);
    __syncthreads();
    sum_slots(p, 0, scratch);
    __syncthreads();
    for (int i = group; i < runs; i += COUNT_THREADS / FEW_LANES)
        map_rows(p, 1, i / ranks, i % ranks, lane, FEW_LANES);
    if (warp == 0) wait_for_part(p.view, MOE_EP_INPUT, 0);
}

// The same for a backward: a warp for each list, and one that waits.
__global__ void __launch_bounds__(4 * 32, 1)
    few_backward(const __grid_constant__ moe_ep_backward_waves p, const __grid_constant__ moe_ep_begin_call c,
                 int64_t *tokens, int again)
{
    const int warp = threadIdx.x >> 5;
    wait_for_previous();
    if (warp) return list_wave(p, warp - 1);
    wait_for_headers(c, tokens);
    wait_for_part(c.view, MOE_EP_INPUT, 0);
    if (again) wait_for_part(c.view, MOE_EP_AGAIN, 0);
}

} // namespace
} // namespace ep
} // namespace moe

extern "C" cudaError_t moe_cuda_ep_send_routing(const moe_launch *on, const moe_ep_view *v,
                                                const moe_ep_own_plan *plan)
{
    using namespace moe::ep;
    return moe::enqueue(send, (unsigned)(plan->each * v->ranks), THREADS, 0, on->stream, *v, *plan);
}

extern "C" cudaError_t moe_cuda_ep_backward_waves(const moe_launch *on, const moe_ep_backward_waves *p)
{
    return moe::enqueue(moe::ep::backward_waves, (unsigned)p->waves + (p->kept_blocks ? 2 : 0), 32, 0,
                        on->stream, *p);
}

extern "C" cudaError_t moe_cuda_ep_plan_few(const moe_launch *on, const moe_ep_received_plan *p,
                                            const moe_ep_begin_call *c, int64_t *tokens)
{
    using namespace moe::ep;
    return moe::launch_early(few, 1, COUNT_THREADS, 0, on, *p, *c, tokens);
}

extern "C" cudaError_t moe_cuda_ep_enter_few(const moe_launch *on, const moe_ep_backward_waves *p,
                                             const moe_ep_begin_call *c, int64_t *tokens, int again)
{
    return moe::launch_early(moe::ep::few_backward, 1, p->kept_blocks ? 4 * 32 : 2 * 32, 0, on, *p, *c,
                             tokens, again);
}

extern "C" cudaError_t moe_cuda_ep_plan(const moe_launch *on, const moe_ep_received_plan *p)
{
    using namespace moe::ep;
    const int64_t slots = p->view.ranks * p->view.max_tokens;
    const unsigned runs = (unsigned)(p->experts * p->view.ranks);
    cudaError_t status = cudaMemsetAsync(p->mask, 0, (size_t)(slots * p->words) * 4, on->stream);
    if (status == cudaSuccess) status = moe::enqueue(count, 1, COUNT_THREADS, 0, on->stream, *p);
    if (status == cudaSuccess) status = moe::enqueue(place, runs, THREADS, 0, on->stream, *p);
    if (status == cudaSuccess)
        status = moe::enqueue(offsets, (unsigned)(slots / SEGMENT + 1), COUNT_THREADS, 0, on->stream, *p);
    return status == cudaSuccess ? moe::enqueue(map, runs, THREADS, 0, on->stream, *p) : status;
}
