// RMSNorm and, for queries and keys, RMSNorm followed by RoPE.
//
//   forward    x += residual;  rstd = 1 / sqrt(mean(x^2) + eps);  y = x rstd w
//   backward   g = dy w, n = x rstd:  dx = rstd (g - n mean(g n));  dw = sum over rows of dy n
//   y again    y = n w
//   RoPE       inside a head of size h, (y[i], y[i + h/2]) turns by the position's angle i
//
// A CTA takes a row, and each thread holds eight neighbouring elements of it in registers. So every byte
// moves once: forward 4 T d bytes, or 8 T d with a residual; backward 6 T d, and 2 T d more if it adds to dx
// or writes y. For RoPE a thread also loads the partners of its elements from L1, and the angles, which stay
// in L2. If ALIGNED, half a head is a multiple of eight, and the partners are one vector too. The backward
// has as many CTAs as fit the GPU at once. Each takes many rows and keeps its part of dw in registers. The
// parts are summed in a fixed order.
#include "kernels.h"
#include "vector.cuh"

namespace
{

enum { RESIDENT_THREADS = 1024, SUM_COLUMNS = 32, SUM_GROUPS = 32 };
static_assert((int)RESIDENT_THREADS == (int)MOST_THREADS, "__launch_bounds__ leaves registers for that many");

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

struct turning {
    const float *angles; // (positions, size): cosines, then sines
    int length, first, size;
};

// For an element at `at`: in which half of its head it is, its place in that half, and the place of its
// partner.
struct turn_place {
    bool low;
    int angle, partner;
};

TRAIN_DEVICE turn_place place_of(int at, int size)
{
    const int half = size / 2, inside = at % size;
    if (inside < half) return {true, inside, at + half};
    return {false, inside - half, at - half};
}

// The partners of the eight elements from `at` on.
template <bool ALIGNED> TRAIN_DEVICE eight<bf16> load_partners(const bf16 *row, int at, int size)
{
    if constexpr (ALIGNED) {
        return *(const eight<bf16> *)(row + place_of(at, size).partner);
    } else {
        eight<bf16> raw;
#pragma unroll
        for (int i = 0; i < VECTOR; i++) raw.v[i] = row[place_of(at + i, size).partner];
        return raw;
    }
}

// The factors of the elements and of their partners.
struct turn_factors {
    float own[VECTOR], partner[VECTOR];
};

// sign: 1, or -1 to rotate back.
template <bool ALIGNED>
TRAIN_DEVICE void load_factors(turn_factors &to, const turning &t, int64_t row, int at, float sign)
{
    const float *cosines = t.angles + (t.first + (int)row % t.length) * t.size, *sines = cosines + t.size / 2;
    if constexpr (ALIGNED) {
        const turn_place p = place_of(at, t.size);
        if (p.low) sign = -sign;
        load8(to.own, cosines + p.angle);
        load8(to.partner, sines + p.angle);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) to.partner[i] *= sign;
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            const turn_place p = place_of(at + i, t.size);
            to.own[i] = cosines[p.angle];
            to.partner[i] = p.low ? -sign * sines[p.angle] : sign * sines[p.angle];
        }
    }
}

TRAIN_DEVICE void turn(float (&v)[VECTOR], const float (&partner)[VECTOR], const turn_factors &by)
{
#pragma unroll
    for (int i = 0; i < VECTOR; i++) v[i] = v[i] * by.own[i] + partner[i] * by.partner[i];
}

TRAIN_DEVICE void widen(float (&v)[VECTOR], const eight<bf16> &raw)
{
#pragma unroll
    for (int i = 0; i < VECTOR; i++) v[i] = to_float(raw.v[i]);
}

TRAIN_DEVICE void scaled(float (&v)[VECTOR], const eight<bf16> &raw, float scale, const eight<bf16> &weight)
{
#pragma unroll
    for (int i = 0; i < VECTOR; i++) v[i] = to_float(raw.v[i]) * scale * to_float(weight.v[i]);
}

TRAIN_DEVICE float square_of(const eight<bf16> &raw)
{
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) sum += to_float(raw.v[i]) * to_float(raw.v[i]);
    return sum;
}

