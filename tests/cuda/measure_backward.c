/* Times of the cuda backend's backward of the experts against the bound measured in the same run: the same
 * FLOPs through four cublasGemmStridedBatchedEx (uniform counts, gathered rows) plus the combine's bytes, (R
 * d + T d) 2, at the speed of a copy.
 *
 *   measure_backward [uniform|random|skewed] [chunks] [bf16|f32] [keep|reuse] shape...
 *
 * Shapes as T,d,n,E,K or a name of the paper's suite. Sustained: every job runs 50 ms untimed, then 60 ms,
 * jobs in turn, three rounds; medians. The pass is a CUDA graph; its stages are timed apart, between events.
 *
 * keep or reuse: dH in a place of its own, or in H's. With reuse dW1 is compared with cuBLAS's (uniform
 * routing), but the times mean little, as every pass reads the dH that the one before left for H. */
#define _GNU_SOURCE
#include "gpu.h"

#include <cublas_v2.h>
#include <math.h>
#include <smoe.h>

typedef struct shape {
    const char *name;
    int64_t T, d, n, E, K;
} shape;

static const shape paper[] = {
    {"1.4B-n256", 40960, 768, 256, 128, 8},    {"1.4B-n512", 40960, 768, 512, 64, 4},
    {"1.4B-n1024", 40960, 768, 1024, 32, 2},   {"7B-n256", 24576, 1536, 256, 128, 8},
    {"7B-n512", 24576, 1536, 512, 64, 4},      {"7B-n1024", 24576, 1536, 1024, 32, 2},
    {"30B-n256", 32768, 4096, 256, 256, 16},   {"30B-n512", 32768, 4096, 512, 128, 8},
    {"30B-n1024", 32768, 4096, 1024, 64, 4},   {"120B-n512", 32768, 4096, 512, 256, 16},
    {"120B-n1024", 32768, 4096, 1024, 128, 8}, {"120B-n2048", 32768, 4096, 2048, 64, 4},
};

enum {
    STAGES = 5,
    GEMMS = 4,
    MOST_TIMES = 1 << 14,
    PREHEAT_MS = 50,
    TIMED_MS = 60,
    ROUNDS = 3,
    EVENTS = 2048
};
static const char *const stage_names[STAGES] = {"dh", "dw2", "dw1", "dx_rows", "dx"};

typedef struct times {
    int count;
    float ms[MOST_TIMES];
} times;

