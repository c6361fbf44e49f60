/* Times training with SMOE_COMPUTE_F8_DGRAD beside that in bf16; time_f8.h has the command line. The backward
 * computes dX, dW1, dW2 and dS. "With weights" is one step: the weights are quantised, then come forward and
 * backward. dh is timed with the quantising of dO, which also stands alone. dw is dw2 and dw1 together: in
 * bf16, as the layer has them, and in e4m3, which no layer runs, on operands none of whose rows needs
 * factors; their bytes are not in groups of 16 rows, since only the time counts.
 *
 * The last lines have geometric means over the layers, and what issue 52 decides by them. The exit status is
 * 1 if dX, dW1 or dW2 of both differ by more than MOST_ERROR. */
#include "host/backward.h"
#include "host/forward.h"
#include "schedule/weight_tiles.h"
#include "time_f8.h"

enum { LAUNCHES = 4 };
static const double LEAST_LAYER = 1.00, LEAST_MEAN = 1.06, TARGET_MEAN = 1.14;

/* Those of both sides come in pairs: bf16, fp8. */
typedef enum job {
    BACKWARD,
    BACKWARD_F8,
    LAYER,
    LAYER_F8,
    DH,
    DH_F8,
    DX_ROWS,
    DX_ROWS_F8,
    DW,
    DW_F8,
    STEP_F8,
    ROWS_F8,
    JOBS
} job;
static_assert((int)JOBS <= (int)TURNS_MOST, "jobs that take turns");

/* A layer in bf16 (side 0) or fp8 (1). */
typedef struct side {
    moe_call forward, backward;
    smoe_forward_args forward_args;
    smoe_backward_args backward_args;
    backward_call stages; /* of `backward` */
    gpu_buffer saved, forward_scratch, backward_scratch, dx, dw1, dw2;
} side;

/* Operands of dw in e4m3: A'_w with dO8, and dH_w with X8. All exponents are 0. */
typedef struct dw_operands {
    gpu_buffer a8, dh8, x8, dout8, scale, exponents, parts;
} dw_operands;

typedef struct problem {
    smoe_context *context;
    const device_state *state;
    side sides[2];
    dw_operands dw;
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
}

static void make_side(problem *p, const smoe_layer *description, smoe_compute compute, side *s)
{
    moe_problem *checked = &s->forward.problem;
    moe_problem_init(checked, description);
    checked->compute = compute;
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
    s->forward.weights_f8 = s->backward.weights_f8 = p->weights_f8.memory;
    s->forward.stream = s->backward.stream = p->stream;
    s->stages = moe_cuda_backward_call(p->state, &s->backward.problem, &s->backward.layout, &s->backward.plan,
                                       &s->backward_args, s->backward_scratch.memory, 0, p->stream);
    s->stages.weights_f8 = p->weights_f8.memory;
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
    make_side(p, &description, SMOE_COMPUTE_STORAGE, &p->sides[0]);
    make_side(p, &description, SMOE_COMPUTE_F8_DGRAD, &p->sides[1]);
}

/* ---- Jobs ---- */

