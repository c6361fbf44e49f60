// The cooperative core: a CTA computes tiles of 128 x 256. Each of its two consumer warpgroups computes 64
// rows of the tile. There are two other tiles: a narrow one of 128 x 128 for up to 128 columns, and a tall
// one of 256 x 128, where a consumer computes 128 rows, for an odd number of 128 columns.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// The third warpgroup loads and stores. Warps 8 and 9 fill a ring of three slots in shared memory, of
// four with narrow tiles. A slot holds 64 columns of K: 128 x 64 elements of operand A and 256 x 64 of
// operand B (tall: 256 x 64 and 128 x 64; narrow: 128 x 64 of each). Warps 10 and 11 store the finished tiles
// of consumers 0 and 1. The epilogue of a consumer is short: it converts its accumulators, writes them to
// staging buffers with stmatrix, and arrives on the barriers of these buffers. It starts the next tile while
// the store warps work.
//
// The staging buffers hold a whole tile: for each consumer two buffers of 128 columns, each of two subtiles
// of 64 x 64.
#pragma once
#include "common/storage.cuh"
#include "common/swizzle.h"
#include "sm90/wgmma.cuh"
#include "tma/mbarrier.cuh"

#include <type_traits>

namespace moe
{
namespace gemm_cooperative
{

enum {
    THREADS = 384,
    TILE_ROWS = 128,
    TILE_COLUMNS = 256,
    STEP = 64, // of K, a slot
    SLOTS = 3,
    A_BYTES = TILE_ROWS * STEP * 2,
    B_BYTES = TILE_COLUMNS * STEP * 2,
    SLOT_BYTES = A_BYTES + B_BYTES,
    NARROW_COLUMNS = TILE_COLUMNS / 2,
    NARROW_SLOTS = 4, // of 32 KB, in the bytes of three of 48 KB
    NARROW_SLOT_BYTES = A_BYTES + NARROW_COLUMNS * STEP * 2,
    TALL_ROWS = TILE_ROWS * 2, // of a tall tile, which has NARROW_COLUMNS columns
    BUFFERS = 4,               // two for each consumer
    BUFFER_BYTES = 2 * MOE_SUBTILE_BYTES,
    CONSUMER_WARPS = 8,
    STAGING = SLOTS * SLOT_BYTES,
    STAGING_END = STAGING + BUFFERS * BUFFER_BYTES,
    BARRIER_BYTES = 8 * (2 * SLOTS + 2 * BUFFERS)
};

static_assert((int)NARROW_SLOTS * (int)NARROW_SLOT_BYTES <= (int)STAGING, "staging is behind the ring");
static_assert((int)NARROW_SLOTS != (int)SLOTS, "the number of slots tells how large they are");

// Addresses in shared memory, with a ring of COUNT slots.
template <int COUNT> struct ring_layout {
    uint32_t base, barriers;
    MOE_DEVICE uint32_t slot(uint32_t s) const
    {
        return base + s * (COUNT == NARROW_SLOTS ? NARROW_SLOT_BYTES : SLOT_BYTES);
    }
    MOE_DEVICE uint32_t buffer(uint32_t s) const
    {
        return base + STAGING + s * BUFFER_BYTES;
    }
    MOE_DEVICE uint32_t full(uint32_t s) const
    {
        return barriers + 8 * s;
    }
    MOE_DEVICE uint32_t empty(uint32_t s) const
    {
        return barriers + 8 * (COUNT + s);
    }
    MOE_DEVICE uint32_t buffer_full(uint32_t s) const
    {
        return barriers + 8 * (2 * COUNT + s);
    }
    MOE_DEVICE uint32_t buffer_empty(uint32_t s) const
    {
        return barriers + 8 * (2 * COUNT + BUFFERS + s);
    }
};
using shared_layout = ring_layout<SLOTS>;

// By one thread. `loaders`: arrivals that complete a slot.
template <int COUNT> MOE_DEVICE void init_barriers(const ring_layout<COUNT> &shared, uint32_t loaders)
{
    for (int i = 0; i < COUNT; i++) {
        barrier_init(shared.full(i), loaders);
        barrier_init(shared.empty(i), CONSUMER_WARPS);
    }
    for (int i = 0; i < BUFFERS; i++) {
        barrier_init(shared.buffer_full(i), 4); // the warps of a consumer
        barrier_init(shared.buffer_empty(i), 1);
    }
    barrier_init_done();
}

// ---- Consumers

// After the last use of a slot: tells the threads that fill it.
template <int COUNT> struct release_slot {
    const ring_layout<COUNT> &shared;
    int lane;
    MOE_DEVICE void operator()(uint32_t slot) const
    {
        if (lane == 0) barrier_arrive(shared.empty(slot));
    }
};
template <int COUNT> release_slot(const ring_layout<COUNT> &, int) -> release_slot<COUNT>;

// 64 rows of a tall tile.
MOE_DEVICE float (&rows_of(float (&acc)[128], int half))[64]
{
    return *(float(*)[64])(acc + half * 64);
}

// acc = the consumer's rows times the tile's columns: 64 rows times 256 columns, or 64 times 128 if acc has
// 64 elements; TALL: 128 rows times 128 columns, the first 64 rows first. One group of wgmma stays in flight
// while the warp waits for the next slot. Then the warp has finished with the slot before it and calls
// done(slot). COPIED: A was written by cp.async. steps >= 1. LOW, with LoRA: `rank` more columns of K follow,
// in steps of their own. Columns beyond the rank are 0, so only 16, 32 or all of a step are multiplied: three
// branches with constant counts, since ptxas injects warpgroup.arrive if a loop surrounds wgmma (C7519).
template <typename T, bool COPIED, operand_order A = K_MAJOR, operand_order B = K_MAJOR, bool TALL = false,
          bool LOW = false, int SUMS, int COUNT, class Done>
MOE_DEVICE void multiply(float (&acc)[SUMS], ring_position<COUNT> &ring, const ring_layout<COUNT> &shared,
                         int steps, int consumer, const Done &done, int rank = 0)
{
    uint32_t previous = 0;
    for (int k = 0; k < steps; k++) {
        barrier_wait(shared.full(ring.slot), ring.phase);
        if (COPIED) fence_async_proxy();
        const uint32_t a =
            descriptor_address(shared.slot(ring.slot) + consumer * (TALL ? 2 : 1) * MOE_SUBTILE_BYTES);
        const uint32_t b = descriptor_address(shared.slot(ring.slot) + A_BYTES * (TALL ? 2 : 1));
        pin(acc);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < STEP / 16; j++) {
            if constexpr (TALL) {
                const uint64_t right = descriptor<B>(b + descriptor_step<B>() * j);
#pragma unroll
                for (int half = 0; half < 2; half++)
                    tensor_core<T>::template multiply<A, B>(
                        rows_of(acc, half),
                        descriptor<A>(a + descriptor_address(half * MOE_SUBTILE_BYTES) +
                                      descriptor_step<A>() * j),
                        right, (k | j) != 0);
            } else
                tensor_core<T>::template multiply<A, B>(acc, descriptor<A>(a + descriptor_step<A>() * j),
                                                        descriptor<B>(b + descriptor_step<B>() * j),
                                                        (k | j) != 0);
        }
        wgmma_commit();
        pin(acc);
        wgmma_wait<1>();
        if (k) done(ring.slot == 0 ? COUNT - 1 : ring.slot - 1);
        previous = ring.slot;
        ring.advance();
    }
    if constexpr (LOW)
        for (; rank > 0; rank -= STEP) {
            barrier_wait(shared.full(ring.slot), ring.phase);
            if (COPIED) fence_async_proxy();
            const uint32_t a = descriptor_address(shared.slot(ring.slot) + consumer * MOE_SUBTILE_BYTES);
            const uint32_t b = descriptor_address(shared.slot(ring.slot) + A_BYTES);
            const auto columns = [&](auto count) {
                pin(acc);
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < decltype(count)::value; j++)
                    tensor_core<T>::template multiply<A, B>(acc, descriptor<A>(a + descriptor_step<A>() * j),
                                                            descriptor<B>(b + descriptor_step<B>() * j), 1);
                wgmma_commit();
                wgmma_wait<0>();
                pin(acc);
            };
            if (rank > 32)
                columns(std::integral_constant<int, STEP / 16>());
            else if (rank > 16)
                columns(std::integral_constant<int, 2>());
            else
                columns(std::integral_constant<int, 1>());
            done(previous);
            previous = ring.slot;
            ring.advance();
        }
    wgmma_wait<0>();
    pin(acc);
    done(previous);
}

