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
// - H: 2 R h read.
// - dH: 2 R h written.
// - A': 2 R n written.
// - dS: 4 R written for each column tile, one partial sum in f32 for each row.
//
// Tile: 128 x 256 of dA' (gemm_sync.cuh). dO is K-major, W2 is MN-major, as it is in memory.
//
// dA' stays in f32 in registers. Four lanes exchange their elements, so that a lane has eight neighbouring
// columns of a row. It reads 16 bytes of each half of H there and writes 16 bytes of each half of dH and of
// A'. The reads are one vector ahead, and the tile's H is fetched into L2 while the GEMM runs. A lane reads
// its bytes of H before it writes the same bytes of dH, so dH may overwrite H.
//
// Each column tile has its own partial sums of dS: the warps of a row add theirs in shared memory, in order.
#include "common/activation_gradient.cuh"
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "sm80/gemm_sync.cuh"
#include "sm80/kernels.h"

namespace moe
{
namespace gemm_sync
{
namespace
{

enum {
    ROW_SUMS = SHARED_BYTES, // (WARPS_ACROSS, TILE_ROWS) float
    DH_SHARED_BYTES = ROW_SUMS + WARPS_ACROSS * TILE_ROWS * 4
};
static_assert((int)TILE_COLUMNS == (int)MOE_SM80_DS_COLUMNS,
              "the host has room for a part of dS a column tile");

// Two elements of dH and A', and their part of dS.
template <typename T, int KIND>
MOE_DEVICE void differentiate_two(uint32_t g, uint32_t u, const moe_gate_values &values, float low,
                                  float high, float weight, float &ds, uint32_t &gate, uint32_t &up,
                                  uint32_t &scaled)
{
    using S = storage<T>;
    const gradient a = differentiate<T, KIND>(S::low(g), S::low(u), values, low, weight, weight, ds);
    const gradient b = differentiate<T, KIND>(S::high(g), S::high(u), values, high, weight, weight, ds);
    gate = S::pack(a.gate, b.gate);
    up = S::pack(a.up, b.up);
    scaled = S::pack(a.scaled, b.scaled);
}

// A lane's vector of H, dH and A': eight columns of a row from `column` on.
template <typename T, int KIND> struct dh_vector {
    static constexpr bool GATED = activation<T, KIND>::GATED;
    const moe_dh &p;
    int row, column;

    MOE_DEVICE int64_t in_h() const
    {
        return (int64_t)row * ((int)p.intermediate * (GATED ? 2 : 1)) + column;
    }
    MOE_DEVICE void read(uint4 &gate, uint4 &up, bool wanted) const
    {
        const T *at = (const T *)p.h + in_h();
        wanted = wanted && column < p.intermediate;
        gate = load_global16_if(wanted, at);
        if (GATED) up = load_global16_if(wanted, at + p.intermediate);
    }
    // dA' of the vector's columns is in `left` and `right` by turns. Returns the lane's part of dS.
    MOE_DEVICE float write(uint4 g, uint4 u, const moe_gate_values &values, const float (&left)[4],
                           const float (&right)[4], float weight) const
    {
        const bool exists = column < p.intermediate;
        uint4 gate, up, scaled;
        float ds = 0.0f;
        differentiate_two<T, KIND>(g.x, u.x, values, left[0], right[0], weight, ds, gate.x, up.x, scaled.x);
        differentiate_two<T, KIND>(g.y, u.y, values, left[1], right[1], weight, ds, gate.y, up.y, scaled.y);
        differentiate_two<T, KIND>(g.z, u.z, values, left[2], right[2], weight, ds, gate.z, up.z, scaled.z);
        differentiate_two<T, KIND>(g.w, u.w, values, left[3], right[3], weight, ds, gate.w, up.w, scaled.w);
        T *at = (T *)p.dh + in_h();
        store_streaming16_if(exists, at, gate);
        if (GATED) store_streaming16_if(exists, at + p.intermediate, up);
        store_streaming16_if(exists, (T *)p.a + (int64_t)row * (int)p.intermediate + column, scaled);
        return ds;
    }
};

// Writes the warp's part of dH and A', and leaves its sums of the rows at `sums`.
template <typename T, int KIND>
MOE_DEVICE void differentiate_tile(const moe_dh &p, warp_sums &c, int row, int column, uint32_t sums,
                                   int lane)
{
    // An activation with values of the layer leaves no registers for reading ahead.
    constexpr bool AHEAD = !__is_base_of(clamped_shape<T>, activation<T, KIND>) &&
                           !__is_base_of(capped_shape<T>, activation<T, KIND>);
    moe_gate_values values = p.values;
    if (!AHEAD) { // else what is computed from them, such as inverses, would hold registers in the GEMM
        values.gate_limit = __shfl_sync(~0u, values.gate_limit, 0);
        values.up_limit = __shfl_sync(~0u, values.up_limit, 0);
        values.alpha = __shfl_sync(~0u, values.alpha, 0);
    }
    row += lane >> 2, column += (lane & 3) * 8, sums += (lane >> 2) * 4;
    uint4 gate = {}, up = {};
    if (AHEAD) dh_vector<T, KIND>{p, row, column}.read(gate, up, true);
#pragma unroll 1
    for (int m = 0; m < 4; m++, next_rows(c))
#pragma unroll
        for (int i = 0; i < 2; i++, row += 8, sums += 32) {
            const float weight = __ldg(p.row_weight + row);
            float ds = 0.0f;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                __syncwarp(); // or ptxas would mix the work of both halves and spill
                const dh_vector<T, KIND> here = {p, row, column + half * 32};
                uint4 g = gate, u = up;
                if (!AHEAD)
                    here.read(g, u, true);
                else if (half == 0)
                    dh_vector<T, KIND>{p, row, column + 32}.read(gate, up, true);
                else
                    dh_vector<T, KIND>{p, row + 8, column}.read(gate, up, m < 3 || i == 0);
                float left[4], right[4];
#pragma unroll
                for (int j = 0; j < 4; j++)
                    left[j] = c[0][half * 4 + j][i * 2], right[j] = c[0][half * 4 + j][i * 2 + 1];
                transpose_four(left, lane);
                transpose_four(right, lane);
                ds += here.write(g, u, values, left, right, weight);
            }
            ds += __shfl_xor_sync(~0u, ds, 1);
            ds += __shfl_xor_sync(~0u, ds, 2);
            if ((lane & 3) == 0) store_shared_float(sums, ds);
        }
}

template <typename T, int KIND, bool WITH_LORA> struct dh_gemm {
    using type = T;
    static constexpr bool A_MN = false, B_MN = true, LORA = WITH_LORA;
    using weights = mn_major<TILE_COLUMNS>;
    const moe_dh &p;
    const tile_list list;
    const uint32_t sums; // (WARPS_ACROSS, TILE_ROWS) parts of dS
    token_rows dout;
    const char *w2;  // the thread's column of the expert's W2
    uint32_t real;   // it exists
    const char *low; // LORA: the tile's first row of Q2, or NULL: the copies are at steps of dO and W2

    MOE_DEVICE dh_gemm(const moe_dh &dh, const char *memory)
        : p(dh), list(dh.lists.tiles, dh.lists.counts, dh.intermediate, TILE_COLUMNS),
          sums(shared_address(memory) + ROW_SUMS)
    {
    }
    MOE_DEVICE int units() const
    {
        return list.units();
    }
    MOE_DEVICE tile_place place(int unit) const
    {
        return list.place(unit);
    }
    MOE_DEVICE int steps_of_k() const
    {
        return ((int)p.hidden + STEP - 1) / STEP;
    }
    MOE_DEVICE int steps(const tile_place &) const
    {
        return LORA ? steps_of_k() + low_steps(p.lora) : steps_of_k();
    }
    MOE_DEVICE void begin(const tile_place &at)
    {
        const int column = at.column_tile * TILE_COLUMNS + weights::column();
        if (LORA) low = nullptr;
        dout.begin(p.row_token + at.row, at.blocks);
        w2 = (const char *)p.w2 + (at.expert * p.hidden * p.intermediate + column) * 2;
        real = column < p.intermediate;
        fetch_h(at);
    }
    // The tile's H goes to L2, 128 bytes for each request. The halves of a row are consecutive rows of n
    // columns.
    MOE_DEVICE void fetch_h(const tile_place &at) const
    {
        enum { LINE = 64, LINES = TILE_COLUMNS / LINE }; // elements; of a row of a half
        const int n = (int)p.intermediate, halves = p.gated ? 2 : 1;
        const int column = at.column_tile * TILE_COLUMNS + (int)threadIdx.x % LINES * LINE;
        if (column >= n) return;
        for (int i = (int)threadIdx.x / LINES; i < at.blocks * MOE_BLOCK_ROWS * halves; i += THREADS / LINES)
            prefetch_l2((const T *)p.h + ((int64_t)at.row * halves + i) * n + column);
    }
    // A2 takes the place of W2.
    MOE_DEVICE void begin_low(const tile_place &at)
    {
        const int column = at.column_tile * TILE_COLUMNS + weights::column();
        low = (const char *)p.lora.low + at.row * p.lora.rank * 2;
        dout.begin_rows(at.blocks);
        w2 = (const char *)p.lora.factor + (at.expert * p.lora.rank * p.intermediate + column) * 2;
    }
    // Columns of A's operand, rows of B's.
    MOE_DEVICE auto depth() const
    {
        if constexpr (LORA)
            return (int)(low ? p.lora.rank : p.hidden);
        else
            return p.hidden;
    }
    MOE_DEVICE void copy_a(int step, uint32_t slot)
    {
        dout.copy(slot, LORA && low ? low : p.dout, step, (uint32_t)depth() / 8);
    }
    MOE_DEVICE void copy_b(int step, uint32_t slot)
    {
#pragma unroll
        for (int i = 0; i < weights::COUNT; i++) {
            const int k = step * STEP + weights::row() + i * weights::APART;
            weights::copy_row(slot, i, k < depth() ? real : 0,
                              w2 + (uint64_t)(uint32_t)k * ((uint32_t)p.intermediate * 2));
        }
    }
    MOE_DEVICE bool active(const tile_place &at, int warp_row, int warp_column) const
    {
        return at.has_block(warp_row) &&
               at.column_tile * TILE_COLUMNS + warp_column * WARP_TILE < p.intermediate;
    }
    // The parts of the warps that have columns.
    MOE_DEVICE void add_row_sums(const tile_place &at) const
    {
        const int row = (int)threadIdx.x, left = (int)p.intermediate - at.column_tile * TILE_COLUMNS;
        if (row >= at.blocks * MOE_BLOCK_ROWS) return;
        float ds = 0.0f;
        for (int w = 0; w < WARPS_ACROSS && w * WARP_TILE < left; w++)
            ds += load_shared_float(sums + (w * TILE_ROWS + row) * 4);
        p.ds[at.column_tile * p.padded_rows + at.row + row] = ds;
    }
    MOE_DEVICE void finish(const tile_place &at, warp_sums &c, bool active, int warp_row, int warp_column,
                           int lane)
    {
        if (active) {
            const int row = at.row + warp_row * WARP_TILE;
            const int column = at.column_tile * TILE_COLUMNS + warp_column * WARP_TILE;
            const uint32_t own = sums + (warp_column * TILE_ROWS + warp_row * WARP_TILE) * 4;
            differentiate_tile<T, KIND>(p, c, row, column, own, lane);
        }
        __syncthreads(); // the next tile's sums come after its steps, each of which has a barrier
        add_row_sums(at);
    }
};

// One kernel for each activation: in a kernel of all activations ptxas would spill registers.
template <typename T, int KIND, bool LORA>
__global__ void __launch_bounds__(THREADS, 1) dh(const __grid_constant__ moe_dh p)
{
    extern __shared__ __align__(1024) char memory[];
    dh_gemm<T, KIND, LORA> gemm(p, memory);
    run(gemm, memory);
}

template <typename T, bool LORA> auto kernel_of(smoe_activation kind)
{
    switch (kind) {
#define MOE_KERNEL(enumerator, name, shape, curve)                                                           \
    case enumerator: return dh<T, enumerator, LORA>;
        MOE_ACTIVATIONS(MOE_KERNEL)
#undef MOE_KERNEL
    }
    __builtin_unreachable(); // the host refuses other values
}

} // namespace
} // namespace gemm_sync
} // namespace moe

