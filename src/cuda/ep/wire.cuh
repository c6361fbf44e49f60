// How the kernels of layers with ranks signal, wait and give up. ep_window.h has the layout of a window.
#pragma once
#include "ep/flags.cuh"
#include "host/ep_launch.h"

namespace moe
{
namespace ep
{

MOE_DEVICE moe_ep_state *state_of(const moe_ep_view &v)
{
    return (moe_ep_state *)(v.windows[v.rank] + v.state);
}

MOE_DEVICE bool has_failed(const moe_ep_view &v)
{
    return load_now(&state_of(v)->failed) != 0;
}

MOE_DEVICE uint64_t call_of(const moe_ep_view &v)
{
    return __ldcg((const unsigned long long *)&state_of(v)->call);
}

// The line of `source` in the window of `rank`.
MOE_DEVICE uint64_t *flag_at(const moe_ep_view &v, int rank, int flag, int source)
{
    return (uint64_t *)(v.windows[rank] + (flag * MOE_EP_MAX_RANKS + source) * MOE_EP_LINE);
}

MOE_DEVICE int64_t *values_at(const moe_ep_view &v, int rank, uint64_t region, int source)
{
    return (int64_t *)(v.windows[rank] + region) + source * MOE_EP_VALUES;
}

// Row `row` of `source` in a region of the window of `rank`.
MOE_DEVICE char *row_at(const moe_ep_view &v, int rank, uint64_t region, int source, int64_t row,
                        int64_t row_bytes)
{
    return v.windows[rank] + region + (source * v.max_tokens + row) * row_bytes;
}

// ---- Failure: called by one thread

MOE_DEVICE void write_fault(moe_ep_fault *to, const moe_ep_fault &f)
{
    to->call = f.call;
    to->origin = f.origin;
    to->other = f.other;
    for (int i = 0; i < 3; i++) to->values[i] = f.values[i];
    store_release(&to->reason, f.reason);
}

// The first fault of a rank counts. The host and all other ranks are told.
MOE_DEVICE void give_up(const moe_ep_view &v, const moe_ep_fault &f)
{
    if (exchange(&state_of(v)->failed, 1u)) return;
    write_fault(&v.report->fault, f);
    for (int r = 0; r < v.ranks; r++)
        if (r != v.rank) write_fault((moe_ep_fault *)flag_at(v, r, MOE_EP_FAULT, v.rank), f);
}

MOE_DEVICE void fail(const moe_ep_view &v, uint64_t call, moe_ep_reason reason, int other, int64_t a,
                     int64_t b, int64_t c)
{
    give_up(v, {(uint64_t)reason, call, v.rank, other, {a, b, c}});
}

// ---- Flags: called by all lanes of a warp

MOE_DEVICE void signal_all(const moe_ep_view &v, int flag, uint64_t mark)
{
    fence_system();
    for (int r = threadIdx.x & 31; r < v.ranks; r += 32)
        if (r != v.rank) store_release(flag_at(v, r, flag, v.rank), mark);
}

// Passes on the fault of another rank.
MOE_DEVICE void look_for_faults(const moe_ep_view &v)
{
    for (int r = threadIdx.x & 31; r < v.ranks; r += 32) {
        moe_ep_fault *line = (moe_ep_fault *)flag_at(v, v.rank, MOE_EP_FAULT, r);
        if (r != v.rank && load_acquire(&line->reason)) give_up(v, *line);
    }
}

// The other ranks whose flag is below `mark`: the lowest, or -1.
MOE_DEVICE int lowest_missing(const moe_ep_view &v, int flag, uint64_t mark)
{
    for (int first = 0; first < v.ranks; first += 32) {
        const int r = first + (int)(threadIdx.x & 31);
        const bool missing = r < v.ranks && r != v.rank && load_acquire(flag_at(v, v.rank, flag, r)) < mark;
        const uint32_t lanes = __ballot_sync(~0u, missing);
        if (lanes) return first + __ffs((int)lanes) - 1;
    }
    return -1;
}

// In call number `call`: waits until the flags of all other ranks are at least `mark`. False when the group
// has failed.
MOE_DEVICE bool wait_all(const moe_ep_view &v, uint64_t call, int flag, uint64_t mark)
{
    const int lane = threadIdx.x & 31;
    const uint64_t start = nanoseconds();
#pragma unroll 1
    for (uint32_t polls = 1;; polls++) {
        if (__any_sync(~0u, has_failed(v))) return false;
        const int missing = lowest_missing(v, flag, mark);
        if (missing < 0) return true;
        if (polls % 16) continue;
        look_for_faults(v);
        if (lane == 0 && load_now(&v.report->aborted)) fail(v, call, MOE_EP_ABORTED, missing, 0, 0, 0);
        if (lane == 0 && nanoseconds() - start >= v.timeout_ms * 1000000ull)
            fail(v, call, MOE_EP_LATE, missing, flag, v.timeout_ms, 0);
        __syncwarp();
    }
}

// ---- Descriptions of groups and calls, a lane for each value: called by all lanes of a warp

static_assert(MOE_EP_VALUES <= 32, "a lane for each value");

MOE_DEVICE bool same_values(const moe_ep_view &v, uint64_t call, moe_ep_reason reason, int source,
                            const int64_t *theirs, const int64_t *ours, int count)
{
    const int lane = threadIdx.x & 31;
    const int64_t own = lane < count ? ours[lane] : 0, other = lane < count ? theirs[lane] : 0;
    const uint32_t differs = __ballot_sync(~0u, own != other);
    if (!differs) return true;
    if (lane == __ffs((int)differs) - 1) fail(v, call, reason, source, lane, own, other);
    __syncwarp();
    return false;
}

MOE_DEVICE bool meet(const moe_ep_begin_call &c, uint64_t call)
{
    const moe_ep_view &v = c.view;
    if (!wait_all(v, call, MOE_EP_HELLO, 1)) return false;
    for (int r = 0; r < v.ranks; r++)
        if (r != v.rank && !same_values(v, call, MOE_EP_STRANGER, r, values_at(v, v.rank, v.hello, r),
                                        c.group_values, MOE_EP_GROUP_VALUES))
            return false;
    if ((threadIdx.x & 31) == 0) state_of(v)->met = 1;
    return true;
}

// The start of a call (ep_launch.h) in three steps, each by a warp: may it begin, false after a failure; the
// description; and its number, when no other CTA needs the state of the call before.
//
// After a forward in several waves other ranks may still read their own rows, which are computed last. A call
// whose rows have the same size writes elsewhere, so it does not wait for them.
MOE_DEVICE bool may_begin(const moe_ep_begin_call &c, uint64_t call)
{
    const moe_ep_view &v = c.view;
    const moe_ep_state *state = state_of(v);
    const uint64_t reading = state->row_bytes == c.row_bytes ? 0 : state->reading;
    if (__any_sync(~0u, has_failed(v))) return false;
    if (!state->met && !meet(c, call)) return false;
    return !reading || wait_all(v, call, MOE_EP_FREE, moe_ep_mark(reading, 0));
}

MOE_DEVICE void describe_call(const moe_ep_begin_call &c)
{
    const int lane = threadIdx.x & 31;
    for (int r = 0; r < c.view.ranks; r++) {
        int64_t *to = values_at(c.view, r, c.view.header, c.view.rank);
        if (lane == 0) to[0] = c.tokens;
        if (lane < MOE_EP_CALL_VALUES) to[1 + lane] = c.call_values[lane];
    }
    __syncwarp();
}

MOE_DEVICE void count_call(const moe_ep_begin_call &c, uint64_t call)
{
    moe_ep_state *state = state_of(c.view);
    if ((threadIdx.x & 31) == 0) {
        state->call = call;
        if (c.backward || c.view.parts > 1) {
            state->reading = call;
            state->row_bytes = c.backward ? 0 : c.row_bytes;
        }
    }
    __syncwarp();
}

MOE_DEVICE bool compare_headers(const moe_ep_begin_call &c)
{
    const moe_ep_view &v = c.view;
    const uint64_t call = call_of(v);
    if (!wait_all(v, call, MOE_EP_HEADER, moe_ep_mark(call, 0))) return false;
    const int lane = threadIdx.x & 31;
    const bool compares = lane < MOE_EP_CALL_VALUES;
    const int64_t own = compares ? c.call_values[lane] : 0;
    bool differs = false; // of all ranks at once, and then, which is rare, of one after another
#pragma unroll 4
    for (int r = 0; r < v.ranks; r++)
        differs |= compares && values_at(v, v.rank, v.header, r)[1 + lane] != own;
    for (int r = 0; __any_sync(~0u, differs) && r < v.ranks; r++)
        if (!same_values(v, call, MOE_EP_MISMATCH, r, values_at(v, v.rank, v.header, r) + 1, c.call_values,
                         MOE_EP_CALL_VALUES))
            return false;
    return true;
}

// Waits for a part of all other ranks in the current call.
MOE_DEVICE bool wait_for_part(const moe_ep_view &v, int flag, int part)
{
    const uint64_t call = call_of(v);
    return wait_all(v, call, flag, moe_ep_mark(call, part));
}

// tokens (ranks) receives T of each rank, 0 after a failure.
MOE_DEVICE void wait_for_headers(const moe_ep_begin_call &c, int64_t *tokens)
{
    const bool well = compare_headers(c);
    for (int r = threadIdx.x & 31; r < c.view.ranks; r += 32)
        tokens[r] = well ? *values_at(c.view, c.view.rank, c.view.header, r) : 0;
}

// ---- Whole grids: called by all threads of a CTA, after its last store

// True in the first warp of the CTA that comes last, which then sees what all others have stored.
MOE_DEVICE bool comes_last(const moe_ep_view &v, int counter)
{
    __syncthreads();
    if (threadIdx.x >= 32) return false;
    uint32_t *arrived = &state_of(v)->arrived[counter];
    uint32_t before = 0;
    if (threadIdx.x == 0) {
        fence_system();
        before = atomicAdd(arrived, 1u);
    }
    if (__shfl_sync(~0u, before, 0) != gridDim.x - 1) return false;
    if (threadIdx.x == 0) {
        *arrived = 0;
        fence_system(); // this thread has seen that the other CTAs are done
    }
    __syncwarp();
    return true;
}

// The last CTA sets the flag, so that no other launch is needed for it.
MOE_DEVICE void signal_when_done(const moe_ep_view &v, int flag, uint64_t mark)
{
    if (comes_last(v, flag)) signal_all(v, flag, mark);
}

// ---- Routing

struct stripe {
    int32_t *counts, *tokens;
    float *weights;
};

MOE_DEVICE stripe stripe_at(const moe_ep_view &v, int rank, int source)
{
    int32_t *at = (int32_t *)(v.windows[rank] + v.routing + (uint64_t)source * v.routing_stripe);
    return {at, at + v.stripe_experts, (float *)(at + v.stripe_experts + v.pairs)};
}

// The rows of an expert, a number of all ranks' experts, to its rank, by `threads` threads.
MOE_DEVICE void send_rows(const moe_ep_view &v, const moe_ep_own_plan &plan, int global, int thread,
                          int threads)
{
    const int rank = global / plan.each, expert = global - rank * plan.each;
    const int count = __ldg(plan.counts + global), from = MOE_BLOCK_ROWS * __ldg(plan.block_offsets + global);
    const int at = __ldg(plan.offsets + global) - __ldg(plan.offsets + rank * plan.each);
    const stripe to = stripe_at(v, rank, v.rank);
    if (thread == 0) to.counts[expert] = count;
    for (int i = thread; i < count; i += threads) {
        to.tokens[at + i] = __ldg(plan.row_token + from + i);
        to.weights[at + i] = __ldg(plan.row_weight + from + i);
    }
}

// ---- Which ranks have an expert of a token

// The first padded row of the experts of each rank, and the end of the last; in shared memory.
struct rank_rows {
    int32_t first[MOE_EP_MAX_RANKS + 1];
};

MOE_DEVICE void load_rank_rows(rank_rows &to, const moe_ep_view &v, const moe_ep_own_plan &plan)
{
    for (int r = threadIdx.x; r <= v.ranks; r += blockDim.x)
        to.first[r] = MOE_BLOCK_ROWS * __ldg(plan.block_offsets + r * plan.each);
    __syncthreads();
}

MOE_DEVICE int rank_of_row(const rank_rows &rows, int ranks, int row)
{
    int low = 0, high = ranks;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (rows.first[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// The rows of a token ascend, so do their ranks. A warp takes 32 of them at a time: a lane's rank, and the
// lanes that are the first of their rank.
struct rank_batch {
    int rank;
    uint32_t firsts;
};

// `last`: the last rank of the batch before; -1 at first.
MOE_DEVICE rank_batch next_ranks(const rank_rows &rows, const moe_ep_view &v, const int32_t *token_rows,
                                 int begin, int end, int &last)
{
    const int lane = threadIdx.x & 31, at = begin + lane;
    const int rank = at < end ? rank_of_row(rows, v.ranks, __ldg(token_rows + at)) : -1;
    const int left = __shfl_up_sync(~0u, rank, 1), before = lane ? left : last;
    const uint32_t firsts = __ballot_sync(~0u, rank >= 0 && rank != before);
    last = __shfl_sync(~0u, rank, min(end - begin, 32) - 1);
    return {rank, firsts};
}

} // namespace ep
} // namespace moe
