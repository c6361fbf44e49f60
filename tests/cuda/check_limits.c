/* Extreme cases. A caller leaves out smoe_round although the layer rounds: whatever the memory of the
 * counts contains, nothing is written outside the plan, and no index points outside. A row of O is so long
 * that the combine would have more parts than a grid may have CTAs in y. The plan from given rows has a CTA
 * on every multiprocessor of the device. Errors of the caller: offsets against their rule, with the context's
 * option check_offsets, memory that is given twice, and a CUDA error that the caller has not read yet. */
#include "gpu.h"
#include "host/device.h"
#include "open_cuda.h"

static int failures;

static void check(int ok, const char *name, const char *what)
{
    if (ok) return;
    printf("%s: %s\n", name, what);
    failures++;
}

/* ---- smoe_round left out ---- */

enum { T = 300, D = 64, N = 16, E = 24, K = 4 };

static gpu_buffer random_bf16(size_t count)
{
    uint16_t *host = malloc(count * sizeof *host);
    for (size_t i = 0; i < count; i++)
        host[i] = (uint16_t)((rand() & 1) << 15 | (122 + rand() % 4) << 7 | rand() % 128);
    const gpu_buffer b = gpu_copy(host, count * sizeof *host);
    free(host);
    return b;
}

static void must(smoe_context *context, smoe_status status, const char *name)
{
    if (status == SMOE_OK) return;
    printf("%s: %s\n", name, smoe_last_error(context));
    exit(1);
}

/* Checks that every index that a later kernel uses is inside the array that it indexes. */
static void check_plan(const smoe_plan_view *view, const smoe_sizes *sizes, const char *name)
{
    const int64_t padded = sizes->padded_rows;
    int32_t *blocks = gpu_read(view->block_offsets, (E + 1) * 4), *order = gpu_read(view->order, E * 4);
    int32_t *counts = gpu_read(view->counts, E * 4), *token = gpu_read(view->row_token, (size_t)padded * 4);
    int32_t *offsets = gpu_read(view->token_offsets, (T + 1) * 4);
    int32_t *rows = gpu_read(view->token_rows, (size_t)sizes->rows * 4);
    int seen[E] = {0}, good_order = 1, good_blocks = blocks[0] == 0, good_tokens = 1, good_rows = 1;
    for (int e = 0; e < E; e++) {
        good_order = good_order && order[e] >= 0 && order[e] < E && !seen[order[e]]++;
        good_blocks = good_blocks && blocks[e + 1] - blocks[e] == (counts[e] + 63) / 64 && counts[e] >= 0;
    }
    good_blocks = good_blocks && blocks[E] * 64 <= padded;
    for (int64_t r = 0; r < padded; r++) good_tokens = good_tokens && token[r] >= -1 && token[r] < T;
    for (int t = 0; t < T; t++)
        for (int i = offsets[t]; i < offsets[t + 1]; i++)
            good_rows = good_rows && i >= 0 && i < sizes->rows && rows[i] >= 0 && rows[i] < padded;
    for (int e = 0; e < E && good_blocks; e++) /* rows of an expert after its count must be pad rows */
        for (int r = blocks[e] * 64 + counts[e]; r < blocks[e + 1] * 64; r++) good_tokens &= token[r] == -1;
    for (int64_t r = blocks[E] * 64; r < padded && good_blocks; r++) good_tokens &= token[r] == -1;
    check(good_order, name, "order is no permutation");
    check(good_blocks, name, "block_offsets do not fit counts or padded_rows");
    check(good_tokens, name, "row_token points outside, or a padding row has a token");
    check(good_rows, name, "token_rows points outside");
    free(blocks), free(order), free(counts), free(token), free(offsets), free(rows);
}

