// The gradient through the activation. For row r of expert e:
//
//   dA'[r] = dO[t(r)] W2[e]
//   dS[r]  = <dA'[r], A[r]>, with A[r] computed again from the saved H[r]; ds.cu adds the term of b2
//   dH[r]  = dact(H[r], s(r) dA'[r])
//   A'[r]  = s(r) A[r], which dW2 reads
//
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Shapes: dO (T, d), W2 (E, d, n), H and dH (padded rows, h), A' (padded rows, n), where h is 2n with a gate
// and n without. FLOPs 2 R d n.
//
// Bytes (elements of tensors have 16 bits):
// - dO: 2 R d, gathered once for each column tile. L2 can serve every column tile after the first.
// - W2: 2 E d n, read once if L2 serves all row tiles of each expert except its first.
//   With more than 8 column tiles W2 may not stay in L2. Then units go in bands of 16 row tiles
//   (work_order.h), and W2 is read once or twice for each band.
// - H: 2 R h read.
// - dH: 2 R h written.
// - A': 2 R n written.
// - dS: 4 R written for each column tile, one partial sum in f32 for each row.
//
// Tile: 128 x 256 of dA' on the cooperative core (gemm_cooperative.cuh), or 128 x 128 for n <= 128. W2 is
// MN-major, as it is in memory.
//
// Some columns of dO and the matching part of W2 share a slot of a ring in shared memory. The two consumer
// warpgroups gather dO themselves. When a consumer has multiplied its 64 rows of a slot, it refills their
// place with later columns of the same rows or, after the last columns, with rows of its next tile. TMA loads
// W2 into the slot when both consumers are done with it.
// The third warpgroup does not gather, because it works on H, dH and A'.
//
// A consumer warp writes its 16 rows of dA' (256 or 128 columns) to shared memory as fp16. Before that, each
// row is scaled by a power of two so that its largest magnitude is in [2^14, 2^15). Then every element whose
// magnitude is at least 2^-28 times the largest is a normal fp16 number, and its rounding has a relative
// error of at most 2^-11. Smaller elements may become subnormal or 0.
//
// The four warps of the third warpgroup read these rows one by one; a warp takes one row of 256 columns at a
// time, or two of 128. For each row it also needs H: 512 bytes or, with a gate, 512 bytes of the gate half
// and 512 bytes of the up half (narrow tiles: half of it). Each lane copies 16 bytes of each half to shared
// memory with cp.async, four rows ahead. From registers the lane writes the matching 16 bytes of A' and of
// each half of dH. Since a lane reads its bytes of H before it writes the same bytes of dH, dH may overwrite
// H.
//
// Each column tile has its own partial sums of dS, so no atomics are needed.
#include "common/activation_gradient.cuh"
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "problem.h"
#include "sm90/gemm_cooperative.cuh"
#include "sm90/kernels.h"
#include "sm90/tensor_map.h"
#include "sm90/tma.cuh"
#include "sm90/work_order.h"

