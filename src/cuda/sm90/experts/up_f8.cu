// Up-projection in e4m3: H[r] = (X8[t(r)] W1_8[e]^T) scale_x[t(r)] scale1[e] + b1[e], and A8[r] with its
// scales, which are quantised from act(H[r]) (f8.h).
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Shapes: X8 (T, d), W1_8 (E, h, d) with gate rows before up rows, H (padded rows, h) in dtype, A8 (padded
// rows, n), its scales (padded rows, ceil(n / 128)). FLOPs 2 R d h.
//
// Bytes: X8 R d gathered once for each column tile, W1_8 E d h, H 2 R h, A8 R n, scales of A 4 R n / 128.
//
// Schedule, tiles, ring and staging are those of up.cu; a slot has 128 columns of K instead of 64. K above
// 1536 is promoted (gemm_f8.cuh). What is new:
//
// - The warps that gather rows of X8 also copy each row's scale to shared memory, before the first step of a
//   tile. A consumer reads its scales before it releases the slot of that step. The loaders are at most
//   slots + 1 steps ahead of this slot, so there are so many sets of scales.
// - A scale of A covers 128 features: with a gate a whole column tile, so both halves of a tile's rows. For
//   PROMOTED sums the store warps activate H in staging. Eight lanes have a row. A lane computes eight
//   features of the first 64 and eight of the last 64, and the lanes share the largest magnitude by shuffles.
//   Otherwise a tile is multiplied faster than two warps do that. There the consumers activate their
//   accumulators, since a thread has gate and up value of a feature, and the store warps only store. The
//   tensor cores wait longer between tiles then, so this pays for few steps alone: up takes 0.66 to 0.72 of
//   its time for d = 768, 0.90 to 0.92 for 1536, and would take 1.06 for 4096 (H200).
#include "common/activation.cuh"
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "sm90/f8_kernels.h"
#include "sm90/gemm_f8.cuh"
#include "sm90/up_tiles.cuh"

namespace moe
{
namespace
{

using namespace up_kernel;

struct up_f8_params : up_params { // x: (T, d) bytes; hidden: d / 2
    const float *x_scale;         // (T)
    const float *w_scale;         // (experts)
    float *a_scale;               // (padded_rows, groups)
    int32_t groups;
};

enum { SCALES = (up_kernel::SHARED_BYTES + 15) / 16 * 16, SET_BYTES = TILE_ROWS * 4 };
template <bool NARROW> MOE_DEVICE constexpr int scale_sets()
{
    return slots_of<NARROW>() + 1;
}
enum { F8_SHARED_BYTES = SCALES + (NARROW_SLOTS + 1) * SET_BYTES };
static_assert(F8_SHARED_BYTES <= 232448, "shared memory of an SM");

// Address of the scale of row `row` of the CTA's tile number t.
template <bool NARROW> MOE_DEVICE uint32_t scale_at(const layout<NARROW> &shared, int t, int row)
{
    return shared.base + SCALES + (t % scale_sets<NARROW>()) * SET_BYTES + row * 4;
}

template <bool NARROW>
MOE_DEVICE void load_tiles_f8(const up_f8_params &p, const layout<NARROW> &shared, feed items, int steps)
{
    const int thread = threadIdx.x - 256, row = (thread >> 3) + 16 * (thread & 7);
    load_tiles<NARROW, false>(p, shared, items, steps, [&](int t, int2 tokens) {
        copy4_async(scale_at<NARROW>(shared, t, row), p.x_scale + max(tokens.x, 0));
        copy4_async(scale_at<NARROW>(shared, t, row + 8), p.x_scale + max(tokens.y, 0));
    });
}

// ---- Consumers

// SUMS accumulators of a thread: two rows, in octets of 8 columns. With a gate, octets of gate and of up
// values take turns; A is left in those of the gate. most: of both rows.
template <typename T, int KIND, int SUMS>
MOE_DEVICE void activate_sums(const moe_gate_values &v, float *acc, float (&most)[2])
{
    using S = storage<T>;
    constexpr bool GATED = activation<T, KIND>::GATED;
#pragma unroll
    for (int i = 0; i < SUMS; i += GATED ? 8 : 4)
#pragma unroll
        for (int row = 0; row < 2; row++) {
            float *a = acc + i + 2 * row;
            const uint32_t gate = S::pack(a[0], a[1]); // H as it is stored
            const uint32_t up = GATED ? S::pack(a[4], a[5]) : gate;
            a[0] = activate<T, KIND>(S::low(gate), S::low(up), v);
            a[1] = activate<T, KIND>(S::high(gate), S::high(up), v);
            most[row] = larger_or_nan(larger_or_nan(most[row], fabsf(a[0])), fabsf(a[1]));
        }
}

// The group of A whose values activate_sums has left: bytes to `out`, 64 rows of 128 bytes with the swizzle,
// and the scales, of which `scales` is the first row's. Four lanes have a row.
template <int SUMS, int OCTET>
MOE_DEVICE void quantize_sums(const float *acc, float (&most)[2], uint32_t out, float *scales, int groups,
                              int lane)
{
    const int row = ((threadIdx.x >> 5) & 3) * 16 + (lane >> 2);
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        most[i] = larger_or_nan(most[i], __shfl_xor_sync(~0u, most[i], 1));
        most[i] = larger_or_nan(most[i], __shfl_xor_sync(~0u, most[i], 2));
        const uint32_t amax = __float_as_uint(most[i]);
        factor[i] = moe_f8_factor(amax);
        if ((lane & 3) == 0) scales[(row + 8 * i) * groups] = moe_f8_scale(amax);
    }
#pragma unroll
    for (int i = 0; i < SUMS; i += OCTET) {
        const int octet = i / OCTET;
        const uint32_t four = pack_e4m3(acc[i] * factor[0], acc[i + 1] * factor[0], acc[i + 2] * factor[1],
                                        acc[i + 3] * factor[1]);
        const uint32_t to = out + moe_subtile_offset(row, octet >> 1) + (octet & 1) * 8 + (lane & 3) * 2;
        store_shared2(to, four);
        store_shared2(to + 8 * MOE_SUBTILE_ROW_BYTES, four >> 16);
    }
}

// The consumer's `count`-th tile: H goes to staging, A8 to `out` with the last half of its group. With a gate
// the A8 before has left `out` when the buffer of the last half is empty; without, when that of the other
// half is.
template <typename T, int KIND, bool NARROW>
MOE_DEVICE void finish_as(const up_f8_params &p, const layout<NARROW> &shared, work_item item,
                          float (&acc)[columns_of<NARROW>() / 2], int consumer, uint32_t count, int lane)
{
    constexpr bool GATED = activation<T, KIND>::GATED;
    constexpr int LAST = halves_of<NARROW>() - 1, SUMS = GATED ? columns_of<NARROW>() / 2 : 64;
    const uint32_t out = shared.base + ACTIVATED + consumer * MOE_SUBTILE_BYTES;
#pragma unroll
    for (int half = 0; half <= LAST; half++) {
        const uint32_t buffer = consumer * 2 + half;
        barrier_wait(shared.buffer_empty(buffer), (count & 1) ^ 1);
        if (p.store_h) write_octets<T, true>(acc + half * 64, shared.buffer(buffer), GATED, lane);
        const int group = GATED ? item.column : item.column * 2 + half;
        if ((!GATED || half == LAST) && group < p.groups) {
            if (!GATED && !NARROW) // the other half's A8
                barrier_wait(shared.buffer_empty(consumer * 2 + 1 - half), (count & 1) ^ 1 ^ half);
            float *sums = acc + (GATED ? 0 : half * 64), most[2] = {};
            activate_sums<T, KIND, SUMS>(p.values, sums, most);
            const int row = item.tile.row + consumer * MOE_BLOCK_ROWS;
            quantize_sums<SUMS, GATED ? 8 : 4>(sums, most, out, p.a_scale + (int64_t)row * p.groups + group,
                                               p.groups, lane);
        }
        hand_over(shared.buffer_full(buffer), lane);
    }
}

template <typename T, bool NARROW>
MOE_DEVICE void finish_tile(const up_f8_params &p, const layout<NARROW> &shared, work_item item,
                            float (&acc)[columns_of<NARROW>() / 2], int consumer, uint32_t count, int lane)
{
    switch (p.activation) {
#define MOE_FINISH(enumerator, name, shape, curve)                                                           \
    case enumerator: return finish_as<T, enumerator, NARROW>(p, shared, item, acc, consumer, count, lane);
        MOE_ACTIVATIONS(MOE_FINISH)
#undef MOE_FINISH
    }
    __builtin_unreachable(); // the host refuses other values
}

template <typename T, bool NARROW, bool PROMOTED>
MOE_DEVICE void multiply_tiles(const up_f8_params &p, const layout<NARROW> &shared, feed items, int steps,
                               int consumer, int lane)
{
    ring_position<slots_of<NARROW>()> ring(0);
    const release_slot done = {shared, lane};
    const int row = consumer * MOE_BLOCK_ROWS + ((threadIdx.x >> 5) & 3) * 16 + (lane >> 2);
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
        const float w_scale = __ldg(p.w_scale + moe_work_expert(tile));
        barrier_wait(shared.full(ring.slot), ring.phase);
        const float upper = load_shared_float(scale_at<NARROW>(shared, t, row)),
                    lower = load_shared_float(scale_at<NARROW>(shared, t, row + 8));
        if constexpr (PROMOTED)
            multiply_promoted<true>(acc, ring, shared, steps, consumer, done);
        else
            multiply<e4m3, true>(acc, ring, shared, steps, consumer, done);
        // Scales are powers of two, so that it does not matter in which order they multiply the sum.
        const float by[2] = {upper * w_scale, lower * w_scale};
#pragma unroll
        for (int i = 0; i < columns_of<NARROW>() / 2; i++) acc[i] *= by[i >> 1 & 1];
#pragma unroll
        for (int half = 0; half < halves_of<NARROW>(); half++) {
            if (p.bias) add_bias<T>(acc + half * 64, p, moe_work_expert(tile), item.column, half, lane);
            if constexpr (PROMOTED)
                write_half<T, true>(acc + half * 64, shared, consumer, half, count, p.gated, lane);
        }
        if constexpr (!PROMOTED)
            finish_tile<T, NARROW>(p, shared, item, acc, threadIdx.x >> 7, count, lane_again());
        count++;
    }
}

// ---- Store warps that activate

// Subtiles of H with 64 features each (gated: of gate values, with those of the up values behind them) that
// make 128 features of A. second 0: there are only 64.
struct activated_from {
    uint32_t first, second;
};

template <typename T, int KIND>
MOE_DEVICE void activate_eight(const moe_gate_values &v, uint32_t gate, float (&a)[8])
{
    using S = storage<T>;
    const uint4 g4 = load_shared16(gate);
    const uint4 u4 = activation<T, KIND>::GATED ? load_shared16(gate + MOE_SUBTILE_BYTES) : g4;
    const uint32_t g[4] = {g4.x, g4.y, g4.z, g4.w}, u[4] = {u4.x, u4.y, u4.z, u4.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        a[2 * i] = activate<T, KIND>(S::low(g[i]), S::low(u[i]), v);
        a[2 * i + 1] = activate<T, KIND>(S::high(g[i]), S::high(u[i]), v);
    }
}

MOE_DEVICE float largest_of(float most, const float (&a)[8])
{
#pragma unroll
    for (int i = 0; i < 8; i++) most = larger_or_nan(most, fabsf(a[i]));
    return most;
}

MOE_DEVICE void store_eight(uint32_t to, const float (&a)[8], float factor)
{
    store_shared8(to, pack_e4m3(a[0] * factor, a[1] * factor, a[2] * factor, a[3] * factor),
                  pack_e4m3(a[4] * factor, a[5] * factor, a[6] * factor, a[7] * factor));
}

// 64 rows. scales: of the first row; out: 64 rows of 128 bytes with the swizzle. Lane
// i of eight takes features 8 i to 8 i + 7 of both subtiles. The four rows of a step are chosen so that the
// stores of 16 lanes reach all banks.
template <typename T, int KIND>
MOE_DEVICE void activate_rows(const moe_gate_values &v, activated_from from, uint32_t out, float *scales,
                              int groups, int lane)
{
    const int octet = lane & 7, place = ((lane >> 3) & 1) * 4 + (lane >> 4);
#pragma unroll 1
    for (int step = 0; step < MOE_BLOCK_ROWS / 4; step++) {
        const int row = (step >> 1) * 8 + (step & 1) * 2 + place;
        float first[8], second[8] = {};
        activate_eight<T, KIND>(v, from.first + moe_subtile_offset(row, octet), first);
        if (from.second) activate_eight<T, KIND>(v, from.second + moe_subtile_offset(row, octet), second);
        float most = largest_of(largest_of(0.0f, first), second);
#pragma unroll
        for (int i = 1; i < 8; i *= 2) most = larger_or_nan(most, __shfl_xor_sync(~0u, most, i));
        const uint32_t amax = __float_as_uint(most);
        const float factor = moe_f8_factor(amax);
        const uint32_t half = (octet & 1) * 8;
        store_eight(out + moe_subtile_offset(row, octet >> 1) + half, first, factor);
        store_eight(out + moe_subtile_offset(row, 4 + (octet >> 1)) + half, second, factor);
        if (octet == 0) scales[row * groups] = moe_f8_scale(amax);
    }
}

template <typename T>
MOE_DEVICE void activate_rows(const up_f8_params &p, activated_from from, uint32_t out, float *scales,
                              int lane)
{
    switch (p.activation) {
#define MOE_ROWS(enumerator, name, shape, curve)                                                             \
    case enumerator: return activate_rows<T, enumerator>(p.values, from, out, scales, p.groups, lane);
        MOE_ACTIVATIONS(MOE_ROWS)
#undef MOE_ROWS
    }
    __builtin_unreachable(); // the host refuses other values
}

// A8 of 128 features from `feature` on.
template <typename T>
MOE_DEVICE void store_activated(const up_f8_params &p, activated_from from, uint32_t out, int feature,
                                int row, int lane)
{
    if (feature >= p.intermediate) return;
    if (lane == 0) wait_stores_read<0>(); // the store before has read `out`
    __syncwarp();
    activate_rows<T>(p, from, out, p.a_scale + (int64_t)row * p.groups + feature / MOE_F8_A_FEATURES, lane);
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
        store_box(&p.a, out, feature / 2, row);
        commit_stores();
    }
}

