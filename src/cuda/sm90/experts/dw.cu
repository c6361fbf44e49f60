// Weight gradients of expert e, as sums over its rows r:
//
//   dW2[e] = sum_r dO[t(r)]^T A'[r]
//   dW1[e] = sum_r dH[r]^T X[t(r)], computed as its transpose
//
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Shapes: dO and X (T, d), A' (padded rows, n), dH (padded rows, h), dW2 (E, d, n), dW1 (E, h, d), where h
// is the number of columns of H. In the following w is n for dW2 and h for dW1. FLOPs 2 R d w.
//
// An expert with many rows is split: its rows are cut into pieces, and different CTAs sum different pieces.
// The kernel dw writes the sum of each piece to scratch in f32. A second kernel, add_parts, then adds the
// sums of an expert's pieces in a fixed order.
//
// Bytes:
// - A' or dH: 2 R w, read once for each 128 columns of d (tall tiles: 256).
// - dO or X: 2 R d, gathered once for each 256 columns of w (tall tiles: 128).
// - The gradient: E d w elements written. With accumulate they are also read.
// - For each piece of a split expert: 4 d w written and read again.
//
// Tile: 128 columns of d by 256 columns of w (wide) or 256 by 128 (TALL; weight_tiles.h), on the cooperative
// core (gemm_cooperative.cuh). The GEMM sums over the rows of an expert, 64 rows in a slot of the ring. Both
// operands are MN-major, as they are in memory. dO or X is gathered with cp.async; TMA loads A' or dH. Pad
// rows and columns past d are zeros. stmatrix.trans transposes the accumulators of dW1 on their way to shared
// memory.
//
// The gradient of an expert without rows is 0. The consumers write these zeros when they have no more tiles,
// all CTAs a part of each such expert. With accumulate such a gradient stays as it is.
//
// With accumulate the sum is added to the old gradient in f32, and the result is rounded once:
// - f32 gradients: TMA adds while it stores.
// - 16-bit gradients: TMA would round the sum before the addition. So a store warp copies the old gradient
//   to the staging buffers while the GEMM runs, and the consumers add it to their accumulators. The template
//   parameter MERGES stands for this case.
//
// This file has the loads and the consumers; sm90/dw_tiles.cuh has what dw_f8.cu needs too.
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "sm90/dw_tiles.cuh"

