/* The table of operations on the CPU, all in f32. When a call returns, its operation is done. */
#include "train/cpu/cpu.h"

#include "train/cpu/adamw.h"
#include "train/cpu/attention.h"
#include "train/cpu/embedding.h"
#include "train/cpu/linear.h"
#include "train/cpu/norm.h"
#include "train/cpu/rope.h"
#include "train/cpu/swiglu.h"

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGN = 256 };

typedef struct cpu_device {
    train_device base;
    adamw_step step; // of the updates at hand, which multiply the gradient by
    float factor;
} cpu_device;

/* ---- the device ---- */

static void *cpu_allocate(train_device *dv, size_t bytes)
{
    (void)dv;
    if (bytes > SIZE_MAX - ALIGN) return NULL;
    size_t rounded = (bytes + ALIGN - 1) / ALIGN * ALIGN;
    return aligned_alloc(ALIGN, rounded ? rounded : ALIGN);
}

static void cpu_release(train_device *dv, void *memory)
{
    (void)dv;
    free(memory);
}

static size_t cpu_available(train_device *dv)
{
    (void)dv;
    return 0;
}

static void cpu_copy(train_device *dv, void *to, const void *from, size_t bytes)
{
    (void)dv;
    if (bytes && to != from) memcpy(to, from, bytes);
}

static void cpu_store(train_device *dv, void *to, smoe_type type, const float *host, int64_t count)
{
    (void)type;
    cpu_copy(dv, to, host, (size_t)count * sizeof *host);
}

static void cpu_load(train_device *dv, float *host, const void *from, smoe_type type, int64_t count)
{
    (void)type;
    cpu_copy(dv, host, from, (size_t)count * sizeof *host);
}

static void cpu_clear(train_device *dv, void *memory, size_t bytes)
{
    (void)dv;
    memset(memory, 0, bytes);
}

static void cpu_load_batch(train_device *dv)
{
    (void)dv;
}

static void cpu_stage_batch(train_device *dv, device_batch *to, const int32_t *tokens, const int32_t *targets,
                            int64_t rows, int64_t parts, int64_t most, int64_t vocab)
{
    (void)dv, (void)most, (void)vocab;
    for (int64_t p = 0; p < parts; p++)
        to[p] = (device_batch){.tokens = tokens + p * rows, .targets = targets ? targets + p * rows : NULL};
}

static bool cpu_finish(train_device *dv, error *err)
{
    (void)dv, (void)err;
    return true;
}

static void cpu_prepare(train_device *dv, const pass_shape *shape, bool backward)
{
    (void)dv, (void)shape, (void)backward;
}

/* ---- forward ---- */

static void cpu_embed(train_device *dv, void *x, const void *weight, const int32_t *tokens, int64_t rows,
                      int64_t d)
{
    (void)dv;
    embedding_forward(x, weight, tokens, rows, d);
}

static void add_rows(float *restrict to, const float *restrict from, int64_t count)
{
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < count; i++) to[i] += from[i];
}

static void cpu_norm(train_device *dv, void *y, float *rstd, void *x, const void *residual, const void *w,
                     int64_t rows, int64_t d, double eps)
{
    (void)dv;
    if (residual) add_rows(x, residual, rows * d);
    norm_forward(y, d, rstd, x, d, w, rows, d, (float)eps);
}

static void cpu_linear(train_device *dv, void *y, const void *x, const void *w, const void *residual,
                       int64_t rows, int64_t in, int64_t out)
{
    if (residual) cpu_copy(dv, y, residual, (size_t)(rows * out) * sizeof(float));
    linear_forward(y, x, w, rows, in, out, residual != NULL);
}

static void cpu_qk_norm_rope(train_device *dv, void *q, void *k, float *rstd, const void *qkv, const void *wq,
                             const void *wk, const float *rope, const pass_shape *shape, double eps)
{
    (void)dv;
    int64_t rows = shape->sequences * shape->length, d = shape->heads * shape->head_size;
    const float *projected = qkv;
    norm_forward(q, d, rstd, projected, 3 * d, wq, rows, d, (float)eps);
    norm_forward(k, d, rstd + rows, projected + d, 3 * d, wk, rows, d, (float)eps);
    rope_apply(q, rope, rows, shape, false);
    rope_apply(k, rope, rows, shape, false);
}

static void cpu_attention(train_device *dv, void *out, void *saved, const void *q, const void *k,
                          const void *v, const pass_shape *shape)
{
    (void)dv;
    if (shape->first)
        attention_continue(out, q, k, v, shape);
    else
        attention_forward(out, saved, q, k, v, shape);
}

