/* The files of a tokenizer. tools/make_tokens.py writes them, and every checkpoint has a copy. The checkpoint
 * of a model of bytes has the two files that are for Transformers. */
#ifndef TRAIN_TOKENIZER_H
#define TRAIN_TOKENIZER_H

#include "train/data/bpe.h"
#include "train/files/file.h"

enum { TOKENIZER_FILES = 3 }; // bpe.txt, tokenizer.json, tokenizer_config.json

typedef struct tokenizer {
    bpe table;
    file_map files[TOKENIZER_FILES]; // a missing file is zeroed; only the first must exist
    bool bytes;                      // there is none: the tokens are bytes
} tokenizer;

/* Reads the table at `path`, and the other two files, which are for Transformers, if they are in the same
 * folder. */
bool tokenizer_open(tokenizer *t, const char *path, error *err);
void tokenizer_close(tokenizer *t); // a zeroed one is fine

/* Reads the tokenizer of a checkpoint whose model has `vocab` tokens. t->table.tokens is 0 if it has none.
 * With more tokens than the model the checkpoint is broken, ERROR_RUNTIME. */
bool tokenizer_find(tokenizer *t, const char *checkpoint, int64_t vocab, error *err);

/* Is `name` one of the files that were read, which tokenizer_save writes? */
bool tokenizer_writes(const tokenizer *t, const char *name);

/* Writes the files into a folder; for bytes, those with which Transformers encodes text as bytes. */
bool tokenizer_save(const tokenizer *t, const char *folder, error *err);

bool tokenizer_same(const tokenizer *a, const tokenizer *b); // the same table

#endif
