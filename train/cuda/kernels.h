/* The trainer's kernels as their callers see them: one function for each launch. Pointers are device
 * pointers; bf16 unless said otherwise. d and widths are multiples of 8, d at most KERNELS_MOST_HIDDEN. */
#ifndef TRAIN_CUDA_KERNELS_H
#define TRAIN_CUDA_KERNELS_H

#include "train/ops.h"

#include <cuda_runtime_api.h>

enum { KERNELS_MOST_HIDDEN = 8192, KERNELS_MOST_HEAD = 256 };

#ifdef __cplusplus
extern "C" {
#endif

/* ---- norm.cu ---- */

/* x += residual (unless NULL), y = x rstd w */
cudaError_t kernel_norm(void *y, float *rstd, void *x, const void *residual, const void *w, int64_t rows,
                        int64_t d, float eps, cudaStream_t stream);

/* q, k (rows, d) from qkv (rows, 3 d); rstd (2, rows) */
cudaError_t kernel_qk_norm_rope(void *q, void *k, float *rstd, const void *qkv, const void *wq,
                                const void *wk, const float *rope, const pass_shape *shape, float eps,
                                cudaStream_t stream);

/* The number of CTAs for each norm of one of the two functions below, which compute 1 norm and 2 norms. Each
 * norm needs as many rows of (d) floats of scratch. */
int64_t kernel_norm_parts(int64_t rows, int64_t d, int norms, int processors);

/* y, unless NULL: as kernel_norm wrote it */
cudaError_t kernel_norm_backward(void *dx, void *y, const void *dy, const void *x, const float *rstd,
                                 const void *w, int64_t rows, int64_t d, bool add_dx, float *parts,
                                 int64_t count, cudaStream_t stream);
/* parts (2, count, d): of wq, of wk */
cudaError_t kernel_qk_norm_rope_backward(void *dqkv, const void *dq, const void *dk, const void *qkv,
                                         const float *rstd, const void *wq, const void *wk, const float *rope,
                                         const pass_shape *shape, float *parts, int64_t count,
                                         cudaStream_t stream);
/* to (d, type) = (with add, +=) the sum of parts (count, d). second, unless NULL, gets the sum of the next
 * `count` parts */
cudaError_t kernel_sum_parts(void *to, void *second, smoe_type type, const float *parts, int64_t count,
                             int64_t d, bool add, cudaStream_t stream);

/* ---- embedding.cu ---- */

cudaError_t kernel_embed(void *x, const void *weight, const int32_t *tokens, int64_t rows, int64_t d,
                         cudaStream_t stream);
/* dweight (vocab, d, type) += dx, one CTA for each token; order and runs are those of device_batch */
cudaError_t kernel_embed_backward(void *dweight, smoe_type type, const void *dx, const device_batch *batch,
                                  int64_t rows, int64_t vocab, int64_t d, cudaStream_t stream);

/* ---- loss.cu ---- */

cudaError_t kernel_cross_entropy(void *logits, float *losses, const int32_t *targets, float scale,
                                 int64_t rows, int64_t vocab, cudaStream_t stream);
cudaError_t kernel_mean(double *mean, const float *values, int64_t count, cudaStream_t stream);

/* ---- draw.cu ---- */

/* Writes values [first, first + count) of a normal stream times deviation, or ones if deviation is 0, to `to`
 * (bf16) and to master, unless they are NULL */
cudaError_t kernel_draw(void *to, float *master, int64_t first, int64_t count, double deviation, uint64_t key,
                        cudaStream_t stream);

/* ---- swiglu.cu ---- */

cudaError_t kernel_swiglu(void *a, const void *h, int64_t rows, int64_t width, cudaStream_t stream);
cudaError_t kernel_swiglu_backward(void *h, const void *da, int64_t rows, int64_t width, cudaStream_t stream);

/* ---- adamw.cu ---- */

enum { KERNELS_NORM_PARTS = 1024 };

/* *square = the sum of the squares of count gradients; parts: KERNELS_NORM_PARTS doubles */
cudaError_t kernel_gradient_square(double *square, double *parts, const void *grads, smoe_type type,
                                   int64_t count, cudaStream_t stream);
/* constants (16 floats): what the updates of this step multiply by */
cudaError_t kernel_begin_update(float *constants, const adamw_step *step, const double *square,
                                cudaStream_t stream);
/* Unless square is NULL, *square += the sum of the squares of the span's gradients; parts:
 * kernel_update_parts(span->count) doubles */
cudaError_t kernel_update(const adamw_arrays *arrays, const grad_span *span, smoe_type grad_type,
                          const float *constants, double *square, double *parts, cudaStream_t stream);
int64_t kernel_update_parts(int64_t count);
/* to = from, or with add += (bf16 and f32 either way) */
cudaError_t kernel_convert(void *to, smoe_type to_type, const void *from, smoe_type from_type, int64_t count,
                           bool add, cudaStream_t stream);

/* to += from */
cudaError_t kernel_add(float *to, const float *from, int64_t count, cudaStream_t stream);
/* to (count) = the sum of parts (parts, count) in their order, in f32; count is a multiple of 8, and `to` may
 * be one of the parts */
cudaError_t kernel_add_parts(void *to, const void *from, smoe_type type, int64_t count, int parts,
                             cudaStream_t stream);
cudaError_t kernel_add_counts(int32_t *to, const int32_t *from, int64_t count, cudaStream_t stream);

/* ---- multiply.cu: c (m, n) = a b, for machines without cuBLAS ---- */

/* One of the matrices: element (i, j) is at row_stride i + column_stride j. */
typedef struct kernel_matrix {
    const void *at;
    int64_t row_stride, column_stride;
} kernel_matrix;

/* c row-major (type) = a (m, k) b (k, n) + addend (as c, or NULL) */
cudaError_t kernel_multiply(void *c, smoe_type type, const kernel_matrix *a, const kernel_matrix *b,
                            const void *addend, int64_t m, int64_t n, int64_t k, cudaStream_t stream);

/* ---- attention.cu: plain attention, for machines without cuDNN and for generation ---- */

/* lse (sequences, heads, length): the logarithm of the softmax's denominator, of scaled scores; NULL: not
 * wanted
 */
cudaError_t kernel_attention(void *out, float *lse, const void *q, const void *k, const void *v,
                             const pass_shape *shape, cudaStream_t stream);
/* dots: scratch of the shape of lse */
cudaError_t kernel_attention_backward(void *dq, void *dk, void *dv, const void *dout, const void *out,
                                      const float *lse, const void *q, const void *k, const void *v,
                                      const pass_shape *shape, float *dots, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
