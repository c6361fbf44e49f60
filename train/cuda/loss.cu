// Cross-entropy over rows of logits, whose gradient takes their place.
//
//   loss[r] = log sum_i exp(x[r, i]) - x[r, target];   x[r, i] = scale (softmax(x[r])[i] - [i = target])
//
// A CTA takes a row and goes through it twice: first for its largest element and the sum, then for the
// gradient. The second time it reads the first KEPT elements from shared memory, because the rows of all CTAs
// together do not fit L2. The elements after KEPT are read again. 4 T V bytes of memory traffic for V up to
// KEPT.
#include "kernels.h"
#include "vector.cuh"

#include <cmath>

namespace
{

// Two CTAs an SM, so that one reads while the other writes.
enum { LOSS_THREADS = 512, LOSS_CTAS = 2, UNROLL = 4, KEPT = 56 * 1024, MEAN_THREADS = 1024 };
static_assert(LOSS_CTAS * (KEPT * 2 + 1024 + 1024) <= 228 * 1024,
              "shared memory of an SM: dynamic, static, the system's");

// The largest element and the sum of a softmax so far.
struct partial {
    float top, sum;
};

TRAIN_DEVICE partial joined(partial a, partial b)
{
    const float top = fmaxf(a.top, b.top);
    if (top == -INFINITY) return a;
    return {top, a.sum * __expf(a.top - top) + b.sum * __expf(b.top - top)};
}

TRAIN_DEVICE partial joined_in_warp(partial p)
{
    for (int step = WARP / 2; step; step /= 2)
        p = joined(p, {__shfl_xor_sync(~0u, p.top, step), __shfl_xor_sync(~0u, p.sum, step)});
    return p;
}

template <int N> TRAIN_DEVICE void join(partial &p, const float (&v)[N])
{
    float top = p.top;
#pragma unroll
    for (int i = 0; i < N; i++) top = fmaxf(top, v[i]);
    if (top == -INFINITY) return;
    float sum = p.sum * __expf(p.top - top);
#pragma unroll
    for (int i = 0; i < N; i++) sum += __expf(v[i] - top);
    p = {top, sum};
}

// N neighbouring logits: 8, or 1 if the vocabulary is not a multiple of 8.
template <int N> struct __align__(N * 2) part
{
    bf16 v[N];
};

// dynamic shared memory: the first `kept` logits of the row.
template <int N>
__global__ void __launch_bounds__(LOSS_THREADS, LOSS_CTAS)
    cross_entropy(bf16 *logits, float *losses, const int32_t *targets, float scale, int vocab, int kept)
{
    extern __shared__ __align__(16) bf16 row_kept[];
    __shared__ partial memory[LOSS_THREADS / WARP];
    enum { STEP = LOSS_THREADS * N };
    const int64_t row = blockIdx.x;
    bf16 *x = logits + row * vocab;
    const int target = targets[row];
    const float wanted = to_float(x[target]);
    partial mine = {-INFINITY, 0.0f};
    for (int start = threadIdx.x * N; start < vocab; start += UNROLL * STEP) {
        part<N> raw[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (start + u * STEP < vocab) raw[u] = *(const part<N> *)(x + start + u * STEP);
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const int at = start + u * STEP;
            if (at >= vocab) break;
            if (at < kept) *(part<N> *)(row_kept + at) = raw[u];
            float v[N];
#pragma unroll
            for (int i = 0; i < N; i++) v[i] = to_float(raw[u].v[i]);
            join(mine, v);
        }
    }
    mine = joined_in_warp(mine);
    if (threadIdx.x % WARP == 0) memory[threadIdx.x / WARP] = mine;
    __syncthreads(); // also ensures that all threads have read x[target]
    partial all = memory[0];
    for (int w = 1; w < LOSS_THREADS / WARP; w++) all = joined(all, memory[w]);
    if (threadIdx.x == 0) losses[row] = logf(all.sum) + all.top - wanted;
    const float factor = scale / all.sum;
#pragma unroll 2
    for (int at = threadIdx.x * N; at < vocab; at += STEP) { // each thread reads its own elements again
        part<N> raw = *(const part<N> *)(at < kept ? row_kept + at : x + at);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float p = factor * __expf(to_float(raw.v[i]) - all.top);
            to_stored(raw.v[i], at + i == target ? p - scale : p);
        }
        *(part<N> *)(x + at) = raw;
    }
}

__global__ void __launch_bounds__(MEAN_THREADS) mean_of(double *mean, const float *values, int64_t count)
{
    __shared__ double memory[WARP];
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < count; i += MEAN_THREADS) sum += (double)values[i];
    sum = sum_of_block(sum, memory);
    if (threadIdx.x == 0) *mean = sum / (double)count;
}

} // namespace

extern "C" cudaError_t kernel_cross_entropy(void *logits, float *losses, const int32_t *targets, float scale,
                                            int64_t rows, int64_t vocab, cudaStream_t stream)
{
    const int kept = vocab < KEPT ? (int)vocab : (int)KEPT, bytes = kept * (int)sizeof(bf16);
    const bool whole = vocab % VECTOR == 0;
    const void *kernel = whole ? (const void *)cross_entropy<VECTOR> : (const void *)cross_entropy<1>;
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, KEPT * sizeof(bf16));
    if (status != cudaSuccess) return status;
    if (whole)
        cross_entropy<VECTOR><<<(unsigned)rows, LOSS_THREADS, bytes, stream>>>(
            (bf16 *)logits, losses, targets, scale, (int)vocab, kept);
    else
        cross_entropy<1><<<(unsigned)rows, LOSS_THREADS, bytes, stream>>>((bf16 *)logits, losses, targets,
                                                                          scale, (int)vocab, kept);
    return cudaGetLastError();
}

extern "C" cudaError_t kernel_mean(double *mean, const float *values, int64_t count, cudaStream_t stream)
{
    mean_of<<<1, MEAN_THREADS, 0, stream>>>(mean, values, count);
    return cudaGetLastError();
}
