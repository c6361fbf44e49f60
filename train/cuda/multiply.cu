// c = a b + addend by plain loops, one thread for each element. For places without cuBLAS: the emulator, and
// machines that lack the library. 2 m n k FLOPs; not written for speed.
#include "kernels.h"
#include "vector.cuh"

namespace
{

enum { SIDE = 16 };

template <typename T>
__global__ void __launch_bounds__(SIDE *SIDE)
    multiply(T *c, const bf16 *a, int64_t a_row, int64_t a_column, const bf16 *b, int64_t b_row,
             int64_t b_column, const T *addend, int64_t m, int64_t n, int64_t k)
{
    const int64_t j = (int64_t)blockIdx.x * SIDE + threadIdx.x, i = (int64_t)blockIdx.y * SIDE + threadIdx.y;
    if (i >= m || j >= n) return;
    float sum = 0.0f;
    for (int64_t l = 0; l < k; l++)
        sum += to_float(a[i * a_row + l * a_column]) * to_float(b[l * b_row + j * b_column]);
    to_stored(c[i * n + j], sum + (addend ? to_float(addend[i * n + j]) : 0.0f));
}

} // namespace

extern "C" cudaError_t kernel_multiply(void *c, smoe_type type, const kernel_matrix *a,
                                       const kernel_matrix *b, const void *addend, int64_t m, int64_t n,
                                       int64_t k, cudaStream_t stream)
{
    const dim3 ctas((unsigned)((n + SIDE - 1) / SIDE), (unsigned)((m + SIDE - 1) / SIDE)),
        threads(SIDE, SIDE);
    if (type == SMOE_TYPE_F32)
        multiply<float><<<ctas, threads, 0, stream>>>((float *)c, (const bf16 *)a->at, a->row_stride,
                                                      a->column_stride, (const bf16 *)b->at, b->row_stride,
                                                      b->column_stride, (const float *)addend, m, n, k);
    else
        multiply<bf16><<<ctas, threads, 0, stream>>>((bf16 *)c, (const bf16 *)a->at, a->row_stride,
                                                     a->column_stride, (const bf16 *)b->at, b->row_stride,
                                                     b->column_stride, (const bf16 *)addend, m, n, k);
    return cudaGetLastError();
}
