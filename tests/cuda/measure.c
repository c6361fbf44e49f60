/* Times of the cuda backend's forward against the bound measured in the same run: the same FLOPs through
 * cublasGemmStridedBatchedEx (uniform counts) plus the combine's bytes, (R d + T d) 2, at the speed of a
 * copy.
 *
 *   measure [uniform|random|skewed] [chunks] shape...       shapes as T,d,n,E,K or of the paper's suite
 *
 * Sustained: every job runs 50 ms untimed, then 60 ms launch by launch between events, jobs in turn, three
 * rounds; medians of all launches. The pass is a CUDA graph of plan, up, down, combine; its stages are timed
 * apart. The copy comes before all rounds and a third of a second of GEMMs follows it: what is timed right
 * behind a job that draws less power runs at a higher clock for tens of milliseconds. */
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

enum { STAGES = 3, MOST_TIMES = 1 << 14, PREHEAT_MS = 50, TIMED_MS = 60, ROUNDS = 3, EVENTS = 2048 };

typedef struct times {
    int count;
    float ms[MOST_TIMES];
} times;

static void add(times *t, float ms)
{
    if (t->count < MOST_TIMES) t->ms[t->count++] = ms;
}

static int by_size(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double median(times *t)
{
    qsort(t->ms, t->count, sizeof t->ms[0], by_size);
    return t->count ? t->ms[t->count / 2] : 0;
}

/* ---- Everything a shape needs */

typedef struct bench {
    shape s;
    int64_t R;
    smoe_context *context;
    smoe_layer layer;
    smoe_forward_args args;
    cublasHandle_t cublas;
    cudaStream_t stream;
    cudaGraphExec_t pass;
    void *x, *xg, *w1, *w2, *h, *a, *y, *out;
    cudaEvent_t *events;
    int stage_events; /* recorded by on_stage */
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

/* uniform: equal counts; a group of T/E random tokens goes to K experts that are far apart. random: K
 * distinct experts a token. skewed: the same by Zipf's law. */
static int32_t *route(const shape *s, const char *routing)
{
    int32_t *ids = malloc(s->T * s->K * 4), *order = malloc(s->T * 4), *offset = malloc(s->E * 4);
    uint64_t seed = 12345;
    double total = 0, *cumulative = malloc(s->E * 8);
    for (int64_t e = 0; e < s->E; e++) cumulative[e] = total += 1.0 / (double)(e + 1);
    for (int64_t t = 0; t < s->T; t++) order[t] = (int32_t)t;
    for (int64_t e = 0; e < s->E; e++) offset[e] = (int32_t)e;
    for (int64_t t = s->T - 1; t > 0; t--) {
        const int64_t j = (int64_t)(random64(&seed) % (uint64_t)(t + 1));
        const int32_t other = order[j];
        order[j] = order[t], order[t] = other;
    }
    for (int64_t e = s->E - 1; e > 0; e--) {
        const int64_t j = (int64_t)(random64(&seed) % (uint64_t)(e + 1));
        const int32_t other = offset[j];
        offset[j] = offset[e], offset[e] = other;
    }
    for (int64_t t = 0; t < s->T; t++)
        for (int64_t k = 0; k < s->K; k++) {
            int32_t *row = ids + (routing[0] == 'u' ? order[t] : t) * s->K, id = 0;
            if (routing[0] == 'u')
                id = (int32_t)((t * s->E / s->T + offset[k]) % s->E);
            else
                for (int again = 1; again;) {
                    id = (int32_t)(random64(&seed) % (uint64_t)s->E);
                    if (routing[0] == 's') {
                        const double u = (double)(random64(&seed) >> 11) * 0x1p-53 * total;
                        int32_t high = (int32_t)s->E - 1;
                        for (id = 0; id < high;) {
                            const int32_t middle = (id + high) / 2;
                            if (cumulative[middle] < u)
                                id = middle + 1;
                            else
                                high = middle;
                        }
                    }
                    again = 0;
                    for (int64_t j = 0; j < k; j++) again |= row[j] == id;
                }
            row[k] = id;
        }
    free(cumulative), free(order), free(offset);
    return ids;
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
    char *device;
    CHECK_CUDA(cudaMalloc((void **)&device, count * 2));
    size_t done = count < BLOCK ? count : BLOCK;
    CHECK_CUDA(cudaMemcpy(device, half, done * 2, cudaMemcpyHostToDevice));
    for (; done < count;) {
        const size_t more = count - done < done ? count - done : done;
        CHECK_CUDA(cudaMemcpy(device + done * 2, device, more * 2, cudaMemcpyDeviceToDevice));
        done += more;
    }
    free(half);
    return device;
}

static void *device_bytes(size_t bytes)
{
    void *memory;
    CHECK_CUDA(cudaMalloc(&memory, bytes ? bytes : 1));
    CHECK_CUDA(cudaMemset(memory, 0xFF, bytes));
    return memory;
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

static void cublas(bench *b, int64_t N, int64_t K, const void *weights, const void *rows, void *to)
{
    const float one = 1, zero = 0;
    const int64_t Te = b->R / b->s.E;
    const cublasStatus_t status = cublasGemmStridedBatchedEx(
        b->cublas, CUBLAS_OP_T, CUBLAS_OP_N, (int)N, (int)Te, (int)K, &one, weights, CUDA_R_16BF, (int)K,
        N * K, rows, CUDA_R_16BF, (int)K, Te * K, &zero, to, CUDA_R_16BF, (int)N, Te * N, (int)b->s.E,
        CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    if (status != CUBLAS_STATUS_SUCCESS) {
        printf("cublas: %d\n", (int)status);
        exit(3);
    }
}

static void job_pass(bench *b)
{
    CHECK_CUDA(cudaGraphLaunch(b->pass, b->stream));
}

static void job_up(bench *b)
{
    cublas(b, 2 * b->s.n, b->s.d, b->w1, b->xg, b->h);
}

static void job_down(bench *b)
{
    cublas(b, b->s.d, b->s.n, b->w2, b->a, b->y);
}

enum { COPY_BYTES = 1 << 30 };

static void job_copy(bench *b)
{
    CHECK_CUDA(cudaMemcpyAsync((char *)b->y, b->xg, COPY_BYTES, cudaMemcpyDeviceToDevice, b->stream));
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
    for (int i = 0; i < n; i++) {
        float ms;
        CHECK_CUDA(cudaEventElapsedTime(&ms, b->events[i], b->events[i + 1]));
        add(t, ms);
    }
}

static int stage_index(smoe_stage stage)
{
    return stage == SMOE_STAGE_PLAN ? 0 : stage == SMOE_STAGE_UP ? 1 : stage == SMOE_STAGE_DOWN ? 2 : 3;
}

/* The pass stage by stage, events between them; column chunks of one pass add up. */
static void run_stages(bench *b, double guess_ms, times t[4])
{
    const int heat = 1 + (int)(PREHEAT_MS / guess_ms), n = 2 + (int)(TIMED_MS / guess_ms);
    b->stage_events = -1;
    for (int i = 0; i < heat; i++) job_pass(b);
    for (int i = 0; i < n; i++) {
        if (i % 32 == 0) CHECK_CUDA(cudaStreamSynchronize(b->stream));
        b->stage_events = 0;
        if (i % 32 == 0)
            for (int j = 0; j < 2; j++) job_pass(b);
        must(b, smoe_layer_forward(b->context, &b->layer, &b->args, b->stream));
        CHECK_CUDA(cudaStreamSynchronize(b->stream));
        float sum[4] = {0};
        for (int j = 0; j < b->stage_events; j += 2) {
            float ms;
            CHECK_CUDA(cudaEventElapsedTime(&ms, b->events[j], b->events[j + 1]));
            sum[stage_index(b->stages[j])] += ms;
        }
        for (int j = 0; j < 4; j++) add(&t[j], sum[j]);
        b->stage_events = -1;
        job_pass(b); /* keeps the card busy between two timed passes */
    }
    CHECK_CUDA(cudaStreamSynchronize(b->stream));
}

static void capture(bench *b)
{
    cudaGraph_t graph;
    b->stage_events = -1;
    CHECK_CUDA(cudaDeviceSynchronize()); /* the buffers were filled on another stream */
    must(b, smoe_layer_forward(b->context, &b->layer, &b->args, b->stream));
    CHECK_CUDA(cudaStreamSynchronize(b->stream));
    CHECK_CUDA(cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal));
    must(b, smoe_layer_forward(b->context, &b->layer, &b->args, b->stream));
    CHECK_CUDA(cudaStreamEndCapture(b->stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&b->pass, graph, 0));
    CHECK_CUDA(cudaGraphDestroy(graph));
}

static void measure(bench *b, const char *routing, int chunks)
{
    const shape s = b->s;
    const int64_t R = b->R = s.T * s.K;
    b->layer = (smoe_layer)SMOE_LAYER_INIT;
    b->layer.tokens = s.T, b->layer.hidden = s.d, b->layer.intermediate = s.n;
    b->layer.experts = s.E, b->layer.topk = s.K, b->layer.entry = SMOE_FROM_TOPK, b->layer.chunks = chunks;
    smoe_sizes sizes = SMOE_SIZES_INIT;
    must(b, smoe_query_sizes(b->context, &b->layer, &sizes));
    int32_t *ids = route(&s, routing);
    float *weights = malloc(R * 4);
    for (int64_t i = 0; i < R; i++) weights[i] = 1.0f / (float)s.K;
    const size_t copy = COPY_BYTES;
    void *device_ids = device_bytes(R * 4), *device_weights = device_bytes(R * 4);
    CHECK_CUDA(cudaMemcpy(device_ids, ids, R * 4, cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaMemcpy(device_weights, weights, R * 4, cudaMemcpyHostToDevice));
    b->x = normal_tensor(s.T * s.d, 1), b->w1 = normal_tensor(s.E * 2 * s.n * s.d, 0.02f);
    b->w2 = normal_tensor(s.E * s.n * s.d, 0.02f);
    b->xg = normal_tensor((size_t)(R * s.d) * 2 < copy ? copy / 2 : R * s.d, 1);
    b->a = normal_tensor(R * s.n, 1);
    b->h = device_bytes(R * 2 * s.n * 2), b->out = device_bytes(s.T * s.d * 2);
    b->y = device_bytes((size_t)(R * s.d * 2) < copy ? copy : (size_t)(R * s.d * 2));
    smoe_forward_args args = SMOE_FORWARD_ARGS_INIT;
    args.x = b->x, args.w1 = b->w1, args.w2 = b->w2, args.topk_ids = device_ids,
    args.topk_weights = device_weights;
    args.out = b->out, args.saved = device_bytes(sizes.saved_buffer_bytes),
    args.saved_size = sizes.saved_buffer_bytes;
    args.scratch = device_bytes(sizes.scratch_forward_bytes), args.scratch_size = sizes.scratch_forward_bytes;
    b->args = args;
    capture(b);
    static times pass, up, down, memory, stages[4];
    pass.count = up.count = down.count = memory.count = 0;
    for (int i = 0; i < 4; i++) stages[i].count = 0;
    const double flops = 6.0 * R * s.n * s.d, guess = flops / 500e12 * 1e3;
    for (int round = 0; round < ROUNDS; round++) run_job(b, job_copy, 0.5, &memory);
    for (int round = 0; round < ROUNDS; round++) run_job(b, job_up, guess * 0.6, &up);
    up.count = 0;
    for (int round = 0; round < ROUNDS; round++) {
        run_job(b, job_up, guess * 0.6, &up);
        run_job(b, job_pass, guess, &pass);
        run_job(b, job_down, guess * 0.35, &down);
        run_stages(b, guess, stages);
    }
    const double copy_speed = 2.0 * COPY_BYTES / (median(&memory) * 1e-3);
    const double combine_bytes = (double)(R * s.d + s.T * s.d) * 2,
                 combine_bound = combine_bytes / copy_speed * 1e3;
    const double bound = median(&up) + median(&down) + combine_bound, ms = median(&pass);
    printf("%-11s %-7s c%d pass %8.4f ms %6.1f TF ratio %.3f | plan %6.4f up %7.4f (x%.3f) down %7.4f "
           "(x%.3f) combine "
           "%7.4f (%.3f) sum %7.4f | cublas up %7.4f down %7.4f copy %.2f TB/s min %.4f\n",
           s.name, routing, chunks, ms, flops / ms * 1e-9, bound / ms, median(&stages[0]), median(&stages[1]),
           median(&up) / median(&stages[1]), median(&stages[2]), median(&down) / median(&stages[2]),
           median(&stages[3]), combine_bound / median(&stages[3]),
           median(&stages[0]) + median(&stages[1]) + median(&stages[2]) + median(&stages[3]), median(&up),
           median(&down), copy_speed * 1e-12, (double)pass.ms[0]);
    fflush(stdout);
    CHECK_CUDA(cudaGraphExecDestroy(b->pass));
    void *all[] = {device_ids, device_weights, b->x, b->xg,  b->w1,      b->w2,
                   b->h,       b->a,           b->y, b->out, args.saved, args.scratch};
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
    const char *routing = argc > 1 ? argv[1] : "uniform";
    const int chunks = argc > 2 ? atoi(argv[2]) : 1;
    for (int i = 3; i < argc; i++) {
        b.s.name = argv[i];
        int known = sscanf(argv[i], "%ld,%ld,%ld,%ld,%ld", &b.s.T, &b.s.d, &b.s.n, &b.s.E, &b.s.K) == 5;
        for (size_t j = 0; !known && j < sizeof paper / sizeof paper[0]; j++)
            if (strcmp(paper[j].name, argv[i]) == 0) b.s = paper[j], known = 1;
        if (known) measure(&b, routing, chunks);
    }
    return 0;
}
