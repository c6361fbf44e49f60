// The token embedding: a gather of rows, and its gradient as a sum over each token's rows in their order.
//
// Forward: 4 T d bytes. Backward: one CTA for each token that occurs in the batch; the host has listed its
// rows (order, runs). `groups` of threads take the rows in turn, because with a small vocabulary the lists
// are long. 2 T d bytes are read, and each row of the gradient is read and written once.
#include "kernels.h"
#include "vector.cuh"

namespace
{

enum { GROUPS = 8, MEMORY_BYTES = 48 * 1024, LONG_RUN = 16 };

__global__ void __launch_bounds__(MOST_THREADS)
    embed(bf16 *x, const bf16 *weight, const int32_t *tokens, int d)
{
    const int64_t row = blockIdx.x, token = tokens[row];
    for (int at = threadIdx.x * VECTOR; at < d; at += blockDim.x * VECTOR)
        *(eight<bf16> *)(x + row * d + at) = *(const eight<bf16> *)(weight + token * d + at);
}

// threadIdx.x: eight columns, threadIdx.y: group.
template <typename T>
__global__ void __launch_bounds__(MOST_THREADS)
    embed_backward(T *dweight, const bf16 *dx, const int32_t *tokens, const int32_t *order,
                   const int32_t *runs, int rows, int d)
{
    extern __shared__ float memory[]; // (groups, d)
    const int begin = runs[blockIdx.x];
    if (begin < 0 || begin >= rows) return;
    const int end = runs[blockIdx.x + 1], at = threadIdx.x * VECTOR;
    const bool mine = at < d;
    float sum[VECTOR] = {};
    if (mine)
        for (int i = begin + threadIdx.y; i < end; i += blockDim.y) {
            float v[VECTOR];
            load8(v, dx + (int64_t)order[i] * d + at);
#pragma unroll
            for (int j = 0; j < VECTOR; j++) sum[j] += v[j];
        }
    if (blockDim.y > 1) {
        if (mine)
#pragma unroll
            for (int j = 0; j < VECTOR; j++) memory[threadIdx.y * d + at + j] = sum[j];
        __syncthreads();
        if (threadIdx.y != 0) return;
        if (mine)
            for (unsigned g = 1; g < blockDim.y; g++)
#pragma unroll
                for (int j = 0; j < VECTOR; j++) sum[j] += memory[g * d + at + j];
    }
    if (!mine) return;
    T *to = dweight + (int64_t)tokens[order[begin]] * d + at;
    float old[VECTOR];
    load8(old, to);
#pragma unroll
    for (int j = 0; j < VECTOR; j++) old[j] += sum[j];
    store8(to, old);
}

} // namespace

extern "C" cudaError_t kernel_embed(void *x, const void *weight, const int32_t *tokens, int64_t rows,
                                    int64_t d, cudaStream_t stream)
{
    const int threads = (int)((d / VECTOR + WARP - 1) / WARP * WARP);
    embed<<<(unsigned)rows, threads, 0, stream>>>((bf16 *)x, (const bf16 *)weight, tokens, (int)d);
    return cudaGetLastError();
}

extern "C" cudaError_t kernel_embed_backward(void *dweight, smoe_type type, const void *dx,
                                             const device_batch *batch, int64_t rows, int64_t vocab,
                                             int64_t d, cudaStream_t stream)
{
    const int64_t threads = (d / VECTOR + WARP - 1) / WARP * WARP;
    const bool long_runs = rows >= LONG_RUN * vocab && GROUPS * threads <= MOST_THREADS &&
                           GROUPS * d * (int64_t)sizeof(float) <= MEMORY_BYTES;
    const dim3 block((unsigned)threads, long_runs ? GROUPS : 1);
    const size_t bytes = long_runs ? GROUPS * (size_t)d * sizeof(float) : 0;
    const unsigned ctas = (unsigned)(rows < vocab ? rows : vocab);
    if (type == SMOE_TYPE_F32)
        embed_backward<float><<<ctas, block, bytes, stream>>>(
            (float *)dweight, (const bf16 *)dx, batch->tokens, batch->order, batch->runs, (int)rows, (int)d);
    else
        embed_backward<bf16><<<ctas, block, bytes, stream>>>((bf16 *)dweight, (const bf16 *)dx, batch->tokens,
                                                             batch->order, batch->runs, (int)rows, (int)d);
    return cudaGetLastError();
}
