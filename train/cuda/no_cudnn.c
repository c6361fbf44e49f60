/* Replaces cudnn_attention.cpp in a build without cuDNN's headers. Its open function fails with an error that
 * says what is missing. */
#include "train/cuda/cudnn_attention.h"

#ifndef SMOE_HAVE_CUDNN

cudnn_attention *cudnn_attention_open(void *stream, bool deterministic, error *err)
{
    (void)stream, (void)deterministic;
    fail(err, ERROR_RUNTIME,
         "this build has no attention through cuDNN: configure it where cudnn.h is (pip install "
         "nvidia-cudnn-cu13) and with PyPI or SMOE_CUDNN_FRONTEND_DIR for cudnn_frontend.h; --device "
         "cuda-plain "
         "does without, slowly");
    return NULL;
}

void cudnn_attention_close(cudnn_attention *closed)
{
    (void)closed;
}

bool cudnn_attention_prepare(cudnn_attention *with, const pass_shape *shape, bool backward, error *err)
{
    (void)with, (void)shape, (void)backward;
    return fail(err, ERROR_RUNTIME, "this build has no cuDNN");
}

bool cudnn_attention_forward(cudnn_attention *with, void *out, float *lse, const void *q, const void *k,
                             const void *v, const pass_shape *shape, error *err)
{
    (void)out, (void)lse, (void)q, (void)k, (void)v;
    return cudnn_attention_prepare(with, shape, false, err);
}

bool cudnn_attention_backward(cudnn_attention *with, void *dq, void *dk, void *dv, const void *dout,
                              const void *out, const float *lse, const void *q, const void *k, const void *v,
                              const pass_shape *shape, error *err)
{
    (void)dq, (void)dk, (void)dv, (void)dout, (void)out, (void)lse, (void)q, (void)k, (void)v;
    return cudnn_attention_prepare(with, shape, true, err);
}

#endif
