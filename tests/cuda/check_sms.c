/* The option `sms` of a context. Values outside of its range are refused. Contexts with 1 SM, with 7, with
 * all but 16 and with all compute the same bits, and as many of their kernels have a CTA for each SM that the
 * option says as have one for each of the device without it. */
#include "gpu.h"
#include "open_cuda.h"

enum { FACTORS = 6, OUTPUTS = FACTORS + 4 }; /* from FACTORS on: LoRA's gradients */

static int failures;

static void check(int ok, const char *name, int sms, const char *what)
{
    if (ok) return;
    printf("%s, %d SMs: %s\n", name, sms, what);
    failures++;
}

static smoe_context *open_with(int32_t sms, smoe_status expected)
{
    char text[512] = "";
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.backend = SMOE_BACKEND_CUDA;
    options.kernels = kernels_of_environment();
    options.sms = sms;
    options.error_text = text;
    options.error_size = sizeof text;
    smoe_context *context = NULL;
    const smoe_status status = smoe_create(&context, &options);
    if (status != expected) printf("smoe_create with %d SMs: status %d, %s\n", (int)sms, (int)status, text);
    failures += status != expected;
    if (expected != SMOE_OK && !strstr(text, "smoe_create: sms is ")) {
        printf("the error text does not name sms: %s\n", text);
        failures++;
    }
    return context;
}

static gpu_buffer random_bf16(int64_t count)
{
    uint16_t *host = malloc((size_t)count * sizeof *host);
    for (int64_t i = 0; i < count; i++)
        host[i] = (uint16_t)((rand() & 1) << 15 | (122 + rand() % 4) << 7 | rand() % 128);
    const gpu_buffer b = gpu_copy(host, (size_t)count * sizeof *host);
    free(host);
    return b;
}

static void must(smoe_context *context, smoe_status status, const char *name)
{
    if (status == SMOE_OK) return;
    printf("%s: %s\n", name, smoe_last_error(context));
    exit(EXIT_BROKEN);
}

/* How many of the captured kernels have so many CTAs. */
static int kernels_of(cudaGraph_t graph, int ctas)
{
    cudaGraphNode_t nodes[64];
    size_t count = sizeof nodes / sizeof *nodes;
    CHECK_CUDA(cudaGraphGetNodes(graph, nodes, &count));
    int found = 0;
    for (size_t i = 0; i < count; i++) {
        enum cudaGraphNodeType type;
        struct cudaKernelNodeParams params;
        CHECK_CUDA(cudaGraphNodeGetType(nodes[i], &type));
        if (type != cudaGraphNodeTypeKernel) continue;
        CHECK_CUDA(cudaGraphKernelNodeGetParams(nodes[i], &params));
        found += (int)params.gridDim.x == ctas;
    }
    return found;
}

typedef struct sms_case {
    const char *name;
    int64_t tokens, hidden, intermediate, experts, topk;
    smoe_compute compute;
    int32_t lora_rank;
} sms_case;

static smoe_layer layer_of(const sms_case *c)
{
    smoe_layer l = SMOE_LAYER_INIT;
    l.tokens = c->tokens, l.hidden = c->hidden, l.intermediate = c->intermediate, l.experts = c->experts,
    l.topk = c->topk, l.compute = c->compute, l.lora_rank1 = l.lora_rank2 = c->lora_rank;
    return l;
}

/* With fp8 the weights are quantised first. Forward and backward; the outputs go to `into`, one after the
 * other. Returns how many kernels have `sms` CTAs. */
