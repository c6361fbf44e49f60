// RMSNorm and, for queries and keys, RMSNorm followed by RoPE.
//
//   forward    x += residual;  rstd = 1 / sqrt(mean(x^2) + eps);  y = x rstd w
//   backward   g = dy w, n = x rstd:  dx = rstd (g - n mean(g n));  dw = sum over rows of dy n
//   RoPE       inside a head of size h, (y[i], y[i + h/2]) turns by the position's angle i
//
// A CTA takes a row; a thread holds eight neighbouring elements of it in registers, so every byte moves once:
// forward 4 T d bytes, 8 T d with a residual; backward 6 T d, 8 T d when it adds. The two elements that
// RoPE turns together meet in shared memory. The backward's CTAs each take many rows and keep their part of
// dw in registers; the parts are summed in a fixed order.
#include "kernels.h"
#include "vector.cuh"

namespace
{

enum { PARTS_PER_PROCESSOR = 8, SUM_COLUMNS = 32, SUM_GROUPS = 32 };

int threads_of(int64_t d)
{
    return (int)((d + VECTOR * WARP - 1) / (VECTOR * WARP) * WARP);
}

__global__ void __launch_bounds__(MOST_THREADS)
    norm(bf16 *y, float *rstd, bf16 *x, const bf16 *residual, const bf16 *w, int d, float eps)
{
    __shared__ float memory[WARP];
    const int64_t row = blockIdx.x;
    const int at = threadIdx.x * VECTOR;
    float v[VECTOR] = {}, weight[VECTOR] = {}, square = 0.0f;
    if (at < d) {
        load8(v, x + row * d + at);
        load8(weight, w + at);
        if (residual) {
            float r[VECTOR];
            load8(r, residual + row * d + at);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) v[i] += r[i];
            round8(v);
            store8(x + row * d + at, v);
        }
    }
#pragma unroll
    for (int i = 0; i < VECTOR; i++) square += v[i] * v[i];
    const float scale = 1.0f / sqrtf(sum_of_block(square, memory) / (float)d + eps);
    if (threadIdx.x == 0) rstd[row] = scale;
    if (at >= d) return;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) v[i] = v[i] * scale * weight[i];
    store8(y + row * d + at, v);
}

// Element `at` of a row in `memory`, turned; sign -1 turns back. angles: cosines, then sines.
TRAIN_DEVICE float turned(const float *memory, int at, const float *angles, int size, float sign)
{
    const int half = size / 2, inside = at % size;
    const bool low = inside < half;
    const int angle = low ? inside : inside - half;
    const float partner = memory[low ? at + half : at - half] * (low ? -sign : sign);
    return memory[at] * angles[angle] + partner * angles[half + angle];
}

struct turning {
    const float *angles; // (positions, size)
    int length, first, size;
};

TRAIN_DEVICE const float *angles_of(const turning &t, int64_t row)
{
    return t.angles + (t.first + row % t.length) * t.size;
}

// blockIdx.y: queries, keys.
__global__ void __launch_bounds__(MOST_THREADS)
    qk_norm_rope(bf16 *q, bf16 *k, float *rstd, const bf16 *qkv, const bf16 *wq, const bf16 *wk, turning t,
                 int64_t rows, int d, float eps)
{
    extern __shared__ float normed[]; // (d)
    __shared__ float memory[WARP];
    const int64_t row = blockIdx.x;
    const int at = threadIdx.x * VECTOR, which = blockIdx.y;
    float v[VECTOR] = {}, weight[VECTOR], square = 0.0f;
    if (at < d) load8(v, qkv + row * 3 * d + which * d + at);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) square += v[i] * v[i];
    const float scale = 1.0f / sqrtf(sum_of_block(square, memory) / (float)d + eps);
    if (threadIdx.x == 0) rstd[which * rows + row] = scale;
    if (at < d) {
        load8(weight, (which ? wk : wq) + at);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) normed[at + i] = v[i] * scale * weight[i];
    }
    __syncthreads();
    if (at >= d) return;
    const float *angles = angles_of(t, row);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) v[i] = turned(normed, at + i, angles, t.size, 1.0f);
    store8((which ? k : q) + row * d + at, v);
}

