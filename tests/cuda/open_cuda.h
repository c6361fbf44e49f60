/* A context of the cuda backend for the checks of this folder. */
#ifndef TESTS_CUDA_OPEN_CUDA_H
#define TESTS_CUDA_OPEN_CUDA_H

#include "../../src/cuda/host/test_options.h"

#include <smoe.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXIT_NO_DEVICE = 77, EXIT_BROKEN = 3 };

/* SMOE_KERNELS in the environment: the context's kernels, "portable" or, with no more shared memory than a
 * GPU of 8.6 has, "portable-99k". */
static inline smoe_kernels kernels_of_environment(void)
{
    const char *name = getenv("SMOE_KERNELS");
    if (!name) return SMOE_KERNELS_BEST;
    if (!strcmp(name, "portable")) return SMOE_KERNELS_PORTABLE;
    if (!strcmp(name, "portable-99k")) return (smoe_kernels)MOE_KERNELS_PORTABLE_99K;
    printf("SMOE_KERNELS: '%s' is neither portable nor portable-99k\n", name);
    exit(EXIT_BROKEN);
}

/* Makes a context, with the option check_offsets or without it. If this fails, it ends the program: with 77,
 * which ctest counts as skipped, if no device is usable, else with 3. */
static inline smoe_context *open_cuda_checking(int check_offsets)
{
    smoe_context *context;
    char text[512] = "";
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.backend = SMOE_BACKEND_CUDA;
    options.kernels = kernels_of_environment();
    options.check_offsets = check_offsets;
    options.error_text = text;
    options.error_size = sizeof text;
    const smoe_status status = smoe_create(&context, &options);
    if (status == SMOE_OK) return context;
    printf("no device: %s\n", text);
    exit(status == SMOE_ERROR_DEVICE ? EXIT_NO_DEVICE : EXIT_BROKEN);
}

static inline smoe_context *open_cuda(void)
{
    return open_cuda_checking(0);
}

#endif
