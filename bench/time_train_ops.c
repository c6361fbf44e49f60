/* Times the operations of one training step of the paper's 1.4B model: 18 layers, d 768, 12 heads, T 40960 in
 * sequences of 4096, vocabulary 50304. For each operation it prints the milliseconds of a call, the calls of
 * a step, the milliseconds of a step, and TFLOP/s or GB/s (of the bytes that must be read and written at
 * least); at the end the sum. Each figure is the mean of REPEATS calls on one stream.
 *
 *     cuda_time_train_ops [cuda | cuda-plain] [fastest]
 *
 * The sum does not contain the experts of the 18 layers: `smoe bench` times them. */
#include "train/device.h"
#include "train/model/model.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 18, HIDDEN = 768, HEADS = 12, LENGTH = 4096, SEQUENCES = 10, VOCAB = 50304 };
enum { ROWS = LENGTH * SEQUENCES, PART = 8192, REPEATS = 10 };
#define WEIGHTS 1441880832 // number of weights of the whole model

typedef struct bench {
    train_device *dv;
    const train_ops *ops;
    pass_shape shape;
    void *x, *y, *z, *w, *qkv, *dqkv, *logits, *saved, *scratch, *embedding;
    float *rstd, *rope, *norm_scratch, *losses, *wide;
    device_batch batch;
    adamw_arrays optimizer;
    grad_span span;
    void *update_scratch;
    adamw_step *step;
    double *scalar;
} bench;

typedef void call(const bench *b);

static void embed(const bench *b)
{
    b->ops->embed(b->dv, b->x, b->embedding, b->batch.tokens, ROWS, HIDDEN);
}

static void embed_backward(const bench *b)
{
    b->ops->embed_backward(b->dv, b->embedding, b->x, &b->batch, ROWS, VOCAB, HIDDEN, true);
}

static void norm(const bench *b)
{
    b->ops->norm(b->dv, b->y, b->rstd, b->x, NULL, b->w, ROWS, HIDDEN, 1e-5);
}

static void norm_residual(const bench *b)
{
    b->ops->norm(b->dv, b->y, b->rstd, b->x, b->z, b->w, ROWS, HIDDEN, 1e-5);
}

static void norm_backward(const bench *b)
{
    b->ops->norm_backward(b->dv, b->x, b->embedding, NULL, b->y, b->z, b->rstd, b->w, ROWS, HIDDEN, true,
                          false, b->norm_scratch);
}

/* The same, and it computes the norm's output again, as --recompute norms needs it. */
static void norm_backward_again(const bench *b)
{
    b->ops->norm_backward(b->dv, b->x, b->embedding, b->qkv, b->y, b->z, b->rstd, b->w, ROWS, HIDDEN, true,
                          false, b->norm_scratch);
}

static void qk(const bench *b)
{
    b->ops->qk_norm_rope(b->dv, b->x, b->y, b->rstd, b->qkv, b->w, b->w, b->rope, &b->shape, 1e-5);
}

static void qk_backward(const bench *b)
{
    b->ops->qk_norm_rope_backward(b->dv, b->dqkv, b->embedding, b->embedding, b->x, b->y, b->qkv, b->rstd,
                                  b->w, b->w, b->rope, &b->shape, false, b->norm_scratch);
}

static void *values_of(const bench *b)
{
    return (char *)b->qkv + 2 * HIDDEN * 2;
}

static void attention(const bench *b)
{
    b->ops->attention(b->dv, b->z, b->saved, b->x, b->y, values_of(b), &b->shape);
}

static void attention_backward(const bench *b)
{
    b->ops->attention_backward(b->dv, b->x, b->y, (char *)b->dqkv + 2 * HIDDEN * 2, b->z, b->z, b->saved,
                               b->x, b->y, values_of(b), &b->shape, b->scratch);
}

static void qkv_linear(const bench *b)
{
    b->ops->linear(b->dv, b->qkv, b->x, b->embedding, NULL, ROWS, HIDDEN, 3 * HIDDEN);
}

static void qkv_dx(const bench *b)
{
    b->ops->linear_dx(b->dv, b->x, b->qkv, b->embedding, ROWS, HIDDEN, 3 * HIDDEN, false);
}

static void qkv_dw(const bench *b)
{
    b->ops->linear_dw(b->dv, b->embedding, b->dv->grad_type, b->qkv, b->x, ROWS, HIDDEN, 3 * HIDDEN, false);
}

static void out_linear(const bench *b)
{
    b->ops->linear(b->dv, b->y, b->x, b->embedding, b->z, ROWS, HIDDEN, HIDDEN);
}

static void out_dx(const bench *b)
{
    b->ops->linear_dx(b->dv, b->y, b->x, b->embedding, ROWS, HIDDEN, HIDDEN, false);
}

