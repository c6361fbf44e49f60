// Cross-entropy over rows of logits. The gradient overwrites the logits.
//
//   loss[r] = log sum_i exp(x[r, i]) - x[r, target];   x[r, i] = scale (softmax(x[r])[i] - [i = target])
//
// A CTA takes a row and reads it twice: first for its largest element and the sum, then, from L2, for the
// gradient. 4 T V bytes of memory traffic.
#include "kernels.h"
#include "vector.cuh"

#include <cmath>

namespace
{

enum { LOSS_THREADS = 512, MEAN_THREADS = 1024 };

// A softmax's running largest element and sum.
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

template <int N> TRAIN_DEVICE void load(float (&v)[N], const bf16 *from);
template <> TRAIN_DEVICE void load<VECTOR>(float (&v)[VECTOR], const bf16 *from)
{
    load8(v, from);
}
template <> TRAIN_DEVICE void load<1>(float (&v)[1], const bf16 *from)
{
    v[0] = to_float(*from);
}

template <int N> TRAIN_DEVICE void store(bf16 *to, const float (&v)[N]);
template <> TRAIN_DEVICE void store<VECTOR>(bf16 *to, const float (&v)[VECTOR])
{
    store8(to, v);
}
template <> TRAIN_DEVICE void store<1>(bf16 *to, const float (&v)[1])
{
    to_stored(*to, v[0]);
}

// N elements at a time: 8, or 1 where the vocabulary is no multiple of 8.
template <int N>
__global__ void __launch_bounds__(LOSS_THREADS)
    cross_entropy(bf16 *logits, float *losses, const int32_t *targets, float scale, int vocab)
{
    __shared__ partial memory[LOSS_THREADS / WARP];
    const int64_t row = blockIdx.x;
    bf16 *x = logits + row * vocab;
    const int target = targets[row];
    const float wanted = to_float(x[target]);
    partial mine = {-INFINITY, 0.0f};
    float v[N];
    for (int at = threadIdx.x * N; at < vocab; at += LOSS_THREADS * N) {
        load<N>(v, x + at);
        join(mine, v);
    }
    mine = joined_in_warp(mine);
    if (threadIdx.x % WARP == 0) memory[threadIdx.x / WARP] = mine;
    __syncthreads(); // also: everyone has read x[target]
    partial all = memory[0];
    for (int w = 1; w < LOSS_THREADS / WARP; w++) all = joined(all, memory[w]);
    if (threadIdx.x == 0) losses[row] = logf(all.sum) + all.top - wanted;
    const float factor = scale / all.sum;
    for (int at = threadIdx.x * N; at < vocab; at += LOSS_THREADS * N) {
        load<N>(v, x + at);
#pragma unroll
        for (int i = 0; i < N; i++) {
            v[i] = factor * __expf(v[i] - all.top);
            if (at + i == target) v[i] -= scale;
        }
        store<N>(x + at, v);
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
    if (vocab % VECTOR == 0)
        cross_entropy<VECTOR>
            <<<(unsigned)rows, LOSS_THREADS, 0, stream>>>((bf16 *)logits, losses, targets, scale, (int)vocab);
    else
        cross_entropy<1>
            <<<(unsigned)rows, LOSS_THREADS, 0, stream>>>((bf16 *)logits, losses, targets, scale, (int)vocab);
    return cudaGetLastError();
}

extern "C" cudaError_t kernel_mean(double *mean, const float *values, int64_t count, cudaStream_t stream)
{
    mean_of<<<1, MEAN_THREADS, 0, stream>>>(mean, values, count);
    return cudaGetLastError();
}
