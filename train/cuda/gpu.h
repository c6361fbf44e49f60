/* The table of operations on one GPU: bf16 activations, sums in f32. */
#ifndef TRAIN_CUDA_GPU_H
#define TRAIN_CUDA_GPU_H

#include "train/ops.h"

typedef struct cuda_options {
    int index; // which GPU of this host
    bool bf16; // weights and AdamW's states in bf16 alone; else states and master weights in f32
    bool sums; // gradients are added up over several passes
    gradient_choice gradients;
    bool fastest; // attention's backward may sum in any order: the last bits then differ from run to run
    bool plain;   // without libraries: products and attention by plain loops, which are slow
} cuda_options;

/* Is there a GPU that this build can use? Else *why (NULL is fine) says what smoe_create reports. */
bool cuda_usable(error *why);

/* NULL and *err: no GPU, or a library is missing. */
train_device *cuda_open(const cuda_options *options, error *err);

#endif