// The halves of the consumer's `count`-th tile are in its buffers: starts to store H, then A8.
template <typename T, bool NARROW>
MOE_DEVICE void activate_and_store(const up_f8_params &p, const layout<NARROW> &shared, uint32_t count,
                                   uint32_t out, int column_tile, int consumer, int row, int lane)
{
    const int features = p.gated ? 64 : 128; // of a half
    for (int half = 0; half < halves_of<NARROW>(); half++) {
        const uint32_t buffer = consumer * 2 + half, subtile = shared.buffer(buffer);
        const int feature = (column_tile * 2 + half) * features;
        barrier_wait(shared.buffer_full(buffer), count & 1);
        if (p.store_h && lane == 0) {
            store_box(&p.h, subtile, feature, 0, row);
            store_box(&p.h, subtile + MOE_SUBTILE_BYTES, p.gated ? feature : feature + 64, p.gated, row);
            commit_stores();
        }
        if (!p.gated) store_activated<T>(p, {subtile, subtile + MOE_SUBTILE_BYTES}, out, feature, row, lane);
    }
    if (p.gated)
        store_activated<T>(p, {shared.buffer(consumer * 2), NARROW ? 0 : shared.buffer(consumer * 2 + 1)},
                           out, column_tile * 128, row, lane);
    if (lane == 0) {
        wait_stores_read<0>();
        for (int half = 0; half < halves_of<NARROW>(); half++)
            barrier_arrive(shared.buffer_empty(consumer * 2 + half));
    }
    __syncwarp();
}

