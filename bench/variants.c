/* Measures which of several builds of the library is the fastest. All run in one process, on the same inputs,
 * by turns:
 *
 *   variants ROUNDS uniform|random|skewed T,d,n,E,K LIBRARY...
 *
 * A LIBRARY is the libsmoe.so of a build; "self" is this program's. With ":portable" behind it the variant is
 * its portable kernels. Every pass is timed in three ways: after 20 ms of idling, when the GPU is not yet at
 * its power limit and differences of 0.1 % can be detected; and in sustained runs, as users have them, where
 * only differences of 1 % can be detected; and on the host, which enqueues CALLS passes (to be judged with a
 * layer so small that the host never waits for the GPU, such as 64,256,64,8,2). Differences are relative to
 * the first library in the same round: the median over the rounds, with its standard error. The last column
 * tells whether all results have the same bits as the first library's. */
#define _GNU_SOURCE
#include "base/turns.h"
#include "bench/build_api.h"
#include "bench/median.h"
#include "tests/cuda/gpu.h"
#include "tests/cuda/route_cases.h"

#include <math.h>
#include <time.h>
#include <unistd.h>

enum {
    MOST_VARIANTS = 16,
    MOST_ROUNDS = 100,
    PASSES = 2, /* forward, backward */
    WAYS = 3,   /* after idling, sustained, the host */
    IDLE_US = 20000,
    IDLE_LAUNCHES = 4, /* the first is not counted */
    SETTLE_MS = 15,
    WARM_ROUNDS = 2, /* before the sustained ones */
    LAUNCHES = 16,
    CALLS = 8,
    PATTERN = 1 << 22, /* normal numbers, of which all inputs are copies */
    NO_DEVICE = 77
};
_Static_assert((int)MOST_VARIANTS <= (int)TURNS_MOST, "jobs that take turns");

/* ---- A build of the library ---- */

typedef struct variant {
    build_api call;
    smoe_context *context;
    smoe_sizes sizes;
    gpu_buffer saved;
    cudaGraphExec_t pass[PASSES];
    uint64_t bits;
    double ms[PASSES][WAYS][MOST_ROUNDS];
} variant;

static void check(const variant *v, smoe_status status)
{
    if (status == SMOE_OK) return;
    fprintf(stderr, "%s: %s\n", v->call.name, v->context ? v->call.last_error(v->context) : "no context");
    exit(3);
}

static void make_context(variant *v, const smoe_layer *layer)
{
    char text[400] = "";
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.backend = SMOE_BACKEND_CUDA;
    options.kernels = v->call.kernels;
    options.error_text = text;
    options.error_size = sizeof text;
    const smoe_status status = v->call.create(&v->context, &options);
    if (status != SMOE_OK) {
        printf("no device: %s\n", text);
        exit(status == SMOE_ERROR_DEVICE ? NO_DEVICE : 3);
    }
    v->sizes = (smoe_sizes)SMOE_SIZES_INIT;
    check(v, v->call.query_sizes(v->context, layer, &v->sizes));
    v->saved = gpu_alloc(v->sizes.saved_buffer_bytes);
}

/* ---- The problem: inputs, outputs and scratch that all variants share ---- */

typedef struct problem {
    smoe_layer layer;
    cudaStream_t stream;
    gpu_buffer x, w1, w2, dout, ids, weights; /* in */
    gpu_buffer out, dx, dw1, dw2, ds;         /* out */
    gpu_buffer scratch_forward, scratch_backward;
} problem;

static uint16_t to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x8000) >> 16);
}

/* `count` normal numbers times `scale`: copies of parts of one pattern, each part with another start. */
static gpu_buffer normal(int64_t count, float scale, uint64_t seed)
{
    uint16_t *host = malloc(sizeof *host * PATTERN);
    for (int i = 0; i < PATTERN; i++) host[i] = to_bf16(scale * bell(&seed));
    const gpu_buffer pattern = gpu_copy(host, sizeof *host * PATTERN), made = gpu_alloc((size_t)count * 2);
    for (int64_t done = 0, run = 0; done < count; run++) {
        const int64_t from = run * 8200 % (PATTERN / 2), rest = count - done;
        const int64_t length = rest < PATTERN - from ? rest : PATTERN - from;
        CHECK_CUDA(cudaMemcpy(made.memory + done * 2, pattern.memory + from * 2, (size_t)length * 2,
                              cudaMemcpyDeviceToDevice));
        done += length;
    }
    (void)gpu_free(pattern);
    free(host);
    return made;
}

typedef enum routing { IN_TURN, AT_RANDOM, BY_ZIPF, ROUTINGS } routing;

static const char *const routing_names[ROUTINGS] = {"uniform", "random", "skewed"};

