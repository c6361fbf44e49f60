// Combine: O[t] = sum over the rows r of token t of s(r) Y[r], for one column chunk of d. The same kernel
// computes the backward's dX[t] = sum over r of dX~[r].
// Terms: docs/glossary.md; symbols: include/smoe.h.
//
// Shapes: Y (padded rows, columns of the chunk), O (T, d). FLOPs 2 R d over all chunks. Bytes over all
// chunks: 2 R d of Y read, 2 T d of O written, and the indices and weights of the rows. The sum is in f32,
// in ascending order of rows, without atomics.
//
// dX also includes the router's term dlogits Wr, in one of two ways:
// - If dlogits is dense, dX holds dlogits Wr before this kernel runs, and the sum starts from it. That is
//   2 T d bytes more.
// - If dlogits is sparse, each row r of expert e adds dlogits[t][e] Wr[e]. Wr has 2 E d bytes, few enough for
//   L2 to keep.
//
// Tile: a thread computes one to four vectors (8 columns each) of one token. The kernel has two paths:
// - The long path is for any number of rows. token_offsets and token_rows list the rows of a token. A thread
//   loads up to four rows at a time. If fewer rows are left, the thread loads the last row again and does
//   not add it. So no branch stands between the four loads, and all of them start before the first result
//   is needed.
// - The short path is for a fixed K. A token with few rows is bound by latency: the index of a row must
//   arrive before the row can be loaded. If every token has exactly K rows, the row indices of token t start
//   at token_rows[K t]. The path assumes this and reads them there, without waiting for token_offsets. At the
//   same time it reads R to check the assumption: no token has more than K rows here, so R = T K if and only
//   if every token has K rows. If R is smaller, the thread takes the long path. For K > 4 the thread takes
//   four rows at a time, and loads the indices of the next four together with these rows.
//
// The first line of this table that applies decides. "Fixed" means that the entry is not FROM_ROWS and that
// there is no rounding. C is the number of columns of the chunk.
//
//   condition                                        path   rows at once  vectors
//   sparse dlogits                                   long   4             1
//   fixed, K = 1, C a multiple of 32                 short  1             4
//   fixed, K <= 2, C a multiple of 24                short  2             3
//   fixed, K <= 2, C a multiple of 16                short  2             2
//   fixed, C a multiple of 16 and > 1024             short  4             2
//   fixed                                            short  4             1
//   C a multiple of 16 and > 1024                    long   4             2
//   all others                                       long   4             1
//
// A CTA has about 128 threads (64 in the line with 3 vectors): it computes one token, or several if a token
// needs fewer threads. Many CTAs of this size are on an SM at once, so while some wait for indices,
// others have loads in flight. A token that needs more threads has a CTA of up to 512 (256 on the short path
// for K > 4); beyond that its columns are shared among several CTAs.
#include "common/instances.cuh"
#include "common/launch.cuh"
#include "common/storage.cuh"
#include "host/launch.h"

namespace moe
{
namespace
{

enum { COLUMNS = 8, SHORT_COLUMNS = 1024, FEW_THREADS = 128, FEWEST_THREADS = 64, MOST_PARTS = 65535 };

template <typename T> MOE_DEVICE void add(float (&sum)[COLUMNS], uint4 v, float weight)
{
    const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum[2 * i] = fmaf(weight, storage<T>::low(pairs[i]), sum[2 * i]);
        sum[2 * i + 1] = fmaf(weight, storage<T>::high(pairs[i]), sum[2 * i + 1]);
    }
}

// Entries of token_rows from `at` on, where end > 0. Past the end the last entry is repeated, also if `at` is
// already past the end.
template <int ROWS> MOE_DEVICE void read_rows(int (&row)[ROWS], const moe_cuda_combine &p, int at, int end)
{
#pragma unroll
    for (int k = 0; k < ROWS; k++) row[k] = __ldg(p.token_rows + min(at + k, end - 1));
}

// What a thread sums: its groups of eight columns (blockDim.x groups apart) of some rows, with the rows'
// weights.
template <int ROWS, int VECTORS> struct row_vectors {
    uint4 v[ROWS][VECTORS];
    float weight[ROWS];
    MOE_DEVICE void fetch(const moe_cuda_combine &p, const int (&row)[ROWS], int64_t column)
    {
        const char *y = (const char *)p.y + column * 2;
        const int64_t row_bytes = p.columns * 2;
#pragma unroll
        for (int k = 0; k < ROWS; k++)
#pragma unroll
            for (int j = 0; j < VECTORS; j++)
                v[k][j] = __ldg((const uint4 *)(y + row[k] * row_bytes + j * (int)blockDim.x * COLUMNS * 2));
#pragma unroll
        for (int k = 0; k < ROWS; k++) weight[k] = p.row_weight ? __ldg(p.row_weight + row[k]) : 1.0f;
    }
};

// What the sums start from.
template <typename T, int VECTORS>
MOE_DEVICE void begin(float (&sum)[VECTORS][COLUMNS], const moe_cuda_combine &p, const char *out)
{
#pragma unroll
    for (int j = 0; j < VECTORS; j++) {
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) sum[j][i] = 0.0f;
        if (p.onto) add<T>(sum[j], *(const uint4 *)(out + j * (int)blockDim.x * COLUMNS * 2), 1.0f);
    }
}

