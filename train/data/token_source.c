/* See token_source.h. Text, gzip (through zlib) and llm.c's token files. */
#include "train/data/token_source.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

enum {
    BIN_HEADER = 256 * 4, // bytes: int32[256]
    BIN_MAGIC = 20240520,
    BIN_VERSION = 1,
    LOOKED_AT = 8192, // bytes at the beginning of a file that decide whether it is text
    UTF8_LOOKED_AT = 1 << 20,
    COPY_BELOW = 1 << 20 // bytes; smaller files are copied, because a process has only some 65000 mappings
};

static const size_t MOST_BYTES = (size_t)1 << 36; // from one .gz or a pipe: endless data end in an error

static bool ends_with(const char *text, size_t length, const char *end)
{
    size_t tail = strlen(end);
    return length >= tail && memcmp(text + length - tail, end, tail) == 0;
}

/* ---- bytes whose number is not known in advance ---- */

typedef struct growing {
    unsigned char *bytes;
    size_t size, room;
} growing;

static bool grow(growing *out, error *err)
{
    size_t room = out->room == 0 ? 1 << 16 : 2 * out->room;
    if (room > MOST_BYTES) return fail(err, ERROR_RUNTIME, "more than %zu bytes", MOST_BYTES);
    unsigned char *bytes = realloc(out->bytes, room);
    if (bytes == NULL) return fail(err, ERROR_RUNTIME, "out of memory for %zu bytes", room);
    out->bytes = bytes;
    out->room = room;
    return true;
}

/* Frees the unused end of a buffer that has grown. The caller frees the result. */
static unsigned char *grown(const growing *out)
{
    unsigned char *fitting = realloc(out->bytes, out->size + 1);
    return fitting != NULL ? fitting : out->bytes;
}

/* ---- gzip ---- */

/* One call of inflate; *status is zlib's status. */
static bool inflate_some(z_stream *z, const unsigned char *end, growing *out, int *status, error *err)
{
    if (out->size == out->room && !grow(out, err)) return false;
    size_t in = (size_t)(end - z->next_in), free_bytes = out->room - out->size;
    z->avail_in = in < UINT_MAX ? (uInt)in : UINT_MAX; // zlib counts in 32 bits
    z->avail_out = free_bytes < UINT_MAX ? (uInt)free_bytes : UINT_MAX;
    z->next_out = out->bytes + out->size;
    *status = inflate(z, Z_NO_FLUSH);
    out->size = (size_t)(z->next_out - out->bytes);
    if (*status == Z_OK || *status == Z_STREAM_END) return true;
    if (*status == Z_BUF_ERROR)
        return fail(err, ERROR_RUNTIME, "truncated gzip data after %zu inflated bytes", out->size);
    return fail(err, ERROR_RUNTIME, "bad gzip data after %zu inflated bytes: %s", out->size,
                z->msg != NULL ? z->msg : zError(*status));
}

/* All members of a gzip file, one after the other. */
static bool inflate_members(z_stream *z, const unsigned char *end, growing *out, error *err)
{
    int status = Z_OK;
    while (z->next_in < end || status != Z_STREAM_END) {
        if (status == Z_STREAM_END) inflateReset(z);
        if (!inflate_some(z, end, out, &status, err)) return false;
    }
    return true;
}

static bool inflate_all(const unsigned char *bytes, size_t size, growing *out, error *err)
{
    z_stream z = {.next_in = (unsigned char *)(uintptr_t)bytes}; // zlib only reads
    *out = (growing){0};
    if (inflateInit2(&z, MAX_WBITS + 16) != Z_OK)
        return fail(err, ERROR_RUNTIME, "out of memory"); // + 16: gzip only
    bool ok = inflate_members(&z, bytes + size, out, err);
    inflateEnd(&z);
    if (ok) return true;
    free(out->bytes);
    return false;
}

/* ---- tokens ---- */

static int64_t token_at(const token_source *s, int64_t i)
{
    return s->width == 1 ? s->bytes[i] : s->bytes[2 * i] | s->bytes[2 * i + 1] << 8;
}

/* A token past the table is of another tokenizer. The model's vocabulary may be larger than the table. */
static bool check_vocab(const token_source *s, const bpe *table, int64_t vocab, error *err)
{
    const bool words = table != NULL && table->tokens < vocab;
    const int64_t limit = words ? table->tokens : vocab;
    if (limit >= (int64_t)1 << 8 * s->width) return true; // no token can be larger
    for (int64_t i = 0; i < s->count; i++)
        if (token_at(s, i) >= limit)
            return fail(err, ERROR_RUNTIME, "token %lld is %lld, outside the %s of %lld", (long long)i,
                        (long long)token_at(s, i), words ? "tokenizer's vocabulary" : "vocabulary",
                        (long long)limit);
    return true;
}

