// Quantises to e4m3 (f8.h): rows of X or dO with a scale for each token, and weights with a scale for each
// matrix of an expert, in both layouts that the GEMMs read.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Rows, bytes: 2 T d read, T d + 4 T written. A warp has a row. It reads the row twice, first for the largest
// magnitude; the second time the row is in L1.
//
// Weights, bytes of 16-bit weights: 6 E d n read, 6 E d n written (gated). The largest magnitude of a matrix
// must be known before its first byte is written, and the matrix should be read from DRAM only once. So one
// launch goes through the matrices W1[0], W2[0], W1[1], ... in groups of units. Group g reads matrix g for
// its largest magnitude, and then quantises matrix g - lag, which is still in L2. CTAs claim units in this
// order from a counter, one ahead. A unit that quantises waits until all parts of its matrix have been read.
// These have been claimed earlier, and a CTA computes its units in order, so the first unit that is not
// finished never waits, and there is no deadlock. The lag keeps the waits short.
//
// Tile: 128 x 128 elements. A thread takes four rows of eight columns: it stores each row's eight bytes, and
// the four bytes of each column to shared memory, from where they go to the transposed matrix.
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "common/storage.cuh"
#include "sm90/f8.cuh"
#include "sm90/f8_kernels.h"

namespace moe
{
namespace
{

// Eight elements as f32.
template <typename T> struct eight_of {
    static MOE_DEVICE void load(float (&to)[8], const T *from)
    {
        const uint4 v = __ldg((const uint4 *)from);
        const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            to[2 * i] = storage<T>::low(pairs[i]);
            to[2 * i + 1] = storage<T>::high(pairs[i]);
        }
    }
};

template <> struct eight_of<float> {
    static MOE_DEVICE void load(float (&to)[8], const float *from)
    {
        const float4 a = __ldg((const float4 *)from), b = __ldg((const float4 *)from + 1);
        to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
        to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
    }
};

MOE_DEVICE uint32_t largest_of(uint32_t amax, const float (&v)[8])
{
#pragma unroll
    for (int i = 0; i < 8; i++) amax = moe_f8_amax(amax, v[i]);
    return amax;
}

MOE_DEVICE uint32_t largest_of_warp(uint32_t amax)
{
#pragma unroll
    for (int step = 16; step; step /= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, step));
    return amax;
}

MOE_DEVICE uint2 quantize_eight(const float (&v)[8], float factor)
{
    return {pack_e4m3(v[0] * factor, v[1] * factor, v[2] * factor, v[3] * factor),
            pack_e4m3(v[4] * factor, v[5] * factor, v[6] * factor, v[7] * factor)};
}

// ---- Rows

enum { ROW_THREADS = 256, ROW_WARPS = ROW_THREADS / 32 };

struct rows_params {
    const void *x;
    uint8_t *bytes;
    float *scale;
    int rows, columns;
};

template <typename T> __global__ void __launch_bounds__(ROW_THREADS) quantize_rows(const rows_params p)
{
    const int row = blockIdx.x * ROW_WARPS + warp_number(), lane = threadIdx.x & 31;
    if (row >= p.rows) return;
    const T *from = (const T *)p.x + (int64_t)row * p.columns;
    uint8_t *to = p.bytes + (int64_t)row * p.columns;
    uint32_t amax = 0;
#pragma unroll 4
    for (int column = lane * 8; column < p.columns; column += 256) {
        float v[8];
        eight_of<T>::load(v, from + column);
        amax = largest_of(amax, v);
    }
    amax = largest_of_warp(amax);
    const float factor = moe_f8_factor(amax);
#pragma unroll 4
    for (int column = lane * 8; column < p.columns; column += 256) {
        float v[8];
        eight_of<T>::load(v, from + column);
        *(uint2 *)(to + column) = quantize_eight(v, factor);
    }
    if (lane == 0) p.scale[row] = moe_f8_scale(amax);
}

// ---- Weights

enum {
    THREADS = 256,
    SIDE = 128,         // of a tile
    PART = SIDE * SIDE, // elements that a unit reads for the largest magnitude
    TASKS = PART / 32,  // four rows of eight columns
    GROUPS = SIDE / 4,  // of four rows
};

// Of an SM: those of f32 need more registers, and load twice the bytes at a time.
template <typename T> constexpr int ctas_of()
{
    return sizeof(T) == 4 ? 3 : 4;
}