extern "C" cudaError_t moe_sm80_dh_init(const moe_device *device)
{
    using namespace moe;
    return for_every_type(storage_types(), [&](auto t) {
        using T = typename decltype(t)::type;
        cudaError_t status = cudaSuccess;
#define MOE_ALLOW(enumerator, name, shape, curve)                                                            \
    if (status == cudaSuccess)                                                                               \
        status = allow_shared(device, gemm_sync::dh<T, enumerator, false>, gemm_sync::DH_SHARED_BYTES);      \
    if (status == cudaSuccess)                                                                               \
        status = allow_shared(device, gemm_sync::dh<T, enumerator, true>, gemm_sync::DH_SHARED_BYTES);
        MOE_ACTIVATIONS(MOE_ALLOW)
#undef MOE_ALLOW
        return status;
    });
}

extern "C" cudaError_t moe_sm80_dh(moe_launch *on, const moe_dh *d)
{
    using namespace moe;
    return for_type(storage_types(), on->dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        const auto kernel = d->lora.rank ? gemm_sync::kernel_of<T, true>(d->activation)
                                         : gemm_sync::kernel_of<T, false>(d->activation);
        return enqueue(kernel, on->sms, gemm_sync::THREADS, gemm_sync::DH_SHARED_BYTES, on->stream, *d);
    });
}
