// LoRA's products that do not fit into the large GEMMs, for every expert e and its rows r:
//
//   project  P[r] = M[r] S[e]: P1 = X A1^T, P2 = A A2^T, Q2 = dO B2, Q1 = dH B1
//   sum      G[e] = sum_r M[r]^T w(r) P[r], or its transpose:
//            dB2 from dO, s and P2; dA2 from A' and Q2; dB1 from dH and P1; dA1 from X and Q1
//
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Shapes: M (T, width) gathered by token, or (padded rows, width); P (padded rows, rank); S (E, rank, width),
// or (E, width, rank); G as S. FLOPs 2 R width rank each.
//
// Bytes, of 16-bit elements: 2 R width of M for each 64 of the rank, 2 R rank of P. Nothing else counts, so
// with small ranks both kernels are bound by memory.
//
// Tile of project: a row tile of the work list by 16, 32 or 64 columns of P; a CTA has four warps of 32 rows.
// Tile of sum: 128 columns of M by 16, 32 or 64 of P, over all rows of an expert; a CTA has four warps of 32
// columns. One launch has the tiles of two gradients, dA2 and dB2 or dA1 and dB1. Both kernels multiply with
// mma.sync what cp.async copies to three slots in shared memory. Rows in shared memory are swizzled rather
// than padded, so that with ranks to 16 an SM has room for four CTAs of sum.
#include "common/backward_shared.cuh"
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/swizzle.h"
#include "host/launch_lora.h"

