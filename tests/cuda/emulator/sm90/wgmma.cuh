// Replaces src/cuda/sm90/wgmma.cuh. Each lane computes its own accumulators in the wait for their group.
#pragma once
#include "common/storage.cuh"
#include "sm90/descriptor.cuh"

namespace moe
{

MOE_DEVICE void wgmma_fence()
{
    __syncwarp();
}

MOE_DEVICE void wgmma_commit()
{
    emulator::current->multiplies.commit();
}

template <int PENDING> MOE_DEVICE void wgmma_wait()
{
    emulator::current->multiplies.wait(PENDING);
    __syncwarp();
}

template <int COUNT> MOE_DEVICE void pin(float (&)[COUNT])
{
}

// Address of element (row of A or column of B, k) of an operand.
MOE_DEVICE uint32_t element_address(uint64_t descriptor, operand_order order, int mn, int k)
{
    const uint32_t base = (uint32_t)(descriptor & 0x3FFF) << 4,
                   leading = (uint32_t)(descriptor >> 16 & 0x3FFF) << 4;
    const uint32_t stride = (uint32_t)(descriptor >> 32 & 0x3FFF) << 4;
    if (descriptor >> 62 == 0) // K-major without swizzle
        return base + (k >> 3) * leading + (mn >> 3) * stride + (mn & 7) * 16 + (k & 7) * 2;
    return emulator::swizzled(order == MN_MAJOR ? base + (mn >> 6) * leading + (k >> 3) * stride +
                                                      (k & 7) * 128 + (mn & 63) * 2
                                                : base + (mn >> 3) * stride + (mn & 7) * 128 + k * 2);
}

template <typename T> struct tensor_core {
    enum { STEP = 16 };

    static float element(uint64_t descriptor, operand_order order, int mn, int k)
    {
        return to_float(emulator::read_shared<T>(element_address(descriptor, order, mn, k)));
    }

    template <operand_order A = K_MAJOR, operand_order B = K_MAJOR, int COUNT>
    static void multiply(float (&c)[COUNT], uint64_t a, uint64_t b, int keep)
    {
        check(a, A, 64);
        check(b, B, COUNT * 2);
        emulator::current->multiplies.add([=, &c] { multiply_now<A, B>(c, a, b, keep); });
    }

    // Checks the fences of an operand of `count` rows or columns. Each lane checks some of its vectors.
    static void check(uint64_t descriptor, operand_order order, int count)
    {
        for (int i = emulator::current->lane; i < count * STEP / 8; i += emulator::WARP) {
            const int mn = order == MN_MAJOR ? i % (count / 8) * 8 : i / 2,
                      k = order == MN_MAJOR ? i / (count / 8) : i % 2 * 8;
            emulator::check_fenced(element_address(descriptor, order, mn, k), emulator::current->fenced,
                                   "wgmma");
        }
    }

    template <operand_order A, operand_order B, int COUNT>
    static void multiply_now(float (&c)[COUNT], uint64_t a, uint64_t b, int keep)
    {
        const int lane = emulator::current->lane, first = emulator::current->warp % 4 * 16 + lane / 4;
        float rows[2][STEP];
        for (int half = 0; half < 2; half++)
            for (int k = 0; k < STEP; k++) rows[half][k] = element(a, A, first + half * 8, k);
        for (int quad = 0; quad < COUNT; quad += 4)
            for (int z = 0; z < 2; z++) {
                float column[STEP];
                for (int k = 0; k < STEP; k++) column[k] = element(b, B, quad * 2 + lane % 4 * 2 + z, k);
                for (int half = 0; half < 2; half++) {
                    float sum = keep ? c[quad + 2 * half + z] : 0.0f;
                    for (int k = 0; k < STEP; k++) sum += rows[half][k] * column[k];
                    c[quad + 2 * half + z] = sum;
                }
            }
    }
};

} // namespace moe