// The queries and keys of a row together.
template <bool ALIGNED>
__global__ void __launch_bounds__(MOST_THREADS)
    qk_norm_rope(bf16 *q, bf16 *k, float *rstd, const bf16 *qkv, const bf16 *wq, const bf16 *wk, turning t,
                 int64_t rows, int d, float eps)
{
    __shared__ float memory[2][WARP];
    const int64_t row = blockIdx.x;
    const int at = threadIdx.x * VECTOR;
    const bool mine = at < d;
    eight<bf16> own[2];
    float scale[2] = {};
    if (mine) {
#pragma unroll
        for (int which = 0; which < 2; which++)
            own[which] = *(const eight<bf16> *)(qkv + (3 * row + which) * d + at);
#pragma unroll
        for (int which = 0; which < 2; which++) scale[which] = square_of(own[which]);
    }
#pragma unroll
    for (int which = 0; which < 2; which++) {
        scale[which] = 1.0f / sqrtf(sum_of_block_once(scale[which], memory[which]) / (float)d + eps);
        if (threadIdx.x == 0) rstd[which * rows + row] = scale[which];
    }
    if (!mine) return;
    turn_factors by;
    load_factors<ALIGNED>(by, t, row, at, 1.0f);
#pragma unroll
    for (int which = 0; which < 2; which++) {
        if (!ALIGNED) __threadfence_block(); // or both are computed at once, and GPUs other than Hopper spill
        const bf16 *w = which ? wk : wq;
        float v[VECTOR], other[VECTOR];
        scaled(v, ALIGNED ? own[which] : *(const eight<bf16> *)(qkv + (3 * row + which) * d + at),
               scale[which], *(const eight<bf16> *)(w + at));
        scaled(other, load_partners<ALIGNED>(qkv + (3 * row + which) * d, at, t.size), scale[which],
               load_partners<ALIGNED>(w, at, t.size));
        turn(v, other, by);
        store8((which ? k : q) + row * d + at, v);
    }
}

// The backward of one norm over the rows of this CTA. The row strides of x and dx are ld. If y (rows, d) is
// not NULL, the output of the norm is written there again.
template <bool ROPE, bool ALIGNED>
TRAIN_DEVICE void backward_rows(bf16 *dx, bf16 *y, const bf16 *dy, const bf16 *x, int64_t ld,
                                const float *rstd, const bf16 *w, const turning &t, int64_t rows, int d,
                                bool add, float *part)
{
    __shared__ float memory[2][WARP];
    const int at = threadIdx.x * VECTOR;
    const bool mine = at < d;
    float weight[VECTOR] = {}, sums[VECTOR] = {};
    int turns = 0;
    if (mine) load8(weight, w + at);
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x, turns ^= 1) {
        float g[VECTOR] = {}, n[VECTOR] = {}, old[VECTOR] = {}, product = 0.0f;
        const float scale = rstd[row];
        if (mine) {
            load8(g, dy + row * d + at);
            load8(n, x + row * ld + at);
            if (add) load8(old, dx + row * ld + at);
        }
        if (ROPE && mine) {
            float partner[VECTOR];
            turn_factors by;
            widen(partner, load_partners<ALIGNED>(dy + row * d, at, t.size));
            load_factors<ALIGNED>(by, t, row, at, -1.0f);
            turn(g, partner, by);
        }
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            n[i] *= scale;
            sums[i] += g[i] * n[i];
            g[i] *= weight[i];
            product += g[i] * n[i];
        }
        // Before a thread writes these sums again, it has passed the barrier of the next row.
        const float mean = sum_of_block_once(product, memory[turns]) / (float)d;
        if (!mine) continue;
#pragma unroll
        for (int i = 0; i < VECTOR; i++) old[i] += scale * (g[i] - n[i] * mean);
        store8(dx + row * ld + at, old);
        if (!y) continue;
#pragma unroll
        for (int i = 0; i < VECTOR; i++) n[i] *= weight[i]; // as `norm` does
        store8(y + row * d + at, n);
    }
    if (mine) store8(part + blockIdx.x * (int64_t)d + at, sums);
}

__global__ void __launch_bounds__(MOST_THREADS)
    norm_backward(bf16 *dx, bf16 *y, const bf16 *dy, const bf16 *x, const float *rstd, const bf16 *w,
                  int64_t rows, int d, bool add, float *parts)
{
    backward_rows<false, false>(dx, y, dy, x, d, rstd, w, turning(), rows, d, add, parts);
}

