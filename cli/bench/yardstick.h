/* What the machine can do, measured between the library's runs: the six expert GEMMs as plain dense OpenBLAS
 * calls with as many threads, and the speed of a copy.
 *
 * An expert with M rows takes, row-major and f32, with w = 2n columns of H with a gate and n without:
 *   up      (M, d) (w, d)^T -> (M, w)      dh   (M, d) (d, n)   -> (M, n)
 *   down    (M, n) (d, n)^T -> (M, d)      dw2  (M, d)^T (M, n) -> (d, n)
 *   dx_rows (M, w) (w, d)   -> (M, d)      dw1  (M, w)^T (M, d) -> (w, d)
 * Inputs stand packed: nothing is gathered, converted or activated. */
#ifndef CLI_YARDSTICK_H
#define CLI_YARDSTICK_H

#include "cli/support/stage_clock.h"

#include <stdint.h>

typedef struct yardstick {
    int64_t hidden, intermediate, h_width, experts;
    const int32_t *counts; // (E) rows of each expert
    int threads;
    float *wide_rows;   // (R, d): X, dO, Y, dX~
    float *wide_result; // (R, d)
    float *h;           // (R, w)
    float *a;           // (R, n)
    float *w1, *w2;     // (E, w, d), (E, d, n)
    float *dw1, *dw2;
    char *copy_from, *copy_to; // COPY_BYTES each
} yardstick;

enum { COPY_BYTES = 128 << 20 }; // well past the caches

/* Bytes that yardstick_make asks for. */
uint64_t yardstick_bytes(const smoe_layer *layer, int64_t rows);

/* counts (E) are borrowed. False when memory is out. */
bool yardstick_make(yardstick *made, const smoe_layer *layer, const int32_t *counts, int threads);
void yardstick_free(yardstick *freed);

/* ms[STAGE_COUNT]: milliseconds of the GEMMs of each of the six stages; the other entries are left. */
void yardstick_gemms(const yardstick *y, bool forward, bool backward, double *ms);

/* Milliseconds a byte of traffic (read or written) of a copy by all threads. */
double yardstick_copy(const yardstick *y);

#endif
