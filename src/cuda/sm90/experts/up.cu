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
#include "sm90/gemm_cooperative.cuh"
#include "sm90/kernels.h"
#include "tma/feed.cuh"
#include "tma/tensor_map.h"
#include "tma/tma.cuh"

namespace moe
{
namespace
{

using namespace gemm_cooperative;

struct up_params {
    CUtensorMap w1;               // 5-D: K, 8 rows, gate and up (or 1), groups of 8 features, experts
    CUtensorMap h;                // 3-D: n columns, gate and up (or 1), rows
    CUtensorMap a;                // 2-D: n columns, rows
    const void *x;                // (T, hidden)
    const void *bias;             // b1 or NULL
    const int32_t *row_token;     // (padded_rows)
    const int32_t *block_offsets; // as in moe_up
    int32_t block_stride;
    moe_cuda_lists lists;
    int32_t hidden, intermediate;
    int32_t gated, interleaved, store_h;
    smoe_activation activation;
    moe_gate_values values;
    // LoRA
    CUtensorMap b1; // B1, as w1
    const void *p1; // (padded_rows, rank)
    int32_t rank;   // 0: none
};

enum {
    LOADERS = 64,
    ROWS_A_LOADER = TILE_ROWS / (LOADERS / 8), // eight threads copy the 128 bytes of a row
    ACTIVATED = STAGING_END,                   // a subtile of A for each store warp
    BARRIERS = ACTIVATED + 2 * MOE_SUBTILE_BYTES,
    FEED = BARRIERS + 8 * (2 * NARROW_SLOTS + 2 * BUFFERS),
    SHARED_BYTES = FEED + feed::BYTES
};
static_assert(SHARED_BYTES <= 232448, "shared memory of an SM");
static_assert(FEED % 16 == 0, "items are 16 bytes");

// Of a tile: columns, and staging buffers of a consumer.
template <bool NARROW> MOE_DEVICE constexpr int columns_of()
{
    return NARROW ? NARROW_COLUMNS : TILE_COLUMNS;
}
template <bool NARROW> MOE_DEVICE constexpr int slots_of()
{
    return NARROW ? NARROW_SLOTS : SLOTS;
}
template <bool NARROW> using layout = ring_layout<slots_of<NARROW>()>;
template <bool NARROW> MOE_DEVICE constexpr int halves_of()
{
    return NARROW ? 1 : 2;
}

// Eight lanes copy the same rows row0 + 8 i of a tile, i < 16, one vector each. Lane `vector` of the eight
// reads the tokens of rows i = 2 vector and 2 vector + 1. If the tile has no second block, its rows have no
// tokens.
MOE_DEVICE int2 read_tokens(const up_params &p, moe_work tile, int row0, int vector)
{
    if (vector >= 4 && moe_work_blocks(tile) == 1) return {-1, -1};
    const int32_t *rows = p.row_token + tile.row + row0 + 16 * vector;
    return {__ldg(rows), __ldg(rows + 8)};
}

// The steps of LoRA, which follow those of K: 64 columns of P1 and of B1.
template <bool NARROW>
MOE_DEVICE void load_low_rank(const up_params &p, const layout<NARROW> &shared,
                              ring_position<slots_of<NARROW>()> &ring, work_item now, int group, uint32_t to)
{
    const int thread = threadIdx.x - 256, vector = thread & 7, row0 = thread >> 3;
    const int rows = moe_work_blocks(now.tile) * MOE_BLOCK_ROWS;
    for (int k = 0; k < p.rank; k += STEP) {
        barrier_wait(shared.empty(ring.slot), ring.phase);
        const uint32_t slot = shared.slot(ring.slot), full = shared.full(ring.slot);
        if (thread == 0) {
            barrier_expect(full, columns_of<NARROW>() * STEP * 2);
            load_box(slot + A_BYTES, &p.b1, full, k, 0, 0, group, moe_work_expert(now.tile));
        }
        const int column = k + vector * 8;
#pragma unroll 2
        for (int i = 0; i < ROWS_A_LOADER; i++) {
            const int row = row0 + 8 * i;
            const bool real = row < rows && column < p.rank;
            const int64_t element = (int64_t)(now.tile.row + row) * p.rank + column;
            copy16_async_if(real, slot + to + i * 8 * MOE_SUBTILE_ROW_BYTES,
                            (const char *)p.p1 + (real ? element * 2 : 0));
        }
        barrier_arrive_after_copies(full);
        ring.advance();
    }
}

// steps: of K, without those of LoRA.
template <bool NARROW, bool LORA>
MOE_DEVICE void load_tiles(const up_params &p, const layout<NARROW> &shared, feed items, int steps)
{
    const int thread = threadIdx.x - 256, vector = thread & 7, row0 = thread >> 3;
    const uint32_t to = moe_subtile_offset(row0, vector), row_bytes = (uint32_t)p.hidden * 2;
    ring_position<slots_of<NARROW>()> ring(1);
    work_item item = items.read(0);
    int2 next = item.exists() ? read_tokens(p, item.tile, row0, vector) : int2{-1, -1};
    for (int t = 0; item.exists(); t++) {
        const char *from[ROWS_A_LOADER]; // this lane's 16 bytes of the step
        uint32_t real = 0;
#pragma unroll
        for (int i = 0; i < ROWS_A_LOADER; i++) {
            const int row = __shfl_sync(~0u, i & 1 ? next.y : next.x, (thread & 24) | i >> 1);
            real |= (row >= 0 ? 1u : 0u) << i;
            from[i] = (const char *)p.x + (uint64_t)(uint32_t)max(row, 0) * row_bytes + vector * 16;
        }
        const work_item now = item;
        // Takes the next tile, and reads its tokens if it has other rows.
        const auto follow = [&] {
            item = items.read(t + 1);
            if (item.exists() && item.tile.row != now.tile.row)
                next = read_tokens(p, item.tile, row0, vector);
        };
        const int group = now.column * (p.gated ? 16 : 32); // of eight features
        // A tile of many steps is loaded in three loops; the third one also serves tiles of few steps. With
        // one loop and a test for what to do at a step, the compiler would not keep the counters in uniform
        // registers, and every step would take longer.
        const auto load = [&](int first, int end) {
            for (int k = first; k < end; k++) {
                barrier_wait(shared.empty(ring.slot), ring.phase);
                const uint32_t slot = shared.slot(ring.slot), full = shared.full(ring.slot);
                if (thread == 0) {
                    barrier_expect(full, columns_of<NARROW>() * STEP * 2);
                    load_box(slot + A_BYTES, &p.w1, full, k * STEP, 0, 0, group, moe_work_expert(now.tile));
                }
                const uint32_t wanted = k * STEP + vector * 8 < p.hidden ? real : 0;
#pragma unroll
                for (int i = 0; i < ROWS_A_LOADER; i++)
                    copy16_async_if(wanted & 1u << i, slot + to + i * 8 * MOE_SUBTILE_ROW_BYTES, from[i]);
                barrier_arrive_after_copies(full);
#pragma unroll
                for (int i = 0; i < ROWS_A_LOADER; i++) from[i] = advance_by_adds(from[i], STEP * 2);
                ring.advance();
            }
        };
        int done = 0;
        if (items.asks()) {
            load(0, items.asks_at());
            if (thread == 0) barrier_arrive(items.asked());
            done = (LORA ? items.steps : steps) - feed::READ_BEFORE;
            load(items.asks_at(), done);
        }
        follow();
        load(done, steps);
        if constexpr (LORA) load_low_rank<NARROW>(p, shared, ring, now, group, to);
    }
    for (int i = 0; i < slots_of<NARROW>(); i++) { // the last copies have arrived and have been read
        barrier_wait(shared.empty(ring.slot), ring.phase);
        ring.advance();
    }
}

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

// Adds b1 to one half of the accumulators.
template <typename T>
MOE_DEVICE void add_bias(float *acc, const up_params &p, int expert, int column_tile, int half, int lane)
{
    const int n = p.intermediate, feature_step = p.gated && p.interleaved ? 2 : 1;
    const int up_step = p.gated ? p.interleaved ? 1 : n : 0;
    const T *bias = (const T *)p.bias + (int64_t)expert * (p.gated ? 2 * n : n);
#pragma unroll
    for (int octet = 0; octet < 16; octet++) {
        const int feature = moe_octet_feature(column_tile, half, octet, p.gated) + (lane & 3) * 2;
        if (feature < n) {
            const T *at = bias + feature * feature_step + (octet & 1) * up_step;
            const float left = to_float(at[0]), right = to_float(at[feature_step]);
            acc[4 * octet] += left;
            acc[4 * octet + 1] += right;
            acc[4 * octet + 2] += left;
            acc[4 * octet + 3] += right;
        }
    }
}

template <typename T, bool NARROW>
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
            pass_over(ring, shared, steps, done);
            continue;
        }
        multiply<T, true>(acc, ring, shared, steps, consumer, done);
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
            load_tiles<NARROW, LORA>(p, shared, items, steps_of_k);
        else
            store_tiles<T, NARROW>(p, queue, shared, items, warp - 10, lane);
    } else {
        take_registers<216>();
        multiply_tiles<T, NARROW>(p, shared, items, steps, warp >> 2, lane);
    }
}

