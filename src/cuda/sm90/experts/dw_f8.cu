// Weight gradients of expert e in e4m3, as sums over its rows r (f8.h):
//
//   dW2[e, g] = 2^C2(e, g) sum_r (dO8[t(r)] 2^(w2(r, g) - C2(e, g)))^T A'_w[r, g]
//   dW1[e, g] = 2^C1(e, g) sum_r dH_w[r, g]^T (X8[t(r)] 2^(w1(r, g) - C1(e, g))), computed as its transpose
//
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Shapes: dO8 and X8 (T, d), A'_w (padded rows, n), dH_w (padded rows, h), all bytes; w (padded rows,
// ceil(n / 256)); the gradients as in dw.cu. FLOPs 2 R d h or 2 R d n.
//
// Bytes: half of dw.cu's for the operands, the same for gradients and pieces.
//
// Schedule, pieces, staging and stores are those of dw.cu. Tiles are wide, and a tile's 256 features are in
// one group (moe_f8_weight_grid_of), so it has one C. Rows are added to f16x2 sums as in gemm_f8.cuh. What is
// new:
//
// - wgmma takes operands of 8 bits K-major only, but K is the rows here, so both operands are transposed on
//   their way. The loaders fill a ring of three slots, 64 rows each, as they are in memory. While the tensor
//   cores multiply one step, the consumer warps transpose the next one into one of three buffers. There each
//   column has the 64 bytes of its rows. A warp takes 16 of every 128 columns.
// - ldmatrix.trans moves bytes in pairs, and prmt then separates the two columns of a pair. This leaves 16
//   rows in the order 0 1 8 9, 2 3 10 11, and so on, the same for both operands.
// - Before each step is a barrier of the consumers. A buffer is written again after two of them, so that the
//   wgmma of all consumers have read it.
// - If C is the exponent that was expected, all factors 2^(w - C) are 1. Else the consumer warps multiply X8
//   or dO8 by them while they transpose.
//
// Shared memory moves 224 bytes for each clock that wgmma alone would take, and can move 128.
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "sm90/dw_tiles.cuh"
#include "sm90/f8_kernels.h"
#include "sm90/gemm_f8.cuh"

namespace moe
{
namespace
{

using namespace dw_kernel;

struct dw_f8_params : dw_params { // features: 3-D, pairs of columns, rows, halves
    const int32_t *exponent, *expected, *largest;
    int32_t groups;
    MOE_DEVICE int stripes_of_half() const
    {
        return moe_f8_stripes_of_half(intermediate);
    }
};

enum {
    PANEL_BYTES = 128 * STEP, // 128 columns of a step: a panel
    PANELS = 3,               // of the token operand, of two stripes
    F8_SLOT_BYTES = PANELS * PANEL_BYTES,
    TURNED = SLOTS * F8_SLOT_BYTES, // the transposed steps
    COLUMN_BYTES = STEP,            // there
    PROMOTED_STEPS = F8_PROMOTED_STEPS * F8_STEP / STEP,
    LEAST_PROMOTED = (F8_LEAST_PROMOTED - 1) * F8_STEP / STEP + 1
};
static_assert((int)TURNED + SLOTS * F8_SLOT_BYTES <= (int)STAGING, "staging is behind both rings");
static_assert((int)MOE_WEIGHT_LONG == (int)MOE_F8_DH_FEATURES, "a tile is in one group");
static_assert((int)PANEL_BYTES == (int)MOE_SUBTILE_BYTES && (int)CONSUMER_WARPS * 16 == 128,
              "a warp's share");

// ---- Row factors

// The f16 2^k, k <= 0; 0 below 2^-24.
MOE_DEVICE uint32_t f16_power(int k)
{
    return k >= -14 ? (uint32_t)(15 + k) << 10 : k >= -24 ? 1u << (k + 24) : 0;
}

// Where w of a piece's rows and the tile's group is.
struct row_exponents {
    const int32_t *w;
    int groups, largest;
    bool differ; // else all factors are 1
    // Lane i: the factors of rows 2 i and 2 i + 1 of a step. Pad rows are zeros, so that their w does not
    // matter.
    MOE_DEVICE uint32_t factors(int step, int lane) const
    {
        const int32_t *of = w + (int64_t)(step * STEP + 2 * lane) * groups;
        return f16_power(min(__ldg(of) - largest, 0)) | f16_power(min(__ldg(of + groups) - largest, 0)) << 16;
    }
};

// ---- Transposing

// What a lane of a consumer warp needs. The warp has 16 columns of each panel: the 16 bytes number `warp` of
// the rows, read in matrices of eight rows. Matrices are stored with a row for each column: first those of
// columns 0 2 4 6 9 11 13 15, then 1 3 5 7 8 10 12 14, so that the rows of each reach all banks.
struct turner {
    uint32_t from, to;      // offsets in a panel of the lane's row
    uint32_t first, second; // which bytes of two words are the lane's column of the first and second matrix