namespace moe
{
namespace
{

using namespace dw_kernel;

// ---- Loads

MOE_DEVICE void load_stripe(const dw_params &p, moe_stripe stripe, int row, uint32_t to, uint32_t full)
{
    if (p.subtiles_apart) {
        load_box(to, &p.features, full, stripe.feature, row, 0, stripe.half);
        load_box(to + MOE_SUBTILE_BYTES, &p.features, full, stripe.feature + MOE_SUBTILE_COLUMNS, row, 0,
                 stripe.half);
    } else
        load_box(to, &p.features, full, 0, row, stripe.feature / MOE_SUBTILE_COLUMNS, stripe.half);
}

// Without row_token rows are tokens.
MOE_DEVICE int token_of(const dw_params &p, int row)
{
    return p.row_token ? __ldg(p.row_token + row) : row < p.rows ? row : -1;
}

MOE_DEVICE int first_token(const dw_params &p, const moe_piece &piece, int row)
{
    return piece.blocks ? token_of(p, piece.row + row) : -1;
}

// A slot has 64 rows of the token operand's tile, then of the stripes.
template <bool TALL>
MOE_DEVICE void load_tiles(const dw_params &p, const weight_matrix<TALL> &matrix, const shared_layout &shared,
                           weight_feed units)
{
    using M = weight_matrix<TALL>;
    constexpr int ROW_BYTES = M::TILE_HIDDEN * 2, LEFT_BYTES = ROW_BYTES * STEP;
    constexpr int STRIPE_BYTES = MOE_WEIGHT_STRIPE * 2 * STEP;
    constexpr int RIGHT_BYTES = M::STRIPES * STRIPE_BYTES;
    constexpr int SUBTILES = LEFT_BYTES / MOE_SUBTILE_BYTES;
    const int thread = threadIdx.x - 256, vector = thread & 7, row0 = thread >> 3; // rows row0 + 8 i
    const uint32_t to = moe_subtile_offset(row0, vector), row_bytes = (uint32_t)p.hidden * 2;
    const int row = row0 + 8 * vector; // the row of a step whose token this lane reads
    ring_position<SLOTS> ring(1);
    weight_unit unit = units.read(0);
    int next = first_token(p, unit.piece, row);
    for (int t = 0; unit.exists(); t++) {
        const moe_piece piece = unit.piece;
        const int hidden = unit.at.row_tile * matrix.TILE_HIDDEN + vector * 8;
        bool inside[SUBTILES];
#pragma unroll
        for (int j = 0; j < SUBTILES; j++) inside[j] = hidden + j * MOE_SUBTILE_COLUMNS < p.hidden;
        const char *from = (const char *)p.tokens + unit.at.row_tile * ROW_BYTES;
        const int steps = unit.steps(), ask_at = weight_feed::asks_at(steps);
        const moe_stripe left = matrix.stripe(unit.at, 0), right = matrix.stripe(unit.at, 1);
        for (int k = 0; k < steps; k++) {
            // The lane that has a row's token computes its address for all lanes. All shuffles are before the
            // wait, because after it the compiler does not know that the warp has converged.
            const char *mine = from + (uint64_t)(uint32_t)max(next, 0) * row_bytes, *rows[ROWS_A_LOADER];
            const uint32_t some = __ballot_sync(~0u, next >= 0) >> (thread & 24);
#pragma unroll
            for (int i = 0; i < ROWS_A_LOADER; i++)
                rows[i] = advance_by_adds(lane_address(mine, (thread & 24) | i), vector * 16);
            if (thread == 0 && k == ask_at) barrier_arrive(units.asked(t));
            if (k + 1 < steps)
                next = token_of(p, piece.row + row + (k + 1) * STEP);
            else {
                unit = units.read(t + 1);
                next = first_token(p, unit.piece, row);
            }
            barrier_wait(shared.empty(ring.slot), ring.phase);
            const uint32_t slot = shared.base + ring.slot * (LEFT_BYTES + RIGHT_BYTES),
                           full = shared.full(ring.slot);
            if (thread == 0) {
                const int first = piece.row + k * STEP;
                barrier_expect(full, RIGHT_BYTES);
                load_stripe(p, left, first, slot + LEFT_BYTES, full);
                if (!TALL) load_stripe(p, right, first, slot + LEFT_BYTES + STRIPE_BYTES, full);
            }
#pragma unroll
            for (int i = 0; i < ROWS_A_LOADER; i++)
#pragma unroll
                for (int j = 0; j < SUBTILES; j++)
                    copy16_async_if_unhinted(inside[j] ? some & 1u << i : 0,
                                             slot + to + i * 8 * MOE_SUBTILE_ROW_BYTES +
                                                 j * MOE_SUBTILE_BYTES,
                                             rows[i] + j * MOE_SUBTILE_ROW_BYTES);
            barrier_arrive_after_copies(full);
            ring.advance();
        }
    }
    for (int i = 0; i < SLOTS; i++) { // the last copies have arrived and have been read
        barrier_wait(shared.empty(ring.slot), ring.phase);
        ring.advance();
    }
}

// ---- Consumers

template <typename T, typename G, bool TRANSPOSED, bool MERGES, bool TALL>
MOE_DEVICE void multiply_tiles(const dw_params &p, const weight_matrix<TALL> &matrix,
                               const shared_layout &shared, weight_feed units, int consumer, int lane)
{
    ring_position<SLOTS> ring(0);
    uint32_t count = 0;
    float acc[128];
    for (int t = 0;; t++) {
        const weight_unit unit = units.read(t);
        if (!unit.exists()) break;
        multiply<T, true, MN_MAJOR, MN_MAJOR, TALL>(acc, ring, shared, unit.steps(), consumer,
                                                    release_slot{shared, lane});
        if (unit.piece.part >= 0) {
            store_part_of(p, unit, matrix.tiles, acc);
            continue;
        }
        write_tile<dw_params::row_order, G, MERGES>(acc, shared, consumer, count, lane, TRANSPOSED);
        count++;
    }
}

template <typename T, typename G, bool TRANSPOSED, bool MERGES, bool TALL>
__global__ void __launch_bounds__(THREADS, 1) dw(const __grid_constant__ dw_params p)
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
    const weight_matrix<TALL> matrix(p);
    if (warp >= 8) {
        give_registers<88>();
        if (warp < 10)
            load_tiles(p, matrix, shared, units);
        else if (lane == 0)
            store_tiles<G, TRANSPOSED, MERGES>(p, matrix, shared, units, warp - 10);
    } else {
        take_registers<208>();
        multiply_tiles<T, G, TRANSPOSED, MERGES>(p, matrix, shared, units, warp >> 2, lane);
        if (!MERGES && !p.accumulate) clear_gradients<G>(p);
    }
}

// ---- Launches

dw_params prepare_16_bits(moe_launch *on, const moe_dw &d)
{
    const int64_t half_bytes = d.row_width * moe_type_bytes(on->dtype);
    const int shared = moe_halves_share_stripe((int32_t)d.intermediate, d.halves);
    const int both = shared ? 2 : 1; // halves in a stripe
    const int64_t features_of_stripes = d.intermediate * both;
    const moe_subtiles features = {d.features,      features_of_stripes, d.rows, d.halves * half_bytes,
                                   d.halves / both, half_bytes};
    dw_params p = prepare(on, d, shared);
    moe_map_subtiles(on, &p.features, &features, MOE_WEIGHT_STRIPE / MOE_SUBTILE_COLUMNS);
    p.intermediate = (int32_t)features_of_stripes;
    p.halves = d.halves / both;
    p.subtiles_apart = moe_subtiles_apart(d.intermediate);
    p.grid = moe_weight_grid_of((int32_t)d.hidden, (int32_t)d.intermediate, d.halves);
    return p;
}

template <typename T, typename G, bool TRANSPOSED, bool TALL> auto kernel_of(bool accumulate)
{
    constexpr bool CAN_MERGE = sizeof(G) == 2;
    return CAN_MERGE && accumulate ? dw<T, G, TRANSPOSED, CAN_MERGE, TALL>
                                   : dw<T, G, TRANSPOSED, false, TALL>;
}

template <typename T, typename G, bool TRANSPOSED, bool TALL>
cudaError_t launch(const dw_params &p, int ctas, cudaStream_t stream)
{
    const auto kernel = kernel_of<T, G, TRANSPOSED, TALL>(p.accumulate);
    const cudaError_t status = enqueue(kernel, ctas, THREADS, SHARED_BYTES, stream, p);
    if (status != cudaSuccess || !p.parts) return status;
    return enqueue(add_parts<dw_params, G, TRANSPOSED, TALL>, ctas, CONSUMER_THREADS, 0, stream, p);
}

template <typename T, typename G, bool TRANSPOSED>
cudaError_t launch(const dw_params &p, int ctas, cudaStream_t stream)
{
    return p.grid.tall ? launch<T, G, TRANSPOSED, true>(p, ctas, stream)
                       : launch<T, G, TRANSPOSED, false>(p, ctas, stream);
}

template <typename T, typename G, bool TRANSPOSED, bool TALL> cudaError_t allow(const moe_device *device)
{
    const cudaError_t status = allow_shared(device, kernel_of<T, G, TRANSPOSED, TALL>(false), SHARED_BYTES);
    return status != cudaSuccess
               ? status
               : allow_shared(device, kernel_of<T, G, TRANSPOSED, TALL>(true), SHARED_BYTES);
}

} // namespace
} // namespace moe

extern "C" cudaError_t moe_sm90_dw_init(const moe_device *device)
{
    using namespace moe;
    return for_every_type(storage_types(), [&](auto t) {
        using T = typename decltype(t)::type;
        return for_every_type(gradient_types<T>(), [&](auto g) {
            using G = typename decltype(g)::type;
            for (const cudaError_t status :
                 {allow<T, G, false, false>(device), allow<T, G, false, true>(device),
                  allow<T, G, true, false>(device), allow<T, G, true, true>(device)})
                if (status != cudaSuccess) return status;
            return cudaSuccess;
        });
    });
}

extern "C" cudaError_t moe_sm90_dw(moe_launch *on, const moe_dw *d)
{
    using namespace moe;
    const dw_params p = prepare_16_bits(on, *d);
    if (on->refused_call) return cudaErrorInvalidValue;
    return for_type(storage_types(), on->dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        return for_type(gradient_types<T>(), d->gradient_type, [&](auto g) {
            using G = typename decltype(g)::type;
            return d->transposed ? launch<T, G, true>(p, on->sms, on->stream)
                                 : launch<T, G, false>(p, on->sms, on->stream);
        });
    });
}