// A tile of which this consumer has no rows: skips its slots.
template <int COUNT, class Done>
MOE_DEVICE void pass_over(ring_position<COUNT> &ring, const ring_layout<COUNT> &shared, int steps,
                          const Done &done)
{
    for (int k = 0; k < steps; k++) {
        barrier_wait(shared.full(ring.slot), ring.phase);
        done(ring.slot);
        ring.advance();
    }
}

// Half a tile (64 accumulators, 16 octets of 8 columns) goes to `buffer`. gated: see moe_octet_subtile. Of
// every four octets, one stmatrix stores 0 and 2, the next one 1 and 3.
template <typename T, bool GATED_CHOICE>
MOE_DEVICE void write_octets(const float *acc, uint32_t buffer, int gated, int lane)
{
    using S = storage<T>;
    const int warp = (threadIdx.x >> 5) & 3, row = warp * 16 + (lane & 15);
    const uint32_t to = buffer + row * MOE_SUBTILE_ROW_BYTES;
#pragma unroll
    for (int q = 0; q < 16; q += 4) {
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const float *left = acc + (q + odd) * 4, *right = left + 8;
            const uint32_t octet = q + odd + (lane >> 4) * 2;
            const int paired = GATED_CHOICE ? gated : 0;
            const uint32_t subtile = paired ? odd : q >> 3;
            const uint32_t vector = moe_octet_vector(octet, paired);
            store_matrices(to + subtile * MOE_SUBTILE_BYTES + ((vector ^ (lane & 7)) << 4),
                           S::pack(left[0], left[1]), S::pack(left[2], left[3]), S::pack(right[0], right[1]),
                           S::pack(right[2], right[3]));
        }
    }
}

// What this warp has written is for a warp that stores it, and for which the barrier completes.
MOE_DEVICE void hand_over(uint32_t full, int lane)
{
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) barrier_arrive(full);
}

// Half `half` of the consumer's `count`-th tile goes to its buffer.
template <typename T, bool GATED_CHOICE, int COUNT>
MOE_DEVICE void write_half(const float *acc, const ring_layout<COUNT> &shared, int consumer, int half,
                           uint32_t count, int gated, int lane)
{
    const uint32_t buffer = consumer * 2 + half;
    barrier_wait(shared.buffer_empty(buffer), (count & 1) ^ 1);
    write_octets<T, GATED_CHOICE>(acc, shared.buffer(buffer), gated, lane);
    hand_over(shared.buffer_full(buffer), lane);
}

} // namespace gemm_cooperative
} // namespace moe
