/* Times training with SMOE_COMPUTE_F8 and _F8_DGRAD beside that in bf16; time_f8.h has the command line. The
 * backward computes dX, dW1, dW2 and dS. Each time includes the quantising of X and dO. "With weights": the
 * weights are quantised before, in every step; for forward and backward together that is one graph, else
 * their time is added.
 *
 * The last lines have geometric means over the layers with the least layer of each, and what issue 52 decides
 * by them. The exit status is 1 if dX, dW1 or dW2 differ from bf16's by more than MOST_ERROR. */
#include "host/backward.h"
#include "host/forward.h"
#include "time_f8.h"

enum { LAUNCHES = 4 };

typedef enum side_id { BF16, DGRAD, F8, SIDES } side_id;

/* The first ones come in pairs: bf16, fp8. */
typedef enum job {
    FORWARD,
    FORWARD_F8,
    BACKWARD,
    BACKWARD_F8,
    LAYER,
    LAYER_F8,
    UP,
    UP_F8,
    DOWN,
    DOWN_F8,
    DH,
    DH_F8,
    DX_ROWS,
    DX_ROWS_F8,
    DW2,
    DW2_F8,
    DW1,
    DW1_F8,
    STEP_F8, /* the weights are quantised, then forward and backward */
    WEIGHTS_F8,
    BACKWARD_DGRAD,
    LAYER_DGRAD,
    STEP_DGRAD,
    JOBS
} job;
static_assert((int)JOBS <= (int)TURNS_MOST, "jobs that take turns");

/* Speed-ups over bf16. The first ones are those of the pairs of jobs. */
typedef enum ratio {
    OF_FORWARD,
    OF_BACKWARD,
    OF_LAYER,
    OF_UP,
    OF_DOWN,
    OF_DH,
    OF_DX_ROWS,
    OF_DW2,
    OF_DW1,
    FORWARD_WITH_WEIGHTS,
    BACKWARD_WITH_WEIGHTS,
    LAYER_WITH_WEIGHTS,
    DGRAD_BACKWARD,
    DGRAD_LAYER,
    DGRAD_WITH_WEIGHTS,
    RATIOS
} ratio;
static const ratio PAIRS = FORWARD_WITH_WEIGHTS, FIRST_STAGE = OF_UP;
static const char *const names[RATIOS] = {"forward",
                                          "backward",
                                          "both",
                                          "up",
                                          "down",
                                          "dh",
                                          "dx_rows",
                                          "dw2",
                                          "dw1",
                                          "forward with weights",
                                          "backward with weights",
                                          "both with weights",
                                          "F8_DGRAD backward",
                                          "F8_DGRAD both",
                                          "F8_DGRAD both with weights"};

/* A layer in bf16 or fp8. */
typedef struct side {
    moe_call forward, backward;
    smoe_forward_args forward_args;
    smoe_backward_args backward_args;
    forward_call forward_stages;
    backward_call stages; /* of `backward` */
    gpu_buffer saved, forward_scratch, backward_scratch, dx, dw1, dw2;
} side;

typedef struct problem {
    smoe_context *context;
    const device_state *state;
    side sides[SIDES];
    timed_inputs in;
    gpu_buffer dout, ds, weights_f8;
    cudaStream_t stream;
    cudaGraphExec_t graphs[JOBS];
} problem;

/* ---- A layer ---- */

static void make_arguments(const problem *p, side *s)
{
    s->forward_args = forward_args_of(&p->in);
    s->backward_args = (smoe_backward_args)SMOE_BACKWARD_ARGS_INIT;
    s->backward_args.x = p->in.x.memory, s->backward_args.w1 = p->in.w1.memory,
    s->backward_args.w2 = p->in.w2.memory;
    s->backward_args.topk_ids = p->in.ids.memory, s->backward_args.dout = p->dout.memory;
    s->backward_args.dx = s->dx.memory, s->backward_args.dw1 = s->dw1.memory;
    s->backward_args.dw2 = s->dw2.memory;
    s->backward_args.dtopk_weights = (float *)(void *)p->ds.memory;
    s->forward_args.weights_f8 = s->backward_args.weights_f8 = p->weights_f8.memory;
}