static void skip_round(smoe_context *context, smoe_rounding rounding, int pattern)
{
    char name[64];
    snprintf(name, sizeof name, "rounding %d, counts %d", (int)rounding, pattern);
    smoe_layer l = SMOE_LAYER_INIT;
    l.tokens = T, l.hidden = D, l.intermediate = N, l.experts = E, l.topk = K;
    l.rounding = rounding, l.tile = 16;
    smoe_sizes sizes = SMOE_SIZES_INIT;
    must(context, smoe_query_sizes(context, &l, &sizes), name);
    const gpu_buffer x = random_bf16(T * D), wr = random_bf16(E * D), w1 = random_bf16(E * 2 * N * D),
                     w2 = random_bf16(E * D * N), logits = gpu_alloc(T * E * 4), out = gpu_alloc(T * D * 2),
                     saved = gpu_alloc(sizes.saved_buffer_bytes),
                     scratch = gpu_alloc(sizes.scratch_forward_bytes);
    smoe_forward_args f = SMOE_FORWARD_ARGS_INIT;
    f.x = x.memory, f.router_weight = wr.memory, f.w1 = w1.memory, f.w2 = w2.memory, f.logits = logits.memory;
    f.out = out.memory, f.saved = saved.memory, f.saved_size = sizes.saved_buffer_bytes;
    f.scratch = scratch.memory, f.scratch_size = sizes.scratch_forward_bytes;
    CHECK_CUDA(cudaMemset(saved.memory, 0x55, saved.bytes));
    smoe_plan_view view = SMOE_PLAN_VIEW_INIT;
    must(context, smoe_view_plan(context, &l, &f, &view), name);
    must(context, smoe_route(context, &l, &f, NULL), name);
    int32_t counts[E]; /* what the memory of the counts contains instead of the result of smoe_round */
    int64_t blocks_left = sizes.padded_rows / 64;
    for (int e = 0; e < E; e++) {
        const int64_t fitting = blocks_left * 64 < T ? blocks_left * 64 : T;
        blocks_left -= (fitting + 63) / 64;
        counts[e] = pattern == 0   ? -1         /* poison */
                    : pattern == 1 ? 0x7fffffff /* the largest number */
                    : pattern == 2
                        ? (int32_t)fitting /* possible: all blocks are taken before the last experts */
                    : pattern == 3 ? (e % 2 ? 0 : 16) /* too few */
                    : pattern == 4 ? T                /* each count is possible, but the sum is too large */
                                   : (e ? 40 : T + 1);
    }
    CHECK_CUDA(cudaMemcpy((void *)(uintptr_t)view.counts, counts, sizeof counts, cudaMemcpyHostToDevice));
    must(context, smoe_plan(context, &l, &f, NULL), name);
    CHECK_CUDA(cudaDeviceSynchronize());
    check_plan(&view, &sizes, name);
    must(context, smoe_experts_forward(context, &l, &f, NULL), name);
    CHECK_CUDA(cudaDeviceSynchronize());
    const gpu_buffer all[] = {x, wr, w1, w2, logits, out, saved, scratch};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        check(!gpu_free(all[i]), name, "something was written outside a buffer");
}

/* ---- A long row of the combine ---- */

/* O[0] = Y[0] + Y[1], where d is 65537 times 8: the number of groups of 8 columns is a prime number, and
 * larger than the 65535 CTAs that a grid may have in y. */
