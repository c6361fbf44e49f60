/* The whole forward from logits through the public API: router, rounding, plan and experts of the cuda
 * backend against the CPU backend. X and the router's weight are small integers, so that both sides have the
 * same logits and must route alike: ids, counts, rows and tokens' rows must be equal, outputs close. The
 * forward runs from a CUDA graph. Forward and backward in one graph must also give the same bits as without a
 * graph; check_layer_backward.c checks the backward's results. Exit 0 if all agree, 1 if not, 3 if CUDA
 * fails, 77 without a GPU. With the argument `few` each rounding rule is checked with only one score
 * function. */
#include "gpu.h"
#include "open_cuda.h"
#include "route_cases.h"

#include <math.h>

static void must_be_ok(smoe_status status, const smoe_context *context, const char *what)
{
    if (status == SMOE_OK) return;
    printf("%s: %s\n", what, context ? smoe_last_error(context) : smoe_status_string(status));
    exit(3);
}

static uint16_t bf16_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static float value_of(uint16_t bf16)
{
    const uint32_t bits = (uint32_t)bf16 << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

typedef struct tensor {
    uint16_t *host;
    size_t bytes;
    gpu_buffer device;
} tensor;

static tensor random_tensor(int64_t count, float scale, int integers, uint64_t *random)
{
    tensor t = {aligned_alloc(256, (size_t)(count * 2 + 255) / 256 * 256), (size_t)count * 2, {0}};
    for (int64_t i = 0; i < count; i++)
        t.host[i] = bf16_of(integers ? (float)((int)(next_random(random) % 5) - 2) : scale * bell(random));
    t.device = gpu_copy(t.host, t.bytes);
    return t;
}

static int64_t differing(const int32_t *a, const void *device, int64_t count)
{
    int32_t *b = gpu_read(device, (size_t)count * 4);
    int64_t wrong = 0;
    for (int64_t i = 0; i < count; i++) wrong += a[i] != b[i];
    free(b);
    return wrong;
}

static double relative_error(const uint16_t *expected, const void *device, int64_t count)
{
    uint16_t *got = gpu_read(device, (size_t)count * 2);
    double error = 0.0, norm = 0.0;
    for (int64_t i = 0; i < count; i++) {
        const double x = (double)value_of(expected[i]), d = (double)value_of(got[i]) - x;
        error += d * d;
        norm += x * x;
    }
    free(got);
    return sqrt(error / norm);
}

/* Captures the forward in a graph, also the backward unless `back` is NULL, and launches the graph twice. */
static void run_in_graph(smoe_context *context, const smoe_layer *layer, const smoe_forward_args *args,
                         const smoe_backward_args *back)
{
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t run;
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    must_be_ok(smoe_layer_forward(context, layer, args, stream), context, "smoe_layer_forward, cuda");
    if (back)
        must_be_ok(smoe_layer_backward(context, layer, back, stream), context, "smoe_layer_backward, cuda");
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&run, graph, 0));
    for (int i = 0; i < 2; i++) CHECK_CUDA(cudaGraphLaunch(run, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    CHECK_CUDA(cudaGraphExecDestroy(run));
    CHECK_CUDA(cudaGraphDestroy(graph));
    CHECK_CUDA(cudaStreamDestroy(stream));
}

static int compare_layers(const smoe_layer *l, smoe_context *cpu, const smoe_forward_args *cpu_args,
                          smoe_context *cuda, const smoe_forward_args *cuda_args)
{
    smoe_plan_view x = SMOE_PLAN_VIEW_INIT, y = SMOE_PLAN_VIEW_INIT;
    must_be_ok(smoe_view_plan(cpu, l, cpu_args, &x), cpu, "smoe_view_plan, cpu");
    must_be_ok(smoe_view_plan(cuda, l, cuda_args, &y), cuda, "smoe_view_plan, cuda");
    const int64_t padded = 64 * (int64_t)x.block_offsets[l->experts], pairs = l->tokens * l->topk;
    const int64_t wrong =
        differing(x.topk_ids, y.topk_ids, pairs) + differing(x.counts, y.counts, l->experts) +
        differing(x.topk_counts, y.topk_counts, l->experts) + differing(x.row_token, y.row_token, padded) +
        differing((const int32_t *)x.row_weight, y.row_weight, padded) +
        differing(x.token_rows, y.token_rows, x.offsets[l->experts]);
    const double error = relative_error(cpu_args->out, cuda_args->out, l->tokens * l->hidden);
    const int good = wrong == 0 && error < 0.02;
    printf("%s score %d rounding %d logits %s inference %d: %lld rows, %lld entries of the plan differ, out "
           "%.2e\n",
           good ? "equal  " : "DIFFERS", (int)l->score, (int)l->rounding,
           l->logits_type == SMOE_TYPE_F32 ? "f32" : "bf16", (int)l->inference,
           (long long)x.offsets[l->experts], (long long)wrong, error);
    return !good;
}

static size_t take(size_t *used, size_t bytes)
{
    const size_t at = *used;
    *used += (bytes + 255) / 256 * 256;
    return at;
}

/* Forward and backward must give the same bits if they are enqueued one by one and if a graph runs them. */
static int compare_with_graph(smoe_context *context, const smoe_layer *l, const smoe_forward_args *f,
                              uint64_t scratch_bytes)
{
    uint64_t random = 12;
    const size_t td = (size_t)(l->tokens * l->hidden) * 2, ed = (size_t)(l->experts * l->hidden) * 4;
    const size_t edn = (size_t)(l->experts * l->hidden * l->intermediate) * 4;
    const tensor dout = random_tensor(l->tokens * l->hidden, 1.0f, 0, &random);
    size_t used = 0;
    const size_t dx = take(&used, td), dw1 = take(&used, 2 * edn), dw2 = take(&used, edn);
    const size_t dwr = take(&used, ed), dlogits = take(&used, (size_t)(l->tokens * l->experts) * 4);
    const gpu_buffer results = gpu_alloc(used), scratch = gpu_alloc((size_t)scratch_bytes);
    smoe_backward_args b = SMOE_BACKWARD_ARGS_INIT;
    b.x = f->x, b.router_weight = f->router_weight, b.logits = f->logits, b.w1 = f->w1, b.w2 = f->w2;
    b.saved = f->saved, b.saved_size = f->saved_size, b.dout = dout.device.memory;
    b.dx = results.memory + dx, b.dw1 = results.memory + dw1, b.dw2 = results.memory + dw2;
    b.drouter_weight = results.memory + dwr;
    b.dlogits = l->score == SMOE_SCORE_SIGMOID ? NULL : results.memory + dlogits;
    b.z_coefficient = l->rounding == SMOE_ROUNDING_BALANCE_F ? 0.125f : 0.0f;
    b.scratch = scratch.memory, b.scratch_size = scratch_bytes;
    void *bits[2];
    for (int graph = 0; graph < 2; graph++) {
        CHECK_CUDA(cudaMemset(results.memory, 0xFF, results.bytes));
        CHECK_CUDA(cudaMemset(scratch.memory, 0xFF, scratch.bytes));
        CHECK_CUDA(cudaMemset(f->saved, 0xFF, (size_t)f->saved_size));
        CHECK_CUDA(cudaDeviceSynchronize());
        if (graph) {
            run_in_graph(context, l, f, &b);
        } else {
            must_be_ok(smoe_layer_forward(context, l, f, NULL), context, "smoe_layer_forward, cuda");
            must_be_ok(smoe_layer_backward(context, l, &b, NULL), context, "smoe_layer_backward, cuda");
            CHECK_CUDA(cudaDeviceSynchronize());
        }
        bits[graph] = gpu_read(results.memory, results.bytes);
    }
    const int same = memcmp(bits[0], bits[1], results.bytes) == 0;
    const int intact = gpu_free(results) + gpu_free(scratch) + gpu_free(dout.device) == 0;
    printf("%s forward and backward in a graph%s\n", same && intact ? "equal  " : "DIFFERS",
           intact ? "" : ": a write outside of a buffer");
    free(bits[0]), free(bits[1]), free(dout.host);
    return !(same && intact);
}

static int check_layer(smoe_context *cpu, smoe_context *cuda, const smoe_layer *l)
{
    uint64_t random = 11;
    const tensor x = random_tensor(l->tokens * l->hidden, 1.0f, 1, &random);
    const tensor router = random_tensor(l->experts * l->hidden, 1.0f, 1, &random);
    const tensor w1 = random_tensor(l->experts * 2 * l->intermediate * l->hidden, 0.1f, 0, &random);
    const tensor w2 = random_tensor(l->experts * l->hidden * l->intermediate, 0.1f, 0, &random);
    smoe_sizes sizes[2] = {SMOE_SIZES_INIT, SMOE_SIZES_INIT};
    must_be_ok(smoe_query_sizes(cpu, l, &sizes[0]), cpu, "smoe_query_sizes, cpu");
    must_be_ok(smoe_query_sizes(cuda, l, &sizes[1]), cuda, "smoe_query_sizes, cuda");
    const size_t out_bytes = (size_t)(l->tokens * l->hidden) * 2,
                 logits_bytes = (size_t)(l->tokens * l->experts) * 4;
    const size_t host_bytes = (size_t)sizes[0].saved_buffer_bytes + (size_t)sizes[0].scratch_forward_bytes +
                              out_bytes + logits_bytes + 2048;
    char *host = aligned_alloc(256, (host_bytes + 255) / 256 * 256);
    smoe_forward_args a = SMOE_FORWARD_ARGS_INIT, b = SMOE_FORWARD_ARGS_INIT;
    a.x = x.host, a.router_weight = router.host, a.w1 = w1.host, a.w2 = w2.host, a.step = b.step = 3;
    a.saved_size = sizes[0].saved_buffer_bytes, a.scratch_size = sizes[0].scratch_forward_bytes;
    a.scratch = host;
    a.saved = l->inference ? NULL : host + (a.scratch_size + 255) / 256 * 256;
    a.out = host + ((a.scratch_size + 255) / 256 + (a.saved_size + 255) / 256) * 256;
    a.logits = (char *)a.out + (out_bytes + 255) / 256 * 256;
    const gpu_buffer saved = gpu_alloc((size_t)sizes[1].saved_buffer_bytes);
    const gpu_buffer scratch = gpu_alloc((size_t)sizes[1].scratch_forward_bytes);
    const gpu_buffer out = gpu_alloc(out_bytes), logits = gpu_alloc(logits_bytes);
    b.x = x.device.memory, b.router_weight = router.device.memory, b.w1 = w1.device.memory,
    b.w2 = w2.device.memory;
    b.saved_size = sizes[1].saved_buffer_bytes, b.scratch_size = sizes[1].scratch_forward_bytes;
    b.saved = l->inference ? NULL : saved.memory, b.scratch = scratch.memory;
    b.out = out.memory, b.logits = logits.memory;

    must_be_ok(smoe_layer_forward(cpu, l, &a, NULL), cpu, "smoe_layer_forward, cpu");
    run_in_graph(cuda, l, &b, NULL);
    int failed = compare_layers(l, cpu, &a, cuda, &b);
    if (sizes[1].scratch_backward_bytes)
        failed |= compare_with_graph(cuda, l, &b, sizes[1].scratch_backward_bytes);
    const gpu_buffer buffers[] = {saved, scratch, out, logits, x.device, router.device, w1.device, w2.device};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
        if (gpu_free(buffers[i])) {
            printf("DIFFERS a write outside of buffer %zu\n", i);
            failed = 1;
        }
    free(host), free(x.host), free(router.host), free(w1.host), free(w2.host);
    return failed;
}

int main(int argc, char **argv)
{
    const int few = argc > 1 && !strcmp(argv[1], "few");
    int devices = 0, failures = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        puts("no GPU: skipped");
        return 77;
    }
    smoe_context *cpu, *cuda;
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    must_be_ok(smoe_create(&cpu, &options), NULL, "smoe_create, cpu");
    options.backend = SMOE_BACKEND_CUDA;
    options.kernels = kernels_of_environment();
    must_be_ok(smoe_create(&cuda, &options), NULL, "smoe_create, cuda");
    for (int score = SMOE_SCORE_SOFTMAX_TOPK; score <= SMOE_SCORE_SIGMOID; score++)
        for (int rounding = SMOE_ROUNDING_NONE; rounding <= SMOE_ROUNDING_DOWN; rounding++) {
            if (few && rounding % 3 != score) continue;
            smoe_layer l = SMOE_LAYER_INIT;
            l.tokens = few ? 150 : 500, l.hidden = 128, l.intermediate = 64, l.experts = 16, l.topk = 4;
            l.score = (smoe_score)score, l.rounding = (smoe_rounding)rounding, l.tile = 32;
            l.renormalize = score != SMOE_SCORE_TOPK_SOFTMAX && rounding % 2;
            l.logits_type = (score + rounding) % 2 ? SMOE_TYPE_BF16 : SMOE_TYPE_F32;
            l.inference = (score + rounding) % 3 == 0;
            failures += check_layer(cpu, cuda, &l);
        }
    smoe_destroy(cpu);
    smoe_destroy(cuda);
    printf("%d layers differ\n", failures);
    return failures != 0;
}
