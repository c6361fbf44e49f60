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
// The four warps of the third warpgroup read these rows from shared memory. In a step a warp takes one row of
// 256 columns or two rows of 128. For each row it also needs H: 512 bytes or, with a gate, 512 bytes of the
// gate half and 512 bytes of the up half (narrow tiles: half of it). Each lane copies 16 bytes of each half
// to shared memory with cp.async, four steps ahead. From registers the lane writes the matching 16 bytes of
// A' and of each half of dH. Since a lane reads its bytes of H before it writes the same bytes of dH, dH may
// overwrite H.
//
// Each column tile has its own partial sums of dS, so no atomics are needed. With LoRA Q2[r] A2[e] is added
// to dA'[r], as more steps of K.
//
// This file has the gathering and the consumers, sm90/dh_rows.cuh the worker warps, sm90/dh_layout.cuh shared
// memory.
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "sm90/dh_rows.cuh"
#include "sm90/kernels.h"
#include "tma/tensor_map.h"
#include "tma/tma.cuh"

namespace moe
{
namespace
{

using namespace dh_kernel;

// ---- Gathering: a consumer that has finished with a slot fills it again. All its threads copy the
// consumer's own 64 rows of dO. The consumer that finishes with the slot last also starts the copy of W2's
// box.

MOE_DEVICE int steps_of_k(const dh_params &p)
{
    return (p.hidden + STEP - 1) / STEP;
}
// With those of LoRA: Q2 and A2 are more columns of K, behind those of dO and W2.
template <bool LORA> MOE_DEVICE int steps_of(const dh_params &p)
{
    return LORA ? steps_of_k(p) + (p.rank + STEP - 1) / STEP : steps_of_k(p);
}

template <width W, bool LORA> struct gatherer {
    const dh_params &p;
    const tile_walk &walk;
    const dh_layout<W> &shared;
    int unit, column, k; // of the step to load next; column: first of the tile
    int next;            // token of row row0 + 16 (vector % 4) of the tile after this one
    moe_work tile;
    uint32_t real;            // bit i: row row0 + 16 i exists
    const char *from[COPIES]; // this thread's 16 bytes of the step

    MOE_DEVICE gatherer(const dh_params &params, const tile_walk &work, const dh_layout<W> &layout)
        : p(params), walk(work), shared(layout), unit(blockIdx.x), column(0), k(0), next(-1), tile({0, 0}),
          real(0)
    {
        if (unit >= walk.units) return;
        read_token(tile_of<W>(walk, unit));
        begin_tile();
    }

    static MOE_DEVICE int consumer()
    {
        return threadIdx.x / CONSUMER_THREADS;
    }
    static MOE_DEVICE int row0()
    {
        return threadIdx.x % CONSUMER_THREADS >> 3;
    }
    static MOE_DEVICE int vector()
    {
        return threadIdx.x & 7;
    }

    MOE_DEVICE void read_token(moe_work of)
    {
        const int row = of.row + consumer() * MOE_BLOCK_ROWS + row0() + 16 * (vector() % COPIES);
        next = consumer() < moe_work_blocks(of) ? __ldg(p.row_token + row) : -1;
    }

    // Makes the unit's tile the current one, and starts to read the tokens of the tile after it.
    MOE_DEVICE void begin_tile()
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

    // 64 rows of W2[e], or of A2[e], from `row` on.
    MOE_DEVICE void load_weights(const CUtensorMap *map, int row, uint32_t to, uint32_t full) const
    {
        barrier_expect(full, tile_width<W>::SUBTILES * MOE_SUBTILE_BYTES);
        const int expert = moe_work_expert(tile);
        if (!p.subtiles_apart) return load_box(to, map, full, 0, row, column / MOE_SUBTILE_COLUMNS, expert);
        for (int i = 0; i < tile_width<W>::SUBTILES; i++)
            load_box(to + i * MOE_SUBTILE_BYTES, map, full, column + i * MOE_SUBTILE_COLUMNS, row, 0, expert);
    }

    // LoRA: from now on the rows are those of Q2.
    MOE_DEVICE void begin_low_rank()
    {
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int64_t row = tile.row + consumer() * MOE_BLOCK_ROWS + row0() + 16 * i;
            from[i] = (const char *)p.q2 + (real & 1u << i ? row * p.rank * 2 : 0) + vector() * 16;
        }
    }

