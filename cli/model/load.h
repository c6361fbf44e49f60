/* A checkpoint as a model ready to run, for `smoe generate` and `smoe eval`. */
#ifndef CLI_LOAD_H
#define CLI_LOAD_H

#include "train/model.h"
#include "train/tokenizer.h"

/* `path` is a checkpoint, or the folder of a run, whose newest is taken. For passes of up to `sequences`
 * sequences of up to `context` tokens (0: the checkpoint's context), without gradients; with a context longer
 * than the checkpoint's, of fewer sequences and no more tokens in all. The caller calls model_destroy. */
bool load_model(model *m, const char *path, int64_t sequences, int64_t context, model_use use,
                train_device *device, error *err);

/* Its tokenizer: t->table.tokens is 0 where the checkpoint has none. The caller calls tokenizer_close. */
bool load_tokenizer(tokenizer *t, const char *path, error *err);

#endif