namespace moe
{
namespace
{

using namespace gemm_cooperative;

struct dh_params {
    CUtensorMap w2;   // moe_map_subtiles of (E, hidden, intermediate): a tile's columns
    const void *dout; // (T, hidden)
    const void *h;    // (padded_rows, h_width)
    void *dh;         // the same shape; may be h
    void *a;          // A' (padded_rows, intermediate)
    float *ds;        // (column tiles, padded_rows) partial sums of dS
    const int32_t *row_token;
    const float *row_weight;
    moe_cuda_backward_lists lists;
    int64_t padded_rows;
    int32_t hidden, intermediate;
    int32_t gated, subtiles_apart;
    smoe_activation activation;
};

enum {
    CONSUMER_THREADS = 128,
    COPIES = SMOE_BLOCK_ROWS / (CONSUMER_THREADS / 8), // a thread's: eight copy the 128 bytes of a row
    CONSUMER_BARRIER = 1,                              // named, one a consumer
    WARP_TILE_ROWS = 16, // rows of a consumer warp; one worker warp takes them at a time
    WARP_TILES = CONSUMER_WARPS,
    SUBTILES = TILE_COLUMNS / SMOE_SUBTILE_COLUMNS,          // of a warp tile, if it is not narrow
    SUBTILE_BYTES = WARP_TILE_ROWS * SMOE_SUBTILE_ROW_BYTES, // of a warp tile: 16 rows x 64 columns
    WARP_TILE_BYTES = SUBTILES * SUBTILE_BYTES,
    AHEAD = 4,                                     // steps of H in flight, 8 columns for each lane
    RING = STAGING + WARP_TILES * WARP_TILE_BYTES, // a worker warp: 4 steps x (gate 512 bytes, up 512 bytes)
    RING_HALF = TILE_COLUMNS * 2,
    RING_ROW = 2 * RING_HALF,
    RING_WARP = AHEAD * RING_ROW,
    BARRIERS = RING + 4 * RING_WARP,
    SCALES = BARRIERS + 8 * (2 * SLOTS + 2 * WARP_TILES), // (WARP_TILES, WARP_TILE_ROWS) float
    DONE = SCALES + WARP_TILES * WARP_TILE_ROWS *
                        4, // one word for each slot: how many consumers have finished with it
    SHARED_BYTES = DONE + SLOTS * 4
};
static_assert(SHARED_BYTES <= 232448, "shared memory of an SM");
static_assert((int)TILE_COLUMNS == (int)MOE_SM90_DS_COLUMNS,
              "the host has room for a part of dS a column tile");
static_assert(TILE_COLUMNS == 32 * 8, "a warp's lanes have a row of the tile, 16 bytes each");
static_assert(WARP_TILE_ROWS % (2 * AHEAD) == 0,
              "the ring's slots, and the rows' places in a subtile, repeat");

// How n is cut into column tiles.
enum width {
    NARROW, // one tile of up to 128 columns
    MIDDLE,
    WIDE // more than SMOE_MOST_COLUMNS_FIRST tiles
};

template <width W> struct tile_width {
    enum {
        COLUMNS = W == NARROW ? NARROW_COLUMNS : TILE_COLUMNS,
        SUBTILES = COLUMNS / SMOE_SUBTILE_COLUMNS,
        LANES = COLUMNS / 8,      // that have a row
        ROWS = 32 / LANES,        // that a worker warp takes at a time, a step
        GROUP_ROWS = AHEAD * ROWS // that are between two uses of a slot of the ring
    };
    // This lane's row of a step, and its first column.
    static SMOE_DEVICE int row(int lane)
    {
        return lane / LANES;
    }
    static SMOE_DEVICE int column(int lane)
    {
        return lane % LANES * 8;
    }
};
static_assert(WARP_TILE_ROWS % tile_width<NARROW>::GROUP_ROWS == 0, "whole groups");

struct dh_layout : shared_layout {
    SMOE_DEVICE explicit dh_layout(uint32_t start)
    {
        base = start;
        barriers = start + BARRIERS;
    }
    SMOE_DEVICE uint32_t warp_tile(uint32_t b) const
    {
        return base + STAGING + b * WARP_TILE_BYTES;
    }
    SMOE_DEVICE uint32_t scale(uint32_t b, uint32_t row) const
    {
        return base + SCALES + (b * WARP_TILE_ROWS + row) * 4;
    }
    SMOE_DEVICE uint32_t done(uint32_t slot) const
    {
        return base + DONE + slot * 4;
    }
    SMOE_DEVICE uint32_t warp_tile_full(uint32_t b) const
    {
        return barriers + 8 * (2 * SLOTS + b);
    }
    SMOE_DEVICE uint32_t warp_tile_empty(uint32_t b) const
    {
        return barriers + 8 * (2 * SLOTS + WARP_TILES + b);
    }
};

// ---- Gathering: a consumer that has finished with a slot fills it again. All its threads copy the
// consumer's own 64 rows of dO. The consumer that finishes with the slot last also starts the copy of W2's
// box.

SMOE_DEVICE int steps_of(const dh_params &p)
{
    return (p.hidden + STEP - 1) / STEP;
}

// The tile of a unit, and its column tile. The width is a template parameter and there are two functions,
// because otherwise a backward with d = 768 takes longer: 0.5 % with both orders in one kernel, 0.2 to 0.6 %
// with one function.
template <width W> SMOE_DEVICE moe_work tile_of(const tile_walk &walk, int unit)
{
    if (W != WIDE) return walk.tile(unit);
    return walk.entry(moe_place_in_list(unit, walk.row_tiles, walk.column_tiles).row_tile);
}
template <width W> SMOE_DEVICE int column_of(const tile_walk &walk, int unit)
{
    if (W != WIDE) return walk.column(unit);
    return moe_place_in_list(unit, walk.row_tiles, walk.column_tiles).column_tile;
}

template <width W> struct gatherer {
    const dh_params &p;
    const tile_walk &walk;
    const dh_layout &shared;
    int unit, column, k; // of the step to load next; column: first of the tile
    int next;            // token of row row0 + 16 (vector % 4) of the tile after this one
    moe_work tile;
    uint32_t real;            // bit i: row row0 + 16 i exists
    const char *from[COPIES]; // this thread's 16 bytes of the step

    SMOE_DEVICE gatherer(const dh_params &params, const tile_walk &work, const dh_layout &layout)
        : p(params), walk(work), shared(layout), unit(blockIdx.x), column(0), k(0), next(-1), tile({0, 0}),
          real(0)
    {
        if (unit >= walk.units) return;
        read_token(tile_of<W>(walk, unit));
        begin_tile();
    }

    static SMOE_DEVICE int consumer()
    {
        return threadIdx.x / CONSUMER_THREADS;
    }
    static SMOE_DEVICE int row0()
    {
        return threadIdx.x % CONSUMER_THREADS >> 3;
    }
    static SMOE_DEVICE int vector()
    {
        return threadIdx.x & 7;
    }

    SMOE_DEVICE void read_token(moe_work of)
    {
        const int row = of.row + consumer() * SMOE_BLOCK_ROWS + row0() + 16 * (vector() % COPIES);
        next = consumer() < moe_work_blocks(of) ? __ldg(p.row_token + row) : -1;
    }

    // Makes the unit's tile the current one, and starts to read the tokens of the tile after it.
    SMOE_DEVICE void begin_tile()
    {
        real = 0;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int row = __shfl_sync(~0u, next, (threadIdx.x & 24) | i);
            real |= (row >= 0 ? 1u : 0u) << i;
            from[i] = (const char *)p.dout + (uint64_t)(uint32_t)max(row, 0) * ((uint32_t)p.hidden * 2) +
                      vector() * 16;
        }
        tile = tile_of<W>(walk, unit);
        column = column_of<W>(walk, unit) * TILE_COLUMNS;
        k = 0;
        if (unit + gridDim.x < walk.units) read_token(tile_of<W>(walk, unit + gridDim.x));
    }

