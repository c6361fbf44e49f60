/* The error text of a context. */
#include "backend.h"

#include <stdarg.h>
#include <stdio.h>

smoe_status moe_fail(smoe_context *context, smoe_status status, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vsnprintf(context->error, sizeof context->error, format, list);
    va_end(list);
    return status;
}
