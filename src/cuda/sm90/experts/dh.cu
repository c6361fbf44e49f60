// The gradient through the activation. For row r of expert e:
//
//   dA'[r] = dO[t(r)] W2[e]
//   dS[r]  = <dA'[r], A[r]>, with A[r] computed again from the saved H[r]; ds.cu adds the term of b2
//   dH[r]  = dact(H[r], s(r) dA'[r])
//   A'[r]  = s(r) A[r], which dW2 reads
//
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Shapes: dO (T, d), W2 (E, d, n), H and dH (padded rows, h), A' (padded rows, n), where h is 2n with a gate
// and n without. FLOPs 2 R d n.
//
// Bytes (elements of tensors have 16 bits):
// - dO: 2 R d, gathered once for each column tile. L2 can serve every column tile after the first.
// - W2: 2 E d n, read once if L2 serves all row tiles of each expert except its first.
//   With more than 8 column tiles W2 may not stay in L2. Then units go in bands of 16 row tiles
//   (work_order.h), and W2 is read once or twice for each band.
// - H: 2 R h read.
// - dH: 2 R h written.
// - A': 2 R n written.
// - dS: 4 R written for each column tile, one partial sum in f32 for each row.
//
// Tile: 128 x 256 of dA' on the cooperative core (gemm_cooperative.cuh), or 128 x 128 for n <= 128. W2 is
// MN-major, as it is in memory.
//
// Some columns of dO and the matching part of W2 share a slot of a ring in shared memory. The two consumer
// warpgroups gather dO themselves. When a consumer has multiplied its 64 rows of a slot, it refills their
// place with later columns of the same rows or, after the last columns, with rows of its next tile. TMA loads
// W2 into the slot when both consumers are done with it.
// The third warpgroup does not gather, because it works on H, dH and A'.
//
// A consumer warp writes its 16 rows of dA' (256 or 128 columns) to shared memory as fp16. Before that, each
// row is scaled by a power of two so that its largest magnitude is in [2^14, 2^15). Then every element whose
// magnitude is at least 2^-28 times the largest is a normal fp16 number, and its rounding has a relative
// error of at most 2^-11. Smaller elements may become subnormal or 0.
//
// The four warps of the third warpgroup read these rows from shared memory. In a step a warp takes one row of
// 256 columns or two rows of 128. For each row it also needs H: 512 bytes or, with a gate, 512 bytes of the
// gate half and 512 bytes of the up half (narrow tiles: half of it). Each lane copies 16 bytes of each half
// to shared memory with cp.async, four steps ahead. From registers the lane writes the matching 16 bytes of
// A' and of each half of dH. Since a lane reads its bytes of H before it writes the same bytes of dH, dH may
// overwrite H.
//
// Each column tile has its own partial sums of dS, so no atomics are needed. With LoRA Q2[r] A2[e] is added
// to dA'[r], as more steps of K.
//
// sm90/dh_tiles.cuh has the gathering and the consumers, sm90/dh_rows.cuh the worker warps,
// sm90/dh_layout.cuh shared memory.
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "sm90/dh_rows.cuh"
#include "sm90/dh_tiles.cuh"
#include "sm90/kernels.h"
#include "tma/tensor_map.h"

