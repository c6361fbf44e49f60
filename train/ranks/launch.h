/* `smoe train --gpus N`: starts N processes of this program, a rank each, and waits for them. */
#ifndef TRAIN_LAUNCH_H
#define TRAIN_LAUNCH_H

#include "base/error.h"

/* Runs argv again with the environment of each rank (place.h) and passes SIGINT, SIGTERM and SIGHUP on.
 * Returns the exit status: that of the ranks, 3 if one of them ended otherwise. `name` begins the message
 * then. `cpus`: the ranks share the CPUs, so each gets its share of threads. -1 and *err: they could not be
 * started. */
int launch_ranks(int ranks, bool cpus, char **argv, const char *name, error *err);

#endif
