/* Loads a checkpoint as a model that can run, for `smoe generate` and `smoe eval`; and what all commands that
 * run a model say about its device. */
#ifndef CLI_LOAD_H
#define CLI_LOAD_H

#include "train/data/tokenizer.h"
#include "train/model/model.h"

/* Reads config.json of a checkpoint, or of the newest checkpoint of a run. */
bool load_config(model_config *config, const char *path, error *err);

/* `path` is a checkpoint, or the folder of a run, whose newest checkpoint is taken. The model can run passes
 * of up to `sequences` sequences of up to `context` tokens (0: the checkpoint's context), without gradients.
 * If the context is longer than the checkpoint's, a pass has fewer sequences, so that it has no more tokens.
 * The caller calls model_destroy. */
bool load_model(model *m, const char *path, int64_t sequences, int64_t context, model_use use,
                train_device *device, error *err);

/* Loads the checkpoint's tokenizer for a model of `vocab` tokens. t->table.tokens is 0 if it has none. The
 * caller calls tokenizer_close. */
bool load_tokenizer(tokenizer *t, const char *path, int64_t vocab, error *err);

/* If `device` is "auto" and means the CPU although the machine has a GPU, says so on stderr. */
void show_device(const char *device);

#endif
