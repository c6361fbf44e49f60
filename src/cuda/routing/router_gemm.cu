// Router logits: logits = X Wr^T + br.
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Shapes: X (T, d), Wr (E, d), br (E) or none, logits (T, E). FLOPs 2 T E d.
//
// Bytes:
// - X: 2 T d, read once for each 128 experts. With E > 128 the CTAs that read the same rows of X are
//   neighbours in the grid, so they run side by side and find X in L2.
// - Wr: 2 E d, read by every row tile. L2 can serve every row tile after the first.
// - logits: 2 T E (bf16) or 4 T E (f32) written.
//
// Tile: 128 tokens by 128 experts. If that gives fewer than 96 tiles, many SMs would have no work; then the
// tile is 32 tokens by 128 experts. cp.async loads 64 columns of d at a time into a ring of 3 slots in
// shared memory (8 slots for the small tile, 4 on GPUs with less than 160 KB). mma.sync m16n8k16 multiplies,
// with f32 accumulators. One CTA sums each logit over d, in the same order for both tiles, so the bits do not
// depend on the choice of the tile.
#include "host/routing.h"

#include "common/instances.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/storage.cuh"

namespace moe
{
namespace router
{
namespace
{

enum { THREADS = 256, COLUMNS = 128, STEP = 64 /* of d, a slot: 128 bytes a row */ };

// ROWS x 128 tiles: 8 warps, each WARP_ROWS x WARP_COLUMNS.
template <int ROWS_, int SLOTS_> struct tile {
    enum {
        ROWS = ROWS_,
        SLOTS = SLOTS_,
        X_BYTES = ROWS * STEP * 2,
        SLOT_BYTES = X_BYTES + COLUMNS * STEP * 2,
        BYTES = SLOTS * SLOT_BYTES,
        WARP_ROWS = ROWS < 64 ? ROWS : 64,
        WARPS_DOWN = ROWS / WARP_ROWS,
        WARP_COLUMNS = COLUMNS / (8 / WARPS_DOWN),
        DOWN = WARP_ROWS / 16, // products of a warp
        ACROSS = WARP_COLUMNS / 8
    };
};

typedef tile<128, 3> large_tile;
typedef tile<32, 8> small_tile;
typedef tile<32, 4> short_tile; // the small tile for GPUs with less shared memory

struct problem {
    const void *x, *weight, *bias;
    void *logits;
    int64_t tokens;
    int32_t hidden, experts, logits_bf16;
};

// Address of 16-byte vector `vector` of row `row` of a subtile.
MOE_DEVICE uint32_t vector_address(uint32_t subtile, int row, int vector)
{
    return subtile + row * (STEP * 2) + ((vector ^ (row & 7)) << 4);
}

// Copies ROWS rows x 64 columns of a row-major matrix. Rows past `rows` and columns past `hidden` become
// zeros. A thread copies vector tid % 8 of every 32nd row.
template <int ROWS>
MOE_DEVICE void load_subtile(uint32_t subtile, const void *matrix, int64_t first, int64_t rows, int hidden,
                             int column)
{
    const int row = threadIdx.x / 8, vector = threadIdx.x % 8;
    const int left = (int)min(rows - first, (int64_t)ROWS), here = column + vector * 8;
    const char *from = (const char *)matrix + ((first + row) * hidden + here) * 2;
    const uint32_t to = vector_address(subtile, row, vector); // 32 rows on the swizzle is the same
#pragma unroll
    for (int i = 0; i < ROWS / 32; i++) {
        const bool there = row + 32 * i < left && here < hidden;
        copy16_async(to + 32 * i * STEP * 2, there ? from + (int64_t)i * 64 * hidden : matrix,
                     there ? 16 : 0);
    }
}

template <class C> MOE_DEVICE void load_slot(const problem &q, uint32_t slot, int step)
{
    if (step * STEP < q.hidden) {
        load_subtile<C::ROWS>(slot, q.x, (int64_t)blockIdx.y * C::ROWS, q.tokens, q.hidden, step * STEP);
        load_subtile<COLUMNS>(slot + C::X_BYTES, q.weight, (int64_t)blockIdx.x * COLUMNS, q.experts, q.hidden,
                              step * STEP);
    }
    commit_copies();
}

// One slot: 4 steps of 16. acc[i][j]: rows 16 i, columns 8 j of the warp's part.
template <typename T, class C>
MOE_DEVICE void multiply_slot(float (&acc)[C::DOWN][C::ACROSS][4], uint32_t slot, int warp_row,
                              int warp_column, int lane)
{
    const int a_row = warp_row + (lane & 15), b_row = warp_column + (lane & 7) + (lane >> 4) * 8;
#pragma unroll
    for (int k = 0; k < STEP / 16; k++) {
        uint32_t a[C::DOWN][4], b[C::ACROSS / 2][4];
#pragma unroll
        for (int i = 0; i < C::DOWN; i++)
            load_matrices(a[i], vector_address(slot, a_row + 16 * i, 2 * k + (lane >> 4)));
#pragma unroll
        for (int j = 0; j < C::ACROSS / 2; j++)
            load_matrices(b[j], vector_address(slot + C::X_BYTES, b_row + 16 * j, 2 * k + (lane >> 3 & 1)));
#pragma unroll
        for (int i = 0; i < C::DOWN; i++)
#pragma unroll
            for (int j = 0; j < C::ACROSS; j++)
                multiply(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1], T());
    }
}

template <typename T>
MOE_DEVICE void store(const problem &q, int64_t token, int expert, float low, float high)
{
    const T *bias = (const T *)q.bias;
    const bool second = expert + 1 < q.experts;
    if (token >= q.tokens || expert >= q.experts) return;
    if (bias) {
        low += to_float(bias[expert]);
        if (second) high += to_float(bias[expert + 1]);
    }
    const int64_t at = token * q.experts + expert;
    const bool paired = second && q.experts % 2 == 0;
    if (q.logits_bf16) {
        __nv_bfloat16 *to = (__nv_bfloat16 *)q.logits + at;
        if (paired) {
            *(uint32_t *)to = storage<__nv_bfloat16>::pack(low, high);
            return;
        }
        to[0] = __float2bfloat16_rn(low);
        if (second) to[1] = __float2bfloat16_rn(high);
        return;
    }
    float *to = (float *)q.logits + at;
    if (paired) {
        *(float2 *)to = make_float2(low, high);
        return;
    }
    to[0] = low;
    if (second) to[1] = high;
}

template <typename T, class C>
__global__ void __launch_bounds__(THREADS, C::ROWS == 128 ? 2 : 1) gemm(const __grid_constant__ problem q)
{
    extern __shared__ __align__(128) char memory[];
    const uint32_t base = shared_address(memory);
    const int warp = warp_number(), lane = threadIdx.x & 31;
    const int warp_row = warp % C::WARPS_DOWN * C::WARP_ROWS;
    const int warp_column = warp / C::WARPS_DOWN * C::WARP_COLUMNS;
    const int steps = (q.hidden + STEP - 1) / STEP;
    float acc[C::DOWN][C::ACROSS][4] = {};
#pragma unroll
    for (int s = 0; s < C::SLOTS - 1; s++) load_slot<C>(q, base + s * C::SLOT_BYTES, s);
    int slot = 0, ahead = C::SLOTS - 1;
    for (int step = 0; step < steps; step++) {
        wait_copies<C::SLOTS - 2>();
        __syncthreads(); // the slot's data have arrived, and all warps have finished with the slot that is
                         // loaded next
        load_slot<C>(q, base + ahead * C::SLOT_BYTES, step + C::SLOTS - 1);
        multiply_slot<T, C>(acc, base + slot * C::SLOT_BYTES, warp_row, warp_column, lane);
        slot = slot + 1 == C::SLOTS ? 0 : slot + 1;
        ahead = ahead + 1 == C::SLOTS ? 0 : ahead + 1;
    }
#pragma unroll
    for (int i = 0; i < C::DOWN; i++)
#pragma unroll
        for (int j = 0; j < C::ACROSS; j++) {
            const int64_t token = (int64_t)blockIdx.y * C::ROWS + warp_row + 16 * i + lane / 4;
            const int expert = (int)blockIdx.x * COLUMNS + warp_column + 8 * j + lane % 4 * 2;
            store<T>(q, token, expert, acc[i][j][0], acc[i][j][1]);
            store<T>(q, token + 8, expert, acc[i][j][2], acc[i][j][3]);
        }
}

template <class C> cudaError_t launch(const problem &q, smoe_type dtype, const moe_launch *on)
{
    const dim3 ctas((unsigned)((q.experts + COLUMNS - 1) / COLUMNS),
                    (unsigned)((q.tokens + C::ROWS - 1) / C::ROWS));
    return for_type(storage_types(), dtype, [&](auto t) {
        return enqueue(gemm<typename decltype(t)::type, C>, ctas, THREADS, C::BYTES, on->stream, q);
    });
}

template <class C> cudaError_t raise_limits(const moe_device *device)
{
    return for_every_type(storage_types(), [&](auto t) {
        return allow_shared(device, gemm<typename decltype(t)::type, C>, C::BYTES);
    });
}

static_assert(length_of(logits_types()) == 2, "problem.logits_bf16");

// Are there enough large tiles for most SMs?
bool prefers_large(int64_t tokens, int64_t experts)
{
    return (tokens + 127) / 128 * ((experts + 127) / 128) >= 96;
}

} // namespace
} // namespace router
} // namespace moe

