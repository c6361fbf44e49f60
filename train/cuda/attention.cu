// Causal attention without tensor cores: for generation, and for machines without cuDNN.
//
//   s[i, j] = <q[i], k[j]> / sqrt(h), j <= i;  lse[i] = log sum_j exp(s[i, j]);  p = exp(s - lse)
//   forward    out[i] = sum_j p[i, j] v[j]
//   backward   D[i] = <dout[i], out[i]>;  ds[i, j] = p[i, j] (<dout[i], v[j]> - D[i]) / sqrt(h)
//              dq[i] = sum_j ds[i, j] k[j];  dk[j] = sum_i ds[i, j] q[i];  dv[j] = sum_i p[i, j] dout[i]
//
// A CTA computes one query (for dk and dv one key) of one head. Its warps take runs of 32 keys (queries) in
// turn. First each lane works on one key, then on one element of the head. The warps' sums are added in a
// fixed order.
#include "kernels.h"
#include "vector.cuh"

#include <cmath>

namespace
{

enum { WARPS = 4, THREADS = WARPS * WARP, SLICES = KERNELS_MOST_HEAD / WARP };

struct heads_view {
    int length, heads, size, first; // as pass_shape
    float scale;
};

// Row strides: q, k, out and their gradients d; v and dv 3 d.
TRAIN_DEVICE int64_t row_at(const heads_view &h, int64_t sequence, int64_t row, int head, int factor)
{
    const int64_t d = (int64_t)h.heads * h.size;
    return (sequence * h.length + row) * factor * d + head * h.size;
}

TRAIN_DEVICE float dot(const bf16 *a, const bf16 *b, int size)
{
    float sum = 0.0f;
    for (int i = 0; i < size; i++) sum += to_float(a[i]) * to_float(b[i]);
    return sum;
}

// acc += the sum of `count` rows from `rows` on, each times its weight. A lane has one element of each slice
// of WARP elements.
TRAIN_DEVICE void add_rows(float (&acc)[SLICES], const float *weights, const bf16 *rows, int64_t stride,
                           int count, int size)
{
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int s = 0; s < SLICES; s++) {
        const int at = s * WARP + lane;
        if (at < size)
#pragma unroll 4
            for (int j = 0; j < count; j++) acc[s] += weights[j] * to_float(rows[j * stride + at]);
    }
}

// Adds the vectors of the warps; warp 0 stores the sum times factor.
TRAIN_DEVICE void store_sum(bf16 *to, const float (&acc)[SLICES], float factor, int size,
                            float (*memory)[KERNELS_MOST_HEAD])
{
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    __syncthreads();
#pragma unroll
    for (int s = 0; s < SLICES; s++)
        if (s * WARP + lane < size) memory[warp][s * WARP + lane] = acc[s];
    __syncthreads();
    for (int at = threadIdx.x; at < size; at += THREADS) {
        float sum = 0.0f;
        for (int w = 0; w < WARPS; w++) sum += memory[w][at];
        to_stored(to[at], sum * factor);
    }
}

// blockIdx: query, head, sequence.
__global__ void __launch_bounds__(THREADS)
    attention(bf16 *out, float *lse, const bf16 *q, const bf16 *k, const bf16 *v, heads_view h)
{
    __shared__ float weights[WARPS][WARP], tops[WARPS], sums[WARPS], memory[WARPS][KERNELS_MOST_HEAD];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, head = blockIdx.y;
    const int64_t sequence = blockIdx.z, query = blockIdx.x;
    const int keys = h.first + (int)query + 1;
    const int64_t stride = (int64_t)h.heads * h.size, mine = row_at(h, sequence, query, head, 1);
    const bf16 *key = k + row_at(h, sequence, 0, head, 1), *value = v + row_at(h, sequence, 0, head, 3);
    float top = -INFINITY, sum = 0.0f, acc[SLICES] = {};
    for (int first = warp * WARP; first < keys; first += THREADS) {
        const int j = first + lane;
        const float s = j < keys ? dot(q + mine, key + j * stride, h.size) * h.scale : -INFINITY;
        const float next = fmaxf(top, largest_of_warp(s)), old = __expf(top - next);
        const float p = j < keys ? __expf(s - next) : 0.0f;
        sum = sum * old + sum_of_warp(p);
        top = next;
        weights[warp][lane] = p;
        __syncwarp();
#pragma unroll
        for (int slice = 0; slice < SLICES; slice++) acc[slice] *= old;
        add_rows(acc, weights[warp], value + first * 3 * stride, 3 * stride, min(WARP, keys - first), h.size);
        __syncwarp();
    }
    tops[warp] = top;
    sums[warp] = sum;
    __syncthreads();
    float all_top = tops[0], all_sum = 0.0f;
    for (int w = 1; w < WARPS; w++) all_top = fmaxf(all_top, tops[w]);
    for (int w = 0; w < WARPS; w++) all_sum += sums[w] * __expf(tops[w] - all_top);
    const float old = __expf(top - all_top);
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++) acc[slice] *= old;
    store_sum(out + mine, acc, 1.0f / all_sum, h.size, memory);
    if (lse && threadIdx.x == 0)
        lse[(sequence * h.heads + head) * h.length + query] = all_top + logf(all_sum);
}

