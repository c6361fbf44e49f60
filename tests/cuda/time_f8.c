/* Times the forward with the experts' GEMMs in e4m3 beside that in bf16; time_f8.h has the command line. With
 * 9 rounds the paper's layers take about two minutes. The forward is plan, up, down and combine; with e4m3 it
 * also quantises X.
 *
 * The last lines have geometric means over the layers, and what issue 52 decides by them. The exit status is
 * 1 if the results of both forwards differ by more than MOST_ERROR. */
#include "time_f8.h"
#include "host/forward.h"

enum { LAUNCHES = 8 };
static const double LEAST_FORWARD = 1.22, TARGET_FORWARD = 1.28;
static const double WEIGHTS_BYTES_A_SECOND = 3.7e12, MOST_OF_WEIGHTS_TIME = 1.15;

typedef enum job { FORWARD, UP, DOWN, FORWARD_F8, ROWS_F8, UP_F8, DOWN_F8, WEIGHTS_F8, JOBS } job;
static_assert((int)JOBS <= (int)TURNS_MOST, "jobs that take turns");

/* A layer, and what both forwards need for it. */
typedef struct problem {
    smoe_context *context;
    const device_state *state;
    moe_call call;
    smoe_forward_args args;
    forward_call forward;
    moe_f8_weights weights;
    timed_inputs in;
    gpu_buffer saved, scratch;
    gpu_buffer x8, x_scale, a8, a_scale, weights_f8;
    cudaStream_t stream;
    cudaGraphExec_t graphs[JOBS];
} problem;

static void make_problem(problem *p, const timed_layer *l, int uniform)
{
    const smoe_layer description = describe(l);
    moe_problem *checked = &p->call.problem;
    moe_problem_init(checked, &description);
    moe_cuda_lay_out_forward(p->state, checked, &p->call.layout);
    p->in = make_inputs(l, uniform);
    const size_t rows = (size_t)checked->padded_rows;
    p->saved = gpu_alloc(checked->saved_buffer_bytes);
    p->scratch = gpu_alloc(p->call.layout.bytes);
    p->x8 = gpu_alloc((size_t)(l->tokens * l->hidden)), p->x_scale = gpu_alloc((size_t)l->tokens * 4);
    p->a8 = gpu_alloc(rows * (size_t)l->intermediate);
    p->a_scale = gpu_alloc(rows * (size_t)moe_f8_groups(l->intermediate, MOE_F8_A_FEATURES) * 4);
    p->weights_f8 = gpu_alloc((size_t)moe_f8_weights_at(checked, NULL).bytes);
    p->weights = moe_f8_weights_at(checked, p->weights_f8.memory);
    CHECK_CUDA(cudaStreamCreateWithFlags(&p->stream, cudaStreamNonBlocking));
    p->args = forward_args_of(&p->in);
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
    const moe_f8_quantized q = {.w1 = p->in.w1.memory,
                                .w2 = p->in.w2.memory,
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
    const moe_f8_rows rows = {p->in.x.memory, (uint8_t *)p->x8.memory, (float *)(void *)p->x_scale.memory,
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
                                      .out = p->in.out.memory,
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
        CHECK_CUDA(cudaStreamBeginCapture(p->stream, cudaStreamCaptureModeThreadLocal));
        enqueue(p, j);
        p->graphs[j] = end_capture(p->stream);
    }
}

/* ---- Times and results ---- */

/* |O of e4m3 - O of bf16| / |O of bf16|, Frobenius; also quantises the weights. */
static double difference(problem *p)
{
    const int64_t count = p->call.problem.layer.tokens * p->call.problem.layer.hidden;
    const gpu_buffer bf = gpu_alloc((size_t)count * 2);
    enqueue(p, FORWARD);
    CHECK_CUDA(
        cudaMemcpyAsync(bf.memory, p->in.out.memory, (size_t)count * 2, cudaMemcpyDeviceToDevice, p->stream));
    enqueue_weights(p);
    enqueue(p, FORWARD_F8);
    CHECK_CUDA(cudaStreamSynchronize(p->stream));
    const double error = difference_of(p->in.out.memory, bf.memory, count);
    gpu_free(bf);
    return error;
}

static void free_problem(problem *p)
{
    const gpu_buffer all[] = {p->in.x,   p->in.w1,   p->in.w2,     p->in.ids, p->in.topk_weights,
                              p->in.out, p->saved,   p->scratch,   p->x8,     p->x_scale,
                              p->a8,     p->a_scale, p->weights_f8};
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

static int measure(const settings *how, const timed_layer *l, sums *s)
{
    problem *p = calloc(1, sizeof *p);
    p->context = how->context, p->state = how->context->state;
    make_problem(p, l, how->uniform);
    const double error = difference(p);
    record(p);
    double ms[JOBS];
    take_turns(p->stream, p->graphs, NULL, JOBS, how->rounds, LAUNCHES, ms);
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
    const settings how = open_settings("time_f8", argc, argv);
    sums s = {0};
    timed_layer l;
    int failed = 0;
    for (int i = 0; next_layer("time_f8", argc, argv, i, &l); i++) failed |= measure(&how, &l, &s);
    decide(&s);
    smoe_destroy(how.context);
    return failed;
}
