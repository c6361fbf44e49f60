/* Byte-level BPE: text to tokens and back, exactly as the Python package `tokenizers` does it with the
 * tokenizer.json that tools/make_tokens.py writes beside the table read here.
 *
 * Text is first cut into pieces by classes of bytes; no token reaches over a cut. White space is 9..13 and
 * 32, digits are 0-9, letters A-Z, a-z and every byte above 127 (UTF-8 beyond ASCII), all else is a sign. A
 * piece is a space or none, then 1 to 64 letters, or 1 to 3 digits, or 1 to 64 signs; else 1 to 64 of white
 * space, without the last if it is a space and another class follows. It takes as many as there are;
 * letters count as characters of UTF-8. It starts as its bytes; the merge that stands first in the table is
 * made at its leftmost place, again and again, until none applies.
 *
 * Table, plain text:
 *     smoe-bpe 1 T M          T tokens, M merges
 *     LEFT RIGHT TOKEN        M lines, the merge to be preferred first
 * Tokens 0..255 are the bytes. A merge makes the next new token from two that were before it, or an older
 * TOKEN of the same bytes a second way. If one token is left after the merges it is the end-of-text token: it
 * stands before every document, has no bytes, and no text encodes to it. */
#ifndef TRAIN_BPE_H
#define TRAIN_BPE_H

#include "common/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { BPE_PIECE = 257 }; // most bytes of a piece, so of a token: a space and 64 characters of 4 bytes

typedef struct bpe {
    int64_t tokens;         // 256..65536, the end of text included
    int64_t end;            // the end-of-text token, -1: there is none
    unsigned char *bytes;   // of all tokens, one after the other
    uint32_t *start;        // (tokens + 1): where those of each are
    uint16_t *made;         // (merges): the token that each makes
    struct bpe_slot *slots; // a hash table of the pairs
    uint32_t mask;          // its slots - 1
} bpe;

/* Reads a table; `name` stands for it in messages. Whatever is not as above is an error with its line. */
bool bpe_parse(bpe *table, const void *text, size_t size, const char *name, error *err);
void bpe_free(bpe *table); // a zeroed one is fine

/* The bytes of a token: none for the end of text and for what is no token. */
const unsigned char *bpe_bytes(const bpe *table, int64_t token, size_t *length);

/* Encodes `size` bytes into `out`, which has room for as many tokens; returns how many there are. */
size_t bpe_encode(const bpe *table, const unsigned char *text, size_t size, uint16_t *out);

#endif