// dq and D.
__global__ void __launch_bounds__(THREADS)
    backward_queries(bf16 *dq, float *dots, const bf16 *dout, const bf16 *out, const float *lse,
                     const bf16 *q, const bf16 *k, const bf16 *v, heads_view h)
{
    __shared__ float weights[WARPS][WARP], memory[WARPS][KERNELS_MOST_HEAD];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, head = blockIdx.y;
    const int64_t sequence = blockIdx.z, query = blockIdx.x;
    const int keys = (int)query + 1;
    const int64_t stride = (int64_t)h.heads * h.size, mine = row_at(h, sequence, query, head, 1);
    const int64_t statistic = (sequence * h.heads + head) * h.length + query;
    const bf16 *key = k + row_at(h, sequence, 0, head, 1), *value = v + row_at(h, sequence, 0, head, 3);
    const float of_row = dot(dout + mine, out + mine, h.size), denominator = lse[statistic];
    float acc[SLICES] = {};
    for (int first = warp * WARP; first < keys; first += THREADS) {
        const int j = first + lane;
        float ds = 0.0f;
        if (j < keys) {
            const float p = __expf(dot(q + mine, key + j * stride, h.size) * h.scale - denominator);
            ds = p * (dot(dout + mine, value + j * 3 * stride, h.size) - of_row);
        }
        weights[warp][lane] = ds;
        __syncwarp();
        add_rows(acc, weights[warp], key + first * stride, stride, min(WARP, keys - first), h.size);
        __syncwarp();
    }
    store_sum(dq + mine, acc, h.scale, h.size, memory);
    if (threadIdx.x == 0) dots[statistic] = of_row;
}

// dk and dv; blockIdx: key, head, sequence.
__global__ void __launch_bounds__(THREADS)
    backward_keys(bf16 *dk, bf16 *dv, const bf16 *dout, const float *lse, const float *dots, const bf16 *q,
                  const bf16 *k, const bf16 *v, heads_view h)
{
    __shared__ float weights[2][WARPS][WARP], memory[WARPS][KERNELS_MOST_HEAD];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, head = blockIdx.y;
    const int64_t sequence = blockIdx.z, key = blockIdx.x;
    const int64_t stride = (int64_t)h.heads * h.size, mine = row_at(h, sequence, key, head, 1);
    const bf16 *value = v + row_at(h, sequence, key, head, 3);
    const bf16 *queries = q + row_at(h, sequence, 0, head, 1),
               *douts = dout + row_at(h, sequence, 0, head, 1);
    const int64_t statistic = (sequence * h.heads + head) * h.length;
    float of_key[SLICES] = {}, of_value[SLICES] = {};
    for (int first = (int)key + warp * WARP; first < h.length; first += THREADS) {
        const int i = first + lane;
        float p = 0.0f, ds = 0.0f;
        if (i < h.length) {
            p = __expf(dot(queries + i * stride, k + mine, h.size) * h.scale - lse[statistic + i]);
            ds = p * (dot(douts + i * stride, value, h.size) - dots[statistic + i]);
        }
        weights[0][warp][lane] = p;
        weights[1][warp][lane] = ds;
        __syncwarp();
        const int count = min(WARP, h.length - first);
        add_rows(of_value, weights[0][warp], douts + first * stride, stride, count, h.size);
        add_rows(of_key, weights[1][warp], queries + first * stride, stride, count, h.size);
        __syncwarp();
    }
    store_sum(dv + row_at(h, sequence, key, head, 3), of_value, 1.0f, h.size, memory);
    store_sum(dk + mine, of_key, h.scale, h.size, memory);
}

heads_view view_of(const pass_shape *s)
{
    return {(int)s->length, (int)s->heads, (int)s->head_size, (int)s->first,
            1.0f / sqrtf((float)s->head_size)};
}

} // namespace

extern "C" cudaError_t kernel_attention(void *out, float *lse, const void *q, const void *k, const void *v,
                                        const pass_shape *s, cudaStream_t stream)
{
    const dim3 ctas((unsigned)s->length, (unsigned)s->heads, (unsigned)s->sequences);
    attention<<<ctas, THREADS, 0, stream>>>((bf16 *)out, lse, (const bf16 *)q, (const bf16 *)k,
                                            (const bf16 *)v, view_of(s));
    return cudaGetLastError();
}

extern "C" cudaError_t kernel_attention_backward(void *dq, void *dk, void *dv, const void *dout,
                                                 const void *out, const float *lse, const void *q,
                                                 const void *k, const void *v, const pass_shape *s,
                                                 float *dots, cudaStream_t stream)
{
    const dim3 ctas((unsigned)s->length, (unsigned)s->heads, (unsigned)s->sequences);
    backward_queries<<<ctas, THREADS, 0, stream>>>((bf16 *)dq, dots, (const bf16 *)dout, (const bf16 *)out,
                                                   lse, (const bf16 *)q, (const bf16 *)k, (const bf16 *)v,
                                                   view_of(s));
    backward_keys<<<ctas, THREADS, 0, stream>>>((bf16 *)dk, (bf16 *)dv, (const bf16 *)dout, lse, dots,
                                                (const bf16 *)q, (const bf16 *)k, (const bf16 *)v,
                                                view_of(s));
    return cudaGetLastError();
}