namespace moe
{
namespace
{

enum {
    THREADS = 128,
    STEP = 64, // of the sum
    SLOTS = 3,
    ROWS = MOE_TILE_BLOCKS * MOE_BLOCK_ROWS, // of a tile of project
    COLUMNS = 128,                           // of a tile of sum
    WIDE_PITCH = COLUMNS * 2,                // bytes
    ROW_VECTORS = STEP / 8
};

// Rows of `RANK` elements, in vectors of 16 bytes. ldmatrix reads a vector of eight rows; the swizzle puts
// them into different banks.
template <int RANK> struct narrow_rows {
    enum { PITCH = RANK * 2, VECTORS = RANK / 8, ROWS_OF_BANKS = 8 / VECTORS, BYTES = STEP * PITCH };
    static MOE_DEVICE uint32_t offset(uint32_t row, uint32_t vector)
    {
        return row * PITCH + ((vector ^ (row / ROWS_OF_BANKS & (VECTORS - 1))) << 4);
    }
};

// The same for rows of COLUMNS elements.
MOE_DEVICE uint32_t wide_offset(uint32_t row, uint32_t vector)
{
    return row * WIDE_PITCH + ((vector ^ (row & 7)) << 4);
}

// Adds the products of all steps to c; a slot is filled while those of earlier steps are multiplied.
template <typename WORK, typename SUMS>
MOE_DEVICE void multiply_steps(WORK &work, SUMS &c, int steps, int warp, int lane)
{
    for (int s = 0; s < SLOTS - 1; s++) {
        if (s < steps) work.copy(s);
        commit_copies();
    }
    for (int s = 0; s < steps; s++) {
        wait_copies<SLOTS - 2>();
        __syncthreads(); // step s has landed for all, and all have read step s - 1
        if (s + SLOTS - 1 < steps) work.copy(s + SLOTS - 1);
        commit_copies();
        work.multiply_step(c, s, warp, lane);
    }
}

// ---- project

template <int RANK, bool RANK_MAJOR> struct project_shared {
    enum {
        FACTOR =
            ROWS * STEP * 2, // (RANK, STEP) in swizzled rows of 128 bytes, or (STEP, RANK) in narrow rows
        FACTOR_BYTES = RANK_MAJOR ? RANK * STEP * 2 : (int)narrow_rows<RANK>::BYTES,
        SLOT = FACTOR + FACTOR_BYTES,
        BYTES = SLOTS * SLOT
    };
};

// One step of a factor's columns `first` on to shared memory at `to`; elements outside of the factor are 0.
template <int RANK, bool RANK_MAJOR>
MOE_DEVICE void copy_factor(const moe_cuda_project &p, int expert, int first, int k, uint32_t to)
{
    const char *factor = (const char *)p.factor + (int64_t)expert * p.rank * p.width * 2;
    if (RANK_MAJOR)
        for (int i = threadIdx.x; i < RANK * ROW_VECTORS; i += THREADS) {
            const int row = i / ROW_VECTORS, vector = i % ROW_VECTORS, column = k + vector * 8;
            const bool real = first + row < p.rank && column < p.width;
            copy16_async_if(real, to + moe_subtile_offset(row, vector),
                            real ? factor + ((int64_t)(first + row) * p.width + column) * 2 : factor);
        }
    else
        for (int i = threadIdx.x; i < STEP * narrow_rows<RANK>::VECTORS; i += THREADS) {
            const int row = i / narrow_rows<RANK>::VECTORS, vector = i % narrow_rows<RANK>::VECTORS;
            const bool real = k + row < p.width && first + vector * 8 < p.rank;
            copy16_async_if(real, to + narrow_rows<RANK>::offset(row, vector),
                            real ? factor + ((int64_t)(k + row) * p.rank + first + vector * 8) * 2 : factor);
        }
}

// The 16 x 16 fragment of the factor for columns 16 j of P and elements 16 kk of the step.
template <int RANK, bool RANK_MAJOR>
MOE_DEVICE void load_factor(uint32_t (&f)[4], uint32_t from, int j, int kk, int lane)
{
    if (RANK_MAJOR)
        load_matrices(
            f, from + moe_subtile_offset(j * 16 + (lane & 7) + (lane >> 4) * 8, kk * 2 + (lane >> 3 & 1)));
    else
        load_matrices_transposed(
            f, from + narrow_rows<RANK>::offset(kk * 16 + (lane & 15), j * 2 + (lane >> 4)));
}

template <typename T, int RANK, bool RANK_MAJOR> struct projector {
    using shared = project_shared<RANK, RANK_MAJOR>;
    enum { COPIES = ROWS * ROW_VECTORS / THREADS, APART = THREADS / ROW_VECTORS };
    const moe_cuda_project &p;
    const uint32_t base;
    const int first; // column of P
    moe_work tile;
    const char *from[COPIES]; // this thread's 16 bytes of the next step
    uint32_t real;            // bit i: row i exists

    MOE_DEVICE void begin()
    {
        real = 0;
        const int vector = threadIdx.x % ROW_VECTORS;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int at = threadIdx.x / ROW_VECTORS + i * APART, row = tile.row + at;
            const bool inside = at < moe_work_blocks(tile) * MOE_BLOCK_ROWS;
            const int source = !inside ? -1 : p.row_token ? __ldg(p.row_token + row) : row;
            real |= (source >= 0 ? 1u : 0u) << i;
            from[i] = (const char *)p.rows + ((int64_t)max(source, 0) * p.width + vector * 8) * 2;
        }
    }
    MOE_DEVICE void copy(int step)
    {
        const uint32_t slot = base + step % SLOTS * shared::SLOT;
        const int vector = threadIdx.x % ROW_VECTORS, row = threadIdx.x / ROW_VECTORS;
        const uint32_t wanted = step * STEP + vector * 8 < p.width ? real : 0;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            copy16_async_if(wanted & 1u << i, slot + moe_subtile_offset(row + i * APART, vector), from[i]);
            from[i] += STEP * 2;
        }
        copy_factor<RANK, RANK_MAJOR>(p, moe_work_expert(tile), first, step * STEP, slot + shared::FACTOR);
    }
    MOE_DEVICE void multiply_step(float (&c)[2][RANK / 8][4], int step, int warp, int lane) const
    {
        const uint32_t slot = base + step % SLOTS * shared::SLOT;
#pragma unroll
        for (int kk = 0; kk < STEP / 16; kk++) {
            uint32_t a[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++)
                load_matrices(
                    a[i], slot + moe_subtile_offset(warp * 32 + i * 16 + (lane & 15), kk * 2 + (lane >> 4)));
#pragma unroll
            for (int j = 0; j < RANK / 16; j++) {
                uint32_t b[4];
                load_factor<RANK, RANK_MAJOR>(b, slot + shared::FACTOR, j, kk, lane);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    multiply(c[i][2 * j], a[i], b[0], b[1], T());
                    multiply(c[i][2 * j + 1], a[i], b[2], b[3], T());
                }
            }
        }
    }
    MOE_DEVICE void store(const float (&c)[2][RANK / 8][4], int warp, int lane) const
    {
        if (warp * 32 >= moe_work_blocks(tile) * MOE_BLOCK_ROWS) return;
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < RANK / 8; j++) {
                const int column = first + j * 8 + (lane & 3) * 2;
                if (column >= p.rank) continue;
                const int64_t row = tile.row + warp * 32 + i * 16 + (lane >> 2);
                uint32_t *to = (uint32_t *)((T *)p.low + row * p.rank + column);
                to[0] = storage<T>::pack(c[i][j][0], c[i][j][1]);
                to[4 * p.rank] = storage<T>::pack(c[i][j][2], c[i][j][3]);
            }
    }
    MOE_DEVICE void run(int warp, int lane)
    {
        const int steps = (p.width + STEP - 1) / STEP;
        float c[2][RANK / 8][4] = {};
        begin();
        multiply_steps(*this, c, steps, warp, lane);
        store(c, warp, lane);
        wait_copies<0>();
        __syncthreads(); // the slots are free for the next tile
    }
};

