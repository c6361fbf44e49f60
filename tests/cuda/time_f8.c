/* Times the forward with the experts' GEMMs in e4m3 beside that in bf16:
 *
 *   time_f8 ROUNDS random|uniform [T,d,n,E,K]...
 *
 * Without layers the twelve of the paper are measured, with 9 rounds in about two minutes. SwiGLU, from
 * given top-K. The forward is plan, up, down and combine; with e4m3 it also quantises X. All jobs take turns
 * in one process: in its turn a job first runs for SETTLE_MS, so that the GPU is at its power limit, and then
 * LAUNCHES launches of its CUDA graph are timed. Times are medians over the rounds, in ms.
 *
 * The last lines have geometric means over the layers, and what issue 52 decides by them. The exit status is
 * 1 if the results of both forwards differ by more than MOST_ERROR: the recipe's error is 6.6 %. */
#include "base/turns.h"
#include "bench/median.h"
#include "gpu.h"
#include "host/forward.h"
#include "route_cases.h"
#include "sm90/f8_kernels.h"

#include <math.h>

enum { MOST_ROUNDS = 100, SETTLE_MS = 15, LAUNCHES = 8, PATTERN = 1 << 22, LEAST_LAUNCHES = 4 };
static const double MOST_ERROR = 0.10, LEAST_FORWARD = 1.22, TARGET_FORWARD = 1.28;
static const double WEIGHTS_BYTES_A_SECOND = 3.7e12, MOST_OF_WEIGHTS_TIME = 1.15;

typedef enum job { FORWARD, UP, DOWN, FORWARD_F8, ROWS_F8, UP_F8, DOWN_F8, WEIGHTS_F8, JOBS } job;
static_assert((int)JOBS <= (int)TURNS_MOST, "jobs that take turns");

typedef struct layer {
    const char *name;
    int64_t tokens, hidden, intermediate, experts, topk;
} layer;

static const layer paper[] = {
    {"1.4B-n256", 40960, 768, 256, 128, 8},    {"1.4B-n512", 40960, 768, 512, 64, 4},
    {"1.4B-n1024", 40960, 768, 1024, 32, 2},   {"7B-n256", 24576, 1536, 256, 128, 8},
    {"7B-n512", 24576, 1536, 512, 64, 4},      {"7B-n1024", 24576, 1536, 1024, 32, 2},
    {"30B-n256", 32768, 4096, 256, 256, 16},   {"30B-n512", 32768, 4096, 512, 128, 8},
    {"30B-n1024", 32768, 4096, 1024, 64, 4},   {"120B-n512", 32768, 4096, 512, 256, 16},
    {"120B-n1024", 32768, 4096, 1024, 128, 8}, {"120B-n2048", 32768, 4096, 2048, 64, 4},
};

/* A layer, and what both forwards need for it. */
typedef struct problem {
    smoe_context *context;
    const device_state *state;
    moe_call call;
    smoe_forward_args args;
    forward_call forward;
    moe_f8_weights weights;
    gpu_buffer x, w1, w2, ids, topk_weights, out, saved, scratch;
    gpu_buffer x8, x_scale, a8, a_scale, weights_f8;
    cudaStream_t stream;
    cudaGraphExec_t graphs[JOBS];
    double ms[JOBS][MOST_ROUNDS];
} problem;

static uint16_t to_bf16(float value)
{
    return (uint16_t)((moe_bits_of(value) + 0x8000) >> 16);
}

