// What dw.cu and dw_f8.cu share: the parameters, the threads that store, split experts, experts without rows.
// dw.cu explains them. Terms: docs/glossary.md; symbols: include/smoe.h.
#pragma once
#include "common/backward_shared.cuh"
#include "problem.h"
#include "schedule/weight_tiles.h"
#include "sm90/gemm_cooperative.cuh"
#include "sm90/kernels.h"
#include "sm90/weight_staging.cuh"
#include "tma/tensor_map.h"
#include "tma/tma.cuh"
#include "tma/weight_feed.cuh"

namespace moe
{
namespace dw_kernel
{

using namespace gemm_cooperative;
using namespace weight_staging;

struct dw_params {
    CUtensorMap features; // A' or dH, moe_map_subtiles of (halves, rows, intermediate): a buffer's features
    CUtensorMap gradient; // map_gradient
    const void *tokens;   // dO or X (T, hidden)
    // (E, hidden, intermediate), transposed (E, halves * intermediate, hidden) by layout
    void *weight_gradient;
    float *parts;             // (parts, weight tiles, MOE_WEIGHT_TILE) tiles of split experts
    const int32_t *row_token; // NULL: row r is token r, for r < rows
    moe_cuda_backward_lists lists;
    // intermediate: features of a half, or of both if they share a stripe; then halves is 1
    int32_t hidden, intermediate, halves, rows;
    int32_t half_features; // n of the gradient
    int32_t subtiles_apart, interleaved, accumulate;
    moe_weight_grid grid;
    using row_order = rows_in_order; // of d, in the accumulators
    MOE_DEVICE int stripes_of_half() const
    {
        return moe_stripes_of_half(intermediate);
    }
};

enum {
    LOADERS = 64,
    ROWS_A_LOADER = STEP / (LOADERS / 8), // eight threads copy a row, 16 bytes each of every subtile
    BARRIERS = STAGING_END,
    FEED = (BARRIERS + BARRIER_BYTES + 15) / 16 * 16, // load_shared16 needs multiples of 16
    SHARED_BYTES = FEED + weight_feed::BYTES,
    CONSUMER_THREADS = 256,
    SLICES = MOE_WEIGHT_TILE / (4 * CONSUMER_THREADS) // of a tile: four floats a thread
};
static_assert(SHARED_BYTES <= 232448, "shared memory of an SM");
static_assert((int)TILE_ROWS == (int)MOE_WEIGHT_SHORT && (int)TILE_COLUMNS == (int)MOE_WEIGHT_LONG &&
                  (int)TALL_ROWS == (int)MOE_WEIGHT_LONG && (int)NARROW_COLUMNS == (int)MOE_WEIGHT_STRIPE,
              "weight_tiles.h");

static_assert((int)weight_feed::AHEAD + SLOTS + 1 < (int)weight_feed::UNITS, "see weight_claims");

// Where the tiles of an expert's matrix are.
template <bool TALL> struct weight_matrix {
    enum {
        TILE_HIDDEN = TALL ? TALL_ROWS : TILE_ROWS,
        CONSUMER_HIDDEN = TILE_HIDDEN / 2,
        STRIPES = TALL ? 1 : 2 // of a tile
    };
    moe_weight_grid grid;
    int tiles, stripes_of_half;
    // P: the kernel's parameters, dw_params or what dw_f8.cu derives from it
    template <class P>
    MOE_DEVICE explicit weight_matrix(const P &p)
        : grid({p.grid.hidden_tiles, p.grid.feature_tiles, TALL}), tiles(moe_grid_tiles(grid)),
          stripes_of_half(p.stripes_of_half())
    {
    }
    MOE_DEVICE moe_stripe stripe(moe_place at, int i) const
    {
        return moe_stripe_of(at.column_tile * STRIPES + i, stripes_of_half);
    }
};

template <bool TALL> MOE_DEVICE weight_queue queue_of(const dw_params &p, const weight_matrix<TALL> &matrix)
{
    return {p.lists.pieces, __ldg(p.lists.counts + 1) * matrix.tiles, matrix.grid, p.lists.turn};
}

// ---- From staging buffers to global memory (weight_staging.cuh)

// Where a part is in the gradient. Its boxes are neighbours in x and in the staging buffer.
template <typename G, bool TRANSPOSED, bool TALL> struct part_place {
    enum { BOXES = TRANSPOSED && sizeof(G) == 2 ? 1 : 2 };
    moe_stripe stripe;
    int hidden, feature;
    MOE_DEVICE part_place(const weight_matrix<TALL> &matrix, moe_place tile, int consumer, int part)
    {
        constexpr int ACROSS = output<G>::PARTS / (TALL ? 2 : 1);    // parts side by side
        const int column = part % ACROSS * output<G>::PART_FEATURES; // in the tile
        hidden = tile.row_tile * matrix.TILE_HIDDEN + consumer * matrix.CONSUMER_HIDDEN + part / ACROSS * 64;
        stripe = matrix.stripe(tile, column / MOE_WEIGHT_STRIPE);
        feature = stripe.feature + column % MOE_WEIGHT_STRIPE;
    }
    MOE_DEVICE bool inside(const dw_params &p) const
    {
        return stripe.half < p.halves && feature < p.intermediate && hidden < p.hidden;
    }
    MOE_DEVICE int x(int box) const
    {
        return (TRANSPOSED ? hidden : feature) + box * output<G>::SUBTILE_ELEMENTS;
    }
    MOE_DEVICE int y(const dw_params &p) const
    {
        return TRANSPOSED ? feature - up(p) * p.half_features : hidden;
    }
    MOE_DEVICE int half(const dw_params &p) const
    {
        return stripe.half + up(p);
    }
    // 1 if the halves share the stripe and the part begins in the up half, else 0.
    MOE_DEVICE int up(const dw_params &p) const
    {
        return TRANSPOSED && TALL && feature >= p.half_features;
    }
};

// Starts the load of a part's old values into its staging buffer.
template <typename G, bool TRANSPOSED, bool TALL, int COUNT>
MOE_DEVICE void load_part(const dw_params &p, const part_place<G, TRANSPOSED, TALL> &at,
                          const ring_layout<COUNT> &shared, int expert, uint32_t number)
{
    const uint32_t empty = shared.buffer_empty(number);
    if (at.inside(p)) {
        barrier_expect(empty, BUFFER_BYTES);
        for (int i = 0; i < at.BOXES; i++)
            load_box(shared.buffer(number) + i * MOE_SUBTILE_BYTES, &p.gradient, empty, at.x(i), at.y(p),
                     at.half(p), expert);
    } else
        barrier_arrive(empty);
}

// Stores a part that a consumer has left in its staging buffer.
template <typename G, bool TRANSPOSED, bool MERGES, bool TALL, int COUNT>
MOE_DEVICE void store_part(const dw_params &p, const part_place<G, TRANSPOSED, TALL> &at,
                           const ring_layout<COUNT> &shared, int expert, uint32_t number, uint32_t parity)
{
    barrier_wait(shared.buffer_full(number), parity);
    if (at.inside(p)) {
        for (int i = 0; i < at.BOXES; i++) {
            const uint32_t subtile = shared.buffer(number) + i * MOE_SUBTILE_BYTES;
            if (!MERGES && p.accumulate)
                add_box(&p.gradient, subtile, at.x(i), at.y(p), at.half(p), expert);
            else
                store_box(&p.gradient, subtile, at.x(i), at.y(p), at.half(p), expert);
        }
    }
    commit_stores();
    wait_stores_read<0>();
}

// One lane of a store warp stores the parts of CONSUMERS consumers, from `consumer` on; that of consumer 0
// also claims the CTA's units. MERGES: a buffer counts as empty only when the old values of the next tile are
// in it, so its phase is one ahead.
template <typename G, bool TRANSPOSED, bool MERGES, int CONSUMERS = 1, bool TALL, int COUNT>
MOE_DEVICE void store_tiles(const dw_params &p, const weight_matrix<TALL> &matrix,
                            const ring_layout<COUNT> &shared, weight_feed units, int consumer)
{
    using O = output<G>;
    static_assert(!MERGES || O::ROUNDS == 1, "the buffers hold all parts of a tile");
    const bool claims = consumer == 0;
    const weight_queue queue = queue_of(p, matrix);
    weight_claims claimed(units, queue);
    if (claims) claimed.begin();
    uint32_t count = 0;
    for (int t = 0;; t++) {
        const weight_unit unit = units.read(t);
        if (!claims) barrier_arrive(units.ring.free(t));
        if (!unit.exists()) break;
        const bool staged = unit.piece.part < 0;
        const int expert = unit.piece.expert;
        if (MERGES && staged)
            for (int i = 0; i < CONSUMERS * O::PARTS; i++)
                load_part<G, TRANSPOSED, TALL>(p, {matrix, unit.at, consumer + i % CONSUMERS, i / CONSUMERS},
                                               shared, expert,
                                               O::buffer(consumer + i % CONSUMERS, i / CONSUMERS));
        if (claims) claimed.claim_after(t, unit);
        if (!staged) continue;
        for (int i = 0; i < CONSUMERS * O::PARTS; i++) {
            const int part = i / CONSUMERS, of = consumer + i % CONSUMERS;
            const uint32_t number = O::buffer(of, part);
            store_part<G, TRANSPOSED, MERGES, TALL>(p, {matrix, unit.at, of, part}, shared, expert, number,
                                                    O::parity(count, part));
            if (!MERGES) barrier_arrive(shared.buffer_empty(number));
        }
        count++;
    }
    if (claims) finish_claims(queue.turn);
    wait_stores_done();
}

// ---- Consumers

// Stores a tile of a split expert in the order of the threads: 16 bytes of each thread, then the next 16
// bytes of each.
MOE_DEVICE float *part_of(const dw_params &p, int part, int tiles, int tile, int thread)
{
    return p.parts + ((int64_t)part * tiles + tile) * MOE_WEIGHT_TILE + thread * 4;
}

MOE_DEVICE void store_part_of(const dw_params &p, const weight_unit &unit, int tiles, const float (&acc)[128])
{
    float4 *to = (float4 *)part_of(p, unit.piece.part, tiles, unit.tile, threadIdx.x);
#pragma unroll
    for (int i = 0; i < SLICES; i++)
        to[i * CONSUMER_THREADS] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
}

// The gradients of experts without rows, whose pieces are the last of the list.
template <typename G> MOE_DEVICE void clear_gradients(const dw_params &p)
{
    const int64_t vectors = (int64_t)p.hidden * p.intermediate * p.halves * (int)sizeof(G) / 16;
    const int pieces = __ldg(p.lists.counts + 3);
    for (int i = __ldg(p.lists.counts + 1); i < pieces; i++) {
        uint4 *to = (uint4 *)p.weight_gradient + __ldg(&p.lists.pieces[i].expert) * vectors;
        for (int64_t v = blockIdx.x * CONSUMER_THREADS + threadIdx.x; v < vectors;
             v += gridDim.x * CONSUMER_THREADS)
            to[v] = make_uint4(0, 0, 0, 0);
    }
}

// ---- The second pass over split experts

// Element (d, feature of half) of the expert's gradient.
template <bool TRANSPOSED, bool TALL>
MOE_DEVICE int64_t gradient_element(const dw_params &p, int expert, int half, int feature, int d)
{
    if (!TRANSPOSED) return ((int64_t)expert * p.hidden + d) * p.intermediate + feature;
    if (TALL && feature >= p.half_features) { // halves share the stripe
        feature -= p.half_features;
        half++;
    }
    const int row = p.interleaved ? feature * 2 + half : half * p.half_features + feature;
    return ((int64_t)expert * p.halves * p.intermediate + row) * p.hidden + d;
}

// The work of a CTA: 16 bytes of a tile for each thread. So few tiles suffice for many CTAs.
template <class P, typename G, bool TRANSPOSED, bool TALL>
__global__ void __launch_bounds__(CONSUMER_THREADS) add_parts(const __grid_constant__ P p)
{
    constexpr int OCTETS = weight_matrix<TALL>::STRIPES * MOE_WEIGHT_STRIPE / 8; // of features, in a row
    const weight_matrix<TALL> matrix(p);
    const int slices = __ldg(p.lists.counts + 2) * matrix.tiles * SLICES, lane = threadIdx.x & 31;
    const int consumer = threadIdx.x / 128;
    const int first_row =
        (threadIdx.x >> 5) * 16 + consumer * (matrix.CONSUMER_HIDDEN - 64) + P::row_order::first(lane);
    for (int slice = blockIdx.x; slice < slices; slice += gridDim.x) {
        const int unit = slice / SLICES, i = slice % SLICES,
                  column = (TALL ? i % OCTETS : i) * 8 + (lane & 3) * 2;
        const int row = first_row + (TALL ? i / OCTETS * 64 : 0), tile = unit % matrix.tiles;
        const moe_place at = moe_weight_place_of(tile, matrix.grid);
        const moe_stripe stripe = matrix.stripe(at, column / MOE_WEIGHT_STRIPE);
        const int feature = stripe.feature + column % MOE_WEIGHT_STRIPE;
        if (stripe.half >= p.halves || feature >= p.intermediate) continue;
        const moe_split split = p.lists.splits[unit / matrix.tiles];
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
        for (int part = 0; part < split.parts; part++) {
            const float4 v = ((const float4 *)part_of(p, split.first_part + part, matrix.tiles, tile,
                                                      threadIdx.x))[i * CONSUMER_THREADS];
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
        const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int d = at.row_tile * matrix.TILE_HIDDEN + row + (j >> 1) * P::row_order::step(lane);
            if (d >= p.hidden || feature + (j & 1) >= p.intermediate) continue;
            G *to = (G *)p.weight_gradient +
                    gradient_element<TRANSPOSED, TALL>(p, split.expert, stripe.half, feature + (j & 1), d);
            give(to, values[j], p.accumulate);
        }
    }
}

// ---- The host's side

// The gradient (experts, hidden, intermediate): boxes of 128 bytes of n by 64 of d, at (feature, d, 0,
// expert). Transposed (experts, halves, intermediate, hidden) in either layout: 128 bytes of d by a part's
// features (64 for f32, two boxes), at (d, feature, half, expert). A part of halves that share a stripe has
// the features of both. shared: halves do.
inline void map_gradient(moe_launch *on, CUtensorMap *map, const moe_dw &d, bool shared)
{
    const int64_t element = moe_type_bytes(d.gradient_type);
    const cuuint64_t hidden = (cuuint64_t)d.hidden, n = (cuuint64_t)d.intermediate,
                     experts = (cuuint64_t)d.experts, row = n * (cuuint64_t)element;
    const cuuint32_t wide = (cuuint32_t)(MOE_SUBTILE_ROW_BYTES / element);
    if (d.transposed) {
        const moe_w1 w1 = {d.gradient, d.experts, d.hidden, d.intermediate, d.halves, d.interleaved};
        const moe_w1_strides s = moe_strides_of_w1(&w1, element);
        const bool both = element == 2 && shared;
        const moe_boxes boxes = {d.gradient,
                                 4,
                                 {hidden, n, (cuuint64_t)d.halves, experts},
                                 {s.feature, s.half, s.expert},
                                 {wide, element == 2 && !both ? 128u : 64u, both ? 2u : 1u, 1}};
        moe_map_boxes(on, map, d.gradient_type, &boxes);
    } else {
        const moe_boxes boxes = {
            d.gradient, 4, {n, hidden, 1, experts}, {row, row, hidden * row}, {wide, 64, 1, 1}};
        moe_map_boxes(on, map, d.gradient_type, &boxes);
    }
}

// All but the map of the features, the stripes and the grid.
inline dw_params prepare(moe_launch *on, const moe_dw &d, bool shared)
{
    dw_params p = {};
    map_gradient(on, &p.gradient, d, shared);
    p.tokens = d.tokens;
    p.weight_gradient = d.gradient;
    p.parts = d.parts;
    p.row_token = d.row_token;
    p.lists = d.lists;
    p.hidden = (int32_t)d.hidden;
    p.intermediate = (int32_t)d.intermediate;
    p.halves = d.halves;
    p.half_features = (int32_t)d.intermediate;
    p.rows = (int32_t)d.rows;
    p.interleaved = d.interleaved;
    p.accumulate = d.accumulate;
    return p;
}

} // namespace dw_kernel
} // namespace moe
