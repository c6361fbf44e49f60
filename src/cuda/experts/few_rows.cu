// Up- and down-projection of few rows: H[r] = X[t(r)] W1[e]^T + b1[e], A[r] = act(H[r]) and
// Y[r] = A[r] W2[e]^T + b2[e], the latter for one column chunk of d. host/few_rows.h says for which layers.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Shapes: X (T, d), W1 (E, h, d), H (padded rows, h), A (padded rows, n), W2 (E, d, n), Y (padded rows,
// columns of the chunk), where h is 2n with a gate and n without. FLOPs 2 R d h and 2 R d n.
//
// Bytes, of 16-bit elements, with C experts that have rows: 2 C d h of W1 and 2 C d n of W2, for every 8 rows
// of an expert once more. All other bytes are few: X, A and Y have R rows, and for training H has the pad
// rows too.
//
// So the kernels must read the weights at the speed of the memory. The kernels for many rows (sm90/experts/)
// have too few tiles for this: with 8 rows of 8 experts and n = 1024, 64 of 132 SMs have one. Here a CTA
// takes 16 rows of weights over the whole length of the sums, and 8 such CTAs are on an SM at once. Each
// warp has 4 KB of weights in flight, an SM 128 KB. The memory's latency times its speed is about 32 KB for
// each SM.
//
// Tile: 16 rows of weights x 8 rows of X or A. mma multiplies it in steps of 16 along K (d for up, n for
// down) with the weights as operand a, straight from global memory to registers, and X or A as operand b.
// A lane loads 16 contiguous bytes of a row, and four lanes 64. The places of K are thereby permuted, in both
// operands alike, which does not change the sum's terms. The four warps of a CTA take 128 places of K by
// turns (256 contiguous bytes of each row); their sums are added in the order of the warps.
//
// With a gate the 16 rows of W1 are the gate rows and the up rows of 8 features. An expert's rows are taken
// in groups of 8; the weights are read again for each group. Pad rows are not multiplied. Only the backward
// reads them, and only in H: there they get the same values as from the other kernels, b1 or 0.
#include "common/activation.cuh"
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "host/few_rows.h"
#include "host/kernels.h"

namespace moe
{
namespace
{

enum {
    WARPS = 4,
    THREADS = WARPS * 32,
    CTAS_AN_SM = 8,
    GROUP = SMOE_FEW_ROWS_GROUP,
    WEIGHTS = SMOE_FEW_ROWS_WEIGHTS,
    CHUNK = 32, // places of K that a warp loads with one instruction for each row
    BATCH = 4,  // chunks that are loaded together
    STEP = CHUNK * BATCH,
    PITCH = WEIGHTS + 4, // of the partial sums in shared memory: no bank conflicts
    LINE = 128           // bytes that one prefetch brings to L2
};
static_assert(STEP * 2 * WEIGHTS == 32 * LINE, "each lane prefetches one line of a batch");
static_assert(GROUP * WEIGHTS == THREADS, "each thread finishes one element");

// The CTA's 16 rows of weights. Row i < 8 starts at `first` + i `stride`, row 8 + i at `second` + i `stride`.
struct weight_rows {
    const char *first, *second;
    int64_t stride; // bytes
};

// The partial sums of two groups by turns, so that one barrier for each group is enough.
typedef float partial_sums[2][WARPS][GROUP][PITCH];

// Begins to read the warp's first two batches.
SMOE_DEVICE void prefetch(const weight_rows &weights, int length, int warp, int lane)
{
    const char *row = (lane & 16 ? weights.second : weights.first) + (lane >> 1 & 7) * weights.stride;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int place = (warp + i * WARPS) * STEP + (lane & 1) * LINE / 2;
        if (place < length) prefetch_l2(row + place * 2);
    }
}

// 16 bytes of each chunk of a batch, and zeros past the end of the rows. `left`: number of elements from here
// to the end of the row.
template <bool WHOLE> SMOE_DEVICE void load_weights(uint4 (&to)[BATCH], const char *from, int left)
{
#pragma unroll
    for (int i = 0; i < BATCH; i++)
        to[i] = WHOLE || i * CHUNK < left ? load_once16(from + i * CHUNK * 2) : make_uint4(0, 0, 0, 0);
}

// acc (16 rows of weights x 8 rows) += a batch.
template <typename T, bool WHOLE>
SMOE_DEVICE void multiply_batch(float (&acc)[4], const char *first, const char *second, const char *row,
                                int left)
{
    uint4 w0[BATCH], w1[BATCH], x[BATCH];
    load_weights<WHOLE>(w0, first, left);
    load_weights<WHOLE>(w1, second, left);
#pragma unroll
    for (int i = 0; i < BATCH; i++)
        x[i] = WHOLE || i * CHUNK < left ? *(const uint4 *)(row + i * CHUNK * 2) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        multiply(acc, {w0[i].x, w1[i].x, w0[i].y, w1[i].y}, x[i].x, x[i].y, T());
        multiply(acc, {w0[i].z, w1[i].z, w0[i].w, w1[i].w}, x[i].z, x[i].w, T());
    }
}

