/* Matrix products through cuBLASLt, loaded at run time: row-major, bf16 operands, sums in f32. */
#ifndef TRAIN_CUDA_CUBLASLT_H
#define TRAIN_CUDA_CUBLASLT_H

#include "base/error.h"
#include "smoe.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct cublaslt cublaslt;

/* The sizes of a product c (m, n, type) = a (m, k) b (k, n) + addend. a and b may be stored transposed. */
typedef struct cublaslt_shape {
    int64_t m, n, k;
    bool transpose_a, transpose_b; // stored as (k, m), (n, k)
    bool adds;                     // there is an addend of c's shape and type, which may be c itself
    smoe_type type;                // of c
} cublaslt_shape;

/* NULL and *err: the library is missing. The error has its name and says which package has it. */
cublaslt *cublaslt_open(error *err);
void cublaslt_close(cublaslt *closed); // NULL is fine

/* Enqueues a product. The first product of a shape chooses the algorithm, which is the same on every run.
 * Returns 0, or cuBLASLt's status. */
int cublaslt_multiply(cublaslt *with, const cublaslt_shape *shape, void *c, const void *a, const void *b,
                      const void *addend, void *stream);

#endif