template <typename T> MOE_DEVICE void store(char *out, const float (&sum)[COLUMNS])
{
    using S = storage<T>;
    *(uint4 *)out = make_uint4(S::pack(sum[0], sum[1]), S::pack(sum[2], sum[3]), S::pack(sum[4], sum[5]),
                               S::pack(sum[6], sum[7]));
}

// The first rows of token `first` / topk, if every token has topk rows. If there are T topk rows, no pair was
// skipped, so the rows of token t are at t topk in token_rows. The indices are loaded before this is known.
// If it is not so, returns false, and all rows are 0. The callers return after they have loaded the rows,
// because with a branch before that the compiler moves each load to its first use, and the loads would run
// one after the other.
template <int ROWS> MOE_DEVICE bool read_first_rows(int (&row)[ROWS], const moe_cuda_combine &p, int first)
{
    read_rows(row, p, first, first + p.topk);
    const bool all = __ldg(p.token_offsets + p.tokens) == p.tokens * p.topk;
#pragma unroll
    for (int k = 0; k < ROWS; k++) row[k] = all ? row[k] : 0;
    return all;
}

// For 1 <= topk <= ROWS. Returns false, and has stored nothing, if pairs were skipped.
template <typename T, int ROWS, int VECTORS>
MOE_DEVICE bool combine_topk(const moe_cuda_combine &p, int64_t token, int64_t column, char *out)
{
    int row[ROWS];
    const bool all = read_first_rows(row, p, (int)token * p.topk);
    row_vectors<ROWS, VECTORS> some;
    some.fetch(p, row, column);
    if (!all) return false;
#pragma unroll
    for (int j = 0; j < VECTORS; j++) {
        float sum[1][COLUMNS];
        char *to = out + j * (int)blockDim.x * COLUMNS * 2;
        begin<T>(sum, p, to);
#pragma unroll
        for (int k = 0; k < ROWS; k++)
            if (k < p.topk) add<T>(sum[0], some.v[k][j], some.weight[k]);
        store<T>(to, sum[0]);
    }
    return true;
}

// For topk > ROWS, ROWS at a time. While the rows of a batch are on their way, the indices of the next batch
// are, too. Returns as combine_topk.
template <typename T, int ROWS, int VECTORS>
MOE_DEVICE bool combine_batches(const moe_cuda_combine &p, int64_t token, int64_t column, char *out)
{
    const int first = (int)token * p.topk, end = first + p.topk;
    int row[ROWS];
    const bool all = read_first_rows(row, p, first);
    float sum[VECTORS][COLUMNS];
    for (int i = first; i < end; i += ROWS) {
        row_vectors<ROWS, VECTORS> some;
        some.fetch(p, row, column);
        if (!all) return false;
        if (i == first) begin<T>(sum, p, out);
        read_rows(row, p, i + ROWS, end);
#pragma unroll
        for (int k = 0; k < ROWS; k++)
            if (i + k < end)
#pragma unroll
                for (int j = 0; j < VECTORS; j++) add<T>(sum[j], some.v[k][j], some.weight[k]);
    }
#pragma unroll
    for (int j = 0; j < VECTORS; j++) store<T>(out + j * (int)blockDim.x * COLUMNS * 2, sum[j]);
    return true;
}

// Any number of rows, ROWS at a time.
template <typename T, int ROWS, int VECTORS, bool ROUTER>
MOE_DEVICE void combine_rows(const moe_cuda_combine &p, int64_t token, int64_t column, char *out)
{
    const char *weights = (const char *)p.router_weight + column * 2;
    const int step = (int)blockDim.x * COLUMNS;
    const int first = __ldg(p.token_offsets + token), end = __ldg(p.token_offsets + token + 1);
    float sum[VECTORS][COLUMNS];
    begin<T>(sum, p, out);
    for (int i = first; i < end; i += ROWS) {
        int row[ROWS];
        int2 term[ROWS];
        uint4 w[ROWS][VECTORS];
        row_vectors<ROWS, VECTORS> some;
        read_rows(row, p, i, end);
        if (ROUTER)
#pragma unroll
            for (int k = 0; k < ROWS; k++) term[k] = __ldg((const int2 *)p.terms + min(i + k, end - 1));
        some.fetch(p, row, column);
        if (ROUTER)
#pragma unroll
            for (int k = 0; k < ROWS; k++)
#pragma unroll
                for (int j = 0; j < VECTORS; j++)
                    w[k][j] = __ldg((const uint4 *)(weights + term[k].x * (p.hidden * 2) + j * step * 2));
#pragma unroll
        for (int k = 0; k < ROWS; k++)
            if (i + k < end)
#pragma unroll
                for (int j = 0; j < VECTORS; j++) {
                    add<T>(sum[j], some.v[k][j], some.weight[k]);
                    if (ROUTER) add<T>(sum[j], w[k][j], __uint_as_float((uint32_t)term[k].y));
                }
    }
#pragma unroll
    for (int j = 0; j < VECTORS; j++) store<T>(out + j * step * 2, sum[j]);
}

