/* Loss of a model on the validation corpus, always with plain top-K. */
#ifndef TRAIN_EVALUATE_H
#define TRAIN_EVALUATE_H

#include "train/data/tokens.h"
#include "train/model/model.h"
#include "train/ranks/comm.h"

#include <math.h>
#include <signal.h>

typedef struct evaluation {
    double loss;    // mean, nats a token
    int64_t tokens; // number of targets of the mean
    int64_t bytes;  // bytes of text that the targets stand for, 0: not known
    bool stopped;   // stopped by *stop before the end; loss is then NAN
    int64_t rows;   // tokens of this rank's last pass
} evaluation;

/* NAN if the bytes are not known. */
static inline double evaluation_bits_per_byte(const evaluation *e)
{
    return e->bytes > 0 ? e->loss * (double)e->tokens / (double)e->bytes / log(2.0) : (double)NAN;
}

/* Who watches an evaluation, and how it computes. */
typedef struct evaluation_watch {
    const volatile sig_atomic_t *stop;      // if *stop is not 0, it ends early, without an error; may be NULL
    void (*pass)(void *user, double share); // after every pass: the share of the tokens that are done; may be
    void *user;                             // NULL
    train_comm *comm;     // its ranks share the windows out and get the same result; NULL: one rank
    smoe_compute compute; // of the experts (model_loss)
} evaluation_watch;

/* Evaluates every token but the first; or, if most > 0, at most `most` windows at equal distances. The
 * model's context must be the one with which the data was opened; if the data have no whole window, their
 * rest is enough. */
bool evaluate(evaluation *result, model *m, const tokens *data, int64_t most, const evaluation_watch *watch,
              error *err);

#endif
