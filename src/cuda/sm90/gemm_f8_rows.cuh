// Rows of e4m3 times an expert's weights of e4m3, where the scale of a row changes along K: for down_f8.cu
// and dx_rows_f8.cu, with their kernels' launches. Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Up to K = 512 the weight-stationary core computes it (gemm_stationary.cuh), whose places for weights hold
// so much, else the cooperative one (gemm_cooperative_rows.cuh), which also adds a bias. The consumers of the
// stationary core take no turns at the tensor cores: while one waits for its products or changes units, the
// other multiplies.
//
// P, the kernel's parameters, has a_scale (padded rows, groups), w_scale (experts) and groups besides those
// of the cores. operands<P> also has group(p, k), the group of step k, 128 of K.
#pragma once
#include "common/launch.cuh"
#include "sm90/gemm_choice.h"
#include "sm90/gemm_cooperative_rows.cuh"
#include "sm90/gemm_f8.cuh"
#include "sm90/gemm_stationary.cuh"
#include "tma/tensor_map.h"

namespace moe
{

// The scales of this thread's two rows; row: the first of the consumer's 64.
template <class P> struct row_scales {
    const P &p;
    const float *upper, *lower;
    MOE_DEVICE row_scales(const P &params, int row, int lane) : p(params)
    {
        upper = p.a_scale + (int64_t)(row + ((threadIdx.x >> 5) & 3) * 16 + (lane >> 2)) * p.groups;
        lower = upper + 8 * p.groups;
    }
    MOE_DEVICE void load(float (&scale)[2], int group) const
    {
        scale[0] = __ldg(upper + group);
        scale[1] = __ldg(lower + group);
    }
    MOE_DEVICE void load_of_step(float (&scale)[2], int k) const
    {
        load(scale, operands<P>::group(p, k));
    }
};

// Multiplies the accumulators by a factor for each of the two rows.
MOE_DEVICE void scale_rows(float (&acc)[128], float upper, float lower)
{
#pragma unroll
    for (int i = 0; i < 128; i++) acc[i] *= i & 2 ? lower : upper;
}

// ---- The cooperative core

namespace gemm_f8_tiles
{

using namespace gemm_cooperative_rows;

// The largest scale of each of the two rows; four neighbouring lanes have the same rows.
template <class P> MOE_DEVICE void largest_scales(float (&most)[2], const row_scales<P> &scales, int lane)
{
    most[0] = most[1] = 0.0f;
    for (int g = lane & 3; g < scales.p.groups; g += 4) {
        float scale[2];
        scales.load(scale, g);
        most[0] = fmaxf(most[0], scale[0]);
        most[1] = fmaxf(most[1], scale[1]);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 1));
        most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 2));
    }
}

// acc = the rows' sums, in units of unit[].
template <bool PROMOTED, class P, class Done>
MOE_DEVICE void multiply_scaled(float (&acc)[128], float (&unit)[2], ring_position<SLOTS> &ring,
                                const shared_layout &shared, const row_scales<P> &scales, int steps,
                                int consumer, const Done &done, int lane)
{
    promoted_sums<PROMOTED ? 128 : 2> sums;
    float scale[2], most[2], f16 = 0.0f;
    scales.load_of_step(scale, 0);
    if (PROMOTED) {
        largest_scales(most, scales, lane);
        f16 = promotion_scale(steps);
    }
    row_units units(scale);
    for (int k = 0; k < steps; k++) {
        const bool keep = PROMOTED ? k % F8_PROMOTED_STEPS != 0 : k != 0;
        if (k) units.change(acc, scale);
        if (k + 1 < steps) scales.load_of_step(scale, k + 1);
        barrier_wait(shared.full(ring.slot), ring.phase);
        const uint32_t slot = shared.slot(ring.slot);
        multiply_slot(acc, slot + consumer * MOE_SUBTILE_BYTES, slot + A_BYTES, keep);
        done(ring.slot);
        ring.advance();
        if constexpr (PROMOTED)
            if (k % F8_PROMOTED_STEPS == F8_PROMOTED_STEPS - 1 && k + 1 < steps)
                sums.add(acc, {units.unit[0] * inverse_of_power(most[0]) * f16,
                               units.unit[1] * inverse_of_power(most[1]) * f16});
    }
    unit[0] = units.unit[0], unit[1] = units.unit[1];
    if constexpr (PROMOTED) {
        scale_rows(acc, unit[0] * inverse_of_power(most[0]), unit[1] * inverse_of_power(most[1]));
        sums.add_to(acc, {1.0f / f16, 1.0f / f16});
        unit[0] = most[0], unit[1] = most[1];
    }
}

