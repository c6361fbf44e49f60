/* A fuzz target is one function that takes any bytes. It must not crash, leak or hang. It aborts if the
 * parser accepted the bytes and its result breaks a promise of the parser. */
#ifndef TESTS_FUZZ_H
#define TESTS_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* True if the parser accepted the bytes. The regression driver compares this with the name of the file. */
bool fuzz_accepts(const uint8_t *bytes, size_t size);

/* libFuzzer's entry. */
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

#define PROMISE(condition)                                                                                   \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: broken promise: %s\n", __FILE__, __LINE__, #condition);                  \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)

#endif