    MOE_DEVICE turner(int warp, int lane) : from(moe_subtile_offset(lane, warp))
    {
        const bool odd = lane >= 16;
        first = odd ? 0x7531 : 0x6420, second = odd ? 0x6420 : 0x7531;
        const uint32_t column = 2 * (lane & 7) + ((lane >> 2 ^ lane >> 3) & 1), vector = lane >> 4;
        to = (warp * 16 + column) * COLUMN_BYTES + ((vector ^ (column >> 1 & 3)) << 4);
    }

    // pair: half of the first of a word's rows, which are two neighbours and the two that are eight further.
    static MOE_DEVICE void scale_words(uint32_t (&words)[4], uint32_t factors, int pair)
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int of = pair + i / 2 * 8;
            words[i] = scale_e4m3(words[i], __shfl_sync(~0u, factors, of), __shfl_sync(~0u, factors, of + 4));
        }
    }

    // One step from the slot at `slot` to the buffer at `turned`. differ: as in row_exponents.
    MOE_DEVICE void turn(uint32_t slot, uint32_t turned, bool differ, uint32_t factors, int lane) const
    {
#pragma unroll
        for (int half = 0; half < 2; half++) { // 32 rows
            uint32_t m[PANELS][4];
#pragma unroll
            for (int panel = 0; panel < PANELS; panel++)
                load_matrices_transposed(m[panel],
                                         slot + panel * PANEL_BYTES + half * PANEL_BYTES / 2 + from);
#pragma unroll
            for (int panel = 0; panel < PANELS; panel++) {
                uint32_t words[4];
#pragma unroll
                for (int i = 0; i < 4; i += 2) { // 16 rows
                    words[i] = __byte_perm(m[panel][i], m[panel][i + 1], first);
                    words[i + 1] = __byte_perm(m[panel][i], m[panel][i + 1], second);
                }
                if (panel == 0 && differ) scale_words(words, factors, half * 16 + (lane & 3));
                store_matrices(turned + panel * PANEL_BYTES + (to ^ half * 32), words[0], words[1], words[2],
                               words[3]);
            }
        }
    }
};

// ---- Consumers

struct consumer_state {
    const shared_layout &shared;
    const turner &turns;
    ring_position<SLOTS> ring; // of the next slot
    uint32_t turned;           // number of the buffer that was filled last
    int consumer, lane;

    MOE_DEVICE uint32_t buffer() const
    {
        return shared.base + TURNED + turned * F8_SLOT_BYTES;
    }
    MOE_DEVICE void turn_next(const row_exponents &rows, int step)
    {
        const uint32_t factors = rows.differ ? rows.factors(step, lane) : 0;
        turned = turned == SLOTS - 1 ? 0 : turned + 1;
        barrier_wait(shared.full(ring.slot), ring.phase);
        turns.turn(shared.base + ring.slot * F8_SLOT_BYTES, buffer(), rows.differ, factors, lane);
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) barrier_arrive(shared.empty(ring.slot));
        ring.advance();
    }
};

// acc (+)= the consumer's 64 of d times 256 features of the step that was transposed last.
MOE_DEVICE void multiply_turned(float (&acc)[128], const consumer_state &at, bool keep)
{
    const uint32_t left = descriptor_address(at.buffer() + at.consumer * 64 * COLUMN_BYTES),
                   right = descriptor_address(at.buffer() + PANEL_BYTES);
    pin(acc);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < STEP / 32; j++)
        tensor_core<e4m3>::multiply(acc, HALF_ROWS_DESCRIPTOR | (left + 2 * j),
                                    HALF_ROWS_DESCRIPTOR | (right + 2 * j), keep || j != 0);
    wgmma_commit();
    pin(acc);
}

// acc = the sum over a piece of `steps` steps.
MOE_DEVICE void sum_rows(float (&acc)[128], consumer_state &at, const row_exponents &rows, int steps)
{
    promoted_sums<128> sums;
    const float scale = promotion_scale((steps + 1) / 2);
    at.turn_next(rows, 0);
    named_barrier_sync(1, CONSUMER_THREADS);
    for (int first = 0;;) {
        const int end = steps < LEAST_PROMOTED ? steps : min(first + PROMOTED_STEPS, steps);
        for (int k = first; k < end; k++) {
            multiply_turned(acc, at, k != first);
            wgmma_wait<1>();
            if (k + 1 < steps) {
                at.turn_next(rows, k + 1);
                named_barrier_sync(1, CONSUMER_THREADS);
            }
        }
        wgmma_wait<0>();
        pin(acc);
        if (end == steps) break;
        sums.add(acc, {scale, scale});
        first = end;
    }
    sums.add_to(acc, {1.0f / scale, 1.0f / scale});
}

