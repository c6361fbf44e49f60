/* Measures the host time of smoe_layer_forward and smoe_layer_backward in microseconds, as a whole and by
 * stage. The layer is so small that the host never waits for the GPU.
 *
 *   time_host [T,d,n,E,K]      default 64,256,64,8,2, bf16, from given top-K and from logits
 *
 * A batch is CALLS calls without synchronisation between them; the synchronisation after them is not timed.
 * The figure is the least over BATCHES batches. The figures of stages are from calls with an on_stage
 * callback, which reads a clock. */
#define _GNU_SOURCE
#include "tests/cuda/gpu.h"

#include <smoe.h>
#include <time.h>

enum { CALLS = 60, BATCHES = 40, STAGES = 16, NO_DEVICE = 77 };

typedef struct stage_times {
    double begin, least[STAGES];
} stage_times;

static double microseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static void on_stage(void *user, smoe_stage stage, int end, void *stream)
{
    stage_times *times = user;
    (void)stream;
    if (!end) {
        times->begin = microseconds();
        return;
    }
    const double spent = microseconds() - times->begin;
    double *least = &times->least[stage / 10];
    if (*least == 0.0 || spent < *least) *least = spent;
}

typedef struct layer_run {
    smoe_context *context;
    smoe_layer layer;
    smoe_forward_args forward;
    smoe_backward_args backward;
    cudaStream_t stream;
} layer_run;

static void check(const layer_run *r, smoe_status status)
{
    if (status == SMOE_OK) return;
    fprintf(stderr, "%s\n", smoe_last_error(r->context));
    exit(3);
}

static void open_context(layer_run *r, stage_times *times)
{
    char text[400] = "";
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.backend = SMOE_BACKEND_CUDA;
    options.error_text = text;
    options.error_size = sizeof text;
    if (times) options.on_stage = on_stage, options.on_stage_user = times;
    if (smoe_create(&r->context, &options) == SMOE_OK) return;
    printf("no device: %s\n", text);
    exit(NO_DEVICE);
}

static void *zeros(size_t bytes)
{
    const gpu_buffer b = gpu_alloc(bytes);
    CHECK_CUDA(cudaMemset(b.memory, 0, b.bytes));
    return b.memory;
}

/* The values have no effect on the host's time: zeros route every token to the lowest experts. */
static void fill(layer_run *r)
{
    const smoe_layer *l = &r->layer;
    const size_t t = (size_t)l->tokens, d = (size_t)l->hidden, n = (size_t)l->intermediate;
    const size_t e = (size_t)l->experts, k = (size_t)l->topk;
    smoe_sizes sizes = SMOE_SIZES_INIT;
    check(r, smoe_query_sizes(r->context, l, &sizes));
    smoe_forward_args *f = &r->forward;
    smoe_backward_args *b = &r->backward;
    *f = (smoe_forward_args)SMOE_FORWARD_ARGS_INIT;
    *b = (smoe_backward_args)SMOE_BACKWARD_ARGS_INIT;
    f->x = zeros(2 * t * d), f->w1 = zeros(4 * e * n * d), f->w2 = zeros(2 * e * n * d),
    f->out = zeros(2 * t * d);
    f->saved_size = sizes.saved_buffer_bytes, f->saved = zeros(f->saved_size);
    f->scratch_size = sizes.scratch_forward_bytes, f->scratch = zeros(f->scratch_size);
    if (l->entry == SMOE_ENTRY_FROM_LOGITS) {
        f->router_weight = zeros(2 * e * d), f->logits = zeros(4 * t * e);
        b->router_weight = f->router_weight, b->logits = f->logits, b->drouter_weight = zeros(4 * e * d);
    } else {
        f->topk_ids = zeros(4 * t * k), f->topk_weights = zeros(4 * t * k);
        b->topk_ids = f->topk_ids, b->dtopk_weights = zeros(4 * t * k);
    }
    b->x = f->x, b->w1 = f->w1, b->w2 = f->w2, b->saved = f->saved, b->saved_size = f->saved_size;
    b->dout = zeros(2 * t * d), b->dx = zeros(2 * t * d), b->dw1 = zeros(4 * e * n * d),
    b->dw2 = zeros(2 * e * n * d);
    b->scratch_size = sizes.scratch_backward_bytes, b->scratch = zeros(b->scratch_size);
}

static void call(const layer_run *r, int backward)
{
    check(r, backward ? smoe_layer_backward(r->context, &r->layer, &r->backward, r->stream)
                      : smoe_layer_forward(r->context, &r->layer, &r->forward, r->stream));
}

static double least_time(const layer_run *r, int backward)
{
    double least = 0.0;
    for (int batch = 0; batch < BATCHES; batch++) {
        const double begin = microseconds();
        for (int i = 0; i < CALLS; i++) call(r, backward);
        const double each = (microseconds() - begin) / CALLS;
        CHECK_CUDA(cudaStreamSynchronize(r->stream));
        if (batch == 0 || each < least) least = each;
    }
    return least;
}

static double query_time(const layer_run *r)
{
    smoe_sizes sizes = SMOE_SIZES_INIT;
    const double begin = microseconds();
    for (int i = 0; i < CALLS * BATCHES; i++) check(r, smoe_query_sizes(r->context, &r->layer, &sizes));
    return (microseconds() - begin) / (CALLS * BATCHES);
}

static void time_entry(const smoe_layer *layer, const char *name)
{
    layer_run r = {.layer = *layer};
    stage_times times = {0};
    CHECK_CUDA(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    open_context(&r, NULL);
    fill(&r);
    printf("%-12s forward %6.1f us, backward %6.1f us, query %5.2f us\n", name, least_time(&r, 0),
           least_time(&r, 1), query_time(&r));
    smoe_destroy(r.context);
    open_context(&r, &times);
    for (int i = 0; i < CALLS; i++) {
        call(&r, 0), call(&r, 1);
        CHECK_CUDA(cudaStreamSynchronize(r.stream));
    }
    for (int stage = 0; stage < STAGES; stage++)
        if (times.least[stage] > 0.0)
            printf("    %-12s %6.1f us\n", smoe_stage_string((smoe_stage)(10 * stage)), times.least[stage]);
    smoe_destroy(r.context);
}

int main(int argc, char **argv)
{
    long long t = 64, d = 256, n = 64, e = 8, k = 2;
    if (argc > 2 || (argc == 2 && sscanf(argv[1], "%lld,%lld,%lld,%lld,%lld", &t, &d, &n, &e, &k) != 5)) {
        fprintf(stderr, "usage: time_host [T,d,n,E,K]\n");
        return 2;
    }
    smoe_layer layer = SMOE_LAYER_INIT;
    layer.tokens = t, layer.hidden = d, layer.intermediate = n, layer.experts = e, layer.topk = k;
    layer.gradient_type = SMOE_TYPE_BF16, layer.renormalize = 1;
    layer.entry = SMOE_ENTRY_FROM_TOPK;
    time_entry(&layer, "from top-K");
    layer.entry = SMOE_ENTRY_FROM_LOGITS;
    time_entry(&layer, "from logits");
    return 0;
}