// One norm's backward over the rows that this CTA takes; the row strides of x and dx are ld.
template <bool ROPE>
TRAIN_DEVICE void backward_rows(bf16 *dx, const bf16 *dy, const bf16 *x, int64_t ld, const float *rstd,
                                const bf16 *w, const turning &t, int64_t rows, int d, bool add, float *part,
                                float *shared)
{
    __shared__ float memory[WARP];
    const int at = threadIdx.x * VECTOR;
    const bool mine = at < d;
    float weight[VECTOR] = {}, sums[VECTOR] = {};
    if (mine) load8(weight, w + at);
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        float g[VECTOR] = {}, n[VECTOR] = {}, old[VECTOR] = {}, product = 0.0f;
        const float scale = rstd[row];
        if (mine) {
            load8(g, dy + row * d + at);
            load8(n, x + row * ld + at);
            if (add) load8(old, dx + row * ld + at);
        }
        if (ROPE) {
            if (mine)
#pragma unroll
                for (int i = 0; i < VECTOR; i++) shared[at + i] = g[i];
            __syncthreads();
            const float *angles = angles_of(t, row);
            if (mine)
#pragma unroll
                for (int i = 0; i < VECTOR; i++) g[i] = turned(shared, at + i, angles, t.size, -1.0f);
        }
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            n[i] *= scale;
            sums[i] += g[i] * n[i];
            g[i] *= weight[i];
            product += g[i] * n[i];
        }
        const float mean = sum_of_block(product, memory) / (float)d;
        if (ROPE && blockDim.x == WARP) __syncwarp(); // sum_of_block has no barrier then
        if (!mine) continue;
#pragma unroll
        for (int i = 0; i < VECTOR; i++) old[i] += scale * (g[i] - n[i] * mean);
        store8(dx + row * ld + at, old);
    }
    if (mine) store8(part + blockIdx.x * (int64_t)d + at, sums);
}

__global__ void __launch_bounds__(MOST_THREADS)
    norm_backward(bf16 *dx, const bf16 *dy, const bf16 *x, const float *rstd, const bf16 *w, int64_t rows,
                  int d, bool add, float *parts)
{
    backward_rows<false>(dx, dy, x, d, rstd, w, turning(), rows, d, add, parts, nullptr);
}

__global__ void __launch_bounds__(MOST_THREADS)
    qk_norm_rope_backward(bf16 *dqkv, const bf16 *dq, const bf16 *dk, const bf16 *qkv, const float *rstd,
                          const bf16 *wq, const bf16 *wk, turning t, int64_t rows, int d, float *parts)
{
    extern __shared__ float turned_back[]; // (d)
    const int which = blockIdx.y;
    backward_rows<true>(dqkv + which * d, which ? dk : dq, qkv + which * d, 3 * (int64_t)d,
                        rstd + which * rows, which ? wk : wq, t, rows, d, false,
                        parts + which * gridDim.x * (int64_t)d, turned_back);
}

// A CTA takes SUM_COLUMNS columns; SUM_GROUPS warps each take every SUM_GROUPS-th part.
template <typename T>
__global__ void __launch_bounds__(SUM_COLUMNS *SUM_GROUPS)
    sum_parts(T *to, const float *parts, int64_t count, int d, bool add)
{
    __shared__ float memory[SUM_GROUPS][SUM_COLUMNS + 1];
    const int lane = threadIdx.x % WARP, group = threadIdx.x / WARP;
    const int64_t column = blockIdx.x * SUM_COLUMNS + lane;
    float sum = 0.0f;
    if (column < d)
        for (int64_t p = group; p < count; p += SUM_GROUPS) sum += parts[p * d + column];
    memory[group][lane] = sum;
    __syncthreads();
    if (group != 0 || column >= d) return;
    sum = add ? to_float(to[column]) : 0.0f;
    for (int g = 0; g < SUM_GROUPS; g++) sum += memory[g][lane];
    to_stored(to[column], sum);
}
static_assert((int)SUM_COLUMNS == (int)WARP, "a warp takes the columns");