template <bool ALIGNED>
__global__ void __launch_bounds__(MOST_THREADS)
    qk_norm_rope_backward(bf16 *dqkv, const bf16 *dq, const bf16 *dk, const bf16 *qkv, const float *rstd,
                          const bf16 *wq, const bf16 *wk, turning t, int64_t rows, int d, float *parts)
{
    const int which = blockIdx.y;
    backward_rows<true, ALIGNED>(dqkv + which * d, NULL, which ? dk : dq, qkv + which * d, 3 * (int64_t)d,
                                 rstd + which * rows, which ? wk : wq, t, rows, d, false,
                                 parts + which * gridDim.x * (int64_t)d);
}

// A CTA takes SUM_COLUMNS columns, and each of its SUM_GROUPS warps takes every SUM_GROUPS-th part.
// blockIdx.y 0 sums the first `count` parts to `first`, 1 the parts after them to `second`.
template <typename T>
__global__ void __launch_bounds__(SUM_COLUMNS *SUM_GROUPS)
    sum_parts(T *first, T *second, const float *parts, int64_t count, int d, bool add)
{
    T *to = blockIdx.y ? second : first;
    parts += blockIdx.y * count * d;
    __shared__ float memory[SUM_GROUPS][SUM_COLUMNS + 1];
    const int lane = threadIdx.x % WARP, group = threadIdx.x / WARP;
    const int64_t column = blockIdx.x * SUM_COLUMNS + lane;
    float sum = 0.0f;
    if (column < d)
#pragma unroll 8
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

bool aligned(const pass_shape *shape)
{
    return shape->head_size % (2 * VECTOR) == 0;
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
    const auto kernel = aligned(shape) ? qk_norm_rope<true> : qk_norm_rope<false>;
    kernel<<<(unsigned)rows, threads_of(d), 0, stream>>>((bf16 *)q, (bf16 *)k, rstd, (const bf16 *)qkv,
                                                         (const bf16 *)wq, (const bf16 *)wk,
                                                         turning_of(rope, shape), rows, (int)d, eps);
    return cudaGetLastError();
}

extern "C" int64_t kernel_norm_parts(int64_t rows, int64_t d, int norms, int processors)
{
    const int64_t resident = RESIDENT_THREADS / threads_of(d) / norms;
    const int64_t most = processors * (resident ? resident : 1);
    return rows < most ? rows : most;
}

extern "C" cudaError_t kernel_norm_backward(void *dx, void *y, const void *dy, const void *x,
                                            const float *rstd, const void *w, int64_t rows, int64_t d,
                                            bool add_dx, float *parts, int64_t count, cudaStream_t stream)
{
    norm_backward<<<(unsigned)count, threads_of(d), 0, stream>>>((bf16 *)dx, (bf16 *)y, (const bf16 *)dy,
                                                                 (const bf16 *)x, rstd, (const bf16 *)w, rows,
                                                                 (int)d, add_dx, parts);
    return cudaGetLastError();
}

extern "C" cudaError_t kernel_qk_norm_rope_backward(void *dqkv, const void *dq, const void *dk,
                                                    const void *qkv, const float *rstd, const void *wq,
                                                    const void *wk, const float *rope,
                                                    const pass_shape *shape, float *parts, int64_t count,
                                                    cudaStream_t stream)
{
    const int64_t rows = shape->sequences * shape->length, d = shape->heads * shape->head_size;
    const auto kernel = aligned(shape) ? qk_norm_rope_backward<true> : qk_norm_rope_backward<false>;
    kernel<<<dim3((unsigned)count, 2), threads_of(d), 0, stream>>>(
        (bf16 *)dqkv, (const bf16 *)dq, (const bf16 *)dk, (const bf16 *)qkv, rstd, (const bf16 *)wq,
        (const bf16 *)wk, turning_of(rope, shape), rows, (int)d, parts);
    return cudaGetLastError();
}

extern "C" cudaError_t kernel_sum_parts(void *to, void *second, smoe_type type, const float *parts,
                                        int64_t count, int64_t d, bool add, cudaStream_t stream)
{
    const dim3 ctas((unsigned)((d + SUM_COLUMNS - 1) / SUM_COLUMNS), second ? 2 : 1);
    const int threads = SUM_COLUMNS * SUM_GROUPS;
    if (type == SMOE_TYPE_F32)
        sum_parts<float>
            <<<ctas, threads, 0, stream>>>((float *)to, (float *)second, parts, count, (int)d, add);
    else
        sum_parts<bf16><<<ctas, threads, 0, stream>>>((bf16 *)to, (bf16 *)second, parts, count, (int)d, add);
    return cudaGetLastError();
}
