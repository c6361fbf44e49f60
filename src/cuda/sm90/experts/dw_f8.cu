// Weight gradients of expert e in e4m3, as sums over its rows r (f8.h):
//
//   dW2[e, g] = 2^C2(e, g) sum_r (dO8[t(r)] 2^(w2(r, g) - C2(e, g)))^T A'_w[r, g]
//   dW1[e, g] = 2^C1(e, g) sum_r dH_w[r, g]^T (X8[t(r)] 2^(w1(r, g) - C1(e, g))), computed as its transpose
//
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Shapes: dO8 and X8 (T, d), A'_w (padded rows / 16, n, 16), dH_w (padded rows / 16, h, 16), all bytes;
// w (padded rows, ceil(n / 256)); the gradients as in dw.cu. FLOPs 2 R d h or 2 R d n.
//
// Bytes: half of dw.cu's for the operands, the same for gradients and pieces.
//
// Schedule, pieces, staging and stores are those of dw.cu. Tiles are wide, and a tile's 256 features are in
// one group (moe_f8_weight_grid_of), so it has one C. Rows are added to f16x2 sums as in gemm_f8.cuh. What is
// new:
//
// - wgmma takes operands of 8 bits in shared memory K-major only, and K is the rows here. A'_w and dH_w are
//   K-major in memory: 16 rows of a column after each other. Warp 11 brings them by bulk copies.
// - Warps 8 and 9 gather 128 columns of dO8 or X8 as they are. A consumer warp reads its 16 columns with
//   ldmatrix.trans, which moves bytes in pairs, and prmt separates the two columns of a pair. So wgmma gets
//   them from registers, with the rows in the order that A'_w and dH_w have (moe_f8_dw_byte), and a lane has
//   two neighbouring columns (rows_in_pairs).
// - A slot of 64 rows has 24 KB, and there are six. The next step's registers are filled while the tensor
//   cores work.
// - One lane of warp 10 stores the tiles of both consumers.
// - If C is the exponent that was expected, all factors 2^(w - C) are 1. Else the consumers multiply their
//   registers by them.
//
// Shared memory moves 32 KB for 32 rows of a tile (12 written, 4 read by ldmatrix, 16 by wgmma), in the 256
// clocks that wgmma takes for them.
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

struct dw_f8_params : dw_params {
    const uint8_t *copies; // A'_w or dH_w
    const int32_t *exponent, *expected, *largest;
    int32_t groups;
    using row_order = rows_in_pairs;
    MOE_DEVICE int stripes_of_half() const
    {
        return moe_f8_stripes_of_half(intermediate);
    }
};

enum {
    LEFT_BYTES = TILE_ROWS * STEP,     // of a slot: X8 or dO8
    SIXTEEN_BYTES = TILE_COLUMNS * 16, // 16 rows of the features
    F8_SLOT_BYTES = LEFT_BYTES + STEP / 16 * SIXTEEN_BYTES,
    F8_SLOTS = 6,
    F8_FEED = BARRIERS + 8 * (2 * F8_SLOTS + 2 * BUFFERS),
    F8_SHARED_BYTES = F8_FEED + weight_feed::BYTES,
    PROMOTED_STEPS = F8_PROMOTED_STEPS * F8_STEP / STEP,
    LEAST_PROMOTED = (F8_LEAST_PROMOTED - 1) * F8_STEP / STEP + 1
};
static_assert((int)F8_SLOTS * (int)F8_SLOT_BYTES <= (int)STAGING && (int)F8_FEED % 16 == 0 &&
                  (int)F8_SHARED_BYTES <= 232448,
              "shared memory");
static_assert((int)weight_feed::AHEAD + F8_SLOTS + 1 < (int)weight_feed::UNITS, "see weight_claims");
static_assert((int)MOE_WEIGHT_LONG == (int)MOE_F8_DH_FEATURES, "a tile is in one group");
static_assert((int)LEFT_BYTES == (int)MOE_SUBTILE_BYTES && (int)CONSUMER_WARPS * 16 == (int)TILE_ROWS,
              "a warp has one vector of each row");