/* cumulated (E): the sums of Zipf's weights 1 / (rank + 1) up to each rank. */
static int32_t draw_rank(const double *cumulated, int64_t experts, uint64_t *random)
{
    const double at = (double)next_random(random) * 0x1p-32 * cumulated[experts - 1];
    int32_t rank = 0;
    while (rank + 1 < experts && cumulated[rank] <= at) rank++;
    return rank;
}

/* The expert of every rank: all experts in an order drawn at random. */
static void shuffle(int32_t *experts_by_rank, int64_t experts, uint64_t *random)
{
    for (int64_t e = 0; e < experts; e++) {
        const int64_t at = next_random(random) % (uint32_t)(e + 1);
        experts_by_rank[e] = experts_by_rank[at];
        experts_by_rank[at] = (int32_t)e;
    }
}

/* K distinct experts for each token: in turn, so that all experts have equal counts; drawn at random; or
 * drawn by Zipf's weights, as `smoe bench --routing skewed` does. */
static gpu_buffer route(const smoe_layer *l, routing kind)
{
    const int64_t T = l->tokens, E = l->experts, K = l->topk;
    int32_t *ids = malloc((size_t)(T * K) * sizeof *ids), *by_rank = malloc((size_t)E * sizeof *by_rank);
    double *cumulated = malloc((size_t)E * sizeof *cumulated), sum = 0;
    uint64_t random = 3, order = 5;
    for (int64_t e = 0; e < E; e++) cumulated[e] = sum += 1.0 / (double)(e + 1);
    shuffle(by_rank, E, &order);
    for (int64_t i = 0; i < T * K; i++) {
        const int64_t first = i - i % K;
        int again = 1;
        while (again) {
            ids[i] = (int32_t)(kind == IN_TURN     ? (uint32_t)(i % E)
                               : kind == AT_RANDOM ? next_random(&random) % (uint32_t)E
                                                   : (uint32_t)by_rank[draw_rank(cumulated, E, &random)]);
            again = 0;
            for (int64_t j = first; j < i; j++) again |= ids[j] == ids[i];
        }
    }
    const gpu_buffer made = gpu_copy(ids, (size_t)(T * K) * sizeof *ids);
    free(ids);
    free(by_rank);
    free(cumulated);
    return made;
}

static gpu_buffer weights(int64_t count, float mean)
{
    float *host = malloc((size_t)count * sizeof *host);
    uint64_t random = 4;
    for (int64_t i = 0; i < count; i++)
        host[i] = mean * (0.5f + (float)(next_random(&random) >> 8) * 0x1p-24f);
    const gpu_buffer made = gpu_copy(host, (size_t)count * sizeof *host);
    free(host);
    return made;
}

static void make_problem(problem *p, routing kind, const variant *variants, int count)
{
    const smoe_layer *l = &p->layer;
    const int64_t T = l->tokens, d = l->hidden, n = l->intermediate, E = l->experts, pairs = T * l->topk;
    uint64_t forward = 0, backward = 0;
    for (int i = 0; i < count; i++) {
        const smoe_sizes *s = &variants[i].sizes;
        forward = s->scratch_forward_bytes > forward ? s->scratch_forward_bytes : forward;
        backward = s->scratch_backward_bytes > backward ? s->scratch_backward_bytes : backward;
    }
    CHECK_CUDA(cudaStreamCreateWithFlags(&p->stream, cudaStreamNonBlocking));
    p->x = normal(T * d, 1.0f, 11);
    p->w1 = normal(E * 2 * n * d, 1.0f / sqrtf((float)d), 12);
    p->w2 = normal(E * d * n, 1.0f / sqrtf((float)n), 13);
    p->dout = normal(T * d, 1.0f, 14);
    p->ids = route(l, kind);
    p->weights = weights(pairs, 1.0f / (float)l->topk);
    p->out = gpu_alloc((size_t)(T * d) * 2);
    p->dx = gpu_alloc((size_t)(T * d) * 2);
    p->dw1 = gpu_alloc((size_t)(E * 2 * n * d) * 2);
    p->dw2 = gpu_alloc((size_t)(E * d * n) * 2);
    p->ds = gpu_alloc((size_t)pairs * sizeof(float));
    p->scratch_forward = gpu_alloc(forward);
    p->scratch_backward = gpu_alloc(backward);
    CHECK_CUDA(cudaDeviceSynchronize()); // another stream writes the buffers' poison
}

/* ---- Passes ---- */

