// dS of received rows to the ranks of their tokens, and back in the order of each rank's own plan.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// A rank has sent its rows to a peer as a run for each expert; the peer returns dS in the same order. dh
// leaves partial sums of dS, which send adds in their fixed order, as ds.cu does.
//
// Bytes: 4 R for each partial sum read, 4 R sent and 4 R read. No FLOPs to speak of. Tile: a CTA takes one
// expert's run of one source (send), or one expert (take).
#include "common/backward_shared.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "ep/wire.cuh"

namespace moe
{
namespace ep
{
namespace
{

enum { THREADS = 256, FINISH_THREADS = 1024 };

struct run_part {
    int first, rows; // padded rows
};

// The rows of an expert that come from a source and belong to a wave. They end where the next source's start,
// and the last source's where the pad rows start.
MOE_DEVICE run_part part_of(const moe_ep_send_ds &p, int waves, int expert, int wave, int source)
{
    const int32_t *starts = p.starts + (expert * waves + wave) * p.view.ranks;
    const int first = __ldg(starts + source);
    if (source + 1 < p.view.ranks) return {first, __ldg(starts + source + 1) - first};
    if (waves == 1)
        return {first, MOE_BLOCK_ROWS * __ldg(p.block_offsets + expert) + __ldg(p.counts + expert) - first};
    int low = first, high = wave + 1 < waves ? __ldg(starts + p.view.ranks)
                                             : MOE_BLOCK_ROWS * __ldg(p.block_offsets + expert + 1);
    while (low < high) { // the first pad row
        const int middle = (low + high) / 2;
        if (__ldg(p.row_token + middle) >= 0)
            low = middle + 1;
        else
            high = middle;
    }
    return {first, low - first};
}

MOE_DEVICE int rows_of(const moe_ep_send_ds &p, int waves, int expert, int source)
{
    int rows = 0;
    for (int w = 0; w < waves; w++) rows += part_of(p, waves, expert, w, source).rows;
    return rows;
}

__global__ void __launch_bounds__(THREADS) send_ds(const __grid_constant__ moe_ep_send_ds p)
{
    __shared__ uint32_t scratch[THREADS / 32];
    const moe_ep_view &v = p.view;
    if (has_failed(v)) return;
    const int waves = moe_ep_waves(v.parts), expert = blockIdx.x / v.ranks, s = blockIdx.x - expert * v.ranks;
    uint32_t before = 0;
    for (int e = threadIdx.x; e < expert; e += THREADS) before += rows_of(p, waves, e, s);
    before = sum_of_threads<THREADS / 32>(before, scratch);
    float *to = (float *)(v.windows[s] + v.ds + (uint64_t)v.rank * v.ds_stripe) + before;
    for (int w = 0; w < waves; w++) {
        const run_part part = part_of(p, waves, expert, w, s);
        for (int i = threadIdx.x; i < part.rows; i += THREADS)
            to[i] = sum_of_parts(p.partial, p.parts, p.padded_rows, part.first + i);
        to += part.rows;
    }
    if (p.part >= 0) signal_when_done(v, MOE_EP_RETURN, moe_ep_mark(call_of(v), p.part));
}

__global__ void __launch_bounds__(THREADS)
    take_ds(const __grid_constant__ moe_ep_view v, const __grid_constant__ moe_ep_own_plan plan, float *ds)
{
    const int global = blockIdx.x, rank = global / plan.each;
    const int count = __ldg(plan.counts + global), row = MOE_BLOCK_ROWS * __ldg(plan.block_offsets + global);
    const float *from = (const float *)(v.windows[v.rank] + v.ds + (uint64_t)rank * v.ds_stripe) +
                        (__ldg(plan.offsets + global) - __ldg(plan.offsets + rank * plan.each));
    for (int i = threadIdx.x; i < count; i += THREADS) ds[row + i] = __ldcg(from + i);
}

// dS of pair `index`: of the token's rows, the one that is among those of the pair's expert; 0 for a skipped
// or repeated id.
template <typename I>
MOE_DEVICE float ds_of_pair(const moe_ep_view &v, const moe_ep_take_topk &p, int64_t index)
{
    const moe_ep_own_plan &plan = p.plan;
    const int64_t token = index / p.topk;
    const I *ids = (const I *)p.ids + token * p.topk, id = ids[index - token * p.topk];
    for (int64_t k = 0; k < index - token * p.topk; k++)
        if (ids[k] == id) return 0.0f;
    if (id < 0 || id >= plan.each * v.ranks) return 0.0f;
    const int first = MOE_BLOCK_ROWS * __ldg(plan.block_offsets + id),
              end = MOE_BLOCK_ROWS * __ldg(plan.block_offsets + id + 1), rank = (int)id / plan.each;
    const float *from = (const float *)(v.windows[v.rank] + v.ds + (uint64_t)rank * v.ds_stripe) +
                        (__ldg(plan.offsets + id) - __ldg(plan.offsets + rank * plan.each));
    for (int i = __ldg(plan.token_offsets + token); i < __ldg(plan.token_offsets + token + 1); i++) {
        const int row = __ldg(plan.token_rows + i);
        if (row >= first && row < end) return __ldcg(from + (row - first));
    }
    return 0.0f;
}

// The last launch of a call.
__global__ void __launch_bounds__(FINISH_THREADS, 1)
    finish(const __grid_constant__ moe_ep_view v, const __grid_constant__ moe_ep_outputs o,
           const __grid_constant__ moe_ep_take_topk p)
{
    const int64_t first = (int64_t)blockIdx.x * FINISH_THREADS + threadIdx.x,
                  step = (int64_t)gridDim.x * FINISH_THREADS;
    wait_for_previous();
    if (!has_failed(v)) {
        for (int64_t i = first; i < p.tokens * p.topk; i += step)
            p.gradient[i] = p.wide_index ? ds_of_pair<int64_t>(v, p, i) : ds_of_pair<int32_t>(v, p, i);
        return;
    }
    for (int i = 0; i < MOE_EP_OUTPUTS; i++)
        for (int64_t j = first; o.at[i] && j < o.bytes[i] / 2; j += step) ((uint16_t *)o.at[i])[j] = 0xffffu;
}

} // namespace
} // namespace ep
} // namespace moe

extern "C" cudaError_t moe_cuda_ep_send_ds(const moe_launch *on, const moe_ep_send_ds *p)
{
    using namespace moe::ep;
    return moe::enqueue(send_ds, (unsigned)(p->experts * p->view.ranks), THREADS, 0, on->stream, *p);
}

extern "C" cudaError_t moe_cuda_ep_take_ds(const moe_launch *on, const moe_ep_view *v,
                                           const moe_ep_own_plan *plan, float *ds)
{
    using namespace moe::ep;
    return moe::enqueue(take_ds, (unsigned)(plan->each * v->ranks), THREADS, 0, on->stream, *v, *plan, ds);
}

extern "C" cudaError_t moe_cuda_ep_finish(const moe_launch *on, const moe_ep_view *v, const moe_ep_outputs *o,
                                          const moe_ep_take_topk *p)
{
    using namespace moe::ep;
    const moe_ep_take_topk none = {}, &taken = p ? *p : none;
    const unsigned ctas = (unsigned)on->sms;
    return v->parts == 1 ? moe::launch_early(finish, ctas, FINISH_THREADS, 0, on, *v, *o, taken)
                         : moe::enqueue(finish, ctas, FINISH_THREADS, 0, on->stream, *v, *o, taken);
}
