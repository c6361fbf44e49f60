// Up-projection: H[r] = X[t(r)] W1[e]^T + b1[e], A[r] = act(H[r]).
// For few rows few_rows.cu computes them. With LoRA P1[r] B1[e]^T is added to H[r], as more steps of K.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Shapes: X (T, d), W1 (E, h, d), H (padded rows, h), A (padded rows, n), where h is 2n with a gate and n
// without. FLOPs 2 R d h.
//
// Bytes, of 16-bit elements:
// - X: 2 R d, gathered once for each column tile. L2 can serve every column tile after the first.
// - W1: 2 E d h, read once if L2 serves all row tiles of each expert except its first.
// - H: 2 R h written; nothing for inference.
// - A: 2 R n written.
//
// Tile: 128 x 256 on the cooperative core (gemm_cooperative.cuh). A larger tile would leave no room
// in shared memory for staging, the buffers through which finished tiles are stored. NARROW: 128 x 128, for
// h <= 128.
//
// Warps 8 and 9 gather rows of X with cp.async into the ring of shared memory that feeds wgmma. They write
// zeros for pad rows and for columns past d. Warps 10 and 11
// store H from staging, apply the activation to H in staging, and store A.
//
// With a gate the tensor map of W1 delivers 8 gate rows, then the 8 up rows of the same features, and so on.
// So the 256 columns of a tile are the gate columns and the up columns of 128 features, and the 128 columns
// of a narrow tile those of 64. The consumers write gate values and up values to separate subtiles of staging
// (64 columns each), at equal positions. There a store warp reads both values of a feature to compute A.
#include "common/activate_subtile.cuh"
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "sm90/up_tiles.cuh"

