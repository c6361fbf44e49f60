/* An NVML for test_device: five GPUs, of which numbers 1 and 3 run a program. */
enum { GPUS = 5, INSUFFICIENT_SIZE = 7 };

int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlDeviceGetCount_v2(unsigned *count);
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu);
int nvmlDeviceGetComputeRunningProcesses_v3(void *gpu, unsigned *count, void *programs);

static unsigned numbers[GPUS];

int nvmlInit_v2(void)
{
    for (unsigned i = 0; i < GPUS; i++) numbers[i] = i;
    return 0;
}

int nvmlShutdown(void)
{
    return 0;
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    *count = GPUS;
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu)
{
    *gpu = &numbers[index];
    return 0;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *gpu, unsigned *count, void *programs)
{
    const unsigned room = *count;
    (void)programs;
    *count = *(const unsigned *)gpu % 2;
    return *count > room ? INSUFFICIENT_SIZE : 0;
}
