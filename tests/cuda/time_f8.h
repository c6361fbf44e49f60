/* What the programs that time fp8 beside bf16 share: the layers and their inputs, jobs that take turns, and
 * the command line
 *
 *   PROGRAM ROUNDS random|uniform [T,d,n,E,K]...
 *
 * Without layers the twelve of the paper are measured. SwiGLU, from given top-K. All jobs take turns in one
 * process: in its turn a job first runs for SETTLE_MS, so that the GPU is at its power limit, and then so
 * many launches of its CUDA graph are timed. Times are medians over the rounds, in ms. */
#ifndef TESTS_CUDA_TIME_F8_H
#define TESTS_CUDA_TIME_F8_H

#include "base/turns.h"
#include "bench/median.h"
#include "gpu.h"
#include "host/device.h"
#include "route_cases.h"
#include "sm90/f8_kernels.h"

#include <math.h>

enum { MOST_ROUNDS = 100, SETTLE_MS = 15, PATTERN = 1 << 22, LEAST_LAUNCHES = 4 };
static const double MOST_ERROR = 0.10; /* of a result in e4m3 from that in bf16: the recipe's is 5 to 7 % */

typedef struct timed_layer {
    const char *name;
    int64_t tokens, hidden, intermediate, experts, topk;
} timed_layer;

static const timed_layer paper[] = {
    {"1.4B-n256", 40960, 768, 256, 128, 8},    {"1.4B-n512", 40960, 768, 512, 64, 4},
    {"1.4B-n1024", 40960, 768, 1024, 32, 2},   {"7B-n256", 24576, 1536, 256, 128, 8},
    {"7B-n512", 24576, 1536, 512, 64, 4},      {"7B-n1024", 24576, 1536, 1024, 32, 2},
    {"30B-n256", 32768, 4096, 256, 256, 16},   {"30B-n512", 32768, 4096, 512, 128, 8},
    {"30B-n1024", 32768, 4096, 1024, 64, 4},   {"120B-n512", 32768, 4096, 512, 256, 16},
    {"120B-n1024", 32768, 4096, 1024, 128, 8}, {"120B-n2048", 32768, 4096, 2048, 64, 4},
};

/* How a layer is measured. */
typedef struct settings {
    smoe_context *context;
    int uniform, rounds;
} settings;

static inline smoe_layer describe(const timed_layer *l)
{
    smoe_layer description = SMOE_LAYER_INIT;
    description.tokens = l->tokens, description.hidden = l->hidden, description.topk = l->topk;
    description.intermediate = l->intermediate, description.experts = l->experts;
    description.entry = SMOE_ENTRY_FROM_TOPK;
    return description;
}

/* ---- Inputs ---- */

static inline uint16_t to_bf16(float value)
{
    return (uint16_t)((moe_bits_of(value) + 0x8000) >> 16);
}

static inline float bf16_at(const uint16_t *p, int64_t i)
{
    return moe_float_of((uint32_t)p[i] << 16);
}

/* With the tails of the normal distribution: from the largest of many follows which exponent dw expects, and
 * a largest number that is too small makes it multiply by row factors (f8.h). */
static inline float normal_number(uint64_t *random)
{
    const double radius = ((double)(next_random(random) >> 8) + 0.5) * 0x1p-24;
    const double angle = (double)(next_random(random) >> 8) * (2.0 * 3.14159265358979 * 0x1p-24);
    return (float)(sqrt(-2.0 * log(radius)) * cos(angle));
}

/* `count` normal numbers times `scale`: copies of parts of one pattern, each part with another start. */
static inline gpu_buffer normal(int64_t count, float scale, uint64_t seed)
{
    uint16_t *host = malloc(sizeof *host * PATTERN);
    for (int i = 0; i < PATTERN; i++) host[i] = to_bf16(scale * normal_number(&seed));
    const gpu_buffer made = gpu_alloc((size_t)count * 2);
    for (int64_t done = 0, run = 0; done < count; run++) {
        const int64_t from = run * 8200 % (PATTERN / 2), rest = count - done;
        const int64_t length = rest < PATTERN - from ? rest : PATTERN - from;
        CHECK_CUDA(
            cudaMemcpy(made.memory + done * 2, host + from, (size_t)length * 2, cudaMemcpyHostToDevice));
        done += length;
    }
    CHECK_CUDA(cudaDeviceSynchronize()); /* a non-blocking stream does not wait for the last bytes */
    free(host);
    return made;
}