namespace moe
{
namespace
{

using namespace up_kernel;

// Activates a subtile of H that is in staging at `subtile` (gated: with the up subtile behind it), and stores
// A.
template <typename T>
MOE_DEVICE void store_activated(const up_params &p, uint32_t subtile, uint32_t out, int feature, int row,
                                int lane)
{
    activate_subtile<T>(p.activation, p.values, subtile, subtile + MOE_SUBTILE_BYTES, out, lane);
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
        store_box(&p.a, out, feature, row);
        commit_stores();
    }
}

// A store warp stores its consumer's buffers, one after the other.
template <typename T, bool NARROW>
MOE_DEVICE void store_tiles(const up_params &p, const work_queue &queue, const layout<NARROW> &shared,
                            feed items, int consumer, int lane)
{
    const uint32_t out = shared.base + ACTIVATED + consumer * MOE_SUBTILE_BYTES;
    const int buffer_features = p.gated ? 64 : 128;
    uint32_t count = 0;
    const bool claims = consumer == 0 && lane == 0;
    if (claims) items.begin(queue);
    for (int t = 0;; t++) {
        const work_item item = items.read(t);
        __syncwarp();
        if (consumer == 1 && lane == 0) barrier_arrive(items.ring.free(t));
        if (!item.exists()) break;
        const moe_work tile = item.tile;
        if (consumer >= moe_work_blocks(tile)) continue;
        if (claims) items.claim(t, queue);
        const int row = tile.row + consumer * MOE_BLOCK_ROWS;
        for (int half = 0; half < halves_of<NARROW>(); half++) {
            const uint32_t buffer = consumer * 2 + half, subtile = shared.buffer(buffer);
            const int feature = (item.column * 2 + half) * buffer_features;
            barrier_wait(shared.buffer_full(buffer), count & 1);
            if (p.store_h && lane == 0) {
                store_box(&p.h, subtile, feature, 0, row);
                if (p.gated)
                    store_box(&p.h, subtile + MOE_SUBTILE_BYTES, feature, 1, row);
                else
                    store_box(&p.h, subtile + MOE_SUBTILE_BYTES, feature + 64, 0, row);
            }
            if (lane == 0) commit_stores();
            if (feature < p.intermediate) store_activated<T>(p, subtile, out, feature, row, lane);
            if (!p.gated && feature + 64 < p.intermediate) {
                if (lane == 0) wait_stores_read<0>(); // the store of the first subtile has read `out`
                __syncwarp();
                store_activated<T>(p, subtile + MOE_SUBTILE_BYTES, out, feature + 64, row, lane);
            }
            if (lane == 0) {
                wait_stores_read<0>();
                barrier_arrive(shared.buffer_empty(buffer));
            }
            __syncwarp(); // no lane writes to `out` before its store has been read
        }
        count++;
    }
    if (claims) finish_claims(queue.turn);
    if (lane == 0) wait_stores_done();
}

// steps: of K, without those of LoRA.
template <typename T, bool NARROW, bool LORA>
MOE_DEVICE void multiply_tiles(const up_params &p, const layout<NARROW> &shared, feed items, int steps,
                               int consumer, int lane)
{
    ring_position<slots_of<NARROW>()> ring(0);
    const release_slot done = {shared, lane};
    uint32_t count = 0;
    float acc[columns_of<NARROW>() / 2];
    for (int t = 0;; t++) {
        const work_item item = items.read(t);
        if (!item.exists()) break;
        const moe_work tile = item.tile;
        if (consumer >= moe_work_blocks(tile)) {
            pass_over(ring, shared, LORA ? items.steps : steps, done);
            continue;
        }
        multiply<T, true, K_MAJOR, K_MAJOR, false, LORA>(acc, ring, shared, steps, consumer, done, p.rank);
#pragma unroll
        for (int half = 0; half < halves_of<NARROW>(); half++) {
            if (p.bias) add_bias<T>(acc + half * 64, p, moe_work_expert(tile), item.column, half, lane);
            write_half<T, true>(acc + half * 64, shared, consumer, half, count, p.gated, lane);
        }
        count++;
    }
}

template <typename T, bool NARROW, bool LORA>
__global__ void __launch_bounds__(THREADS, 1) up(const __grid_constant__ up_params p)
{
    extern __shared__ __align__(1024) char memory[];
    const uint32_t base = shared_address(memory);
    const layout<NARROW> shared = {base, base + BARRIERS};
    const int warp = warp_number(), lane = threadIdx.x & 31;
    const int steps_of_k = (p.hidden + STEP - 1) / STEP;
    const int steps = LORA ? steps_of_k + (p.rank + STEP - 1) / STEP : steps_of_k;
    const feed items = {{base + FEED}, steps};
    if (threadIdx.x == 0) {
        items.init();
        init_barriers(shared, 1 + LOADERS);
    }
    __syncthreads();
    const int tile_features = p.gated ? 128 : 256;
    const work_queue queue(p, (p.intermediate + tile_features - 1) / tile_features);
    if (warp >= 8) {
        give_registers<72>();
        if (warp < 10)
            load_tiles<NARROW, LORA>(p, shared, items, steps_of_k, [](int, int2) {});
        else
            store_tiles<T, NARROW>(p, queue, shared, items, warp - 10, lane);
    } else {
        take_registers<216>();
        multiply_tiles<T, NARROW, LORA>(p, shared, items, steps_of_k, warp >> 2, lane);
    }
}

template <typename T> auto kernel_of(const moe_up &u)
{
    if (u.lora.rank) return is_narrow(u) ? up<T, true, true> : up<T, false, true>;
    return is_narrow(u) ? up<T, true, false> : up<T, false, false>;
}

} // namespace
} // namespace moe

extern "C" cudaError_t moe_sm90_up_init(const moe_device *device)
{
    using namespace moe;
    return for_every_type(storage_types(), [&](auto t) {
        using T = typename decltype(t)::type;
        for (const auto kernel :
             {up<T, false, false>, up<T, true, false>, up<T, false, true>, up<T, true, true>}) {
            const cudaError_t status = allow_shared(device, kernel, SHARED_BYTES);
            if (status != cudaSuccess) return status;
        }
        return cudaSuccess;
    });
}

extern "C" int moe_sm90_stores(smoe_type dtype)
{
    using namespace moe;
    return for_type(storage_types(), dtype, [](auto) { return cudaSuccess; }) == cudaSuccess;
}

extern "C" cudaError_t moe_sm90_up(moe_launch *on, const moe_up *u)
{
    using namespace moe;
    const up_params p = prepare(on, *u);
    if (on->refused_call) return cudaErrorInvalidValue;
    return for_type(storage_types(), on->dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        return enqueue(kernel_of<T>(*u), on->sms, THREADS, SHARED_BYTES, on->stream, p);
    });
}
