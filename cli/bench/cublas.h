/* cuBLAS for the bench's bound, and for nothing else: loaded when a bench asks for it, so that the program
 * starts and does all the rest where it is not installed. */
#ifndef CLI_CUBLAS_H
#define CLI_CUBLAS_H

#include "base/error.h"

#include <smoe.h>

#ifdef SMOE_HAVE_CUDA

typedef struct cublas cublas;

/* stream and workspace are borrowed. NULL where there is no cuBLAS, none that starts, or memory is out. */
cublas *cublas_open(void *stream, void *workspace, size_t workspace_bytes);
void cublas_close(cublas *closed); // NULL is fine

/* For each of `count` experts the row-major C (m, n) = A B, with A (m, k), or (k, m) when transposed, and B
 * (k, n), or (n, k); one behind the other in memory. bf16 or f16 with f32 accumulation, put on the stream. */
bool cublas_multiply(const cublas *with, smoe_type type, bool transpose_a, bool transpose_b, int64_t count,
                     int64_t m, int64_t n, int64_t k, const void *a, const void *b, void *c, error *err);

#endif
#endif
