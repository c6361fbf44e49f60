/* Byte-level BPE: turns text into tokens and tokens into text. The result is exactly that of the Python
 * package `tokenizers` with the tokenizer.json that tools/make_tokens.py writes together with the table read
 * here.
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
 * neighbouring tokens at a time. Of the merges that apply, the one that is first in the table is applied at
 * its leftmost place. This is repeated until no merge applies.
 *
 * Table, plain text:
 *     smoe-bpe 1 T M          T tokens, M merges
 *     LEFT RIGHT TOKEN        M lines, the preferred merge first
 * Tokens 0..255 are the bytes. A merge joins two tokens that come before it. TOKEN is the next new token, or
 * an older one with the same bytes. If the table has one token more than the bytes and the merges make, this
 * token is the end-of-text token. It stands before every document. It has no bytes, and no text encodes to
 * it. */
#ifndef TRAIN_BPE_H
#define TRAIN_BPE_H

#include "base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { BPE_WORD = 257 }; // most bytes of a word and so of a token: a space and 64 characters of 4 bytes

typedef struct bpe {
    int64_t tokens;         // 256..65536, the end-of-text token included
    int64_t end;            // the end-of-text token, -1: there is none
    unsigned char *bytes;   // of all tokens, one after the other
    uint32_t *start;        // (tokens + 1): where the bytes of each token begin
    uint16_t *made;         // (merges): the token that each merge makes
    struct bpe_slot *slots; // a hash table of the pairs
    uint32_t mask;          // its slots - 1
} bpe;

/* Reads a table; `name` names it in messages. If something is not as described above, the error names the
 * line. */
bool bpe_parse(bpe *table, const void *text, size_t size, const char *name, error *err);
void bpe_free(bpe *table); // a zeroed one is fine

/* The bytes of a token. The end-of-text token and values that are not tokens have none. */
const unsigned char *bpe_bytes(const bpe *table, int64_t token, size_t *length);

/* Encodes `size` bytes into `out`, which has room for `size` tokens. Returns the number of tokens. */
size_t bpe_encode(const bpe *table, const unsigned char *text, size_t size, uint16_t *out);

#endif
