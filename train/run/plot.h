/* The curves of a log as a PNG, through gnuplot. */
#ifndef TRAIN_PLOT_H
#define TRAIN_PLOT_H

#include "base/error.h"

#include <stdbool.h>

/* Draws OUT/curve.png from OUT/train.jsonl; If gnuplot is not installed, *drawn is false; this is no
 * error. */
bool plot_curves(const char *out, bool *drawn, error *err);

#endif
