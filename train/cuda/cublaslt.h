/* Matrix products through cuBLASLt, loaded at run time: row-major, bf16 operands, sums in f32. */
#ifndef TRAIN_CUDA_CUBLASLT_H
#define TRAIN_CUDA_CUBLASLT_H

#include "common/error.h"
#include "smoe.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct cublaslt cublaslt;

/* One product's sizes. c (m, n, type) = a (m, k) b (k, n) + addend; a and b may be stored transposed. */
typedef struct cublaslt_shape {
    int64_t m, n, k;
    bool transpose_a, transpose_b; // stored as (k, m), (n, k)
    bool adds;                     // an addend as c, or c itself
    smoe_type type;                // of c
} cublaslt_shape;

/* NULL and *err: the library is not there, with its name and where it comes from. */
cublaslt *cublaslt_open(error *err);
void cublaslt_close(cublaslt *closed); // NULL is fine

/* Enqueues a product; the first of a shape chooses its algorithm, the same on every run. 0, or what cuBLASLt
 * says. */
int cublaslt_multiply(cublaslt *with, const cublaslt_shape *shape, void *c, const void *a, const void *b,
                      const void *addend, void *stream);

#endif