static void combine_long_row(void)
{
    const char *name = "combine, d 524296";
    const int64_t d = 524296;
    uint16_t *y = malloc((size_t)d * 2 * sizeof *y);
    for (int64_t i = 0; i < d; i++) y[i] = 0x3f80, y[d + i] = i % 3 ? 0x4000 : 0x3f80; /* 1; 2 or 1 */
    const int32_t offsets[2] = {0, 2}, rows[2] = {0, 1};
    const gpu_buffer from = gpu_copy(y, (size_t)d * 2 * sizeof *y), out = gpu_alloc((size_t)d * sizeof *y),
                     token_offsets = gpu_copy(offsets, sizeof offsets),
                     token_rows = gpu_copy(rows, sizeof rows);
    const moe_cuda_combine p = {.y = from.memory,
                                .out = out.memory,
                                .token_offsets = (const int32_t *)(void *)token_offsets.memory,
                                .token_rows = (const int32_t *)(void *)token_rows.memory,
                                .tokens = 1,
                                .hidden = d,
                                .columns = d};
    moe_device device;
    CHECK_CUDA(moe_cuda_open_device(&device, 0));
    const moe_launch on = {.device = &device, .dtype = SMOE_TYPE_BF16};
    CHECK_CUDA(moe_cuda_combine_launch(&on, &p));
    CHECK_CUDA(cudaDeviceSynchronize());
    const uint16_t *got = gpu_read(out.memory, (size_t)d * sizeof *y);
    int good = 1;
    for (int64_t i = 0; i < d; i++) good = good && got[i] == (i % 3 ? 0x4040 : 0x4000);
    check(good, name, "a sum is wrong");
    check(!gpu_free(out), name, "something was written outside the output");
    gpu_free(from), gpu_free(token_offsets), gpu_free(token_rows);
    free(y), free((void *)(uintptr_t)got);
}

/* ---- The plan from given rows on any device ---- */

/* Ends a stream capture. Returns the largest number of CTAs in x among the captured kernels. */
static int end_capture(cudaStream_t stream)
{
    cudaGraph_t graph;
    cudaGraphNode_t nodes[16];
    size_t count = sizeof nodes / sizeof *nodes;
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphGetNodes(graph, nodes, &count));
    int most = 0;
    for (size_t i = 0; i < count; i++) {
        enum cudaGraphNodeType type;
        struct cudaKernelNodeParams params;
        CHECK_CUDA(cudaGraphNodeGetType(nodes[i], &type));
        if (type != cudaGraphNodeTypeKernel) continue;
        CHECK_CUDA(cudaGraphKernelNodeGetParams(nodes[i], &params));
        if ((int)params.gridDim.x > most) most = (int)params.gridDim.x;
    }
    CHECK_CUDA(cudaGraphDestroy(graph));
    return most;
}

/* If the rows would suffice for three CTAs on every multiprocessor, the plan must launch one CTA for each
 * multiprocessor, however many the device has. */
static void plan_on_every_multiprocessor(smoe_context *context)
{
    const char *name = "plan from rows, CTAs";
    int multiprocessors;
    CHECK_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    smoe_layer l = SMOE_LAYER_INIT;
    l.entry = SMOE_ENTRY_FROM_ROWS;
    l.tokens = 3 * 1024 * (int64_t)multiprocessors, l.hidden = 8, l.intermediate = 8, l.experts = 1,
    l.topk = 1;
    smoe_sizes sizes = SMOE_SIZES_INIT;
    must(context, smoe_query_sizes(context, &l, &sizes), name);
    const int32_t rows[2] = {0, (int32_t)l.tokens};
    const gpu_buffer offsets = gpu_copy(rows, sizeof rows), saved = gpu_alloc(sizes.saved_buffer_bytes),
                     scratch = gpu_alloc(sizes.scratch_forward_bytes);
    smoe_forward_args f = SMOE_FORWARD_ARGS_INIT;
    f.offsets = offsets.memory;
    f.saved = saved.memory, f.saved_size = sizes.saved_buffer_bytes;
    f.scratch = scratch.memory, f.scratch_size = sizes.scratch_forward_bytes;
    cudaStream_t stream;
    CHECK_CUDA(cudaStreamCreate(&stream));
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    must(context, smoe_plan(context, &l, &f, stream), name);
    const int ctas = end_capture(stream);
    if (ctas != multiprocessors) printf("%d CTAs, %d multiprocessors\n", ctas, multiprocessors);
    check(ctas == multiprocessors, name, "not one for each multiprocessor");
    CHECK_CUDA(cudaStreamDestroy(stream));
    check(!gpu_free(offsets) && !gpu_free(saved) && !gpu_free(scratch), name, "written outside a buffer");
}

