// What the trainer's kernels need of CUDA. The emulator replaces this header by one of the same name.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#define TRAIN_DEVICE __device__ __forceinline__