static_assert((int)PROMOTED_STEPS % 2 == 0, "sum_rows takes steps in pairs");

using f8_layout = ring_layout<F8_SLOTS>;

// ---- Loads

// Warps 8 and 9: the columns of X8 or dO8 of a slot's rows. Eight threads copy a row. A lane reads one row's
// token, for two steps at a time and two steps ahead.
struct token_rows {
    const dw_f8_params &p;
    const f8_layout &shared;
    ring_position<F8_SLOTS> ring;
    int thread, vector, row; // row: of a step, whose token the lane reads
    uint32_t to;

    MOE_DEVICE token_rows(const dw_f8_params &of, const f8_layout &memory)
        : p(of), shared(memory), ring(1), thread(threadIdx.x - 256), vector(thread & 7),
          row((thread >> 3) + 8 * vector), to(moe_subtile_offset(thread >> 3, vector))
    {
    }
    // Of steps k and k + 1 of a piece; -1 past its end.
    MOE_DEVICE void read_tokens(int (&tokens)[2], const moe_piece &piece, int k) const
    {
#pragma unroll
        for (int i = 0; i < 2; i++)
            tokens[i] = k + i < piece.blocks ? __ldg(p.row_token + piece.row + (k + i) * STEP + row) : -1;
    }
    // from: row 0 of the tile's columns. inside: this thread's are inside d.
    MOE_DEVICE void copy(int token, const char *from, bool inside)
    {
        // The lane that has a row's token computes its address for all lanes. All shuffles are before the
        // wait, because after it the compiler does not know that the warp has converged.
        const char *mine = from + (uint64_t)(uint32_t)max(token, 0) * (uint32_t)p.hidden,
                   *rows[ROWS_A_LOADER];
        const uint32_t tokens = __ballot_sync(~0u, token >= 0) >> (thread & 24), some = inside ? tokens : 0;
#pragma unroll
        for (int i = 0; i < ROWS_A_LOADER; i++)
            rows[i] = advance_by_adds(lane_address(mine, (thread & 24) | i), vector * 16);
        barrier_wait(shared.empty(ring.slot), ring.phase);
        const uint32_t slot = shared.base + ring.slot * F8_SLOT_BYTES + to;
#pragma unroll
        for (int i = 0; i < ROWS_A_LOADER; i++)
            copy16_async_if_unhinted(some & 1u << i, slot + i * 8 * MOE_SUBTILE_ROW_BYTES, rows[i]);
        barrier_arrive_after_copies(shared.full(ring.slot));
        ring.advance();
    }
};

MOE_DEVICE void gather_tokens(const dw_f8_params &p, const f8_layout &shared, weight_feed units)
{
    token_rows rows(p, shared);
    weight_unit unit = units.read(0);
    int now[2], next[2];
    rows.read_tokens(now, unit.piece, 0);
    for (int t = 0; unit.exists(); t++) {
        const bool inside = unit.at.row_tile * TILE_ROWS + rows.vector * 16 < p.hidden;
        const char *from = (const char *)p.tokens + unit.at.row_tile * TILE_ROWS;
        const int steps = unit.steps(), ask_at = weight_feed::asks_at(steps) & ~1;
        for (int k = 0; k < steps; k += 2) {
            if (rows.thread == 0 && k == ask_at) barrier_arrive(units.asked(t));
            const bool ends = k + 2 >= steps;
            if (ends) unit = units.read(t + 1);
            rows.read_tokens(next, unit.piece, ends ? 0 : k + 2);
            rows.copy(now[0], from, inside);
            if (k + 1 < steps) rows.copy(now[1], from, inside);
            now[0] = next[0], now[1] = next[1];
        }
    }
    for (int i = 0; i < F8_SLOTS; i++) { // the last copies have arrived and have been read
        barrier_wait(shared.empty(rows.ring.slot), rows.ring.phase);
        rows.ring.advance();
    }
}