static void out_dw(const bench *b)
{
    b->ops->linear_dw(b->dv, b->embedding, b->dv->grad_type, b->y, b->x, ROWS, HIDDEN, HIDDEN, false);
}

static void head(const bench *b)
{
    b->ops->linear(b->dv, b->logits, b->x, b->embedding, NULL, PART, HIDDEN, VOCAB);
}

static void head_dx(const bench *b)
{
    b->ops->linear_dx(b->dv, b->y, b->logits, b->embedding, PART, HIDDEN, VOCAB, false);
}

static void head_dw(const bench *b)
{
    b->ops->linear_dw(b->dv, b->wide, SMOE_TYPE_F32, b->logits, b->x, PART, HIDDEN, VOCAB, true);
}

static void cross_entropy(const bench *b)
{
    b->ops->cross_entropy(b->dv, b->logits, b->losses, b->batch.targets, 1.0f, PART, VOCAB);
}

static void narrow(const bench *b)
{
    b->ops->narrow(b->dv, b->embedding, b->wide, (int64_t)VOCAB * HIDDEN, false);
}

static void gradient_square(const bench *b)
{
    b->ops->gradient_square(b->dv, b->scalar, b->span.grads, WEIGHTS);
}

static void adamw(const bench *b)
{
    b->ops->begin_update(b->dv, b->step, b->scalar);
    b->ops->update(b->dv, &b->optimizer, &b->span, NULL, NULL);
}

/* A layer's share of the weights. */
static void adamw_layer(const bench *b)
{
    const grad_span span = {b->span.grads, 0, WEIGHTS / LAYERS / 64 * 64, 0};
    b->ops->update(b->dv, &b->optimizer, &span, b->scalar, b->update_scratch);
}

typedef struct job {
    const char *name;
    call *run;
    double calls; // of a step
    double work;  // bytes of a call, if flops is 0
    double flops; // of a call
} job;

static const double TD = 2.0 * ROWS * HIDDEN, GEMM = 2.0 * ROWS * HIDDEN * HIDDEN;
#define ATTENTION_FLOPS (2.0 * ROWS * LENGTH * HIDDEN) // causal: half of the FLOPs of q k^T and of p v

/* Prints the figures of an operation and returns its milliseconds in a step. */
static double time_job(const bench *b, const job *j)
{
    cudaEvent_t start, end;
    float ms = 0;
    error err = {0};
    (void)cudaEventCreate(&start), (void)cudaEventCreate(&end);
    for (int i = 0; i < 3; i++) j->run(b);
    (void)cudaEventRecord(start, b->dv->stream);
    for (int i = 0; i < REPEATS; i++) j->run(b);
    (void)cudaEventRecord(end, b->dv->stream);
    if (!b->ops->finish(b->dv, &err)) {
        printf("%s: %s\n", j->name, err.text);
        exit(1);
    }
    (void)cudaEventElapsedTime(&ms, start, end);
    ms /= REPEATS;
    printf("%-26s %8.3f ms x %5.0f = %7.2f ms a step", j->name, (double)ms, j->calls, (double)ms * j->calls);
    if (j->flops > 0)
        printf("  %6.0f TFLOP/s\n", j->flops / (double)ms / 1e9);
    else
        printf("  %6.0f GB/s\n", j->work / (double)ms / 1e6);
    (void)cudaEventDestroy(start), (void)cudaEventDestroy(end);
    return (double)ms * j->calls;
}

static void *place(bench *b, double bytes)
{
    void *memory = b->ops->allocate(b->dv, (size_t)bytes);
    if (!memory) {
        printf("out of memory: %.2f GB\n", bytes / 1e9);
        exit(1);
    }
    return memory;
}

/* Normal values of deviation 1 (weights: 0.02). */
static void *draw(bench *b, double count, double deviation)
{
    void *memory = place(b, 2 * count);
    b->ops->draw(b->dv, memory, SMOE_TYPE_BF16, NULL, 0, (int64_t)count, deviation, (uint64_t)count);
    return memory;
}

