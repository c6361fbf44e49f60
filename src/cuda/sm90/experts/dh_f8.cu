// The gradient through the activation in e4m3. For row r of expert e (f8.h):
//
//   dA'[r] = (dO8[t(r)] W2_8[e]) scale_do[t(r)] scale2[e]
//
// dS, dH and A' follow as in dh.cu. dH8 with its scales is quantised from dH in f32, for dx_rows. dw reads dH
// and A' in dtype (SMOE_COMPUTE_F8_DGRAD) or their copies dH_w and A'_w in e4m3, of which each w is stored
// too (SMOE_COMPUTE_F8: FOR_DW). Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Shapes: dO8 (T, d), W2_8 transposed (E, n, d), H and dH (padded rows, h), A' (padded rows, n), dH8 (padded
// rows, h) with scales (padded rows, ceil(n / 256)), dH_w and A'_w in groups of 16 rows (f8.h).
// FLOPs 2 R d n.
//
// Bytes: dO8 R d, gathered once for each column tile; W2_8 E d n; H 2 R h read; written dH8 R h, and dH 2 R h
// with A' 2 R n, or dH_w R h with A'_w R n. 4 R for each column tile for the scales, for dS, and for each w.
//
// Schedule, tiles, ring and warp tiles are those of dh.cu; a slot has 128 columns of K instead of 64, and
// W2's part is K-major. K above 1536 is promoted (gemm_f8.cuh). What is new:
//
// - A consumer also copies the scales of its rows' tokens to shared memory, before the first step of a tile.
//   It reads them before it refills the slot of that step. It gathers at most slots + 1 tiles ahead, so there
//   are so many sets of scales. They multiply the scale that a row of a warp tile has anyway.
// - A column tile has one group of 256 features of dH, gate and up. A worker warp finds the largest magnitude
//   of a row's two halves while they are in registers. These need so many registers that the compiler must
//   not order the instructions of several rows together, as it does in dh.cu.
// - With FOR_DW there are eight worker warps, if sums are not promoted, and another loop
//   (sm90/dh_f8_rows.cuh).
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "f8.h"
#include "sm90/dh_f8_rows.cuh"
#include "sm90/dh_tiles.cuh"
#include "sm90/f8_kernels.h"
#include "sm90/gemm_f8.cuh"
#include "tma/tensor_map.h"
#include <type_traits>

