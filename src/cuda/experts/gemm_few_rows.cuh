// The few-rows core: a row tile that has few rows times 16 rows of weights.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Nearly all its time is spent on reading weights, so they must be read at the speed of the memory. The
// kernels for many rows have too few tiles for this: with one row for each of 8 experts and n = 1024, 64 of
// 132 SMs have one. Here a unit is a row tile and 16 rows of weights, over the whole length of
// the sums. The kernels are persistent, two CTAs on an SM, and CTA b of g takes units b, b + g, b + 2 g and
// so on. One warp of a CTA is the producer. It copies up to 1 KB of each of the 16 rows into a slot of a
// ring and goes on to the next unit without waiting for the sums. So up to 160 KB (with cp.async 128 KB) are
// on their way to an SM at all times. At 4.8 TB/s and about 800 ns, 29 KB are enough; the rest covers the
// time in which sums are added and stored.
//
// C is how the producer copies: by bulk copies (sm90/experts/few_rows.cu) or by cp.async
// (sm80/experts/few_rows.cu). It has, for all lanes of the producer's warp to call:
//   SLOTS, ARRIVALS: of the ring; at the barrier of a full slot
//   copy(slot, rows, from, bytes, barrier): starts the copies of a slice
//   publish(barrier, bytes): the slot is full when they have landed; what the warp has stored is published
//   with it publish(barrier): the same of a slot without copies
//
// Tile: 16 rows of X or A by 16 rows of weights. mma multiplies 16 by 8 rows, 16 places of K at a time (K is
// d for up and n for down), with the weights as operand b. A lane reads 16 contiguous bytes of a row of
// weights; four lanes read 64 bytes. These are not the places of K that mma assigns to a lane. But both
// operands are permuted alike, so the same products are added. Eight warps take steps of 32 places of K by
// turns, and their sums are added in the order of the warps.
#pragma once
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "host/kernel_table.h"
#include "schedule/few_rows.h"
#include "tma/mbarrier.cuh"

namespace moe
{
namespace few_rows
{

enum {
    WARPS = 8, // that multiply
    MULTIPLIERS = WARPS * 32,
    THREADS = MULTIPLIERS + 32, // and the producer
    CTAS_AN_SM = 2,
    GROUP = MOE_FEW_ROWS_GROUP,
    WEIGHTS = MOE_FEW_ROWS_WEIGHTS,
    STEP = 32, // places of K: four lanes, 16 bytes each
    STEPS = 2, // of a warp in a slice
    SLICE = WARPS * STEP * STEPS,
    ROW_BYTES = SLICE * 2 + 64, // of a row of weights in a slot: two rows of 64 bytes have no bank conflicts
    PITCH = WEIGHTS + 4         // of the sums of a row: no bank conflicts
};
static_assert(GROUP == 16 && WEIGHTS == 16, "two mma of 16 rows x 8 rows of weights");

// The sums of the warps: of each row with each of the 16 rows of weights.
typedef float partial_sums[WARPS][GROUP][PITCH];

// Up to 16 rows of a tile, to be multiplied by the weights of a column tile.
struct row_group {
    int row, rows; // the first padded row; 0 rows: there is no more work
    int pad_rows;  // behind them, if they are the tile's last
    int expert, column_tile;
};

template <class C> struct shared_memory {
    enum { SLOTS = C::SLOTS };
    char weights[SLOTS][WEIGHTS][ROW_BYTES];
    partial_sums sums[2]; // of units by turns
    uint64_t full[SLOTS], empty[SLOTS];
    row_group groups[SLOTS]; // in the slot of the group's first slice
    int tokens[SLOTS][GROUP];
};

template <class C> MOE_DEVICE shared_memory<C> &shared_of_cta()
{
    static_assert(CTAS_AN_SM * (sizeof(shared_memory<C>) + 1024) <= 233472, "shared memory of an SM");
    extern __shared__ __align__(128) char memory[];
    return *(shared_memory<C> *)memory;
}

template <class C> MOE_DEVICE void init_ring(shared_memory<C> &shared)
{
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::SLOTS; i++) {
            barrier_init(shared_address(shared.full + i), C::ARRIVALS);
            barrier_init(shared_address(shared.empty + i), WARPS);
        }
        barrier_init_done();
    }
    __syncthreads();
}

