/* Byte-level BPE: text to tokens and back, exactly as the Python package `tokenizers` does it with the
 * tokenizer.json that tools/make_tokens.py writes beside the table read here.
 *
 * Encoding has two steps. First the text is cut into words (what `tokenizers` calls pre-tokens); no token
 * crosses a cut. Every byte has a class. White space is 9..13 and 32, digits are 0-9, letters are A-Z, a-z
 * and every byte above 127 (UTF-8 beyond ASCII), everything else is a sign. A word is the
 * first of these that fits, as long as possible:
 *
 *   - an optional space, then 1 to 64 letters, or 1 to 3 digits, or 1 to 64 signs;
 *   - 1 to 64 bytes of white space, without the last one if that is a space and another class follows.
 *
 * Letters are counted as characters of UTF-8. Second, each word starts as its bytes, and merges join two
 * tokens at a time. The merge that comes first in the table is applied at its leftmost place, again and
 * again, until no merge applies.
 *
 * Table, plain text:
 *     smoe-bpe 1 T M          T tokens, M merges
 *     LEFT RIGHT TOKEN        M lines, the preferred merge first
 * Tokens 0..255 are the bytes. A merge joins two tokens that come before it. TOKEN is the next new token, or
 * an older one with the same bytes. If there is one token more than bytes and merges make, it is the
 * end-of-text token. It comes before every document, has no bytes, and no text encodes to it. */
#ifndef TRAIN_BPE_H
#define TRAIN_BPE_H

#include "common/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { BPE_WORD = 257 }; // most bytes of a word, so of a token: a space and 64 characters of 4 bytes

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