// The sums of one group, of which each lane has row lane / 4: writes them to `sums`, whose second index is
// the row and third index the row of weights.
template <typename T>
SMOE_DEVICE void multiply_group(float (&sums)[WARPS][GROUP][PITCH], const weight_rows &weights,
                                const char *row, int length, int warp, int lane)
{
    const int own = lane >> 2, vector = (lane & 3) * 8;
    const char *first = weights.first + own * weights.stride, *second = weights.second + own * weights.stride;
    float acc[4] = {};
    for (int k = warp * STEP; k < length; k += WARPS * STEP) {
        const int64_t at = (k + vector) * 2;
        if (k + STEP <= length)
            multiply_batch<T, true>(acc, first + at, second + at, row + at, 0);
        else
            multiply_batch<T, false>(acc, first + at, second + at, row + at, length - k - vector);
    }
    float(*to)[PITCH] = sums[warp] + (lane & 3) * 2;
    to[0][own] = acc[0];
    to[1][own] = acc[1];
    to[0][own + 8] = acc[2];
    to[1][own + 8] = acc[3];
}

// One tile: all groups of its `rows` rows. row_of(i) is where row i of X or A starts; finish(first, sum)
// stores the results of the group from row `first` on, where sum(i, j) is row first + i times row j of the
// weights.
template <typename T, class R, class F>
SMOE_DEVICE void multiply_rows(partial_sums &sums, const weight_rows &weights, int rows, int length,
                               const R &row_of, const F &finish)
{
    const int warp = warp_number(), lane = threadIdx.x & 31;
    for (int first = 0, turn = 0; first < rows; first += GROUP, turn ^= 1) {
        // If the group has fewer than 8 rows, its last one is multiplied several times.
        const char *row = row_of(min(first + (lane >> 2), rows - 1));
        multiply_group<T>(sums[turn], weights, row, length, warp, lane);
        __syncthreads();
        finish(first, [&](int i, int j) {
            float sum = sums[turn][0][i][j];
            for (int w = 1; w < WARPS; w++) sum += sums[turn][w][i][j];
            return sum;
        });
    }
}

// The tile of the CTA; no blocks if there is none.
SMOE_DEVICE moe_work read_tile(const moe_cuda_lists &lists)
{
    const int tiles = __ldcg(lists.counts);
    const int2 entry = __ldcg((const int2 *)(lists.tiles + blockIdx.y));
    const moe_work none = {0, 0}, tile = {entry.x, entry.y};
    return (int)blockIdx.y < tiles ? tile : none;
}

// The number of the tile's rows that are no pad rows.
SMOE_DEVICE int count_rows(const int32_t *row_token, moe_work tile)
{
    const int row = (int)threadIdx.x;
    return __syncthreads_count(row < moe_work_blocks(tile) * SMOE_BLOCK_ROWS &&
                               row_token[tile.row + row] >= 0);
}
static_assert(THREADS == SMOE_TILE_BLOCKS * SMOE_BLOCK_ROWS, "each thread looks at one row of the tile");