static smoe_status enqueue_forward(const problem *p, const variant *v)
{
    smoe_forward_args a = SMOE_FORWARD_ARGS_INIT;
    a.x = p->x.memory, a.w1 = p->w1.memory, a.w2 = p->w2.memory, a.out = p->out.memory;
    a.topk_ids = p->ids.memory, a.topk_weights = (const float *)(const void *)p->weights.memory;
    a.saved = v->saved.memory, a.saved_size = v->saved.bytes;
    a.scratch = p->scratch_forward.memory, a.scratch_size = p->scratch_forward.bytes;
    return v->call.forward(v->context, &p->layer, &a, p->stream);
}

static smoe_status enqueue_backward(const problem *p, const variant *v)
{
    smoe_backward_args a = SMOE_BACKWARD_ARGS_INIT;
    a.x = p->x.memory, a.w1 = p->w1.memory, a.w2 = p->w2.memory, a.dout = p->dout.memory;
    a.topk_ids = p->ids.memory;
    a.saved = v->saved.memory, a.saved_size = v->saved.bytes;
    a.dx = p->dx.memory, a.dw1 = p->dw1.memory, a.dw2 = p->dw2.memory;
    a.dtopk_weights = (float *)(void *)p->ds.memory;
    a.scratch = p->scratch_backward.memory, a.scratch_size = p->scratch_backward.bytes;
    return v->call.backward(v->context, &p->layer, &a, p->stream);
}

static void record(const problem *p, variant *v)
{
    for (int pass = 0; pass < PASSES; pass++) {
        cudaGraph_t graph;
        CHECK_CUDA(cudaStreamBeginCapture(p->stream, cudaStreamCaptureModeThreadLocal));
        check(v, pass == 0 ? enqueue_forward(p, v) : enqueue_backward(p, v));
        CHECK_CUDA(cudaStreamEndCapture(p->stream, &graph));
        CHECK_CUDA(cudaGraphInstantiate(&v->pass[pass], graph, 0));
        CHECK_CUDA(cudaGraphDestroy(graph));
    }
}

/* Continues the FNV-1a hash `sum` over a result, eight bytes at a time. */
static uint64_t hash(uint64_t sum, gpu_buffer b)
{
    enum { STEP = 1 << 26 };
    for (size_t done = 0; done < b.bytes; done += STEP) {
        const size_t length = b.bytes - done < STEP ? b.bytes - done : STEP;
        uint64_t *host = gpu_read(b.memory + done, length);
        for (size_t i = 0; i < length / 8; i++) sum = (sum ^ host[i]) * UINT64_C(0x100000001b3);
        free(host);
    }
    return sum;
}

static void run_once(const problem *p, variant *v)
{
    const gpu_buffer results[] = {p->out, p->dx, p->dw1, p->dw2, p->ds};
    check(v, enqueue_forward(p, v));
    check(v, enqueue_backward(p, v));
    CHECK_CUDA(cudaStreamSynchronize(p->stream));
    v->bits = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < sizeof results / sizeof *results; i++) v->bits = hash(v->bits, results[i]);
}

/* ---- Times ---- */

static int compare_floats(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Median milliseconds of `count` launches without the first `skipped`. */
static double time_launches(const problem *p, cudaGraphExec_t pass, int count, int skipped)
{
    cudaEvent_t marks[LAUNCHES][2];
    float ms[LAUNCHES];
    for (int i = 0; i < count; i++) {
        CHECK_CUDA(cudaEventCreate(&marks[i][0]));
        CHECK_CUDA(cudaEventCreate(&marks[i][1]));
    }
    for (int i = 0; i < count; i++) {
        CHECK_CUDA(cudaEventRecord(marks[i][0], p->stream));
        CHECK_CUDA(cudaGraphLaunch(pass, p->stream));
        CHECK_CUDA(cudaEventRecord(marks[i][1], p->stream));
    }
    CHECK_CUDA(cudaStreamSynchronize(p->stream));
    for (int i = 0; i < count; i++) {
        CHECK_CUDA(cudaEventElapsedTime(ms + i, marks[i][0], marks[i][1]));
        CHECK_CUDA(cudaEventDestroy(marks[i][0]));
        CHECK_CUDA(cudaEventDestroy(marks[i][1]));
    }
    const int used = count - skipped;
    qsort(ms + skipped, (size_t)used, sizeof *ms, compare_floats);
    return 0.5 * (ms[skipped + (used - 1) / 2] + ms[skipped + used / 2]);
}

static double time_after_idling(const problem *p, const variant *v, int pass)
{
    usleep(IDLE_US);
    return time_launches(p, v->pass[pass], IDLE_LAUNCHES, 1);
}

static double time_sustained(const problem *p, const variant *v, int pass)
{
    const double expected = v->ms[pass][0][0];
    for (double spent = 0; spent < SETTLE_MS; spent += expected)
        CHECK_CUDA(cudaGraphLaunch(v->pass[pass], p->stream));
    return time_launches(p, v->pass[pass], LAUNCHES, 0);
}

/* Milliseconds of a call. */
static double time_host(const problem *p, const variant *v, int pass)
{
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int i = 0; i < CALLS; i++) check(v, pass == 0 ? enqueue_forward(p, v) : enqueue_backward(p, v));
    clock_gettime(CLOCK_MONOTONIC, &end);
    CHECK_CUDA(cudaStreamSynchronize(p->stream));
    return (1e3 * (double)(end.tv_sec - begin.tv_sec) + 1e-6 * (double)(end.tv_nsec - begin.tv_nsec)) / CALLS;
}

