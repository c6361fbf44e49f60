/* What stands in the folder of a run before it begins. */
#ifndef TRAIN_RUN_FOLDER_H
#define TRAIN_RUN_FOLDER_H

#include "train/run/train.h"

bool run_folder_log(const train_settings *s, char *path, error *err); // of the log; FILE_PATH_BYTES

/* A new run must not replace the checkpoints or the log of another one. */
bool run_folder_unused(const train_settings *s, error *err);

/* Checks what is resumed before the text is read, and chooses how the text is split. A new run without
 * validations trains on the whole text. A resumed run splits its text as it did when it began, because the
 * order of the data depends on it. */
bool run_folder_resumed(const train_settings *s, tokens_split *split, error *err);

#endif
