/* A small layer on the CPU, and the check of an error's text. */
#ifndef TESTS_API_CASE_H
#define TESTS_API_CASE_H

#include <smoe.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* With two threads, so that the sizes of scratch are the same on every machine. */
static inline smoe_context *open_cpu(void)
{
    smoe_context *context = NULL;
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.threads = 2;
    assert_int_equal(smoe_create(&context, &options), SMOE_OK);
    assert_non_null(context);
    return context;
}

static inline smoe_layer small_layer(void)
{
    smoe_layer layer = SMOE_LAYER_INIT;
    layer.tokens = 64;
    layer.hidden = 32;
    layer.intermediate = 16;
    layer.experts = 8;
    layer.topk = 2;
    layer.dtype = SMOE_TYPE_F32;
    return layer;
}

static inline void assert_error(smoe_context *context, smoe_status got, smoe_status expected, const char *a,
                                const char *b)
{
    if (got != expected) print_error("status %d, text: %s\n", (int)got, smoe_last_error(context));
    assert_int_equal(got, expected);
    const char *text = smoe_last_error(context);
    if (!strstr(text, a) || !strstr(text, b))
        print_error("the text lacks \"%s\" or \"%s\": %s\n", a, b, text);
    assert_non_null(strstr(text, a));
    assert_non_null(strstr(text, b));
}

#endif
