/* See error.h. */
#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

bool fail(error *err, int code, const char *format, ...)
{
    if (err == NULL) return false;
    char text[sizeof err->text]; // arguments may point into err->text: build the new text aside
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (length >= (int)sizeof text) memcpy(text + sizeof text - 4, "...", 4);
    if (length < 0) snprintf(text, sizeof text, "error %d (its message could not be formatted)", code);
    err->code = code;
    memcpy(err->text, text, sizeof text);
    return false;
}