static void enqueue_weights(problem *p)
{
    const moe_problem *of = &p->sides[1].forward.problem;
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

static void enqueue_rows(problem *p, const void *from, gpu_buffer to, int64_t rows, int64_t columns)
{
    const moe_f8_rows call = {from, (uint8_t *)to.memory, (float *)(void *)p->dw.scale.memory, rows, columns};
    CHECK_CUDA(moe_sm90_f8_rows(&p->sides[1].stages.on, &call));
}

static void enqueue_dw_f8(problem *p, int of_w1)
{
    side *s = &p->sides[1];
    const smoe_layer *l = &s->backward.problem.layer;
    const dw_operands *o = &p->dw;
    const int32_t *zeros = (int32_t *)(void *)o->exponents.memory;
    const moe_f8_dw call = {.dw = {.features = of_w1 ? o->dh8.memory : o->a8.memory,
                                   .tokens = of_w1 ? o->x8.memory : o->dout8.memory,
                                   .gradient = of_w1 ? s->dw1.memory : s->dw2.memory,
                                   .parts = (float *)(void *)o->parts.memory,
                                   .row_token = s->stages.plan->row_token,
                                   .lists = s->stages.lists,
                                   .rows = s->stages.rows,
                                   .hidden = l->hidden,
                                   .intermediate = l->intermediate,
                                   .row_width = l->intermediate,
                                   .experts = l->experts,
                                   .halves = of_w1 ? s->stages.halves : 1,
                                   .transposed = of_w1,
                                   .gradient_type = l->gradient_type},
                            .exponent = zeros,
                            .expected = zeros,
                            .largest = zeros};
    CHECK_CUDA(moe_sm90_f8_dw(&s->stages.on, &call));
}

static void enqueue_dw(problem *p, side *s)
{
    CHECK_CUDA(moe_cuda_run_dw2(p->context, &s->stages));
    CHECK_CUDA(moe_cuda_run_dw1(p->context, &s->stages));
}

static void enqueue(problem *p, job which)
{
    side *bf = &p->sides[0], *f8 = &p->sides[1];
    const smoe_layer *l = &f8->backward.problem.layer;
    switch (which) {
    case BACKWARD: enqueue_backward(p, bf); break;
    case BACKWARD_F8: enqueue_backward(p, f8); break;
    case LAYER: enqueue_forward(p, bf), enqueue_backward(p, bf); break;
    case STEP_F8: enqueue_weights(p), enqueue_forward(p, f8), enqueue_backward(p, f8); break;
    case LAYER_F8: enqueue_forward(p, f8), enqueue_backward(p, f8); break;
    case DH: CHECK_CUDA(moe_cuda_run_dh(&bf->stages)); break;
    case DH_F8: CHECK_CUDA(moe_cuda_run_dh(&f8->stages)); break;
    case DX_ROWS: CHECK_CUDA(moe_cuda_run_dx_rows(&bf->stages, 0, l->hidden)); break;
    case DX_ROWS_F8: CHECK_CUDA(moe_cuda_run_dx_rows(&f8->stages, 0, l->hidden)); break;
    case DW: enqueue_dw(p, bf); break;
    case DW_F8: enqueue_dw_f8(p, 0), enqueue_dw_f8(p, 1); break;
    case ROWS_F8: enqueue_rows(p, p->dout.memory, p->dw.dout8, l->tokens, l->hidden); break;
    case JOBS: break;
    }
}

/* After a backward of side 1. */
static void make_dw_operands(problem *p)
{
    side *s = &p->sides[1];
    const smoe_layer *l = &s->backward.problem.layer;
    const int64_t rows = s->backward.problem.padded_rows, n = l->intermediate, E = l->experts;
    const int64_t groups = moe_f8_groups(n, MOE_F8_DH_FEATURES), scales = rows > l->tokens ? rows : l->tokens;
    const int32_t tiles = moe_sm90_f8_kernels.weight_tiles((int32_t)l->hidden, (int32_t)n, s->stages.halves);
    dw_operands *o = &p->dw;
    o->a8 = gpu_alloc((size_t)(rows * n)), o->dh8 = gpu_alloc((size_t)(rows * s->backward.problem.h_width));
    o->x8 = gpu_alloc((size_t)(l->tokens * l->hidden)), o->dout8 = gpu_alloc(o->x8.bytes);
    o->scale = gpu_alloc((size_t)scales * 4);
    o->exponents = gpu_alloc((size_t)((rows + E) * groups) * 4);
    o->parts = gpu_alloc((size_t)(s->stages.at.parts * tiles) * MOE_WEIGHT_TILE * 4);
    CHECK_CUDA(cudaMemsetAsync(o->exponents.memory, 0, o->exponents.bytes, p->stream));
    enqueue(p, DH_F8); /* dX~ is where A' was */
    enqueue_rows(p, s->stages.a, o->a8, s->stages.rows, n);
    enqueue_rows(p, s->stages.dh, o->dh8, s->stages.rows, s->backward.problem.h_width);
    enqueue_rows(p, p->in.x.memory, o->x8, l->tokens, l->hidden);
    enqueue(p, ROWS_F8);
    enqueue(p, DW_F8); /* what it launches is loaded before a graph records it */
    CHECK_CUDA(cudaStreamSynchronize(p->stream));
}

static void record(problem *p)
{
    for (job j = BACKWARD; j < JOBS; j++) {
        CHECK_CUDA(cudaStreamBeginCapture(p->stream, cudaStreamCaptureModeThreadLocal));
        enqueue(p, j);
        p->graphs[j] = end_capture(p->stream);
    }
}

/* ---- Results ---- */

typedef struct errors {
    double dx, dw1, dw2;
} errors;

/* Also quantises the weights. */
static errors compare(problem *p)
{
    const side *bf = &p->sides[0], *f8 = &p->sides[1];
    enqueue(p, LAYER);
    enqueue(p, STEP_F8);
    CHECK_CUDA(cudaStreamSynchronize(p->stream));
    const smoe_layer *l = &bf->backward.problem.layer;
    const int64_t weights = l->experts * l->hidden * l->intermediate;
    return (errors){difference_of(f8->dx.memory, bf->dx.memory, l->tokens * l->hidden),
                    difference_of(f8->dw1.memory, bf->dw1.memory, 2 * weights),
                    difference_of(f8->dw2.memory, bf->dw2.memory, weights)};
}

static void free_problem(problem *p)
{
    const dw_operands *o = &p->dw;
    const gpu_buffer shared[] = {
        p->in.x, p->dout, p->in.w1, p->in.w2, p->in.ids, p->in.topk_weights, p->in.out, p->ds,
        o->a8,   o->dh8,  o->x8,    o->dout8, o->scale,  o->exponents,       o->parts,  p->weights_f8};
    int outside = 0;
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++) outside += gpu_free(shared[i]);
    for (side *s = p->sides; s < p->sides + 2; s++) {
        const gpu_buffer own[] = {s->saved, s->forward_scratch, s->backward_scratch, s->dx, s->dw1, s->dw2};
        for (size_t i = 0; i < sizeof own / sizeof *own; i++) outside += gpu_free(own[i]);
    }
    if (outside) printf("time_f8_backward: %d buffers were written outside\n", outside);
    for (job j = BACKWARD; j < JOBS; j++) CHECK_CUDA(cudaGraphExecDestroy(p->graphs[j]));
    CHECK_CUDA(cudaStreamDestroy(p->stream));
    free(p);
}

