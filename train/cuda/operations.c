/* The operations on the GPU: each calls a kernel or a library. */
#include "train/cuda/device.h"

static int64_t rows_of(const pass_shape *s)
{
    return s->sequences * s->length;
}

/* c (m, n, type) = a (m, k) b (k, n) + addend, by cuBLASLt or by plain loops. */
static void multiply(train_device *dv, const cublaslt_shape *s, void *c, const void *a, const void *b,
                     const void *addend)
{
    cuda_device *cuda = cuda_of(dv);
    if (cuda->products) {
        int status = cublaslt_multiply(cuda->products, s, c, a, b, addend, dv->stream);
        if (status && !dv->failure.code)
            fail(&dv->failure, ERROR_RUNTIME, "cuBLASLt: status %d for a product of m %lld, n %lld, k %lld",
                 status, (long long)s->m, (long long)s->n, (long long)s->k);
        return;
    }
    const kernel_matrix first = {a, s->transpose_a ? 1 : s->k, s->transpose_a ? s->m : 1};
    const kernel_matrix second = {b, s->transpose_b ? 1 : s->n, s->transpose_b ? s->k : 1};
    cuda_note(dv, kernel_multiply(c, s->type, &first, &second, addend, s->m, s->n, s->k, dv->stream),
              "a product");
}

/* ---- forward ---- */

static void cuda_embed(train_device *dv, void *x, const void *weight, const int32_t *tokens, int64_t rows,
                       int64_t d)
{
    cuda_note(dv, kernel_embed(x, weight, tokens, rows, d, dv->stream), "embedding");
}

static void cuda_norm(train_device *dv, void *y, float *rstd, void *x, const void *residual, const void *w,
                      int64_t rows, int64_t d, double eps)
{
    cuda_note(dv, kernel_norm(y, rstd, x, residual, w, rows, d, (float)eps, dv->stream), "norm");
}

static void cuda_linear(train_device *dv, void *y, const void *x, const void *w, const void *residual,
                        int64_t rows, int64_t in, int64_t out)
{
    const cublaslt_shape shape = {rows, out, in, false, true, residual != NULL, SMOE_TYPE_BF16};
    multiply(dv, &shape, y, x, w, residual);
}

static void cuda_qk_norm_rope(train_device *dv, void *q, void *k, float *rstd, const void *qkv,
                              const void *wq, const void *wk, const float *rope, const pass_shape *shape,
                              double eps)
{
    cuda_note(dv, kernel_qk_norm_rope(q, k, rstd, qkv, wq, wk, rope, shape, (float)eps, dv->stream),
              "norm and RoPE");
}

static void cuda_attention(train_device *dv, void *out, void *saved, const void *q, const void *k,
                           const void *v, const pass_shape *shape)
{
    cuda_device *cuda = cuda_of(dv);
    // Other lengths are those of prompts in generation, each of which would need a plan of its own.
    if (cuda->attention && shape->first == 0 && shape->length == cuda->planned_length)
        cudnn_attention_forward(cuda->attention, out, saved, q, k, v, shape,
                                dv->failure.code ? NULL : &dv->failure);
    else
        cuda_note(dv, kernel_attention(out, shape->first ? NULL : saved, q, k, v, shape, dv->stream),
                  "attention");
}

static size_t cuda_attention_saved(train_device *dv, const pass_shape *shape)
{
    (void)dv;
    return (size_t)(rows_of(shape) * shape->heads) * sizeof(float);
}

static size_t cuda_attention_scratch(train_device *dv, const pass_shape *shape)
{
    return cuda_of(dv)->attention ? 0 : (size_t)(rows_of(shape) * shape->heads) * sizeof(float);
}

static void cuda_swiglu(train_device *dv, void *a, const void *h, int64_t rows, int64_t width)
{
    cuda_note(dv, kernel_swiglu(a, h, rows, width, dv->stream), "swiglu");
}