static void make_side(problem *p, const smoe_layer *description, smoe_compute compute, side *s)
{
    moe_problem *checked = &s->forward.problem;
    moe_problem_init(checked, description);
    checked->layer.compute = compute;
    s->backward.problem = *checked;
    moe_cuda_lay_out_forward(p->state, checked, &s->forward.layout);
    moe_cuda_lay_out_backward(p->state, checked, &s->backward.layout);
    s->saved = gpu_alloc(checked->saved_buffer_bytes);
    s->forward_scratch = gpu_alloc(s->forward.layout.bytes);
    s->backward_scratch = gpu_alloc(s->backward.layout.bytes);
    s->dx = gpu_alloc(p->in.x.bytes), s->dw1 = gpu_alloc(p->in.w1.bytes), s->dw2 = gpu_alloc(p->in.w2.bytes);
    make_arguments(p, s);
    s->forward.plan = s->backward.plan = moe_plan_at(checked, s->saved.memory);
    s->forward.scratch = s->forward_scratch.memory, s->backward.scratch = s->backward_scratch.memory;
    s->forward.stream = s->backward.stream = p->stream;
    s->forward_stages =
        moe_cuda_forward_call(p->state, &s->forward.problem, &s->forward.layout, &s->forward.plan,
                              &s->forward_args, s->forward_scratch.memory, p->stream);
    s->stages = moe_cuda_backward_call(p->state, &s->backward.problem, &s->backward.layout, &s->backward.plan,
                                       &s->backward_args, s->backward_scratch.memory, 0, p->stream);
}

static void make_problem(problem *p, const timed_layer *l, int uniform)
{
    smoe_layer description = describe(l);
    description.gradient_type = SMOE_TYPE_BF16;
    moe_problem sized;
    moe_problem_init(&sized, &description);
    CHECK_CUDA(cudaStreamCreateWithFlags(&p->stream, cudaStreamNonBlocking));
    p->in = make_inputs(l, uniform);
    p->dout = normal(l->tokens * l->hidden, 1.0f, 14);
    p->ds = gpu_alloc((size_t)(l->tokens * l->topk) * 4);
    p->weights_f8 = gpu_alloc((size_t)moe_f8_weights_at(&sized, NULL).bytes);
    make_side(p, &description, SMOE_COMPUTE_STORAGE, &p->sides[BF16]);
    make_side(p, &description, SMOE_COMPUTE_F8_DGRAD, &p->sides[DGRAD]);
    make_side(p, &description, SMOE_COMPUTE_F8, &p->sides[F8]);
}

/* ---- Jobs ---- */

static void enqueue_weights(problem *p)
{
    const moe_problem *of = &p->sides[F8].forward.problem;
    smoe_quantize_args args = SMOE_QUANTIZE_ARGS_INIT;
    args.w1 = p->in.w1.memory, args.w2 = p->in.w2.memory;
    args.experts = of->layer.experts;
    args.weights_f8 = p->weights_f8.memory, args.weights_f8_size = p->weights_f8.bytes;
    must(p->context, moe_cuda_quantize_weights(p->context, of, &args, p->stream));
}

static void enqueue_forward(problem *p, side *s)
{
    must(p->context, moe_cuda_forward(p->context, &s->forward, &s->forward_args, MOE_PLAN | MOE_EXPERTS));
}

static void enqueue_backward(problem *p, side *s)
{
    must(p->context, moe_cuda_backward(p->context, &s->backward, &s->backward_args, 0));
}

static void enqueue_layer(problem *p, side *s)
{
    enqueue_forward(p, s);
    enqueue_backward(p, s);
}

static void enqueue_stage(problem *p, job of_bf16, side *s)
{
    const int64_t d = s->backward.problem.layer.hidden;
    switch ((int)of_bf16) {
    case UP: CHECK_CUDA(moe_cuda_up(&s->forward_stages)); break;
    case DOWN: CHECK_CUDA(moe_cuda_down(&s->forward_stages, 0, d)); break;
    case DH: CHECK_CUDA(moe_cuda_run_dh(&s->stages)); break;
    case DX_ROWS: CHECK_CUDA(moe_cuda_run_dx_rows(&s->stages, 0, d)); break;
    case DW2: CHECK_CUDA(moe_cuda_run_dw2(p->context, &s->stages)); break;
    case DW1: CHECK_CUDA(moe_cuda_run_dw1(p->context, &s->stages)); break;
    }
}

