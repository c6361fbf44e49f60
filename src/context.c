/* Contexts: creation by a backend's table of functions, destruction, error text. */
#include "backend.h"
#include "check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const moe_backend_table *find_backend(smoe_backend id)
{
    if (id == SMOE_BACKEND_CPU) return &moe_cpu_backend;
#ifdef SMOE_HAVE_CUDA
    if (id == SMOE_BACKEND_CUDA) return &moe_cuda_backend;
#endif
    return NULL;
}

static smoe_status open_backend(smoe_context *context, const smoe_context_options *options)
{
    if (options->backend != SMOE_BACKEND_CPU && options->backend != SMOE_BACKEND_CUDA)
        return moe_fail(context, SMOE_ERROR_ARGUMENT,
                        "smoe_create: backend is %d; it is SMOE_BACKEND_CPU (0) or SMOE_BACKEND_CUDA (10)",
                        (int)options->backend);
    if (options->threads < 0 || options->threads > MOE_MAX_THREADS)
        return moe_fail(context, SMOE_ERROR_ARGUMENT,
                        "smoe_create: threads is %d, the range is 0 (OpenMP's default) to %d",
                        (int)options->threads, MOE_MAX_THREADS);
    if (options->check_offsets != 0 && options->check_offsets != 1)
        return moe_fail(context, SMOE_ERROR_ARGUMENT, "smoe_create: check_offsets is %d, it must be 0 or 1",
                        (int)options->check_offsets);
    context->backend = find_backend(options->backend);
    if (!context->backend)
        return moe_fail(context, SMOE_ERROR_UNSUPPORTED,
                        "smoe_create: this library was built without the cuda backend");
    context->on_stage = options->on_stage;
    context->on_stage_user = options->on_stage_user;
    context->check_offsets = options->check_offsets;
    return context->backend->create(context, options);
}

static void report(const smoe_context_options *options, const char *text)
{
    if (options->error_text && options->error_size)
        snprintf(options->error_text, options->error_size, "%s", text);
}

smoe_status smoe_create(smoe_context **context, const smoe_context_options *given)
{
    if (!context) return SMOE_ERROR_ARGUMENT;
    *context = NULL;
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    smoe_context *made = calloc(1, sizeof *made);
    if (!made) return SMOE_ERROR_MEMORY;
    made->function = "smoe_create";
    smoe_status status = SMOE_OK;
    if (given)
        status = moe_check_struct(made, "smoe_create", "options", "SMOE_CONTEXT_OPTIONS_INIT", given,
                                  sizeof options);
    if (given) moe_take_struct(&options, sizeof options, given);
    if (status == SMOE_OK) status = open_backend(made, &options);
    if (status != SMOE_OK) {
        report(&options, made->error);
        free(made);
        return status;
    }
    *context = made;
    return SMOE_OK;
}

void smoe_destroy(smoe_context *context)
{
    if (!context) return;
    context->backend->destroy(context);
    free(context);
}

const char *smoe_last_error(const smoe_context *context)
{
    return context ? context->error : "";
}

const char *smoe_kernels_string(const smoe_context *context)
{
    return context && context->kernels ? context->kernels : "";
}