namespace moe
{
namespace
{

using namespace dh_kernel;

template <typename T, bool LORA> struct plain_dh {
    using params = dh_params;
    enum { TOKENS_KEPT = 0 };

    static MOE_DEVICE int lane(int lane)
    {
        return lane;
    }
    template <width W, int COUNT>
    static MOE_DEVICE void begin_tile(const dh_params &, const dh_layout<W, COUNT> &, int, int, int)
    {
    }

    // 64 rows of W2[e], or of A2[e], from `row` on.
    template <width W>
    static MOE_DEVICE void load_weights(const dh_params &p, const CUtensorMap *map, int expert, int column,
                                        int row, uint32_t to, uint32_t full)
    {
        barrier_expect(full, tile_width<W>::SUBTILES * MOE_SUBTILE_BYTES);
        if (!p.subtiles_apart) return load_box(to, map, full, 0, row, column / MOE_SUBTILE_COLUMNS, expert);
        for (int i = 0; i < tile_width<W>::SUBTILES; i++)
            load_box(to + i * MOE_SUBTILE_BYTES, map, full, column + i * MOE_SUBTILE_COLUMNS, row, 0, expert);
    }

    template <width W, int SUMS, int COUNT, class Done>
    static MOE_DEVICE row_factors multiply(float (&acc)[SUMS], ring_position<COUNT> &ring, const dh_params &p,
                                           const dh_layout<W, COUNT> &shared, int steps, moe_work, int,
                                           int warp, int, const Done &done)
    {
        if constexpr (LORA)
            gemm_cooperative::multiply<T, true, K_MAJOR, MN_MAJOR, false, true>(
                acc, ring, shared, steps_of_k(p), warp >> 2, done, p.rank);
        else
            gemm_cooperative::multiply<T, true, K_MAJOR, MN_MAJOR>(acc, ring, shared, steps, warp >> 2, done);
        return {1.0f, 1.0f};
    }
};

template <typename T, width W, bool LORA>
__global__ void __launch_bounds__(THREADS, 1) dh(const __grid_constant__ dh_params p)
{
    extern __shared__ __align__(1024) char memory[];
    const dh_layout<W> shared(shared_address(memory));
    const int warp = warp_number(), lane = threadIdx.x & 31;
    if (threadIdx.x == 0) init_barriers(shared);
    __syncthreads();
    const tile_walk walk(p.lists.tiles, p.lists.counts, (p.intermediate + TILE_COLUMNS - 1) / TILE_COLUMNS);
    if (warp >= 8) {
        give_registers<120>();
        work_tiles<T, W>(p, walk, shared, warp - 8, lane);
    } else {
        take_registers<192>();
        multiply_tiles<plain_dh<T, LORA>, W, LORA>(p, walk, shared, warp, lane);
    }
}

dh_params prepare(moe_launch *on, const moe_dh &d)
{
    const int64_t row_bytes = d.intermediate * moe_type_bytes(on->dtype);
    const moe_subtiles w2 = {d.w2, d.intermediate, d.hidden, row_bytes, d.experts, d.hidden * row_bytes};
    dh_params p = params_of(d);
    moe_map_subtiles(on, &p.w2, &w2,
                     (width_of(d) == NARROW ? NARROW_COLUMNS : TILE_COLUMNS) / MOE_SUBTILE_COLUMNS);
    p.subtiles_apart = moe_subtiles_apart(d.intermediate);
    p.rank = (int32_t)d.lora.rank;
    p.q2 = d.lora.low;
    if (!p.rank) return p;
    const moe_subtiles a2 = {d.lora.factor, d.intermediate, d.lora.rank,
                             row_bytes,     d.experts,      d.lora.rank * row_bytes};
    moe_map_subtiles(on, &p.a2, &a2,
                     (width_of(d) == NARROW ? NARROW_COLUMNS : TILE_COLUMNS) / MOE_SUBTILE_COLUMNS);
    return p;
}

template <typename T, bool LORA> auto kernel_of(width w)
{
    return w == NARROW ? dh<T, NARROW, LORA> : w == MIDDLE ? dh<T, MIDDLE, LORA> : dh<T, WIDE, LORA>;
}

} // namespace
} // namespace moe

extern "C" cudaError_t moe_sm90_dh_init(const moe_device *device)
{
    using namespace moe;
    return for_every_type(storage_types(), [&](auto t) {
        using T = typename decltype(t)::type;
        for (const width w : {NARROW, MIDDLE, WIDE})
            for (const auto kernel : {kernel_of<T, false>(w), kernel_of<T, true>(w)}) {
                const cudaError_t status = allow_shared(device, kernel, SHARED_BYTES);
                if (status != cudaSuccess) return status;
            }
        return cudaSuccess;
    });
}

extern "C" cudaError_t moe_sm90_dh(moe_launch *on, const moe_dh *d)
{
    using namespace moe;
    const dh_params p = prepare(on, *d);
    if (on->refused_call) return cudaErrorInvalidValue;
    return for_type(storage_types(), on->dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        const auto kernel = p.rank ? kernel_of<T, true>(width_of(*d)) : kernel_of<T, false>(width_of(*d));
        return enqueue(kernel, on->sms, THREADS, SHARED_BYTES, on->stream, p);
    });
}
