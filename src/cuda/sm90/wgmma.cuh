// wgmma: adds the product of 64 x 16 and 16 x N elements of 16 bits to a 64 x N tile of f32 accumulators.
// Both operands are in shared memory, in subtiles with the 128-byte swizzle.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// In a K-major operand the 128 bytes of a subtile's row are 64 elements along K, of one row of A or one
// column of B. In an MN-major operand they are 64 rows of A or 64 columns of B at one k, and the rows of the
// subtile run along K.
#pragma once
#include "sm90/descriptor.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace moe
{

MOE_DEVICE void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

MOE_DEVICE void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING> MOE_DEVICE void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The compiler must not move accumulators across this point, because wgmma uses them between fence and wait.
template <int COUNT> MOE_DEVICE void pin(float (&c)[COUNT])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(c[i])::"memory");
}

#define MOE_ACC8(c, i)                                                                                       \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]),              \
        "+f"(c[i + 6]), "+f"(c[i + 7])
#define MOE_ACC32(c, i) MOE_ACC8(c, i), MOE_ACC8(c, i + 8), MOE_ACC8(c, i + 16), MOE_ACC8(c, i + 24)
#define MOE_NAMES32                                                                                          \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                 \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MOE_NAMES64                                                                                          \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                 \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                       \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                       \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MOE_NAMES96                                                                                          \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                 \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                       \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                       \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                       \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                       \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MOE_NAMES128                                                                                         \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                 \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                       \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                       \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                       \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                       \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                       \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "           \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// acc = (keep ? acc : 0) + A B. One 16-element step of K.
#define MOE_WGMMA64(TYPE)                                                                                    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                                \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" MOE_NAMES32                \
                 "}, %32, %33, p, 1, 1, %35, %36;\n}"                                                        \
                 : MOE_ACC32(c, 0)                                                                           \
                 : "l"(a), "l"(b), "r"(keep), "n"((int)A), "n"((int)B))
#define MOE_WGMMA128(TYPE)                                                                                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                                \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" MOE_NAMES64               \
                 "}, %64, %65, p, 1, 1, %67, %68;\n}"                                                        \
                 : MOE_ACC32(c, 0), MOE_ACC32(c, 32)                                                         \
                 : "l"(a), "l"(b), "r"(keep), "n"((int)A), "n"((int)B))
#define MOE_WGMMA192(TYPE)                                                                                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"                                                \
                 "wgmma.mma_async.sync.aligned.m64n192k16.f32." TYPE "." TYPE " {" MOE_NAMES96               \
                 "}, %96, %97, p, 1, 1, %99, %100;\n}"                                                       \
                 : MOE_ACC32(c, 0), MOE_ACC32(c, 32), MOE_ACC32(c, 64)                                       \
                 : "l"(a), "l"(b), "r"(keep), "n"((int)A), "n"((int)B))
#define MOE_WGMMA256(TYPE)                                                                                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                               \
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" MOE_NAMES128              \
                 "}, %128, %129, p, 1, 1, %131, %132;\n}"                                                    \
                 : MOE_ACC32(c, 0), MOE_ACC32(c, 32), MOE_ACC32(c, 64), MOE_ACC32(c, 96)                     \
                 : "l"(a), "l"(b), "r"(keep), "n"((int)A), "n"((int)B))

template <typename T> struct tensor_core;

template <> struct tensor_core<__nv_bfloat16> {
    template <operand_order A = K_MAJOR, operand_order B = K_MAJOR>
    static MOE_DEVICE void multiply(float (&c)[32], uint64_t a, uint64_t b, int keep)
    {
        MOE_WGMMA64("bf16");
    }
    template <operand_order A = K_MAJOR, operand_order B = K_MAJOR>
    static MOE_DEVICE void multiply(float (&c)[64], uint64_t a, uint64_t b, int keep)
    {
        MOE_WGMMA128("bf16");
    }
    template <operand_order A = K_MAJOR, operand_order B = K_MAJOR>
    static MOE_DEVICE void multiply(float (&c)[96], uint64_t a, uint64_t b, int keep)
    {
        MOE_WGMMA192("bf16");
    }
    template <operand_order A = K_MAJOR, operand_order B = K_MAJOR>
    static MOE_DEVICE void multiply(float (&c)[128], uint64_t a, uint64_t b, int keep)
    {
        MOE_WGMMA256("bf16");
    }
};

template <> struct tensor_core<__half> {
    template <operand_order A = K_MAJOR, operand_order B = K_MAJOR>
    static MOE_DEVICE void multiply(float (&c)[32], uint64_t a, uint64_t b, int keep)
    {
        MOE_WGMMA64("f16");
    }
    template <operand_order A = K_MAJOR, operand_order B = K_MAJOR>
    static MOE_DEVICE void multiply(float (&c)[64], uint64_t a, uint64_t b, int keep)
    {
        MOE_WGMMA128("f16");
    }
    template <operand_order A = K_MAJOR, operand_order B = K_MAJOR>
    static MOE_DEVICE void multiply(float (&c)[96], uint64_t a, uint64_t b, int keep)
    {
        MOE_WGMMA192("f16");
    }
    template <operand_order A = K_MAJOR, operand_order B = K_MAJOR>
    static MOE_DEVICE void multiply(float (&c)[128], uint64_t a, uint64_t b, int keep)
    {
        MOE_WGMMA256("f16");
    }
};

} // namespace moe