// ---- Store warps

// Stores H and A8 of the consumer's `count`-th tile, by one thread.
template <bool NARROW>
MOE_DEVICE void store_tile(const up_f8_params &p, const layout<NARROW> &shared, uint32_t count,
                           int column_tile, int consumer, int row)
{
    const uint32_t out = shared.base + ACTIVATED + consumer * MOE_SUBTILE_BYTES;
    for (int half = 0; half < halves_of<NARROW>(); half++) {
        const uint32_t buffer = consumer * 2 + half, subtile = shared.buffer(buffer);
        const int feature = (column_tile * 2 + half) * (p.gated ? 64 : 128);
        barrier_wait(shared.buffer_full(buffer), count & 1);
        if (p.store_h) {
            store_box(&p.h, subtile, feature, 0, row);
            store_box(&p.h, subtile + MOE_SUBTILE_BYTES, p.gated ? feature : feature + 64, p.gated, row);
        }
        const int group = p.gated ? column_tile : column_tile * 2 + half;
        if ((!p.gated || half == halves_of<NARROW>() - 1) && group < p.groups)
            store_box(&p.a, out, group * (MOE_F8_A_FEATURES / 2), row);
        commit_stores();
        wait_stores_read<0>();
        barrier_arrive(shared.buffer_empty(buffer));
    }
}

