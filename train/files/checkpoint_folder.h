/* The folders of checkpoints (train/run/checkpoint.h): makes them under a temporary name, renames them, lets
 * `latest` point to them, and removes old ones.
 */
#ifndef TRAIN_CHECKPOINT_FOLDER_H
#define TRAIN_CHECKPOINT_FOLDER_H

#include "base/error.h"

#include <stdbool.h>
#include <stdint.h>

/* Makes OUT and an empty OUT/step-N.tmp, and writes its path to `folder` (FILE_PATH_BYTES). What a killed
 * process left there is removed. */
bool checkpoint_folder_begin(const char *out, int64_t step, char *folder, error *err);

/* Writes its path alone. */
bool checkpoint_folder_name(const char *out, int64_t step, char *folder, error *err);

/* Syncs and renames it, moves OUT/latest to it, and removes the oldest checkpoints until `keep` are left. */
bool checkpoint_folder_commit(const char *out, int64_t step, int64_t keep, error *err);

/* If OUT/latest is a folder, as in a copy that was made without links, it becomes OUT/step-N, and a link to
 * it takes its place in the same moment. `step` is that of the checkpoint in it. Without this no later
 * checkpoint could be the newest. */
bool checkpoint_folder_relink(const char *out, int64_t step, error *err);

/* Removes OUT/step-N.tmp and its files, so that a checkpoint that could not be written takes no space on a
 * full disk. */
void checkpoint_folder_abort(const char *out, int64_t step);

#endif
