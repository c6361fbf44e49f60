/* See gpu.h: the GPU's memory, stream and batches, and the table. Products are in cublaslt.c, attention in
 * cudnn_attention.cpp; the other operations are kernels (kernels.h). */
#include "train/cuda/device.h"

#include <stdlib.h>
#include <string.h>

enum { STAGING_VALUES = 4 << 20, LOSS_ROWS = 8192 };

cuda_device *cuda_of(train_device *dv)
{
    return (cuda_device *)dv;
}

void cuda_note(train_device *dv, cudaError_t status, const char *doing)
{
    if (status == cudaSuccess || dv->failure.code) return;
    fail(&dv->failure, ERROR_RUNTIME, "CUDA, %s: %s (%s)", doing, cudaGetErrorString(status),
         cudaGetErrorName(status));
}

/* ---- memory ---- */

static void *cuda_allocate(train_device *dv, size_t bytes)
{
    void *memory;
    const cuda_memory *from = cuda_of(dv)->memory;
    bytes = bytes ? bytes : 1;
    if (from ? from->allocate(&memory, bytes) == 0 : cudaMalloc(&memory, bytes) == cudaSuccess) return memory;
    (void)cudaGetLastError();
    return NULL;
}

static void cuda_release(train_device *dv, void *memory)
{
    const cuda_memory *from = cuda_of(dv)->memory;
    cuda_note(dv, cudaStreamSynchronize(dv->stream), "waiting");
    if (from)
        (void)from->release(memory);
    else
        (void)cudaFree(memory);
}

static void *cuda_allocate_host(train_device *dv, size_t bytes)
{
    void *memory;
    (void)dv;
    if (cudaMallocHost(&memory, bytes) == cudaSuccess) return memory;
    (void)cudaGetLastError();
    return NULL;
}

static void cuda_release_host(train_device *dv, void *memory)
{
    cuda_note(dv, cudaStreamSynchronize(dv->stream), "waiting");
    (void)cudaFreeHost(memory);
}

static size_t cuda_available(train_device *dv)
{
    size_t available = 0, total = 0;
    (void)dv;
    return cudaMemGetInfo(&available, &total) == cudaSuccess ? available : 0;
}

static size_t cuda_used(train_device *dv)
{
    size_t available = 0, total = 0;
    (void)dv;
    return cudaMemGetInfo(&available, &total) == cudaSuccess ? total - available : 0;
}

static void cuda_upload(train_device *dv, void *to, const void *host, size_t bytes)
{
    cuda_note(dv, cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, dv->stream), "upload");
}

static void cuda_download(train_device *dv, void *host, const void *from, size_t bytes)
{
    cuda_note(dv, cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, dv->stream), "download");
    cuda_note(dv, cudaStreamSynchronize(dv->stream), "download");
}

static void cuda_store(train_device *dv, void *to, smoe_type type, const float *host, int64_t count)
{
    cuda_device *cuda = cuda_of(dv);
    if (type == SMOE_TYPE_F32) {
        cuda_upload(dv, to, host, (size_t)count * sizeof *host);
        return;
    }
    for (int64_t at = 0; at < count; at += STAGING_VALUES) {
        int64_t part = count - at < STAGING_VALUES ? count - at : STAGING_VALUES;
        cuda_upload(dv, cuda->staging, host + at, (size_t)part * sizeof *host);
        cuda_note(dv,
                  kernel_convert((char *)to + (size_t)at * type_size(type), type, cuda->staging,
                                 SMOE_TYPE_F32, part, false, dv->stream),
                  "conversion");
    }
}

static void cuda_load(train_device *dv, float *host, const void *from, smoe_type type, int64_t count)
{
    cuda_device *cuda = cuda_of(dv);
    if (type == SMOE_TYPE_F32) {
        cuda_download(dv, host, from, (size_t)count * sizeof *host);
        return;
    }
    for (int64_t at = 0; at < count; at += STAGING_VALUES) {
        int64_t part = count - at < STAGING_VALUES ? count - at : STAGING_VALUES;
        cuda_note(dv,
                  kernel_convert(cuda->staging, SMOE_TYPE_F32,
                                 (const char *)from + (size_t)at * type_size(type), type, part, false,
                                 dv->stream),
                  "conversion");
        cuda_download(dv, host + at, cuda->staging, (size_t)part * sizeof *host);
    }
}

static void cuda_copy(train_device *dv, void *to, const void *from, size_t bytes)
{
    cuda_note(dv, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, dv->stream), "copying");
}

static void cuda_clear(train_device *dv, void *memory, size_t bytes)
{
    cuda_note(dv, cudaMemsetAsync(memory, 0, bytes, dv->stream), "clearing memory");
}

/* All enqueued work is done. */
static void wait(cuda_device *cuda)
{
    cuda_note(&cuda->base, cudaStreamSynchronize(cuda->base.stream), "a pass");
    cuda->busy[0] = cuda->busy[1] = false;
}

