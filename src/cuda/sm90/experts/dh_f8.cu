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
// W2's part is K-major. K above 1536 is promoted (gemm_f8.cuh). What is different (also sm90/dh_f8_rows.cuh):
//
// - A consumer also copies the scales of its rows' tokens to shared memory, before the first step of a tile.
//   It reads them before it refills the slot of that step. It gathers at most slots + 1 tiles ahead, so there
//   are so many sets of scales. They multiply the scale that a row of a warp tile has anyway.
// - A column tile has one group of 256 features of dH, gate and up. A worker warp finds the largest magnitude
//   of a row's two halves while they are in registers.
// - If sums are not promoted, there is a worker warp for each consumer warp.
// - With FOR_DW, sums that are not promoted and n above 128 the ring has two slots. dO and W2 need no more,
//   because a tile has few steps. The place of the third has A'_w and more of H.
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "f8.h"
#include "sm90/dh_f8_rows.cuh"
#include "sm90/dh_tiles.cuh"
#include "sm90/f8_kernels.h"
#include "sm90/gemm_f8.cuh"
#include "tma/tensor_map.h"

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

enum {
    THIRD_SLOT = 2 * SLOT_BYTES,
    SET_BYTES = TILE_ROWS * 4,
    F8_SHARED_BYTES = SHARED_BYTES + (SLOTS + 1) * SET_BYTES
};
static_assert(F8_SHARED_BYTES <= 232448, "shared memory of an SM");
static_assert((int)NARROW_SLOTS * (int)NARROW_SLOT_BYTES + (NARROW_SLOTS + 1) * SET_BYTES <= (int)STAGING,
              "the sets of narrow tiles are behind their ring, which is shorter");

// Address of the scale of row `row` of the CTA's tile number t.
template <width W, int COUNT> MOE_DEVICE uint32_t scale_at(const dh_layout<W, COUNT> &shared, int t, int row)
{
    const uint32_t first = W == NARROW ? (int)NARROW_SLOTS * (int)NARROW_SLOT_BYTES : (int)SHARED_BYTES;
    return shared.base + first + t % (COUNT + 1) * SET_BYTES + row * 4;
}

template <bool PROMOTED> struct f8_dh {
    using params = dh_f8_params;
    enum { TOKENS_KEPT = 1 };

    static MOE_DEVICE int lane(int lane)
    {
        return PROMOTED ? lane_again() : lane;
    }
    static MOE_DEVICE int of_eight_lanes(int value, int i)
    {
        return moe::of_eight_lanes(value, i);
    }

    template <width W, int COUNT>
    static MOE_DEVICE void begin_tile(const params &p, const dh_layout<W, COUNT> &shared, int t, int row,
                                      int token)
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

    template <width W, int SUMS, int COUNT, class Done>
    static MOE_DEVICE row_factors multiply(float (&acc)[SUMS], ring_position<COUNT> &ring, const params &p,
                                           const dh_layout<W, COUNT> &shared, int steps, moe_work tile, int t,
                                           int warp, int lane, const Done &done)
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
            if constexpr (COUNT == 2)
                multiply_at_once<e4m3_in_halves>(acc, ring, shared, steps, warp >> 2, done);
            else
                gemm_cooperative::multiply<e4m3_in_halves, true>(acc, ring, shared, steps, warp >> 2, done);
            return {by.upper * w_scale, by.lower * w_scale};
        }
    }
};

// How the threads are divided, their registers, and shared memory. Promoted sums of 256 columns need 64
// registers. Then the gathering and four worker warps do with fewer, and there are none left for eight.
template <width W, bool PROMOTED, bool FOR_DW> struct division {
    static constexpr bool COPIES_FOR_DW = FOR_DW;
    // Narrow: A'_w is in the rest of its warp tile.
    static constexpr bool A_W_APART = FOR_DW && W != NARROW;
    static constexpr bool FEWER_SLOTS = A_W_APART && !PROMOTED;
    enum {
        WORKERS = PROMOTED ? 4 : 8, // warps
        THREADS = 32 * (8 + WORKERS),
        CONSUMER = WORKERS == 4  ? (W != NARROW ? 208 : 192) // registers
                   : W == NARROW ? 136
                                 : 160,
        WORKER = WORKERS == 4 ? 504 - 2 * CONSUMER : 256 - CONSUMER,
        RING_SLOTS = FEWER_SLOTS ? 2 : (int)tile_width<W>::RING_SLOTS,
        A_BYTES = kept_bytes<W>::BYTES,
        DEPTH = FEWER_SLOTS ? 4
                : A_W_APART ? 0
                : PROMOTED  ? 4
                            : 2
    };
    static MOE_DEVICE uint32_t a_w(int worker)
    {
        return (FEWER_SLOTS ? (int)THIRD_SLOT : (int)RING) + worker * A_BYTES;
    }
    static MOE_DEVICE uint32_t h(int worker)
    {
        if (FEWER_SLOTS && worker >= 4) return a_w(WORKERS) + (worker - 4) * RING_WARP;
        return RING + worker * DEPTH * RING_ROW;
    }
};
static_assert((int)division<WIDE, true, false>::THREADS == (int)dh_kernel::THREADS, "as dh.cu");
static_assert(8 * kept_bytes<MIDDLE>::BYTES + 4 * RING_WARP <= SLOT_BYTES, "in the place of the third slot");
static_assert(4 * kept_bytes<MIDDLE>::BYTES <= 4 * RING_WARP, "promoted: in the place of dh.cu's ring of H");

// FOR_DW: with dH_w and A'_w instead of dH and A' in dtype.
template <typename T, width W, bool PROMOTED, bool FOR_DW>
__global__ void __launch_bounds__(division<W, PROMOTED, FOR_DW>::THREADS, 1)
    dh_f8(const __grid_constant__ dh_f8_params p)
{
    using divided = division<W, PROMOTED, FOR_DW>;
    extern __shared__ __align__(1024) char memory[];
    const dh_layout<W, divided::RING_SLOTS> shared(shared_address(memory));
    const int warp = warp_number(), lane = threadIdx.x & 31;
    if (threadIdx.x == 0) init_barriers(shared);
    __syncthreads();
    const tile_walk walk(p.lists.tiles, p.lists.counts, p.groups);
    if (warp >= 8) {
        give_registers<divided::WORKER>();
        work_f8_tiles<T, divided, W>(p, walk, shared, warp - 8, lane);
    } else {
        take_registers<divided::CONSUMER>();
        multiply_tiles<f8_dh<PROMOTED>, W, false>(p, walk, shared, warp, lane);
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
