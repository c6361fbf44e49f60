/* The part of XLA's foreign function interface (its C API, version 0.x) that python/xla/ffi.c uses, declared
 * here so that the library builds without jaxlib. XLA extends its structs only at their ends.
 * tests/python/test_jax.py compares every offset and value with jaxlib's own header. */
#ifndef MOE_XLA_FFI_H
#define MOE_XLA_FFI_H

#include <stddef.h>
#include <stdint.h>

typedef struct xla_error xla_error;
typedef struct xla_context xla_context;

typedef struct xla_extension {
    size_t struct_size;
    int type;
    struct xla_extension *next;
} xla_extension;

enum {
    XLA_EXTENSION_METADATA = 1,
    XLA_STAGE_EXECUTE = 3,
    XLA_ATTR_ARRAY = 1,
    XLA_TYPE_U8 = 6,
    XLA_TYPE_S64 = 5,
    XLA_ERROR_INVALID_ARGUMENT = 3,
    XLA_ERROR_RESOURCE_EXHAUSTED = 8,
    XLA_ERROR_UNIMPLEMENTED = 12,
    XLA_ERROR_INTERNAL = 13
};

typedef struct xla_version {
    size_t struct_size;
    xla_extension *extensions;
    int major_version, minor_version;
} xla_version;

typedef struct xla_metadata {
    size_t struct_size;
    xla_version api_version;
    uint32_t traits;
} xla_metadata;

typedef struct xla_metadata_extension {
    xla_extension base;
    xla_metadata *metadata;
} xla_metadata_extension;

typedef struct xla_buffer {
    size_t struct_size;
    xla_extension *extensions;
    int type;
    void *data;
    int64_t rank;
    int64_t *dims;
} xla_buffer;

typedef struct xla_array {
    int type;
    size_t size;
    void *data;
} xla_array;

typedef struct xla_span {
    const char *text;
    size_t length;
} xla_span;

typedef struct xla_buffers { /* arguments or results */
    size_t struct_size;
    xla_extension *extensions;
    int64_t size;
    int *types;
    void **buffers;
} xla_buffers;

typedef struct xla_attributes {
    size_t struct_size;
    xla_extension *extensions;
    int64_t size;
    int *types;
    xla_span **names;
    void **values;
} xla_attributes;

typedef struct xla_error_create_args {
    size_t struct_size;
    xla_extension *extensions;
    const char *message;
    int code;
} xla_error_create_args;

typedef struct xla_stream_get_args {
    size_t struct_size;
    xla_extension *extensions;
    xla_context *context;
    void *stream;
} xla_stream_get_args;

typedef struct xla_ordinal_get_args {
    size_t struct_size;
    xla_extension *extensions;
    xla_context *context;
    int32_t ordinal;
} xla_ordinal_get_args;

typedef void (*xla_function)(void);

typedef struct xla_api {
    size_t struct_size;
    xla_extension *extensions;
    xla_version api_version;
    const void *internal;
    xla_error *(*error_create)(xla_error_create_args *args);
    xla_function error_get_message, error_destroy, handler_register;
    xla_error *(*stream_get)(xla_stream_get_args *args);
    xla_function type_register, context_get, state_set, state_get, memory_allocate, memory_free;
    xla_function pool_schedule, pool_threads, future_create, future_available, future_error, run_id_get;
    xla_error *(*ordinal_get)(xla_ordinal_get_args *args); /* from version 0.2 on */
} xla_api;

typedef struct xla_call {
    size_t struct_size;
    xla_extension *extensions;
    const xla_api *api;
    xla_context *context;
    int stage;
    xla_buffers arguments, results;
    xla_attributes attributes;
} xla_call;

#endif
