/* Loss of a model on the validation stream, always with plain top-K. */
#ifndef TRAIN_EVALUATE_H
#define TRAIN_EVALUATE_H

#include "train/model.h"
#include "train/tokens.h"

#include <math.h>
#include <signal.h>

typedef struct evaluation {
    double loss;    // mean, nats a token
    int64_t tokens; // targets it is the mean of
    int64_t bytes;  // of text that these stand for, 0: not known
    bool stopped;   // by *stop, before the end: then loss is NAN
} evaluation;

/* NAN where the bytes are not known. */
static inline double evaluation_bits_per_byte(const evaluation *e)
{
    return e->bytes > 0 ? e->loss * (double)e->tokens / (double)e->bytes / log(2.0) : (double)NAN;
}

/* Over every token but the first, or over at most `most` windows, evenly spread, when most > 0. The model's
 * context must be the one that the data was opened with. Ends early, without an error, when *stop is not 0;
 * stop may be NULL.
 */
bool evaluate(evaluation *result, model *m, const tokens *data, int64_t most,
              const volatile sig_atomic_t *stop, error *err);

#endif