static bool cuda_finish(train_device *dv, error *err)
{
    wait(cuda_of(dv));
    if (!dv->failure.code) return true;
    if (err) *err = dv->failure;
    return false;
}

static void cuda_draw(train_device *dv, void *to, smoe_type type, float *master, int64_t first, int64_t count,
                      double deviation, uint64_t stream)
{
    (void)type; // bf16
    cuda_note(dv, kernel_draw(to, master, first, count, deviation, stream, dv->stream), "first weights");
}

/* ---- batches ---- */

static void release_batch(cuda_device *cuda)
{
    for (int i = 0; i < 2; i++) {
        if (cuda->pinned[i]) (void)cudaFreeHost(cuda->pinned[i]);
        cuda->pinned[i] = NULL;
    }
    if (cuda->batch) (void)cudaFree(cuda->batch);
    free(cuda->heads);
    cuda->batch = NULL;
    cuda->heads = NULL;
    cuda->batch_rows = cuda->batch_vocab = 0;
}

/* Size of a batch, in pinned memory and on the device. tokens, targets and order have `most` elements each.
 * The runs of a part have two elements more than the part has rows, so with parts of one row they have 3 most
 * in total. */
static bool make_room(cuda_device *cuda, int64_t most, int64_t vocab)
{
    if (most <= cuda->batch_rows && vocab <= cuda->batch_vocab) return true;
    wait(cuda);
    release_batch(cuda);
    size_t bytes = (size_t)(6 * most) * sizeof(int32_t);
    for (int i = 0; i < 2; i++)
        cuda_note(&cuda->base, cudaMallocHost((void **)&cuda->pinned[i], bytes), "memory of a batch");
    cuda_note(&cuda->base, cudaMalloc((void **)&cuda->batch, bytes), "memory of a batch");
    cuda->heads = malloc((size_t)(vocab + 1) * sizeof *cuda->heads);
    if (cuda->base.failure.code || !cuda->heads) return false;
    cuda->batch_rows = most;
    cuda->batch_vocab = vocab;
    return true;
}

/* Sorts the rows by token, those of one token ascending. `runs` gets the place where each occurring token
 * begins, then the number of rows, then -1 up to its end. */
static void sort_rows(int32_t *order, int32_t *runs, int32_t *heads, const int32_t *tokens, int64_t rows,
                      int64_t vocab)
{
    memset(heads, 0, (size_t)(vocab + 1) * sizeof *heads);
    for (int64_t r = 0; r < rows; r++) heads[tokens[r] + 1]++;
    int64_t count = 0;
    for (int64_t t = 0; t < vocab; t++) {
        if (heads[t + 1]) runs[count++] = heads[t];
        heads[t + 1] += heads[t];
    }
    runs[count] = (int32_t)rows;
    for (int64_t i = count + 1; i <= rows + 1; i++) runs[i] = -1;
    for (int64_t r = 0; r < rows; r++) order[heads[tokens[r]]++] = (int32_t)r;
}

static void cuda_stage_batch(train_device *dv, device_batch *to, const int32_t *tokens,
                             const int32_t *targets, int64_t rows, int64_t parts, int64_t most, int64_t vocab)
{
    cuda_device *cuda = cuda_of(dv);
    if (!make_room(cuda, most, vocab)) {
        cuda_note(dv, cudaErrorMemoryAllocation, "memory of a batch");
        return;
    }
    if (cuda->busy[cuda->staged]) wait(cuda);
    int32_t *pinned = cuda->pinned[cuda->staged], *batch = cuda->batch;
    size_t bytes = (size_t)(rows * parts) * sizeof *tokens;
    most = cuda->batch_rows;
    memcpy(pinned, tokens, bytes);
    if (targets) memcpy(pinned + most, targets, bytes);
    for (int64_t p = 0; p < parts; p++) {
        int64_t first = p * rows, order = 2 * most + first, runs = 3 * most + p * (rows + 2);
        if (targets) sort_rows(pinned + order, pinned + runs, cuda->heads, tokens + first, rows, vocab);
        to[p] = (device_batch){batch + first, batch + most + first, batch + order, batch + runs};
    }
    cuda->staged_bytes = (size_t)(3 * most + parts * (rows + 2)) * sizeof *batch;
}

static void cuda_load_batch(train_device *dv)
{
    cuda_device *cuda = cuda_of(dv);
    if (dv->failure.code) return; // after a failure there may be no batch
    cuda_upload(dv, cuda->batch, cuda->pinned[cuda->staged], cuda->staged_bytes);
    cuda->busy[cuda->staged] = true;
    cuda->staged ^= 1;
}

/* ---- recording ---- */

static void cuda_record(train_device *dv)
{
    cuda_note(dv, cudaStreamBeginCapture(dv->stream, cudaStreamCaptureModeThreadLocal), "recording");
}

static void *cuda_recorded(train_device *dv)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t ready = NULL;
    cuda_note(dv, cudaStreamEndCapture(dv->stream, &graph), "recording");
    if (graph) cuda_note(dv, cudaGraphInstantiate(&ready, graph, 0), "recording");
    if (graph) (void)cudaGraphDestroy(graph);
    return ready;
}