    SMOE_DEVICE void load_weights(uint32_t to, uint32_t full) const
    {
        barrier_expect(full, tile_width<W>::SUBTILES * SMOE_SUBTILE_BYTES);
        const int expert = moe_work_expert(tile);
        if (!p.subtiles_apart)
            return load_box(to, &p.w2, full, 0, k * STEP, column / SMOE_SUBTILE_COLUMNS, expert);
        for (int i = 0; i < tile_width<W>::SUBTILES; i++)
            load_box(to + i * SMOE_SUBTILE_BYTES, &p.w2, full, column + i * SMOE_SUBTILE_COLUMNS, k * STEP, 0,
                     expert);
    }

    // Fills a slot that all warps of the consumer have finished with.
    SMOE_DEVICE void fill(uint32_t number)
    {
        if (unit >= walk.units) return;
        const uint32_t slot = shared.slot(number), full = shared.full(number);
        const uint32_t wanted = k * STEP + vector() * 8 < p.hidden ? real : 0;
        const uint32_t to = slot + consumer() * SMOE_SUBTILE_BYTES + moe_subtile_offset(row0(), vector());
#pragma unroll
        for (int i = 0; i < COPIES; i++)
            copy16_async_if(wanted & 1u << i, to + i * 16 * SMOE_SUBTILE_ROW_BYTES, from[i]);
        barrier_arrive_after_copies(full);
        if (threadIdx.x % CONSUMER_THREADS == 0 && second_of_two(shared.done(number)))
            load_weights(slot + A_BYTES, full);
#pragma unroll
        for (int i = 0; i < COPIES; i++) from[i] = advance_by_adds(from[i], STEP * 2);
        if (++k < steps_of(p)) return;
        unit += gridDim.x;
        if (unit < walk.units) begin_tile();
    }
};

// ---- The worker warps: worker warp `worker` takes the warp tiles of warp `worker` of both consumers. The
// addresses of a row follow from those of the row before by additions.

// A warp tile in global memory: its first row, and this lane's first column.
struct place {
    int row, column;
};

// This lane's 16 bytes of a row, in H's or dH's gate half, or in A'.
SMOE_DEVICE const char *vector_of(const void *matrix, int row, int width, int column)
{
    return (const char *)matrix + ((int64_t)row * width + column) * 2;
}

template <typename T, int KIND> SMOE_DEVICE int h_width_of(const dh_params &p)
{
    return activation<T, KIND>::GATED ? 2 * p.intermediate : p.intermediate;
}

// The address in the up half that belongs to an address in the gate half.
SMOE_DEVICE const char *up_half(const char *gate, const dh_params &p)
{
    return advance_by_adds(gate, (uint32_t)p.intermediate * 2);
}

template <bool GATED> struct h_ring {
    const dh_params &p;
    uint32_t slots; // of this lane

    // Starts the copy of a row into a slot. Columns that do not exist are not read.
    SMOE_DEVICE void fetch(const char *gate, int column, int slot) const
    {
        const uint32_t bytes = column < p.intermediate ? 16u : 0u;
        copy16_async_unhinted(slots + slot * RING_ROW, gate, bytes);
        if (GATED) copy16_async_unhinted(slots + slot * RING_ROW + RING_HALF, up_half(gate, p), bytes);
        commit_copies();
    }
    SMOE_DEVICE uint4 gate(int slot) const
    {
        return load_shared16(slots + slot * RING_ROW);
    }
    SMOE_DEVICE uint4 up(int slot) const
    {
        return GATED ? load_shared16(slots + slot * RING_ROW + RING_HALF) : make_uint4(0, 0, 0, 0);
    }
};

// Computes and stores a row's vectors of dH and A'. Returns the lane's part of <dA', A>.
template <typename T, int KIND>
SMOE_DEVICE float write_row(const dh_params &p, uint4 x, uint4 g, uint4 u, const char *to_dh,
                            const char *to_a, bool exists, float weight, float y_weight)
{
    uint4 gate, up, scaled;
    float ds = 0.0f;
    differentiate_pair<T, KIND>(g.x, u.x, x.x, weight, y_weight, ds, gate.x, up.x, scaled.x);
    differentiate_pair<T, KIND>(g.y, u.y, x.y, weight, y_weight, ds, gate.y, up.y, scaled.y);
    differentiate_pair<T, KIND>(g.z, u.z, x.z, weight, y_weight, ds, gate.z, up.z, scaled.z);
    differentiate_pair<T, KIND>(g.w, u.w, x.w, weight, y_weight, ds, gate.w, up.w, scaled.w);
    store_streaming16_if(exists, (void *)to_dh, gate);
    if (activation<T, KIND>::GATED) store_streaming16_if(exists, (void *)up_half(to_dh, p), up);
    store_streaming16_if(exists, (void *)to_a, scaled);
    return ds;
}

// Every lane has a part of the sums of 4 steps. Of the LANES lanes that have a row, the i-th quarter gets the
// sum of step i.
template <int LANES> SMOE_DEVICE float sum_of_lanes(const float (&v)[AHEAD], int lane)
{
    const bool high = lane & LANES / 2, odd = lane & LANES / 4;
    float first = high ? v[2] : v[0], second = high ? v[3] : v[1];
    first += __shfl_xor_sync(~0u, high ? v[0] : v[2], LANES / 2);
    second += __shfl_xor_sync(~0u, high ? v[1] : v[3], LANES / 2);
    float sum = odd ? second : first;
    sum += __shfl_xor_sync(~0u, odd ? first : second, LANES / 4);
#pragma unroll
    for (int apart = LANES / 8; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    return sum;
}

// Stores dS of a group of rows of a warp tile, from `row` on. row < 0: there are none yet.
template <width W>
SMOE_DEVICE void write_sums(float *ds_out, int row, const float (&ds)[AHEAD], float scales, int lane)
{
    constexpr int LANES = tile_width<W>::LANES;
    const int own = row + lane % LANES / (LANES / 4) * tile_width<W>::ROWS + tile_width<W>::row(lane);
    const float sum = sum_of_lanes<LANES>(ds, lane), scale = __shfl_sync(~0u, scales, own);
    if (row >= 0 && lane % (LANES / 4) == 0) ds_out[own] = sum * scale;
}

// Computes one warp tile. Each row of H is fetched four steps ahead. `next`: the warp tile after it.
template <typename T, int KIND, width W>
SMOE_DEVICE void work_warp_tile(const dh_params &p, const h_ring<activation<T, KIND>::GATED> &ring,
                                const dh_layout &shared, uint32_t warp_tile, place at, place next,
                                float weights, float *ds_out, int lane)
{
    constexpr int ROWS = tile_width<W>::ROWS, GROUP_ROWS = tile_width<W>::GROUP_ROWS;
    const int a_width = p.intermediate, h_width = h_width_of<T, KIND>(p), own = tile_width<W>::row(lane);
    const int vector = tile_width<W>::column(lane) / 8;
    const float scales = load_shared_float(shared.scale(warp_tile, lane & 15)), y_weights = weights * scales;
    const bool exists = at.column < p.intermediate;
    const char *to_dh = vector_of(p.dh, at.row + own, h_width, at.column),
               *to_a = vector_of(p.a, at.row + own, a_width, at.column),
               *ahead = vector_of(p.h, at.row + own + (AHEAD - 1) * ROWS, h_width, at.column);
    const char *const behind = vector_of(p.h, next.row + own, h_width, next.column);
    uint32_t here =
        shared.warp_tile(warp_tile) + (vector >> 3) * SUBTILE_BYTES + moe_subtile_offset(own, vector & 7);
    float ds[AHEAD] = {};
    wait_copies<AHEAD - 1>();
    uint4 x = load_shared16(here), g = ring.gate(0), u = ring.up(0);
#pragma unroll 1
    for (int row = 0; row < WARP_TILE_ROWS; row += GROUP_ROWS) {
        const bool last = row == WARP_TILE_ROWS - GROUP_ROWS;
        const int ahead_column = last ? next.column : at.column;
        write_sums<W>(ds_out, row - GROUP_ROWS, ds, scales, lane); // nothing here waits for this load
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            uint4 x_next = x, g_next = g, u_next = u;
            ahead = last && i == 0 ? behind : advance_by_adds(ahead, h_width * 2 * ROWS);
            ring.fetch(ahead, ahead_column,
                       i); // the row of this slot has been in registers since the last iteration
            wait_copies<AHEAD - 1>();
            if (i + 1 < AHEAD || !last) {
                // Steps i + 1 to 3 of these four, then step 0 of the next four; the vectors of their rows are
                // exchanged.
                const int further = (i + 1) * ROWS;
                const uint32_t below = (here ^ (further & 7) << 4) + further * SMOE_SUBTILE_ROW_BYTES;
                if (i + 1 == AHEAD) here = below;
                x_next = load_shared16(below);
                g_next = ring.gate((i + 1) % AHEAD), u_next = ring.up((i + 1) % AHEAD);
            }
            const int of_row = row + i * ROWS + own;
            ds[i] = write_row<T, KIND>(p, x, g, u, to_dh, to_a, exists, __shfl_sync(~0u, weights, of_row),
                                       __shfl_sync(~0u, y_weights, of_row));
            to_dh = advance_by_adds(to_dh, h_width * 2 * ROWS);
            to_a = advance_by_adds(to_a, a_width * 2 * ROWS);
            x = x_next, g = g_next, u = u_next;
        }
    }
    write_sums<W>(ds_out, WARP_TILE_ROWS - GROUP_ROWS, ds, scales, lane);
}

template <typename T, width W, int KIND>
SMOE_DEVICE void work_tiles(const dh_params &p, const tile_walk &walk, const dh_layout &shared, int worker,
                            int lane)
{
    if (blockIdx.x >= walk.units) return;
    const h_ring<activation<T, KIND>::GATED> ring = {p, shared.base + RING + worker * RING_WARP + lane * 16};
    uint32_t phases = 0; // bit c: parity of consumer c's next warp tile
    moe_work tile = tile_of<W>(walk, blockIdx.x);
    const int own = tile_width<W>::row(lane), column = tile_width<W>::column(lane);
    place at = {tile.row + worker * WARP_TILE_ROWS, column_of<W>(walk, blockIdx.x) * TILE_COLUMNS + column};
    float weights = __ldg(p.row_weight + at.row + (lane & 15));
    const int h_width = h_width_of<T, KIND>(p);
    for (int i = 0; i < AHEAD; i++)
        ring.fetch(vector_of(p.h, at.row + i * tile_width<W>::ROWS + own, h_width, at.column), at.column, i);
    for (int unit = blockIdx.x; unit < walk.units; unit += gridDim.x) {
        const int blocks = moe_work_blocks(tile);
        const int column_tile = column_of<W>(walk, unit);
        moe_work after = tile;
        place first = at; // of the next tile; after the last tile it is fetched once more
        if (unit + gridDim.x < walk.units) {
            after = tile_of<W>(walk, unit + gridDim.x);
            first = {after.row + worker * WARP_TILE_ROWS,
                     column_of<W>(walk, unit + gridDim.x) * TILE_COLUMNS + column};
        }
        for (int consumer = 0; consumer < blocks; consumer++) {
            const uint32_t warp_tile = consumer * 4 + worker, parity = phases >> consumer & 1;
            const place next = consumer + 1 < blocks ? place{at.row + SMOE_BLOCK_ROWS, at.column} : first;
            const float next_weights = __ldg(p.row_weight + next.row + (lane & 15));
            barrier_wait(shared.warp_tile_full(warp_tile), parity);
            work_warp_tile<T, KIND, W>(p, ring, shared, warp_tile, at, next, weights,
                                       p.ds + column_tile * p.padded_rows + at.row, lane);
            __syncwarp();
            if (lane == 0) barrier_arrive(shared.warp_tile_empty(warp_tile));
            at = next;
            weights = next_weights;
            phases ^= 1 << consumer;
        }
        tile = after;
    }
    wait_copies<0>();
}

template <typename T, width W>
SMOE_DEVICE void work_tiles(const dh_params &p, const tile_walk &walk, const dh_layout &shared, int worker,
                            int lane)
{
    switch (p.activation) {
#define SMOE_WORK(enumerator, name, shape, curve)                                                            \
    case enumerator: return work_tiles<T, W, enumerator>(p, walk, shared, worker, lane);
        MOE_ACTIVATIONS(SMOE_WORK)
#undef SMOE_WORK
    }
    __builtin_unreachable(); // the host refuses other values
}

// ---- Consumers

// Exponent (as stored in a float) of the largest of the row's elements, which four neighbouring lanes share;
// at least 20, so that its inverse is a normal number.
SMOE_DEVICE uint32_t row_exponent(float most)
{
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    return max(__float_as_uint(most) >> 23, 20u);
}

// Writes the warp's 16 rows of accumulators to its warp tile: x 2^(141 - e) in fp16, and the row's scale
// 2^(e - 141) to the array of scales.
template <int COUNT>
SMOE_DEVICE void dump(const float (&acc)[COUNT], const dh_layout &shared, uint32_t warp_tile, uint32_t parity,
                      int lane)
{
    using H = storage<__half>;
    float most_upper = 0.0f, most_lower = 0.0f; // rows lane / 4 and lane / 4 + 8
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
        most_upper = fmaxf(most_upper, fmaxf(fabsf(acc[i]), fabsf(acc[i + 1])));
        most_lower = fmaxf(most_lower, fmaxf(fabsf(acc[i + 2]), fabsf(acc[i + 3])));
    }
    const uint32_t upper = row_exponent(most_upper), lower = row_exponent(most_lower);
    const float by_upper = __uint_as_float((268 - upper) << 23),
                by_lower = __uint_as_float((268 - lower) << 23);
    barrier_wait(shared.warp_tile_empty(warp_tile), parity);
    if ((lane & 3) == 0) {
        store_shared_float(shared.scale(warp_tile, lane >> 2), __uint_as_float((upper - 14) << 23));
        store_shared_float(shared.scale(warp_tile, (lane >> 2) + 8), __uint_as_float((lower - 14) << 23));
    }
    const uint32_t to = shared.warp_tile(warp_tile);
#pragma unroll
    for (int q = 0; q < COUNT / 8; q++) {
        const float *v = acc + q * 8;
        store_matrices(to + (q >> 2) * SUBTILE_BYTES +
                           moe_subtile_offset(lane & 15, (q & 3) * 2 + (lane >> 4)),
                       H::pack(v[0] * by_upper, v[1] * by_upper), H::pack(v[2] * by_lower, v[3] * by_lower),
                       H::pack(v[4] * by_upper, v[5] * by_upper), H::pack(v[6] * by_lower, v[7] * by_lower));
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.warp_tile_full(warp_tile));
}

