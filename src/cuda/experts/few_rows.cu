// Up- and down-projection of few rows: H[r] = X[t(r)] W1[e]^T + b1[e], A[r] = act(H[r]) and
// Y[r] = A[r] W2[e]^T + b2[e], the latter for one column chunk of d. host/few_rows.h says for which layers.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Shapes: X (T, d), W1 (E, h, d), H (padded rows, h), A (padded rows, n), W2 (E, d, n), Y (padded rows,
// columns of the chunk), where h is 2n with a gate and n without. FLOPs 2 R d h and 2 R d n.
//
// Bytes, of 16-bit elements, where C experts have rows: 2 C d h of W1 and 2 C d n of W2, once more for every
// further 16 rows of an expert. All other bytes are few: X, A and Y have R rows, and H, which only training
// stores, also has the pad rows.
//
// So the weights must be read at the speed of the memory. The kernels for many rows (sm90/experts/) have too
// few tiles for this: with one row for each of 8 experts and n = 1024, 64 of 132 SMs have one. Here a CTA
// takes 16 rows of weights over the whole length of the sums, and 6 CTAs are on an SM at once. Every warp has
// a ring of 6 KB in shared memory that it fills with cp.async, so an SM has up to 144 KB in flight. At 4.8
// TB/s and about 800 ns, 29 KB on each SM are on their way at any time.
//
// Tile: 16 rows of X or A by 16 rows of weights. mma multiplies 16 by 8 rows, 16 places of K at a time (K is
// d for up and n for down), with the weights as operand b. A lane copies 16 contiguous bytes of a row of
// weights and reads them itself; four lanes copy 64 bytes. These are not the places of K that mma assigns to
// a lane. But both operands are permuted alike, so the same products are added. The four warps of a CTA take
// slices of 32 places of K by turns, and their sums are added in the order of the warps.
//
// With a gate the 16 rows of W1 are the gate rows and the up rows of 8 features. If an expert has more than
// 16 rows, the CTA reads its weights again for each group of 16. Pad rows are not multiplied. Only the
// backward reads them, and only in H: there they get the same values as from the other kernels, b1 or 0.
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
    CTAS_AN_SM = 6,
    GROUP = SMOE_FEW_ROWS_GROUP,
    WEIGHTS = SMOE_FEW_ROWS_WEIGHTS,
    SLICE = 32, // places of K: four lanes, 16 bytes each
    STEP = WARPS * SLICE,
    SLOTS = 6,            // of a warp's ring
    HALF_BYTES = 32 * 16, // a slice of eight rows of weights
    SLOT_BYTES = 2 * HALF_BYTES,
    RING_BYTES = SLOTS * SLOT_BYTES,
    SUMS = WARPS * RING_BYTES,
    PITCH = WEIGHTS + 4, // of the sums of a row: no bank conflicts
    SHARED_BYTES = SUMS + WARPS * GROUP * PITCH * 4
};
static_assert(GROUP == 16 && WEIGHTS == 16, "two mma of 16 rows x 8 rows of weights");
static_assert(CTAS_AN_SM * (SHARED_BYTES + 1024) <= 233472, "shared memory of an SM");

// The CTA's 16 rows of weights. Row i < 8 starts at `first` + i `stride`, row 8 + i at `second` + i `stride`.
struct weight_rows {
    const char *first, *second;
    int64_t stride; // bytes
};

// The weights that a lane multiplies: 16 bytes of row lane / 4 of both eights for each slice of its warp. It
// copies them to shared memory, SLOTS slices ahead, and reads them itself, so no thread waits for another
// one.
struct weight_stream {
    const char *first, *second; // of the next slice to be copied
    int left;                   // elements from there to the end of the row
    int slices;                 // of the warp
    uint32_t ring, slot;        // the lane's place in slot 0 and in the next slot to be read

    // Copies the first slices.
    SMOE_DEVICE weight_stream(const weight_rows &rows, int length, uint32_t memory, int warp, int lane)
    {
        const int place = warp * SLICE + (lane & 3) * 8;
        const int64_t at = (lane >> 2) * rows.stride + place * 2;
        first = rows.first + at;
        second = rows.second + at;
        left = length - place;
        slices = (length - warp * SLICE + STEP - 1) / STEP;
        ring = slot = memory + warp * RING_BYTES + lane * 16;
        begin();
    }
    SMOE_DEVICE void begin()
    {
#pragma unroll
        for (int i = 0; i < SLOTS; i++) copy();
    }
    // The next slice into `slot`, with zeros past the end of the row.
    SMOE_DEVICE void copy()
    {
        copy16_async_if(left > 0, slot, first);
        copy16_async_if(left > 0, slot + HALF_BYTES, second);
        commit_copies();
        first = advance_by_adds(first, STEP * 2);
        second = advance_by_adds(second, STEP * 2);
        left -= STEP;
        slot = slot == ring + (SLOTS - 1) * SLOT_BYTES ? ring : slot + SLOT_BYTES;
    }
    // Begins again, when all slices have been read.
    SMOE_DEVICE void rewind()
    {
        wait_all_copies(); // the zeros behind the last slice
        const int back = (slices + SLOTS) * STEP;
        first -= back * 2;
        second -= back * 2;
        left += back;
        begin();
    }
};

// The sums of the warps: of each row with each of the 16 rows of weights.
typedef float partial_sums[WARPS][GROUP][PITCH];