template <typename T, bool PROMOTED, class P>
MOE_DEVICE void multiply_tiles(const P &p, const shared_layout &shared, feed items, int steps, int consumer,
                               int lane)
{
    ring_position<SLOTS> ring(0);
    const release_slot done = {shared, lane};
    uint32_t count = 0;
    float acc[128];
    for (int t = 0;; t++) {
        const work_item item = items.read(t);
        if (!item.exists()) break;
        const moe_work tile = item.tile;
        if (consumer >= moe_work_blocks(tile)) {
            pass_over(ring, shared, steps, done);
            continue;
        }
        const float w_scale = __ldg(p.w_scale + moe_work_expert(tile));
        float unit[2];
        multiply_scaled<PROMOTED>(acc, unit, ring, shared,
                                  row_scales<P>(p, tile.row + consumer * MOE_BLOCK_ROWS, lane), steps,
                                  consumer, done, lane);
        scale_rows(acc, unit[0] * w_scale, unit[1] * w_scale);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            [[maybe_unused]] const int column = item.column * TILE_COLUMNS + half * 128;
            if constexpr (operands<P>::HAS_BIAS)
                if (p.bias) add_bias<T>(acc + half * 64, p, moe_work_expert(tile), column, lane);
            write_half<T, false>(acc + half * 64, shared, consumer, half, count, 0, lane);
        }
        count++;
    }
}

template <typename T, bool PROMOTED, class P>
__global__ void __launch_bounds__(THREADS, 1) kernel(const __grid_constant__ P p)
{
    extern __shared__ __align__(1024) char memory[];
    const uint32_t base = shared_address(memory);
    const shared_layout shared = {base, base + BARRIERS};
    const int warp = warp_number(), lane = threadIdx.x & 31;
    const int steps = operands<P>::steps(p);
    const feed items = {{base + FEED}, steps};
    if (threadIdx.x == 0) {
        items.init();
        init_barriers(shared, 1);
    }
    __syncthreads();
    const work_queue queue(p, (p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS);
    if (warp >= 8) {
        give_registers<40>();
        if (warp == 8 && lane == 0) load_tiles(p, shared, items, steps);
        if (warp >= 10 && lane == 0) store_tiles(p, queue, shared, items, warp - 10);
    } else {
        take_registers<232>();
        multiply_tiles<T, PROMOTED>(p, shared, items, steps, warp >> 2, lane);
    }
}

} // namespace gemm_f8_tiles

// ---- The weight-stationary core

