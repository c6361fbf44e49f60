// What the trainer's kernels share with the CUDA compiler; the emulator has a header of this name of its own.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#define TRAIN_DEVICE __device__ __forceinline__
