/* Training data: a corpus of tokens for training, a corpus for validation, and batches cut from them.
 *
 * A source is any file or folder (recursively, sorted; train/files/file.h), or "-", the text on standard
 * input. The name of a file decides how it is read:
 *   *.bin  llm.c's token file: int32[256] header (magic 20240520, version 1, number of tokens), then
 *          uint16 tokens
 *   *.gz   is inflated, then read by its name without .gz
 *   else   text: encoded by a table (train/data/bpe.h), the end-of-text token first; without a table every
 *          byte is a token, so the vocabulary has 256 tokens
 * Files of one run are either all text or all token files; empty and binary files inside a folder are
 * skipped, and so are folders of runs. Binary files are texts with a zero byte among their first 8192 bytes,
 * and *.bin that are not token files.
 *
 * Split. With fewer than 20 files the last 5% of each file are for validation. With 20 or more files every
 * 20th file is, so that no document is in both corpora. But if these files have less than 2% or more than 10%
 * of all tokens, because the sizes differ much, the last 5% of each file are for validation instead. Token
 * files for validation can be told by their names: the name of the file, or of the folder that it is in, has
 * val, valid or validation (in either case) between its start, its end, '_', '-', '.' and digits, as in
 * fineweb_val_000000.bin. If some token files have such a name and others do not, exactly those are for
 * validation. A corpus consists of its parts, one after the other. A run without validations trains on all
 * files; only those with these names stay out of it. */
#ifndef TRAIN_TOKENS_H
#define TRAIN_TOKENS_H

#include "base/error.h"
#include "train/data/bpe.h"
#include "train/data/token_source.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct tokens tokens;

typedef enum tokens_split {
    TOKENS_TRAIN, // split as above
    TOKENS_WHOLE, // no validation corpus: all tokens are for training, except files named for validation
    TOKENS_EVAL   // all tokens are for validation, none for training
} tokens_split;

/* Reads `count` files or folders for a model of `vocab` tokens and `context` tokens a sequence. `table` is
 * the table of the tokens, which must outlive *data, or NULL. Small files are copied, large ones mapped.
 * Errors: missing, empty, malformed or truncated files (the message has the expected and the found size); a
 * token id past the vocabulary or the table; text without a table for a vocabulary that is not its bytes;
 * fewer than context + 1 tokens in a corpus of TOKENS_TRAIN or to train on with TOKENS_WHOLE; fewer than 2
 * tokens with TOKENS_EVAL. */
bool tokens_open(tokens **data, const char *const *paths, size_t count, const bpe *table, int64_t vocab,
                 int64_t context, tokens_split split, error *err);

/* The same for one file in memory, which must outlive *data; `name` decides how it is read, as above. The
 * vocabulary of a text may be larger than its bytes. */
bool tokens_parse(tokens **data, const void *bytes, size_t size, const char *name, const bpe *table,
                  int64_t vocab, int64_t context, tokens_split split, error *err);

void tokens_close(tokens *data); // NULL is fine

bool tokens_are_bytes(const tokens *data); // text without a table

/* The bytes of text that `count` tokens of the data stand for. 0 if this is not known, for token files
 * without their table.
 */
int64_t tokens_bytes(const tokens *data, const int32_t *ids, int64_t count);

/* The number of binary files in folders that were skipped, and the path of the first (NULL: none), which is
 * valid as long as data. */
size_t tokens_skipped(const tokens *data, const char **first);

int64_t tokens_train_count(const tokens *data); // tokens
int64_t tokens_validation_count(const tokens *data);
int64_t tokens_all_count(const tokens *data); // of all files, those that are in neither corpus included

/* What of the files is not trained on. */
typedef enum tokens_held {
    TOKENS_HELD_NONE,  // nothing, or TOKENS_EVAL
    TOKENS_HELD_NAMED, // token files that are for validation by their names
    TOKENS_HELD_FILES, // every 20th file
    TOKENS_HELD_TAILS  // the last 5% of each file
} tokens_held;

tokens_held tokens_validation_kind(const tokens *data);
size_t tokens_file_count(const tokens *data);
bool tokens_are_text(const tokens *data); // not token files

size_t tokens_inflated(const tokens *data); // how many of the files were .gz

/* How many texts have a doubt, and the path of the first (NULL: none), valid as long as data. */
size_t tokens_doubted(const tokens *data, text_doubt doubt, const char **first);

/* The path of the file number `place` (0, 1, ..) of those of TOKENS_HELD_NAMED; NULL past the last. */
const char *tokens_validation_file(const tokens *data, size_t place);

/* Tells one text from another. `checksum` is of both corpora's tokens at 256 places of each, 64 at a place.
 * So large data need not be read when a run starts. A change that leaves both numbers as they are and is at
 * none of the places is not noticed; every token then still is where it was. Other file names, formats or
 * folders with the same tokens in the same order make no difference. */
typedef struct tokens_mark {
    int64_t train, validation; // tokens of the two corpora. Both 0: not known; validation alone 0: the text
                               // was opened with TOKENS_WHOLE
    uint64_t checksum;
} tokens_mark;

tokens_mark tokens_identify(const tokens *data);

static inline bool tokens_are_whole(const tokens_mark *text) // opened with TOKENS_WHOLE
{
    return text->train > 0 && text->validation == 0;
}

/* Rows [first, first + rows) of batch number `step` of the training corpus, which has `batch` rows: inputs
 * and targets (rows, context), targets one token later. The result depends only on the arguments, so resuming
 * needs only the step. Sample i = step * batch + row goes through the corpus in epochs. An epoch cuts the
 * corpus into adjoining windows from a random start, and visits every window once, in random order. The data
 * must be opened with TOKENS_TRAIN or TOKENS_WHOLE. */
void tokens_rows(const tokens *data, uint64_t seed, uint64_t step, int64_t batch, int64_t first, int64_t rows,
                 int32_t *inputs, int32_t *targets);

/* The whole batch. */
void tokens_batch(const tokens *data, uint64_t seed, uint64_t step, int64_t batch, int32_t *inputs,
                  int32_t *targets);

/* Not for data of TOKENS_WHOLE. The validation corpus consists of (count - 1) / context adjoining windows,
 * and a rest of 0..context - 1 targets after the last window. So every token but the first is a target once.
 * _window copies windows first .. first + count - 1 to inputs and targets (count, context); _rest_window
 * copies the rest to inputs and targets (rest). */
int64_t tokens_windows(const tokens *data);
int64_t tokens_rest(const tokens *data);
void tokens_window(const tokens *data, int64_t first, int64_t count, int32_t *inputs, int32_t *targets);
void tokens_rest_window(const tokens *data, int32_t *inputs, int32_t *targets);

#endif
