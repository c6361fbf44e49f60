// The optimiser over flat arrays, the norm of the gradient, conversions between bf16 and f32, sums of counts
// and of the ranks' gradients.
//
//   g = clip factor * grad;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
//   w -= lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay w)
//
// One launch for a span of weights, or for all; arithmetic in f32. Bytes for each weight: 14 with everything
// in bf16; 30 with f32 states, master weights and gradients, of which 2 are the bf16 copy that is written.
// The norm sums squares of 8 elements in f32, then in double, in a fixed order. With SUM the update itself
// does that: the gradients are read once, and 8 bytes are written for each 2048 of them.
#include "kernels.h"
#include "vector.cuh"

namespace
{

enum { ADAMW_THREADS = 256, CONVERT_THREADS = 256, NORM_THREADS = 256, FINAL_THREADS = 1024 };
static_assert((int)FINAL_THREADS == (int)KERNELS_NORM_PARTS, "a thread a part");

struct constants {
    float factor, b1, b2, c1, c2, rate, root, keep, eps;
};
static_assert(sizeof(constants) <= 16 * sizeof(float), "the scratch that callers give");

__global__ void prepare(constants *to, const adamw_step *step, const double *square)
{
    const adamw_step s = *step;
    const double t = (double)s.step, norm = sqrt(*square);
    constants c;
    c.factor = s.clip > 0.0 && norm > s.clip ? (float)(s.clip / norm) : 1.0f;
    c.b1 = (float)s.beta1;
    c.b2 = (float)s.beta2;
    c.c1 = (float)(1.0 - s.beta1);
    c.c2 = (float)(1.0 - s.beta2);
    c.rate = (float)(s.lr / (1.0 - pow(s.beta1, t)));
    c.root = (float)(1.0 / sqrt(1.0 - pow(s.beta2, t)));
    c.keep = (float)(1.0 - s.lr * s.weight_decay);
    c.eps = (float)s.eps;
    *to = c;
}

// G is the type of the gradients, S that of the moments. The first `matrices` weights decay. Weights are read
// from `master` if there is one. Returns the sum of the squares of the thread's gradients.
template <typename G, typename S, bool MASTER>
TRAIN_DEVICE float update(bf16 *weights, float *master, const G *grads, S *first, S *second, int64_t matrices,
                          int64_t at, const constants c)
{
    const float keep = at < matrices ? c.keep : 1.0f;
    float w[VECTOR], g[VECTOR], m[VECTOR], v[VECTOR], square = 0.0f;
    load8(g, grads + at);
    load8(m, first + at);
    load8(v, second + at);
    if (MASTER)
        load8(w, master + at);
    else
        load8(w, weights + at);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        const float grad = g[i] * c.factor;
        m[i] = c.b1 * m[i] + c.c1 * grad;
        v[i] = c.b2 * v[i] + c.c2 * grad * grad;
        w[i] = keep * w[i] - c.rate * m[i] / (sqrtf(v[i]) * c.root + c.eps);
        square += g[i] * g[i];
    }
    store8(first + at, m);
    store8(second + at, v);
    if (MASTER) store8(master + at, w);
    store8(weights + at, w);
    return square;
}

// SUM: parts[CTA] = the sum of the squares of its gradients.
template <typename G, typename S, bool MASTER, bool SUM>
__global__ void __launch_bounds__(ADAMW_THREADS)
    adamw(bf16 *weights, float *master, const G *grads, S *first, S *second, int64_t matrices, int64_t count,
          const constants *with, double *parts)
{
    const int64_t at = ((int64_t)blockIdx.x * ADAMW_THREADS + threadIdx.x) * VECTOR;
    float square = 0.0f;
    if (at < count) square = update<G, S, MASTER>(weights, master, grads, first, second, matrices, at, *with);
    if constexpr (SUM) {
        __shared__ double memory[WARP];
        const double sum = sum_of_block_once((double)square, memory);
        if (threadIdx.x == 0) parts[blockIdx.x] = sum;
    }
}

