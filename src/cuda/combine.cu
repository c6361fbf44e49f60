// Combine: O[t] = sum over the rows r of t of s[r] Y[r], for one chunk of d's columns. Gather and sum in f32,
// rows ascending, no atomics. Bytes: Y 2 R d read, O 2 T d written; runs at the speed of a copy.
//
// A thread owns eight columns of a token. Tokens may have any number of rows (CSR), taken by fours: the
// indices past the end repeat the last row, so that all loads start before the first is used; its sum leaves
// them out.
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

// blockDim: threads of a token, tokens. gridDim: tokens, parts of a token's columns.
template <typename T> __global__ void __launch_bounds__(MOST_THREADS) combine(const smoe_cuda_combine p)
{
    const int64_t token = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    const int64_t column = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * COLUMNS;
    if (token >= p.tokens || column >= p.columns) return;
    const char *y = (const char *)p.y + column * 2;
    const int64_t row_bytes = p.columns * 2;
    const int end = __ldg(p.token_offsets + token + 1);
    float sum[COLUMNS] = {};
    for (int i = __ldg(p.token_offsets + token); i < end; i += ROWS_IN_FLIGHT) {
        int row[ROWS_IN_FLIGHT];
        uint4 v[ROWS_IN_FLIGHT];
        float weight[ROWS_IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < ROWS_IN_FLIGHT; k++) row[k] = __ldg(p.token_rows + min(i + k, end - 1));
#pragma unroll
        for (int k = 0; k < ROWS_IN_FLIGHT; k++) v[k] = __ldg((const uint4 *)(y + row[k] * row_bytes));
#pragma unroll
        for (int k = 0; k < ROWS_IN_FLIGHT; k++) weight[k] = __ldg(p.row_weight + row[k]);
#pragma unroll
        for (int k = 0; k < ROWS_IN_FLIGHT; k++)
            if (i + k < end) add<T>(sum, v[k], weight[k]);
    }
    using S = storage<T>;
    store_streaming16(
        (char *)p.out + (token * p.hidden + column) * 2,
        {S::pack(sum[0], sum[1]), S::pack(sum[2], sum[3]), S::pack(sum[4], sum[5]), S::pack(sum[6], sum[7])});
}

} // namespace
} // namespace smoe

extern "C" cudaError_t smoe_cuda_combine_launch(const smoe_cuda_combine *p, smoe_type dtype,
                                                cudaStream_t stream)
{
    const int64_t pieces = p->columns / smoe::COLUMNS, parts = smoe_divide_up(pieces, smoe::MOST_THREADS);
    const unsigned across = (unsigned)smoe_divide_up(pieces, parts);
    const unsigned tokens = across >= smoe::FEW_THREADS ? 1 : smoe::FEW_THREADS / across;
    const dim3 block(across, tokens), grid((unsigned)smoe_divide_up(p->tokens, tokens), (unsigned)parts);
    if (dtype == SMOE_BF16)
        smoe::combine<__nv_bfloat16><<<grid, block, 0, stream>>>(*p);
    else
        smoe::combine<__half><<<grid, block, 0, stream>>>(*p);
    return cudaGetLastError();
}
