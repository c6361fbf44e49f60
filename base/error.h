/* Errors of the trainer and the tool. A function that can fail returns bool and takes `error *err` last; on
 * false, *err says why in one line: what was being done, the file or argument, the value and the limit. */
#ifndef TRAIN_ERROR_H
#define TRAIN_ERROR_H

#include <stdbool.h>

enum { ERROR_USAGE = 2, ERROR_RUNTIME = 3 };

typedef struct error {
    int code;       // the exit status it leads to: ERROR_USAGE, ERROR_RUNTIME; 0 = none
    char text[512]; // one line without a newline; a longer message is cut and ends in "..."
} error;

/* Fills *err (NULL is fine) and returns false: a failing function ends in `return fail(err, 3, "...", ...)`.
 * The name stands in parentheses because cmocka has a macro fail(); tests call the function as (fail)(...).
 */
#ifdef __cplusplus
extern "C"
#endif
    bool(fail)(error *err, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

#endif