/* All rounds after idling come before all sustained rounds. Otherwise the GPU would neither be idle in the
 * first kind nor at its power limit in the second. */
static void time_all(const problem *p, variant *variants, int count, int rounds)
{
    for (int way = 0; way < WAYS; way++)
        for (int pass = 0; pass < PASSES; pass++) {
            const uint64_t seed = (uint64_t)(way * PASSES + pass);
            const int warm = way == 0 ? 0 : WARM_ROUNDS;
            for (int round = 0; round < warm + rounds; round++)
                for (int i = 0; i < count; i++) {
                    variant *v = variants + turn_of(seed, round, i, count);
                    const double ms = way == 0   ? time_after_idling(p, v, pass)
                                      : way == 1 ? time_sustained(p, v, pass)
                                                 : time_host(p, v, pass);
                    if (round >= warm) v->ms[pass][way][round - warm] = ms;
                }
        }
}

/* ---- The table ---- */

typedef struct difference {
    double ms, percent, error;
} difference;

static difference compare(const double *ms, const double *first, int rounds)
{
    double times[MOST_ROUNDS], changes[MOST_ROUNDS];
    for (int i = 0; i < rounds; i++) times[i] = ms[i], changes[i] = 100.0 * (ms[i] / first[i] - 1.0);
    const middle change = middle_of(changes, rounds);
    return (difference){middle_of(times, rounds).median, change.median, change.error};
}

static void print_table(const variant *variants, int count, int rounds)
{
    printf("%-24s %-8s %10s %16s %10s %16s %10s %16s  %s\n", "library", "pass", "idle, ms", "%", "sustained",
           "%", "host", "%", "bits");
    for (int pass = 0; pass < PASSES; pass++)
        for (int i = 0; i < count; i++) {
            printf("%-24s %-8s", variants[i].call.name, pass == 0 ? "forward" : "backward");
            for (int way = 0; way < WAYS; way++) {
                const difference d = compare(variants[i].ms[pass][way], variants[0].ms[pass][way], rounds);
                printf(" %10.4f %+8.2f +- %4.2f", d.ms, d.percent, d.error);
            }
            printf("  %s\n", variants[i].bits == variants[0].bits ? "same" : "DIFFER");
        }
}

static int usage(void)
{
    fprintf(stderr,
            "variants ROUNDS uniform|random|skewed T,d,n,E,K LIBRARY...   (rounds 1 to %d, libraries 1 "
            "to %d)\n",
            (int)MOST_ROUNDS, (int)MOST_VARIANTS);
    return 2;
}

int main(int argc, char **argv)
{
    static variant variants[MOST_VARIANTS];
    problem p = {.layer = SMOE_LAYER_INIT};
    smoe_layer *l = &p.layer;
    long long shape[5];
    const int count = argc - 4, rounds = argc > 1 ? atoi(argv[1]) : 0;
    int kind = 0;
    while (kind < ROUTINGS && argc > 2 && strcmp(argv[2], routing_names[kind]) != 0) kind++;
    if (count < 1 || count > MOST_VARIANTS || rounds < 1 || rounds > MOST_ROUNDS || kind == ROUTINGS ||
        sscanf(argv[3], "%lld,%lld,%lld,%lld,%lld", shape, shape + 1, shape + 2, shape + 3, shape + 4) != 5)
        return usage();
    l->tokens = shape[0], l->hidden = shape[1], l->intermediate = shape[2], l->experts = shape[3];
    l->topk = shape[4];
    l->entry = SMOE_ENTRY_FROM_TOPK;
    l->gradient_type = l->dtype;
    for (int i = 0; i < count; i++) {
        variants[i].call = build_open(argv[4 + i]);
        make_context(variants + i, l);
    }
    make_problem(&p, (routing)kind, variants, count);
    for (int i = 0; i < count; i++) {
        run_once(&p, variants + i); // loads the kernels, which must not happen during a stream capture
        record(&p, variants + i);
    }
    time_all(&p, variants, count, rounds);
    print_table(variants, count, rounds);
    return 0;
}