template <typename T, bool NARROW, bool PROMOTED>
MOE_DEVICE void store_tiles(const up_f8_params &p, const work_queue &queue, const layout<NARROW> &shared,
                            feed items, int consumer, int lane)
{
    const uint32_t out = shared.base + ACTIVATED + consumer * MOE_SUBTILE_BYTES;
    uint32_t count = 0;
    const bool claims = consumer == 0 && lane == 0;
    if (claims) items.begin(queue);
    for (int t = 0;; t++) {
        const work_item item = items.read(t);
        __syncwarp();
        if (consumer == 1 && lane == 0) barrier_arrive(items.ring.free(t));
        if (!item.exists()) break;
        if (consumer >= moe_work_blocks(item.tile)) continue;
        if (claims) items.claim(t, queue);
        if constexpr (PROMOTED)
            activate_and_store<T, NARROW>(p, shared, count++, out, item.column, consumer,
                                          item.tile.row + consumer * MOE_BLOCK_ROWS, lane);
        else if (lane == 0)
            store_tile<NARROW>(p, shared, count++, item.column, consumer,
                               item.tile.row + consumer * MOE_BLOCK_ROWS);
    }
    if (claims) finish_claims(queue.turn);
    if (lane == 0) wait_stores_done();
}

template <typename T, bool NARROW, bool PROMOTED>
__global__ void __launch_bounds__(THREADS, 1) up_f8(const __grid_constant__ up_f8_params p)
{
    extern __shared__ __align__(1024) char memory[];
    const uint32_t base = shared_address(memory);
    const layout<NARROW> shared = {base, base + BARRIERS};
    const int warp = warp_number(), lane = threadIdx.x & 31;
    const int steps = (p.hidden + STEP - 1) / STEP;
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
            load_tiles_f8<NARROW>(p, shared, items, steps);
        else
            store_tiles<T, NARROW, PROMOTED>(p, queue, shared, items, warp - 10, lane);
    } else {
        take_registers<216>();
        multiply_tiles<T, NARROW, PROMOTED>(p, shared, items, steps, warp >> 2, lane);
    }
}

