/* The device table on the host. */
#include "harness/device.h"
#include "harness/host.h"

#include <stdlib.h>
#include <string.h>

static void *host_alloc(size_t bytes)
{
    const size_t rounded = (bytes + DEVICE_ALIGN - 1) / DEVICE_ALIGN * DEVICE_ALIGN;
    if (rounded < bytes) return NULL;
    return aligned_alloc(DEVICE_ALIGN, rounded ? rounded : DEVICE_ALIGN);
}

static void host_release(void *memory)
{
    free(memory);
}

static bool host_copy(void *to, const void *from, size_t bytes)
{
    if (bytes) memcpy(to, from, bytes);
    return true;
}

static bool host_set(void *to, int byte, size_t bytes)
{
    if (bytes) memset(to, byte, bytes);
    return true;
}

static bool host_use(int number)
{
    return number == 0;
}

static int host_current(void)
{
    return 0;
}

static bool host_sync(void)
{
    return true;
}

static void *host_open_traffic(void)
{
    return NULL;
}

static bool host_open_stream(void **stream)
{
    *stream = NULL;
    return true;
}

static void host_close_stream(void *stream)
{
    (void)stream;
}

static const device device_cpu = {
    "cpu",     SMOE_BACKEND_CPU, host_alloc,        host_release, host_copy,         host_copy,
    host_copy, host_set,         host_use,          host_current, host_sync,         host_available_bytes,
    host_name, host_open_stream, host_close_stream, NULL,         host_open_traffic, NULL,
    NULL};

static const device *const devices[] = {
    &device_cpu,
#ifdef SMOE_HAVE_CUDA
    &device_cuda,
#endif
};

const device *device_find(const char *name)
{
    for (size_t i = 0; i < sizeof devices / sizeof devices[0]; i++)
        if (strcmp(devices[i]->name, name) == 0) return devices[i];
    return NULL;
}
