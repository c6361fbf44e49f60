// The activation of the dense SwiGLU MLP. h (rows, 2 width) = gate | up.
//
//   forward    a = silu(gate) up;                                                     6 T width bytes
//   backward   s = sigmoid(gate): dup = da gate s, dgate = da up s (1 + gate (1 - s)), over h;  10 T width
//   bytes
#include "kernels.h"
#include "vector.cuh"

namespace
{

enum { SWIGLU_THREADS = 256 };

TRAIN_DEVICE float sigmoid(float x)
{
    return 1.0f / (1.0f + __expf(-x));
}

__global__ void __launch_bounds__(SWIGLU_THREADS) swiglu(bf16 *a, const bf16 *h, int64_t count, int64_t width)
{
    const int64_t at = ((int64_t)blockIdx.x * SWIGLU_THREADS + threadIdx.x) * VECTOR;
    if (at >= count) return;
    const bf16 *gate = h + at / width * 2 * width + at % width;
    float g[VECTOR], u[VECTOR];
    load8(g, gate);
    load8(u, gate + width);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) g[i] = g[i] * sigmoid(g[i]) * u[i];
    store8(a + at, g);
}

__global__ void __launch_bounds__(SWIGLU_THREADS)
    swiglu_backward(bf16 *h, const bf16 *da, int64_t count, int64_t width)
{
    const int64_t at = ((int64_t)blockIdx.x * SWIGLU_THREADS + threadIdx.x) * VECTOR;
    if (at >= count) return;
    bf16 *gate = h + at / width * 2 * width + at % width;
    float g[VECTOR], u[VECTOR], in[VECTOR];
    load8(g, gate);
    load8(u, gate + width);
    load8(in, da + at);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        const float s = sigmoid(g[i]), dup = in[i] * g[i] * s;
        g[i] = in[i] * u[i] * s * (1.0f + g[i] * (1.0f - s));
        u[i] = dup;
    }
    store8(gate, g);
    store8(gate + width, u);
}

unsigned ctas_of(int64_t count)
{
    return (unsigned)((count / VECTOR + SWIGLU_THREADS - 1) / SWIGLU_THREADS);
}

} // namespace

extern "C" cudaError_t kernel_swiglu(void *a, const void *h, int64_t rows, int64_t width, cudaStream_t stream)
{
    const int64_t count = rows * width;
    swiglu<<<ctas_of(count), SWIGLU_THREADS, 0, stream>>>((bf16 *)a, (const bf16 *)h, count, width);
    return cudaGetLastError();
}

extern "C" cudaError_t kernel_swiglu_backward(void *h, const void *da, int64_t rows, int64_t width,
                                              cudaStream_t stream)
{
    const int64_t count = rows * width;
    swiglu_backward<<<ctas_of(count), SWIGLU_THREADS, 0, stream>>>((bf16 *)h, (const bf16 *)da, count, width);
    return cudaGetLastError();
}
