// Instructions that have no C name: registers, fences, named barriers, stmatrix and ldmatrix, 16-byte
// copies, the sum of bf16 pairs.
#pragma once
#include <cstdint>

#define MOE_DEVICE __device__ __forceinline__

namespace moe
{

MOE_DEVICE uint32_t shared_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

// The warp's number, known to the compiler to be the same in all its lanes.
MOE_DEVICE int warp_number()
{
    return __shfl_sync(~0u, (int)(threadIdx.x >> 5), 0);
}

// A CTA of 384 threads has 384 x 168 registers. This divides them again among its three warpgroups; every
// warp of a group executes it. The registers of a thread of each group add up to 504 at most.
template <int REGISTERS> MOE_DEVICE void take_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS> MOE_DEVICE void give_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// What ordinary stores and cp.async wrote to shared memory becomes visible to wgmma and TMA.
MOE_DEVICE void fence_async_proxy()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

MOE_DEVICE void named_barrier_sync(int barrier, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

MOE_DEVICE void named_barrier_arrive(int barrier, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
MOE_DEVICE void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// The same, each matrix transposed on its way.
MOE_DEVICE void store_matrices_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// The store: the lane's elements of the four matrices.
MOE_DEVICE void load_matrices(uint32_t (&m)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

MOE_DEVICE void load_matrices_transposed(uint32_t (&m)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

MOE_DEVICE uint4 load_shared16(uint32_t address)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

MOE_DEVICE void store_shared16(uint32_t address, uint4 v)
{
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

// 16 bytes from global to shared memory; bytes = 0 writes zeros. L2 may fetch the 256 bytes around them.
MOE_DEVICE void copy16_async(uint32_t to, const void *from, uint32_t bytes)
{
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

// 16 bytes, or zeros when `real` is 0. The test becomes the copy's predicate, without another instruction.
MOE_DEVICE void copy16_async_if(uint32_t real, uint32_t to, const void *from)
{
    asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, %2, 0;\n"
                 "cp.async.cg.shared.global.L2::256B [%0], [%1], 16, p;\n}" ::"r"(to),
                 "l"(from), "r"(real)
                 : "memory");
}

// The same without the hint to L2, for threads that read all 256 bytes with this copy and the next. With
// sixteen threads for a row the hint brought nothing, and with n = 256 it made the backward up to 0.3 %
// slower, after idling.
MOE_DEVICE void copy16_async_if_unhinted(uint32_t real, uint32_t to, const void *from)
{
    asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, %2, 0;\n"
                 "cp.async.cg.shared.global [%0], [%1], 16, p;\n}" ::"r"(to),
                 "l"(from), "r"(real)
                 : "memory");
}

// Addresses of copies while a wgmma runs, by additions of 32 bits. ptxas would use IMAD.WIDE, which then
// waits about 30 clocks for the register file.
MOE_DEVICE const char *advance_by_adds(const char *from, uint32_t bytes)
{
    uint64_t to;
    asm("{\n.reg .u32 low, high;\nmov.b64 {low, high}, %1;\nadd.cc.u32 low, low, %2;\n"
        "addc.u32 high, high, 0;\nmov.b64 %0, {low, high};\n}"
        : "=l"(to)
        : "l"(from), "r"(bytes));
    return (const char *)to;
}

// The address that another lane holds.
MOE_DEVICE const char *lane_address(const char *address, int lane)
{
    return (const char *)__shfl_sync(~0u, (unsigned long long)address, lane);
}

// copy16_async without the hint to prefetch the neighbouring bytes into L2.
MOE_DEVICE void copy16_async_unhinted(uint32_t to, const void *from, uint32_t bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// The same with a policy of L2, what createpolicy.fractional returns.
enum : uint64_t { EVICT_FIRST = 0x12F0000000000000, EVICT_LAST = 0x14F0000000000000 };
MOE_DEVICE void copy16_async_by(uint64_t policy, uint32_t to, const void *from, uint32_t bytes)
{
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
                 "r"(bytes), "l"(policy)
                 : "memory");
}

MOE_DEVICE void commit_copies()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// All but the newest PENDING groups of this thread's copies have landed.
template <int PENDING> MOE_DEVICE void wait_copies()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

MOE_DEVICE void wait_all_copies()
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

MOE_DEVICE void store_shared_word(uint32_t address, uint32_t v)
{
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

// Two threads call this on the same word, which is zero before and after. True for the second one. The
// second one sees the writes that the first one made before its call.
MOE_DEVICE bool second_of_two(uint32_t address)
{
    uint32_t before;
    asm volatile("atom.acq_rel.cta.shared::cta.inc.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "r"(address)
                 : "memory");
    return before == 1;
}

MOE_DEVICE float load_shared_float(uint32_t address)
{
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}

MOE_DEVICE void store_shared_float(uint32_t address, float v)
{
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}

MOE_DEVICE void store_shared_floats(uint32_t address, float a, float b)
{
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}

MOE_DEVICE void store_global16(void *to, uint4 v)
{
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// 16 bytes to global memory that this kernel will not read again.
MOE_DEVICE void store_streaming16_if(bool wanted, void *to, uint4 v)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
                 "@p st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"((uint32_t)wanted)
                 : "memory");
}

// 16 bytes of global memory, or zeros without a load when `real` is 0.
MOE_DEVICE uint4 load_global16_if(uint32_t real, const void *from)
{
    uint4 v;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
                 "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
                 "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
                 : "l"(from), "r"(real)
                 : "memory");
    return v;
}

// The word at `from` if it is real, else `otherwise`. Nothing writes these words while the kernel runs.
MOE_DEVICE int load_word_if(bool real, const int *from, int otherwise)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.global.nc.u32 %0, [%1];\n}"
                 : "+r"(otherwise)
                 : "l"(from), "r"((uint32_t)real));
    return otherwise;
}

MOE_DEVICE void prefetch_l2(const void *address)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

// Sums of two pairs of bf16, each rounded. A NaN result is 0x7fff.
MOE_DEVICE uint32_t add_bf16_pairs(uint32_t a, uint32_t b)
{
    uint32_t sum;
#if __CUDA_ARCH__ >= 900
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(sum)
        : "r"(a), "r"(0x3f803f80u), "r"(b)); // a 1 + b: the same bits
#endif
    return sum;
}

// The larger of two values, for each half of a word. NaN if one of the two is NaN.
MOE_DEVICE float larger_or_nan(float a, float b)
{
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

MOE_DEVICE uint32_t larger_bf16_pairs(uint32_t a, uint32_t b)
{
    uint32_t larger; // NaN is 0x7fff
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

// Bulk copies (tma/tma.cuh) exist from 9.0 on.
#if __CUDA_ARCH__ >= 900
constexpr bool HAS_BULK_COPIES = true;
#else
constexpr bool HAS_BULK_COPIES = false;
#endif

// The most threads of an SM.
#if __CUDA_ARCH__ >= 1200
enum { SM_THREADS = 1536 };
#else
enum { SM_THREADS = 2048 };
#endif

// Programmatic dependent launch. let_next_start: the next kernel's CTAs may start. wait_for_previous: returns
// when all kernels before have finished and what they wrote can be read. Below 9.0 a kernel starts when the
// one before it has ended (launch_early), so both do nothing.
MOE_DEVICE void let_next_start()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

MOE_DEVICE void wait_for_previous()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

} // namespace moe