static void cuda_replay(train_device *dv, void *recording)
{
    cuda_note(dv, cudaGraphLaunch(recording, dv->stream), "a recorded step");
}

static void cuda_forget(train_device *dv, void *recording)
{
    cuda_note(dv, cudaStreamSynchronize(dv->stream), "waiting");
    if (recording) (void)cudaGraphExecDestroy(recording);
}

/* ---- the device ---- */

static void cuda_close(train_device *dv)
{
    cuda_device *cuda = cuda_of(dv);
    if (dv->stream) (void)cudaStreamSynchronize(dv->stream);
    cudnn_attention_close(cuda->attention);
    cublaslt_close(cuda->products);
    release_batch(cuda);
    if (cuda->small) (void)cudaFree(cuda->small);
    if (cuda->staging) (void)cudaFree(cuda->staging);
    if (dv->stream) (void)cudaStreamDestroy(dv->stream);
    free(cuda);
}

static const train_ops device_part = {
    .close = cuda_close,
    .allocate = cuda_allocate,
    .release = cuda_release,
    .allocate_host = cuda_allocate_host,
    .release_host = cuda_release_host,
    .available = cuda_available,
    .used = cuda_used,
    .draw = cuda_draw,
    .upload = cuda_upload,
    .download = cuda_download,
    .store = cuda_store,
    .load = cuda_load,
    .clear = cuda_clear,
    .copy = cuda_copy,
    .stage_batch = cuda_stage_batch,
    .load_batch = cuda_load_batch,
    .finish = cuda_finish,
    .record = cuda_record,
    .recorded = cuda_recorded,
    .replay = cuda_replay,
    .forget = cuda_forget,
};

bool cuda_usable(error *why)
{
    char text[256] = "";
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.backend = SMOE_BACKEND_CUDA;
    options.error_text = text;
    options.error_size = sizeof text;
    smoe_context *context = NULL;
    const smoe_status status = smoe_create(&context, &options);
    (void)cudaGetLastError();
    smoe_destroy(context);
    return status == SMOE_OK || fail(why, ERROR_RUNTIME, "%s", text);
}

static bool open(cuda_device *cuda, const cuda_options *options, error *err)
{
    cudaStream_t stream = NULL;
    size_t small = KERNELS_NORM_PARTS * sizeof(double) + 16 * sizeof(float);
    error why = {0};
    int count = 0;
    if (!cuda_usable(&why)) return fail(err, ERROR_RUNTIME, "no GPU can be used: %.300s", why.text);
    if (cudaGetDeviceCount(&count) == cudaSuccess && options->index >= count)
        return fail(err, ERROR_RUNTIME, "this rank's GPU is number %d, but this host has %d", options->index,
                    count);
    if (cudaSetDevice(options->index) != cudaSuccess)
        return fail(err, ERROR_RUNTIME, "GPU %d: %s", options->index, cudaGetErrorString(cudaGetLastError()));
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess ||
        cudaDeviceGetAttribute(&cuda->processors, cudaDevAttrMultiProcessorCount, options->index) !=
            cudaSuccess ||
        cudaMalloc((void **)&cuda->small, small) != cudaSuccess ||
        cudaMalloc(&cuda->staging, STAGING_VALUES * sizeof(float)) != cudaSuccess)
        return fail(err, ERROR_RUNTIME, "the GPU does not start: %s", cudaGetErrorString(cudaGetLastError()));
    cuda->base.stream = stream;
    if (options->plain) return true;
    return (cuda->products = cublaslt_open(err)) &&
           (cuda->attention = cudnn_attention_open(stream, !options->fastest, err));
}

train_device *cuda_open(const cuda_options *options, error *err)
{
    cuda_device *cuda = calloc(1, sizeof *cuda);
    if (!cuda) {
        fail(err, ERROR_RUNTIME, "out of memory: the device");
        return NULL;
    }
    cuda->ops = device_part;
    cuda_add_operations(&cuda->ops);
    const bool narrow = options->gradients == GRADIENTS_DEFAULT ? options->bf16 && !options->sums
                                                                : options->gradients == GRADIENTS_BF16;
    cuda->base = (train_device){.ops = &cuda->ops,
                                .name = "cuda",
                                .index = options->index,
                                .backend = SMOE_BACKEND_CUDA,
                                .type = SMOE_TYPE_BF16,
                                .grad_type = narrow ? SMOE_TYPE_BF16 : SMOE_TYPE_F32,
                                .state_type = options->bf16 ? SMOE_TYPE_BF16 : SMOE_TYPE_F32,
                                .master = !options->bf16,
                                .loss_rows = LOSS_ROWS,
                                .most_hidden = KERNELS_MOST_HIDDEN,
                                .most_head = KERNELS_MOST_HEAD};
    if (open(cuda, options, err)) return &cuda->base;
    cuda_close(&cuda->base);
    return NULL;
}