namespace gemm_f8_stationary
{

using namespace gemm_stationary;

// The scales of a block's rows come with its first slot, so that no consumer waits for them: behind the
// core's shared memory, from the place of that slot on, as many places as the block has slots.
enum { SCALES = SHARED_BYTES, SCALE_BYTES = MOE_BLOCK_ROWS * 4, ALL_BYTES = SCALES + SLOTS * SCALE_BYTES };
static_assert(SCALES % 16 == 0 && ALL_BYTES <= 232448, "shared memory of an SM");
static_assert((int)SLOTS % (int)MOST_SLICES == 0, "a block's places do not go beyond the last one");

template <int SLICES, class P>
MOE_DEVICE void load_scaled_rows(const P &p, item_walk<P> walk, const shared_layout &shared)
{
    ring_position<SLOTS> ring(1);
    const uint32_t bytes = SCALE_BYTES * p.groups; // groups <= SLICES
    operands<P>::prefetch(p);
    for (item it; walk.next(it);)
        for (int block = 0; block < it.blocks; block++)
#pragma unroll 1
            for (int j = 0; j < SLICES; j++) {
                const moe_work rows = it.block(block);
                const uint32_t full = shared.full(ring.slot);
                barrier_wait(shared.empty(ring.slot), ring.phase);
                barrier_expect(full, SLOT_BYTES + (j == 0 ? bytes : 0));
                if (j == 0)
                    load_bytes(shared.base + SCALES + ring.slot * SCALE_BYTES,
                               p.a_scale + (int64_t)rows.row * p.groups, bytes, full);
                operands<P>::load_rows(p, shared.slot(ring.slot), full, j, rows);
                ring.advance();
            }
}

// The scales of this thread's two rows for every slot. from: the block's.
template <int SLICES, class P>
MOE_DEVICE void read_scales(float (&scale)[SLICES][2], const P &p, uint32_t from, int steps, int lane)
{
    const int row = ((threadIdx.x >> 5) & 3) * 16 + (lane >> 2);
#pragma unroll
    for (int j = 0; j < SLICES; j++) {
        const int group = operands<P>::group(p, min(j, steps - 1));
        scale[j][0] = load_shared_float(from + (row * p.groups + group) * 4);
        scale[j][1] = load_shared_float(from + ((row + 8) * p.groups + group) * 4);
    }
    __syncwarp(); // before lane 0 releases the slot
}

// acc = a block's rows times the unit's columns, in units of unit[]. first, last: the consumer's first and
// last block with these weights.
template <int SLICES, class P>
MOE_DEVICE void multiply_block(float (&acc)[128], float (&unit)[2], ring_position<SLOTS> ring,
                               const shared_layout &shared, const P &p, bool first, bool last,
                               slice_set<SLICES> weights, int steps, int lane)
{
    float scale[SLICES][2];
    barrier_wait(shared.full(ring.slot), ring.phase);
    read_scales<SLICES>(scale, p, shared.base + SCALES + ring.slot * SCALE_BYTES, steps, lane);
    row_units units(scale[0]);
#pragma unroll
    for (int j = 0; j < SLICES; j++) {
        if (j) units.change(acc, scale[j]);
        if (first) barrier_wait(shared.slice_full(weights.first + j), weights.phase);
        barrier_wait(shared.full(ring.slot), ring.phase);
        multiply_slot(acc, shared.slot(ring.slot), shared.slice(weights.first + j), j != 0);
        if (lane == 0) {
            barrier_arrive(shared.empty(ring.slot));
            if (last) barrier_arrive(shared.slice_empty(weights.first + j));
        }
        ring.advance();
    }
    unit[0] = units.unit[0], unit[1] = units.unit[1];
}

template <typename T, int SLICES, class P>
MOE_DEVICE void multiply_blocks(const P &p, item_walk<P> walk, const shared_layout &shared, int consumer,
                                int lane)
{
    float acc[128];
    const int steps = operands<P>::steps(p);
    uint32_t done = 0, count = 0, items = 0;
    for (item it; walk.next(it); done += it.blocks, items++) {
        const slice_set<SLICES> weights(items);
        const float w_scale = __ldg(p.w_scale + it.expert);
        const int own = (consumer - done) & 1;
        if (own >= it.blocks) pass_over(shared, weights, lane);
        for (int block = own; block < it.blocks; block += 2) {
            ring_position<SLOTS> ring(0);
            ring.advance((done + block) * SLICES % (2 * SLOTS));
            float unit[2];
            multiply_block(acc, unit, ring, shared, p, block == own, block + 2 >= it.blocks, weights, steps,
                           lane);
            scale_rows(acc, unit[0] * w_scale, unit[1] * w_scale);
            write_half<T, SLICES>(acc, shared, consumer, count++, lane);
            write_half<T, SLICES>(acc + 64, shared, consumer, count++, lane);
        }
    }
}

template <typename T, int SLICES, class P>
__global__ void __launch_bounds__(THREADS, 1) kernel(const __grid_constant__ P p)
{
    extern __shared__ __align__(1024) char memory[];
    const shared_layout shared = {shared_address(memory)};
    const int warp = warp_number(), lane = threadIdx.x & 31;
    if (threadIdx.x == 0) init_barriers(shared);
    const int pieces = __ldg(p.lists.counts + 1),
              column_tiles = (p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    int *before = (int *)memory; // until the first slice is loaded
    cta_shares *shares = (cta_shares *)(memory + SHARES);
    sum_pieces(p, pieces, before, shares->sums);
    unit_list<P> list = {p, column_tiles, 0};
    const moe_share rest = share_units({before, pieces, column_tiles, (int)gridDim.x}, &list.waves, shares);
    const item_walk<P> walk(list, rest);
    if (warp >= 8) {
        give_registers<40>();
        if (lane == 0) {
            if (warp == 8)
                load_scaled_rows<SLICES>(p, walk, shared);
            else if (warp == 9)
                load_weights<SLICES>(p, walk, shared);
            else
                store_blocks<SLICES>(p, walk, shared, warp - 10);
        }
    } else {
        take_registers<232>();
        multiply_blocks<T, SLICES>(p, walk, shared, warp >> 2, lane);
    }
}

template <typename T, class P> auto kernel_of(int64_t steps)
{
    switch (moe_stationary_slices(steps)) {
    case 1: return kernel<T, 1, P>;
    case 2: return kernel<T, 2, P>;
    default: return kernel<T, 4, P>;
    }
}

} // namespace gemm_f8_stationary

// ---- The host's side. steps: of K

// The stationary core's map of the result counts columns in units of 64.
inline bool f8_stays(int64_t steps, int64_t columns, bool bias)
{
    return steps <= gemm_f8_stationary::MOST_SLICES && !bias && columns % 64 == 0;
}

// The tensor map of the result (rows, columns).
inline void map_f8_result(moe_launch *on, CUtensorMap *y, int64_t steps, bool stays, const void *base,
                          int64_t rows, int64_t columns)
{
    using wide = gemm_stationary::stored_box<2>;
    using low = gemm_stationary::stored_box<4>;
    if (!stays)
        moe_map_matrix(on, y, base, rows, columns, MOE_BLOCK_ROWS);
    else if (moe_stationary_slices(steps) <= 2)
        moe_map_side_by_side(on, y, base, rows, columns, wide::SUBTILES, wide::ROWS);
    else
        moe_map_side_by_side(on, y, base, rows, columns, low::SUBTILES, low::ROWS);
}

template <typename T, class P> cudaError_t init_f8_rows(const moe_device *device)
{
    cudaError_t status = cudaSuccess;
    for (const int64_t steps : {1, 2, 4})
        if (status == cudaSuccess)
            status = allow_shared(device, gemm_f8_stationary::kernel_of<T, P>(steps),
                                  gemm_f8_stationary::ALL_BYTES);
    for (const auto kernel : {gemm_f8_tiles::kernel<T, false, P>, gemm_f8_tiles::kernel<T, true, P>})
        if (status == cudaSuccess) status = allow_shared(device, kernel, gemm_f8_tiles::SHARED_BYTES);
    return status;
}

template <typename T, class P>
cudaError_t launch_f8_rows(const moe_launch *on, int64_t steps, bool stays, const P &p)
{
    using namespace gemm_f8_stationary;
    if (stays)
        return enqueue(kernel_of<T, P>(steps), on->sms < MAX_CTAS ? on->sms : (int)MAX_CTAS, THREADS,
                       ALL_BYTES, on->stream, p);
    return enqueue(steps < F8_LEAST_PROMOTED ? gemm_f8_tiles::kernel<T, false, P>
                                             : gemm_f8_tiles::kernel<T, true, P>,
                   on->sms, gemm_f8_tiles::THREADS, gemm_f8_tiles::SHARED_BYTES, on->stream, p);
}

} // namespace moe