template <typename G>
__global__ void __launch_bounds__(NORM_THREADS) sum_squares(double *parts, const G *grads, int64_t count)
{
    __shared__ double memory[WARP];
    double sum = 0.0;
    const int64_t step = (int64_t)gridDim.x * NORM_THREADS * VECTOR;
    for (int64_t at = ((int64_t)blockIdx.x * NORM_THREADS + threadIdx.x) * VECTOR; at < count; at += step) {
        float g[VECTOR], part = 0.0f;
        load8(g, grads + at);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) part += g[i] * g[i];
        sum += (double)part;
    }
    sum = sum_of_block(sum, memory);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(FINAL_THREADS)
    finish_square(double *square, const double *parts, int64_t count, bool add)
{
    __shared__ double memory[WARP];
    double sum = 0.0;
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < count; i += FINAL_THREADS) sum += parts[i];
    sum = sum_of_block(sum, memory);
    if (threadIdx.x == 0) *square = add ? *square + sum : sum;
}

template <typename T, typename F>
__global__ void __launch_bounds__(CONVERT_THREADS) convert(T *to, const F *from, int64_t count, bool add)
{
    const int64_t at = ((int64_t)blockIdx.x * CONVERT_THREADS + threadIdx.x) * VECTOR;
    for (int64_t i = at; i < count && i < at + VECTOR; i++)
        to_stored(to[i], to_float(from[i]) + (add ? to_float(to[i]) : 0.0f));
}

template <typename T>
__global__ void __launch_bounds__(CONVERT_THREADS) add(T *to, const T *from, int64_t count)
{
    const int64_t at = (int64_t)blockIdx.x * CONVERT_THREADS + threadIdx.x;
    if (at < count) to[at] += from[at];
}

template <typename T>
__global__ void __launch_bounds__(CONVERT_THREADS) add_parts(T *to, const T *from, int64_t count, int parts)
{
    const int64_t at = ((int64_t)blockIdx.x * CONVERT_THREADS + threadIdx.x) * VECTOR;
    if (at >= count) return;
    float sum[VECTOR], part[VECTOR];
    load8(sum, from + at);
    for (int p = 1; p < parts; p++) {
        load8(part, from + p * count + at);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) sum[i] += part[i];
    }
    store8(to + at, sum);
}

unsigned ctas_of(int64_t count, int threads)
{
    return (unsigned)((count + (int64_t)threads * VECTOR - 1) / ((int64_t)threads * VECTOR));
}

template <typename G, typename S, bool MASTER>
void run_adamw(const adamw_arrays *a, const grad_span *span, const constants *with, double *parts,
               cudaStream_t stream)
{
    const unsigned ctas = ctas_of(span->count, ADAMW_THREADS);
    const int64_t first = span->first;
    const auto kernel = parts ? adamw<G, S, MASTER, true> : adamw<G, S, MASTER, false>;
    kernel<<<ctas, ADAMW_THREADS, 0, stream>>>(
        (bf16 *)a->weights + first, MASTER ? a->master + span->state : NULL, (const G *)span->grads,
        (S *)a->first + span->state, (S *)a->second + span->state, a->matrices - first, span->count, with,
        parts);
}

} // namespace

extern "C" cudaError_t kernel_gradient_square(double *square, double *parts, const void *grads,
                                              smoe_type type, int64_t count, cudaStream_t stream)
{
    if (type == SMOE_TYPE_F32)
        sum_squares<float>
            <<<KERNELS_NORM_PARTS, NORM_THREADS, 0, stream>>>(parts, (const float *)grads, count);
    else
        sum_squares<bf16><<<KERNELS_NORM_PARTS, NORM_THREADS, 0, stream>>>(parts, (const bf16 *)grads, count);
    finish_square<<<1, FINAL_THREADS, 0, stream>>>(square, parts, KERNELS_NORM_PARTS, false);
    return cudaGetLastError();
}

