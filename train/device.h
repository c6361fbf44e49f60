/* Which device a model runs on. */
#ifndef TRAIN_DEVICE_H
#define TRAIN_DEVICE_H

#include "train/ops.h"

typedef struct device_options {
    const char *name; // "cpu"; "cuda"; "auto": the GPU where this build and the machine have one;
                      // "cuda-plain": without libraries, slowly: what the tests run where there are none
    bool bf16;        // cuda: weights and AdamW's states in bf16 alone; else f32 ones beside bf16 weights
    bool sums;        // gradients are added up over several passes: they are f32
    bool fastest;     // cuda: attention's backward may differ in its last bits from run to run
} device_options;

/* The caller closes it: device->ops->close(device). NULL and *err: what is missing. */
train_device *device_open(const device_options *options, error *err);

#endif