namespace moe
{

// 64 rows times 256 columns by two instructions of 128 columns. One of 256 needs more registers than a
// thread of 512 begins with.
struct e4m3_in_halves {
};
template <> struct tensor_core<e4m3_in_halves> {
    template <operand_order, operand_order>
    static MOE_DEVICE void multiply(float (&c)[128], uint64_t a, uint64_t b, int keep)
    {
        const uint64_t half = descriptor_address(128 * MOE_SUBTILE_ROW_BYTES);
        tensor_core<e4m3>::multiply(*(float(*)[64])c, a, b, keep);
        tensor_core<e4m3>::multiply(*(float(*)[64])(c + 64), a, b + half, keep);
    }
    template <operand_order, operand_order>
    static MOE_DEVICE void multiply(float (&c)[64], uint64_t a, uint64_t b, int keep)
    {
        tensor_core<e4m3>::multiply(c, a, b, keep);
    }
};

namespace
{

using namespace dh_f8_kernel;

enum { SET_BYTES = TILE_ROWS * 4, F8_SHARED_BYTES = SHARED_BYTES + (SLOTS + 1) * SET_BYTES };
static_assert(F8_SHARED_BYTES <= 232448, "shared memory of an SM");
static_assert((int)NARROW_SLOTS * (int)NARROW_SLOT_BYTES + (NARROW_SLOTS + 1) * SET_BYTES <= (int)STAGING,
              "the sets of narrow tiles are behind their ring, which is shorter");

// Address of the scale of row `row` of the CTA's tile number t.
template <width W> MOE_DEVICE uint32_t scale_at(const dh_layout<W> &shared, int t, int row)
{
    const uint32_t first = W == NARROW ? (int)NARROW_SLOTS * (int)NARROW_SLOT_BYTES : (int)SHARED_BYTES;
    return shared.base + first + t % (dh_layout<W>::RING_SLOTS + 1) * SET_BYTES + row * 4;
}

// The largest of the lanes that have the same row.
template <width W> MOE_DEVICE uint32_t largest_by_shuffles(uint32_t amax)
{
#pragma unroll
    for (int i = 1; i < tile_width<W>::LANES; i *= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, i));
    return amax;
}

struct gradient_pair {
    gradient low, high;
};

// Two elements: pairs of H and of dA' (fp16).
template <typename T, int KIND>
MOE_DEVICE gradient_pair differentiate_two(uint32_t g, uint32_t u, const moe_gate_values &v, uint32_t x,
                                           float weight, float y_weight, float &ds)
{
    using S = storage<T>;
    using D = storage<__half>;
    const gradient low = differentiate<T, KIND>(S::low(g), S::low(u), v, D::low(x), weight, y_weight, ds);
    const gradient high = differentiate<T, KIND>(S::high(g), S::high(u), v, D::high(x), weight, y_weight, ds);
    return {low, high};
}

// Computes and stores a row's vectors of dH and A' in dtype. Returns the lane's part of <dA', A>. dh: dH in
// f32, of the gate half and of the up half.
template <typename T, int KIND>
MOE_DEVICE float write_in_dtype(const dh_params &p, uint4 x, uint4 g, uint4 u, const char *to_dh,
                                const char *to_a, bool exists, float weight, float y_weight,
                                float (&dh)[2][8])
{
    using S = storage<T>;
    const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, gs[4] = {g.x, g.y, g.z, g.w}, us[4] = {u.x, u.y, u.z, u.w};
    uint32_t gate[4], up[4], scaled[4];
    float ds = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const gradient_pair of =
            differentiate_two<T, KIND>(gs[i], us[i], p.values, xs[i], weight, y_weight, ds);
        gate[i] = S::pack(of.low.gate, of.high.gate);
        up[i] = S::pack(of.low.up, of.high.up);
        scaled[i] = S::pack(of.low.scaled, of.high.scaled);
        dh[0][2 * i] = of.low.gate, dh[0][2 * i + 1] = of.high.gate;
        dh[1][2 * i] = of.low.up, dh[1][2 * i + 1] = of.high.up;
    }
    store_streaming16_if(exists, (void *)to_dh, {gate[0], gate[1], gate[2], gate[3]});
    if (activation<T, KIND>::GATED)
        store_streaming16_if(exists, (void *)up_half(to_dh, p), {up[0], up[1], up[2], up[3]});
    store_streaming16_if(exists, (void *)to_a, {scaled[0], scaled[1], scaled[2], scaled[3]});
    return ds;
}

template <typename T, int KIND, width W> struct f8_rows {
    static constexpr bool GATED = activation<T, KIND>::GATED;
    int64_t first; // of the lane's elements of the row, in dH
    place at;

    MOE_DEVICE f8_rows(const dh_f8_params &p, place tile, int row)
        : first((int64_t)(tile.row + row) * h_width_of<T, KIND>(p) + tile.column), at(tile)
    {
    }

    MOE_DEVICE float write(const dh_f8_params &p, uint4 x, uint4 g, uint4 u, int row, float weight,
                           float y_weight, int lane)
    {
        const bool exists = at.column < p.intermediate;
        const int64_t a_bytes = GATED ? first + at.column : 2 * first; // 2 (row n + column)
        float dh[2][8], most = 0.0f;
        const float ds = write_in_dtype<T, KIND>(p, x, g, u, (const char *)p.dh + 2 * first,
                                                 (const char *)p.a + a_bytes, exists, weight, y_weight, dh);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            most = larger_or_nan(most, fabsf(dh[0][i]));
            if (GATED) most = larger_or_nan(most, fabsf(dh[1][i]));
        }
        const uint32_t amax = largest_by_shuffles<W>(__float_as_uint(most));
        const float factor = moe_f8_factor(amax);
        const char *to = (const char *)p.dh8 + first;
        store(exists, to, dh[0], factor);
        if (GATED) store(exists, advance_by_adds(to, p.intermediate), dh[1], factor);
        if (lane % tile_width<W>::LANES == 0)
            p.dh_scale[(int64_t)(at.row + row) * p.groups + at.column / MOE_F8_DH_FEATURES] =
                moe_f8_scale(amax);
        return ds;
    }

    static MOE_DEVICE void store(bool exists, const char *to, const float (&v)[8], float factor)
    {
        store_streaming8_if(exists, (void *)to,
                            pack_e4m3(v[0] * factor, v[1] * factor, v[2] * factor, v[3] * factor),
                            pack_e4m3(v[4] * factor, v[5] * factor, v[6] * factor, v[7] * factor));
    }

    MOE_DEVICE void next(const dh_f8_params &p)
    {
        first += h_width_of<T, KIND>(p) * tile_width<W>::ROWS;
    }
};