// ---- The producer

// 16 rows of weights. Row i < 8 starts at `first` + i `stride`, row 8 + i at `second` + i `stride`.
struct weight_rows {
    const char *first, *second;
    int64_t stride; // bytes
};

// The number of the tile's rows that are no pad rows.
MOE_DEVICE int count_rows(const int32_t *row_token, moe_work tile, int lane)
{
    uint32_t count = 0;
    for (int row = lane; row < moe_work_blocks(tile) * MOE_BLOCK_ROWS; row += 32)
        count += __ldcg(row_token + tile.row + row) >= 0;
    return (int)__reduce_add_sync(~0u, count);
}

// Writes the group of a tile of `rows` rows that begins with its row `first`.
template <class C>
MOE_DEVICE void describe(shared_memory<C> &shared, uint32_t slot, const int32_t *row_token, moe_work tile,
                         int column_tile, int first, int rows, int lane)
{
    const int pad_rows = moe_work_blocks(tile) * MOE_BLOCK_ROWS - rows;
    if (lane < GROUP) // after the last row, the last row again
        shared.tokens[slot][lane] = __ldcg(row_token + tile.row + min(first + lane, rows - 1));
    if (lane == 0)
        shared.groups[slot] = {tile.row + first, min(rows - first, (int)GROUP),
                               first + GROUP < rows ? 0 : pad_rows, moe_work_expert(tile), column_tile};
}

// One warp fills the ring for all units of the CTA. weights_of(expert, column tile) are 16 rows of `length`
// elements. The copies of a slice do not depend on the number of rows, so the first ones begin before it is
// known.
template <class C, class W>
MOE_DEVICE void produce(shared_memory<C> &shared, const moe_cuda_lists &lists, const int32_t *row_token,
                        int column_tiles, int length, const W &weights_of)
{
    ring_position<C::SLOTS> at(1);
    const int lane = threadIdx.x & 31, ctas = (int)gridDim.x;
    // The tile of the next unit is read a unit ahead. The first one is no tile if there are no units.
    int2 next = __ldcg((const int2 *)lists.tiles + blockIdx.x / column_tiles);
    const int units = __ldcg(lists.counts) * column_tiles;
    for (int unit = blockIdx.x; unit < units; unit += ctas) {
        const moe_work tile = {next.x, next.y};
        if (unit + ctas < units) next = __ldcg((const int2 *)lists.tiles + (unit + ctas) / column_tiles);
        const int column_tile = unit % column_tiles;
        const weight_rows weights = weights_of(moe_work_expert(tile), column_tile);
        int rows = 1;
        for (int first = 0; first < rows; first += GROUP)
            for (int place = 0; place < length; place += SLICE, at.advance()) {
                const uint32_t bytes = min(length - place, (int)SLICE) * 2;
                const uint32_t full = shared_address(shared.full + at.slot);
                barrier_wait(shared_address(shared.empty + at.slot), at.phase);
                C::copy(shared_address(shared.weights[at.slot]), weights, place * 2, bytes, full);
                if (place == 0) {
                    if (first == 0) rows = count_rows(row_token, tile, lane);
                    describe(shared, at.slot, row_token, tile, column_tile, first, rows, lane);
                }
                __syncwarp();
                C::publish(full, WEIGHTS * bytes);
            }
    }
    barrier_wait(shared_address(shared.empty + at.slot), at.phase);
    if (lane == 0) shared.groups[at.slot].rows = 0;
    C::publish(shared_address(shared.full + at.slot));
}

// ---- The other warps