extern "C" cudaError_t kernel_begin_update(float *scratch, const adamw_step *step, const double *square,
                                           cudaStream_t stream)
{
    prepare<<<1, 1, 0, stream>>>((constants *)scratch, step, square);
    return cudaGetLastError();
}

extern "C" int64_t kernel_update_parts(int64_t count)
{
    return ctas_of(count, ADAMW_THREADS);
}

extern "C" cudaError_t kernel_update(const adamw_arrays *a, const grad_span *span, smoe_type grad_type,
                                     const float *scratch, double *square, double *parts, cudaStream_t stream)
{
    const constants *with = (const constants *)scratch;
    const bool wide_grads = grad_type == SMOE_TYPE_F32, wide_states = a->state_type == SMOE_TYPE_F32;
    double *to = square ? parts : NULL;
    if (a->master && wide_grads && wide_states)
        run_adamw<float, float, true>(a, span, with, to, stream);
    else if (a->master && !wide_grads && wide_states)
        run_adamw<bf16, float, true>(a, span, with, to, stream);
    else if (!a->master && wide_grads && !wide_states)
        run_adamw<float, bf16, false>(a, span, with, to, stream);
    else if (!a->master && !wide_grads && !wide_states)
        run_adamw<bf16, bf16, false>(a, span, with, to, stream);
    else
        return cudaErrorInvalidValue;
    if (square)
        finish_square<<<1, FINAL_THREADS, 0, stream>>>(square, parts, kernel_update_parts(span->count), true);
    return cudaGetLastError();
}

extern "C" cudaError_t kernel_convert(void *to, smoe_type to_type, const void *from, smoe_type from_type,
                                      int64_t count, bool add, cudaStream_t stream)
{
    const unsigned ctas = ctas_of(count, CONVERT_THREADS);
    if (to_type == SMOE_TYPE_BF16 && from_type == SMOE_TYPE_F32)
        convert<bf16, float>
            <<<ctas, CONVERT_THREADS, 0, stream>>>((bf16 *)to, (const float *)from, count, add);
    else if (to_type == SMOE_TYPE_F32 && from_type == SMOE_TYPE_BF16)
        convert<float, bf16>
            <<<ctas, CONVERT_THREADS, 0, stream>>>((float *)to, (const bf16 *)from, count, add);
    else
        return cudaErrorInvalidValue;
    return cudaGetLastError();
}

extern "C" cudaError_t kernel_add_counts(int32_t *to, const int32_t *from, int64_t count, cudaStream_t stream)
{
    const unsigned ctas = (unsigned)((count + CONVERT_THREADS - 1) / CONVERT_THREADS);
    add<int32_t><<<ctas, CONVERT_THREADS, 0, stream>>>(to, from, count);
    return cudaGetLastError();
}

extern "C" cudaError_t kernel_add(float *to, const float *from, int64_t count, cudaStream_t stream)
{
    const unsigned ctas = (unsigned)((count + CONVERT_THREADS - 1) / CONVERT_THREADS);
    add<float><<<ctas, CONVERT_THREADS, 0, stream>>>(to, from, count);
    return cudaGetLastError();
}

extern "C" cudaError_t kernel_add_parts(void *to, const void *from, smoe_type type, int64_t count, int parts,
                                        cudaStream_t stream)
{
    const unsigned ctas = ctas_of(count, CONVERT_THREADS);
    if (type == SMOE_TYPE_F32)
        add_parts<float>
            <<<ctas, CONVERT_THREADS, 0, stream>>>((float *)to, (const float *)from, count, parts);
    else
        add_parts<bf16><<<ctas, CONVERT_THREADS, 0, stream>>>((bf16 *)to, (const bf16 *)from, count, parts);
    return cudaGetLastError();
}