template <typename G, bool TRANSPOSED, bool MERGES>
MOE_DEVICE void multiply_tiles(const dw_f8_params &p, const weight_matrix<false> &matrix,
                               const shared_layout &shared, weight_feed units, int warp, int lane)
{
    const turner turns(warp, lane);
    consumer_state at = {shared, turns, ring_position<SLOTS>(0), 0, warp >> 2, lane};
    uint32_t count = 0;
    float acc[128];
    for (int t = 0;; t++) {
        const weight_unit unit = units.read(t);
        if (!unit.exists()) break;
        const int group = matrix.stripe(unit.at, 0).feature / MOE_F8_DH_FEATURES;
        const int of_expert = unit.piece.expert * p.groups + group;
        const int32_t largest = __ldg(p.largest + of_expert);
        const row_exponents rows = {p.exponent + (int64_t)unit.piece.row * p.groups + group, p.groups,
                                    largest, largest != __ldg(p.expected + of_expert)};
        sum_rows(acc, at, rows, unit.steps());
        const float scale = moe_f8_power(largest);
#pragma unroll
        for (int i = 0; i < 128; i++) acc[i] *= scale;
        if (unit.piece.part >= 0) {
            store_part_of(p, unit, matrix.tiles, acc);
            continue;
        }
        write_tile<G, MERGES>(acc, shared, at.consumer, count, lane, TRANSPOSED);
        count++;
    }
}

template <typename G, bool TRANSPOSED, bool MERGES>
__global__ void __launch_bounds__(THREADS, 1) dw_f8(const __grid_constant__ dw_f8_params p)
{
    extern __shared__ __align__(1024) char memory[];
    const uint32_t base = shared_address(memory);
    const shared_layout shared = {base, base + BARRIERS};
    const weight_feed units = {{base + FEED}};
    const int warp = warp_number(), lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        units.init();
        init_barriers(shared, 1 + LOADERS);
    }
    __syncthreads();
    const weight_matrix<false> matrix(p);
    if (warp >= 8) {
        give_registers<56>();
        if (warp < 10)
            load_tiles<1>(p, matrix, shared, units);
        else if (lane == 0)
            store_tiles<G, TRANSPOSED, MERGES>(p, matrix, shared, units, warp - 10);
    } else {
        take_registers<224>();
        multiply_tiles<G, TRANSPOSED, MERGES>(p, matrix, shared, units, warp, lane);
        if (!MERGES && !p.accumulate) clear_gradients<G>(p);
    }
}

// ---- Launches

dw_f8_params prepare_f8(moe_launch *on, const moe_f8_dw &f)
{
    const moe_dw &d = f.dw;
    const cuuint64_t n = (cuuint64_t)d.intermediate, halves = (cuuint64_t)d.halves;
    const moe_boxes features = {d.features,
                                3,
                                {n / 2, (cuuint64_t)d.rows, halves},
                                {n * halves, n},
                                {MOE_SUBTILE_ROW_BYTES / 2, STEP, 1}};
    dw_f8_params p = {};
    (dw_params &)p = prepare(on, d, false);
    moe_map_boxes(on, &p.features, SMOE_TYPE_BF16, &features);
    p.grid = moe_f8_weight_grid_of((int32_t)d.hidden, (int32_t)d.intermediate, d.halves);
    p.exponent = f.exponent;
    p.expected = f.expected;
    p.largest = f.largest;
    p.groups = (int32_t)moe_f8_groups(d.intermediate, MOE_F8_DH_FEATURES);
    return p;
}

template <typename G, bool TRANSPOSED> auto kernel_of(bool accumulate)
{
    constexpr bool CAN_MERGE = sizeof(G) == 2;
    return CAN_MERGE && accumulate ? dw_f8<G, TRANSPOSED, CAN_MERGE> : dw_f8<G, TRANSPOSED, false>;
}

template <typename G, bool TRANSPOSED>
cudaError_t launch(const dw_f8_params &p, int ctas, cudaStream_t stream)
{
    const cudaError_t status =
        enqueue(kernel_of<G, TRANSPOSED>(p.accumulate), ctas, THREADS, SHARED_BYTES, stream, p);
    if (status != cudaSuccess || !p.parts) return status;
    return enqueue(add_parts<dw_f8_params, G, TRANSPOSED, false>, ctas, CONSUMER_THREADS, 0, stream, p);
}

} // namespace
} // namespace moe

extern "C" cudaError_t moe_sm90_f8_dw_init(const moe_device *device)
{
    using namespace moe;
    return for_every_type(f8_storage_types(), [&](auto t) {
        return for_every_type(gradient_types<typename decltype(t)::type>(), [&](auto g) {
            using G = typename decltype(g)::type;
            for (const auto kernel : {kernel_of<G, false>(false), kernel_of<G, false>(true),
                                      kernel_of<G, true>(false), kernel_of<G, true>(true)}) {
                const cudaError_t status = allow_shared(device, kernel, SHARED_BYTES);
                if (status != cudaSuccess) return status;
            }
            return cudaSuccess;
        });
    });
}

extern "C" cudaError_t moe_sm90_f8_dw(moe_launch *on, const moe_f8_dw *f)
{
    using namespace moe;
    const dw_f8_params p = prepare_f8(on, *f);
    if (on->refused_call) return cudaErrorInvalidValue;
    return for_type(f8_storage_types(), on->dtype, [&](auto t) {
        return for_type(gradient_types<typename decltype(t)::type>(), f->dw.gradient_type, [&](auto g) {
            using G = typename decltype(g)::type;
            return f->dw.transposed ? launch<G, true>(p, on->sms, on->stream)
                                    : launch<G, false>(p, on->sms, on->stream);
        });
    });
}