static void cuda_cross_entropy(train_device *dv, void *logits, float *losses, const int32_t *targets,
                               float scale, int64_t rows, int64_t vocab)
{
    cuda_note(dv, kernel_cross_entropy(logits, losses, targets, scale, rows, vocab, dv->stream),
              "cross-entropy");
}

static void cuda_mean(train_device *dv, double *mean, const float *values, int64_t count)
{
    cuda_note(dv, kernel_mean(mean, values, count, dv->stream), "mean");
}

/* ---- backward ---- */

static void cuda_embed_backward(train_device *dv, void *dweight, const void *dx, const device_batch *batch,
                                int64_t rows, int64_t vocab, int64_t d, bool add)
{
    if (!add)
        cuda_note(dv, cudaMemsetAsync(dweight, 0, (size_t)(vocab * d) * type_size(dv->grad_type), dv->stream),
                  "embedding");
    cuda_note(dv, kernel_embed_backward(dweight, dv->grad_type, dx, batch, rows, vocab, d, dv->stream),
              "embedding's gradient");
}

static void cuda_norm_backward(train_device *dv, void *dx, void *dw, void *y, const void *dy, const void *x,
                               const float *rstd, const void *w, int64_t rows, int64_t d, bool add_dx,
                               bool add_dw, float *scratch)
{
    int64_t parts = kernel_norm_parts(rows, d, 1, cuda_of(dv)->processors);
    cuda_note(dv, kernel_norm_backward(dx, y, dy, x, rstd, w, rows, d, add_dx, scratch, parts, dv->stream),
              "norm's gradient");
    cuda_note(dv, kernel_sum_parts(dw, NULL, dv->grad_type, scratch, parts, d, add_dw, dv->stream),
              "norm's gradient");
}

static int64_t cuda_norm_scratch(train_device *dv, int64_t rows, int64_t d)
{
    return 2 * kernel_norm_parts(rows, d, 1, cuda_of(dv)->processors) * d;
}

static void cuda_linear_dx(train_device *dv, void *dx, const void *dy, const void *w, int64_t rows,
                           int64_t in, int64_t out, bool add)
{
    const cublaslt_shape shape = {rows, in, out, false, false, add, SMOE_TYPE_BF16};
    multiply(dv, &shape, dx, dy, w, add ? dx : NULL);
}

static void cuda_linear_dw(train_device *dv, void *dw, smoe_type dw_type, const void *dy, const void *x,
                           int64_t rows, int64_t in, int64_t out, bool add)
{
    const cublaslt_shape shape = {out, in, rows, true, false, add, dw_type};
    multiply(dv, &shape, dw, dy, x, add ? dw : NULL);
}

static void cuda_narrow(train_device *dv, void *to, const float *from, int64_t count, bool add)
{
    cuda_note(dv, kernel_convert(to, dv->grad_type, from, SMOE_TYPE_F32, count, add, dv->stream),
              "conversion");
}

static void cuda_qk_norm_rope_backward(train_device *dv, void *dqkv, void *dwq, void *dwk, void *dq, void *dk,
                                       const void *qkv, const float *rstd, const void *wq, const void *wk,
                                       const float *rope, const pass_shape *shape, bool add, float *scratch)
{
    int64_t d = shape->heads * shape->head_size;
    int64_t parts = kernel_norm_parts(rows_of(shape), d, 2, cuda_of(dv)->processors);
    cuda_note(dv,
              kernel_qk_norm_rope_backward(dqkv, dq, dk, qkv, rstd, wq, wk, rope, shape, scratch, parts,
                                           dv->stream),
              "norm and RoPE's gradient");
    cuda_note(dv, kernel_sum_parts(dwq, dwk, dv->grad_type, scratch, parts, d, add, dv->stream),
              "norm's gradient");
}