/* Logarithms of the speed-ups, summed over the layers. */
typedef struct sums {
    double backward, layer, with_weights, dh, dx_rows, dw, least;
    int layers;
} sums;

static void report(const timed_layer *l, const double *ms, const errors *e, sums *s)
{
    const double step = ms[LAYER] / ms[STEP_F8];
    static const char *const names[] = {"backward", "forward + backward", "dh", "dx_rows", "dw"};
    printf("%-11s", l->name);
    for (int i = 0; i < 5; i++)
        printf(" %s %7.3f %7.3f %6.3f |", names[i], ms[2 * i], ms[2 * i + 1], ms[2 * i] / ms[2 * i + 1]);
    printf(" dO %6.3f | with weights %7.3f %6.3f | error dX %.4f dW1 %.4f dW2 %.4f\n", ms[ROWS_F8],
           ms[STEP_F8], step, e->dx, e->dw1, e->dw2);
    fflush(stdout);
    s->backward += log(ms[BACKWARD] / ms[BACKWARD_F8]), s->layer += log(ms[LAYER] / ms[LAYER_F8]);
    s->dh += log(ms[DH] / ms[DH_F8]), s->dx_rows += log(ms[DX_ROWS] / ms[DX_ROWS_F8]);
    s->dw += log(ms[DW] / ms[DW_F8]), s->with_weights += log(step);
    s->least = s->layers++ ? fmin(s->least, step) : step;
}

static int measure(const settings *how, const timed_layer *l, sums *s)
{
    problem *p = calloc(1, sizeof *p);
    p->context = how->context, p->state = how->context->state;
    make_problem(p, l, how->uniform);
    const errors e = compare(p);
    make_dw_operands(p);
    record(p);
    const cudaGraphExec_t before[JOBS] = {[DW] = p->graphs[DH]}; /* which writes A' */
    double ms[JOBS];
    take_turns(p->stream, p->graphs, before, JOBS, how->rounds, LAUNCHES, ms);
    report(l, ms, &e, s);
    free_problem(p);
    return !(e.dx <= MOST_ERROR && e.dw1 <= MOST_ERROR && e.dw2 <= MOST_ERROR);
}

static void decide(const sums *s)
{
    const double layers = s->layers, mean = exp(s->with_weights / layers);
    printf("means of %d layers: backward %.3f, forward + backward %.3f, with weights %.3f, dh %.3f, dx_rows "
           "%.3f, "
           "dw %.3f\n",
           s->layers, exp(s->backward / layers), exp(s->layer / layers), mean, exp(s->dh / layers),
           exp(s->dx_rows / layers), exp(s->dw / layers));
    printf("with weights: %.3f, stop below %.2f, aim %.2f: %s\n", mean, LEAST_MEAN, TARGET_MEAN,
           mean < LEAST_MEAN    ? "STOP"
           : mean < TARGET_MEAN ? "go on, below the aim"
                                : "go on");
    printf("least layer: %.3f, at least %.2f wanted: %s\n", s->least, LEAST_LAYER,
           s->least < LEAST_LAYER ? "missed" : "kept");
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
