/* Times the kernels that make dlogits from dS, in microseconds. A figure is the median of 30 replays of a
 * CUDA graph of 20 launches, divided by 20. Routing is random; the launches use four sets of dS by turns.
 * There are three columns. First: sparse dlogits (softmax over the kept logits), with the results that dWr
 * and the combine of dX read. Second: the same, and also dlogits in f32 for the caller. Third: dense dlogits
 * (softmax over all experts).
 *
 * check_layer_backward.c checks the results of these kernels. */
#include "bench/link_time.h"
#include "cuda/host/device.h"
#include "problem.h"
#include "tests/cuda/gpu.h"
#include "tests/cuda/route_cases.h"

enum { SETS = 4 };

static moe_device device;

typedef struct inputs {
    moe_problem problem;
    moe_cuda_dlogits call;
    gpu_buffer ds, memory[10];
} inputs;

/* The timed work: link i is `call` on set number i % SETS of dS. */
typedef struct dlogits_links {
    const moe_cuda_dlogits *call;
    int64_t padded_rows;
} dlogits_links;

static cudaError_t enqueue_dlogits(const void *work, int i, cudaStream_t stream)
{
    const dlogits_links *links = work;
    moe_cuda_dlogits p = *links->call;
    p.ds += i % SETS * p.ds_parts * links->padded_rows;
    const moe_launch on = {.device = &device, .sms = device.sms, .stream = stream};
    return moe_cuda_dlogits_launch(&on, &p);
}

/* Median microseconds of a launch. */
static float time_launches(const inputs *in, const moe_cuda_dlogits *call)
{
    const dlogits_links links = {call, in->problem.padded_rows};
    return link_time(&links, enqueue_dlogits);
}

/* K distinct experts of every token, and the arrays of the plan that result from them. */
typedef struct host_plan {
    int32_t *ids, *counts, *token_offsets, *token_rows, *block_expert;
} host_plan;

static int32_t *integers(int64_t count)
{
    return calloc((size_t)count, 4);
}

static host_plan make_plan(const moe_problem *p)
{
    const int64_t T = p->layer.tokens, E = p->layer.experts, K = p->layer.topk;
    host_plan h = {integers(T * K), integers(E), integers(T + 1), integers(T * K),
                   integers(p->padded_rows / 64 + 1)};
    uint64_t random = 5;
    int32_t *next = integers(E);
    for (int64_t t = 0; t < T; t++)
        for (int64_t k = 0; k < K; k++) {
            int32_t *ids = h.ids + t * K, again = 1;
            while (again) {
                ids[k] = (int32_t)(next_random(&random) % (uint32_t)E);
                again = 0;
                for (int64_t j = 0; j < k; j++) again |= ids[j] == ids[k];
            }
            h.counts[ids[k]]++;
        }
    for (int64_t e = 0, block = 0; e < E; e++) {
        next[e] = (int32_t)block * 64;
        for (int64_t i = 0; i < (h.counts[e] + 63) / 64; i++) h.block_expert[block++] = (int32_t)e;
    }
    for (int64_t t = 0; t < T; t++) {
        h.token_offsets[t + 1] = (int32_t)((t + 1) * K);
        for (int64_t k = 0; k < K; k++) {
            int64_t rank = 0;
            for (int64_t j = 0; j < K; j++) rank += h.ids[t * K + j] < h.ids[t * K + k];
            h.token_rows[t * K + rank] = next[h.ids[t * K + k]]++;
        }
    }
    free(next);
    return h;
}

static gpu_buffer floats(int64_t count, float scale)
{
    uint64_t random = 7;
    float *host = malloc((size_t)count * 4);
    for (int64_t i = 0; i < count; i++) host[i] = scale * bell(&random);
    const gpu_buffer b = gpu_copy(host, (size_t)count * 4);
    free(host);
    return b;
}

static inputs make_inputs(const smoe_layer *l, int parts)
{
    inputs in = {0};
    moe_problem_init(&in.problem, l);
    const int64_t T = l->tokens, E = l->experts, pairs = T * l->topk, rows = in.problem.padded_rows;
    host_plan h = make_plan(&in.problem);
    gpu_buffer *m = in.memory;
    in.ds = floats(SETS * parts * rows, 1.0f);
    m[0] = floats(T * E, 1.0f);
    m[1] = gpu_copy(h.token_offsets, (size_t)(T + 1) * 4);
    m[2] = gpu_copy(h.token_rows, (size_t)pairs * 4);
    m[3] = gpu_copy(h.block_expert, (size_t)(rows / 64 + 1) * 4);
    m[4] = gpu_copy(h.ids, (size_t)pairs * 4);
    m[5] = gpu_copy(h.counts, (size_t)E * 4);
    m[6] = floats(pairs, 0.1f);
    const int32_t stride = (int32_t)((E + 7) / 8 * 8);
    m[7] = gpu_alloc((size_t)(T * stride) * 2);
    m[8] = gpu_alloc((size_t)pairs * sizeof(moe_cuda_term));
    m[9] = gpu_alloc((size_t)(T * E) * 4);
    in.call = (moe_cuda_dlogits){.layer = *l,
                                 .logits = m[0].memory,
                                 .ds = (float *)(void *)in.ds.memory,
                                 .padded_rows = rows,
                                 .token_offsets = (int32_t *)(void *)m[1].memory,
                                 .token_rows = (int32_t *)(void *)m[2].memory,
                                 .block_expert = (int32_t *)(void *)m[3].memory,
                                 .topk_ids = (int32_t *)(void *)m[4].memory,
                                 .topk_counts = (int32_t *)(void *)m[5].memory,
                                 .topk_weights = (float *)(void *)m[6].memory,
                                 .ds_parts = parts,
                                 .stride = stride,
                                 .dense = m[7].memory,
                                 .terms = (moe_cuda_term *)(void *)m[8].memory};
    free(h.ids), free(h.counts), free(h.token_offsets), free(h.token_rows), free(h.block_expert);
    return in;
}

static void time_shape(int64_t tokens, int64_t experts, int64_t topk, int parts)
{
    smoe_layer l = SMOE_LAYER_INIT;
    l.tokens = tokens, l.experts = experts, l.topk = topk, l.hidden = l.intermediate = 8;
    l.score = SMOE_SCORE_TOPK_SOFTMAX;
    inputs in = make_inputs(&l, parts);
    const float sparse = time_launches(&in, &in.call);
    in.call.dlogits = in.memory[9].memory;
    const float given = time_launches(&in, &in.call);
    in.call.dlogits = NULL, in.call.terms = NULL, in.call.layer.score = SMOE_SCORE_SOFTMAX_TOPK;
    const float dense = time_launches(&in, &in.call);
    printf("T %6lld E %4lld K %2lld, %d parts of dS: sparse %6.2f us, with dlogits %6.2f, dense %6.2f\n",
           (long long)tokens, (long long)experts, (long long)topk, parts, (double)sparse, (double)given,
           (double)dense);
    fflush(stdout);
    gpu_free(in.ds);
    for (int i = 0; i < 10; i++) gpu_free(in.memory[i]);
}

int main(void)
{
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        puts("no GPU: skipped");
        return 77;
    }
    CHECK_CUDA(moe_cuda_open_device(&device, 0));
    time_shape(24576, 128, 8, 1);
    time_shape(24576, 128, 8, 4);
    time_shape(40960, 128, 8, 1);
    time_shape(32768, 256, 16, 1);
    time_shape(32768, 256, 8, 4);
    time_shape(16384, 512, 10, 2);
    time_shape(512, 128, 8, 3);
    return 0;
}