// The path, and with it the most threads of a CTA. On Hopper the loop over batches takes up to 80 registers,
// so three CTAs of 256 threads fit an SM. On other GPUs some of these kernels would spill.
enum path { LONG, SHORT, SHORT_BATCHES }; // SHORT: 1 <= topk <= ROWS; SHORT_BATCHES: topk > ROWS
constexpr int most_threads(path path)
{
    return path == SHORT_BATCHES ? 256 : 512;
}

constexpr int least_ctas(path path)
{
#if __CUDA_ARCH__ == 900
    return path == SHORT_BATCHES ? 3 : 2;
#else
    return path == SHORT_BATCHES ? 2 : 1;
#endif
}

// blockDim: (threads of a token, tokens). gridDim: (CTAs for all tokens, parts of a token's columns).
template <typename T, int ROWS, int VECTORS, path PATH, bool ROUTER>
__global__ void __launch_bounds__(most_threads(PATH), least_ctas(PATH))
    combine(const __grid_constant__ moe_cuda_combine p)
{
    enum { AT_ONCE = PATH == SHORT && VECTORS > 2 ? 1 : VECTORS }; // of the long path: registers
    const int64_t token = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    const int64_t column = ((int64_t)blockIdx.y * VECTORS * blockDim.x + threadIdx.x) * COLUMNS;
    const int step = (int)blockDim.x * COLUMNS;
    if (token >= p.tokens || column + (VECTORS - 1) * step >= p.columns) return;
    char *out = (char *)p.out + (token * p.hidden + column) * 2;
    if (PATH == SHORT && combine_topk<T, ROWS, VECTORS>(p, token, column, out)) return;
    if (PATH == SHORT_BATCHES && combine_batches<T, ROWS, VECTORS>(p, token, column, out)) return;
    for (int j = 0; j < VECTORS; j += AT_ONCE)
        combine_rows<T, ROWS, AT_ONCE, ROUTER>(p, token, column + j * step, out + j * step * 2);
}

// CTAs of about `threads`.
template <typename T, int ROWS, int VECTORS, path PATH, bool ROUTER = false>
cudaError_t launch(const moe_cuda_combine &p, unsigned threads, const moe_launch *on)
{
    const int64_t shares = p.columns / COLUMNS / VECTORS, fewest = moe_divide_up(shares, most_threads(PATH));
    int64_t parts = fewest;
    while (shares % parts) parts++;
    if (VECTORS == 1 && parts > MOST_PARTS) parts = fewest; // the last part is narrower
    const unsigned across = (unsigned)moe_divide_up(shares, parts),
                   tokens = across >= threads ? 1 : threads / across;
    const dim3 cta(across, tokens), grid((unsigned)moe_divide_up(p.tokens, tokens), (unsigned)parts);
    return enqueue(combine<T, ROWS, VECTORS, PATH, ROUTER>, grid, cta, 0, on->stream, p);
}

template <typename T> cudaError_t launch(const moe_cuda_combine &p, const moe_launch *on)
{
    const bool even = p.topk > 0, twice = p.columns % (2 * COLUMNS) == 0;
    const bool wide = twice && p.columns > SHORT_COLUMNS;
    if (p.terms) return launch<T, 4, 1, LONG, true>(p, FEW_THREADS, on); // rows of Wr are in flight too
    if (p.topk == 1 && p.columns % (4 * COLUMNS) == 0) return launch<T, 1, 4, SHORT>(p, FEW_THREADS, on);
    if (even && p.topk <= 2 && p.columns % (3 * COLUMNS) == 0)
        return launch<T, 2, 3, SHORT>(p, FEWEST_THREADS, on);
    if (even && p.topk <= 2 && twice) return launch<T, 2, 2, SHORT>(p, FEW_THREADS, on);
    if (even && p.topk <= 4 && wide) return launch<T, 4, 2, SHORT>(p, FEW_THREADS, on);
    if (even && p.topk <= 4) return launch<T, 4, 1, SHORT>(p, FEW_THREADS, on);
    if (even && wide) return launch<T, 4, 2, SHORT_BATCHES>(p, FEW_THREADS, on);
    if (even) return launch<T, 4, 1, SHORT_BATCHES>(p, FEW_THREADS, on);
    if (wide) return launch<T, 4, 2, LONG>(p, FEW_THREADS, on);
    return launch<T, 4, 1, LONG>(p, FEW_THREADS, on);
}

// A grid has at most 65535 CTAs in y. There are never more parts where a thread has several groups of 8
// columns.
static_assert((1 << 20) / COLUMNS / 2 <= MOST_PARTS + 1, "2^16 shares make an even cut");

} // namespace
} // namespace moe

extern "C" cudaError_t moe_cuda_combine_launch(const moe_launch *on, const moe_cuda_combine *p)
{
    using namespace moe;
    return for_type(storage_types(), on->dtype,
                    [&](auto t) { return launch<typename decltype(t)::type>(*p, on); });
}
