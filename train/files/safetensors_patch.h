/* A file of tensors that several processes fill: one reserves it, then each writes ranges of its tensors. */
#ifndef TRAIN_SAFETENSORS_PATCH_H
#define TRAIN_SAFETENSORS_PATCH_H

#include "train/files/safetensors.h"

/* Writes the header and makes the file as long as it will be. Its bytes are those of safetensors_write when
 * all ranges have been written. */
bool safetensors_reserve(const char *path, const tensor *tensors, size_t count,
                         const safetensors_pair *metadata, size_t pairs, error *err);

typedef struct safetensors_patch safetensors_patch;

bool safetensors_patch_open(safetensors_patch **patch, const char *path, error *err);
/* Writes `size` bytes of a tensor from its byte `from` on. */
bool safetensors_patch_write(safetensors_patch *patch, const char *name, size_t from, const void *bytes,
                             size_t size, error *err);
/* Waits until they are on the disk. */
bool safetensors_patch_commit(safetensors_patch **patch, error *err); // frees the patch
void safetensors_patch_abort(safetensors_patch **patch);              // a NULL patch is fine

#endif
