// What ranks tell each other besides rows: descriptions of their groups and of each call, which are compared;
// and flags. One warp each. A description has at most 16 values, a lane each.
#include "common/launch.cuh"
#include "ep/wire.cuh"

namespace moe
{
namespace ep
{
namespace
{

static_assert(MOE_EP_VALUES <= 32, "a lane for each value");
static_assert(sizeof(moe_ep_state) <= MOE_EP_STATE_BYTES, "a window has room for it");

MOE_DEVICE bool same_values(const moe_ep_view &v, moe_ep_reason reason, int source, const int64_t *theirs,
                            const int64_t *ours, int count)
{
    const int lane = threadIdx.x & 31;
    const int64_t own = lane < count ? ours[lane] : 0, other = lane < count ? theirs[lane] : 0;
    const uint32_t differs = __ballot_sync(~0u, own != other);
    if (!differs) return true;
    if (lane == __ffs((int)differs) - 1) fail(v, reason, source, lane, own, other);
    __syncwarp();
    return false;
}

MOE_DEVICE bool meet(const moe_ep_begin_call &c)
{
    const moe_ep_view &v = c.view;
    if (!wait_all(v, MOE_EP_HELLO, 1)) return false;
    for (int r = 0; r < v.ranks; r++)
        if (r != v.rank && !same_values(v, MOE_EP_STRANGER, r, values_at(v, v.rank, v.hello, r),
                                        c.group_values, MOE_EP_GROUP_VALUES))
            return false;
    if ((threadIdx.x & 31) == 0) state_of(v)->met = 1;
    return true;
}

// After a forward in several waves other ranks may still read their own rows, which are computed last. A call
// whose rows have the same size writes elsewhere, so it does not wait for them.
__global__ void __launch_bounds__(32) begin(const __grid_constant__ moe_ep_begin_call c)
{
    const moe_ep_view &v = c.view;
    moe_ep_state *state = state_of(v);
    const uint64_t call = state->call + 1, reading = state->row_bytes == c.row_bytes ? 0 : state->reading;
    __syncwarp();
    if (threadIdx.x == 0) state->call = call;
    __syncwarp();
    if (__any_sync(~0u, has_failed(v))) return;
    if (!state->met && !meet(c)) return;
    if (reading && !wait_all(v, MOE_EP_FREE, moe_ep_mark(reading, 0))) return;
    if ((c.backward || v.parts > 1) && threadIdx.x == 0) {
        state->reading = call;
        state->row_bytes = c.backward ? 0 : c.row_bytes;
    }
    for (int r = 0; r < v.ranks; r++) {
        int64_t *to = values_at(v, r, v.header, v.rank);
        if (threadIdx.x == 0) to[0] = c.tokens;
        if (threadIdx.x < MOE_EP_CALL_VALUES) to[1 + threadIdx.x] = c.call_values[threadIdx.x];
    }
    __syncwarp();
    if (c.backward) signal_all(v, MOE_EP_HEADER, moe_ep_mark(call, 0));
}

MOE_DEVICE bool compare_headers(const moe_ep_begin_call &c)
{
    const moe_ep_view &v = c.view;
    if (!wait_all(v, MOE_EP_HEADER, moe_ep_mark(call_of(v), 0))) return false;
    for (int r = 0; r < v.ranks; r++)
        if (!same_values(v, MOE_EP_MISMATCH, r, values_at(v, v.rank, v.header, r) + 1, c.call_values,
                         MOE_EP_CALL_VALUES))
            return false;
    return true;
}

__global__ void __launch_bounds__(32)
    take_headers(const __grid_constant__ moe_ep_begin_call c, int64_t *tokens)
{
    const bool well = compare_headers(c);
    for (int r = threadIdx.x; r < c.view.ranks; r += 32)
        tokens[r] = well ? *values_at(c.view, c.view.rank, c.view.header, r) : 0;
}

__global__ void __launch_bounds__(32)
    gate(const __grid_constant__ moe_ep_view v, int flag, int part, const moe_ep_past past)
{
    if (past.end && __ldg(past.end) <= past.kept) return;
    wait_all(v, flag, moe_ep_mark(call_of(v), part));
}

__global__ void __launch_bounds__(32) signal(const __grid_constant__ moe_ep_view v, int flag, int part)
{
    if (__any_sync(~0u, has_failed(v))) return;
    signal_all(v, flag, moe_ep_mark(call_of(v), part));
}

} // namespace
} // namespace ep
} // namespace moe

extern "C" cudaError_t moe_cuda_ep_begin(const moe_launch *on, const moe_ep_begin_call *c)
{
    return moe::enqueue(moe::ep::begin, 1, 32, 0, on->stream, *c);
}

extern "C" cudaError_t moe_cuda_ep_take_headers(const moe_launch *on, const moe_ep_begin_call *c,
                                                int64_t *tokens)
{
    return moe::enqueue(moe::ep::take_headers, 1, 32, 0, on->stream, *c, tokens);
}

extern "C" cudaError_t moe_cuda_ep_gate(const moe_launch *on, const moe_ep_view *v, moe_ep_flag flag,
                                        int part, const moe_ep_past *past)
{
    const moe_ep_past always = {};
    return moe::enqueue(moe::ep::gate, 1, 32, 0, on->stream, *v, (int)flag, part, past ? *past : always);
}

extern "C" cudaError_t moe_cuda_ep_signal(const moe_launch *on, const moe_ep_view *v, moe_ep_flag flag,
                                          int part)
{
    return moe::enqueue(moe::ep::signal, 1, 32, 0, on->stream, *v, (int)flag, part);
}
