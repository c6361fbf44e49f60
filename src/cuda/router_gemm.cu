// logits = X Wr^T + br: tiles of 128 tokens x 128 experts, mma.sync m16n8k16 with f32 accumulators, three
// stages of 64 columns by cp.async, rows in shared memory swizzled by 16-byte chunks. One CTA makes the whole
// sum of a tile, in one order: the same bits every time.
//
// The router is bound by reading X (T d 2 bytes); with E > 128 the CTAs of one tile of X run side by side and
// find it in L2.
#include "routing.h"

#include "storage.cuh"

namespace smoe
{
namespace router
{
namespace
{

enum {
    THREADS = 256,
    TILE = 128, // tokens, and experts
    STEP = 64,  // of d, a stage: 128 bytes a row
    STAGES = 3,
    PANEL_BYTES = TILE * STEP * 2,
    STAGE_BYTES = 2 * PANEL_BYTES,
    WARP_ROWS = 64, // a warp's part of the tile: 64 x 32
    WARP_COLUMNS = 32
};

struct problem {
    const void *x, *weight, *bias;
    void *logits;
    int64_t tokens;
    int32_t hidden, experts, logits_bf16;
};

// Address of 16-byte chunk `chunk` of row `row` of a panel.
SMOE_DEVICE uint32_t chunk_address(uint32_t panel, int row, int chunk)
{
    return panel + row * (STEP * 2) + ((chunk ^ (row & 7)) << 4);
}

SMOE_DEVICE void load_matrices(uint32_t (&m)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

SMOE_DEVICE void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __nv_bfloat16)
{
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

SMOE_DEVICE void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half)
{
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 128 rows x 64 columns of a row-major matrix; rows past its `rows` and columns past `hidden` become zeros. A
// thread copies chunk tid % 8 of every 32nd row.
SMOE_DEVICE void load_panel(uint32_t panel, const void *matrix, int64_t first, int64_t rows, int hidden,
                            int column)
{
    const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
    const int left = (int)min(rows - first, (int64_t)TILE), here = column + chunk * 8;
    const char *from = (const char *)matrix + ((first + row) * hidden + here) * 2;
    const uint32_t to = chunk_address(panel, row, chunk); // 32 rows on the swizzle is the same
#pragma unroll
    for (int i = 0; i < TILE / 32; i++) {
        const bool there = row + 32 * i < left && here < hidden;
        copy16_async(to + 32 * i * STEP * 2, there ? from + (int64_t)i * 64 * hidden : matrix,
                     there ? 16 : 0);
    }
}

SMOE_DEVICE void load_stage(const problem &q, uint32_t stage, int step)
{
    if (step * STEP < q.hidden) {
        load_panel(stage, q.x, (int64_t)blockIdx.y * TILE, q.tokens, q.hidden, step * STEP);
        load_panel(stage + PANEL_BYTES, q.weight, (int64_t)blockIdx.x * TILE, q.experts, q.hidden,
                   step * STEP);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// One stage: 4 steps of 16. acc[i][j]: rows 16 i, columns 8 j of the warp's part.
template <typename T>
SMOE_DEVICE void multiply_stage(float (&acc)[4][4][4], uint32_t stage, int warp_row, int warp_column,
                                int lane)
{
    const int a_row = warp_row + (lane & 15), b_row = warp_column + (lane & 7) + (lane >> 4) * 8;
#pragma unroll
    for (int k = 0; k < STEP / 16; k++) {
        uint32_t a[4][4], b[2][4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            load_matrices(a[i], chunk_address(stage, a_row + 16 * i, 2 * k + (lane >> 4)));
#pragma unroll
        for (int j = 0; j < 2; j++)
            load_matrices(b[j], chunk_address(stage + PANEL_BYTES, b_row + 16 * j, 2 * k + (lane >> 3 & 1)));
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                multiply(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1], T());
    }
}

template <typename T>
SMOE_DEVICE void store(const problem &q, int64_t token, int expert, float low, float high)
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

template <typename T> __global__ void __launch_bounds__(THREADS, 2) gemm(const __grid_constant__ problem q)
{
    extern __shared__ __align__(128) char memory[];
    const uint32_t base = shared_address(memory);
    const int warp = warp_number(), lane = threadIdx.x & 31;
    const int warp_row = warp / 4 * WARP_ROWS, warp_column = warp % 4 * WARP_COLUMNS;
    const int steps = (q.hidden + STEP - 1) / STEP;
    float acc[4][4][4] = {};
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) load_stage(q, base + s * STAGE_BYTES, s);
    int stage = 0, ahead = STAGES - 1;
    for (int step = 0; step < steps; step++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads(); // the stage has landed, and all warps have left the one that is loaded next
        load_stage(q, base + ahead * STAGE_BYTES, step + STAGES - 1);
        multiply_stage<T>(acc, base + stage * STAGE_BYTES, warp_row, warp_column, lane);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        ahead = ahead + 1 == STAGES ? 0 : ahead + 1;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int64_t token = (int64_t)blockIdx.y * TILE + warp_row + 16 * i + lane / 4;
            const int expert = (int)blockIdx.x * TILE + warp_column + 8 * j + lane % 4 * 2;
            store<T>(q, token, expert, acc[i][j][0], acc[i][j][1]);
            store<T>(q, token + 8, expert, acc[i][j][2], acc[i][j][3]);
        }
}

} // namespace
} // namespace router
} // namespace smoe

// The grid's y has 65535 tiles of 128 tokens: longer inputs go in several launches.
extern "C" cudaError_t smoe_cuda_router_gemm(const smoe_layer *layer, const void *x,
                                             const void *router_weight, const void *bias, void *logits,
                                             cudaStream_t stream)
{
    using namespace smoe::router;
    const int64_t most = 65535ll * TILE, logit = layer->logits_type == SMOE_BF16 ? 2 : 4;
    const unsigned columns = (unsigned)((layer->experts + TILE - 1) / TILE);
    for (int64_t first = 0; first < layer->tokens; first += most) {
        const int64_t tokens = layer->tokens - first < most ? layer->tokens - first : most;
        const problem q = {(const char *)x + first * layer->hidden * 2,
                           router_weight,
                           bias,
                           (char *)logits + first * layer->experts * logit,
                           tokens,
                           (int32_t)layer->hidden,
                           (int32_t)layer->experts,
                           layer->logits_type == SMOE_BF16};
        const dim3 ctas(columns, (unsigned)((tokens + TILE - 1) / TILE));
        if (layer->dtype == SMOE_F16)
            gemm<__half><<<ctas, THREADS, STAGES * STAGE_BYTES, stream>>>(q);
        else
            gemm<__nv_bfloat16><<<ctas, THREADS, STAGES * STAGE_BYTES, stream>>>(q);
    }
    return cudaGetLastError();
}

extern "C" cudaError_t smoe_cuda_router_gemm_init(void)
{
    using namespace smoe::router;
    const cudaError_t status = cudaFuncSetAttribute(
        (const void *)gemm<__half>, cudaFuncAttributeMaxDynamicSharedMemorySize, STAGES * STAGE_BYTES);
    return status != cudaSuccess
               ? status
               : cudaFuncSetAttribute((const void *)gemm<__nv_bfloat16>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, STAGES * STAGE_BYTES);
}
