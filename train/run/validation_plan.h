/* How often a run validates, and on how many tokens: what the options leave open follows from the length of
 * the run, so that validations together have at most a given share of its tokens. */
#ifndef TRAIN_VALIDATION_PLAN_H
#define TRAIN_VALIDATION_PLAN_H

#include <stdint.h>

typedef struct validation_plan {
    int64_t count;  // validations over the run; -1: to be chosen
    int64_t tokens; // of each but the last; 0: to be chosen
    int64_t last;   // of the last; 0: to be chosen
} validation_plan;

/* Chooses what is to be chosen: at most 10 validations, 16384 tokens of each and 1048576 of the last one.
 * Less if they would have more than `budget` tokens together or, each, more than half of it; but the last one
 * is always made, and no validation has less than a window of `context` tokens. `text` is the number of
 * tokens of the validation text. */
validation_plan validation_plan_choose(validation_plan wanted, double budget, int64_t text, int64_t context);

#endif
