/* The tokens of one file, before they are split and sampled (train/data/tokens.h). */
#ifndef TRAIN_TOKEN_SOURCE_H
#define TRAIN_TOKEN_SOURCE_H

#include "base/error.h"
#include "train/data/bpe.h"
#include "train/files/file.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* What makes a text one that is probably not meant; it is read all the same. */
typedef enum text_doubt {
    TEXT_FINE,
    TEXT_BINARY,   // a byte of zero among the first 8192
    TEXT_NOT_UTF8, // among the first 2^20 bytes
    TEXT_JSON,     // by its name: .json, .jsonl, .ndjson
    TEXT_DOUBTS
} text_doubt;

typedef struct token_source {
    const unsigned char *bytes; // count * width, little-endian
    int64_t count;              // tokens
    int width;                  // bytes of a token: 1 text without a table, else 2
    bool text;                  // not a token file
    text_doubt doubt;           // of a text
    bool inflated;              // was a .gz
    bool validates;             // a validation file by its name (train/data/tokens.c)
    char *path;                 // set by train/data/tokens.c, freed here; NULL: not a file
    file_map map;               // the memory of the bytes: a mapping, or
    unsigned char *copy;        // a copy; if neither, memory of the caller
    bool binary; // a byte of zero among the first 8192 of a text, or a .bin without a token file's magic:
                 // whoever did not name this file leaves it out. The latter is an error too, and sets only
                 // this.
} token_source;

/* Reads from memory, which must outlive the source unless `name` ends in .gz or a text is encoded. Checks
 * that every token is below vocab, and one of the table's. With a table (else NULL) a text is encoded with
 * it, and its end-of-text token is put first. */
bool token_source_parse(token_source *source, const void *bytes, size_t size, const char *name,
                        const bpe *table, int64_t vocab, error *err);
bool token_source_read(token_source *source, FILE *file, const char *name, const bpe *table, int64_t vocab,
                       error *err); // text
bool token_source_open(token_source *source, const char *path, const bpe *table, int64_t vocab, error *err);
void token_source_close(token_source *source);

#endif