// As work_warp_tile, one row after the other. LOADS_AHEAD: dA' and H of the next row are in registers before
// this one is computed.
template <typename T, int KIND, width W, bool LOADS_AHEAD>
MOE_DEVICE void work_f8_tile(const dh_f8_params &p, const h_ring<activation<T, KIND>::GATED> &ring,
                             const dh_layout<W> &shared, uint32_t warp_tile, place at, place next,
                             float weights, float *ds_out, int lane)
{
    constexpr int ROWS = tile_width<W>::ROWS, GROUP_ROWS = tile_width<W>::GROUP_ROWS;
    const int h_width = h_width_of<T, KIND>(p), own = tile_width<W>::row(lane);
    const int vector = tile_width<W>::column(lane) / 8;
    const float scales = load_shared_float(shared.scale(warp_tile, lane & 15)), y_weights = weights * scales;
    f8_rows<T, KIND, W> out(p, at, own);
    const char *ahead = vector_of(p.h, at.row + own + (AHEAD - 1) * ROWS, h_width, at.column);
    const char *const behind = vector_of(p.h, next.row + own, h_width, next.column);
    uint32_t here =
        shared.warp_tile(warp_tile) + (vector >> 3) * SUBTILE_BYTES + moe_subtile_offset(own, vector & 7);
    float ds[AHEAD] = {};
    uint4 x, g, u;
    if constexpr (LOADS_AHEAD) {
        wait_copies<AHEAD - 1>();
        x = load_shared16(here), g = ring.gate(0), u = ring.up(0);
    }
#pragma unroll 1
    for (int row = 0; row < WARP_TILE_ROWS; row += GROUP_ROWS) {
        const bool last = row == WARP_TILE_ROWS - GROUP_ROWS;
        const int ahead_column = last ? next.column : at.column;
        write_sums<W>(ds_out, row - GROUP_ROWS, ds, scales, lane); // nothing here waits for this load
#pragma unroll 1
        for (int i = 0; i < AHEAD; i++) {
            // The vectors of the rows of the other steps are exchanged.
            const auto of_step = [&](int step) {
                return (here ^ (step * ROWS & 7) << 4) + step * ROWS * MOE_SUBTILE_ROW_BYTES;
            };
            if constexpr (!LOADS_AHEAD) {
                wait_copies<AHEAD - 1>();
                x = load_shared16(of_step(i)), g = ring.gate(i), u = ring.up(i);
            }
            uint4 x_next = x, g_next = g, u_next = u;
            ahead = last && i == 0 ? behind : advance_by_adds(ahead, h_width * 2 * ROWS);
            if constexpr (LOADS_AHEAD) {
                ring.fetch(ahead, ahead_column,
                           i); // what was in this slot has been in registers since the last iteration
                wait_copies<AHEAD - 1>();
            }
            const uint32_t below = of_step(i + 1); // i + 1 to 3 of these four, then 0 of the next four
            if (LOADS_AHEAD && (i + 1 < AHEAD || !last)) {
                x_next = load_shared16(below);
                g_next = ring.gate((i + 1) % AHEAD), u_next = ring.up((i + 1) % AHEAD);
            }
            const int of_row = row + i * ROWS + own;
            ds[0] = ds[1], ds[1] = ds[2], ds[2] = ds[3];
            const float weight = __shfl_sync(~0u, weights, of_row);
            const float y_weight =
                LOADS_AHEAD ? __shfl_sync(~0u, y_weights, of_row) : weight * __shfl_sync(~0u, scales, of_row);
            ds[3] = out.write(p, x, g, u, of_row, weight, y_weight, lane);
            out.next(p);
            if (i + 1 == AHEAD) here = below;
            if constexpr (LOADS_AHEAD)
                x = x_next, g = g_next, u = u_next;
            else
                ring.fetch(ahead, ahead_column, i);
        }
    }
    write_sums<W>(ds_out, WARP_TILE_ROWS - GROUP_ROWS, ds, scales, lane);
}