    // Fills a slot that all warps of the consumer have finished with.
    MOE_DEVICE void fill(uint32_t number)
    {
        if (unit >= walk.units) return;
        const uint32_t slot = shared.slot(number), full = shared.full(number);
        const bool low = LORA && k >= steps_of_k(p);
        const int first = low ? (k - steps_of_k(p)) * STEP : k * STEP; // of K, or of the rank
        if (LORA && k == steps_of_k(p)) begin_low_rank();
        const uint32_t wanted = first + vector() * 8 < (low ? p.rank : p.hidden) ? real : 0;
        const uint32_t to = slot + consumer() * MOE_SUBTILE_BYTES + moe_subtile_offset(row0(), vector());
#pragma unroll
        for (int i = 0; i < COPIES; i++)
            copy16_async_if(wanted & 1u << i, to + i * 16 * MOE_SUBTILE_ROW_BYTES, from[i]);
        barrier_arrive_after_copies(full);
        if (threadIdx.x % CONSUMER_THREADS == 0 && second_of_two(shared.done(number)))
            load_weights(low ? &p.a2 : &p.w2, first, slot + A_BYTES, full);
#pragma unroll
        for (int i = 0; i < COPIES; i++) from[i] = advance_by_adds(from[i], STEP * 2);
        if (++k < steps_of<LORA>(p)) return;
        unit += gridDim.x;
        if (unit < walk.units) begin_tile();
    }
};

// ---- Consumers

// Exponent (as stored in a float) of the largest of the row's elements, which four neighbouring lanes share;
// at least 20, so that its inverse is a normal number.
MOE_DEVICE uint32_t row_exponent(float most)
{
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    return max(__float_as_uint(most) >> 23, 20u);
}

// Writes the warp's 16 rows of accumulators to its warp tile: x 2^(141 - e) in fp16, and the row's scale
// 2^(e - 141) to the array of scales.
template <width W, int COUNT>
MOE_DEVICE void dump(const float (&acc)[COUNT], const dh_layout<W> &shared, uint32_t warp_tile,
                     uint32_t parity, int lane)
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

template <typename T, width W, bool LORA>
MOE_DEVICE void multiply_tiles(const dh_params &p, const tile_walk &walk, const dh_layout<W> &shared,
                               int warp, int lane)
{
    ring_position<dh_layout<W>::RING_SLOTS> ring(0);
    const int consumer = warp >> 2, steps = steps_of<LORA>(p);
    uint32_t count = 0;
    float acc[tile_width<W>::COLUMNS / 2];
    gatherer<W, LORA> gather(p, walk, shared);
    const auto refill = [&](uint32_t slot) {
        named_barrier_sync(CONSUMER_BARRIER + consumer, CONSUMER_THREADS);
        gather.fill(slot);
    };
#pragma unroll 1
    for (int i = 0; i < shared.RING_SLOTS; i++) gather.fill(i);
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

template <width W> MOE_DEVICE void init_barriers(const dh_layout<W> &shared)
{
    for (int i = 0; i < shared.RING_SLOTS; i++) {
        barrier_init(shared.full(i), 1 + 2 * CONSUMER_THREADS);
        store_shared_word(shared.done(i), 0);
    }
    for (int i = 0; i < WARP_TILES; i++) {
        barrier_init(shared.warp_tile_full(i), 1);
        barrier_init(shared.warp_tile_empty(i), 1);
    }
    barrier_init_done();
}

template <typename T, width W, bool LORA>
__global__ void __launch_bounds__(THREADS, 1) dh(const __grid_constant__ dh_params p)
{
    extern __shared__ __align__(1024) char memory[];
    const dh_layout<W> shared(shared_address(memory));
    const int warp = warp_number(), lane = threadIdx.x & 31;
    if (threadIdx.x == 0) init_barriers(shared);
    __syncthreads();
    const tile_walk walk(p.lists.tiles, p.lists.counts, (p.intermediate + TILE_COLUMNS - 1) / TILE_COLUMNS);
    if (warp >= 8) {
        give_registers<120>();
        work_tiles<T, W>(p, walk, shared, warp - 8, lane);
    } else {
        take_registers<192>();
        multiply_tiles<T, W, LORA>(p, walk, shared, warp, lane);
    }
}

width width_of(const moe_dh &d)
{
    if (d.intermediate <= NARROW_COLUMNS) return NARROW;
    return d.intermediate > MOE_MOST_COLUMNS_FIRST * TILE_COLUMNS ? WIDE : MIDDLE;
}

dh_params prepare(moe_launch *on, const moe_dh &d)
{
    const int64_t row_bytes = d.intermediate * moe_type_bytes(on->dtype);
    const moe_subtiles w2 = {d.w2, d.intermediate, d.hidden, row_bytes, d.experts, d.hidden * row_bytes};
    dh_params p = {};
    moe_map_subtiles(on, &p.w2, &w2,
                     (width_of(d) == NARROW ? NARROW_COLUMNS : TILE_COLUMNS) / MOE_SUBTILE_COLUMNS);
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
    p.values = d.values;
    p.rank = (int32_t)d.lora.rank;
    p.q2 = d.lora.low;
    if (!p.rank) return p;
    const moe_subtiles a2 = {d.lora.factor, d.intermediate, d.lora.rank,
                             row_bytes,     d.experts,      d.lora.rank * row_bytes};
    moe_map_subtiles(on, &p.a2, &a2,
                     (width_of(d) == NARROW ? NARROW_COLUMNS : TILE_COLUMNS) / MOE_SUBTILE_COLUMNS);
    return p;
}

template <typename T, bool LORA> auto kernel_of(width w)
{
    return w == NARROW ? dh<T, NARROW, LORA> : w == MIDDLE ? dh<T, MIDDLE, LORA> : dh<T, WIDE, LORA>;
}

} // namespace
} // namespace moe

extern "C" cudaError_t moe_sm90_dh_init(const moe_device *device)
{
    using namespace moe;
    return for_every_type(storage_types(), [&](auto t) {
        using T = typename decltype(t)::type;
        for (const width w : {NARROW, MIDDLE, WIDE})
            for (const auto kernel : {kernel_of<T, false>(w), kernel_of<T, true>(w)}) {
                const cudaError_t status = allow_shared(device, kernel, SHARED_BYTES);
                if (status != cudaSuccess) return status;
            }
        return cudaSuccess;
    });
}

extern "C" cudaError_t moe_sm90_dh(moe_launch *on, const moe_dh *d)
{
    using namespace moe;
    const dh_params p = prepare(on, *d);
    if (on->refused_call) return cudaErrorInvalidValue;
    return for_type(storage_types(), on->dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        const auto kernel = p.rank ? kernel_of<T, true>(width_of(*d)) : kernel_of<T, false>(width_of(*d));
        return enqueue(kernel, on->sms, THREADS, SHARED_BYTES, on->stream, p);
    });
}