/* K different experts for each token: drawn at random, or in turn, so that all have equal counts. */
static inline gpu_buffer route(const timed_layer *l, int uniform)
{
    int32_t *ids = malloc((size_t)(l->tokens * l->topk) * sizeof *ids);
    uint64_t random = 3;
    for (int64_t i = 0; i < l->tokens * l->topk; i++) {
        int again = 1;
        while (again) {
            ids[i] = (int32_t)((uniform ? (uint64_t)i : next_random(&random)) % (uint64_t)l->experts);
            again = 0;
            for (int64_t j = i - i % l->topk; j < i; j++) again |= ids[j] == ids[i];
        }
    }
    const gpu_buffer made = gpu_copy(ids, (size_t)(l->tokens * l->topk) * sizeof *ids);
    free(ids);
    return made;
}

static inline gpu_buffer equal_weights(const timed_layer *l)
{
    const int64_t count = l->tokens * l->topk;
    float *host = malloc((size_t)count * sizeof *host);
    for (int64_t i = 0; i < count; i++) host[i] = 1.0f / (float)l->topk;
    const gpu_buffer made = gpu_copy(host, (size_t)count * sizeof *host);
    free(host);
    return made;
}

/* The inputs of a layer's experts in bf16, and O. */
typedef struct timed_inputs {
    gpu_buffer x, w1, w2, ids, topk_weights, out;
} timed_inputs;

static inline timed_inputs make_inputs(const timed_layer *l, int uniform)
{
    const int64_t T = l->tokens, d = l->hidden, n = l->intermediate, E = l->experts;
    return (timed_inputs){
        .x = normal(T * d, 1.0f, 11),
        .w1 = normal(E * 2 * n * d, 1.0f / sqrtf((float)d), 12),
        .w2 = normal(E * d * n, 1.0f / sqrtf((float)n), 13),
        .ids = route(l, uniform),
        .topk_weights = equal_weights(l),
        .out = gpu_alloc((size_t)(T * d) * 2),
    };
}

static inline smoe_forward_args forward_args_of(const timed_inputs *in)
{
    smoe_forward_args args = SMOE_FORWARD_ARGS_INIT;
    args.x = in->x.memory, args.w1 = in->w1.memory, args.w2 = in->w2.memory;
    args.topk_ids = in->ids.memory, args.topk_weights = (float *)(void *)in->topk_weights.memory;
    args.out = in->out.memory;
    return args;
}

static inline void must(smoe_context *context, smoe_status status)
{
    if (status == SMOE_OK) return;
    fprintf(stderr, "%s\n", smoe_last_error(context));
    exit(3);
}

/* ---- Jobs ---- */

static inline cudaGraphExec_t end_capture(cudaStream_t stream)
{
    cudaGraph_t graph;
    cudaGraphExec_t made;
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&made, graph, 0));
    CHECK_CUDA(cudaGraphDestroy(graph));
    return made;
}