/* `count` normal numbers times `scale`: copies of parts of one pattern, each part with another start. */
static gpu_buffer normal(int64_t count, float scale, uint64_t seed)
{
    uint16_t *host = malloc(sizeof *host * PATTERN);
    for (int i = 0; i < PATTERN; i++) host[i] = to_bf16(scale * bell(&seed));
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
static gpu_buffer route(const layer *l, int uniform)
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

static gpu_buffer equal_weights(const layer *l)
{
    const int64_t count = l->tokens * l->topk;
    float *host = malloc((size_t)count * sizeof *host);
    for (int64_t i = 0; i < count; i++) host[i] = 1.0f / (float)l->topk;
    const gpu_buffer made = gpu_copy(host, (size_t)count * sizeof *host);
    free(host);
    return made;
}

static void must(smoe_context *context, smoe_status status)
{
    if (status == SMOE_OK) return;
    fprintf(stderr, "time_f8: %s\n", smoe_last_error(context));
    exit(3);
}

static void make_inputs(problem *p, const layer *l, int uniform)
{
    const int64_t T = l->tokens, d = l->hidden, n = l->intermediate, E = l->experts;
    p->x = normal(T * d, 1.0f, 11);
    p->w1 = normal(E * 2 * n * d, 1.0f / sqrtf((float)d), 12);
    p->w2 = normal(E * d * n, 1.0f / sqrtf((float)n), 13);
    p->ids = route(l, uniform);
    p->topk_weights = equal_weights(l);
    p->out = gpu_alloc((size_t)(T * d) * 2);
}

static void make_problem(problem *p, const layer *l, int uniform)
{
    smoe_layer description = SMOE_LAYER_INIT;
    description.tokens = l->tokens, description.hidden = l->hidden, description.topk = l->topk;
    description.intermediate = l->intermediate, description.experts = l->experts;
    description.entry = SMOE_ENTRY_FROM_TOPK;
    moe_problem *checked = &p->call.problem;
    moe_problem_init(checked, &description);
    moe_cuda_lay_out_forward(p->state, checked, &p->call.layout);
    make_inputs(p, l, uniform);
    const size_t rows = (size_t)checked->padded_rows;
    p->saved = gpu_alloc(checked->saved_buffer_bytes);
    p->scratch = gpu_alloc(p->call.layout.bytes);
    p->x8 = gpu_alloc((size_t)(l->tokens * l->hidden)), p->x_scale = gpu_alloc((size_t)l->tokens * 4);
    p->a8 = gpu_alloc(rows * (size_t)l->intermediate);
    p->a_scale = gpu_alloc(rows * (size_t)moe_f8_groups(l->intermediate, MOE_F8_A_FEATURES) * 4);
    p->weights_f8 = gpu_alloc((size_t)moe_f8_weights_at(checked, NULL).bytes);
    p->weights = moe_f8_weights_at(checked, p->weights_f8.memory);
    CHECK_CUDA(cudaStreamCreateWithFlags(&p->stream, cudaStreamNonBlocking));
    p->args = (smoe_forward_args)SMOE_FORWARD_ARGS_INIT;
    p->args.x = p->x.memory, p->args.w1 = p->w1.memory, p->args.w2 = p->w2.memory;
    p->args.topk_ids = p->ids.memory, p->args.topk_weights = (float *)(void *)p->topk_weights.memory;
    p->args.out = p->out.memory;
    p->call.plan = moe_plan_at(checked, p->saved.memory);
    p->call.scratch = p->scratch.memory;
    p->call.stream = p->stream;
    p->forward = moe_cuda_forward_call(p->state, checked, &p->call.layout, &p->call.plan, &p->args,
                                       p->scratch.memory, p->stream);
}

/* ---- Jobs ---- */

static void enqueue_weights(problem *p)
{
    const smoe_layer *l = &p->call.problem.layer;
    const moe_f8_quantized q = {.w1 = p->w1.memory,
                                .w2 = p->w2.memory,
                                .type = SMOE_TYPE_BF16,
                                .to = p->weights,
                                .count = l->experts,
                                .hidden = l->hidden,
                                .intermediate = l->intermediate,
                                .h_width = p->call.problem.h_width};
    CHECK_CUDA(moe_sm90_f8_weights(&p->forward.on, &q));
}

static void enqueue_rows(problem *p)
{
    const smoe_layer *l = &p->call.problem.layer;
    const moe_f8_rows rows = {p->x.memory, (uint8_t *)p->x8.memory, (float *)(void *)p->x_scale.memory,
                              l->tokens, l->hidden};
    CHECK_CUDA(moe_sm90_f8_rows(&p->forward.on, &rows));
}

static void enqueue_up(problem *p)
{
    const smoe_layer *l = &p->call.problem.layer;
    forward_call *c = &p->forward;
    const moe_f8_up up = {
        .up = {.x = p->x8.memory,
               .w1 = p->weights.w1,
               .h = c->plan->h,
               .a = p->a8.memory,
               .row_token = c->plan->row_token,
               .block_offsets = c->block_offsets,
               .block_stride = c->block_stride,
               .lists = c->lists,
               .rows = c->rows,
               .h_rows = c->rows,
               .hidden = l->hidden,
               .intermediate = l->intermediate,
               .experts = l->experts,
               .gated = 1,
               .activation = l->activation,
               .values = moe_gate_values_of(l)},
        .x_scale = (float *)(void *)p->x_scale.memory,
        .w_scale = p->weights.scale1,
        .a_scale = (float *)(void *)p->a_scale.memory,
    };
    CHECK_CUDA(moe_sm90_f8_up(&c->on, &up));
}

static void enqueue_down(problem *p)
{
    const smoe_layer *l = &p->call.problem.layer;
    forward_call *c = &p->forward;
    const moe_f8_down down = {
        .down = {.a = p->a8.memory,
                 .w2 = p->weights.w2,
                 .y = c->y,
                 .row_token = c->plan->row_token,
                 .block_offsets = c->block_offsets,
                 .block_stride = c->block_stride,
                 .lists = c->lists,
                 .rows = c->rows,
                 .hidden = l->hidden,
                 .intermediate = l->intermediate,
                 .experts = l->experts,
                 .columns = l->hidden},
        .a_scale = (float *)(void *)p->a_scale.memory,
        .w_scale = p->weights.scale2,
    };
    CHECK_CUDA(moe_sm90_f8_down(&c->on, &down));
}

static void enqueue_combine(problem *p)
{
    const smoe_layer *l = &p->call.problem.layer;
    const forward_call *c = &p->forward;
    const moe_cuda_combine combine = {.y = c->y,
                                      .out = p->out.memory,
                                      .token_offsets = c->plan->token_offsets,
                                      .token_rows = c->plan->token_rows,
                                      .row_weight = c->plan->row_weight,
                                      .topk = moe_rows_of_a_token(l),
                                      .tokens = l->tokens,
                                      .hidden = l->hidden,
                                      .columns = l->hidden};
    CHECK_CUDA(moe_cuda_combine_launch(&c->on, &combine));
}

static void enqueue(problem *p, job which)
{
    switch (which) {
    case FORWARD:
        must(p->context, moe_cuda_forward(p->context, &p->call, &p->args, MOE_PLAN | MOE_EXPERTS));
        break;
    case UP: CHECK_CUDA(moe_cuda_up(&p->forward)); break;
    case DOWN: CHECK_CUDA(moe_cuda_down(&p->forward, 0, p->call.problem.layer.hidden)); break;
    case FORWARD_F8:
        must(p->context, moe_cuda_forward(p->context, &p->call, &p->args, MOE_PLAN));
        enqueue_rows(p);
        enqueue_up(p);
        enqueue_down(p);
        enqueue_combine(p);
        break;
    case ROWS_F8: enqueue_rows(p); break;
    case UP_F8: enqueue_up(p); break;
    case DOWN_F8: enqueue_down(p); break;
    case WEIGHTS_F8: enqueue_weights(p); break;
    case JOBS: break;
    }
}

static void record(problem *p)
{
    for (job j = FORWARD; j < JOBS; j++) {
        cudaGraph_t graph;
        CHECK_CUDA(cudaStreamBeginCapture(p->stream, cudaStreamCaptureModeThreadLocal));
        enqueue(p, j);
        CHECK_CUDA(cudaStreamEndCapture(p->stream, &graph));
        CHECK_CUDA(cudaGraphInstantiate(&p->graphs[j], graph, 0));
        CHECK_CUDA(cudaGraphDestroy(graph));
    }
}

/* ---- Times and results ---- */

static double launch(problem *p, job which, int launches)
{
    cudaEvent_t begin, end;
    float ms;
    CHECK_CUDA(cudaEventCreate(&begin));
    CHECK_CUDA(cudaEventCreate(&end));
    CHECK_CUDA(cudaEventRecord(begin, p->stream));
    for (int i = 0; i < launches; i++) CHECK_CUDA(cudaGraphLaunch(p->graphs[which], p->stream));
    CHECK_CUDA(cudaEventRecord(end, p->stream));
    CHECK_CUDA(cudaStreamSynchronize(p->stream));
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    CHECK_CUDA(cudaEventDestroy(begin));
    CHECK_CUDA(cudaEventDestroy(end));
    return ms / launches;
}

static void time_jobs(problem *p, int rounds)
{
    int settle[JOBS];
    for (job j = FORWARD; j < JOBS; j++) { /* the first launch is not counted */
        launch(p, j, 1);
        settle[j] = (int)(SETTLE_MS / launch(p, j, LEAST_LAUNCHES)) + 1;
    }
    for (int round = 0; round < rounds; round++)
        for (int i = 0; i < JOBS; i++) {
            const job j = (job)turn_of(1, round, i, JOBS);
            launch(p, j, settle[j]);
            p->ms[j][round] = launch(p, j, LAUNCHES);
        }
}

static float bf16_at(const uint16_t *p, int64_t i)
{
    return moe_float_of((uint32_t)p[i] << 16);
}

/* |O of e4m3 - O of bf16| / |O of bf16|, Frobenius; also quantises the weights. */
static double difference(problem *p)
{
    const int64_t count = p->call.problem.layer.tokens * p->call.problem.layer.hidden;
    uint16_t *results[2];
    enqueue_weights(p);
    for (int f8 = 0; f8 < 2; f8++) {
        enqueue(p, f8 ? FORWARD_F8 : FORWARD);
        CHECK_CUDA(cudaStreamSynchronize(p->stream));
        results[f8] = gpu_read(p->out.memory, (size_t)count * 2);
    }
    double squares = 0.0, differences = 0.0;
    for (int64_t i = 0; i < count; i++) {
        const double want = (double)bf16_at(results[0], i), error = (double)bf16_at(results[1], i) - want;
        squares += want * want, differences += error * error;
    }
    free(results[0]), free(results[1]);
    return sqrt(differences / squares);
}

static void free_problem(problem *p)
{
    const gpu_buffer all[] = {p->x,       p->w1, p->w2,      p->ids, p->topk_weights, p->out,       p->saved,
                              p->scratch, p->x8, p->x_scale, p->a8,  p->a_scale,      p->weights_f8};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (gpu_free(all[i])) printf("time_f8: buffer %zu was written outside\n", i);
    for (job j = FORWARD; j < JOBS; j++) CHECK_CUDA(cudaGraphExecDestroy(p->graphs[j]));
    CHECK_CUDA(cudaStreamDestroy(p->stream));
}

/* Logarithms of the speed-ups, summed over the layers. */
typedef struct sums {
    double forward, with_weights, up, down, worst_weights;
    int layers;
} sums;

static int measure(smoe_context *context, const layer *l, int uniform, int rounds, sums *s)
{
    problem *p = calloc(1, sizeof *p);
    p->context = context, p->state = context->state;
    make_problem(p, l, uniform);
    const double error = difference(p);
    record(p);
    time_jobs(p, rounds);
    double ms[JOBS];
    for (job j = FORWARD; j < JOBS; j++) ms[j] = middle_of(p->ms[j], rounds).median;
    const double forward = ms[FORWARD] / ms[FORWARD_F8];
    const double with_weights = ms[FORWARD] / (ms[FORWARD_F8] + ms[WEIGHTS_F8]);
    const double bytes = 12.0 * (double)(l->experts * l->hidden * l->intermediate);
    const double weights = ms[WEIGHTS_F8] * 1e-3 / (bytes / WEIGHTS_BYTES_A_SECOND);
    printf("%-11s forward %7.3f %7.3f %6.3f | up %7.3f %7.3f %6.3f | down %7.3f %7.3f %6.3f | X %6.3f | "
           "weights %6.3f, %4.2f of 12 E d n bytes | forward with weights %6.3f | error %.4f\n",
           l->name, ms[FORWARD], ms[FORWARD_F8], forward, ms[UP], ms[UP_F8], ms[UP] / ms[UP_F8], ms[DOWN],
           ms[DOWN_F8], ms[DOWN] / ms[DOWN_F8], ms[ROWS_F8], ms[WEIGHTS_F8], weights, with_weights, error);
    fflush(stdout);
    s->forward += log(forward), s->with_weights += log(with_weights), s->layers++;
    s->up += log(ms[UP] / ms[UP_F8]), s->down += log(ms[DOWN] / ms[DOWN_F8]);
    s->worst_weights = fmax(s->worst_weights, weights);
    free_problem(p);
    free(p);
    return !(error <= MOST_ERROR);
}

static void decide(const sums *s)
{
    const double forward = exp(s->forward / s->layers), weights = exp(s->with_weights / s->layers);
    printf("means of %d layers: forward %.3f, forward with weights %.3f, up %.3f, down %.3f\n", s->layers,
           forward, weights, exp(s->up / s->layers), exp(s->down / s->layers));
    printf("forward: %.3f, stop below %.2f, target %.2f: %s\n", forward, LEAST_FORWARD, TARGET_FORWARD,
           forward < LEAST_FORWARD    ? "STOP"
           : forward < TARGET_FORWARD ? "go on, below the target"
                                      : "go on");
    printf("quantising weights: at most %.2f of the time of 12 E d n bytes at 3.7 TB/s, %.2f allowed: %s\n",
           s->worst_weights, MOST_OF_WEIGHTS_TIME,
           s->worst_weights <= MOST_OF_WEIGHTS_TIME ? "kept" : "missed");
}

int main(int argc, char **argv)
{
    const int rounds = argc > 1 ? atoi(argv[1]) : 0;
    if (argc < 3 || rounds < 1 || rounds > MOST_ROUNDS ||
        (strcmp(argv[2], "random") && strcmp(argv[2], "uniform"))) {
        fprintf(stderr, "time_f8 ROUNDS random|uniform [T,d,n,E,K]...  (1 to %d rounds)\n", MOST_ROUNDS);
        return 2;
    }
    char text[400] = "";
    smoe_context *context;
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.backend = SMOE_BACKEND_CUDA;
    options.error_text = text, options.error_size = sizeof text;
    const smoe_status status = smoe_create(&context, &options);
    if (status != SMOE_OK || ((const device_state *)context->state)->kernels != &moe_sm90_kernels) {
        printf("no device of compute capability 9.0: %s\n", text);
        return 77;
    }
    printf("times of bf16, e4m3, their ratio; %s routing, %d rounds\n", argv[2], rounds);
    sums s = {0};
    int failed = 0;
    const int uniform = !strcmp(argv[2], "uniform");
    for (size_t i = 0; argc == 3 && i < sizeof paper / sizeof *paper; i++)
        failed |= measure(context, &paper[i], uniform, rounds, &s);
    for (int i = 3; i < argc; i++) {
        long long v[5];
        if (sscanf(argv[i], "%lld,%lld,%lld,%lld,%lld", v, v + 1, v + 2, v + 3, v + 4) != 5) {
            fprintf(stderr, "time_f8: '%s' is not T,d,n,E,K\n", argv[i]);
            return 2;
        }
        const layer l = {argv[i], v[0], v[1], v[2], v[3], v[4]};
        failed |= measure(context, &l, uniform, rounds, &s);
    }
    decide(&s);
    smoe_destroy(context);
    return failed;
}
