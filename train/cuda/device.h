/* The state of a GPU, for the files of this folder. */
#ifndef TRAIN_CUDA_DEVICE_H
#define TRAIN_CUDA_DEVICE_H

#include "train/cuda/cublaslt.h"
#include "train/cuda/cudnn_attention.h"
#include "train/cuda/gpu.h"
#include "train/cuda/kernels.h"

/* Functions that give and take memory; 0: done. */
typedef struct cuda_memory {
    int (*allocate)(void **memory, size_t bytes);
    int (*release)(void *memory);
} cuda_memory;

typedef struct cuda_device {
    train_device base; // must be first, because the functions of the table receive its address
    train_ops ops;
    int processors;
    cublaslt *products;         // NULL: plain loops
    cudnn_attention *attention; // NULL: plain loops
    int64_t planned_length;     // the plans exist for sequences of this length
    double *small;              // KERNELS_NORM_PARTS sums, then the optimiser's constants
    void *staging;              // buffer for conversions
    int32_t *pinned[2], *batch; // batches on the host and on the device: tokens, targets, order, runs
    bool busy[2];               // the device may still read from this one
    int staged;                 // which of the two is written or loaded next
    size_t staged_bytes;
    int32_t *heads; // (batch_vocab + 1)
    int64_t batch_rows, batch_vocab;
    const cuda_memory *memory; // where `allocate` takes memory from; NULL: cudaMalloc
} cuda_device;

cuda_device *cuda_of(train_device *dv);
void cuda_note(train_device *dv, cudaError_t status, const char *doing); // keeps the first failure

void cuda_add_operations(train_ops *ops); // operations.c: all that are not the device's own

#endif
