/* See device.h. */
#define _POSIX_C_SOURCE 200809L
#include "train/device.h"

#include "train/cpu/cpu.h"
#include "train/cpu/shared.h"
#ifdef SMOE_HAVE_CUDA
#include "train/cuda/gpu.h"
#include "train/cuda/nccl.h"
#endif

#include <assert.h>
#include <dirent.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

train_device *device_open(const device_options *o, error *err)
{
#ifdef SMOE_HAVE_CUDA
    const cuda_options cuda = {.index = o->index,
                               .bf16 = o->bf16,
                               .sums = o->sums,
                               .gradients = o->gradients,
                               .fastest = o->fastest,
                               .plain = strcmp(o->name, "cuda-plain") == 0};
    if (strcmp(o->name, "cuda") == 0 || cuda.plain || (strcmp(o->name, "auto") == 0 && cuda_usable(NULL)))
        return cuda_open(&cuda, err);
#endif
    if (strcmp(o->name, "auto") == 0 || strcmp(o->name, "cpu") == 0) {
        const bool narrow = o->gradients == GRADIENTS_BF16;
        if (!o->bf16 && !narrow) return cpu_open(err);
        fail(err, ERROR_USAGE, "--%s bf16 is only for the GPU (--device cuda): the CPU computes in f32",
             narrow ? "gradients" : "precision");
        return NULL;
    }
    if (strncmp(o->name, "cuda", 4) == 0)
        fail(err, ERROR_USAGE, "--device: this build has no cuda backend");
    else
        fail(err, ERROR_USAGE, "--device: '%s' is not one of auto, cpu, cuda, cuda-plain", o->name);
    return NULL;
}

static bool has_entries(const char *path)
{
    DIR *folder = opendir(path);
    bool found = false;
    for (const struct dirent *e; folder != NULL && !found && (e = readdir(folder)) != NULL;)
        found = e->d_name[0] != '.';
    if (folder != NULL) closedir(folder);
    return found;
}

/* The driver lists its GPUs in /proc; a container may have only the device files, and WSL only /dev/dxg. */
static bool gpu_is_listed(const char *root)
{
    static const char *const files[] = {"/dev/nvidia0", "/dev/dxg"};
    char path[4096];
    snprintf(path, sizeof path, "%s/proc/driver/nvidia/gpus", root);
    bool found = has_entries(path);
    for (size_t i = 0; !found && i < sizeof files / sizeof files[0]; i++) {
        snprintf(path, sizeof path, "%s%s", root, files[i]);
        found = access(path, F_OK) == 0;
    }
    return found;
}

bool device_leaves_gpu(const char *root, error *why)
{
#ifdef SMOE_HAVE_CUDA
    return !cuda_usable(why) && gpu_is_listed(root);
#else
    (void)(fail)(why, ERROR_RUNTIME, "this smoe was built without CUDA (build it with nvcc, -DSMOE_CUDA=ON)");
    return gpu_is_listed(root);
#endif
}

/* Of NVML, the driver's library. `running` stores the number of programs; 0: there is none. */
typedef struct nvml {
    int (*init)(void);
    int (*shutdown)(void);
    int (*count)(unsigned *count);
    int (*open)(unsigned index, void **gpu);
    int (*running)(void *gpu, unsigned *count, void *programs);
} nvml;

static bool find(void *library, const char *name, void *function)
{
    void *found = dlsym(library, name);
    memcpy(function, &found, sizeof found);
    return found != NULL;
}

static int count_free(const nvml *n)
{
    unsigned gpus = 0, programs;
    int unused = 0;
    void *gpu;
    if (n->count(&gpus) != 0) return -1;
    for (unsigned i = 0; i < gpus; i++) {
        programs = 0; // there is room for none, so one that runs is an error
        unused += n->open(i, &gpu) == 0 && n->running(gpu, &programs, NULL) == 0 && programs == 0;
    }
    return unused;
}

int device_free_gpus(const char *library)
{
    void *opened = dlopen(library ? library : "libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    nvml n;
    int unused = -1;
    if (!opened) return unused;
    if (find(opened, "nvmlInit_v2", &n.init) && find(opened, "nvmlShutdown", &n.shutdown) &&
        find(opened, "nvmlDeviceGetCount_v2", &n.count) &&
        find(opened, "nvmlDeviceGetHandleByIndex_v2", &n.open) &&
        find(opened, "nvmlDeviceGetComputeRunningProcesses_v3", &n.running) && n.init() == 0) {
        unused = count_free(&n);
        (void)n.shutdown();
    }
    (void)dlclose(opened);
    return unused;
}

bool device_comm_key(const train_device *dv, int ranks, unsigned char key[GROUP_KEY], error *err)
{
    memset(key, 0, GROUP_KEY);
#ifdef SMOE_HAVE_CUDA
    if (dv->backend == SMOE_BACKEND_CUDA) return nccl_key(key, err);
#endif
    (void)dv;
    static_assert((int)SHARED_NAME <= (int)GROUP_KEY, "the name is the key");
    return shared_make((char *)key, ranks, err);
}

train_comm *device_comm(train_device *dv, group *g, const unsigned char key[GROUP_KEY], error *err)
{
    train_comm *made;
#ifdef SMOE_HAVE_CUDA
    if (dv->backend == SMOE_BACKEND_CUDA) return nccl_open(key, g, dv, err);
#endif
    made = shared_open((const char *)key, g, dv, err);
    if (!made) return NULL;
    made->ops->barrier(made);
    if (group_rank(g) == 0) shared_unlink((const char *)key); // all have opened it
    return made;
}