// Element `at` of a tensor: the low 16 bits of `value`.
SMOE_DEVICE void store_element(void *tensor, int64_t at, uint32_t value)
{
    ((uint16_t *)tensor)[at] = (uint16_t)value;
}

// ---- Up

// The feature of a thread's element, counted from the CTA's first one, and the first row of this element.
// Threads in a row have features in a row.
struct up_place {
    int row, feature;
    SMOE_DEVICE up_place(int i, int gated) : row(i / (gated ? 8 : 16)), feature(i % (gated ? 8 : 16))
    {
    }
};

// b1 of row `half` (0: gate, 1: up) of a feature, or 0.
template <typename T> SMOE_DEVICE float bias_of(const moe_up &u, int expert, int feature, int half)
{
    if (!u.b1) return 0.0f;
    const int64_t n = u.intermediate, row = u.interleaved ? 2 * feature + half : half * n + feature;
    return to_float(((const T *)u.b1)[expert * (u.gated ? 2 * n : n) + row]);
}

// `pair`: gate and up of a feature.
SMOE_DEVICE void store_h(const moe_up &u, int row, int feature, uint32_t pair)
{
    const int64_t n = u.intermediate, at = row * (u.gated ? 2 * n : n) + feature;
    store_element(u.h, at, pair);
    if (u.gated) store_element(u.h, at + n, pair >> 16);
}

template <typename T> SMOE_DEVICE float activate_element(smoe_activation kind, uint32_t pair)
{
    const float gate = storage<T>::low(pair), up = storage<T>::high(pair);
    switch (kind) {
#define SMOE_ACTIVATE(enumerator, name, shape, curve)                                                        \
    case enumerator: return activate<T, enumerator>(gate, up);
        MOE_ACTIVATIONS(SMOE_ACTIVATE)
#undef SMOE_ACTIVATE
    }
    __builtin_unreachable(); // the host refuses other values
}

SMOE_DEVICE weight_rows w1_rows(const moe_up &u, int expert, int feature)
{
    const int64_t row = u.hidden * 2, n = u.intermediate, step = u.interleaved ? 2 : 1;
    const char *first = (const char *)u.w1 + (expert * (u.gated ? 2 * n : n) + feature * step) * row;
    const int64_t second = u.gated ? (u.interleaved ? 1 : n) : feature + 8 < n ? 8 : 0;
    return {first, first + second * row, step * row};
}

template <typename T>
__global__ void __launch_bounds__(THREADS, CTAS_AN_SM) up(const __grid_constant__ moe_up u)
{
    __shared__ partial_sums sums;
    wait_for_previous();
    const moe_work tile = read_tile(u.lists);
    if (!moe_work_blocks(tile)) return;
    const int expert = moe_work_expert(tile), feature0 = (int)blockIdx.x * (u.gated ? 8 : 16);
    const int n = (int)u.intermediate, length = (int)u.hidden;
    const weight_rows weights = w1_rows(u, expert, feature0);
    prefetch(weights, length, warp_number(), threadIdx.x & 31);
    const int rows = count_rows(u.row_token, tile);
    const auto row_of = [&](int i) {
        return (const char *)u.x + (int64_t)u.row_token[tile.row + i] * u.hidden * 2;
    };
    multiply_rows<T>(sums, weights, rows, length, row_of, [&](int first, const auto &sum) {
        const up_place at((int)threadIdx.x, u.gated);
        const int row = first + at.row, feature = feature0 + at.feature;
        if (at.row >= GROUP || row >= rows || feature >= n) return;
        const float gate = sum(at.row, at.feature) + bias_of<T>(u, expert, feature, 0);
        const float up = u.gated ? sum(at.row, at.feature + 8) + bias_of<T>(u, expert, feature, 1) : 0.0f;
        const uint32_t pair = storage<T>::pack(gate, up);
        if (u.h) store_h(u, tile.row + row, feature, pair);
        store_element(u.a, (int64_t)(tile.row + row) * n + feature,
                      storage<T>::pack(activate_element<T>(u.activation, pair), 0.0f));
    });
    if (u.h)
        for (int i = (int)threadIdx.x;; i += THREADS) { // the pad rows
            const up_place at(i, u.gated);
            const int row = rows + at.row, feature = feature0 + at.feature;
            if (row >= moe_work_blocks(tile) * SMOE_BLOCK_ROWS) break;
            if (feature < n)
                store_h(u, tile.row + row, feature,
                        storage<T>::pack(bias_of<T>(u, expert, feature, 0),
                                         u.gated ? bias_of<T>(u, expert, feature, 1) : 0.0f));
        }
    let_next_start();
}

