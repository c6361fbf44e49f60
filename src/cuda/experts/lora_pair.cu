// Two of LoRA's products that read the same rows, with one read of them, for every expert e and its rows r:
//
//   low[r] = M[r] S[e]  and  G[e] = sum_r M[r]^T w(r) P[r]
//   Q2 and dB2 from dO, s and P2; Q1 and dB1 from dH and P1
//
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Shapes: M (T, width) gathered by token, or (padded rows, width); S and G (E, width, rank); P and low
// (padded rows, rank); rank <= 16, width <= 2048. FLOPs 4 R width 16.
//
// Bytes, of 16-bit elements: 2 R width of M, so the kernel is bound by memory; 4 R rank of P and low. Each
// CTA also leaves at most two experts' sums in f32, 64 width bytes each, which are written and read once.
//
// The CTAs cut all blocks into equal shares, whatever the counts of the experts. A CTA walks over its rows,
// 16 at a time, with all of M's columns: a warp has 128 of them, with S's values for them and their sums in
// registers. The warps' parts of low are added in shared memory. An expert's sums that are those of several
// CTAs go to `parts` in f32, and a second kernel adds them in order.
#include "common/backward_shared.cuh"
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "host/launch_lora.h"

namespace moe
{
namespace
{

enum {
    RANK = 16, // columns that are multiplied
    STEP = 16,
    STEPS = MOE_BLOCK_ROWS / STEP, // of a block
    COLUMNS = 128,                 // of a warp
    TILES = COLUMNS / 8,           // of a warp's sums, 8 columns of M by 16 of P
    MOST_WARPS = 16,
    SLOTS = 3,
    PITCH = COLUMNS * 2, // bytes
    WARP_BYTES = STEP * PITCH,
    LOW_PITCH = RANK * 2,
    LOW_BYTES = STEP * LOW_PITCH,
    PARTIAL_BYTES = STEP * RANK * 4 // a warp's part of low
};

MOE_HOST_DEVICE int warps_of(int width)
{
    return (width + COLUMNS - 1) / COLUMNS;
}

// Of a slot: the warps' columns, then rows of P and their weights.
MOE_HOST_DEVICE int slot_bytes(int warps)
{
    return warps * WARP_BYTES + LOW_BYTES + 128;
}

int shared_bytes_of(int warps)
{
    return SLOTS * slot_bytes(warps) + 2 * warps * PARTIAL_BYTES;
}

MOE_DEVICE uint32_t wide_offset(uint32_t row, uint32_t vector)
{
    return row * PITCH + ((vector ^ (row & 7)) << 4);
}

MOE_DEVICE uint32_t low_offset(uint32_t row, uint32_t vector)
{
    return row * LOW_PITCH + ((vector ^ (row >> 2 & 1)) << 4);
}

// First block of a CTA's share.
MOE_DEVICE int share_begin(int blocks, int ctas, int cta)
{
    return (int)((int64_t)blocks * cta / ctas);
}

// The CTA in whose share a block is.
MOE_DEVICE int cta_of(int blocks, int ctas, int block)
{
    return (int)(((int64_t)(block + 1) * ctas - 1) / blocks);
}

// Sums of an expert that began in an earlier CTA's share are the first of this CTA's two in `parts`. Each is
// (TILES, threads, 4).
MOE_DEVICE float4 *part_of(const moe_cuda_low_pair &p, int cta, int began_before, int tile)
{
    return (float4 *)p.parts + ((int64_t)(2 * cta + !began_before) * TILES + tile) * blockDim.x + threadIdx.x;
}

template <typename T, typename G> struct pair_sums {
    const moe_cuda_low_pair &p;
    const int lane, column; // column: the warp's first

    // sums: of ranks lane / 4 and lane / 4 + 8, columns 2 (lane % 4) and the next one of a tile.
    MOE_DEVICE void give_tile(int expert, int tile, const float (&sums)[4]) const
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int rank = (lane >> 2) + (i >> 1) * 8, at = column + tile * 8 + (lane & 3) * 2 + (i & 1);
            if (rank < p.rank && at < p.width)
                give((G *)p.gradient + ((int64_t)expert * p.width + at) * p.rank + rank, sums[i],
                     p.accumulate);
        }
    }
};