static void enqueue(problem *p, job which)
{
    side *of_pair = &p->sides[which % 2 ? F8 : BF16];
    switch (which) {
    case FORWARD:
    case FORWARD_F8: enqueue_forward(p, of_pair); break;
    case BACKWARD:
    case BACKWARD_F8: enqueue_backward(p, of_pair); break;
    case LAYER:
    case LAYER_F8: enqueue_layer(p, of_pair); break;
    case STEP_F8: enqueue_weights(p), enqueue_layer(p, &p->sides[F8]); break;
    case WEIGHTS_F8: enqueue_weights(p); break;
    case BACKWARD_DGRAD: enqueue_backward(p, &p->sides[DGRAD]); break;
    case LAYER_DGRAD: enqueue_layer(p, &p->sides[DGRAD]); break;
    case STEP_DGRAD: enqueue_weights(p), enqueue_layer(p, &p->sides[DGRAD]); break;
    default: enqueue_stage(p, (job)(which - which % 2), of_pair); break;
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

/* ---- Results ---- */

typedef struct errors {
    double dx, dw1, dw2;
} errors;

static errors errors_of(const problem *p, side_id which)
{
    const side *bf = &p->sides[BF16], *f8 = &p->sides[which];
    const smoe_layer *l = &bf->backward.problem.layer;
    const int64_t weights = l->experts * l->hidden * l->intermediate;
    return (errors){difference_of(f8->dx.memory, bf->dx.memory, l->tokens * l->hidden),
                    difference_of(f8->dw1.memory, bf->dw1.memory, 2 * weights),
                    difference_of(f8->dw2.memory, bf->dw2.memory, weights)};
}

static int too_large(const errors *e)
{
    return !(e->dx <= MOST_ERROR && e->dw1 <= MOST_ERROR && e->dw2 <= MOST_ERROR);
}

static void free_problem(problem *p)
{
    const gpu_buffer shared[] = {p->in.x,   p->dout, p->in.w1,     p->in.w2, p->in.ids, p->in.topk_weights,
                                 p->in.out, p->ds,   p->weights_f8};
    int outside = 0;
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++) outside += gpu_free(shared[i]);
    for (side *s = p->sides; s < p->sides + SIDES; s++) {
        const gpu_buffer own[] = {s->saved, s->forward_scratch, s->backward_scratch, s->dx, s->dw1, s->dw2};
        for (size_t i = 0; i < sizeof own / sizeof *own; i++) outside += gpu_free(own[i]);
    }
    if (outside) printf("time_f8_backward: %d buffers were written outside\n", outside);
    for (job j = FORWARD; j < JOBS; j++) CHECK_CUDA(cudaGraphExecDestroy(p->graphs[j]));
    CHECK_CUDA(cudaStreamDestroy(p->stream));
    free(p);
}

/* Of the layers so far: logarithms, summed, and the least. */
typedef struct sums {
    double logs[RATIOS], least[RATIOS];
    const char *least_layer[RATIOS];
    int layers;
} sums;

static void find_ratios(const double *ms, double *r)
{
    for (int i = 0; i < (int)PAIRS; i++) r[i] = ms[2 * i] / ms[2 * i + 1];
    r[FORWARD_WITH_WEIGHTS] = ms[FORWARD] / (ms[FORWARD_F8] + ms[WEIGHTS_F8]);
    r[BACKWARD_WITH_WEIGHTS] = ms[BACKWARD] / (ms[BACKWARD_F8] + ms[WEIGHTS_F8]);
    r[LAYER_WITH_WEIGHTS] = ms[LAYER] / ms[STEP_F8];
    r[DGRAD_BACKWARD] = ms[BACKWARD] / ms[BACKWARD_DGRAD];
    r[DGRAD_LAYER] = ms[LAYER] / ms[LAYER_DGRAD];
    r[DGRAD_WITH_WEIGHTS] = ms[LAYER] / ms[STEP_DGRAD];
}

static void report(const timed_layer *l, const double *ms, const errors *e, sums *s)
{
    double r[RATIOS];
    find_ratios(ms, r);
    printf("%-11s", l->name);
    for (int i = 0; i < (int)PAIRS; i++)
        printf(" %s %7.3f %7.3f %6.3f |", names[i], ms[2 * i], ms[2 * i + 1], r[i]);
    printf(" weights %6.3f |", ms[WEIGHTS_F8]);
    for (int i = (int)PAIRS; i < RATIOS; i++) printf(" %s %6.3f |", names[i], r[i]);
    printf(" error dX %.4f dW1 %.4f dW2 %.4f\n", e->dx, e->dw1, e->dw2);
    fflush(stdout);
    for (int i = 0; i < RATIOS; i++) {
        s->logs[i] += log(r[i]);
        if (s->layers && s->least[i] <= r[i]) continue;
        s->least[i] = r[i], s->least_layer[i] = l->name;
    }
    s->layers++;
}

static int measure(const settings *how, const timed_layer *l, sums *s)
{
    problem *p = calloc(1, sizeof *p);
    p->context = how->context, p->state = how->context->state;
    make_problem(p, l, how->uniform);
    enqueue(p, LAYER);
    enqueue(p, STEP_DGRAD);
    enqueue(p, STEP_F8);
    CHECK_CUDA(cudaStreamSynchronize(p->stream));
    const errors of_dgrad = errors_of(p, DGRAD), e = errors_of(p, F8);
    record(p);
    /* what dh leaves for dw is overwritten by dx_rows, and A' by dw1 */
    const cudaGraphExec_t before[JOBS] = {
        [DW2] = p->graphs[DH], [DW2_F8] = p->graphs[DH_F8], [DW1_F8] = p->graphs[DH_F8]};
    double ms[JOBS];
    take_turns(p->stream, p->graphs, before, JOBS, how->rounds, LAUNCHES, ms);
    report(l, ms, &e, s);
    free_problem(p);
    return too_large(&of_dgrad) || too_large(&e);
}

static double mean_of(const sums *s, ratio r)
{
    return exp(s->logs[r] / s->layers);
}

/* What is said of a speed-up: target is issue 52's, in brackets its aim. */
static void judge(const char *name, double is, double target, double aim)
{
    printf("%s: %.3f, target %.2f (%.2f): %s\n", name, is, target, aim,
           is < target ? "missed"
           : is < aim  ? "reached"
                       : "reached, and the aim");
}

static void stop_or_go_on(const sums *s, ratio r, double least)
{
    printf("%s: %.3f, stop below %.2f: %s\n", names[r], mean_of(s, r), least,
           mean_of(s, r) < least ? "STOP" : "go on");
}

static void decide(const sums *s)
{
    int slower = 0;
    printf("means of %d layers (least):\n", s->layers);
    for (ratio r = OF_FORWARD; r < RATIOS; r++)
        printf("  %-26s %.3f (%.3f, %s)\n", names[r], mean_of(s, r), s->least[r], s->least_layer[r]);
    stop_or_go_on(s, LAYER_WITH_WEIGHTS, 1.20);
    stop_or_go_on(s, DGRAD_WITH_WEIGHTS, 1.06);
    judge("forward", mean_of(s, OF_FORWARD), 1.28, 1.40);
    judge("backward", mean_of(s, OF_BACKWARD), 1.28, 1.38);
    judge("both with weights", mean_of(s, LAYER_WITH_WEIGHTS), 1.22, 1.30);
    judge("both with weights, least layer", s->least[LAYER_WITH_WEIGHTS], 1.15, 1.20);
    judge("F8_DGRAD both with weights", mean_of(s, DGRAD_WITH_WEIGHTS), 1.06, 1.14);
    judge("F8_DGRAD both with weights, least layer", s->least[DGRAD_WITH_WEIGHTS], 1.00, 1.00);
    for (ratio r = FIRST_STAGE; r < PAIRS; r++) {
        if (s->least[r] >= 1.0) continue;
        printf("%s is slower than in bf16 at %s: %.3f\n", names[r], s->least_layer[r], s->least[r]);
        slower++;
    }
    printf("stages slower than in bf16: %d\n", slower);
}

int main(int argc, char **argv)
{
    const settings how = open_settings("time_f8_backward", argc, argv);
    sums s = {0};
    timed_layer l;
    int failed = 0;
    for (int i = 0; next_layer("time_f8_backward", argc, argv, i, &l); i++) failed |= measure(&how, &l, &s);
    decide(&s);
    smoe_destroy(how.context);
    return failed;
}
