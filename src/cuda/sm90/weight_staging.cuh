// From the accumulators of a weight gradient to staging buffers, from which dw.cu stores them. A tile
// is stored in PARTS parts of 64 rows of d by PART_FEATURES; of a tall tile the first half of the parts
// has the consumer's first 64 rows. A part takes one staging buffer of two subtiles.
// Terms: docs/glossary.md; symbols: include/smoe.h.
#pragma once
#include "schedule/weight_tiles.h"
#include "sm90/gemm_cooperative.cuh"
#include "tma/tma.cuh"

namespace moe
{
namespace weight_staging
{

using namespace gemm_cooperative;

template <typename G> struct output {
    enum {
        ROUNDS = sizeof(G) / 2, // how often a buffer is filled for one tile
        PARTS = 2 * ROUNDS,
        PART_FEATURES = TILE_COLUMNS / PARTS,
        SUBTILE_ELEMENTS = MOE_SUBTILE_ROW_BYTES / sizeof(G)
    };
    static MOE_DEVICE uint32_t buffer(int consumer, int part)
    {
        return consumer * 2 + (part & 1);
    }
    // Parity of a buffer's phase at the consumer's `count`-th tile.
    static MOE_DEVICE uint32_t parity(uint32_t count, int part)
    {
        return (count * ROUNDS + (part >> 1)) & 1;
    }
};

// Which of a warp's 16 rows of d a lane's accumulators are: of every four, the first two are row first, the
// others are row first + step.
struct rows_in_order { // as wgmma has them
    enum { IN_PAIRS = 0 };
    static MOE_DEVICE int first(int lane)
    {
        return lane >> 2;
    }
    static MOE_DEVICE int step(int)
    {
        return 8;
    }
};

// A lane has two neighbours. The first rows of every fourth lane are 0 2 4 6 9 11 13 15, so that they reach
// all banks.
struct rows_in_pairs {
    enum { IN_PAIRS = 1 };
    static MOE_DEVICE int first(int lane)
    {
        return (lane >> 2) * 2 + (lane >> 4);
    }
    static MOE_DEVICE int step(int lane)
    {
        return 1 - (lane >> 4) * 2;
    }
};

// rows_in_pairs, transposed: where a lane's two of d are in the rows of its two features of an octet. The
// next octet is eight rows on.
MOE_DEVICE uint32_t pair_transposed(int warp, int lane, int odd_feature)
{
    return moe_subtile_offset((lane & 3) * 2 + odd_feature, 2 * warp + (lane >> 4)) + (lane >> 2 & 3) * 4;
}

// The lane whose stmatrix address in order is this lane's.
template <class Rows> MOE_DEVICE int address_lane(int lane)
{
    const int of = (lane & 7) << 2; // the lanes whose accumulators this row has
    return Rows::IN_PAIRS ? (lane & 16) | (Rows::first(of) + (lane >> 3 & 1) * Rows::step(of)) : lane;
}

// acc: the part's accumulators, octets of features.
template <class Rows, typename T>
MOE_DEVICE void write_part(const float *acc, uint32_t buffer, int warp, int lane, bool transposed, T)
{
    using S = storage<T>;
    if (Rows::IN_PAIRS && transposed) {
        const uint32_t halves = lane < 16 ? 0x3210 : 0x1032; // in the order of d
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const float *v = acc + i / 2 * 4 + i % 2; // of one feature
            store_shared_word(buffer + pair_transposed(warp, lane, i % 2) + i / 2 * 8 * MOE_SUBTILE_ROW_BYTES,
                              __byte_perm(S::pack(v[0], v[2]), 0, halves));
        }
        return;
    }
    lane = address_lane<Rows>(lane);
#pragma unroll
    for (int q = 0; q < 8; q++) {
        const float *v = acc + q * 8;
        if (transposed)
            store_matrices_transposed(buffer + moe_part_transposed(warp, lane, q), S::pack(v[0], v[1]),
                                      S::pack(v[2], v[3]), S::pack(v[4], v[5]), S::pack(v[6], v[7]));
        else
            store_matrices(buffer + moe_part_plain(warp, lane, q), S::pack(v[0], v[1]), S::pack(v[2], v[3]),
                           S::pack(v[4], v[5]), S::pack(v[6], v[7]));
    }
}

template <class Rows>
MOE_DEVICE void write_part(const float *acc, uint32_t buffer, int warp, int lane, bool transposed, float)
{
    const uint32_t row = warp * 16 + Rows::first(lane), pair = (lane & 3) * 2;
    uint32_t to[4]; // of the first octet
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t d = row + (i >> 1) * Rows::step(lane), feature = pair + (i & 1);
        to[i] = buffer + (transposed ? moe_part_f32(feature, d) : moe_part_f32(d, feature));
    }
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int octet = i >> 2;
        if (transposed)
            store_shared_float(to[i & 3] + octet * 8 * MOE_SUBTILE_ROW_BYTES, acc[i]);
        else if (i % 2 == 0)
            store_shared_floats(buffer +
                                    moe_part_f32(row + (i >> 1 & 1) * Rows::step(lane), octet * 8 + pair),
                                acc[i], acc[i + 1]);
    }
}

// Adds to the accumulators the old values that the stores of write_part will overwrite.
template <class Rows, typename T>
MOE_DEVICE void add_old(float *acc, uint32_t buffer, int warp, int lane, bool transposed)
{
    using S = storage<T>;
    if (Rows::IN_PAIRS && transposed) {
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const uint32_t old = __float_as_uint(load_shared_float(
                buffer + pair_transposed(warp, lane, i % 2) + i / 2 * 8 * MOE_SUBTILE_ROW_BYTES));
            float *v = acc + i / 2 * 4 + i % 2;
            v[0] += lane < 16 ? S::low(old) : S::high(old);
            v[2] += lane < 16 ? S::high(old) : S::low(old);
        }
        return;
    }
    lane = address_lane<Rows>(lane);
#pragma unroll
    for (int q = 0; q < 8; q++) {
        uint32_t old[4];
        if (transposed)
            load_matrices_transposed(old, buffer + moe_part_transposed(warp, lane, q));
        else
            load_matrices(old, buffer + moe_part_plain(warp, lane, q));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            acc[q * 8 + 2 * i] += S::low(old[i]);
            acc[q * 8 + 2 * i + 1] += S::high(old[i]);
        }
    }
}

template <class Rows, typename G, bool MERGES, int COUNT>
MOE_DEVICE void write_tile(float (&acc)[128], const ring_layout<COUNT> &shared, int consumer, uint32_t count,
                           int lane, bool transposed)
{
    using O = output<G>;
    const int warp = (threadIdx.x >> 5) & 3;
#pragma unroll
    for (int part = 0; part < O::PARTS; part++) {
        const uint32_t buffer = O::buffer(consumer, part);
        float *of_part = acc + part * (128 / O::PARTS);
        barrier_wait(shared.buffer_empty(buffer), O::parity(count, part) ^ !MERGES);
        if constexpr (MERGES) add_old<Rows, G>(of_part, shared.buffer(buffer), warp, lane, transposed);
        write_part<Rows>(of_part, shared.buffer(buffer), warp, lane, transposed, G());
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) barrier_arrive(shared.buffer_full(buffer));
    }
}

} // namespace weight_staging
} // namespace moe
