// What dh.cu and dh_f8.cu share besides the worker warps (dh_rows.cuh): the gathering and the consumers.
// dh.cu explains them. With e4m3 a vector of 16 bytes has 16 elements; there `hidden` counts pairs of them.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// S is what differs. It has `params`, a dh_params or derived from it; begin_tile<W>(p, shared, t, row,
// token), which a thread calls for one row of the tile number t before it copies from the tile;
// load_weights<W>(p, map, expert, column, k, to, full); and multiply<W>(acc, ring, p, shared, steps, tile, t,
// warp, lane, done), which returns what a thread's two rows of sums are to be multiplied by. TOKENS_KEPT: the
// gathering has fewer registers, and computes its addresses in each step with of_eight_lanes (f8.cuh).
// lane(lane): the lane, or the lane read again, so that what follows from it is not in registers while the
// consumer multiplies.
#pragma once
#include "sm90/dh_layout.cuh"
#include "tma/tma.cuh"

namespace moe
{
namespace dh_kernel
{

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

template <class S, width W, bool LORA, int COUNT> struct gatherer {
    using params = typename S::params;
    const params &p;
    const tile_walk &walk;
    const dh_layout<W, COUNT> &shared;
    int unit, column, k; // of the step to load next; column: first of the tile
    int next;            // token of row row0 + 16 (vector % 4) of the tile after this one
    int begun;           // tiles
    moe_work tile;
    uint32_t real;            // bit i: row row0 + 16 i exists
    int token;                // S::TOKENS_KEPT: of row row0 + 16 (vector % 4)
    const char *from[COPIES]; // else: this thread's 16 bytes of the step

    MOE_DEVICE gatherer(const params &all, const tile_walk &work, const dh_layout<W, COUNT> &layout)
        : p(all), walk(work), shared(layout), unit(blockIdx.x), column(0), k(0), next(-1), begun(0),
          tile({0, 0}), real(0), token(-1)
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

    MOE_DEVICE const char *address(int row) const
    {
        return (const char *)p.dout + (uint64_t)(uint32_t)max(row, 0) * ((uint32_t)p.hidden * 2) +
               vector() * 16;
    }
    // Makes the unit's tile the current one, and starts to read the tokens of the tile after it.
    MOE_DEVICE void begin_tile()
    {
        S::template begin_tile<W>(p, shared, begun++,
                                  consumer() * MOE_BLOCK_ROWS + row0() + 16 * (vector() % COPIES), next);
        if constexpr (S::TOKENS_KEPT)
            token = next;
        else {
            real = 0;
#pragma unroll
            for (int i = 0; i < COPIES; i++) {
                const int row = __shfl_sync(~0u, next, (threadIdx.x & 24) | i);
                real |= (row >= 0 ? 1u : 0u) << i;
                from[i] = address(row);
            }
        }
        tile = tile_of<W>(walk, unit);
        column = column_of<W>(walk, unit) * TILE_COLUMNS;
        k = 0;
        if (unit + gridDim.x < walk.units) read_token(tile_of<W>(walk, unit + gridDim.x));
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
        const bool exists = first + vector() * 8 < (low ? p.rank : p.hidden);
        const uint32_t to = slot + consumer() * MOE_SUBTILE_BYTES + moe_subtile_offset(row0(), vector());
        if constexpr (S::TOKENS_KEPT) {
#pragma unroll
            for (int i = 0; i < COPIES; i++) {
                const int row = S::of_eight_lanes(token, i);
                copy16_async_if(exists && row >= 0, to + i * 16 * MOE_SUBTILE_ROW_BYTES,
                                address(row) + first * 2);
            }
        } else {
            const uint32_t wanted = exists ? real : 0;
#pragma unroll
            for (int i = 0; i < COPIES; i++)
                copy16_async_if(wanted & 1u << i, to + i * 16 * MOE_SUBTILE_ROW_BYTES, from[i]);
        }
        barrier_arrive_after_copies(full);
        if (threadIdx.x % CONSUMER_THREADS == 0 && second_of_two(shared.done(number)))
            S::template load_weights<W>(p, low ? &p.a2 : &p.w2, moe_work_expert(tile), column, first,
                                        slot + A_BYTES, full);
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

// What a thread's two rows are to be multiplied by.
struct row_factors {
    float upper, lower;
};

// Writes the warp's 16 rows of accumulators to its warp tile: x 2^(141 - e) in fp16, and the row's scale
// 2^(e - 141), times its factor, to the array of scales.
template <width W, int SUMS, int COUNT>
MOE_DEVICE void dump(const float (&acc)[SUMS], const dh_layout<W, COUNT> &shared, uint32_t warp_tile,
                     uint32_t parity, row_factors by, int lane)
{
    using H = storage<__half>;
    float most_upper = 0.0f, most_lower = 0.0f; // rows lane / 4 and lane / 4 + 8
#pragma unroll
    for (int i = 0; i < SUMS; i += 4) {
        most_upper = fmaxf(most_upper, fmaxf(fabsf(acc[i]), fabsf(acc[i + 1])));
        most_lower = fmaxf(most_lower, fmaxf(fabsf(acc[i + 2]), fabsf(acc[i + 3])));
    }
    const uint32_t upper = row_exponent(most_upper), lower = row_exponent(most_lower);
    const float by_upper = __uint_as_float((268 - upper) << 23),
                by_lower = __uint_as_float((268 - lower) << 23);
    barrier_wait(shared.warp_tile_empty(warp_tile), parity);
    if ((lane & 3) == 0) {
        store_shared_float(shared.scale(warp_tile, lane >> 2),
                           __uint_as_float((upper - 14) << 23) * by.upper);
        store_shared_float(shared.scale(warp_tile, (lane >> 2) + 8),
                           __uint_as_float((lower - 14) << 23) * by.lower);
    }
    const uint32_t to = shared.warp_tile(warp_tile);
#pragma unroll
    for (int q = 0; q < SUMS / 8; q++) {
        const float *v = acc + q * 8;
        store_matrices(to + (q >> 2) * SUBTILE_BYTES +
                           moe_subtile_offset(lane & 15, (q & 3) * 2 + (lane >> 4)),
                       H::pack(v[0] * by_upper, v[1] * by_upper), H::pack(v[2] * by_lower, v[3] * by_lower),
                       H::pack(v[4] * by_upper, v[5] * by_upper), H::pack(v[6] * by_lower, v[7] * by_lower));
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.warp_tile_full(warp_tile));
}

template <class S, width W, bool LORA, int COUNT>
MOE_DEVICE void multiply_tiles(const typename S::params &p, const tile_walk &walk,
                               const dh_layout<W, COUNT> &shared, int warp, int lane)
{
    ring_position<COUNT> ring(0);
    const int consumer = warp >> 2, steps = steps_of<LORA>(p);
    uint32_t count = 0;
    int t = 0;
    float acc[tile_width<W>::COLUMNS / 2];
    gatherer<S, W, LORA, COUNT> gather(p, walk, shared);
    const auto refill = [&](uint32_t slot) {
        named_barrier_sync(CONSUMER_BARRIER + consumer, CONSUMER_THREADS);
        gather.fill(slot);
    };
#pragma unroll 1
    for (int i = 0; i < COUNT; i++) gather.fill(i);
    for (int unit = blockIdx.x; unit < walk.units; unit += gridDim.x, t++) {
        const moe_work tile = tile_of<W>(walk, unit); // the thread that gathers has read it before
        if (consumer >= moe_work_blocks(tile)) {
            pass_over(ring, shared, steps, refill);
            continue;
        }
        const row_factors by =
            S::template multiply<W>(acc, ring, p, shared, steps, tile, t, warp, lane, refill);
        dump(acc, shared, warp, (count & 1) ^ 1, by, S::lane(lane));
        count++;
    }
}

template <width W, int COUNT> MOE_DEVICE void init_barriers(const dh_layout<W, COUNT> &shared)
{
    for (int i = 0; i < COUNT; i++) {
        barrier_init(shared.full(i), 1 + 2 * CONSUMER_THREADS);
        store_shared_word(shared.done(i), 0);
    }
    for (int i = 0; i < WARP_TILES; i++) {
        barrier_init(shared.warp_tile_full(i), 1);
        barrier_init(shared.warp_tile_empty(i), 1);
    }
    barrier_init_done();
}

// ---- The host's side

inline width width_of(const moe_dh &d)
{
    if (d.intermediate <= NARROW_COLUMNS) return NARROW;
    return d.intermediate > MOE_MOST_COLUMNS_FIRST * TILE_COLUMNS ? WIDE : MIDDLE;
}

// Without tensor maps and LoRA.
inline dh_params params_of(const moe_dh &d)
{
    dh_params p = {};
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
    p.activation = d.activation;
    p.values = d.values;
    return p;
}

} // namespace dh_kernel
} // namespace moe