/* ---- Errors of the caller ---- */

static void refused(smoe_context *context, smoe_status got, smoe_status expected, const char *text)
{
    check(got == expected, text, "has another status");
    check(strstr(smoe_last_error(context), text) != NULL, text, smoe_last_error(context));
}

/* Both types of indices. A stream that is captured cannot be waited for. */
static void refuse_offsets(smoe_type type)
{
    smoe_context *context = open_cuda_checking(1);
    smoe_layer l = SMOE_LAYER_INIT;
    l.entry = SMOE_ENTRY_FROM_ROWS, l.tokens = 100, l.hidden = 8, l.intermediate = 8, l.experts = 3;
    l.index_type = type;
    smoe_sizes sizes = SMOE_SIZES_INIT;
    must(context, smoe_query_sizes(context, &l, &sizes), "check_offsets");
    const gpu_buffer offsets = gpu_alloc(4 * sizeof(int64_t)), saved = gpu_alloc(sizes.saved_buffer_bytes),
                     scratch = gpu_alloc(sizes.scratch_forward_bytes);
    smoe_forward_args f = SMOE_FORWARD_ARGS_INIT;
    f.offsets = offsets.memory;
    f.saved = saved.memory, f.saved_size = sizes.saved_buffer_bytes;
    f.scratch = scratch.memory, f.scratch_size = sizes.scratch_forward_bytes;
    static const struct {
        int64_t values[4];
        const char *text; /* NULL: good */
    } cases[] = {{{1, 2, 3, 4}, "smoe_plan: offsets[0] is 1,"},
                 {{0, 50, 40, 90}, "smoe_plan: offsets[2] is 40, below offsets[1], 50"},
                 {{0, 50, 60, 101}, "smoe_plan: offsets[3] is 101, but the layer has 100 rows"},
                 {{0, 50, 60, 100}, NULL}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int32_t narrow[4];
        for (int e = 0; e < 4; e++) narrow[e] = (int32_t)cases[i].values[e];
        const void *from = type == SMOE_TYPE_I64 ? (const void *)cases[i].values : narrow;
        CHECK_CUDA(cudaMemcpy(offsets.memory, from, type == SMOE_TYPE_I64 ? 32 : 16, cudaMemcpyHostToDevice));
        const smoe_status status = smoe_plan(context, &l, &f, NULL);
        if (!cases[i].text) must(context, status, "good offsets");
        if (cases[i].text) refused(context, status, SMOE_ERROR_ARGUMENT, cases[i].text);
    }
    cudaStream_t stream;
    CHECK_CUDA(cudaStreamCreate(&stream));
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    refused(context, smoe_plan(context, &l, &f, stream), SMOE_ERROR_UNSUPPORTED,
            "smoe_plan: the stream is being");
    end_capture(stream);
    CHECK_CUDA(cudaStreamDestroy(stream));
    check(!gpu_free(offsets) && !gpu_free(saved) && !gpu_free(scratch), "check_offsets", "written outside");
    smoe_destroy(context);
}

/* The addresses are never read. */
static void refuse_overlap(smoe_context *context)
{
    smoe_layer l = SMOE_LAYER_INIT;
    l.tokens = T, l.hidden = D, l.intermediate = N, l.experts = E, l.topk = K;
    smoe_sizes sizes = SMOE_SIZES_INIT;
    must(context, smoe_query_sizes(context, &l, &sizes), "overlap");
    char *const base = (char *)(uintptr_t)((uint64_t)1 << 40), *const far = base + ((int64_t)1 << 30);
    smoe_forward_args f = SMOE_FORWARD_ARGS_INIT;
    f.x = f.out = base, f.w1 = f.w2 = f.router_weight = base + (1 << 28), f.logits = base + (1 << 29);
    f.saved = far, f.saved_size = sizes.saved_buffer_bytes;
    f.scratch = far + (1 << 30), f.scratch_size = sizes.scratch_forward_bytes;
    refused(context, smoe_layer_forward(context, &l, &f, NULL), SMOE_ERROR_ARGUMENT, "out is written");
    smoe_backward_args b = SMOE_BACKWARD_ARGS_INIT;
    b.dx = base, b.dout = base, b.w1 = b.w2 = base + (1 << 28), b.saved = far, b.saved_size = f.saved_size;
    b.scratch = far + (1 << 30), b.scratch_size = sizes.scratch_backward_bytes;
    refused(context, smoe_layer_backward(context, &l, &b, NULL), SMOE_ERROR_ARGUMENT, "dx is written");
}