static int run(smoe_context *context, const sms_case *c, int sms, gpu_buffer into[OUTPUTS])
{
    const smoe_layer l = layer_of(c);
    smoe_sizes sizes = SMOE_SIZES_INIT;
    must(context, smoe_query_sizes(context, &l, &sizes), c->name);
    srand(1);
    const int64_t x_count = l.tokens * l.hidden, w_count = l.experts * l.intermediate * l.hidden;
    /* the bytes of a factor's gradient for each of its columns, and the width of the widest factor */
    const int64_t of_rank = 4 * l.experts * c->lora_rank,
                  wide = l.hidden > 2 * l.intermediate ? l.hidden : 2 * l.intermediate;
    const gpu_buffer x = random_bf16(x_count), wr = random_bf16(l.experts * l.hidden),
                     w1 = random_bf16(2 * w_count), w2 = random_bf16(w_count), dout = random_bf16(x_count),
                     factor = random_bf16(l.experts * wide * c->lora_rank),
                     logits = gpu_alloc((size_t)(l.tokens * l.experts) * 4),
                     weights_f8 = gpu_alloc(sizes.weights_f8_bytes),
                     saved = gpu_alloc(sizes.saved_buffer_bytes),
                     forward_scratch = gpu_alloc(sizes.scratch_forward_bytes),
                     backward_scratch = gpu_alloc(sizes.scratch_backward_bytes);
    const int64_t bytes[OUTPUTS] = {2 * x_count,
                                    2 * x_count,
                                    8 * w_count,
                                    4 * w_count,
                                    4 * l.experts * l.hidden,
                                    4 * l.tokens * l.experts,
                                    of_rank * l.hidden,
                                    of_rank * 2 * l.intermediate,
                                    of_rank * l.intermediate,
                                    of_rank * l.hidden};
    for (int i = 0; i < OUTPUTS; i++) into[i] = gpu_alloc((size_t)bytes[i]);
    smoe_forward_args f = SMOE_FORWARD_ARGS_INIT;
    f.x = x.memory, f.router_weight = wr.memory, f.w1 = w1.memory, f.w2 = w2.memory, f.logits = logits.memory;
    f.out = into[0].memory, f.saved = saved.memory, f.saved_size = sizes.saved_buffer_bytes;
    f.scratch = forward_scratch.memory, f.scratch_size = sizes.scratch_forward_bytes;
    smoe_backward_args b = SMOE_BACKWARD_ARGS_INIT;
    b.x = x.memory, b.router_weight = wr.memory, b.logits = logits.memory, b.w1 = w1.memory;
    b.w2 = w2.memory, b.saved = saved.memory, b.saved_size = sizes.saved_buffer_bytes, b.dout = dout.memory;
    b.dx = into[1].memory, b.dw1 = into[2].memory, b.dw2 = into[3].memory, b.drouter_weight = into[4].memory;
    b.dlogits = into[5].memory;
    if (c->lora_rank) {
        f.lora_a1 = f.lora_b1 = f.lora_a2 = f.lora_b2 = factor.memory;
        b.lora_a1 = b.lora_b1 = b.lora_a2 = b.lora_b2 = factor.memory;
        b.dlora_a1 = into[FACTORS].memory, b.dlora_b1 = into[FACTORS + 1].memory;
        b.dlora_a2 = into[FACTORS + 2].memory, b.dlora_b2 = into[FACTORS + 3].memory;
    }
    b.scratch = backward_scratch.memory, b.scratch_size = sizes.scratch_backward_bytes;
    smoe_quantize_args q = SMOE_QUANTIZE_ARGS_INIT;
    q.w1 = w1.memory, q.w2 = w2.memory, q.experts = l.experts;
    f.weights_f8 = b.weights_f8 = q.weights_f8 = weights_f8.memory;
    f.weights_f8_size = b.weights_f8_size = q.weights_f8_size = sizes.weights_f8_bytes;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t ready;
    CHECK_CUDA(cudaStreamCreate(&stream));
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    if (l.compute) must(context, smoe_quantize_weights(context, &l, &q, stream), c->name);
    must(context, smoe_layer_forward(context, &l, &f, stream), c->name);
    must(context, smoe_layer_backward(context, &l, &b, stream), c->name);
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    const int kernels = kernels_of(graph, sms);
    CHECK_CUDA(cudaGraphInstantiate(&ready, graph, 0));
    CHECK_CUDA(cudaGraphLaunch(ready, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    CHECK_CUDA(cudaGraphExecDestroy(ready));
    CHECK_CUDA(cudaGraphDestroy(graph));
    CHECK_CUDA(cudaStreamDestroy(stream));
    const gpu_buffer all[] = {
        x, wr, w1, w2, dout, factor, logits, weights_f8, saved, forward_scratch, backward_scratch};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        check(!gpu_free(all[i]), c->name, sms, "something was written outside a buffer");
    return kernels;
}

static void compare(const sms_case *c, int sms, const gpu_buffer all[OUTPUTS], const gpu_buffer got[OUTPUTS])
{
    static const char *const names[OUTPUTS] = {"O",       "dX",  "dW1", "dW2", "dWr",
                                               "dlogits", "dA1", "dB1", "dA2", "dB2"};
    for (int i = 0; i < OUTPUTS; i++) {
        void *a = gpu_read(all[i].memory, all[i].bytes), *b = gpu_read(got[i].memory, got[i].bytes);
        check(!memcmp(a, b, all[i].bytes), c->name, sms, names[i]);
        free(a), free(b);
        check(!gpu_free(got[i]), c->name, sms, "something was written outside an output");
    }
}

int main(void)
{
    static const sms_case cases[] = {
        {"cooperative", 700, 72, 40, 5, 2, SMOE_COMPUTE_STORAGE, 0},
        {"ping-pong, stationary", 300, 200, 200, 4, 2, SMOE_COMPUTE_STORAGE, 0},
        {"stationary", 600, 256, 64, 3, 2, SMOE_COMPUTE_STORAGE, 0},
        {"split experts", 2600, 64, 64, 2, 1, SMOE_COMPUTE_STORAGE, 0},
        {"LoRA", 2600, 64, 64, 2, 1, SMOE_COMPUTE_STORAGE, 8},
        {"few rows", 6, 136, 72, 8, 3, SMOE_COMPUTE_STORAGE, 0},
        {"fp8", 300, 144, 80, 3, 2, SMOE_COMPUTE_F8, 0},
        {"fp8, dw in bf16", 150, 80, 48, 2, 2, SMOE_COMPUTE_F8_DGRAD, 0},
    };
    smoe_destroy(open_cuda());
    int sms = 0;
    CHECK_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    open_with(-1, SMOE_ERROR_ARGUMENT);
    open_with(sms + 1, SMOE_ERROR_ARGUMENT);
    const int fewer[] = {1, 7, sms - 16, sms};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        gpu_buffer all[OUTPUTS], got[OUTPUTS];
        smoe_context *whole = open_with(0, SMOE_OK);
        const smoe_layer layer = layer_of(&cases[i]);
        if (smoe_supports(whole, &layer) == SMOE_ERROR_UNSUPPORTED) { /* fp8, portable kernels */
            smoe_destroy(whole);
            continue;
        }
        const int kernels = run(whole, &cases[i], sms, all);
        for (size_t j = 0; j < sizeof fewer / sizeof *fewer; j++) {
            if (fewer[j] < 1 || fewer[j] > sms) continue;
            smoe_context *part = open_with(fewer[j], SMOE_OK);
            const int same = run(part, &cases[i], fewer[j], got);
            if (layer.tokens * layer.topk > 128) /* those for few rows have CTAs by their units */
                check(same >= kernels, cases[i].name, fewer[j], "a kernel has another number of CTAs");
            compare(&cases[i], fewer[j], all, got);
            smoe_destroy(part);
        }
        for (int k = 0; k < OUTPUTS; k++) gpu_free(all[k]);
        smoe_destroy(whole);
    }
    printf("%d failures\n", failures);
    return failures != 0;
}
