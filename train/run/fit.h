/* Whether a training run fits into the memory of its device. */
#ifndef TRAIN_FIT_H
#define TRAIN_FIT_H

#include "train/run/train.h"

/* Bytes that model, optimiser and sums of gradients of such a run take on a device. */
bool fit_bytes(size_t *bytes, train_device *device, const model_config *config, const model_options *options,
               bool clips, error *err);

/* If the run would take more memory than the device has left, chooses more recomputation and more column
 * chunks, unless settings->keep_recompute or keep_chunks. Neither changes a bit of the results. If this is
 * not enough, the error names the number of micro-batches that is. It is not chosen, because it changes
 * last bits. A device that does not know its memory (the CPU) gets the options as they are. With `comm` all
 * ranks get the same: memory that they share must have the same layout (nccl.c). */
bool fit_choose(model_options *options, train_device *device, const train_settings *settings,
                train_comm *comm, error *err);

#endif
