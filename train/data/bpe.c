/* See bpe.h. A hash table has the ranks of pairs. Words are short, so for each merge all pairs of a word are
 * looked at. */
#include "train/data/bpe.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_TOKENS = 1 << 16, MAX_CHARACTERS = 64 };

typedef struct bpe_slot {
    uint32_t pair; // left << 16 | right
    uint32_t rank; // the merge's position in the table; NONE: this place of the hash table is empty
} bpe_slot;

static const uint32_t NONE = UINT32_MAX;

/* The place of a pair in the hash table, or the empty place where it belongs. */
static bpe_slot *slot_of(const bpe *table, uint32_t pair)
{
    uint32_t at = (pair ^ pair >> 15) * 0x9e3779b1u >> 8 & table->mask;
    while (table->slots[at].rank != NONE && table->slots[at].pair != pair) at = (at + 1) & table->mask;
    return &table->slots[at];
}

static uint32_t rank_of(const bpe *table, const uint16_t *pair)
{
    return slot_of(table, (uint32_t)pair[0] << 16 | pair[1])->rank;
}

const unsigned char *bpe_bytes(const bpe *table, int64_t token, size_t *length)
{
    bool has = token >= 0 && token < table->tokens && token != table->end;
    *length = has ? table->start[token + 1] - table->start[token] : 0;
    return table->bytes + (has ? table->start[token] : 0);
}

/* ---- reading ---- */

typedef struct scanner {
    const char *at, *end;
} scanner;

/* Reads a number of up to seven digits and the character `after` it. */
static bool scan(scanner *s, char after, int64_t *value)
{
    const char *first = s->at;
    for (*value = 0; s->at < s->end && *s->at >= '0' && *s->at <= '9' && s->at - first < 7; s->at++)
        *value = 10 * *value + (*s->at - '0');
    return s->at > first && s->at < s->end && *s->at++ == after;
}

static bool allocate(bpe *table, int64_t merges)
{
    size_t slots = 1024;
    while (slots < 4 * (size_t)merges) slots *= 2; // at most a quarter full, so that few pairs collide
    table->mask = (uint32_t)(slots - 1);
    table->slots = malloc(slots * sizeof *table->slots);
    table->made = malloc(((size_t)merges + 1) * sizeof *table->made);
    table->start = calloc((size_t)table->tokens + 2, sizeof *table->start);
    table->bytes = malloc((size_t)(table->tokens + 1) * BPE_WORD);
    if (!table->slots || !table->made || !table->start || !table->bytes) return false;
    memset(table->slots, 0xff, slots * sizeof *table->slots);
    for (uint32_t i = 0; i < 256; i++) {
        table->bytes[i] = (unsigned char)i;
        table->start[i + 1] = i + 1;
    }
    return true;
}

/* Writes the joined bytes of two tokens to where the bytes of the next new token belong. They stay there only
 * if the token is new. */
static bool join(bpe *table, const int64_t merge[3], int64_t known, error *err)
{
    size_t left, right, length;
    const unsigned char *a = bpe_bytes(table, merge[0], &left), *b = bpe_bytes(table, merge[1], &right);
    unsigned char *made = table->bytes + table->start[known];
    if (left + right > BPE_WORD)
        return fail(err, ERROR_RUNTIME, "a token of %zu bytes, the limit is %d", left + right, BPE_WORD);
    memcpy(made, a, left);
    memcpy(made + left, b, right);
    if (merge[2] == known) {
        table->start[known + 1] = table->start[known] + (uint32_t)(left + right);
        return true;
    }
    a = bpe_bytes(table, merge[2], &length);
    return (length == left + right && memcmp(a, made, length) == 0) ||
           fail(err, ERROR_RUNTIME, "token %lld has other bytes than its two parts", (long long)merge[2]);
}

/* Reads one line; *known is the number of tokens so far. */
static bool read_merge(bpe *table, scanner *s, int64_t rank, int64_t *known, error *err)
{
    int64_t merge[3];
    if (!scan(s, ' ', &merge[0]) || !scan(s, ' ', &merge[1]) || !scan(s, '\n', &merge[2]))
        return fail(err, ERROR_RUNTIME, "is not LEFT RIGHT TOKEN");
    if (merge[0] >= *known || merge[1] >= *known || merge[2] > *known || merge[2] >= table->tokens)
        return fail(err, ERROR_RUNTIME, "names a token past the %lld so far", (long long)*known);
    if (!join(table, merge, *known, err)) return false;
    *known += merge[2] == *known;
    uint32_t pair = (uint32_t)(merge[0] << 16 | merge[1]);
    bpe_slot *slot = slot_of(table, pair);
    if (slot->rank != NONE) return fail(err, ERROR_RUNTIME, "the pair is in line %u too", slot->rank + 2);
    *slot = (bpe_slot){pair, (uint32_t)rank};
    table->made[rank] = (uint16_t)merge[2];
    return true;
}

