/* XLA's handlers for smoe_layer_forward and smoe_layer_backward (python/smoe/jax.py registers them).
 *
 * The attributes describe a call completely. `layer` holds the bytes of a smoe_layer. `arguments` holds the
 * bytes of a smoe_forward_args or smoe_backward_args whose pointers are NULL. `threads` is one number: the
 * OpenMP threads of a CPU context. `pointers` and `sizes` have one number for each of XLA's arguments and
 * then for each of its results: `pointers` the offset of the field that takes the buffer's address, `sizes`
 * the offset of the field that takes the buffer's size in bytes. The number is -1 if there is no such field.
 */
#include "smoe.h"
#include "xla_ffi.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOE_XLA_API __attribute__((visibility("default")))

typedef union call_args {
    smoe_forward_args forward;
    smoe_backward_args backward;
    unsigned char bytes[sizeof(smoe_backward_args)];
} call_args;

typedef smoe_status (*layer_call)(smoe_context *, const smoe_layer *, const call_args *, void *stream);

static smoe_status run_forward(smoe_context *context, const smoe_layer *layer, const call_args *args,
                               void *stream)
{
    return smoe_layer_forward(context, layer, &args->forward, stream);
}

static smoe_status run_backward(smoe_context *context, const smoe_layer *layer, const call_args *args,
                                void *stream)
{
    return smoe_layer_backward(context, layer, &args->backward, stream);
}

/* ---- Errors ---- */

static xla_error *fail(const xla_call *call, int code, const char *message)
{
    xla_error_create_args args = {sizeof args, NULL, message, code};
    return call->api->error_create(&args);
}

static int code_of(smoe_status status)
{
    switch (status) {
    case SMOE_ERROR_UNSUPPORTED: return XLA_ERROR_UNIMPLEMENTED;
    case SMOE_ERROR_MEMORY: return XLA_ERROR_RESOURCE_EXHAUSTED;
    case SMOE_ERROR_DEVICE: return XLA_ERROR_INTERNAL;
    default: return XLA_ERROR_INVALID_ARGUMENT;
    }
}

/* ---- Contexts ----
 *
 * XLA calls the handlers from its own threads, several at once. A call takes an idle context, or makes one,
 * and gives it back, so one context may serve several threads in turn. Contexts live as long as the process,
 * because work that they enqueued may still run.
 */

typedef struct idle_context {
    smoe_backend backend;
    int32_t device, threads;
    smoe_context *context;
    struct idle_context *next;
} idle_context;

static pthread_mutex_t idle_lock = PTHREAD_MUTEX_INITIALIZER;
static idle_context *idle; /* guarded by idle_lock */

static idle_context *take_idle(smoe_backend backend, int32_t device, int32_t threads)
{
    pthread_mutex_lock(&idle_lock);
    idle_context **at = &idle;
    while (*at && !((*at)->backend == backend && (*at)->device == device && (*at)->threads == threads))
        at = &(*at)->next;
    idle_context *found = *at;
    if (found) *at = found->next;
    pthread_mutex_unlock(&idle_lock);
    return found;
}

static void give_back(idle_context *used)
{
    pthread_mutex_lock(&idle_lock);
    used->next = idle;
    idle = used;
    pthread_mutex_unlock(&idle_lock);
}

static xla_error *take_context(const xla_call *call, smoe_backend backend, int32_t device, int32_t threads,
                               idle_context **taken)
{
    *taken = take_idle(backend, device, threads);
    if (*taken) return NULL;
    char text[512] = "";
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.backend = backend;
    options.device = device;
    options.threads = threads;
    options.error_text = text;
    options.error_size = sizeof text;
    idle_context *made = malloc(sizeof *made);
    if (!made) return fail(call, XLA_ERROR_RESOURCE_EXHAUSTED, "smoe: out of host memory");
    *made = (idle_context){backend, device, threads, NULL, NULL};
    const smoe_status status = smoe_create(&made->context, &options);
    if (status != SMOE_OK) {
        free(made);
        return fail(call, code_of(status), text);
    }
    *taken = made;
    return NULL;
}

/* ---- Attributes ---- */

static const xla_array *find_array(const xla_call *call, const char *name, int type)
{
    const xla_attributes *a = &call->attributes;
    for (int64_t i = 0; i < a->size; i++) {
        const xla_array *array = a->values[i];
        if (a->names[i]->length == strlen(name) && !memcmp(a->names[i]->text, name, strlen(name)))
            return a->types[i] == XLA_ATTR_ARRAY && array->type == type ? array : NULL;
    }
    return NULL;
}

static uint64_t buffer_bytes(const xla_buffer *buffer) /* whose elements are of type U8 */
{
    uint64_t bytes = 1;
    for (int64_t i = 0; i < buffer->rank; i++) bytes *= (uint64_t)buffer->dims[i];
    return bytes;
}

