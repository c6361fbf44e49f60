/* The collectives (train/ranks/comm.h) of processes on the CPUs of one host, over shared memory. Sums are
 * taken in the order of the ranks. */
#ifndef TRAIN_CPU_SHARED_H
#define TRAIN_CPU_SHARED_H

#include "train/ranks/comm.h"

enum { SHARED_NAME = 64 };

/* Makes the memory for `ranks` ranks and writes the name by which the others open it. shared_unlink removes
 * the name, when all have. */
bool shared_make(char name[SHARED_NAME], int ranks, error *err);
void shared_unlink(const char *name);

train_comm *shared_open(const char *name, struct group *g, train_device *dv, error *err);

#endif