template <typename T, width W>
SMOE_DEVICE void multiply_tiles(const dh_params &p, const tile_walk &walk, const dh_layout &shared, int warp,
                                int lane)
{
    ring_position<SLOTS> ring(0);
    const int consumer = warp >> 2, steps = steps_of(p);
    uint32_t count = 0;
    float acc[tile_width<W>::COLUMNS / 2];
    gatherer<W> gather(p, walk, shared);
    const auto refill = [&](uint32_t slot) {
        named_barrier_sync(CONSUMER_BARRIER + consumer, CONSUMER_THREADS);
        gather.fill(slot);
    };
#pragma unroll 1
    for (int i = 0; i < SLOTS; i++) gather.fill(i);
    for (int unit = blockIdx.x; unit < walk.units; unit += gridDim.x) {
        const moe_work tile = tile_of<W>(walk, unit); // the thread that gathers has read it before
        if (consumer >= moe_work_blocks(tile)) {
            pass_over(ring, shared, steps, refill);
            continue;
        }
        multiply<T, true, K_MAJOR, MN_MAJOR>(acc, ring, shared, steps, consumer, refill);
        dump(acc, shared, warp, (count & 1) ^ 1, lane);
        count++;
    }
}

SMOE_DEVICE void init_barriers(const dh_layout &shared)
{
    for (int i = 0; i < SLOTS; i++) {
        barrier_init(shared.full(i), 1 + 2 * CONSUMER_THREADS);
        store_shared_word(shared.done(i), 0);
    }
    for (int i = 0; i < WARP_TILES; i++) {
        barrier_init(shared.warp_tile_full(i), 1);
        barrier_init(shared.warp_tile_empty(i), 1);
    }
    barrier_init_done();
}