static int32_t header_field(const unsigned char *bytes, int i)
{
    const unsigned char *p = bytes + 4 * i;
    uint32_t value = p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    int32_t field;
    memcpy(&field, &value, sizeof field);
    return field;
}

static bool has_magic(const unsigned char *bytes, size_t size)
{
    return size >= sizeof(int32_t) && header_field(bytes, 0) == BIN_MAGIC;
}

static bool parse_bin(token_source *s, const unsigned char *bytes, size_t size, error *err)
{
    s->binary = !has_magic(bytes, size);
    if (size < BIN_HEADER)
        return fail(err, ERROR_RUNTIME, "truncated token file: %zu bytes, the header has %d", size,
                    BIN_HEADER);
    int32_t magic = header_field(bytes, 0), version = header_field(bytes, 1), count = header_field(bytes, 2);
    if (magic != BIN_MAGIC)
        return fail(err, ERROR_RUNTIME, "not a token file: magic %d, expected %d", magic, BIN_MAGIC);
    if (version != BIN_VERSION)
        return fail(err, ERROR_RUNTIME, "token file of version %d, expected %d", version, BIN_VERSION);
    if (count < 1)
        return fail(err, ERROR_RUNTIME, "the header counts %d tokens, at least 1 is expected", count);
    size_t expected = BIN_HEADER + 2 * (size_t)count;
    if (size != expected)
        return fail(err, ERROR_RUNTIME, "the header counts %d tokens, expected %zu bytes, found %zu", count,
                    expected, size);
    s->bytes = bytes + BIN_HEADER;
    s->count = count;
    s->width = 2;
    return true;
}

/* The bytes of the UTF-8 character at `p`, 0: there is none. A character that `end` cuts off counts. */
static size_t utf8_length(const unsigned char *p, const unsigned char *end)
{
    static const unsigned char least[] = {0, 0, 0x80, 0xa0, 0x90}, most[] = {0, 0, 0xbf, 0x9f, 0x8f};
    const unsigned char first = p[0];
    const size_t length = first < 0x80   ? 1
                          : first < 0xc2 ? 0
                          : first < 0xe0 ? 2
                          : first < 0xf0 ? 3
                          : first < 0xf5 ? 4
                                         : 0;
    for (size_t i = 1; i < length && p + i < end; i++) {
        const bool low = i == 1 && (first == 0xe0 || first == 0xf0),
                   high = i == 1 && (first == 0xed || first == 0xf4);
        if (p[i] < (low ? least[length] : 0x80) || p[i] > (high ? most[length] : 0xbf)) return 0;
    }
    return length;
}

static bool is_utf8(const unsigned char *bytes, size_t size)
{
    const unsigned char *end = bytes + (size < UTF8_LOOKED_AT ? size : UTF8_LOOKED_AT);
    while (bytes < end) {
        const size_t length = utf8_length(bytes, end);
        if (length == 0) return false;
        bytes += length;
    }
    return true;
}

/* As of parse_contents */
static text_doubt doubt_of(const token_source *s, const char *name, size_t length)
{
    static const char *const json[] = {".json", ".jsonl", ".ndjson"};
    if (s->binary) return TEXT_BINARY;
    for (size_t i = 0; i < sizeof json / sizeof json[0]; i++)
        if (ends_with(name, length, json[i])) return TEXT_JSON;
    return is_utf8(s->bytes, (size_t)s->count) ? TEXT_FINE : TEXT_NOT_UTF8;
}

/* Only the first `length` characters of the name count: without .gz they are the name of the contents. */
static bool parse_contents(token_source *s, const unsigned char *bytes, size_t size, const char *name,
                           size_t length, error *err)
{
    if (ends_with(name, length, ".bin")) return parse_bin(s, bytes, size, err);
    s->bytes = bytes;
    s->count = (int64_t)size;
    s->width = 1;
    s->text = true;
    s->binary = size > 0 && memchr(bytes, 0, size < LOOKED_AT ? size : LOOKED_AT) != NULL;
    s->doubt = doubt_of(s, name, length);
    return true;
}

static bool parse_gzip(token_source *s, const unsigned char *bytes, size_t size, const char *name,
                       size_t length, error *err)
{
    growing out;
    if (!inflate_all(bytes, size, &out, err)) return false;
    s->copy = grown(&out);
    s->inflated = true;
    return parse_contents(s, s->copy, out.size, name, length, err);
}