struct matrix {
    const void *from; // of the first expert
    uint8_t *to, *to_transposed;
    float *scale;
    int rows, columns;
    int half; // rows 2 j and 2 j + 1 of `from` are rows j and half + j; 0: the same order
    int parts, column_tiles, tiles;
};

struct weights_params {
    matrix of[2]; // W1, W2
    moe_f8_work *work;
    int experts, lag;
    int units_of_pair, units; // of two neighbouring groups; of all
};

// A part to read, or a tile to quantise, of matrix `number`, which is of expert number / 2.
struct weights_unit {
    int number, index;
    bool quantizes;
};

MOE_DEVICE weights_unit unit_at(const weights_params &p, int unit)
{
    const int other = p.lag & 1; // an odd lag: W2 is quantised in the groups in which W1 is read
    const int pair = p.units_of_pair, even = p.of[0].parts + p.of[other].tiles;
    const int in_pair = unit % pair, odd = in_pair >= even;
    const int group = unit / pair * 2 + odd, index = in_pair - (odd ? even : 0), parts = p.of[odd].parts;
    if (index < parts) return {group, index, false};
    return {group - p.lag, index - parts, true};
}

template <typename T>
MOE_DEVICE void read_part(const matrix &m, int expert, int part, moe_f8_work *work, int w)
{
    const int64_t elements = (int64_t)m.rows * m.columns;
    const T *from = (const T *)m.from + expert * elements;
    const int64_t first = (int64_t)part * PART;
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < PART / 8 / THREADS; i++) {
        const int64_t at = first + (i * THREADS + (int)threadIdx.x) * 8;
        float v[8] = {};
        if (at < elements) eight_of<T>::load(v, from + at);
        amax = largest_of(amax, v);
    }
    amax = largest_of_warp(amax);
    if ((threadIdx.x & 31) == 0) atomicMax(&work->amax[w], amax);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(&work->read[w], 1u);
}

// Word `group` (four rows) of a column of the tile in shared memory. Of the 32 lanes that store 16 columns,
// eight apart, and two groups, each has a bank of its own; so have 32 lanes that load pairs of words.
MOE_DEVICE int word_of(int column, int group)
{
    return column * GROUPS + (group ^ (column >> 3) * 2);
}

// Turns four rows of four bytes.
MOE_DEVICE void turn(uint32_t (&v)[4])
{
    const uint32_t a = __byte_perm(v[0], v[1], 0x5140), b = __byte_perm(v[2], v[3], 0x5140);
    const uint32_t c = __byte_perm(v[0], v[1], 0x7362), d = __byte_perm(v[2], v[3], 0x7362);
    v[0] = __byte_perm(a, b, 0x5410);
    v[1] = __byte_perm(a, b, 0x7632);
    v[2] = __byte_perm(c, d, 0x5410);
    v[3] = __byte_perm(c, d, 0x7632);
}

template <typename T>
MOE_DEVICE void quantize_tile(const matrix &m, int expert, int row0, int column0, float factor,
                              uint32_t *turned)
{
    const int64_t elements = (int64_t)m.rows * m.columns;
    const T *from = (const T *)m.from + expert * elements;
    uint8_t *to = m.to + expert * elements;
#pragma unroll
    for (int i = 0; i < TASKS / THREADS; i++) {
        const int task = i * THREADS + threadIdx.x, group = task / 16, octet = task % 16;
        const int row = row0 + group * 4, column = column0 + octet * 8;
        if (row >= m.rows || column >= m.columns) continue;
        uint32_t left[4], right[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int k = row + j, source = !m.half ? k : k < m.half ? 2 * k : 2 * (k - m.half) + 1;
            float v[8];
            eight_of<T>::load(v, from + (int64_t)source * m.columns + column);
            const uint2 bytes = quantize_eight(v, factor);
            *(uint2 *)(to + (int64_t)k * m.columns + column) = bytes;
            left[j] = bytes.x, right[j] = bytes.y;
        }
        turn(left);
        turn(right);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            turned[word_of(octet * 8 + j, group)] = left[j];
            turned[word_of(octet * 8 + 4 + j, group)] = right[j];
        }
    }
    __syncthreads();
    to = m.to_transposed + expert * elements;
