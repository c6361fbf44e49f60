/* The table of operations on the CPU. */
#ifndef TRAIN_CPU_CPU_H
#define TRAIN_CPU_CPU_H

#include "train/ops.h"

train_device *cpu_open(error *err); // NULL: no memory

#endif
