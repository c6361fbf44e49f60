/* Measures the host time of smoe_layer_forward and smoe_layer_backward in microseconds, for several builds of
 * the library by turns in one process. The layer is so small that the host never waits for the GPU.
 *
 *   time_host ROUNDS T,d,n,E,K LIBRARY...      for instance 60 64,256,64,8,2 old.so new.so
 *
 * A LIBRARY is the libsmoe.so of a build; "self" is this program's. The layer is bf16, from given top-K and
 * from logits. A batch is CALLS calls without synchronisation between them; the synchronisation after them is
 * not timed. In each round every build runs a batch of each pass. The figures are the least over the rounds,
 * and the median over the rounds of the time relative to the first build's in the same round, with its
 * standard error. */
#define _GNU_SOURCE
#include "bench/build_api.h"
#include "bench/median.h"
#include "tests/cuda/gpu.h"

#include <time.h>

enum { CALLS = 60, MOST_ROUNDS = 400, MOST_BUILDS = 8, PASSES = 2, NO_DEVICE = 77 };

static double microseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

typedef struct layer_run {
    build_api call;
    smoe_context *context;
    smoe_layer layer;
    smoe_forward_args forward;
    smoe_backward_args backward;
    cudaStream_t stream;
    double time[PASSES][MOST_ROUNDS];
} layer_run;

static void check(const layer_run *r, smoe_status status)
{
    if (status == SMOE_OK) return;
    fprintf(stderr, "%s: %s\n", r->call.name, r->call.last_error(r->context));
    exit(3);
}

static void open_context(layer_run *r)
{
    char text[400] = "";
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.backend = SMOE_BACKEND_CUDA;
    options.error_text = text;
    options.error_size = sizeof text;
    const smoe_status status = r->call.create(&r->context, &options);
    if (status == SMOE_OK) return;
    printf("%s: no device: %s\n", r->call.name, text);
    exit(status == SMOE_ERROR_DEVICE ? NO_DEVICE : 3);
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
    check(r, r->call.query_sizes(r->context, l, &sizes));
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

/* Microseconds of a call. */
static double time_batch(const layer_run *r, int backward)
{
    const double begin = microseconds();
    for (int i = 0; i < CALLS; i++)
        check(r, backward ? r->call.backward(r->context, &r->layer, &r->backward, r->stream)
                          : r->call.forward(r->context, &r->layer, &r->forward, r->stream));
    const double each = (microseconds() - begin) / CALLS;
    CHECK_CUDA(cudaStreamSynchronize(r->stream));
    return each;
}

static void report(const layer_run *runs, int builds, int rounds, const char *entry)
{
    for (int i = 0; i < builds; i++)
        for (int pass = 0; pass < PASSES; pass++) {
            double least = runs[i].time[pass][0], relative[MOST_ROUNDS];
            for (int round = 0; round < rounds; round++) {
                if (runs[i].time[pass][round] < least) least = runs[i].time[pass][round];
                relative[round] = runs[i].time[pass][round] / runs[0].time[pass][round];
            }
            const middle m = middle_of(relative, rounds);
            printf("%-12s %-16s %-8s %6.2f us, %.3f +- %.3f of the first\n", entry, runs[i].call.name,
                   pass ? "backward" : "forward", least, m.median, m.error);
        }
}

static void time_entry(const smoe_layer *layer, const char *entry, int rounds, char **paths, int builds)
{
    static layer_run runs[MOST_BUILDS];
    for (int i = 0; i < builds; i++) {
        runs[i] = (layer_run){.call = build_open(paths[i]), .layer = *layer};
        open_context(&runs[i]);
        if (i == 0) CHECK_CUDA(cudaStreamCreateWithFlags(&runs[0].stream, cudaStreamNonBlocking));
        runs[i].stream = runs[0].stream;
        fill(&runs[i]);
        time_batch(&runs[i], 0), time_batch(&runs[i], 1); /* loads the kernels */
    }
    for (int round = 0; round < rounds; round++)
        for (int turn = 0; turn < builds; turn++) {
            layer_run *r = &runs[round % 2 ? builds - 1 - turn : turn];
            for (int pass = 0; pass < PASSES; pass++) r->time[pass][round] = time_batch(r, pass);
        }
    report(runs, builds, rounds, entry);
}

int main(int argc, char **argv)
{
    long long t, d, n, e, k;
    const int rounds = argc > 3 ? atoi(argv[1]) : 0, builds = argc - 3;
    if (rounds < 1 || rounds > MOST_ROUNDS || builds > MOST_BUILDS ||
        sscanf(argv[2], "%lld,%lld,%lld,%lld,%lld", &t, &d, &n, &e, &k) != 5) {
        fprintf(stderr, "usage: time_host ROUNDS T,d,n,E,K LIBRARY..., at most %d rounds and %d libraries\n",
                MOST_ROUNDS, MOST_BUILDS);
        return 2;
    }
    smoe_layer layer = SMOE_LAYER_INIT;
    layer.tokens = t, layer.hidden = d, layer.intermediate = n, layer.experts = e, layer.topk = k;
    layer.gradient_type = SMOE_TYPE_BF16, layer.renormalize = 1;
    layer.entry = SMOE_ENTRY_FROM_TOPK;
    time_entry(&layer, "from top-K", rounds, argv + 3, builds);
    layer.entry = SMOE_ENTRY_FROM_LOGITS;
    time_entry(&layer, "from logits", rounds, argv + 3, builds);
    return 0;
}
