/* What a GPU can do, measured between the library's runs: the expert GEMMs of one stage as one call of
 * cublasGemmStridedBatchedEx with equal counts, and the speed of a copy. Without cuBLAS it
 * is the copy alone.
 *
 * Every expert takes M = floor(R / E) rows, at least 1, in the layer's type with f32 accumulation: the
 * products of yardstick.h. Where E does not divide R the time is to be scaled by cuda_yardstick_scale. Inputs
 * are normal numbers: what a card can do under its power limit hangs on the bits that flip. */
#ifndef CLI_YARDSTICK_CUDA_H
#define CLI_YARDSTICK_CUDA_H

#include "base/error.h"
#include "cli/bench/cublas.h"
#include "harness/buffer.h"

#include <stdint.h>

enum { CUDA_COPY_BYTES = 1 << 30, CUBLAS_WORKSPACE_BYTES = 64 << 20, CUBLAS_OWN_BYTES = 512 << 20 };

/* Device memory that cuda_yardstick_make asks for, and what cuBLAS and the CUDA runtime may take besides. */
uint64_t cuda_yardstick_bytes(const smoe_layer *layer, int64_t rows, bool backward);

/* R / (M E): what the time of M rows an expert is multiplied by. */
double cuda_yardstick_scale(const smoe_layer *layer, int64_t rows);

#ifdef SMOE_HAVE_CUDA

typedef struct cuda_yardstick {
    smoe_layer layer;
    int64_t rows;  // R
    int64_t each;  // M
    int64_t width; // w: columns of H
    void *stream;  // borrowed
    cublas *gemms; // NULL without cuBLAS
    buffer wide;   // (R, d): X, dO; COPY_BYTES at least
    buffer result; // (R, d): Y, dX~; COPY_BYTES at least
    buffer h;      // (R, w): what up made
    buffer a;      // (R, n)
    buffer a_grad; // (R, n)
    buffer workspace;
    const void *w1, *w2; // the case's own
    void *dw1;           // (E, w, d); the case's own, too: where the GEMMs of dw1 and dw2 write
} cuda_yardstick;

/* rows: R. w1 (E, w, d), w2 (E, d, n) and dw1 (E, w, d) are borrowed; dw1 is written to. Without dw1 the
 * forward's GEMMs are all there is. */
bool cuda_yardstick_make(cuda_yardstick *made, const device *on, const smoe_layer *layer, int64_t rows,
                         const void *w1, const void *w2, void *dw1, void *stream, error *err);
void cuda_yardstick_free(cuda_yardstick *freed);

/* Put on the stream: one stage's GEMMs, and a copy of at most CUDA_COPY_BYTES. */
bool cuda_yardstick_gemm(const cuda_yardstick *y, smoe_stage stage, error *err);
bool cuda_yardstick_copy(const cuda_yardstick *y, uint64_t bytes, error *err);

#endif
#endif
