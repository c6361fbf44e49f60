/* Causal attention through cuDNN's fused kernels. Only cudnn_attention.cpp uses cuDNN's header-only C++
 * frontend, which builds the graphs. The library itself is loaded at run time. */
#ifndef TRAIN_CUDA_CUDNN_ATTENTION_H
#define TRAIN_CUDA_CUDNN_ATTENTION_H

#include "train/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cudnn_attention cudnn_attention;

/* `deterministic`: the backward gives the same bits on every run. On failure NULL, and *err says what is
 * missing. */
cudnn_attention *cudnn_attention_open(void *stream, bool deterministic, error *err);
void cudnn_attention_close(cudnn_attention *closed); // NULL is fine

/* Builds the plans of a shape and allocates the memory that they need. Later calls for the same shape do
 * nothing. A pass calls it itself. If it is called before the pass, the pass allocates nothing. */
bool cudnn_attention_prepare(cudnn_attention *with, const pass_shape *shape, bool backward, error *err);

/* As the operations of train/ops.h. lse (sequences, heads, length). shape->first is 0. */
bool cudnn_attention_forward(cudnn_attention *with, void *out, float *lse, const void *q, const void *k,
                             const void *v, const pass_shape *shape, error *err);
bool cudnn_attention_backward(cudnn_attention *with, void *dq, void *dk, void *dv, const void *dout,
                              const void *out, const float *lse, const void *q, const void *k, const void *v,
                              const pass_shape *shape, error *err);

#ifdef __cplusplus
}
#endif
#endif
