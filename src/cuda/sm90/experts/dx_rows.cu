// dX~[r] = dH[r] W1[e], for one chunk of d's columns. FLOPs 2 R d h; bytes: dH 2 R h (L2 serves the column
// tiles after the first), W1 and dX~ 2 R d. The cores of the down-projection with W1 MN-major as it stands in
// memory: K runs through the gate rows of W1 and then through the up rows, whatever their layout.
#include "host/launch_backward.h"
#include "sm90/gemm_ping_pong.cuh"
#include "sm90/gemm_tiles.cuh"

namespace smoe
{

template <> struct operands<smoe_cuda_dx_rows> {
    static constexpr operand_order WEIGHTS = MN_MAJOR;
    static constexpr bool HAS_BIAS = false;
    enum { STEP = 64 };

    static SMOE_DEVICE int steps_of_half(const smoe_cuda_dx_rows &p)
    {
        return (p.intermediate + STEP - 1) / STEP;
    }
    static SMOE_DEVICE int steps(const smoe_cuda_dx_rows &p)
    {
        return steps_of_half(p) * p.halves;
    }
    static SMOE_DEVICE void prefetch(const smoe_cuda_dx_rows &p)
    {
        prefetch_map(&p.a);
        prefetch_map(&p.w1);
        prefetch_map(&p.y);
    }
    static SMOE_DEVICE void load_rows(const smoe_cuda_dx_rows &p, uint32_t to, uint32_t full, int k,
                                      smoe_work tile)
    {
        const int half = k >= steps_of_half(p);
        load_box(to, &p.a, full, (k - half * steps_of_half(p)) * STEP, half, tile.row);
    }
    template <int COLUMNS>
    static SMOE_DEVICE void load_weights(const smoe_cuda_dx_rows &p, uint32_t to, uint32_t full, int k,
                                         smoe_work tile, int column)
    {
        const int half = k >= steps_of_half(p), feature = (k - half * steps_of_half(p)) * STEP;
        const int expert = smoe_work_expert(tile), first = p.first_column + column;
        if (!p.panels_apart)
            return load_box(to, &p.w1, full, 0, feature, first / SMOE_PANEL_COLUMNS, half, expert);
        for (int i = 0; i < COLUMNS / SMOE_PANEL_COLUMNS; i++)
            load_box(to + i * SMOE_PANEL_BYTES, &p.w1, full, first + i * SMOE_PANEL_COLUMNS, feature, 0, half,
                     expert);
    }
};

namespace
{

typedef void (*dx_kernel)(smoe_cuda_dx_rows);

struct variant {
    dx_kernel kernel[2]; // bf16, fp16
    int shared_bytes;
};

const variant variants[] = {
    {{gemm_tiles::kernel<__nv_bfloat16, smoe_cuda_dx_rows>, gemm_tiles::kernel<__half, smoe_cuda_dx_rows>},
     gemm_tiles::SHARED_BYTES},
    {{gemm_ping_pong::kernel<__nv_bfloat16, smoe_cuda_dx_rows>,
      gemm_ping_pong::kernel<__half, smoe_cuda_dx_rows>},
     gemm_ping_pong::SHARED_BYTES},
};

} // namespace
} // namespace smoe

extern "C" cudaError_t smoe_cuda_dx_rows_init(void)
{
    for (const smoe::variant &v : smoe::variants)
        for (smoe::dx_kernel kernel : v.kernel) {
            const cudaError_t status = cudaFuncSetAttribute(
                (const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, v.shared_bytes);
            if (status != cudaSuccess) return status;
        }
    return cudaSuccess;
}

extern "C" cudaError_t smoe_cuda_dx_rows_launch(const smoe_cuda_dx_rows *p, smoe_gemm kind, smoe_type dtype,
                                                int ctas, cudaStream_t stream)
{
    const smoe::variant &v = smoe::variants[kind];
    v.kernel[dtype == SMOE_TYPE_F16]<<<ctas, smoe::gemm_cooperative::THREADS, v.shared_bytes, stream>>>(*p);
    return cudaGetLastError();
}
