/* Which device a model runs on. */
#ifndef TRAIN_DEVICE_H
#define TRAIN_DEVICE_H

#include "train/ops.h"
#include "train/ranks/comm.h"
#include "train/ranks/group.h"

typedef struct device_options {
    const char *name; // "cpu"; "cuda"; "auto": the GPU if this build and the machine have one;
                      // "cuda-plain": slow, without cuBLASLt and cuDNN, for tests on machines without them
    bool bf16; // cuda: weights and AdamW's states in bf16 alone; else states and master weights in f32.
               // An error on the CPU, where everything is f32
    bool sums; // gradients are added up over several passes and are therefore f32
    gradient_choice gradients; // bf16 is an error on the CPU
    int index;                 // cuda: which GPU
    bool fastest;              // cuda: attention's backward may differ in its last bits from run to run
} device_options;

/* The caller closes it: device->ops->close(device). NULL and *err: what is missing. */
train_device *device_open(const device_options *options, error *err);

/* Does "auto" mean the CPU although the machine has an NVIDIA GPU? Then *why says why. Such a GPU is known by
 * the files that its driver makes under `root`, which is "" except in tests. */
bool device_leaves_gpu(const char *root, error *why);

/* The number of this host's NVIDIA GPUs on which no program computes, by NVML, which is `library`, or NULL
 * for the driver's. -1: not known. */
int device_free_gpus(const char *library);

/* The collectives of a device with those of other ranks. Rank 0 makes the key, by which the others open them.
 */
bool device_comm_key(const train_device *dv, int ranks, unsigned char key[GROUP_KEY], error *err);
train_comm *device_comm(train_device *dv, struct group *g, const unsigned char key[GROUP_KEY], error *err);

#endif