/* The caller's own code has caused a CUDA error that cudaGetLastError would return. No call of the library
 * may report or clear it. */
static void keep_callers_error(smoe_context *context)
{
    smoe_layer l = SMOE_LAYER_INIT;
    l.entry = SMOE_ENTRY_FROM_TOPK, l.tokens = T, l.hidden = D, l.intermediate = N, l.experts = E, l.topk = 1;
    smoe_sizes sizes = SMOE_SIZES_INIT;
    must(context, smoe_query_sizes(context, &l, &sizes), "error of the caller");
    const gpu_buffer x = random_bf16(T * D), w1 = random_bf16(E * 2 * N * D), w2 = random_bf16(E * D * N),
                     ids = gpu_alloc(T * 4), weights = gpu_alloc(T * 4), out = gpu_alloc(T * D * 2),
                     dw1 = gpu_alloc(E * 2 * N * D * 4), saved = gpu_alloc(sizes.saved_buffer_bytes),
                     scratch = gpu_alloc(sizes.scratch_backward_bytes + sizes.scratch_forward_bytes);
    smoe_forward_args f = SMOE_FORWARD_ARGS_INIT;
    f.x = x.memory, f.w1 = w1.memory, f.w2 = w2.memory, f.topk_ids = ids.memory, f.out = out.memory;
    f.topk_weights = (const float *)(const void *)weights.memory;
    f.saved = saved.memory, f.saved_size = sizes.saved_buffer_bytes;
    f.scratch = scratch.memory, f.scratch_size = sizes.scratch_forward_bytes;
    smoe_backward_args b = SMOE_BACKWARD_ARGS_INIT;
    b.x = f.x, b.w1 = f.w1, b.w2 = f.w2, b.topk_ids = f.topk_ids, b.dout = x.memory, b.dw1 = dw1.memory;
    b.saved = f.saved, b.saved_size = f.saved_size;
    b.scratch = scratch.memory, b.scratch_size = sizes.scratch_backward_bytes;
    void *none;
    check(cudaMalloc(&none, (size_t)1 << 60) == cudaErrorMemoryAllocation, "caller's error", "no error");
    must(context, smoe_layer_forward(context, &l, &f, NULL), "forward after an error of the caller");
    must(context, smoe_layer_backward(context, &l, &b, NULL), "backward after an error of the caller");
    check(cudaGetLastError() == cudaErrorMemoryAllocation, "caller's error", "was cleared");
    CHECK_CUDA(cudaDeviceSynchronize());
    const gpu_buffer all[] = {x, w1, w2, ids, weights, out, dw1, saved, scratch};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) gpu_free(all[i]);
}

int main(void)
{
    smoe_context *context = open_cuda();
    static const smoe_rounding roundings[] = {SMOE_ROUNDING_NR_F, SMOE_ROUNDING_UP, SMOE_ROUNDING_DOWN};
    for (int i = 0; i < 3; i++)
        for (int pattern = 0; pattern < 6; pattern++) skip_round(context, roundings[i], pattern);
    combine_long_row();
    plan_on_every_multiprocessor(context);
    refuse_offsets(SMOE_TYPE_I32);
    refuse_offsets(SMOE_TYPE_I64);
    refuse_overlap(context);
    keep_callers_error(context);
    smoe_destroy(context);
    printf("%d failures\n", failures);
    return failures != 0;
}