// Three CTAs an SM: with larger ranks shared memory has no room for more. Without the bound ptxas takes 96
// registers for some instances, and spills.
template <typename T, int RANK, bool RANK_MAJOR>
__global__ void __launch_bounds__(THREADS, 3) project(const moe_cuda_project p)
{
    extern __shared__ __align__(1024) char memory[];
    const int tiles = __ldg(p.tile_count);
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        const int2 entry = __ldg((const int2 *)(p.tiles + t));
        projector<T, RANK, RANK_MAJOR> one = {
            p, shared_address(memory), (int)blockIdx.y * RANK, {entry.x, entry.y}};
        one.run(threadIdx.x / 32, threadIdx.x & 31);
    }
}

// ---- sum

// Column tiles; none if the gradient is not wanted.
__host__ MOE_DEVICE int sum_tiles(const moe_cuda_low_sum &s)
{
    return s.gradient ? (s.width + COLUMNS - 1) / COLUMNS : 0;
}

template <int RANK> struct sum_shared {
    enum {
        LOW = STEP * WIDE_PITCH, // behind 64 rows of M: those of P, then their weights
        WEIGHTS = LOW + narrow_rows<RANK>::BYTES,
        SLOT = WEIGHTS + STEP * 4,
        BYTES = SLOTS * SLOT
    };
};