// WORKERS: worker warps. With eight a thread has fewer registers.
template <typename T, bool PROMOTED, int WORKERS> struct f8_dh {
    using params = dh_f8_params;
    using storage = T;
    enum { TOKENS_KEPT = PROMOTED || WORKERS == 8 };
    using elements = std::conditional_t<WORKERS == 8, e4m3_in_halves, e4m3>;

    static MOE_DEVICE int lane(int lane)
    {
        return PROMOTED ? lane_again() : lane;
    }
    static MOE_DEVICE int of_eight_lanes(int value, int i)
    {
        return moe::of_eight_lanes(value, i);
    }

    template <width W>
    static MOE_DEVICE void begin_tile(const params &p, const dh_layout<W> &shared, int t, int row, int token)
    {
        if ((threadIdx.x & 7) < COPIES) copy4_async(scale_at(shared, t, row), p.do_scale + max(token, 0));
    }

    // 128 columns of d of a tile's rows of W2_8[e] transposed; k: of pairs
    template <width W>
    static MOE_DEVICE void load_weights(const params &, const CUtensorMap *map, int expert, int column, int k,
                                        uint32_t to, uint32_t full)
    {
        barrier_expect(full, tile_width<W>::SUBTILES * MOE_SUBTILE_BYTES);
        load_box(to, map, full, k, 0, 0, column / 8, expert);
    }

    template <width W, int SUMS, class Done>
    static MOE_DEVICE row_factors multiply(float (&acc)[SUMS], ring_position<dh_layout<W>::RING_SLOTS> &ring,
                                           const params &p, const dh_layout<W> &shared, int steps,
                                           moe_work tile, int t, int warp, int lane, const Done &done)
    {
        const int expert = moe_work_expert(tile);
        const auto factors = [&](float w_scale) {
            const int row = warp * WARP_TILE_ROWS + (f8_dh::lane(lane) >> 2);
            return row_factors{load_shared_float(scale_at(shared, t, row)) * w_scale,
                               load_shared_float(scale_at(shared, t, row + 8)) * w_scale};
        };
        if constexpr (PROMOTED) { // so many steps that the next tile is not gathered before this one's end
            multiply_promoted<true>(acc, ring, shared, steps, warp >> 2, done);
            return factors(__ldg(p.w_scale + expert));
        } else {
            barrier_wait(shared.full(ring.slot), ring.phase);
            const row_factors by = factors(1.0f);
            const float w_scale = __ldg(p.w_scale + expert);
            gemm_cooperative::multiply<elements, true>(acc, ring, shared, steps, warp >> 2, done);
            return {by.upper * w_scale, by.lower * w_scale};
        }
    }

    template <int KIND, width W>
    static MOE_DEVICE void work_warp_tile(const params &p, const h_ring<activation<T, KIND>::GATED> &ring,
                                          const dh_layout<W> &shared, uint32_t warp_tile, place at,
                                          place next, float weights, float *ds_out, int lane)
    {
        work_f8_tile<T, KIND, W, !PROMOTED>(p, ring, shared, warp_tile, at, next, weights, ds_out, lane);
    }
};

// How the threads are divided, and their registers. Promoted sums of 256 columns need 64 registers. Then the
// gathering and four worker warps do with fewer, and there are none left for eight.
template <width W, bool PROMOTED, bool FOR_DW> struct division {
    enum {
        WORKERS = FOR_DW && !PROMOTED ? 8 : 4, // warps
        THREADS = 32 * (8 + WORKERS),
        CONSUMER = WORKERS == 4  ? (PROMOTED && W != NARROW ? 208 : 192)
                   : W == NARROW ? 136
                                 : 160,
        WORKER = WORKERS == 4 ? 504 - 2 * CONSUMER : 256 - CONSUMER
    };
};
static_assert((int)division<WIDE, true, false>::THREADS == (int)dh_kernel::THREADS, "as dh.cu");