/* Encodes a text; the tokens replace its bytes. */
static bool encode(token_source *s, const bpe *table, error *err)
{
    size_t size = (size_t)s->count, first = table->end >= 0;
    uint16_t *out = malloc((size + first) * sizeof *out + 1);
    if (out == NULL) return fail(err, ERROR_RUNTIME, "out of memory: the tokens of %zu bytes", size);
    if (first) out[0] = (uint16_t)table->end;
    size_t count = first + bpe_encode(table, s->bytes, size, out + first);
    unsigned char *bytes = (unsigned char *)out;
    for (size_t i = 0; i < count; i++) { // little-endian, as in a file
        uint16_t token = out[i];
        bytes[2 * i] = (unsigned char)token;
        bytes[2 * i + 1] = (unsigned char)(token >> 8);
    }
    unsigned char *fitting = realloc(bytes, 2 * count + 1); // most tokens have many bytes
    free(s->copy);
    *s = (token_source){.count = (int64_t)count,
                        .width = 2,
                        .text = true,
                        .doubt = s->doubt,
                        .inflated = s->inflated,
                        .binary = s->binary};
    s->bytes = s->copy = fitting != NULL ? fitting : bytes;
    return true;
}

bool token_source_parse(token_source *source, const void *bytes, size_t size, const char *name,
                        const bpe *table, int64_t vocab, error *err)
{
    error reason;
    size_t length = strlen(name);
    *source = (token_source){0};
    bool ok = ends_with(name, length, ".gz") ? parse_gzip(source, bytes, size, name, length - 3, &reason)
                                             : parse_contents(source, bytes, size, name, length, &reason);
    if (ok && source->text && table != NULL) ok = encode(source, table, &reason);
    if (ok && check_vocab(source, table, vocab, &reason)) return true;
    const bool binary = source->binary;
    token_source_close(source);
    source->binary = binary;
    return fail(err, ERROR_RUNTIME, "%s: %s", name, reason.text);
}

/* ---- standard input ---- */

static bool read_all(growing *out, FILE *file, error *err)
{
    while (!feof(file)) {
        if (out->size == out->room && !grow(out, err)) return false;
        out->size += fread(out->bytes + out->size, 1, out->room - out->size, file);
        if (ferror(file)) return fail(err, ERROR_RUNTIME, "cannot read: %s", strerror(errno));
    }
    return out->size > 0 || fail(err, ERROR_RUNTIME, "holds no text");
}

bool token_source_read(token_source *source, FILE *file, const char *name, const bpe *table, int64_t vocab,
                       error *err)
{
    error reason;
    growing out = {0};
    *source = (token_source){0};
    if (!read_all(&out, file, &reason)) {
        free(out.bytes);
        return fail(err, ERROR_RUNTIME, "%s: %s", name, reason.text);
    }
    unsigned char *text = grown(&out);
    bool ok = token_source_parse(source, text, out.size, name, table, vocab, err);
    bool kept = ok && source->copy == NULL;
    if (kept) source->copy = text;
    if (!kept) free(text);
    return ok;
}

/* ---- files ---- */

/* Copies the bytes of a small file, so that its mapping can be closed. */
static bool parse_copy(token_source *source, const file_map *map, const char *path, const bpe *table,
                       int64_t vocab, error *err)
{
    unsigned char *copy = malloc(map->size);
    if (copy == NULL) return fail(err, ERROR_RUNTIME, "%s: out of memory", path);
    memcpy(copy, map->data, map->size);
    bool ok = token_source_parse(source, copy, map->size, path, table, vocab, err);
    bool kept = ok && source->copy == NULL; // inflated or encoded data have memory of their own
    if (kept) source->copy = copy;
    if (!kept) free(copy);
    return ok;
}

bool token_source_open(token_source *source, const char *path, const bpe *table, int64_t vocab, error *err)
{
    file_map map;
    *source = (token_source){0};
    if (!file_map_open(&map, path, err)) return false;
    bool small = map.size < COPY_BELOW;
    bool ok = small ? parse_copy(source, &map, path, table, vocab, err)
                    : token_source_parse(source, map.data, map.size, path, table, vocab, err);
    if (ok && !small && source->copy == NULL)
        source->map = map;
    else
        file_map_close(&map);
    return ok;
}

void token_source_close(token_source *source)
{
    file_map_close(&source->map);
    free(source->copy);
    free(source->path);
    *source = (token_source){0};
}
