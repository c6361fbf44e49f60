/* See yardstick_cuda.h. */
#include "cli/bench/yardstick_cuda.h"

#include "cli/bench/data.h"
#include "cli/support/costs.h"

#include "src/activations.h"

#include <math.h>

static int64_t rows_each(const smoe_layer *layer, int64_t rows)
{
    return rows < layer->experts ? 1 : rows / layer->experts;
}

double cuda_yardstick_scale(const smoe_layer *layer, int64_t rows)
{
    return (double)rows / ((double)rows_each(layer, rows) * (double)layer->experts);
}

/* Bytes of the buffers. */
typedef struct lengths {
    uint64_t wide, h, a, a_grad;
} lengths;

static lengths lengths_of(const smoe_layer *layer, int64_t rows, bool backward)
{
    const uint64_t element = (uint64_t)dtype_bytes(layer->dtype), n = (uint64_t)layer->intermediate;
    const uint64_t d = (uint64_t)layer->hidden, experts = (uint64_t)layer->experts;
    const uint64_t width = (uint64_t)moe_h_width(layer);
    const uint64_t held = (uint64_t)rows_each(layer, rows) * experts, wide = element * held * d;
    return (lengths){.wide = wide > CUDA_COPY_BYTES ? wide : CUDA_COPY_BYTES,
                     .h = element * held * width,
                     .a = element * held * n,
                     .a_grad = backward ? element * held * n : 0};
}

uint64_t cuda_yardstick_bytes(const smoe_layer *layer, int64_t rows, bool backward)
{
    const lengths l = lengths_of(layer, rows, backward);
    return 2 * l.wide + l.h + l.a + l.a_grad + CUBLAS_WORKSPACE_BYTES + CUBLAS_OWN_BYTES;
}

#ifdef SMOE_HAVE_CUDA
#include <cuda_runtime_api.h>

/* ---- Work ---- */

static bool multiply(const cuda_yardstick *y, bool transpose_a, bool transpose_b, int64_t m, int64_t n,
                     int64_t k, const void *a, const void *b, void *c, error *err)
{
    return cublas_multiply(y->gemms, y->layer.dtype, transpose_a, transpose_b, y->layer.experts, m, n, k, a,
                           b, c, err);
}

bool cuda_yardstick_gemm(const cuda_yardstick *y, smoe_stage stage, error *err)
{
    const int64_t d = y->layer.hidden, n = y->layer.intermediate, w = y->width, m = y->each;
    const void *wide = y->wide.data, *w1 = y->w1, *w2 = y->w2;
    switch (stage) {
    case SMOE_STAGE_UP: return multiply(y, false, true, m, w, d, wide, w1, y->h.data, err);
    case SMOE_STAGE_DOWN: return multiply(y, false, true, m, d, n, y->a.data, w2, y->result.data, err);
    case SMOE_STAGE_DH: return multiply(y, false, false, m, n, d, wide, w2, y->a_grad.data, err);
    case SMOE_STAGE_DW2: return multiply(y, true, false, d, n, m, wide, y->a.data, y->dw1, err);
    case SMOE_STAGE_DX_ROWS: return multiply(y, false, false, m, d, w, y->h.data, w1, y->result.data, err);
    case SMOE_STAGE_DW1: return multiply(y, true, false, w, d, m, y->h.data, wide, y->dw1, err);
    default: return fail(err, ERROR_RUNTIME, "stage %d has no GEMMs", (int)stage);
    }
}

bool cuda_yardstick_copy(const cuda_yardstick *y, uint64_t bytes, error *err)
{
    if (cudaMemcpyAsync(y->result.data, y->wide.data, bytes, cudaMemcpyDeviceToDevice, y->stream) ==
        cudaSuccess)
        return true;
    return fail(err, ERROR_RUNTIME, "the reference copy could not be started");
}

/* ---- Buffers ---- */

enum { SEED_WIDE = 1, SEED_H = 2, SEED_A = 3 };

static bool make_buffers(cuda_yardstick *y, const device *on, const lengths *l)
{
    return buffer_make(&y->wide, on, l->wide) && buffer_make(&y->result, on, l->wide) &&
           buffer_make(&y->h, on, l->h) && buffer_make(&y->a, on, l->a) &&
           buffer_make(&y->workspace, on, CUBLAS_WORKSPACE_BYTES) &&
           (!l->a_grad || buffer_make(&y->a_grad, on, l->a_grad));
}

static bool fill_rows(const cuda_yardstick *y)
{
    const smoe_type type = y->layer.dtype;
    const int64_t element = dtype_bytes(type);
    return fill_tiled(&y->wide, type, (int64_t)y->wide.bytes / element, 1, SEED_WIDE) &&
           fill_tiled(&y->h, type, (int64_t)y->h.bytes / element, 1, SEED_H) &&
           fill_tiled(&y->a, type, (int64_t)y->a.bytes / element, 1, SEED_A);
}

bool cuda_yardstick_make(cuda_yardstick *made, const device *on, const smoe_layer *layer, int64_t rows,
                         const void *w1, const void *w2, void *dw1, void *stream, error *err)
{
    const lengths l = lengths_of(layer, rows, dw1 != NULL);
    *made = (cuda_yardstick){.layer = *layer,
                             .rows = rows,
                             .each = rows_each(layer, rows),
                             .width = moe_h_width(layer),
                             .stream = stream,
                             .w1 = w1,
                             .w2 = w2,
                             .dw1 = dw1};
    if (!make_buffers(made, on, &l))
        fail(err, ERROR_RUNTIME, "out of memory for the yardstick");
    else if (!fill_rows(made))
        fail(err, ERROR_RUNTIME, "the yardstick's inputs could not be made");
    else {
        made->gemms = cublas_open(stream, made->workspace.data, made->workspace.bytes);
        return true;
    }
    cuda_yardstick_free(made);
    return false;
}

void cuda_yardstick_free(cuda_yardstick *freed)
{
    buffer *all[] = {&freed->wide, &freed->result, &freed->h, &freed->a, &freed->a_grad, &freed->workspace};
    cublas_close(freed->gemms);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) buffer_free(all[i]);
    *freed = (cuda_yardstick){0};
}

#endif