static size_t cpu_attention_saved(train_device *dv, const pass_shape *shape)
{
    (void)dv;
    return (size_t)attention_saved(shape) * sizeof(float);
}

static size_t cpu_attention_scratch(train_device *dv, const pass_shape *shape)
{
    (void)dv;
    return (size_t)attention_scratch(shape) * sizeof(float);
}

static void cpu_swiglu(train_device *dv, void *a, const void *h, int64_t rows, int64_t width)
{
    (void)dv;
    swiglu_forward(a, h, rows, width);
}

static void cpu_cross_entropy(train_device *dv, void *logits, float *losses, const int32_t *targets,
                              float scale, int64_t rows, int64_t vocab)
{
    (void)dv;
    cross_entropy(logits, losses, targets, scale, rows, vocab);
}

static void cpu_mean(train_device *dv, double *mean, const float *values, int64_t count)
{
    (void)dv;
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) sum += values[i];
    *mean = sum / (double)count;
}

/* ---- backward; gradients are always added to ---- */

static void cpu_embed_backward(train_device *dv, void *dweight, const void *dx, const device_batch *batch,
                               int64_t rows, int64_t vocab, int64_t d, bool add)
{
    (void)dv, (void)vocab, (void)add;
    embedding_backward(dweight, dx, batch->tokens, rows, d);
}

static void cpu_norm_backward(train_device *dv, void *dx, void *dw, void *y, const void *dy, const void *x,
                              const float *rstd, const void *w, int64_t rows, int64_t d, bool add_dx,
                              bool add_dw, float *scratch)
{
    (void)dv, (void)add_dw;
    norm_backward(dx, d, dw, dy, d, x, d, rstd, w, rows, d, add_dx, scratch);
    if (y) norm_again(y, rstd, x, w, rows, d);
}

static int64_t cpu_norm_scratch(train_device *dv, int64_t rows, int64_t d)
{
    (void)dv;
    return norm_scratch(rows, d);
}

static void cpu_linear_dx(train_device *dv, void *dx, const void *dy, const void *w, int64_t rows, int64_t in,
                          int64_t out, bool add)
{
    (void)dv;
    linear_backward_input(dx, dy, w, rows, in, out, add);
}

static void cpu_linear_dw(train_device *dv, void *dw, smoe_type dw_type, const void *dy, const void *x,
                          int64_t rows, int64_t in, int64_t out, bool add)
{
    (void)dv, (void)dw_type, (void)add;
    linear_backward_weight(dw, dy, x, rows, in, out);
}

static void cpu_qk_norm_rope_backward(train_device *dv, void *dqkv, void *dwq, void *dwk, void *dq, void *dk,
                                      const void *qkv, const float *rstd, const void *wq, const void *wk,
                                      const float *rope, const pass_shape *shape, bool add, float *scratch)
{
    (void)dv, (void)add;
    int64_t rows = shape->sequences * shape->length, d = shape->heads * shape->head_size;
    float *to = dqkv;
    const float *projected = qkv;
    rope_apply(dq, rope, rows, shape, true);
    rope_apply(dk, rope, rows, shape, true);
    norm_backward(to, 3 * d, dwq, dq, d, projected, 3 * d, rstd, wq, rows, d, false, scratch);
    norm_backward(to + d, 3 * d, dwk, dk, d, projected + d, 3 * d, rstd + rows, wk, rows, d, false, scratch);
}

static void cpu_attention_backward(train_device *dv, void *dq, void *dk, void *dvalue, const void *dout,
                                   const void *out, const void *saved, const void *q, const void *k,
                                   const void *v, const pass_shape *shape, void *scratch)
{
    (void)dv, (void)out;
    attention_backward(dq, dk, dvalue, dout, saved, q, k, v, shape, scratch);
}

static void cpu_swiglu_backward(train_device *dv, void *h, const void *da, int64_t rows, int64_t width)
{
    (void)dv;
    swiglu_backward(h, da, rows, width);
}

static void cpu_add(train_device *dv, float *to, const float *from, int64_t count)
{
    (void)dv;
    add_rows(to, from, count);
}

static void cpu_add_counts(train_device *dv, int32_t *to, const int32_t *from, int64_t count)
{
    (void)dv;
    for (int64_t i = 0; i < count; i++) to[i] += from[i];
}

