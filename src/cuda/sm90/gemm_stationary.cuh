// The weight-stationary core, for rows times weights with K <= 256. 256 columns of one expert's weights
// stay in shared memory, and the blocks of a piece, a run of this expert's blocks, are loaded one after the
// other.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Weights come in slices of 64 of K, 32 KB each. SLICES, a template parameter, is how many a unit has: 1, 2
// or 4 for K up to 64, 128 or 256, where gated dx_rows counts each half of dH as a multiple of 64. Shared
// memory has places for four slices, so with 1 or 2 of them the weights of the next units are loaded ahead.
//
// A block costs 8 KB of loads for each slice. With K = 256 these are 32 KB, where the cooperative core would
// load 64 KB. The two consumer warpgroups take blocks in turns: one converts and stores while the other
// multiplies.
//
// A unit of work is a piece and a column tile. First each CTA takes whole units (full waves), so that
// neighbouring CTAs read the same rows at the same time and share them in L2. The units that are left over
// are cut by blocks so that all CTAs end at the same time (stationary_shares.h).
//
// P, the kernel's parameters, has lists, columns and the tensor map y (map_result in gemm_launch.cuh).
// operands<P> loads 64 rows or the weights of 256 columns, and has piece(p, i), entry i of the list of
// pieces.
#pragma once
#include "common/reduce.cuh"
#include "common/storage.cuh"
#include "common/swizzle.h"
#include "schedule/stationary_shares.h"
#include "sm90/gemm_operands.cuh"
#include "sm90/wgmma.cuh"
#include "tma/mbarrier.cuh"
#include "tma/tma.cuh"

