// e4m3 on Hopper: four values in 32 bits, and wgmma, which multiplies 64 x 32 by 32 x N of them. An operand
// is K-major in subtiles with the 128-byte swizzle, like one of 16-bit elements (wgmma.cuh): 128 bytes of a
// row are 128 elements along K, and a step of 32 elements adds 2 to a descriptor. dw_f8.cu has others.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// The tensor cores align the 32 products and the accumulator to the largest exponent among them, truncate
// each at 2^-13 of it, and truncate the sum to 13 fraction bits. So a long sum of one sign shrinks: callers
// add up at most 1536 of K in the accumulators.
#pragma once
#include "sm90/wgmma.cuh"

namespace moe
{

struct e4m3 {
};

// The nearest e4m3, ties to even, the first value in the lowest byte. What exceeds 448 becomes 448; a NaN
// becomes 0x7f.
MOE_DEVICE uint32_t pack_e4m3(float a, float b, float c, float d)
{
    uint32_t four;
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"
        : "=r"(four)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return four;
}

// Four values times f16 factors, `low` of the first two and `high` of the others, rounded. Right for factors
// 2^k, k <= 0: where a product is no f16, it is so small that it gives 0.
MOE_DEVICE uint32_t scale_e4m3(uint32_t four, uint32_t low, uint32_t high)
{
    uint32_t scaled;
    asm("{\n.reg .b16 l, h;\n.reg .b32 x, y;\nmov.b32 {l, h}, %1;\n"
        "cvt.rn.f16x2.e4m3x2 x, l;\ncvt.rn.f16x2.e4m3x2 y, h;\n"
        "mul.rn.f16x2 x, x, %2;\nmul.rn.f16x2 y, y, %3;\n"
        "cvt.rn.satfinite.e4m3x2.f16x2 l, x;\ncvt.rn.satfinite.e4m3x2.f16x2 h, y;\nmov.b32 %0, {l, h};\n}"
        : "=r"(scaled)
        : "r"(four), "r"(low), "r"(high));
    return scaled;
}

// Four bytes from global to shared memory.
MOE_DEVICE void copy4_async(uint32_t to, const void *from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

MOE_DEVICE void store_shared8(uint32_t address, uint32_t low, uint32_t high)
{
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(low), "r"(high) : "memory");
}

// The low 16 bits.
MOE_DEVICE void store_shared2(uint32_t address, uint32_t low)
{
    asm volatile("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nst.shared.b16 [%0], l;\n}" ::"r"(address), "r"(low)
                 : "memory");
}

// This thread's lane. What follows from it does not stay in registers until the next call.
MOE_DEVICE int lane_again()
{
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// The value that lane i of the thread's eight lanes has.
MOE_DEVICE int of_eight_lanes(int value, int i)
{
    return __shfl_sync(~0u, value, i, 8);
}

// Eight bytes to global memory that this kernel will not read again.
MOE_DEVICE void store_streaming8_if(bool wanted, void *to, uint32_t low, uint32_t high)
{
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p st.global.cs.v2.u32 [%0], {%1, %2};\n}" ::"l"(to),
        "r"(low), "r"(high), "r"((uint32_t)wanted)
        : "memory");
}

// A multiple of 16 bytes goes to L2. One prefetch.global.L2 for each 128 bytes takes the SM 10 clocks.
MOE_DEVICE void prefetch_bytes(const void *from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Adds 1, and returns what was there. nvcc would wait for the result of atomicAdd at once.
MOE_DEVICE uint32_t add_one(uint32_t *to)
{
    uint32_t before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(to) : "memory");
    return before;
}

// What this thread has written is seen by a thread that sees this addition by load_acquire_gpu.
MOE_DEVICE void add_one_release(uint32_t *to)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(to) : "memory");
}

MOE_DEVICE uint32_t load_acquire_gpu(const uint32_t *from)
{
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}

template <> struct tensor_core<e4m3> {
    template <operand_order A = K_MAJOR, operand_order B = K_MAJOR>
    static MOE_DEVICE void multiply(float (&c)[64], uint64_t a, uint64_t b, int keep)
    {
        static_assert(A == K_MAJOR && B == K_MAJOR, "operands of 8 bits cannot be transposed");
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" MOE_NAMES64
                     "}, %64, %65, p, 1, 1;\n}"
                     : MOE_ACC32(c, 0), MOE_ACC32(c, 32)
                     : "l"(a), "l"(b), "r"(keep));
    }
    template <operand_order A = K_MAJOR, operand_order B = K_MAJOR>
    static MOE_DEVICE void multiply(float (&c)[128], uint64_t a, uint64_t b, int keep)
    {
        static_assert(A == K_MAJOR && B == K_MAJOR, "operands of 8 bits cannot be transposed");
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" MOE_NAMES128
                     "}, %128, %129, p, 1, 1;\n}"
                     : MOE_ACC32(c, 0), MOE_ACC32(c, 32), MOE_ACC32(c, 64), MOE_ACC32(c, 96)
                     : "l"(a), "l"(b), "r"(keep));
    }
    // A from registers: a lane has four elements along K, from 4 (lane % 4) on, of the rows lane / 4 and
    // lane / 4 + 8 of the warp's 16, then of these rows 16 further along K.
    static MOE_DEVICE void multiply(float (&c)[128], const uint32_t (&a)[4], uint64_t b, int keep)
    {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" MOE_NAMES128
                     "}, {%128, %129, %130, %131}, %132, p, 1, 1;\n}"
                     : MOE_ACC32(c, 0), MOE_ACC32(c, 32), MOE_ACC32(c, 64), MOE_ACC32(c, 96)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
    }
};

} // namespace moe