// ---- Down

SMOE_DEVICE weight_rows w2_rows(const moe_down &d, int expert, int column)
{
    const int64_t row = d.intermediate * 2;
    const char *first = (const char *)d.w2 + (expert * d.hidden + d.first_column + column) * row;
    return {first, first + (column + 8 < d.columns ? 8 : 0) * row, row};
}

// Reads the tile and asks for weights before the kernel before has ended. This kernel is only launched behind
// kernels that began when the plan was complete.
template <typename T>
__global__ void __launch_bounds__(THREADS, CTAS_AN_SM) down(const __grid_constant__ moe_down d)
{
    __shared__ partial_sums sums;
    const moe_work tile = read_tile(d.lists);
    const int expert = moe_work_expert(tile), column0 = (int)blockIdx.x * WEIGHTS;
    const int length = (int)d.intermediate;
    const weight_rows weights = w2_rows(d, expert, column0);
    if (moe_work_blocks(tile)) prefetch(weights, length, warp_number(), threadIdx.x & 31);
    wait_for_previous();
    if (!moe_work_blocks(tile)) return;
    const int rows = count_rows(d.row_token, tile);
    const auto row_of = [&](int i) { return (const char *)d.a + (int64_t)(tile.row + i) * length * 2; };
    multiply_rows<T>(sums, weights, rows, length, row_of, [&](int first, const auto &sum) {
        const int i = (int)threadIdx.x / WEIGHTS, j = (int)threadIdx.x % WEIGHTS, column = column0 + j;
        if (first + i >= rows || column >= d.columns) return;
        float value = sum(i, j);
        if (d.b2) value += to_float(((const T *)d.b2)[expert * d.hidden + d.first_column + column]);
        store_element(d.y, (tile.row + first + i) * d.columns + column, storage<T>::pack(value, 0.0f));
    });
    let_next_start();
}

// One CTA for each group of columns and each row tile there can be; CTAs without a tile end at once.
template <class K, class P>
cudaError_t launch(K kernel, int64_t columns, int columns_a_cta, int64_t tiles, cudaStream_t stream,
                   const P &problem)
{
    if (tiles == 0) return cudaSuccess;
    const dim3 grid((unsigned)moe_divide_up(columns, columns_a_cta), (unsigned)tiles);
    return launch_early(kernel, grid, THREADS, 0, stream, problem);
}

} // namespace
} // namespace moe

extern "C" cudaError_t moe_cuda_up_few_rows(const moe_up *u, int64_t tiles, smoe_type dtype,
                                            cudaStream_t stream)
{
    using namespace moe;
    return for_type(storage_types(), dtype, [&](auto t) {
        return launch(up<typename decltype(t)::type>, u->intermediate, u->gated ? 8 : 16, tiles, stream, *u);
    });
}

extern "C" cudaError_t moe_cuda_down_few_rows(const moe_down *d, int64_t tiles, smoe_type dtype,
                                              cudaStream_t stream)
{
    using namespace moe;
    return for_type(storage_types(), dtype, [&](auto t) {
        return launch(down<typename decltype(t)::type>, d->columns, WEIGHTS, tiles, stream, *d);
    });
}
