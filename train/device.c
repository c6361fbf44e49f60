/* See device.h. */
#include "train/device.h"

#include "train/cpu/cpu.h"
#ifdef SMOE_HAVE_CUDA
#include "train/cuda/gpu.h"
#endif

#include <string.h>

train_device *device_open(const device_options *o, error *err)
{
#ifdef SMOE_HAVE_CUDA
    const cuda_options cuda = {
        .bf16 = o->bf16, .sums = o->sums, .fastest = o->fastest, .plain = strcmp(o->name, "cuda-plain") == 0};
    if (strcmp(o->name, "cuda") == 0 || cuda.plain || (strcmp(o->name, "auto") == 0 && cuda_present()))
        return cuda_open(&cuda, err);
#endif
    if (strcmp(o->name, "auto") == 0 || strcmp(o->name, "cpu") == 0) {
        if (!o->bf16) return cpu_open(err);
        fail(err, ERROR_USAGE,
             "--precision bf16 is only for the GPU (--device cuda): the CPU computes in f32");
        return NULL;
    }
    if (strncmp(o->name, "cuda", 4) == 0)
        fail(err, ERROR_USAGE, "--device: this build has no cuda backend");
    else
        fail(err, ERROR_USAGE, "--device: '%s' is not one of auto, cpu, cuda, cuda-plain", o->name);
    return NULL;
}