// What a step does besides copying and multiplying would take longer than both, so addresses are kept from
// step to step, and the tokens of a step are read one step ahead.
template <typename T, typename G, int RANK> struct summer {
    using shared = sum_shared<RANK>;
    enum { VECTORS = COLUMNS / 8, COPIES = STEP * VECTORS / THREADS, APART = THREADS / VECTORS };
    enum {
        LOW_VECTORS = narrow_rows<RANK>::VECTORS,
        LOW_COPIES = STEP * LOW_VECTORS / THREADS,
        LOW_APART = THREADS / LOW_VECTORS
    };
    static_assert((int)VECTORS == 16 && (int)COPIES == 8, "half a warp copies the same eight rows");
    static_assert((int)LOW_COPIES * (int)LOW_APART == (int)STEP, "whole rows of P");
    const moe_cuda_low_sums &all;
    const moe_cuda_low_sum &p;
    const uint32_t base;
    const int expert, column, first; // column: of M; first: of P
    int steps;
    int64_t row0;         // the expert's first row
    int next;             // row of M for row threadIdx.x / 16 + 8 (lane % 8) of the next step, or negative
    const char *from;     // this thread's vector of row 0 of M
    const char *low_from; // of P: this thread's first vector of the next step

    MOE_DEVICE void read_token(int step)
    {
        const int row = (int)row0 + step * STEP + threadIdx.x / VECTORS + (threadIdx.x & 7) * APART;
        next = p.row_token ? __ldg(p.row_token + row) : row;
    }
    MOE_DEVICE void begin()
    {
        const int vector = threadIdx.x % VECTORS;
        from = (const char *)p.rows + (column + vector * 8 < p.width ? (column + vector * 8) * 2 : 0);
        const int64_t low_row = row0 + threadIdx.x / LOW_VECTORS;
        low_from = (const char *)p.low + (low_row * all.rank + first + threadIdx.x % LOW_VECTORS * 8) * 2;
        read_token(0);
    }
    // Called for one step after the other.
    MOE_DEVICE void copy(int step)
    {
        const uint32_t slot = base + step % SLOTS * shared::SLOT, row_bytes = (uint32_t)p.width * 2;
        const uint32_t to = slot + wide_offset(threadIdx.x / VECTORS, threadIdx.x % VECTORS);
        const bool inside = column + (int)(threadIdx.x % VECTORS) * 8 < p.width;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int row = __shfl_sync(~0u, next, (threadIdx.x & 16) | i);
            copy16_async_if(inside && row >= 0, to + i * APART * WIDE_PITCH,
                            from + (uint64_t)(uint32_t)max(row, 0) * row_bytes);
        }
        const int at = threadIdx.x / LOW_VECTORS, vector = threadIdx.x % LOW_VECTORS;
        const bool real = first + vector * 8 < all.rank;
#pragma unroll
        for (int i = 0; i < LOW_COPIES; i++)
            copy16_async_if(real, slot + shared::LOW + narrow_rows<RANK>::offset(at + i * LOW_APART, vector),
                            real ? low_from + i * LOW_APART * all.rank * 2 : (const char *)p.low);
        low_from += STEP * 2 * (int64_t)all.rank;
        if (p.row_weight && threadIdx.x < STEP / 4)
            copy16_async_if(true, slot + shared::WEIGHTS + threadIdx.x * 16,
                            (const char *)(p.row_weight + row0 + step * STEP + threadIdx.x * 4));
        if (step + 1 < steps) read_token(step + 1);
    }
    // The elements of a fragment's register are those of two rows; their weights are at `at`.
    static MOE_DEVICE uint32_t weigh(uint32_t pair, uint32_t at)
    {
        using S = storage<T>;
        return S::pack(S::low(pair) * load_shared_float(at), S::high(pair) * load_shared_float(at + 4));
    }
    MOE_DEVICE void multiply_step(float (&c)[RANK / 16][4][4], int step, int warp, int lane) const
    {
        const uint32_t slot = base + step % SLOTS * shared::SLOT;
#pragma unroll
        for (int kk = 0; kk < STEP / 16; kk++) {
            uint32_t b[2][4];
#pragma unroll
            for (int n = 0; n < 2; n++)
                load_matrices_transposed(
                    b[n], slot + wide_offset(kk * 16 + (lane & 15), warp * 4 + n * 2 + (lane >> 4)));
#pragma unroll
            for (int j = 0; j < RANK / 16; j++) {
                uint32_t a[4];
                load_matrices_transposed(a,
                                         slot + shared::LOW +
                                             narrow_rows<RANK>::offset(kk * 16 + (lane & 7) + (lane >> 4) * 8,
                                                                       j * 2 + (lane >> 3 & 1)));
                if (p.row_weight) {
                    const uint32_t at = slot + shared::WEIGHTS + (kk * 16 + (lane & 3) * 2) * 4;
                    a[0] = weigh(a[0], at), a[1] = weigh(a[1], at);
                    a[2] = weigh(a[2], at + 32), a[3] = weigh(a[3], at + 32);
                }
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    multiply(c[j][2 * n], a, b[n][0], b[n][1], T());
                    multiply(c[j][2 * n + 1], a, b[n][2], b[n][3], T());
                }
            }
        }
    }
    MOE_DEVICE void give_element(int rank, int at, float sum) const
    {
        if (rank >= all.rank || at >= p.width) return;
        const int64_t inside = p.rank_major ? (int64_t)rank * p.width + at : (int64_t)at * all.rank + rank;
        give((G *)p.gradient + (int64_t)expert * all.rank * p.width + inside, sum, all.accumulate);
    }
    MOE_DEVICE void run(int warp, int lane)
    {
        steps = all.block_offsets[expert + 1] - all.block_offsets[expert]; // a block each
        if (all.accumulate && steps == 0) return;
        row0 = (int64_t)all.block_offsets[expert] * MOE_BLOCK_ROWS;
        float c[RANK / 16][4][4] = {};
        if (steps) begin();
        multiply_steps(*this, c, steps, warp, lane);
        wait_copies<0>();
#pragma unroll
        for (int j = 0; j < RANK / 16; j++)
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    give_element(first + j * 16 + (lane >> 2) + (i >> 1) * 8,
                                 column + warp * 32 + n * 8 + (lane & 3) * 2 + (i & 1), c[j][n][i]);
    }
};
static_assert((int)STEP == (int)MOE_BLOCK_ROWS, "a step is a block");

