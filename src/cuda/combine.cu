// Combine: O[t] = sum over the rows r of t of s[r] Y[r], for one chunk of d's columns. Gather and sum in f32,
// rows ascending, no atomics. Bytes: Y 2 R d read, O 2 T d written; runs at the speed of a copy.
//
// The backward's dX[t] = sum of dX~[r] may have the router's term: dlogits Wr lies in O already (2 T d bytes
// more), or where dlogits is nonzero at the token's rows alone each comes with dlogit[r] Wr[e(r)] (Wr, 2 E d
// bytes, stays in L2).
//
// A thread owns eight columns of a token, or twice eight. Tokens may have any number of rows (CSR), taken by
// fours: the indices past the end repeat the last row, so that all loads start before the first is used; its
// sum leaves them out.
#include "launch.h"
#include "storage.cuh"

namespace smoe
{
namespace
{

enum { ROWS_IN_FLIGHT = 4, COLUMNS = 8, MOST_THREADS = 512, FEW_THREADS = 256 };

template <typename T> SMOE_DEVICE void add(float (&sum)[COLUMNS], uint4 v, float weight)
{
    const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum[2 * i] = fmaf(weight, storage<T>::low(pairs[i]), sum[2 * i]);
        sum[2 * i + 1] = fmaf(weight, storage<T>::high(pairs[i]), sum[2 * i + 1]);
    }
}

// blockDim: threads of a token, tokens. gridDim: tokens, parts of a token's columns. A thread's VECTORS
// groups of eight columns stand blockDim.x groups apart.
// blockDim: threads of a token, tokens. gridDim: tokens, parts of a token's columns. A thread's VECTORS
// groups of eight columns stand blockDim.x groups apart.
template <typename T, int VECTORS, bool ROUTER>
__global__ void __launch_bounds__(MOST_THREADS) combine(const __grid_constant__ smoe_cuda_combine p)
{
    const int64_t token = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    const int64_t column = ((int64_t)blockIdx.y * VECTORS * blockDim.x + threadIdx.x) * COLUMNS;
    const int step = (int)blockDim.x * COLUMNS;
    if (token >= p.tokens || column + (VECTORS - 1) * step >= p.columns) return;
    const char *y = (const char *)p.y + column * 2, *weights = (const char *)p.router_weight + column * 2;
    char *out = (char *)p.out + (token * p.hidden + column) * 2;
    const int64_t row_bytes = p.columns * 2;
    const int end = __ldg(p.token_offsets + token + 1);
    float sum[VECTORS][COLUMNS] = {};
    if (p.onto)
#pragma unroll
        for (int j = 0; j < VECTORS; j++) add<T>(sum[j], *(const uint4 *)(out + j * step * 2), 1.0f);
    for (int i = __ldg(p.token_offsets + token); i < end; i += ROWS_IN_FLIGHT) {
        int row[ROWS_IN_FLIGHT];
        int2 term[ROWS_IN_FLIGHT];
        uint4 v[ROWS_IN_FLIGHT][VECTORS], w[ROWS_IN_FLIGHT][VECTORS];
        float weight[ROWS_IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < ROWS_IN_FLIGHT; k++) {
            row[k] = __ldg(p.token_rows + min(i + k, end - 1));
            if (ROUTER) term[k] = __ldg((const int2 *)p.terms + min(i + k, end - 1));
        }
#pragma unroll
        for (int k = 0; k < ROWS_IN_FLIGHT; k++)
#pragma unroll
            for (int j = 0; j < VECTORS; j++) {
                v[k][j] = __ldg((const uint4 *)(y + row[k] * row_bytes + j * step * 2));
                if (ROUTER)
                    w[k][j] = __ldg((const uint4 *)(weights + term[k].x * (p.hidden * 2) + j * step * 2));
            }
#pragma unroll
        for (int k = 0; k < ROWS_IN_FLIGHT; k++)
            weight[k] = p.row_weight ? __ldg(p.row_weight + row[k]) : 1.0f;
#pragma unroll
        for (int k = 0; k < ROWS_IN_FLIGHT; k++)
            if (i + k < end)
#pragma unroll
                for (int j = 0; j < VECTORS; j++) {
                    add<T>(sum[j], v[k][j], weight[k]);
                    if (ROUTER) add<T>(sum[j], w[k][j], __uint_as_float((uint32_t)term[k].y));
                }
    }
    using S = storage<T>;
#pragma unroll
    for (int j = 0; j < VECTORS; j++)
        store_streaming16(out + j * step * 2, {S::pack(sum[j][0], sum[j][1]), S::pack(sum[j][2], sum[j][3]),
                                               S::pack(sum[j][4], sum[j][5]), S::pack(sum[j][6], sum[j][7])});
}

template <typename T, int VECTORS, bool ROUTER> void launch(const smoe_cuda_combine &p, cudaStream_t stream)
{
    const int64_t pieces = p.columns / COLUMNS / VECTORS;
    int64_t parts = smoe_divide_up(pieces, MOST_THREADS);
    while (pieces % parts) parts++;
    const unsigned across = (unsigned)(pieces / parts),
                   tokens = across >= FEW_THREADS ? 1 : FEW_THREADS / across;
    const dim3 block(across, tokens), grid((unsigned)smoe_divide_up(p.tokens, tokens), (unsigned)parts);
    combine<T, VECTORS, ROUTER><<<grid, block, 0, stream>>>(p);
}

template <typename T> void launch(const smoe_cuda_combine &p, cudaStream_t stream)
{
    if (p.terms)
        launch<T, 1, true>(p, stream); // rows of Wr are in flight too
    else if (p.columns % (2 * COLUMNS) == 0)
        launch<T, 2, false>(p, stream);
    else
        launch<T, 1, false>(p, stream);
}

} // namespace
} // namespace smoe

extern "C" cudaError_t smoe_cuda_combine_launch(const smoe_cuda_combine *p, smoe_type dtype,
                                                cudaStream_t stream)
{
    if (dtype == SMOE_BF16)
        smoe::launch<__nv_bfloat16>(*p, stream);
    else
        smoe::launch<__half>(*p, stream);
    return cudaGetLastError();
}