static void fill(bench *b)
{
    const double values = (double)ROWS * HIDDEN;
    b->x = draw(b, values, 1), b->y = draw(b, values, 1), b->z = draw(b, values, 1);
    b->w = draw(b, HIDDEN, 1), b->qkv = draw(b, 3 * values, 1), b->dqkv = draw(b, 3 * values, 1);
    b->logits = draw(b, (double)PART * VOCAB, 1), b->embedding = draw(b, (double)VOCAB * HIDDEN, 0.02);
    b->wide = place(b, 4.0 * VOCAB * HIDDEN);
    b->saved = place(b, (double)b->ops->attention_saved(b->dv, &b->shape));
    b->scratch = place(b, (double)b->ops->attention_scratch(b->dv, &b->shape) + 256);
    b->rstd = place(b, 8.0 * ROWS), b->losses = place(b, 4.0 * ROWS);
    b->rope = place(b, 4.0 * LENGTH * HIDDEN / HEADS);
    b->ops->clear(b->dv, b->rope, (size_t)LENGTH * HIDDEN / HEADS * 4);
    b->ops->clear(b->dv, b->wide, (size_t)VOCAB * HIDDEN * 4);
    b->norm_scratch = place(b, 4.0 * (double)b->ops->norm_scratch(b->dv, ROWS, HIDDEN));
    b->scalar = place(b, 256), b->step = place(b, sizeof *b->step);
    const adamw_step step = {.lr = 1e-4, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .step = 10};
    b->ops->upload(b->dv, b->step, &step, sizeof step);
    const double weights = (double)WEIGHTS;
    b->optimizer = (adamw_arrays){.weights = draw(b, weights, 0.02),
                                  .first = draw(b, weights, 0),
                                  .second = draw(b, weights, 0),
                                  .state_type = SMOE_TYPE_BF16,
                                  .matrices = WEIGHTS,
                                  .total = WEIGHTS};
    b->span = (grad_span){draw(b, weights, 0), 0, WEIGHTS, 0};
    b->update_scratch = place(b, (double)b->ops->update_scratch(b->dv, WEIGHTS));
    int32_t *tokens = malloc(2 * ROWS * sizeof *tokens);
    for (int i = 0; i < 2 * ROWS; i++) tokens[i] = (int32_t)((uint32_t)i * 2654435761u % VOCAB);
    b->ops->stage_batch(b->dv, &b->batch, tokens, tokens + ROWS, ROWS, 1, ROWS, VOCAB);
    b->ops->load_batch(b->dv);
    error err = {0};
    if (!b->ops->finish(b->dv, &err)) printf("%s\n", err.text), exit(1);
    free(tokens);
}

static const job jobs[] = {
    {"embedding", embed, 1, 2 * TD, 0},
    {"norm", norm, LAYERS + 1, 2 * TD, 0},
    {"residual and norm", norm_residual, LAYERS, 4 * TD, 0},
    {"qkv", qkv_linear, LAYERS, 0, 3 * GEMM},
    {"q/k norm, RoPE", qk, LAYERS, 4 * TD, 0},
    {"attention", attention, LAYERS, 0, ATTENTION_FLOPS},
    {"output, residual", out_linear, LAYERS, 0, GEMM},
    {"head", head, ROWS / PART, 0, 2.0 * PART *HIDDEN *VOCAB},
    {"cross-entropy", cross_entropy, ROWS / PART, 4.0 * PART *VOCAB, 0},
    {"head dx", head_dx, ROWS / PART, 0, 2.0 * PART *HIDDEN *VOCAB},
    {"head dw, f32", head_dw, ROWS / PART, 0, 2.0 * PART *HIDDEN *VOCAB},
    {"norm backward", norm_backward, 2 * LAYERS + 1, 4 * TD, 0},
    {"norm backward, output again", norm_backward_again, 0, 5 * TD, 0},
    {"output dx", out_dx, LAYERS, 0, GEMM},
    {"output dw", out_dw, LAYERS, 0, GEMM},
    {"attention backward", attention_backward, LAYERS, 0, 2.5 * ATTENTION_FLOPS},
    {"q/k norm, RoPE backward", qk_backward, LAYERS, 6 * TD, 0},
    {"qkv dx", qkv_dx, LAYERS, 0, 3 * GEMM},
    {"qkv dw", qkv_dw, LAYERS, 0, 3 * GEMM},
    {"embedding backward", embed_backward, 1, TD, 0},
    {"head's gradient to bf16", narrow, 1, 6.0 * VOCAB *HIDDEN, 0},
    {"gradient's norm to clip", gradient_square, 0, 2.0 * WEIGHTS, 0},
    {"AdamW after the backward", adamw, 0, 14.0 * WEIGHTS, 0},
    {"AdamW and norm by layer", adamw_layer, LAYERS, 14.0 * WEIGHTS / LAYERS, 0},
};

int main(int argc, char **argv)
{
    error err = {0};
    const device_options options = {.name = argc > 1 ? argv[1] : "cuda",
                                    .bf16 = true,
                                    .fastest = argc > 2 && strcmp(argv[2], "fastest") == 0};
    bench b = {.shape = {SEQUENCES, LENGTH, HEADS, HIDDEN / HEADS, 0}};
    b.dv = device_open(&options, &err);
    if (!b.dv) {
        printf("%s\n", err.text);
        return 77;
    }
    b.ops = b.dv->ops;
    b.ops->prepare(b.dv, &b.shape, true);
    fill(&b);
    double sum = 0;
    for (size_t i = 0; i < sizeof jobs / sizeof jobs[0]; i++) sum += time_job(&b, &jobs[i]);
    printf("%-26s %31.2f ms a step\n", "sum, experts not counted", sum);
    b.ops->close(b.dv);
    return 0;
}