template <typename T, typename G, int RANK>
__global__ void __launch_bounds__(THREADS) low_sum(const __grid_constant__ moe_cuda_low_sums p)
{
    extern __shared__ __align__(1024) char memory[];
    const int tiles_a = sum_tiles(p.a), tile = blockIdx.x;
    const bool is_a = tile < tiles_a;
    summer<T, G, RANK> one = {p,
                              is_a ? p.a : p.b,
                              shared_address(memory),
                              p.order[blockIdx.y],
                              (is_a ? tile : tile - tiles_a) * COLUMNS,
                              (int)blockIdx.z * RANK,
                              0,
                              0,
                              -1,
                              NULL,
                              NULL};
    one.run(threadIdx.x / 32, threadIdx.x & 31);
}

// ---- Launches

// run(an integral constant: 16, 32 or 64 columns of P for each CTA)
template <int RANK> struct columns_of_low {
    static constexpr int VALUE = RANK;
};
template <typename F> cudaError_t for_rank(int rank, const F &run)
{
    if (rank <= 16) return run(columns_of_low<16>());
    if (rank <= 32) return run(columns_of_low<32>());
    return run(columns_of_low<64>());
}

template <typename T, int RANK, bool RANK_MAJOR>
cudaError_t launch_project(const moe_launch *on, const moe_cuda_project &p)
{
    const dim3 grid((unsigned)(p.tile_bound < 8 * on->sms ? p.tile_bound : 8 * on->sms),
                    (unsigned)moe_divide_up(p.rank, RANK));
    return enqueue(project<T, RANK, RANK_MAJOR>, grid, THREADS, project_shared<RANK, RANK_MAJOR>::BYTES,
                   on->stream, p);
}

template <typename T, typename G, int RANK>
cudaError_t launch_sums(const moe_launch *on, const moe_cuda_low_sums &p)
{
    const dim3 grid((unsigned)(sum_tiles(p.a) + sum_tiles(p.b)), (unsigned)p.experts,
                    (unsigned)moe_divide_up(p.rank, RANK));
    return enqueue(low_sum<T, G, RANK>, grid, THREADS, sum_shared<RANK>::BYTES, on->stream, p);
}

template <typename T, int RANK> cudaError_t allow_all(const moe_device *device)
{
    cudaError_t status = allow_shared(device, project<T, RANK, false>, project_shared<RANK, false>::BYTES);
    if (status == cudaSuccess)
        status = allow_shared(device, project<T, RANK, true>, project_shared<RANK, true>::BYTES);
    return status != cudaSuccess ? status : for_every_type(gradient_types<T>(), [&](auto g) {
        return allow_shared(device, low_sum<T, typename decltype(g)::type, RANK>, sum_shared<RANK>::BYTES);
    });
}

} // namespace
} // namespace moe

extern "C" cudaError_t moe_cuda_lora_init(const moe_device *device)
{
    using namespace moe;
    return for_every_type(storage_types(), [&](auto t) {
        using T = typename decltype(t)::type;
        cudaError_t status = allow_all<T, 16>(device);
        if (status == cudaSuccess) status = allow_all<T, 32>(device);
        return status == cudaSuccess ? allow_all<T, 64>(device) : status;
    });
}

extern "C" cudaError_t moe_cuda_project_launch(const moe_launch *on, const moe_cuda_project *p)
{
    using namespace moe;
    return for_type(storage_types(), on->dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        return for_rank(p->rank, [&](auto r) {
            constexpr int RANK = decltype(r)::VALUE;
            return p->rank_major ? launch_project<T, RANK, true>(on, *p)
                                 : launch_project<T, RANK, false>(on, *p);
        });
    });
}

extern "C" cudaError_t moe_cuda_low_sum_launch(const moe_launch *on, const moe_cuda_low_sums *p,
                                               smoe_type gradient_type)
{
    using namespace moe;
    return for_type(storage_types(), on->dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        return for_type(gradient_types<T>(), gradient_type, [&](auto g) {
            using G = typename decltype(g)::type;
            return for_rank(p->rank, [&](auto r) { return launch_sums<T, G, decltype(r)::VALUE>(on, *p); });
        });
    });
}