template <typename T, width W>
__global__ void __launch_bounds__(THREADS, 1) dh(const __grid_constant__ dh_params p)
{
    extern __shared__ __align__(1024) char memory[];
    const dh_layout shared(shared_address(memory));
    const int warp = warp_number(), lane = threadIdx.x & 31;
    if (threadIdx.x == 0) init_barriers(shared);
    __syncthreads();
    const tile_walk walk(p.lists.tiles, p.lists.counts, (p.intermediate + TILE_COLUMNS - 1) / TILE_COLUMNS);
    if (warp >= 8) {
        give_registers<120>();
        work_tiles<T, W>(p, walk, shared, warp - 8, lane);
    } else {
        take_registers<192>();
        multiply_tiles<T, W>(p, walk, shared, warp, lane);
    }
}

width width_of(const moe_dh &d)
{
    if (d.intermediate <= NARROW_COLUMNS) return NARROW;
    return d.intermediate > SMOE_MOST_COLUMNS_FIRST * TILE_COLUMNS ? WIDE : MIDDLE;
}

dh_params prepare(moe_launch *on, const moe_dh &d)
{
    const int64_t row_bytes = d.intermediate * moe_type_bytes(on->dtype);
    const moe_subtiles w2 = {d.w2, d.intermediate, d.hidden, row_bytes, d.experts, d.hidden * row_bytes};
    dh_params p = {};
    moe_map_subtiles(on, &p.w2, &w2,
                     (width_of(d) == NARROW ? NARROW_COLUMNS : TILE_COLUMNS) / SMOE_SUBTILE_COLUMNS);
    p.dout = d.dout;
    p.h = d.h;
    p.dh = d.dh;
    p.a = d.a;
    p.ds = d.ds;
    p.row_token = d.row_token;
    p.row_weight = d.row_weight;
    p.lists = d.lists;
    p.padded_rows = d.padded_rows;
    p.hidden = (int32_t)d.hidden;
    p.intermediate = (int32_t)d.intermediate;
    p.gated = d.gated;
    p.subtiles_apart = moe_subtiles_apart(d.intermediate);
    p.activation = d.activation;
    return p;
}

} // namespace
} // namespace moe

extern "C" cudaError_t moe_sm90_dh_init(void)
{
    using namespace moe;
    return for_every_type(storage_types(), [](auto t) {
        using T = typename decltype(t)::type;
        for (const auto kernel : {dh<T, NARROW>, dh<T, MIDDLE>, dh<T, WIDE>}) {
            const cudaError_t status = allow_shared(kernel, SHARED_BYTES);
            if (status != cudaSuccess) return status;
        }
        return cudaSuccess;
    });
}

extern "C" cudaError_t moe_sm90_dh(moe_launch *on, const moe_dh *d)
{
    using namespace moe;
    const dh_params p = prepare(on, *d);
    if (on->map_status != CUDA_SUCCESS) return cudaErrorInvalidValue;
    return for_type(storage_types(), on->dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        const width w = width_of(*d);
        return enqueue(w == NARROW   ? dh<T, NARROW>
                       : w == MIDDLE ? dh<T, MIDDLE>
                                     : dh<T, WIDE>,
                       on->ctas, THREADS, SHARED_BYTES, on->stream, p);
    });
}