// FOR_DW: with dH_w and A'_w instead of dH and A' in dtype.
template <typename T, width W, bool PROMOTED, bool FOR_DW>
__global__ void __launch_bounds__(division<W, PROMOTED, FOR_DW>::THREADS, 1)
    dh_f8(const __grid_constant__ dh_f8_params p)
{
    using divided = division<W, PROMOTED, FOR_DW>;
    using core = f8_dh<T, PROMOTED, divided::WORKERS>;
    extern __shared__ __align__(1024) char memory[];
    const dh_layout<W> shared(shared_address(memory));
    const int warp = warp_number(), lane = threadIdx.x & 31;
    if (threadIdx.x == 0) init_barriers(shared);
    __syncthreads();
    const tile_walk walk(p.lists.tiles, p.lists.counts, p.groups);
    if (warp >= 8) {
        give_registers<divided::WORKER>();
        if constexpr (FOR_DW)
            work_f8_tiles<T, W, divided::WORKERS>(p, walk, shared, warp - 8, lane);
        else
            work_tiles<core, W>(p, walk, shared, warp - 8, lane);
    } else {
        take_registers<divided::CONSUMER>();
        multiply_tiles<core, W, false>(p, walk, shared, warp, lane);
    }
}

dh_f8_params prepare(moe_launch *on, const moe_f8_dh &f)
{
    const moe_dh &d = f.dh;
    const moe_w1 w2 = {d.w2, d.experts, d.hidden / 2, d.intermediate, 1, 0}; // bytes are moved as pairs
    dh_f8_params p = {};
    (dh_params &)p = params_of(d);
    moe_map_w1(on, &p.w2, &w2, width_of(d) == NARROW ? NARROW_COLUMNS : TILE_COLUMNS);
    p.hidden = (int32_t)(d.hidden / 2);
    p.do_scale = f.do_scale;
    p.w_scale = f.w_scale;
    p.dh8 = f.dh8;
    p.dh_scale = f.dh_scale;
    p.for_dw[0] = f.for_dw[0], p.for_dw[1] = f.for_dw[1];
    p.groups = (int32_t)moe_f8_groups(d.intermediate, MOE_F8_DH_FEATURES);
    return p;
}

struct launched {
    void (*kernel)(dh_f8_params);
    int threads;
};

template <typename T, width W, bool PROMOTED> launched kernel_of(bool for_dw)
{
    if (for_dw) return {dh_f8<T, W, PROMOTED, true>, division<W, PROMOTED, true>::THREADS};
    return {dh_f8<T, W, PROMOTED, false>, division<W, PROMOTED, false>::THREADS};
}

template <typename T> launched kernel_of(width w, bool promoted, bool for_dw)
{
    switch (w) {
    case NARROW: return promoted ? kernel_of<T, NARROW, true>(for_dw) : kernel_of<T, NARROW, false>(for_dw);
    case MIDDLE: return promoted ? kernel_of<T, MIDDLE, true>(for_dw) : kernel_of<T, MIDDLE, false>(for_dw);
    default: return promoted ? kernel_of<T, WIDE, true>(for_dw) : kernel_of<T, WIDE, false>(for_dw);
    }
}

} // namespace
} // namespace moe

extern "C" cudaError_t moe_sm90_f8_dh_init(const moe_device *device)
{
    using namespace moe;
    return for_every_type(f8_storage_types(), [&](auto t) {
        using T = typename decltype(t)::type;
        for (const width w : {NARROW, MIDDLE, WIDE})
            for (const bool promoted : {false, true})
                for (const bool for_dw : {false, true}) {
                    const cudaError_t status =
                        allow_shared(device, kernel_of<T>(w, promoted, for_dw).kernel, F8_SHARED_BYTES);
                    if (status != cudaSuccess) return status;
                }
        return cudaSuccess;
    });
}

extern "C" cudaError_t moe_sm90_f8_dh(moe_launch *on, const moe_f8_dh *d)
{
    using namespace moe;
    const dh_f8_params p = prepare(on, *d);
    if (on->refused_call) return cudaErrorInvalidValue;
    const bool promoted = moe_divide_up(d->dh.hidden, F8_STEP) >= F8_LEAST_PROMOTED;
    return for_type(f8_storage_types(), on->dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        const launched of = kernel_of<T>(width_of(d->dh), promoted, d->for_dw[0].rows != nullptr);
        return enqueue(of.kernel, on->sms, of.threads, F8_SHARED_BYTES, on->stream, p);
    });
}