// A grid has at most 65535 tiles in y, so longer inputs take several launches.
extern "C" cudaError_t moe_cuda_router_gemm(const moe_launch *on, const smoe_layer *layer, const void *x,
                                            const void *router_weight, const void *bias, void *logits)
{
    using namespace moe::router;
    const int64_t most = 65535ll * 32, logit = moe_type_bytes(layer->logits_type);
    cudaError_t status = cudaSuccess;
    for (int64_t first = 0; first < layer->tokens && status == cudaSuccess; first += most) {
        const int64_t tokens = layer->tokens - first < most ? layer->tokens - first : most;
        const problem q = {(const char *)x + first * layer->hidden * 2,
                           router_weight,
                           bias,
                           (char *)logits + first * layer->experts * logit,
                           tokens,
                           (int32_t)layer->hidden,
                           (int32_t)layer->experts,
                           layer->logits_type == SMOE_TYPE_BF16};
        status = prefers_large(tokens, layer->experts)          ? launch<large_tile>(q, layer->dtype, on)
                 : on->device->shared_bytes < small_tile::BYTES ? launch<short_tile>(q, layer->dtype, on)
                                                                : launch<small_tile>(q, layer->dtype, on);
    }
    return status;
}

extern "C" cudaError_t moe_cuda_router_gemm_init(const moe_device *device)
{
    using namespace moe::router;
    cudaError_t status = raise_limits<large_tile>(device);
    if (status == cudaSuccess) status = raise_limits<short_tile>(device);
    return status == cudaSuccess ? raise_limits<small_tile>(device) : status;
}