#pragma unroll
    for (int i = 0; i < PART / 8 / THREADS; i++) {
        const int task = i * THREADS + threadIdx.x, column = task / 16, pair = task % 16;
        const int row = row0 + pair * 8;
        if (row < m.rows && column0 + column < m.columns)
            *(uint2 *)(to + (int64_t)(column0 + column) * m.rows + row) =
                *(const uint2 *)(turned + word_of(column, pair * 2));
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, ctas_of<T>()) quantize_weights(const weights_params p)
{
    __shared__ uint32_t turned[SIDE * GROUPS];
    __shared__ int claimed;
    __shared__ uint32_t amax;
    int next = threadIdx.x == 0 ? (int)atomicAdd(&p.work->turn, 1u) : 0;
    for (;;) {
        if (threadIdx.x == 0) claimed = next;
        __syncthreads();
        const int unit = claimed;
        if (unit >= p.units) return;
        if (threadIdx.x == 0) next = (int)atomicAdd(&p.work->turn, 1u); // arrives while this unit is computed
        const weights_unit u = unit_at(p, unit);
        const bool exists = u.number >= 0 && u.number < 2 * p.experts;
        const int expert = u.number / 2, w = u.number & 1;
        moe_f8_work *work = p.work + expert;
        const matrix &m = p.of[w];
        if (exists && !u.quantizes) read_part<T>(m, expert, u.index, work, w);
        if (exists && u.quantizes) {
            if (threadIdx.x == 0) {
                while (*(volatile uint32_t *)&work->read[w] != (uint32_t)m.parts) {
                }
                __threadfence();
                amax = *(volatile uint32_t *)&work->amax[w];
                if (u.index == 0) m.scale[expert] = moe_f8_scale(amax);
            }
            __syncthreads();
            quantize_tile<T>(m, expert, u.index / m.column_tiles * SIDE, u.index % m.column_tiles * SIDE,
                             moe_f8_factor(amax), turned);
        }
        __syncthreads(); // `claimed`, `amax` and `turned` have been read
    }
}

matrix matrix_of(const void *from, uint8_t *to, uint8_t *to_transposed, float *scale, int64_t rows,
                 int64_t columns, int64_t half)
{
    const int64_t parts = moe_divide_up(rows * columns, PART), tiles = moe_divide_up(columns, SIDE);
    return {from,         to,        to_transposed, scale,      (int)rows,
            (int)columns, (int)half, (int)parts,    (int)tiles, (int)(tiles * moe_divide_up(rows, SIDE))};
}

weights_params prepare(const moe_f8_quantized &q, int ctas)
{
    const int64_t d = q.hidden, n = q.intermediate, w1 = q.first * q.h_width * d, w2 = q.first * d * n;
    const matrix first = matrix_of(q.w1, q.to.w1 + w1, q.to.w1_t + w1, q.to.scale1 + q.first, q.h_width, d,
                                   q.interleaved ? n : 0);
    const matrix second = matrix_of(q.w2, q.to.w2 + w2, q.to.w2_t + w2, q.to.scale2 + q.first, d, n, 0);
    const int pair = first.parts + first.tiles + second.parts + second.tiles, experts = (int)q.count;
    // Large enough that the matrices whose tiles the CTAs take at one time have been read.
    const int lag = 1 + 3 * ctas / pair;
    return {{first, second},
            (moe_f8_work *)q.to.work + q.first,
            experts,
            lag,
            pair,
            (2 * experts + lag + 1) / 2 * pair};
}

using weight_types = type_list<float, __nv_bfloat16, __half>;

} // namespace
} // namespace moe

extern "C" cudaError_t moe_sm90_f8_rows(const moe_launch *on, const moe_f8_rows *r)
{
    using namespace moe;
    const rows_params p = {r->x, r->bytes, r->scale, (int)r->rows, (int)r->columns};
    if (!r->rows) return cudaSuccess;
    return for_type(storage_types(), on->dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        return enqueue(quantize_rows<T>, (unsigned)moe_divide_up(r->rows, ROW_WARPS), ROW_THREADS, 0,
                       on->stream, p);
    });
}

extern "C" cudaError_t moe_sm90_f8_weights(const moe_launch *on, const moe_f8_quantized *q)
{
    using namespace moe;
    if (!q->count) return cudaSuccess;
    moe_f8_work *work = (moe_f8_work *)q->to.work + q->first;
    const cudaError_t status = cudaMemsetAsync(work, 0, sizeof *work * (size_t)q->count, on->stream);
    if (status != cudaSuccess) return status;
    return for_type(weight_types(), q->type, [&](auto t) {
        using T = typename decltype(t)::type;
        const int ctas = on->sms * ctas_of<T>();
        return enqueue(quantize_weights<T>, ctas, THREADS, 0, on->stream, prepare(*q, ctas));
    });
}