namespace moe
{
namespace gemm_stationary
{

enum {
    THREADS = 384,
    TILE_COLUMNS = 256,
    STEP = 64,
    MOST_SLICES = 4, // places for slices of weights
    SLICE_BYTES = TILE_COLUMNS * STEP * 2,
    SLOTS = 8, // of A: 64 rows x 64
    SLOT_BYTES = MOE_SUBTILE_BYTES,
    BUFFER_BYTES = 2 * MOE_SUBTILE_BYTES, // staging of a consumer: 64 rows x 128 columns
    RING = MOST_SLICES * SLICE_BYTES,
    STAGING = RING + SLOTS * SLOT_BYTES,
    BARRIERS = STAGING + 2 * BUFFER_BYTES,
    SHARES = BARRIERS + 8 * (2 * SLOTS + 2 * MOST_SLICES + 4), // cta_shares
    SHARED_BYTES = SHARES + 80,
    MAX_CTAS = 256,
    // moe_work_bound for E <= 4096 experts and 2^31 rows is at most 2 E + 1. If a piece may have 4096 blocks,
    // the highest limit, it is at most 8192 + E + 1. The backward has at most E + moe_split_bound pieces with
    // blocks, which is less.
    MOST_PIECES = 2 * 4096 + 8192
};
static_assert(SHARED_BYTES <= 232448, "shared memory of an SM");
static_assert(MAX_CTAS <= THREADS, "one thread for each CTA's share");
static_assert(4 * (MOST_PIECES + 1) <= MOST_SLICES * SLICE_BYTES,
              "sums over the pieces, before the first slice");

struct shared_layout {
    uint32_t base;
    MOE_DEVICE uint32_t slice(int j) const
    {
        return base + j * SLICE_BYTES;
    }
    MOE_DEVICE uint32_t slot(uint32_t s) const
    {
        return base + RING + s * SLOT_BYTES;
    }
    MOE_DEVICE uint32_t buffer(int consumer) const
    {
        return base + STAGING + consumer * BUFFER_BYTES;
    }
    MOE_DEVICE uint32_t full(uint32_t s) const
    {
        return base + BARRIERS + 8 * s;
    }
    MOE_DEVICE uint32_t empty(uint32_t s) const
    {
        return base + BARRIERS + 8 * (SLOTS + s);
    }
    MOE_DEVICE uint32_t slice_full(int j) const
    {
        return base + BARRIERS + 8 * (2 * SLOTS + j);
    }
    MOE_DEVICE uint32_t slice_empty(int j) const
    {
        return base + BARRIERS + 8 * (2 * SLOTS + MOST_SLICES + j);
    }
    MOE_DEVICE uint32_t buffer_full(int consumer) const
    {
        return base + BARRIERS + 8 * (2 * SLOTS + 2 * MOST_SLICES + consumer);
    }
    MOE_DEVICE uint32_t buffer_empty(int consumer) const
    {
        return base + BARRIERS + 8 * (2 * SLOTS + 2 * MOST_SLICES + 2 + consumer);
    }
};

template <class P> struct unit_list {
    const P &p;
    int column_tiles;
    int waves; // number of whole units of every CTA
    MOE_DEVICE moe_work piece(int unit) const
    {
        return operands<P>::piece(p, unit / column_tiles);
    }
};

// What the threads of a CTA share while they compute the CTA's units. In shared memory.
struct cta_shares {
    uint32_t sums[THREADS / 32];
    int waves; // the least of all CTAs
    int begin; // of this CTA's share of the rest, in blocks of the rest
    moe_share rest;
};
static_assert(sizeof(cta_shares) <= SHARED_BYTES - SHARES, "shared memory");

// before[i] = the blocks of the pieces before piece i, for i <= pieces. Every piece has blocks (the
// backward's that have none are not counted in counts[1]). Called by all threads of the CTA.
template <class P> MOE_DEVICE void sum_pieces(const P &p, int pieces, int *before, uint32_t *memory)
{
    int done = 0;
    if (threadIdx.x == 0) before[0] = 0;
    for (int first = 0; first < pieces; first += THREADS) {
        const int own = first + threadIdx.x;
        const int blocks = own < pieces ? moe_work_blocks(operands<P>::piece(p, own)) : 0;
        const int others = done + (int)sum_of_threads_before(blocks, memory);
        if (own < pieces) before[own + 1] = others + blocks;
        __syncthreads();
        done = before[min(first + THREADS, pieces)];
    }
}

// The CTA's whole units and its share of the rest. Called by all threads of the CTA. Thread c computes how
// many whole units CTA c could have and how many blocks it then lacks.
MOE_DEVICE moe_share share_units(const moe_stationary_units &units, int *waves, cta_shares *shared)
{
    const int c = threadIdx.x;
    const int most = units.pieces * units.column_tiles / units.ctas;
    if (c == 0) {
        shared->waves = most;
        shared->rest = {0, 0, 0};
    }
    __syncthreads();
    const int equal = c < units.ctas ? moe_equal_share(&units, c) : 0;
    moe_whole_units whole = {most, 0};
    if (c < units.ctas) whole = moe_waves_within(&units, c, most, equal);
    if (whole.waves < most) atomicMin(&shared->waves, whole.waves);
    __syncthreads();
    *waves = shared->waves;
    if (c < units.ctas && whole.waves > *waves) whole = moe_waves_within(&units, c, *waves, equal);
    const int lacking = equal - whole.blocks, begin = (int)sum_of_threads_before(lacking, shared->sums);
    if (c == (int)blockIdx.x) {
        shared->begin = begin;
        shared->rest.length = lacking;
    }
    __syncthreads();
    const int at = moe_blocks_before(&units, *waves * units.ctas) + shared->begin;
    for (int piece = c; piece < units.pieces; piece += THREADS)
        moe_share_begins(&units, piece, at, &shared->rest);
    fence_async_proxy(); // TMA writes slices of weights where `before` is
    __syncthreads();
    return shared->rest;
}

// One item of the CTA's work. Producers and consumers go through the same items in the same order.
struct item {
    int row, blocks, column, expert;
    MOE_DEVICE moe_work block(int i) const
    {
        return moe_work_make(row + i * MOE_BLOCK_ROWS, expert, 1);
    }
};

template <class P> struct item_walk {
    const unit_list<P> &list;
    moe_share rest;
    int wave = 0;
    MOE_DEVICE item_walk(const unit_list<P> &l, const moe_share &r) : list(l), rest(r)
    {
    }
    MOE_DEVICE bool next(item &it)
    {
        const bool whole = wave < list.waves;
        if (!whole && rest.length == 0) return false;
        const int unit = whole ? wave * (int)gridDim.x + (int)blockIdx.x : rest.unit;
        const moe_work piece = list.piece(unit);
        int first = 0, blocks = moe_work_blocks(piece);
        if (whole) {
            wave++;
        } else {
            first = rest.block;
            blocks = min(blocks - first, rest.length);
            rest = {rest.unit + 1, 0, rest.length - blocks};
        }
        it = {piece.row + first * MOE_BLOCK_ROWS, blocks, unit % list.column_tiles * TILE_COLUMNS,
              moe_work_expert(piece)};
        return true;
    }
};

// Where the slices of the weights of the CTA's `count`-th item are.
template <int SLICES> struct slice_set {
    enum { SETS = MOST_SLICES / SLICES };
    static_assert(MOST_SLICES % SLICES == 0, "a set does not wrap around");
    int first;
    uint32_t phase; // in which the slices become full
    MOE_DEVICE explicit slice_set(uint32_t count) : first(count % SETS * SLICES), phase(count / SETS & 1)
    {
    }
};

// ---- Producers, one thread each

template <int SLICES, class P>
MOE_DEVICE void load_rows(const P &p, item_walk<P> walk, const shared_layout &shared)
{
    ring_position<SLOTS> ring(1);
    operands<P>::prefetch(p);
    for (item it; walk.next(it);)
        for (int block = 0; block < it.blocks; block++)
#pragma unroll 1
            for (int j = 0; j < SLICES; j++) {
                barrier_wait(shared.empty(ring.slot), ring.phase);
                barrier_expect(shared.full(ring.slot), SLOT_BYTES);
                operands<P>::load_rows(p, shared.slot(ring.slot), shared.full(ring.slot), j, it.block(block));
                ring.advance();
            }
}

// Slice by slice, each when its last readers have finished with it.
template <int SLICES, class P>
MOE_DEVICE void load_weights(const P &p, item_walk<P> walk, const shared_layout &shared)
{
    uint32_t count = 0;
    for (item it; walk.next(it); count++) {
        const slice_set<SLICES> set(count);
        for (int j = 0; j < SLICES; j++) {
            const int place = set.first + j;
            barrier_wait(shared.slice_empty(place), set.phase ^ 1);
            barrier_expect(shared.slice_full(place), SLICE_BYTES);
            operands<P>::template load_weights<TILE_COLUMNS>(p, shared.slice(place), shared.slice_full(place),
                                                             j, it.block(0), it.column);
        }
    }
}

// The boxes in which half a block, 64 rows x 128 columns, is stored. L2 writes 256 bytes of a row faster to
// DRAM if they reach it together (docs/log/2026-11-26.md, fourth session). So with one or two slices a box
// has both subtiles, and a row of it is two rows of 128 bytes in shared memory. Then rows r and r + 4 of each
// matrix of a stmatrix use the same banks. With four slices, where shared memory is busier, it was faster to
// store 16 rows of one subtile and then the same rows of the other.
template <int SLICES> struct stored_box {
    enum { SUBTILES = SLICES <= 2 ? 2 : 1, ROWS = SLICES <= 2 ? 64 : 16 };
};

// Byte of staging where vector `vector` (0..7) of a row of subtile `subtile` is.
template <int SLICES> MOE_DEVICE uint32_t staged_offset(uint32_t row, uint32_t subtile, uint32_t vector)
{
    return stored_box<SLICES>::SUBTILES == 2 ? moe_subtile_offset(2 * row + subtile, vector)
                                             : subtile * MOE_SUBTILE_BYTES + moe_subtile_offset(row, vector);
}

template <int SLICES, class P> MOE_DEVICE void store_half(const P &p, uint32_t buffer, int column, int row)
{
    using box = stored_box<SLICES>;
    for (int i = 0; i < MOE_BLOCK_ROWS; i += box::ROWS)
        for (int subtile = 0; subtile < 2; subtile += box::SUBTILES)
            if (column + subtile * MOE_SUBTILE_COLUMNS < p.columns)
                store_box_evict_first(&p.y, buffer + staged_offset<SLICES>(i, subtile, 0), 0,
                                      column / MOE_SUBTILE_COLUMNS + subtile, row + i);
}

// `done` is the number of blocks of all items so far. Consumer (done + block) % 2 has block `block`.
template <int SLICES, class P>
MOE_DEVICE void store_blocks(const P &p, item_walk<P> walk, const shared_layout &shared, int consumer)
{
    uint32_t done = 0, count = 0;
    for (item it; walk.next(it); done += it.blocks)
        for (int block = (consumer - done) & 1; block < it.blocks; block += 2)
            for (int half = 0; half < 2; half++, count++) {
                const uint32_t buffer = shared.buffer(consumer);
                const int column = it.column + half * 128, row = it.row + block * MOE_BLOCK_ROWS;
                barrier_wait(shared.buffer_full(consumer), count & 1);
                store_half<SLICES>(p, buffer, column, row);
                commit_stores();
                wait_stores_read<0>();
                barrier_arrive(shared.buffer_empty(consumer));
            }
    wait_stores_done();
}

// ---- Consumers. Named barriers 4 and 5: the turns of consumers 0 and 1 at the tensor cores.
enum { TURN_BARRIER = 4 };

template <typename T, operand_order WEIGHTS, int SLICES>
MOE_DEVICE void multiply_block(float (&acc)[128], ring_position<SLOTS> ring, const shared_layout &shared,
                               int consumer, bool first, bool last, slice_set<SLICES> weights, int lane)
{
    uint32_t previous = 0;
    named_barrier_sync(TURN_BARRIER + consumer, 256);
#pragma unroll
    for (int j = 0; j < SLICES; j++) {
        if (first) barrier_wait(shared.slice_full(weights.first + j), weights.phase);
        barrier_wait(shared.full(ring.slot), ring.phase);
        const uint32_t a = descriptor_address(shared.slot(ring.slot)),
                       b = descriptor_address(shared.slice(weights.first + j));
        pin(acc);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < STEP / 16; i++)
            tensor_core<T>::template multiply<K_MAJOR, WEIGHTS>(
                acc, descriptor<K_MAJOR>(a + descriptor_step<K_MAJOR>() * i),
                descriptor<WEIGHTS>(b + descriptor_step<WEIGHTS>() * i), (j | i) != 0);
        wgmma_commit();
        pin(acc);
        if (j == SLICES - 1) named_barrier_arrive(TURN_BARRIER + (consumer ^ 1), 256);
        wgmma_wait<1>();
        if (j > 0 && lane == 0) {
            barrier_arrive(shared.empty(previous));
            if (last) barrier_arrive(shared.slice_empty(weights.first + j - 1));
        }
        previous = ring.slot;
        ring.advance();
    }
    wgmma_wait<0>();
    pin(acc);
    if (lane == 0) {
        barrier_arrive(shared.empty(previous));
        if (last) barrier_arrive(shared.slice_empty(weights.first + SLICES - 1));
    }
}

template <typename T, int SLICES>
MOE_DEVICE void write_half(const float *acc, const shared_layout &shared, int consumer, uint32_t count,
                           int lane)
{
    using S = storage<T>;
    barrier_wait(shared.buffer_empty(consumer), (count & 1) ^ 1);
    const int row = ((threadIdx.x >> 5) & 3) * 16 + (lane & 15);
#pragma unroll
    for (int q = 0; q < 8; q++) {
        const float *v = acc + q * 8;
        const uint32_t at = staged_offset<SLICES>(row, q >> 2, (q & 3) * 2 + (lane >> 4));
        store_matrices(shared.buffer(consumer) + at, S::pack(v[0], v[1]), S::pack(v[2], v[3]),
                       S::pack(v[4], v[5]), S::pack(v[6], v[7]));
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.buffer_full(consumer));
}

// An item of which this consumer has no block: it only releases the slices.
template <int SLICES>
MOE_DEVICE void pass_over(const shared_layout &shared, slice_set<SLICES> weights, int lane)
{
    for (int j = 0; j < SLICES; j++) {
        barrier_wait(shared.slice_full(weights.first + j), weights.phase);
        if (lane == 0) barrier_arrive(shared.slice_empty(weights.first + j));
    }
}

template <typename T, int SLICES, class P>
MOE_DEVICE void multiply_blocks(item_walk<P> walk, const shared_layout &shared, int consumer, int lane)
{
    float acc[128];
    uint32_t done = 0, count = 0, items = 0;
    if (consumer == 1) named_barrier_arrive(TURN_BARRIER, 256); // consumer 0 begins
    for (item it; walk.next(it); done += it.blocks, items++) {
        const slice_set<SLICES> weights(items);
        const int own = (consumer - done) & 1;
        if (own >= it.blocks) pass_over(shared, weights, lane);
        for (int block = own; block < it.blocks; block += 2) {
            ring_position<SLOTS> ring(0);
            ring.advance((done + block) * SLICES % (2 * SLOTS));
            multiply_block<T, operands<P>::WEIGHTS>(acc, ring, shared, consumer, block == own,
                                                    block + 2 >= it.blocks, weights, lane);
            write_half<T, SLICES>(acc, shared, consumer, count++, lane);
            write_half<T, SLICES>(acc + 64, shared, consumer, count++, lane);
        }
    }
}

// By one thread.
MOE_DEVICE void init_barriers(const shared_layout &shared)
{
    for (int i = 0; i < SLOTS; i++) {
        barrier_init(shared.full(i), 1);
        barrier_init(shared.empty(i), 4); // the warps of the consumer whose block it is
    }
    for (int i = 0; i < MOST_SLICES; i++) {
        barrier_init(shared.slice_full(i), 1);
        barrier_init(shared.slice_empty(i), 8);
    }
    for (int i = 0; i < 2; i++) {
        barrier_init(shared.buffer_full(i), 4);
        barrier_init(shared.buffer_empty(i), 1);
    }
    barrier_init_done();
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
                load_rows<SLICES>(p, walk, shared);
            else if (warp == 9)
                load_weights<SLICES>(p, walk, shared);
            else
                store_blocks<SLICES>(p, walk, shared, warp - 10);
        }
    } else {
        take_registers<232>();
        multiply_blocks<T, SLICES>(walk, shared, warp >> 2, lane);
    }
}

} // namespace gemm_stationary
} // namespace moe