// The warp's share of the sums of one group. The lane has rows lane / 4 and lane / 4 + 8 of the group;
// `upper` and `lower` are its vectors of them. They are loaded one slice ahead.
template <typename T>
SMOE_DEVICE void multiply_group(float (&sums)[GROUP][PITCH], weight_stream &weights, const char *upper,
                                const char *lower, int lane)
{
    float acc[2][4] = {};
    int left = weights.left + SLOTS * STEP;
    uint4 x = load_global16_if(left > 0, upper), y = load_global16_if(left > 0, lower);
#pragma unroll 1
    for (int slice = 0; slice < weights.slices; slice++) {
        upper = advance_by_adds(upper, STEP * 2);
        lower = advance_by_adds(lower, STEP * 2);
        left -= STEP;
        const uint4 next_x = load_global16_if(left > 0, upper), next_y = load_global16_if(left > 0, lower);
        wait_copies<SLOTS - 1>();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 w = load_shared16(weights.slot + half * HALF_BYTES);
            multiply(acc[half], {x.x, y.x, x.y, y.y}, w.x, w.y, T());
            multiply(acc[half], {x.z, y.z, x.w, y.w}, w.z, w.w, T());
        }
        weights.copy();
        x = next_x, y = next_y;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        sums[(lane >> 2) + (i & 2) * 4][(i & 4) * 2 + (lane & 3) * 2 + (i & 1)] = acc[i >> 2][i & 3];
}

// All groups of a tile, which has `rows` rows. row_of(i) is where row i of X or A starts. finish(i, j, sum)
// stores element j of row i, where the CTA has 1 << shift elements of every row; its argument sum(j) is row i
// times row j of the weights.
template <typename T, class R, class F>
SMOE_DEVICE void multiply_rows(partial_sums &sums, weight_stream &weights, int rows, int shift,
                               const R &row_of, const F &finish)
{
    const int warp = warp_number(), lane = threadIdx.x & 31, place = warp * SLICE + (lane & 3) * 8;
    for (int first = 0; first < rows; first += GROUP) {
        if (first) {
            weights.rewind();
            __syncthreads(); // the sums of the group before have been read
        }
        // If the group has fewer than 16 rows, its last one is multiplied several times.
        const int row = first + (lane >> 2);
        multiply_group<T>(sums[warp], weights, row_of(min(row, rows - 1)) + place * 2,
                          row_of(min(row + 8, rows - 1)) + place * 2, lane);
        __syncthreads();
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < min(rows - first, (int)GROUP) << shift; i += THREADS) {
            const int row = i >> shift;
            finish(first + row, i & ((1 << shift) - 1), [&](int j) {
                float sum = sums[0][row][j];
                for (int w = 1; w < WARPS; w++) sum += sums[w][row][j];
                return sum;
            });
        }
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
    extern __shared__ __align__(128) char memory[];
    partial_sums &sums = *(partial_sums *)(memory + SUMS);
    wait_for_previous();
    const moe_work tile = read_tile(u.lists);
    if (!moe_work_blocks(tile)) return;
    const int shift = u.gated ? 3 : 4; // 8 or 16 features
    const int expert = moe_work_expert(tile), feature0 = (int)blockIdx.x << shift;
    const int n = (int)u.intermediate, length = (int)u.hidden;
    weight_stream weights(w1_rows(u, expert, feature0), length, shared_address(memory), warp_number(),
                          threadIdx.x & 31);
    const int rows = count_rows(u.row_token, tile);
    const auto row_of = [&](int i) {
        return (const char *)u.x + (int64_t)u.row_token[tile.row + i] * u.hidden * 2;
    };
    multiply_rows<T>(sums, weights, rows, shift, row_of, [&](int i, int j, const auto &sum) {
        const int row = tile.row + i, feature = feature0 + j;
        if (feature >= n) return;
        const uint32_t pair =
            storage<T>::pack(sum(j) + bias_of<T>(u, expert, feature, 0),
                             u.gated ? sum(j + 8) + bias_of<T>(u, expert, feature, 1) : 0.0f);
        if (u.h) store_h(u, row, feature, pair);
        store_element(u.a, (int64_t)row * n + feature,
                      storage<T>::pack(activate_element<T>(u.activation, pair), 0.0f));
    });
    const int pad_rows = u.h ? moe_work_blocks(tile) * SMOE_BLOCK_ROWS - rows : 0;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < pad_rows << shift; i += THREADS) {
        const int row = tile.row + rows + (i >> shift), feature = feature0 + (i & ((1 << shift) - 1));
        if (feature < n)
            store_h(u, row, feature,
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
    extern __shared__ __align__(128) char memory[];
    partial_sums &sums = *(partial_sums *)(memory + SUMS);
    const moe_work tile = read_tile(d.lists);
    if (!moe_work_blocks(tile)) {
        wait_for_previous(); // so that the next kernel waits for the one before this
        return;
    }
    const int expert = moe_work_expert(tile), column0 = (int)blockIdx.x * WEIGHTS;
    const int length = (int)d.intermediate;
    weight_stream weights(w2_rows(d, expert, column0), length, shared_address(memory), warp_number(),
                          threadIdx.x & 31);
    wait_for_previous();
    const int rows = count_rows(d.row_token, tile);
    const auto row_of = [&](int i) { return (const char *)d.a + (int64_t)(tile.row + i) * length * 2; };
    multiply_rows<T>(sums, weights, rows, 4, row_of, [&](int i, int j, const auto &sum) {
        const int column = column0 + j;
        if (column >= d.columns) return;
        float value = sum(j);
        if (d.b2) value += to_float(((const T *)d.b2)[expert * d.hidden + d.first_column + column]);
        store_element(d.y, (tile.row + i) * d.columns + column, storage<T>::pack(value, 0.0f));
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
    return launch_early(kernel, grid, THREADS, SHARED_BYTES, stream, problem);
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
