// Down-projection: Y[r] = A[r] W2[e]^T + b2[e], for one chunk of d's columns. FLOPs 2 R d n; bytes: A 2 R n
// (L2 serves the column tiles after the first), W2 and Y 2 R d. Three kernels; the host picks by
// smoe_gemm_choose.
#include "sm90/gemm_ping_pong.cuh"
#include "sm90/gemm_stationary.cuh"
#include "sm90/gemm_tiles.cuh"

namespace smoe
{
namespace
{

typedef void (*down_kernel)(smoe_cuda_down);

struct variant {
    down_kernel kernel[2]; // bf16, fp16
    int shared_bytes;
};

const variant variants[] = {
    {{gemm_tiles::kernel<__nv_bfloat16, smoe_cuda_down>, gemm_tiles::kernel<__half, smoe_cuda_down>},
     gemm_tiles::SHARED_BYTES},
    {{gemm_ping_pong::kernel<__nv_bfloat16, smoe_cuda_down>, gemm_ping_pong::kernel<__half, smoe_cuda_down>},
     gemm_ping_pong::SHARED_BYTES},
    {{gemm_stationary::kernel<__nv_bfloat16>, gemm_stationary::kernel<__half>},
     gemm_stationary::SHARED_BYTES},
};

} // namespace
} // namespace smoe

extern "C" cudaError_t smoe_cuda_down_init(void)
{
    for (const smoe::variant &v : smoe::variants)
        for (smoe::down_kernel kernel : v.kernel) {
            const cudaError_t status = cudaFuncSetAttribute(
                (const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, v.shared_bytes);
            if (status != cudaSuccess) return status;
        }
    return cudaSuccess;
}

extern "C" cudaError_t smoe_cuda_down_launch(const smoe_cuda_down *p, smoe_gemm kind, smoe_type dtype,
                                             int ctas, cudaStream_t stream)
{
    const smoe::variant &v = smoe::variants[kind];
    if (kind == SMOE_GEMM_STATIONARY && ctas > smoe::gemm_stationary::MAX_CTAS)
        ctas = smoe::gemm_stationary::MAX_CTAS;
    v.kernel[dtype == SMOE_TYPE_F16]<<<ctas, smoe::gemm_cooperative::THREADS, v.shared_bytes, stream>>>(*p);
    return cudaGetLastError();
}
