// What ranks tell each other besides rows: descriptions of their groups and of each call, which are compared;
// and flags. One warp each. wire.cuh has what the kernels for few rows do too.
#include "common/launch.cuh"
#include "ep/wire.cuh"

namespace moe
{
namespace ep
{
namespace
{

static_assert(sizeof(moe_ep_state) <= MOE_EP_STATE_BYTES, "a window has room for it");

__global__ void __launch_bounds__(32) begin(const __grid_constant__ moe_ep_begin_call c)
{
    const uint64_t call = call_of(c.view) + 1;
    if (!may_begin(c, call)) return;
    count_call(c, call);
    describe_call(c);
    if (c.backward) signal_all(c.view, MOE_EP_HEADER, moe_ep_mark(call, 0));
}

__global__ void __launch_bounds__(32)
    take_headers(const __grid_constant__ moe_ep_begin_call c, int64_t *tokens)
{
    wait_for_headers(c, tokens);
}

__global__ void __launch_bounds__(32)
    gate(const __grid_constant__ moe_ep_view v, int flag, int part, const moe_ep_past past)
{
    if (past.end && __ldg(past.end) <= past.kept) return;
    wait_for_part(v, flag, part);
}

__global__ void __launch_bounds__(32) free_and_gate(const __grid_constant__ moe_ep_view v, int flag, int part)
{
    if (__any_sync(~0u, has_failed(v))) return;
    signal_all(v, MOE_EP_FREE, moe_ep_mark(call_of(v), 0));
    wait_for_part(v, flag, part);
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

extern "C" cudaError_t moe_cuda_ep_free_and_gate(const moe_launch *on, const moe_ep_view *v, moe_ep_flag flag,
                                                 int part)
{
    return moe::enqueue(moe::ep::free_and_gate, 1, 32, 0, on->stream, *v, (int)flag, part);
}

extern "C" cudaError_t moe_cuda_ep_signal(const moe_launch *on, const moe_ep_view *v, moe_ep_flag flag,
                                          int part)
{
    return moe::enqueue(moe::ep::signal, 1, 32, 0, on->stream, *v, (int)flag, part);
}