static bool read_table(bpe *table, scanner *s, error *err)
{
    static const char first[] = "smoe-bpe 1 ";
    int64_t merges, known = 256;
    if ((size_t)(s->end - s->at) < sizeof first - 1 || memcmp(s->at, first, sizeof first - 1) != 0)
        return fail(err, ERROR_RUNTIME, "is not a table of tokens: does not begin with '%s'", first);
    s->at += sizeof first - 1;
    // A line has six bytes or more. So a short file with a large count is refused before anything is
    // allocated.
    if (!scan(s, ' ', &table->tokens) || !scan(s, '\n', &merges) || table->tokens < 256 ||
        table->tokens > MAX_TOKENS || table->tokens > 257 + merges || merges > (s->end - s->at) / 6)
        return fail(err, ERROR_RUNTIME, "line 1: not 256..%d tokens and as many lines of merges", MAX_TOKENS);
    if (!allocate(table, merges)) return fail(err, ERROR_RUNTIME, "out of memory");
    for (int64_t i = 0; i < merges; i++) {
        error why = {0};
        if (!read_merge(table, s, i, &known, &why))
            return fail(err, ERROR_RUNTIME, "line %lld: %s", (long long)i + 2, why.text);
    }
    if (s->at < s->end || known < table->tokens - 1)
        return fail(err, ERROR_RUNTIME, "more tokens or lines than its %lld merges", (long long)merges);
    if (known < table->tokens) table->end = known;
    return true;
}

bool bpe_parse(bpe *table, const void *text, size_t size, const char *name, error *err)
{
    error why = {0};
    scanner s = {text, (const char *)text + size};
    *table = (bpe){.end = -1};
    if (read_table(table, &s, &why)) return true;
    bpe_free(table);
    return fail(err, ERROR_RUNTIME, "%.200s: %.250s", name, why.text);
}

void bpe_free(bpe *table)
{
    free(table->slots);
    free(table->made);
    free(table->start);
    free(table->bytes);
    *table = (bpe){0};
}

/* ---- encoding ---- */

typedef enum byte_class { SPACE, DIGIT, LETTER, SIGN } byte_class;

static byte_class class_of(unsigned char c)
{
    if (c > 127 || ((c | 32) >= 'a' && (c | 32) <= 'z')) return LETTER;
    if (c == ' ' || (c >= 9 && c <= 13)) return SPACE;
    return c >= '0' && c <= '9' ? DIGIT : SIGN;
}

/* The number of bytes of the first word of a text of size > 0 bytes. A text that is not UTF-8 is cut at
 * BPE_WORD bytes. */
static size_t word_length(const unsigned char *text, size_t size)
{
    size_t i = text[0] == ' ' && size > 1 && class_of(text[1]) != SPACE; // the space in front
    byte_class class = class_of(text[i]);
    int most = class == DIGIT ? 3 : MAX_CHARACTERS;
    for (int count = 0; i < size && i < BPE_WORD && class_of(text[i]) == class; i++) {
        count += (text[i] & 0xc0) != 0x80; // the first byte of a character
        if (count > most) break;
    }
    bool gives = class == SPACE && i < size && text[i - 1] == ' ' && class_of(text[i]) != SPACE;
    return gives ? i - 1 : i;
}

/* Merges the `count` bytes of a word; returns how many tokens are left. */
static size_t encode_word(const bpe *table, const unsigned char *word, size_t count, uint16_t *out)
{
    uint32_t rank[BPE_WORD]; // of out[i] and out[i + 1]
    for (size_t i = 0; i < count; i++) out[i] = word[i];
    for (size_t i = 0; i + 1 < count; i++) rank[i] = rank_of(table, out + i);
    while (count > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < count; i++)
            if (rank[i] < rank[best]) best = i;
        if (rank[best] == NONE) break;
        out[best] = table->made[rank[best]];
        count--;
        memmove(out + best + 1, out + best + 2, (count - best - 1) * sizeof *out);
        memmove(rank + best, rank + best + 1, (count - best - 1) * sizeof *rank);
        if (best > 0) rank[best - 1] = rank_of(table, out + best - 1);
        if (best + 1 < count) rank[best] = rank_of(table, out + best);
    }
    return count;
}

size_t bpe_encode(const bpe *table, const unsigned char *text, size_t size, uint16_t *out)
{
    size_t count = 0;
    for (size_t at = 0, length; at < size; at += length) {
        length = word_length(text + at, size - at);
        count += encode_word(table, text + at, length, out + count);
    }
    return count;
}