/* ms of one launch. */
static inline double launch(cudaStream_t stream, cudaGraphExec_t graph, int launches)
{
    cudaEvent_t begin, end;
    float ms;
    CHECK_CUDA(cudaEventCreate(&begin));
    CHECK_CUDA(cudaEventCreate(&end));
    CHECK_CUDA(cudaEventRecord(begin, stream));
    for (int i = 0; i < launches; i++) CHECK_CUDA(cudaGraphLaunch(graph, stream));
    CHECK_CUDA(cudaEventRecord(end, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    CHECK_CUDA(cudaEventDestroy(begin));
    CHECK_CUDA(cudaEventDestroy(end));
    return ms / launches;
}

/* Median times of `jobs` graphs. before[j]: a graph that runs once before the turn of graph j, or NULL. */
static inline void take_turns(cudaStream_t stream, const cudaGraphExec_t *graphs,
                              const cudaGraphExec_t *before, int jobs, int rounds, int launches,
                              double *medians)
{
    int settle[TURNS_MOST];
    double(*ms)[MOST_ROUNDS] = malloc((size_t)jobs * sizeof *ms);
    for (int j = 0; j < jobs; j++) { /* the first launch is not counted */
        launch(stream, graphs[j], 1);
        settle[j] = (int)(SETTLE_MS / launch(stream, graphs[j], LEAST_LAUNCHES)) + 1;
    }
    for (int round = 0; round < rounds; round++)
        for (int i = 0; i < jobs; i++) {
            const int j = turn_of(1, round, i, jobs);
            if (before && before[j]) launch(stream, before[j], 1);
            launch(stream, graphs[j], settle[j]);
            ms[j][round] = launch(stream, graphs[j], launches);
        }
    for (int j = 0; j < jobs; j++) medians[j] = middle_of(ms[j], rounds).median;
    free(ms);
}

/* |f8 - bf16| / |bf16|, Frobenius, of the first elements of two results in bf16. */
static inline double difference_of(const void *f8, const void *bf, int64_t count)
{
    enum { MOST = 1 << 25 };
    if (count > MOST) count = MOST;
    uint16_t *got = gpu_read(f8, (size_t)count * 2), *wanted = gpu_read(bf, (size_t)count * 2);
    double squares = 0.0, differences = 0.0;
    for (int64_t i = 0; i < count; i++) {
        const double want = (double)bf16_at(wanted, i), error = (double)bf16_at(got, i) - want;
        squares += want * want, differences += error * error;
    }
    free(got), free(wanted);
    return sqrt(differences / squares);
}

/* ---- The program ---- */

/* Ends the program with 2 if the command line is wrong, with 77 without a Hopper GPU. */
static inline settings open_settings(const char *program, int argc, char **argv)
{
    const int rounds = argc > 1 ? atoi(argv[1]) : 0;
    if (argc < 3 || rounds < 1 || rounds > MOST_ROUNDS ||
        (strcmp(argv[2], "random") && strcmp(argv[2], "uniform"))) {
        fprintf(stderr, "%s ROUNDS random|uniform [T,d,n,E,K]...  (1 to %d rounds)\n", program, MOST_ROUNDS);
        exit(2);
    }
    char text[400] = "";
    settings s = {NULL, !strcmp(argv[2], "uniform"), rounds};
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.backend = SMOE_BACKEND_CUDA;
    options.error_text = text, options.error_size = sizeof text;
    const smoe_status status = smoe_create(&s.context, &options);
    if (status != SMOE_OK || ((const device_state *)s.context->state)->kernels != &moe_sm90_kernels) {
        printf("no device of compute capability 9.0: %s\n", text);
        exit(77);
    }
    printf("times of bf16, e4m3, their ratio; %s routing, %d rounds\n", argv[2], rounds);
    return s;
}

/* Layer i of the command line, or of the paper; 0 if there are no more. */
static inline int next_layer(const char *program, int argc, char **argv, int i, timed_layer *l)
{
    if (argc == 3) {
        if (i >= (int)(sizeof paper / sizeof *paper)) return 0;
        *l = paper[i];
        return 1;
    }
    if (3 + i >= argc) return 0;
    long long v[5];
    if (sscanf(argv[3 + i], "%lld,%lld,%lld,%lld,%lld", v, v + 1, v + 2, v + 3, v + 4) != 5) {
        fprintf(stderr, "%s: '%s' is not T,d,n,E,K\n", program, argv[3 + i]);
        exit(2);
    }
    *l = (timed_layer){argv[3 + i], v[0], v[1], v[2], v[3], v[4]};
    return 1;
}

#endif