static int by_size(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double median(times *t)
{
    qsort(t->ms, (size_t)t->count, sizeof t->ms[0], by_size);
    return t->count ? t->ms[t->count / 2] : 0;
}

typedef struct bench {
    shape s;
    int64_t R;
    smoe_context *context;
    smoe_layer layer;
    smoe_forward_args forward;
    smoe_backward_args args;
    cublasHandle_t cublas;
    cudaStream_t stream;
    cudaGraphExec_t pass;
    void *x, *dout, *gathered, *w1, *w2, *h, *a, *out; /* bf16; out is large enough for every GEMM */
    cudaEvent_t *events;
    int stage_events; /* recorded by on_stage; -1: none wanted */
    smoe_stage stages[EVENTS];
} bench;

static uint64_t random64(uint64_t *s)
{
    *s += 0x9E3779B97F4A7C15ull;
    uint64_t z = *s;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

/* Uniform: equal counts, tokens in any order. */
static int32_t *route(const shape *s, const char *routing)
{
    int32_t *ids = malloc((size_t)(s->T * s->K) * 4), *order = malloc((size_t)s->T * 4);
    double total = 0, *cumulative = malloc((size_t)s->E * 8);
    uint64_t seed = 12345;
    for (int64_t e = 0; e < s->E; e++) cumulative[e] = total += 1.0 / (double)(e + 1);
    for (int64_t t = 0; t < s->T; t++) order[t] = (int32_t)t;
    for (int64_t t = s->T - 1; t > 0; t--) {
        const int64_t j = (int64_t)(random64(&seed) % (uint64_t)(t + 1));
        const int32_t other = order[j];
        order[j] = order[t], order[t] = other;
    }
    for (int64_t t = 0; t < s->T; t++)
        for (int64_t k = 0; k < s->K; k++) {
            int32_t *row = ids + (routing[0] == 'u' ? order[t] : t) * s->K, id = 0;
            if (routing[0] == 'u')
                id = (int32_t)((t * s->K + k + t * s->K / s->E) % s->E);
            else
                for (int again = 1; again;) {
                    if (routing[0] == 's') {
                        const double u = (double)(random64(&seed) >> 11) * 0x1p-53 * total;
                        for (id = 0; id < s->E - 1 && cumulative[id] < u; id++) {
                        }
                    } else
                        id = (int32_t)(random64(&seed) % (uint64_t)s->E);
                    again = 0;
                    for (int64_t j = 0; j < k; j++) again |= row[j] == id;
                }
            row[k] = id;
        }
    free(cumulative), free(order);
    return ids;
}

static void *device_bytes(size_t bytes)
{
    void *memory;
    CHECK_CUDA(cudaMalloc(&memory, bytes ? bytes : 1));
    CHECK_CUDA(cudaMemset(memory, 0xFF, bytes));
    return memory;
}

/* A tensor of normal numbers: a block made on the host, repeated. */
static void *normal_tensor(size_t count, float scale)
{
    enum { BLOCK = 1 << 22 };
    static float *block;
    if (!block) {
        block = malloc(BLOCK * 4);
        uint64_t seed = 99;
        for (int i = 0; i < BLOCK; i++) {
            const double u = ((double)(random64(&seed) >> 11) + 1) * 0x1p-53,
                         v = (double)(random64(&seed) >> 11) * 0x1p-53;
            block[i] = (float)(sqrt(-2 * log(u)) * cos(6.283185307179586 * v));
        }
    }
    uint16_t *half = malloc(BLOCK * 2);
    for (int i = 0; i < BLOCK; i++) {
        const float f = block[i] * scale;
        uint32_t bits;
        memcpy(&bits, &f, 4);
        half[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    char *device = device_bytes(count * 2);
    size_t done = count < BLOCK ? count : BLOCK;
    CHECK_CUDA(cudaMemcpy(device, half, done * 2, cudaMemcpyHostToDevice));
    while (done < count) {
        const size_t more = count - done < done ? count - done : done;
        CHECK_CUDA(cudaMemcpy(device + done * 2, device, more * 2, cudaMemcpyDeviceToDevice));
        done += more;
    }
    free(half);
    return device;
}

static void on_stage(void *user, smoe_stage stage, int end, void *stream)
{
    bench *b = user;
    (void)end;
    if (b->stage_events < 0 || b->stage_events >= EVENTS) return;
    b->stages[b->stage_events] = stage;
    CHECK_CUDA(cudaEventRecord(b->events[b->stage_events++], stream));
}

static void must(const bench *b, smoe_status status)
{
    if (status == SMOE_OK) return;
    printf("%s: %s\n", smoe_status_string(status), smoe_last_error(b->context));
    exit(3);
}

/* Column-major m x n = A (m x k) B (k x n), E of them. */
static void batched(bench *b, cublasOperation_t tb, int64_t m, int64_t n, int64_t k, const void *A,
                    int64_t lda, const void *B, int64_t ldb, void *C)
{
    const float one = 1, zero = 0;
    const cublasStatus_t status =
        cublasGemmStridedBatchedEx(b->cublas, CUBLAS_OP_N, tb, (int)m, (int)n, (int)k, &one, A, CUDA_R_16BF,
                                   (int)lda, m * k, B, CUDA_R_16BF, (int)ldb, n * k, &zero, C, CUDA_R_16BF,
                                   (int)m, m * n, (int)b->s.E, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    if (status != CUBLAS_STATUS_SUCCESS) {
        printf("cublas: %d\n", (int)status);
        exit(3);
    }
}

static void gemm_dh(bench *b) /* dA' = dO W2 */
{
    batched(b, CUBLAS_OP_N, b->s.n, b->R / b->s.E, b->s.d, b->w2, b->s.n, b->gathered, b->s.d, b->out);
}

static void gemm_dw2(bench *b) /* dW2 = dO^T A' */
{
    batched(b, CUBLAS_OP_T, b->s.n, b->s.d, b->R / b->s.E, b->a, b->s.n, b->gathered, b->s.d, b->out);
}

static void gemm_dw1(bench *b) /* dW1 = dH^T X */
{
    batched(b, CUBLAS_OP_T, b->s.d, 2 * b->s.n, b->R / b->s.E, b->gathered, b->s.d, b->h, 2 * b->s.n, b->out);
}

static void gemm_dx(bench *b) /* dX~ = dH W1 */
{
    batched(b, CUBLAS_OP_N, b->s.d, b->R / b->s.E, 2 * b->s.n, b->w1, b->s.d, b->h, 2 * b->s.n, b->out);
}

static void job_pass(bench *b)
{
    CHECK_CUDA(cudaGraphLaunch(b->pass, b->stream));
}

enum { COPY_BYTES = 1 << 30 };

static void job_copy(bench *b)
{
    CHECK_CUDA(cudaMemcpyAsync(b->out, b->gathered, COPY_BYTES, cudaMemcpyDeviceToDevice, b->stream));
}

static void run_job(bench *b, void (*job)(bench *), double guess_ms, times *t)
{
    const int heat = 1 + (int)(PREHEAT_MS / guess_ms);
    int n = 2 + (int)(TIMED_MS / guess_ms);
    if (n >= EVENTS) n = EVENTS - 1;
    for (int i = 0; i < heat; i++) job(b);
    CHECK_CUDA(cudaEventRecord(b->events[0], b->stream));
    for (int i = 0; i < n; i++) {
        job(b);
        CHECK_CUDA(cudaEventRecord(b->events[i + 1], b->stream));
    }
    CHECK_CUDA(cudaStreamSynchronize(b->stream));
    for (int i = 0; i < n && t->count < MOST_TIMES; i++)
        CHECK_CUDA(cudaEventElapsedTime(&t->ms[t->count++], b->events[i], b->events[i + 1]));
}

static int stage_index(smoe_stage stage)
{
    return stage == SMOE_STAGE_DH        ? 0
           : stage == SMOE_STAGE_DW2     ? 1
           : stage == SMOE_STAGE_DW1     ? 2
           : stage == SMOE_STAGE_DX_ROWS ? 3
                                         : 4;
}

/* The pass stage by stage, events between them; column chunks of one pass add up. */
static void run_stages(bench *b, double guess_ms, times t[STAGES])
{
    const int heat = 1 + (int)(PREHEAT_MS / guess_ms), n = 2 + (int)(TIMED_MS / guess_ms);
    b->stage_events = -1;
    for (int i = 0; i < heat; i++) job_pass(b);
    for (int i = 0; i < n; i++) {
        b->stage_events = 0;
        must(b, smoe_experts_backward(b->context, &b->layer, &b->args, b->stream));
        const int recorded = b->stage_events;
        b->stage_events = -1;
        job_pass(b); /* keeps the card busy while the host reads the events */
        float sum[STAGES] = {0};
        CHECK_CUDA(cudaEventSynchronize(b->events[recorded - 1]));
        for (int j = 0; j < recorded; j += 2) {
            float ms;
            CHECK_CUDA(cudaEventElapsedTime(&ms, b->events[j], b->events[j + 1]));
            sum[stage_index(b->stages[j])] += ms;
        }
        for (int j = 0; j < STAGES; j++)
            if (t[j].count < MOST_TIMES) t[j].ms[t[j].count++] = sum[j];
    }
    CHECK_CUDA(cudaStreamSynchronize(b->stream));
}

static void capture(bench *b)
{
    cudaGraph_t graph;
    b->stage_events = -1;
    must(b, smoe_layer_forward(b->context, &b->layer, &b->forward, b->stream));
    must(b, smoe_experts_backward(b->context, &b->layer, &b->args, b->stream));
    CHECK_CUDA(cudaStreamSynchronize(b->stream));
    CHECK_CUDA(cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal));
    must(b, smoe_experts_backward(b->context, &b->layer, &b->args, b->stream));
    CHECK_CUDA(cudaStreamEndCapture(b->stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&b->pass, graph, 0));
    CHECK_CUDA(cudaGraphDestroy(graph));
}

static float bf16(uint16_t v)
{
    const uint32_t bits = (uint32_t)v << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* Relative Frobenius difference of two bf16 tensors on the device. */
static double difference(const void *one, const void *other, size_t count)
{
    uint16_t *x = gpu_read(one, count * 2), *y = gpu_read(other, count * 2);
    double error = 0, size = 0;
    for (size_t i = 0; i < count; i++) {
        const double d = (double)bf16(x[i]) - bf16(y[i]);
        error += d * d;
        size += (double)bf16(y[i]) * bf16(y[i]);
    }
    free(x), free(y);
    return sqrt(error / size);
}

static int by_number(const void *a, const void *b)
{
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* Rows of `tokens` by the plan (uniform routing: no padding) into b->gathered. */
static void gather(bench *b, const void *tokens, const int32_t *row_token)
{
    for (int64_t r = 0; r < b->R; r++)
        CHECK_CUDA(cudaMemcpyAsync((char *)b->gathered + r * b->s.d * 2,
                                   (const char *)tokens + row_token[r] * b->s.d * 2, (size_t)b->s.d * 2,
                                   cudaMemcpyDeviceToDevice, b->stream));
    CHECK_CUDA(cudaStreamSynchronize(b->stream));
}

/* dW1 from dH as it stands in H's place after a backward with reuse_saved. */
static void compare_with_cublas(bench *b, const smoe_sizes *sizes)
{
    smoe_plan_view view = SMOE_PLAN_VIEW_INIT;
    must(b, smoe_view_plan(b->context, &b->layer, &b->forward, &view));
    int32_t *row_token = gpu_read(view.row_token, (size_t)sizes->padded_rows * 4), *counts;
    counts = gpu_read(view.counts, (size_t)b->s.E * 4);
    qsort(counts, (size_t)b->s.E, 4, by_number);
    if (counts[0] == counts[b->s.E - 1] && counts[0] % 64 == 0 && b->layer.reuse_saved) {
        void *h = b->h;
        b->h = (void *)(uintptr_t)view.h;
        gather(b, b->x, row_token);
        gemm_dw1(b);
        CHECK_CUDA(cudaStreamSynchronize(b->stream));
        printf("%-11s dw1 against cuBLAS %.2e\n", b->s.name,
               difference(b->args.dw1, b->out, (size_t)(b->s.E * 2 * b->s.n * b->s.d)));
        b->h = h;
    }
    free(row_token), free(counts);
}

static void measure(bench *b, const char *routing, int chunks, smoe_type gradients, int reuse)
{
    const shape s = b->s;
    const int64_t R = b->R = s.T * s.K, most = R * s.d > 2 * s.E * s.n * s.d ? R * s.d : 2 * s.E * s.n * s.d;
    b->layer = (smoe_layer)SMOE_LAYER_INIT;
    b->layer.tokens = s.T, b->layer.hidden = s.d, b->layer.intermediate = s.n;
    b->layer.experts = s.E, b->layer.topk = s.K, b->layer.entry = SMOE_FROM_TOPK, b->layer.chunks = chunks;
    b->layer.gradient_type = gradients, b->layer.reuse_saved = reuse;
    smoe_sizes sizes = SMOE_SIZES_INIT;
    must(b, smoe_query_sizes(b->context, &b->layer, &sizes));
    int32_t *ids = route(&s, routing);
    float *weights = malloc((size_t)R * 4);
    for (int64_t i = 0; i < R; i++) weights[i] = 1.0f / (float)s.K;
    void *device_ids = device_bytes((size_t)R * 4), *device_weights = device_bytes((size_t)R * 4);
    CHECK_CUDA(cudaMemcpy(device_ids, ids, (size_t)R * 4, cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaMemcpy(device_weights, weights, (size_t)R * 4, cudaMemcpyHostToDevice));
    const size_t element = gradients == SMOE_F32 ? 4 : 2, copy = COPY_BYTES;
    b->x = normal_tensor((size_t)(s.T * s.d), 1), b->dout = normal_tensor((size_t)(s.T * s.d), 1);
    b->w1 = normal_tensor((size_t)(s.E * 2 * s.n * s.d), 0.02f);
    b->w2 = normal_tensor((size_t)(s.E * s.n * s.d), 0.02f);
    b->gathered = normal_tensor((size_t)(R * s.d) * 2 < copy ? copy / 2 : (size_t)(R * s.d), 1);
    b->a = normal_tensor((size_t)(R * s.n), 1), b->h = normal_tensor((size_t)(R * 2 * s.n), 1);
    b->out = device_bytes((size_t)most * 2 < copy ? copy : (size_t)most * 2);
    smoe_forward_args f = SMOE_FORWARD_ARGS_INIT;
    f.x = b->x, f.w1 = b->w1, f.w2 = b->w2, f.topk_ids = device_ids, f.topk_weights = device_weights;
    f.out = device_bytes((size_t)(s.T * s.d) * 2);
    f.saved = device_bytes(sizes.saved_buffer_bytes), f.saved_size = sizes.saved_buffer_bytes;
    f.scratch = device_bytes(sizes.scratch_forward_bytes), f.scratch_size = sizes.scratch_forward_bytes;
    smoe_backward_args a = SMOE_BACKWARD_ARGS_INIT;
    a.x = f.x, a.w1 = f.w1, a.w2 = f.w2, a.topk_ids = device_ids, a.topk_weights = device_weights;
    a.saved = f.saved, a.saved_size = f.saved_size, a.dout = b->dout;
    a.dx = device_bytes((size_t)(s.T * s.d) * 2);
    a.dw1 = device_bytes((size_t)(s.E * 2 * s.n * s.d) * element);
    a.dw2 = device_bytes((size_t)(s.E * s.n * s.d) * element);
    a.dtopk_weights = device_bytes((size_t)R * 4);
    a.scratch = device_bytes(sizes.scratch_backward_bytes), a.scratch_size = sizes.scratch_backward_bytes;
    b->forward = f, b->args = a;
    capture(b);
    if (gradients == SMOE_BF16 && R * s.d < (1ll << 29)) compare_with_cublas(b, &sizes);
    static times pass, copies, gemm[GEMMS], stage[STAGES];
    static void (*const gemms[GEMMS])(bench *) = {gemm_dh, gemm_dw2, gemm_dw1, gemm_dx};
    static const double share[GEMMS] = {1 / 6.0, 1 / 6.0, 1 / 3.0, 1 / 3.0};
    pass.count = copies.count = 0;
    for (int i = 0; i < GEMMS; i++) gemm[i].count = 0;
    for (int i = 0; i < STAGES; i++) stage[i].count = 0;
    const double flops = 12.0 * (double)R * (double)s.n * (double)s.d, guess = flops / 500e12 * 1e3;
    for (int round = 0; round < ROUNDS; round++) {
        run_job(b, job_pass, guess, &pass);
        for (int i = 0; i < GEMMS; i++) run_job(b, gemms[i], guess * share[i], &gemm[i]);
        run_stages(b, guess, stage);
        run_job(b, job_copy, 0.5, &copies);
    }
    const double speed = 2.0 * COPY_BYTES / (median(&copies) * 1e-3);
    const double combine = (double)(R * s.d + s.T * s.d) * 2 / speed * 1e3, ms = median(&pass);
    double bound = combine;
    for (int i = 0; i < GEMMS; i++) bound += median(&gemm[i]);
    printf("%-11s %s c%d %s%s pass %8.4f ms %6.1f TF ratio %.3f |", s.name, routing, chunks,
           gradients == SMOE_F32 ? "f32" : "bf16", reuse ? " reuse" : "", ms, flops / ms * 1e-9, bound / ms);
    for (int i = 0; i < STAGES; i++)
        printf(" %s %.4f (x%.3f)", stage_names[i], median(&stage[i]),
               (i < GEMMS ? median(&gemm[i]) : combine) / median(&stage[i]));
    printf(" | copy %.2f TB/s bound %.4f scratch %.0f MiB saved %.0f MiB\n", speed * 1e-12, bound,
           (double)sizes.scratch_backward_bytes / 1048576, (double)sizes.saved_buffer_bytes / 1048576);
    fflush(stdout);
    CHECK_CUDA(cudaGraphExecDestroy(b->pass));
    void *all[] = {device_ids, device_weights, b->x,  b->dout, b->gathered,     b->w1,
                   b->w2,      b->h,           b->a,  b->out,  f.out,           f.saved,
                   f.scratch,  a.dx,           a.dw1, a.dw2,   a.dtopk_weights, a.scratch};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) CHECK_CUDA(cudaFree(all[i]));
    free(ids), free(weights);
}

int main(int argc, char **argv)
{
    static bench b;
    char text[512] = "";
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.backend = SMOE_BACKEND_CUDA;
    options.error_text = text, options.error_size = sizeof text;
    options.on_stage = on_stage, options.on_stage_user = &b;
    b.stage_events = -1;
    if (smoe_create(&b.context, &options) != SMOE_OK) {
        printf("no device: %s\n", text);
        return 77;
    }
    CHECK_CUDA(cudaStreamCreateWithFlags(&b.stream, cudaStreamNonBlocking));
    if (cublasCreate(&b.cublas) != CUBLAS_STATUS_SUCCESS) return 3;
    cublasSetWorkspace(b.cublas, device_bytes(64 << 20), 64 << 20);
    cublasSetStream(b.cublas, b.stream);
    b.events = malloc(EVENTS * sizeof *b.events);
    for (int i = 0; i < EVENTS; i++) CHECK_CUDA(cudaEventCreate(&b.events[i]));
    const char *routing = "uniform";
    int chunks = 1, reuse = 0;
    smoe_type gradients = SMOE_BF16;
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i];
        if (strcmp(word, "uniform") == 0 || strcmp(word, "random") == 0 || strcmp(word, "skewed") == 0) {
            routing = word;
            continue;
        }
        if (strcmp(word, "bf16") == 0 || strcmp(word, "f32") == 0) {
            gradients = word[0] == 'f' ? SMOE_F32 : SMOE_BF16;
            continue;
        }
        if (strcmp(word, "reuse") == 0 || strcmp(word, "keep") == 0) {
            reuse = word[0] == 'r';
            continue;
        }
        if (strlen(word) <= 2) {
            chunks = atoi(word);
            continue;
        }
        b.s.name = word;
        int known = sscanf(word, "%ld,%ld,%ld,%ld,%ld", &b.s.T, &b.s.d, &b.s.n, &b.s.E, &b.s.K) == 5;
        for (size_t j = 0; !known && j < sizeof paper / sizeof paper[0]; j++)
            if (strcmp(paper[j].name, word) == 0) b.s = paper[j], known = 1;
        if (known) measure(&b, routing, chunks, gradients, reuse);
    }
    return 0;
}