// The warp's share of the sums of one group. The lane has rows lane / 4 and lane / 4 + 8 of the group, which
// begin at `upper` and `lower`.
template <typename T, class C>
MOE_DEVICE void multiply_group(shared_memory<C> &shared, float (&sums)[GROUP][PITCH],
                               ring_position<C::SLOTS> &at, int length, const char *upper, const char *lower)
{
    const int warp = warp_number(), lane = threadIdx.x & 31, own = warp * STEP + (lane & 3) * 8;
    float acc[2][4] = {};
    upper += own * 2, lower += own * 2;
#pragma unroll 1
    for (int place = own; place - own < length;
         place += SLICE, upper += SLICE * 2, lower += SLICE * 2, at.advance()) {
        const uint32_t from = shared_address(shared.weights[at.slot][lane >> 2]) + own * 2;
        uint4 x[STEPS], y[STEPS];
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const int ahead = i * WARPS * STEP;
            x[i] = load_global16_if(place + ahead < length, upper + ahead * 2);
            y[i] = load_global16_if(place + ahead < length, lower + ahead * 2);
        }
        barrier_wait(shared_address(shared.full + at.slot), at.phase);
#pragma unroll
        for (int i = 0; i < STEPS; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                // Past the end of the row the slot has old bytes, which may be NaN.
                uint4 w = {0, 0, 0, 0};
                if (place + i * WARPS * STEP < length)
                    w = load_shared16(from + half * 8 * ROW_BYTES + i * WARPS * STEP * 2);
                multiply(acc[half], {x[i].x, y[i].x, x[i].y, y[i].y}, w.x, w.y, T());
                multiply(acc[half], {x[i].z, y[i].z, x[i].w, y[i].w}, w.z, w.w, T());
            }
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(shared.empty + at.slot));
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        sums[(lane >> 2) + (i & 2) * 4][(i & 4) * 2 + (lane & 3) * 2 + (i & 1)] = acc[i >> 2][i & 3];
}

// All groups of the CTA. start_of(row, token) is where a row of X or A starts. finish(group, i, j, sum)
// stores element j of row i of the group, where a column tile has 1 << shift elements of every row; its
// argument sum(j) is row i times row j of the weights. finish_pads(group) stores pad rows.
template <typename T, class C, class R, class F, class P>
MOE_DEVICE void multiply_groups(shared_memory<C> &shared, int length, int shift, const R &start_of,
                                const F &finish, const P &finish_pads)
{
    const int quad = (threadIdx.x & 31) >> 2;
    ring_position<C::SLOTS> at(0);
    for (int turn = 0;; turn ^= 1) {
        barrier_wait(shared_address(shared.full + at.slot), at.phase);
        const row_group group = shared.groups[at.slot];
        if (!group.rows) return;
        const int *tokens = shared.tokens[at.slot], last = group.rows - 1;
        const char *upper = start_of(group.row + min(quad, last), tokens[quad]);
        const char *lower = start_of(group.row + min(quad + 8, last), tokens[quad + 8]);
        partial_sums &sums = shared.sums[turn];
        multiply_group<T>(shared, sums[warp_number()], at, length, upper, lower);
        // Other warps may still read the sums of the unit before, but none those of the one before that.
        named_barrier_sync(1, MULTIPLIERS);
        const int i = (int)threadIdx.x >> shift, j = threadIdx.x & ((1 << shift) - 1);
        if (i < group.rows)
            finish(group, i, j, [&](int column) {
                float sum = sums[0][i][column];
                for (int w = 1; w < WARPS; w++) sum += sums[w][i][column];
                return sum;
            });
        finish_pads(group);
    }
}
static_assert(MULTIPLIERS == GROUP * WEIGHTS, "each thread stores at most one element");

// As many CTAs as the SMs hold at once, unless there are fewer units for any routing.
template <class C, class K, class P>
cudaError_t launch(K kernel, const moe_launch *on, int64_t columns, int columns_a_tile, int64_t tiles,
                   const P &problem)
{
    if (tiles == 0) return cudaSuccess;
    const int64_t units = moe_divide_up(columns, columns_a_tile) * tiles, most = on->sms * CTAS_AN_SM;
    return launch_early(kernel, (unsigned)(units < most ? units : most), THREADS, sizeof(shared_memory<C>),
                        on, problem);
}

} // namespace few_rows
} // namespace moe