template <typename T, typename G> struct pair_worker {
    const moe_cuda_low_pair &p;
    const uint32_t base;
    const int warps, warp, lane;
    const int first, end; // blocks
    int next;             // row of M for row lane / 16 + 2 (lane % 8) of the next step, or negative
    const char *from;     // this lane's vector of row 0 of M
    uint32_t factor[COLUMNS / 16][4];
    float sums[TILES][4];

    MOE_DEVICE uint32_t slot_of(int step) const
    {
        return base + step % SLOTS * slot_bytes(warps);
    }
    MOE_DEVICE uint32_t low_of(int step) const
    {
        return slot_of(step) + warps * WARP_BYTES;
    }
    MOE_DEVICE uint32_t partials_of(int step) const
    {
        return base + SLOTS * slot_bytes(warps) + (step & 1) * warps * PARTIAL_BYTES;
    }
    MOE_DEVICE int64_t row_of(int step) const
    {
        return (int64_t)first * MOE_BLOCK_ROWS + step * STEP;
    }
    MOE_DEVICE int column() const
    {
        return warp * COLUMNS;
    }
    MOE_DEVICE void read_token(int step)
    {
        const int row = (int)row_of(step) + (lane >> 4) + (lane & 7) * 2;
        next = p.row_token ? __ldg(p.row_token + row) : row;
    }
    // Called for one step after the other. Each warp copies the columns that it reads.
    MOE_DEVICE void copy(int step)
    {
        const uint32_t to = slot_of(step) + warp * WARP_BYTES;
        const bool inside = column() + (lane & 15) * 8 < p.width;
#pragma unroll
        for (int i = 0; i < STEP / 2; i++) {
            const int row = __shfl_sync(~0u, next, (lane & 16) | i);
            copy16_async_if(inside && row >= 0, to + wide_offset((lane >> 4) + 2 * i, lane & 15),
                            from + (uint64_t)(uint32_t)max(row, 0) * (uint32_t)(p.width * 2));
        }
        if (warp == 0) {
            const int row = lane >> 1, vector = lane & 1;
            const bool real = vector * 8 < p.rank;
            copy16_async_if(real, low_of(step) + low_offset(row, vector),
                            (const char *)p.other +
                                (real ? ((row_of(step) + row) * p.rank + vector * 8) * 2 : 0));
            if (p.row_weight && lane < STEP / 4)
                copy16_async_if(true, low_of(step) + LOW_BYTES + lane * 16,
                                (const char *)(p.row_weight + row_of(step) + lane * 4));
        }
        if (row_of(step + 1) < (int64_t)end * MOE_BLOCK_ROWS) read_token(step + 1);
    }
    // The warp's columns of S[expert], 32 at a time by way of shared memory at `by`.
    MOE_DEVICE void read_factor(int expert, uint32_t by)
    {
        const char *s = (const char *)p.factor + (int64_t)expert * p.width * p.rank * 2;
#pragma unroll
        for (int i = 0; i < COLUMNS / 32; i++) {
            const int row = column() + i * 32 + lane;
            uint4 v[2];
            for (int j = 0; j < 2; j++)
                v[j] = load_global16_if(row < p.width && j * 8 < p.rank,
                                        s + ((int64_t)row * p.rank + j * 8) * 2);
            __syncwarp();
            for (int j = 0; j < 2; j++) store_shared16(by + low_offset(lane, j), v[j]);
            __syncwarp();
#pragma unroll
            for (int j = 0; j < 2; j++)
                load_matrices_transposed(factor[2 * i + j], by + low_offset(j * 16 + (lane & 15), lane >> 4));
        }
        __syncwarp();
    }
    MOE_DEVICE void project(int step) const
    {
        const uint32_t rows = slot_of(step) + warp * WARP_BYTES;
        float c[2][4] = {};
#pragma unroll
        for (int kk = 0; kk < COLUMNS / 16; kk++) {
            uint32_t a[4];
            load_matrices(a, rows + wide_offset(lane & 15, kk * 2 + (lane >> 4)));
            multiply(c[0], a, factor[kk][0], factor[kk][1], T());
            multiply(c[1], a, factor[kk][2], factor[kk][3], T());
        }
        const uint32_t to = partials_of(step) + warp * PARTIAL_BYTES;
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                store_shared_floats(to + (((lane >> 2) + i * 8) * RANK + j * 8 + (lane & 3) * 2) * 4,
                                    c[j][2 * i], c[j][2 * i + 1]);
    }
    // The elements of a fragment's register are those of two rows; their weights are at `at`.
    static MOE_DEVICE uint32_t weigh(uint32_t pair, uint32_t at)
    {
        using S = storage<T>;
        return S::pack(S::low(pair) * load_shared_float(at), S::high(pair) * load_shared_float(at + 4));
    }
    MOE_DEVICE void add_products(int step)
    {
        const uint32_t rows = slot_of(step) + warp * WARP_BYTES, low = low_of(step);
        uint32_t a[4];
        load_matrices_transposed(a, low + low_offset((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1));
        if (p.row_weight) {
            const uint32_t at = low + LOW_BYTES + (lane & 3) * 8;
            a[0] = weigh(a[0], at), a[1] = weigh(a[1], at);
            a[2] = weigh(a[2], at + 32), a[3] = weigh(a[3], at + 32);
        }
#pragma unroll
        for (int n = 0; n < COLUMNS / 16; n++) {
            uint32_t b[4];
            load_matrices_transposed(b, rows + wide_offset(lane & 15, n * 2 + (lane >> 4)));
            multiply(sums[2 * n], a, b[0], b[1], T());
            multiply(sums[2 * n + 1], a, b[2], b[3], T());
        }
    }
    // Adds the warps' parts of a step's rows. Threads: of a row eight, with two columns each.
    MOE_DEVICE void give_low(int step) const
    {
        for (int i = threadIdx.x; i < STEP * RANK / 2; i += blockDim.x) {
            const uint32_t at = partials_of(step) + i * 8;
            float x = 0, y = 0;
            for (int w = 0; w < warps; w++) {
                x += load_shared_float(at + w * PARTIAL_BYTES);
                y += load_shared_float(at + w * PARTIAL_BYTES + 4);
            }
            const int row = i / (RANK / 2), column = i % (RANK / 2) * 2;
            if (column < p.rank)
                *(uint32_t *)((T *)p.low + (row_of(step) + row) * p.rank + column) = storage<T>::pack(x, y);
        }
    }
    MOE_DEVICE void give_sums(int expert)
    {
        const int began = __ldg(p.block_offsets + expert), ends = __ldg(p.block_offsets + expert + 1);
        const pair_sums<T, G> to = {p, lane, column()};
#pragma unroll
        for (int t = 0; t < TILES; t++)
            if (began >= first && ends <= end)
                to.give_tile(expert, t, sums[t]);
            else
                *part_of(p, blockIdx.x, began < first, t) =
                    make_float4(sums[t][0], sums[t][1], sums[t][2], sums[t][3]);
    }
    MOE_DEVICE void begin_expert(int expert, int step)
    {
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[t][i] = 0;
        // give_low has read the partials. Without low there may be no factor.
        if (p.low) read_factor(expert, partials_of(step) + warp * PARTIAL_BYTES);
    }
    MOE_DEVICE void run()
    {
        const int steps = (end - first) * STEPS, vector = (lane & 15) * 8;
        from = (const char *)p.rows + (column() + vector < p.width ? (column() + vector) * 2 : 0);
        read_token(0);
        for (int s = 0; s < SLOTS - 1; s++) {
            if (s < steps) copy(s);
            commit_copies();
        }
        int expert = -1, following = __ldg(p.block_expert + first);
        for (int s = 0; s < steps; s++) {
            wait_copies<SLOTS - 2>();
            __syncthreads(); // step s has landed for all, and all have read step s - 1
            if (s + SLOTS - 1 < steps) copy(s + SLOTS - 1);
            commit_copies();
            if (s % STEPS == 0) {
                if (following != expert) {
                    if (p.gradient && expert >= 0) give_sums(expert);
                    begin_expert(expert = following, s);
                }
                if (s + STEPS < steps) following = __ldg(p.block_expert + first + s / STEPS + 1);
            }
            if (p.low) project(s);
            if (p.gradient) add_products(s);
            if (p.low && s) give_low(s - 1);
        }
        __syncthreads();
        if (p.low) give_low(steps - 1);
        if (p.gradient) give_sums(expert);
    }
};

template <typename T, typename G>
__global__ void __launch_bounds__(MOST_WARPS * 32, 1) low_pair(const __grid_constant__ moe_cuda_low_pair p)
{
    extern __shared__ __align__(1024) char memory[];
    const int blocks = __ldg(p.block_offsets + p.experts), cta = blockIdx.x,
              ctas = min((int)gridDim.x, blocks);
    if (cta >= ctas) return;
    const int first = share_begin(blocks, ctas, cta), end = share_begin(blocks, ctas, cta + 1);
    pair_worker<T, G> one = {
        p,  shared_address(memory), (int)(blockDim.x / 32), warp_number(), (int)(threadIdx.x & 31), first,
        end};
    one.run();
}

// Adds the sums of an expert's tile that several CTAs have left; zeros if the expert has no rows.
template <typename T, typename G>
__global__ void __launch_bounds__(MOST_WARPS * 32)
    add_parts(const __grid_constant__ moe_cuda_low_pair p, int most_ctas)
{
    const int expert = blockIdx.x, tile = blockIdx.y, blocks = __ldg(p.block_offsets + p.experts);
    const int first = __ldg(p.block_offsets + expert), end = __ldg(p.block_offsets + expert + 1);
    const int ctas = min(most_ctas, blocks);
    float sums[4] = {};
    if (first < end) {
        const int from = cta_of(blocks, ctas, first), to = cta_of(blocks, ctas, end - 1);
        if (from == to) return; // this CTA has given the gradient
        for (int i = from; i <= to; i++) {
            const float4 part = *part_of(p, i, share_begin(blocks, ctas, i) > first, tile);
            sums[0] += part.x, sums[1] += part.y, sums[2] += part.z, sums[3] += part.w;
        }
    }
    const pair_sums<T, G> give = {p, (int)(threadIdx.x & 31), (int)(threadIdx.x / 32) * COLUMNS};
    if (first < end || !p.accumulate) give.give_tile(expert, tile, sums);
}

// The sums are cut by the device's SMs, not by those of the launch: their bits must not depend on these.
int ctas_of(const moe_device *device, int warps)
{
    const int fit = device->shared_bytes / (shared_bytes_of(warps) + 1024);
    return device->sms * (fit < 1 ? 1 : fit > MOST_WARPS / warps ? MOST_WARPS / warps : fit);
}

template <typename T, typename G> cudaError_t launch_pair(const moe_launch *on, const moe_cuda_low_pair &p)
{
    const int warps = warps_of(p.width), ctas = ctas_of(on->device, warps);
    cudaError_t status = enqueue(low_pair<T, G>, ctas, 32 * warps, shared_bytes_of(warps), on->stream, p);
    if (status != cudaSuccess || !p.gradient) return status;
    return enqueue(add_parts<T, G>, dim3((unsigned)p.experts, TILES), 32 * warps, 0, on->stream, p, ctas);
}

} // namespace
} // namespace moe