// Warp 11: the features. Where the two stripes of a tile are neighbours, one copy brings 16 rows of both.
MOE_DEVICE void load_features(const dw_f8_params &p, const weight_matrix<false> &matrix,
                              const f8_layout &shared, weight_feed units)
{
    const uint32_t n = p.intermediate, apart = n * p.halves * 16; // from 16 rows to the next
    ring_position<F8_SLOTS> ring(1);
    for (int t = 0;; t++) {
        const weight_unit unit = units.read(t);
        __syncwarp();
        if (elect_lane()) barrier_arrive(units.ring.free(t));
        if (!unit.exists()) break;
        const moe_stripe first = matrix.stripe(unit.at, 0), second = matrix.stripe(unit.at, 1);
        const bool joined = second.half == first.half;
        const uint32_t bytes =
            min((int)n - first.feature, joined ? (int)TILE_COLUMNS : (int)MOE_WEIGHT_STRIPE) * 16;
        const uint32_t others = joined || second.half >= p.halves ? 0 : bytes; // of the other half's stripe
        const uint8_t *from =
            p.copies + (int64_t)(unit.piece.row / 16) * apart + (first.half * n + first.feature) * 16;
        for (int k = 0; k < unit.steps(); k++) {
            const uint32_t to = shared.base + ring.slot * F8_SLOT_BYTES + LEFT_BYTES,
                           full = shared.full(ring.slot);
            barrier_wait(shared.empty(ring.slot), ring.phase);
            if (elect_lane()) {
                barrier_expect(full, STEP / 16 * (bytes + others));
#pragma unroll
                for (int i = 0; i < STEP / 16; i++) {
                    load_bytes(to + i * SIXTEEN_BYTES, from + (uint64_t)i * apart, bytes, full);
                    if (others)
                        load_bytes(to + i * SIXTEEN_BYTES + SIXTEEN_BYTES / 2,
                                   from + (uint64_t)i * apart + n * 16, others, full);
                }
            }
            from += (uint64_t)(STEP / 16) * apart;
            ring.advance();
        }
    }
}

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

// ---- Consumers

// A warp's 16 columns of a step as wgmma's operand A, for its two instructions.
struct fragments {
    uint32_t of[2][4];

    // first: which bytes of two matrices of eight rows are the lane's first column. In a word are two
    // neighbouring rows and the two that are eight further.
    MOE_DEVICE void read(uint32_t left, uint32_t first)
    {
#pragma unroll
        for (int half = 0; half < 2; half++) { // 32 rows
            uint32_t m[4];
            load_matrices_transposed(m, left + half * 32 * MOE_SUBTILE_ROW_BYTES);
#pragma unroll
            for (int i = 0; i < 4; i += 2) { // 16 rows
                of[half][i] = __byte_perm(m[i], m[i + 1], first);
                of[half][i + 1] = __byte_perm(m[i], m[i + 1], first ^ 0x1111);
            }
        }
    }
    MOE_DEVICE void scale(uint32_t factors, int lane)
    {
#pragma unroll
        for (int i = 0; i < 4; i++) { // 16 rows
            const int pair = i * 8 + (lane & 3);
            const uint32_t low = __shfl_sync(~0u, factors, pair), high = __shfl_sync(~0u, factors, pair + 4);
            uint32_t *words = of[i / 2] + i % 2 * 2;
            words[0] = scale_e4m3(words[0], low, high);
            words[1] = scale_e4m3(words[1], low, high);
        }
    }
};

struct consumer_state {
    const f8_layout &shared;
    ring_position<F8_SLOTS> ring; // of the step that `read` reads next
    uint32_t multiplied;          // the slot of the step that is multiplied next
    uint32_t own, first;          // see fragments; where in a slot the lane reads
    int lane;

