/* The CPU behind the table of operations. */
#ifndef TRAIN_CPU_CPU_H
#define TRAIN_CPU_CPU_H

#include "train/ops.h"

train_device *cpu_open(error *err); // NULL: no memory

#endif
