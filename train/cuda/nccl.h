/* The collectives (train/ranks/comm.h) of GPUs, by NCCL. It is loaded at run time: the library that SMOE_NCCL
 * names, else libnccl.so.2 where the loader finds it. */
#ifndef TRAIN_CUDA_NCCL_H
#define TRAIN_CUDA_NCCL_H

#include "train/ranks/comm.h"
#include "train/ranks/group.h"

bool nccl_key(unsigned char key[GROUP_KEY], error *err);
train_comm *nccl_open(const unsigned char key[GROUP_KEY], group *g, train_device *dv, error *err);

#endif