turning turning_of(const float *rope, const pass_shape *shape)
{
    return {rope, (int)shape->length, (int)shape->first, (int)shape->head_size};
}

} // namespace

extern "C" cudaError_t kernel_norm(void *y, float *rstd, void *x, const void *residual, const void *w,
                                   int64_t rows, int64_t d, float eps, cudaStream_t stream)
{
    norm<<<(unsigned)rows, threads_of(d), 0, stream>>>((bf16 *)y, rstd, (bf16 *)x, (const bf16 *)residual,
                                                       (const bf16 *)w, (int)d, eps);
    return cudaGetLastError();
}

extern "C" cudaError_t kernel_qk_norm_rope(void *q, void *k, float *rstd, const void *qkv, const void *wq,
                                           const void *wk, const float *rope, const pass_shape *shape,
                                           float eps, cudaStream_t stream)
{
    const int64_t rows = shape->sequences * shape->length, d = shape->heads * shape->head_size;
    qk_norm_rope<<<dim3((unsigned)rows, 2), threads_of(d), d * sizeof(float), stream>>>(
        (bf16 *)q, (bf16 *)k, rstd, (const bf16 *)qkv, (const bf16 *)wq, (const bf16 *)wk,
        turning_of(rope, shape), rows, (int)d, eps);
    return cudaGetLastError();
}

extern "C" int64_t kernel_norm_parts(int64_t rows, int processors)
{
    const int64_t most = (int64_t)processors * PARTS_PER_PROCESSOR;
    return rows < most ? rows : most;
}

extern "C" cudaError_t kernel_norm_backward(void *dx, const void *dy, const void *x, const float *rstd,
                                            const void *w, int64_t rows, int64_t d, bool add_dx, float *parts,
                                            int64_t count, cudaStream_t stream)
{
    norm_backward<<<(unsigned)count, threads_of(d), 0, stream>>>(
        (bf16 *)dx, (const bf16 *)dy, (const bf16 *)x, rstd, (const bf16 *)w, rows, (int)d, add_dx, parts);
    return cudaGetLastError();
}

extern "C" cudaError_t kernel_qk_norm_rope_backward(void *dqkv, const void *dq, const void *dk,
                                                    const void *qkv, const float *rstd, const void *wq,
                                                    const void *wk, const float *rope,
                                                    const pass_shape *shape, float *parts, int64_t count,
                                                    cudaStream_t stream)
{
    const int64_t rows = shape->sequences * shape->length, d = shape->heads * shape->head_size;
    qk_norm_rope_backward<<<dim3((unsigned)count, 2), threads_of(d), d * sizeof(float), stream>>>(
        (bf16 *)dqkv, (const bf16 *)dq, (const bf16 *)dk, (const bf16 *)qkv, rstd, (const bf16 *)wq,
        (const bf16 *)wk, turning_of(rope, shape), rows, (int)d, parts);
    return cudaGetLastError();
}

extern "C" cudaError_t kernel_sum_parts(void *to, smoe_type type, const float *parts, int64_t count,
                                        int64_t d, bool add, cudaStream_t stream)
{
    const unsigned ctas = (unsigned)((d + SUM_COLUMNS - 1) / SUM_COLUMNS);
    const int threads = SUM_COLUMNS * SUM_GROUPS;
    if (type == SMOE_TYPE_F32)
        sum_parts<float><<<ctas, threads, 0, stream>>>((float *)to, parts, count, (int)d, add);
    else
        sum_parts<bf16><<<ctas, threads, 0, stream>>>((bf16 *)to, parts, count, (int)d, add);
    return cudaGetLastError();
}
