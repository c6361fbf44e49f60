// Sums of products of e4m3 on the cooperative core (gemm_cooperative.cuh).
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// A slot has 128 elements of K. The tensor cores keep 13 fraction bits (f8.cuh), so after every 1024 of K the
// accumulators are added to sums in f16x2, PROMOTED, and begin again at zero. The f16 hold 2^-14 of a sum for
// K up to 4096, where no sum exceeds 448^2 K 2^-14 = 50176, and accordingly less for longer ones.
#pragma once
#include "common/instances.cuh"
#include "sm90/f8.cuh"
#include "sm90/gemm_cooperative.cuh"

namespace moe
{

using f8_storage_types = type_list<__nv_bfloat16>; // smoe_layer.dtype of layers with fp8

enum {
    F8_STEP = 128,                         // of K, a slot
    F8_PROMOTED_STEPS = 1024 / F8_STEP,    // between promotions
    F8_LEAST_PROMOTED = 1536 / F8_STEP + 1 // so many steps are promoted
};

// What a sum is multiplied by for f16.
MOE_DEVICE float promotion_scale(int steps)
{
    float scale = 0x1p-14f;
    for (int most = 4096 / F8_STEP; most < steps; most *= 2) scale *= 0.5f;
    return scale;
}

// The f16 sums of a thread. Its accumulators belong to two rows, in pairs by turns; `scale`: of each row.
template <int SUMS> struct promoted_sums {
    uint32_t pairs[SUMS / 2] = {};

    MOE_DEVICE void add(const float (&acc)[SUMS], const float (&scale)[2])
    {
        using H = storage<__half>;
#pragma unroll
        for (int i = 0; i < SUMS / 2; i++)
            pairs[i] = H::pack(fmaf(acc[2 * i], scale[i & 1], H::low(pairs[i])),
                               fmaf(acc[2 * i + 1], scale[i & 1], H::high(pairs[i])));
    }
    MOE_DEVICE void add_to(float (&acc)[SUMS], const float (&scale)[2]) const
    {
        using H = storage<__half>;
#pragma unroll
        for (int i = 0; i < SUMS / 2; i++) {
            acc[2 * i] = fmaf(H::low(pairs[i]), scale[i & 1], acc[2 * i]);
            acc[2 * i + 1] = fmaf(H::high(pairs[i]), scale[i & 1], acc[2 * i + 1]);
        }
    }
};

// As gemm_cooperative::multiply, with promotions.
template <bool COPIED, int SUMS, int COUNT, class Done>
MOE_DEVICE void multiply_promoted(float (&acc)[SUMS], ring_position<COUNT> &ring,
                                  const gemm_cooperative::ring_layout<COUNT> &shared, int steps, int consumer,
                                  const Done &done)
{
    promoted_sums<SUMS> sums;
    const float scale = promotion_scale(steps);
    for (int left = steps;;) {
        const int now = min((int)F8_PROMOTED_STEPS, left);
        gemm_cooperative::multiply<e4m3, COPIED>(acc, ring, shared, now, consumer, done);
        left -= now;
        if (left == 0) break;
        sums.add(acc, {scale, scale});
    }
    sums.add_to(acc, {1.0f / scale, 1.0f / scale});
}

// ---- Rows whose scale changes with every slot, after 128 of K. The accumulators are in units of the row's
// scale of the slot that was multiplied last. Before the next slot they are multiplied by the ratio of the
// two scales, a power of two, unless it is 1 for all rows of the warp.

MOE_DEVICE float inverse_of_power(float power)
{
    return __uint_as_float((254u << 23) - __float_as_uint(power));
}

// Of a thread's two rows.
struct row_units {
    float unit[2], most[2]; // of the accumulators; the largest scale so far

    MOE_DEVICE explicit row_units(const float (&scale)[2])
        : unit{scale[0], scale[1]}, most{scale[0], scale[1]}
    {
    }
    // To the scales of the next slot. A unit stays within 2^96 of the largest scale, so that no accumulator
    // overflows. The sum of a slot with a lower scale then counts for more than it should, but still for less
    // than the rounding of the others.
    template <int SUMS> MOE_DEVICE void change(float (&acc)[SUMS], const float (&scale)[2])
    {
        float ratio[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            most[i] = fmaxf(most[i], scale[i]);
            const float next = fmaxf(scale[i], most[i] * 0x1p-96f);
            ratio[i] = unit[i] * inverse_of_power(next);
            unit[i] = next;
        }
        if (!__any_sync(~0u, ratio[0] != 1.0f || ratio[1] != 1.0f)) return;
#pragma unroll
        for (int i = 0; i < SUMS; i++) acc[i] *= ratio[i >> 1 & 1];
    }
};

// acc = acc + 64 rows times 256 columns of one slot, or without `keep` only these; nothing is in flight
// afterwards. a, b: addresses of the operands.
template <typename T = e4m3, int SUMS>
MOE_DEVICE void multiply_slot(float (&acc)[SUMS], uint32_t a, uint32_t b, bool keep)
{
    const uint32_t left = descriptor_address(a), right = descriptor_address(b);
    pin(acc);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < F8_STEP / 32; j++)
        tensor_core<T>::template multiply<K_MAJOR, K_MAJOR>(acc, descriptor(left + 2 * j),
                                                            descriptor(right + 2 * j), keep || j != 0);
    wgmma_commit();
    pin(acc);
    wgmma_wait<0>();
    pin(acc);
}

// As gemm_cooperative::multiply, but nothing is in flight while the warp waits for the next slot. So a slot
// is filled again as soon as it has been multiplied: with two slots two fills are in flight instead of one.
template <typename T, int SUMS, int COUNT, class Done>
MOE_DEVICE void multiply_at_once(float (&acc)[SUMS], ring_position<COUNT> &ring,
                                 const gemm_cooperative::ring_layout<COUNT> &shared, int steps, int consumer,
                                 const Done &done)
{
    for (int k = 0; k < steps; k++) {
        barrier_wait(shared.full(ring.slot), ring.phase);
        fence_async_proxy();
        const uint32_t a = shared.slot(ring.slot);
        multiply_slot<T>(acc, a + consumer * MOE_SUBTILE_BYTES, a + gemm_cooperative::A_BYTES, k != 0);
        done(ring.slot);
        ring.advance();
    }
}

} // namespace moe