bool is_narrow(const moe_up &u)
{
    return (u.gated ? 2 : 1) * u.intermediate <= NARROW_COLUMNS;
}

up_params prepare(moe_launch *on, const moe_up &u)
{
    const int halves = u.gated ? 2 : 1;
    const moe_w1 w1 = {u.w1, u.experts, u.hidden, u.intermediate, halves, u.interleaved};
    up_params p = {};
    moe_map_w1(on, &p.w1, &w1, is_narrow(u) ? NARROW_COLUMNS : TILE_COLUMNS);
    if (u.h) moe_map_halves(on, &p.h, u.h, u.h_rows, halves, u.intermediate, MOE_BLOCK_ROWS);
    moe_map_matrix(on, &p.a, u.a, u.rows, u.intermediate, MOE_BLOCK_ROWS);
    p.x = u.x;
    p.bias = u.b1;
    p.row_token = u.row_token;
    p.block_offsets = u.block_offsets;
    p.block_stride = u.block_stride;
    p.lists = u.lists;
    p.hidden = (int32_t)u.hidden;
    p.intermediate = (int32_t)u.intermediate;
    p.gated = u.gated;
    p.interleaved = u.interleaved;
    p.store_h = u.h != NULL;
    p.activation = u.activation;
    p.values = u.values;
    p.rank = (int32_t)u.lora.rank;
    if (!p.rank) return p;
    const moe_w1 b1 = {u.lora.factor, u.experts, u.lora.rank, u.intermediate, halves, 0};
    moe_map_w1(on, &p.b1, &b1, is_narrow(u) ? NARROW_COLUMNS : TILE_COLUMNS);
    p.p1 = u.lora.low;
    return p;
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