/* ---- the optimiser ---- */

static void cpu_gradient_square(train_device *dv, double *square, const void *grads, int64_t count)
{
    (void)dv;
    *square = gradient_square(grads, count);
}

static void cpu_begin_update(train_device *dv, const adamw_step *step, const double *square)
{
    cpu_device *cpu = (cpu_device *)dv;
    const double norm = sqrt(*square);
    cpu->step = *step;
    cpu->factor = step->clip > 0.0 && norm > step->clip ? (float)(step->clip / norm) : 1.0f;
}

static void cpu_update(train_device *dv, const adamw_arrays *a, const grad_span *span, double *square,
                       void *scratch)
{
    (void)scratch;
    const cpu_device *cpu = (cpu_device *)dv;
    adamw_step s = cpu->step;
    float *g = span->grads, *w = (float *)a->weights + span->first, *first = (float *)a->first + span->state,
          *second = (float *)a->second + span->state;
    int64_t decays = a->matrices - span->first, at = decays < 0 ? 0 : decays;
    if (at > span->count) at = span->count;
    if (square) *square += gradient_square(g, span->count);
    adamw_update(w, g, first, second, at, &s, cpu->factor);
    s.weight_decay = 0.0;
    adamw_update(w + at, g + at, first + at, second + at, span->count - at, &s, cpu->factor);
}

static size_t cpu_update_scratch(train_device *dv, int64_t count)
{
    (void)dv, (void)count;
    return 0;
}

static void cpu_close(train_device *dv)
{
    free(dv);
}

static const train_ops cpu_ops = {
    .close = cpu_close,
    .allocate = cpu_allocate,
    .release = cpu_release,
    .allocate_host = cpu_allocate,
    .release_host = cpu_release,
    .available = cpu_available,
    .used = cpu_available,
    .upload = cpu_copy,
    .download = cpu_copy,
    .store = cpu_store,
    .load = cpu_load,
    .clear = cpu_clear,
    .copy = cpu_copy,
    .stage_batch = cpu_stage_batch,
    .load_batch = cpu_load_batch,
    .finish = cpu_finish,
    .prepare = cpu_prepare,
    .embed = cpu_embed,
    .norm = cpu_norm,
    .linear = cpu_linear,
    .qk_norm_rope = cpu_qk_norm_rope,
    .attention = cpu_attention,
    .attention_saved = cpu_attention_saved,
    .attention_scratch = cpu_attention_scratch,
    .swiglu = cpu_swiglu,
    .cross_entropy = cpu_cross_entropy,
    .mean = cpu_mean,
    .embed_backward = cpu_embed_backward,
    .norm_backward = cpu_norm_backward,
    .norm_scratch = cpu_norm_scratch,
    .linear_dx = cpu_linear_dx,
    .linear_dw = cpu_linear_dw,
    .qk_norm_rope_backward = cpu_qk_norm_rope_backward,
    .attention_backward = cpu_attention_backward,
    .swiglu_backward = cpu_swiglu_backward,
    .add = cpu_add,
    .add_counts = cpu_add_counts,
    .gradient_square = cpu_gradient_square,
    .begin_update = cpu_begin_update,
    .update = cpu_update,
    .update_scratch = cpu_update_scratch,
};

/* A context of the library has OpenBLAS allocate a buffer for each OpenMP thread. The buffers stay when the
 * context is gone, and the trainer's own products use them. Without them OpenBLAS would try forever to
 * allocate them where there is no address space left. */
static bool reserve_buffers(error *err)
{
    char text[256] = "";
    smoe_context *context;
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.threads = omp_get_max_threads();
    options.error_text = text;
    options.error_size = sizeof text;
    if (smoe_create(&context, &options) != SMOE_OK) return fail(err, ERROR_RUNTIME, "%s", text);
    smoe_destroy(context);
    return true;
}

train_device *cpu_open(error *err)
{
    if (!reserve_buffers(err)) return NULL;
    cpu_device *cpu = calloc(1, sizeof *cpu);
    if (!cpu) {
        fail(err, ERROR_RUNTIME, "out of memory: the device");
        return NULL;
    }
    cpu->base = (train_device){.ops = &cpu_ops,
                               .name = "cpu",
                               .backend = SMOE_BACKEND_CPU,
                               .type = SMOE_TYPE_F32,
                               .grad_type = SMOE_TYPE_F32,
                               .state_type = SMOE_TYPE_F32,
                               .adds_gradients = true};
    return &cpu->base;
}