extern "C" uint64_t moe_cuda_low_pair_bytes(const moe_device *device, int64_t blocks, int width, int rank)
{
    using namespace moe;
    const int warps = warps_of(width);
    if (!rank || rank > RANK || warps > MOST_WARPS || shared_bytes_of(warps) > device->shared_bytes) return 0;
    const int64_t ctas = ctas_of(device, warps);
    return (uint64_t)(ctas < blocks ? ctas : blocks) * 2 * TILES * 32 * (uint64_t)warps * sizeof(float4);
}

extern "C" cudaError_t moe_cuda_low_pair_init(const moe_device *device)
{
    using namespace moe;
    return for_every_type(storage_types(), [&](auto t) {
        using T = typename decltype(t)::type;
        return for_every_type(gradient_types<T>(), [&](auto g) {
            return allow_shared(device, low_pair<T, typename decltype(g)::type>, shared_bytes_of(MOST_WARPS));
        });
    });
}

extern "C" cudaError_t moe_cuda_low_pair_launch(const moe_launch *on, const moe_cuda_low_pair *p,
                                                smoe_type gradient_type)
{
    using namespace moe;
    return for_type(storage_types(), on->dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        return for_type(gradient_types<T>(), gradient_type,
                        [&](auto g) { return launch_pair<T, typename decltype(g)::type>(on, *p); });
    });
}