up_f8_params prepare(moe_launch *on, const moe_f8_up &u)
{
    moe_up pairs = u.up; // bytes are moved as pairs
    pairs.hidden /= 2;
    pairs.interleaved = 0;
    up_f8_params p = {};
    (up_params &)p = up_kernel::prepare(on, pairs);
    moe_map_matrix(on, &p.a, u.up.a, u.up.rows, u.up.intermediate / 2, MOE_BLOCK_ROWS);
    p.interleaved = u.up.interleaved; // of b1
    p.x_scale = u.x_scale;
    p.w_scale = u.w_scale;
    p.a_scale = u.a_scale;
    p.groups = (int32_t)moe_f8_groups(u.up.intermediate, MOE_F8_A_FEATURES);
    return p;
}

template <typename T> auto kernel_of(const moe_f8_up &u)
{
    const bool promoted = moe_divide_up(u.up.hidden, F8_STEP) >= F8_LEAST_PROMOTED;
    if (is_narrow(u.up)) return promoted ? up_f8<T, true, true> : up_f8<T, true, false>;
    return promoted ? up_f8<T, false, true> : up_f8<T, false, false>;
}

} // namespace
} // namespace moe

extern "C" cudaError_t moe_sm90_f8_up_init(const moe_device *device)
{
    using namespace moe;
    return for_every_type(f8_storage_types(), [&](auto t) {
        using T = typename decltype(t)::type;
        for (const auto kernel :
             {up_f8<T, false, false>, up_f8<T, true, false>, up_f8<T, false, true>, up_f8<T, true, true>}) {
            const cudaError_t status = allow_shared(device, kernel, F8_SHARED_BYTES);
            if (status != cudaSuccess) return status;
        }
        return cudaSuccess;
    });
}

extern "C" cudaError_t moe_sm90_f8_up(moe_launch *on, const moe_f8_up *u)
{
    using namespace moe;
    const up_f8_params p = prepare(on, *u);
    if (on->refused_call) return cudaErrorInvalidValue;
    return for_type(f8_storage_types(), on->dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        return enqueue(kernel_of<T>(*u), on->sms, THREADS, F8_SHARED_BYTES, on->stream, p);
    });
}