static void cuda_attention_backward(train_device *dv, void *dq, void *dk, void *dvalue, const void *dout,
                                    const void *out, const void *saved, const void *q, const void *k,
                                    const void *v, const pass_shape *shape, void *scratch)
{
    cuda_device *cuda = cuda_of(dv);
    if (cuda->attention)
        cudnn_attention_backward(cuda->attention, dq, dk, dvalue, dout, out, saved, q, k, v, shape,
                                 dv->failure.code ? NULL : &dv->failure);
    else
        cuda_note(
            dv,
            kernel_attention_backward(dq, dk, dvalue, dout, out, saved, q, k, v, shape, scratch, dv->stream),
            "attention's gradient");
}

static void cuda_swiglu_backward(train_device *dv, void *h, const void *da, int64_t rows, int64_t width)
{
    cuda_note(dv, kernel_swiglu_backward(h, da, rows, width, dv->stream), "swiglu's gradient");
}

static void cuda_add(train_device *dv, float *to, const float *from, int64_t count)
{
    cuda_note(dv, kernel_add(to, from, count, dv->stream), "a sum of gradients");
}

static void cuda_add_counts(train_device *dv, int32_t *to, const int32_t *from, int64_t count)
{
    cuda_note(dv, kernel_add_counts(to, from, count, dv->stream), "counts of experts");
}

/* ---- the optimiser ---- */

static void cuda_gradient_square(train_device *dv, double *square, const void *grads, int64_t count)
{
    cuda_note(dv, kernel_gradient_square(square, cuda_of(dv)->small, grads, dv->grad_type, count, dv->stream),
              "the gradient's norm");
}

static float *constants_of(train_device *dv)
{
    return (float *)(cuda_of(dv)->small + KERNELS_NORM_PARTS);
}

static void cuda_begin_update(train_device *dv, const adamw_step *step, const double *square)
{
    cuda_note(dv, kernel_begin_update(constants_of(dv), step, square, dv->stream), "AdamW");
}

static void cuda_update(train_device *dv, const adamw_arrays *arrays, const grad_span *span, double *square,
                        void *scratch)
{
    cuda_note(dv, kernel_update(arrays, span, dv->grad_type, constants_of(dv), square, scratch, dv->stream),
              "AdamW");
}

static size_t cuda_update_scratch(train_device *dv, int64_t count)
{
    (void)dv;
    return (size_t)kernel_update_parts(count) * sizeof(double);
}

static void cuda_prepare(train_device *dv, const pass_shape *shape, bool backward)
{
    cuda_device *cuda = cuda_of(dv);
    cuda->planned_length = shape->length;
    if (cuda->attention && !dv->failure.code &&
        cudnn_attention_prepare(cuda->attention, shape, false, &dv->failure) && backward)
        cudnn_attention_prepare(cuda->attention, shape, true, &dv->failure);
}

void cuda_add_operations(train_ops *ops)
{
    ops->prepare = cuda_prepare;
    ops->embed = cuda_embed;
    ops->norm = cuda_norm;
    ops->linear = cuda_linear;
    ops->qk_norm_rope = cuda_qk_norm_rope;
    ops->attention = cuda_attention;
    ops->attention_saved = cuda_attention_saved;
    ops->attention_scratch = cuda_attention_scratch;
    ops->swiglu = cuda_swiglu;
    ops->cross_entropy = cuda_cross_entropy;
    ops->mean = cuda_mean;
    ops->embed_backward = cuda_embed_backward;
    ops->norm_backward = cuda_norm_backward;
    ops->norm_scratch = cuda_norm_scratch;
    ops->linear_dx = cuda_linear_dx;
    ops->linear_dw = cuda_linear_dw;
    ops->narrow = cuda_narrow;
    ops->qk_norm_rope_backward = cuda_qk_norm_rope_backward;
    ops->attention_backward = cuda_attention_backward;
    ops->swiglu_backward = cuda_swiglu_backward;
    ops->add = cuda_add;
    ops->add_counts = cuda_add_counts;
    ops->gradient_square = cuda_gradient_square;
    ops->begin_update = cuda_begin_update;
    ops->update = cuda_update;
    ops->update_scratch = cuda_update_scratch;
}