    MOE_DEVICE consumer_state(const f8_layout &memory, int warp, int of_warp)
        : shared(memory), ring(0), multiplied(0), own(moe_subtile_offset(of_warp, warp)),
          first(of_warp < 16 ? 0x6420 : 0x7531), lane(of_warp)
    {
    }
    MOE_DEVICE void read(fragments &left, const row_exponents &rows, int step)
    {
        const uint32_t factors = rows.differ ? rows.factors(step, lane) : 0;
        barrier_wait(shared.full(ring.slot), ring.phase);
        left.read(shared.base + ring.slot * F8_SLOT_BYTES + own, first);
        if (rows.differ) left.scale(factors, lane);
        ring.advance();
    }
    MOE_DEVICE void release(uint32_t slot) const
    {
        if (lane == 0) barrier_arrive(shared.empty(slot));
    }
    // acc (+)= the consumer's 64 of d times 256 features of a step, which stays in flight. The one before it
    // in the piece has ended.
    MOE_DEVICE void multiply(float (&acc)[128], const fragments &left, bool keep, bool begins)
    {
        const uint32_t right = descriptor_address(shared.base + multiplied * F8_SLOT_BYTES + LEFT_BYTES);
        pin(acc);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < STEP / 32; j++)
            tensor_core<e4m3>::multiply(
                acc, left.of[j], plain_descriptor(TILE_COLUMNS) | (right + j * (2 * SIXTEEN_BYTES >> 4)),
                keep || j != 0);
        wgmma_commit();
        pin(acc);
        wgmma_wait<1>();
        if (!begins) release(multiplied == 0 ? F8_SLOTS - 1 : multiplied - 1);
        multiplied = multiplied == F8_SLOTS - 1 ? 0 : multiplied + 1;
    }
};

// acc = the sum over a piece of `steps` steps.
MOE_DEVICE void sum_rows(float (&acc)[128], consumer_state &at, const row_exponents &rows, int steps)
{
    promoted_sums<128> sums;
    const float scale = promotion_scale((steps + 1) / 2);
    fragments even, odd;
    at.read(even, rows, 0);
    for (int first = 0;;) {
        const int end = steps < LEAST_PROMOTED ? steps : min(first + PROMOTED_STEPS, steps);
        for (int k = first; k < end; k += 2) {
            at.multiply(acc, even, k != first, k == 0);
            if (k + 1 == end) break; // of the piece
            at.read(odd, rows, k + 1);
            at.multiply(acc, odd, true, false);
            if (k + 2 < steps) at.read(even, rows, k + 2);
        }
        wgmma_wait<0>();
        pin(acc);
        if (end == steps) break;
        sums.add(acc, {scale, scale});
        first = end;
    }
    at.release(at.multiplied == 0 ? F8_SLOTS - 1 : at.multiplied - 1);
    sums.add_to(acc, {1.0f / scale, 1.0f / scale});
}

template <typename G, bool TRANSPOSED, bool MERGES>
MOE_DEVICE void multiply_tiles(const dw_f8_params &p, const weight_matrix<false> &matrix,
                               const f8_layout &shared, weight_feed units, int warp, int lane)
{
    consumer_state at(shared, warp, lane);
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
        write_tile<dw_f8_params::row_order, G, MERGES>(acc, shared, warp >> 2, count, lane, TRANSPOSED);
        count++;
    }
}

template <typename G, bool TRANSPOSED, bool MERGES>
__global__ void __launch_bounds__(THREADS, 1) dw_f8(const __grid_constant__ dw_f8_params p)
{
    extern __shared__ __align__(1024) char memory[];
    const uint32_t base = shared_address(memory);
    const f8_layout shared = {base, base + BARRIERS};
    const weight_feed units = {{base + F8_FEED}};
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
            gather_tokens(p, shared, units);
        else if (warp == 11)
            load_features(p, matrix, shared, units);
        else if (lane == 0)
            store_tiles<G, TRANSPOSED, MERGES, 2>(p, matrix, shared, units, 0);
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
    dw_f8_params p = {};
    (dw_params &)p = prepare(on, d, false);
    p.grid = moe_f8_weight_grid_of((int32_t)d.hidden, (int32_t)d.intermediate, d.halves);
    p.copies = (const uint8_t *)d.features;
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
        enqueue(kernel_of<G, TRANSPOSED>(p.accumulate), ctas, THREADS, F8_SHARED_BYTES, stream, p);
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
                const cudaError_t status = allow_shared(device, kernel, F8_SHARED_BYTES);
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