/* Puts addresses and sizes into the fields of `args`; false if an offset lies outside of `args` or if the
 * arrays do not have one number for each buffer. */
static bool fill(call_args *args, const xla_call *call, const xla_array *pointers, const xla_array *sizes)
{
    const int64_t arguments = call->arguments.size, total = arguments + call->results.size;
    if (pointers->size != (size_t)total || sizes->size != (size_t)total) return false;
    for (int64_t i = 0; i < total; i++) {
        const xla_buffer *buffer =
            i < arguments ? call->arguments.buffers[i] : call->results.buffers[i - arguments];
        const int64_t pointer = ((const int64_t *)pointers->data)[i],
                      size = ((const int64_t *)sizes->data)[i];
        const int64_t last = (int64_t)(sizeof *args - sizeof(void *));
        if (pointer > last || size > last) return false;
        if (pointer >= 0) memcpy(args->bytes + pointer, &buffer->data, sizeof buffer->data);
        const uint64_t bytes = buffer_bytes(buffer);
        if (size >= 0) memcpy(args->bytes + size, &bytes, sizeof bytes);
    }
    return true;
}

/* ---- Handlers ---- */

static xla_error *describe_handler(const xla_call *call)
{
    xla_metadata *metadata = ((xla_metadata_extension *)(void *)call->extensions)->metadata;
    metadata->api_version.major_version = call->api->api_version.major_version;
    metadata->api_version.minor_version = call->api->api_version.minor_version;
    metadata->traits = 0;
    return NULL;
}

static xla_error *find_stream(const xla_call *call, void **stream, int32_t *device)
{
    xla_stream_get_args args = {sizeof args, NULL, call->context, NULL};
    xla_error *error = call->api->stream_get(&args);
    if (error) return error;
    *stream = args.stream;
    if (call->api->struct_size < sizeof(xla_api)) return NULL; /* an older XLA: device 0 */
    xla_ordinal_get_args ordinal = {sizeof ordinal, NULL, call->context, 0};
    error = call->api->ordinal_get(&ordinal);
    *device = ordinal.ordinal;
    return error;
}

static xla_error *run(const xla_call *call, smoe_backend backend, layer_call function)
{
    if (call->extensions && call->extensions->type == XLA_EXTENSION_METADATA) return describe_handler(call);
    const xla_array *layer_bytes = find_array(call, "layer", XLA_TYPE_U8),
                    *template = find_array(call, "arguments", XLA_TYPE_U8),
                    *pointers = find_array(call, "pointers", XLA_TYPE_S64),
                    *sizes = find_array(call, "sizes", XLA_TYPE_S64),
                    *threads = find_array(call, "threads", XLA_TYPE_S64);
    smoe_layer layer;
    call_args args = {.bytes = {0}};
    if (!layer_bytes || !template || !pointers || !sizes || !threads || threads->size != 1 ||
        layer_bytes->size != sizeof layer || template->size > sizeof args)
        return fail(call, XLA_ERROR_INVALID_ARGUMENT, "smoe: attributes of another version of smoe.jax");
    memcpy(&layer, layer_bytes->data, sizeof layer);
    memcpy(args.bytes, template->data, template->size);
    if (!fill(&args, call, pointers, sizes))
        return fail(call, XLA_ERROR_INVALID_ARGUMENT, "smoe: pointers or sizes do not fit the call");
    void *stream = NULL;
    int32_t device = 0;
    if (backend == SMOE_BACKEND_CUDA) {
        xla_error *error = find_stream(call, &stream, &device);
        if (error) return error;
    }
    idle_context *taken;
    xla_error *error =
        take_context(call, backend, device, (int32_t)((const int64_t *)threads->data)[0], &taken);
    if (error) return error;
    const smoe_status status = function(taken->context, &layer, &args, stream);
    if (status != SMOE_OK) error = fail(call, code_of(status), smoe_last_error(taken->context));
    give_back(taken);
    return error;
}

MOE_XLA_API xla_error *smoe_xla_cpu_forward(xla_call *call);
MOE_XLA_API xla_error *smoe_xla_cpu_backward(xla_call *call);
MOE_XLA_API xla_error *smoe_xla_cuda_forward(xla_call *call);
MOE_XLA_API xla_error *smoe_xla_cuda_backward(xla_call *call);

xla_error *smoe_xla_cpu_forward(xla_call *call)
{
    return run(call, SMOE_BACKEND_CPU, run_forward);
}

xla_error *smoe_xla_cpu_backward(xla_call *call)
{
    return run(call, SMOE_BACKEND_CPU, run_backward);
}

xla_error *smoe_xla_cuda_forward(xla_call *call)
{
    return run(call, SMOE_BACKEND_CUDA, run_forward);
}

xla_error *smoe_xla_cuda_backward(xla_call *call)
{
    return run(call, SMOE_BACKEND_CUDA, run_backward);
}
