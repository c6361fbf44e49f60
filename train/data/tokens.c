/* See tokens.h: splits the sources into two corpora and cuts batches and windows from them. */
#define _POSIX_C_SOURCE 200809L
#include "train/data/tokens.h"

#include "base/random.h"
#include "train/data/token_source.h"
#include "train/files/file.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum {
    SPLIT = 20, // one token, or one file, in 20 is for validation
    BYTES = 256 // tokens of a text without a table
};

/* A run of tokens of one source. */
typedef struct span {
    const unsigned char *bytes; // (count, width)
    int width;
    int64_t start, count; // place in the corpus, tokens
} span;

typedef struct corpus {
    span *spans; // sorted by start, none empty
    size_t span_count;
    int64_t total; // tokens
} corpus;

struct tokens {
    token_source *sources;
    size_t source_count;
    size_t skipped; // binary files of folders
    char *first_skipped;
    corpus train, validation;
    tokens_held held;
    const bpe *table; // NULL: none
    int64_t context;
};

/* ---- corpora ---- */

static void corpus_add(corpus *s, const token_source *source, int64_t from, int64_t to)
{
    if (from >= to) return;
    s->spans[s->span_count++] =
        (span){source->bytes + from * source->width, source->width, s->total, to - from};
    s->total += to - from;
}

static void corpus_clear(corpus *s)
{
    s->span_count = 0;
    s->total = 0;
}

/* The last span that starts at or before `position`. */
static size_t span_at(const corpus *s, int64_t position)
{
    size_t low = 0, high = s->span_count;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (s->spans[middle].start <= position)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static void span_copy(const span *s, int64_t from, int64_t count, int32_t *out)
{
    const unsigned char *p = s->bytes + from * s->width;
    if (s->width == 1)
        for (int64_t i = 0; i < count; i++) out[i] = p[i];
    else
        for (int64_t i = 0; i < count; i++) out[i] = p[2 * i] | p[2 * i + 1] << 8;
}

static void corpus_copy(const corpus *s, int64_t position, int64_t count, int32_t *out)
{
    assert(position >= 0 && count <= s->total - position);
    for (size_t i = span_at(s, position); count > 0; i++) {
        int64_t from = position - s->spans[i].start, left = s->spans[i].count - from;
        int64_t here = left < count ? left : count;
        span_copy(&s->spans[i], from, here, out);
        out += here;
        position += here;
        count -= here;
    }
}

/* ---- split ---- */

static void split_files(tokens *data)
{
    for (size_t i = 0; i < data->source_count; i++) {
        const token_source *source = &data->sources[i];
        corpus_add(i % SPLIT == SPLIT / 2 ? &data->validation : &data->train, source, 0, source->count);
    }
}

static void split_tails(tokens *data)
{
    for (size_t i = 0; i < data->source_count; i++) {
        const token_source *source = &data->sources[i];
        int64_t cut = source->count - source->count / SPLIT;
        corpus_add(&data->train, source, 0, cut);
        corpus_add(&data->validation, source, cut, source->count);
    }
}

static bool parts_words(char c)
{
    return c == '_' || c == '-' || c == '.' || (c >= '0' && c <= '9');
}

/* Is a word of the name that `from` .. `to` delimit one of val, valid, validation? */
static bool has_validation_word(const char *from, const char *to)
{
    static const char *const words[] = {"val", "valid", "validation"};
    for (const char *at = from; at < to; at++) {
        const char *end = at;
        while (end < to && !parts_words(*end)) end++;
        for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
            if ((size_t)(end - at) == strlen(words[i]) && strncasecmp(at, words[i], strlen(words[i])) == 0)
                return true;
        at = end;
    }
    return false;
}

/* fineweb_val_000000.bin, tiny_shakespeare_val.bin, val.bin.gz; also val/000.bin */
static bool names_validation(const char *path)
{
    const char *end = path + strlen(path);
    for (int part = 0; part < 2; part++) {
        const char *from = end;
        while (from > path && from[-1] != '/') from--;
        if (has_validation_word(from, end)) return true;
        if (from == path) return false;
        end = from - 1;
    }
    return false;
}

/* Finds the token files that are for validation by their names. They count only if there are other files
 * too. */
static bool split_names(tokens *data)
{
    size_t validation = 0;
    for (size_t i = 0; i < data->source_count; i++) validation += data->sources[i].validates;
    if (validation == 0 || validation == data->source_count) return false;
    for (size_t i = 0; i < data->source_count; i++) {
        const token_source *source = &data->sources[i];
        corpus_add(source->validates ? &data->validation : &data->train, source, 0, source->count);
    }
    data->held = TOKENS_HELD_NAMED;
    return true;
}

static void split_train(tokens *data)
{
    if (split_names(data)) return;
    if (data->source_count >= SPLIT) {
        split_files(data);
        double share = (double)data->validation.total / (double)(data->validation.total + data->train.total);
        data->held = TOKENS_HELD_FILES;
        if (share >= 0.02 && share <= 0.10) return;
        corpus_clear(&data->train);
        corpus_clear(&data->validation);
    }
    data->held = TOKENS_HELD_TAILS;
    split_tails(data);
}

/* Files that are for validation by their names are in no corpus. */
static void split_whole(tokens *data)
{
    const bool named = split_names(data);
    corpus_clear(&data->validation);
    for (size_t i = 0; !named && i < data->source_count; i++)
        corpus_add(&data->train, &data->sources[i], 0, data->sources[i].count);
}

/* One target is enough, because evaluation has a shorter window for the rest. */
static bool check_evaluated(const corpus *s, const char *name, error *err)
{
    if (s->total >= 2) return true;
    return fail(err, ERROR_RUNTIME, "%s: %lld tokens to evaluate, at least 2 are needed", name,
                (long long)s->total);
}

/* `what` the tokens are for, `other` the end of the message. */
static bool check_corpus(const corpus *s, const char *what, const char *other, int64_t context,
                         const char *name, error *err)
{
    if (s->total > context) return true;
    return fail(err, ERROR_RUNTIME,
                "%s: %lld tokens to %s on, context %lld needs %lld: give more data or a shorter context%s",
                name, (long long)s->total, what, (long long)context, (long long)context + 1, other);
}

/* `name` names all the data in messages. */
static bool make_corpora(tokens *data, tokens_split split, const char *name, error *err)
{
    data->train.spans = malloc((data->source_count + 1) * sizeof(span));
    data->validation.spans = malloc((data->source_count + 1) * sizeof(span));
    if (data->train.spans == NULL || data->validation.spans == NULL)
        return fail(err, ERROR_RUNTIME, "%s: out of memory", name);
    for (size_t i = 1; i < data->source_count; i++)
        if (data->sources[i].text != data->sources[0].text)
            return fail(err, ERROR_RUNTIME, "%s: text and token files (*.bin) cannot be mixed", name);
    if (split == TOKENS_EVAL) {
        for (size_t i = 0; i < data->source_count; i++)
            corpus_add(&data->validation, &data->sources[i], 0, data->sources[i].count);
        return check_evaluated(&data->validation, name, err);
    }
    if (split == TOKENS_WHOLE)
        split_whole(data);
    else
        split_train(data);
    return check_corpus(&data->train, "train", "", data->context, name, err) &&
           (split == TOKENS_WHOLE ||
            check_corpus(&data->validation, "validate", ", or --evaluations 0", data->context, name, err));
}

/* ---- opening ---- */

static bool tokens_new(tokens **data, size_t sources, const bpe *table, int64_t context, const char *name,
                       error *err)
{
    *data = NULL;
    if (context < 1) return fail(err, ERROR_USAGE, "context = %lld is less than 1", (long long)context);
    tokens *d = calloc(1, sizeof *d);
    if (d != NULL) d->sources = calloc(sources + 1, sizeof *d->sources);
    if (d == NULL || d->sources == NULL) {
        free(d);
        return fail(err, ERROR_RUNTIME, "%s: out of memory", name);
    }
    d->table = table;
    d->context = context;
    *data = d;
    return true;
}

static bool finish(tokens **data, bool ok)
{
    if (ok) return true;
    tokens_close(*data);
    *data = NULL;
    return false;
}

bool tokens_parse(tokens **data, const void *bytes, size_t size, const char *name, const bpe *table,
                  int64_t vocab, int64_t context, tokens_split split, error *err)
{
    if (!tokens_new(data, 1, table, context, name, err)) return false;
    (*data)->source_count = 1;
    return finish(data, token_source_parse(&(*data)->sources[0], bytes, size, name, table, vocab, err) &&
                            make_corpora(*data, split, name, err));
}

static bool is_named(const char *path, const char *const *paths, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(path, paths[i]) == 0) return true;
    return false;
}

/* "-" is the text on standard input. */
static bool is_input(const char *path)
{
    return strcmp(path, "-") == 0;
}

static bool open_source(token_source *source, const char *path, const bpe *table, int64_t vocab, error *err)
{
    if (is_input(path)) return token_source_read(source, stdin, "standard input", table, vocab, err);
    return token_source_open(source, path, table, vocab, err);
}

static bool note_skipped(tokens *data, const char *path, error *err)
{
    if (data->skipped++ > 0) return true;
    data->first_skipped = strdup(path);
    return data->first_skipped != NULL || fail(err, ERROR_RUNTIME, "%s: out of memory", path);
}

/* Opens all files, except empty and binary files inside folders. A file that the user named is opened, or it
 * is an error.
 */
static bool open_sources(tokens *data, const file_list *list, const char *const *paths, size_t count,
                         int64_t vocab, error *err)
{
    for (size_t i = 0; i < list->count; i++) {
        const file_entry *entry = &list->entries[i];
        const bool named = is_named(entry->path, paths, count);
        if (entry->size == 0 && !named) continue;
        token_source *source = &data->sources[data->source_count];
        const bool ok = open_source(source, entry->path, data->table, vocab, err);
        if (source->binary && !named) {
            token_source_close(source);
            if (!note_skipped(data, entry->path, err)) return false;
            continue;
        }
        if (!ok) return false;
        data->source_count++;
        source->path = strdup(entry->path);
        if (source->path == NULL) return fail(err, ERROR_RUNTIME, "%s: out of memory", entry->path);
        source->validates = !source->text && names_validation(entry->path);
    }
    return true;
}

static bool fail_empty(const tokens *data, const char *name, error *err)
{
    if (data->skipped == 0) return fail(err, ERROR_RUNTIME, "%s: holds no file with data", name);
    return fail(err, ERROR_RUNTIME, "%s: holds no file with data (%zu binary files are left out)", name,
                data->skipped);
}

/* The tokens of another vocabulary are not bytes, so the bytes of a text would be other tokens of it. */
static bool check_bytes(const tokens *data, int64_t vocab, const char *name, error *err)
{
    if (!tokens_are_bytes(data) || vocab == BYTES) return true;
    return fail(
        err, ERROR_USAGE,
        "%s: text without a tokenizer (bpe.txt) has %d tokens, the model's vocabulary %lld: token files "
        "(*.bin) are needed",
        name, (int)BYTES, (long long)vocab);
}

static bool open_list(tokens **data, const file_list *list, const char *const *paths, size_t count,
                      const bpe *table, int64_t vocab, int64_t context, tokens_split split, error *err)
{
    char name[160];
    snprintf(name, sizeof name, count > 1 ? "%.100s and %zu more" : "%.100s", paths[0], count - 1);
    if (!tokens_new(data, list->count, table, context, name, err)) return false;
    bool ok = open_sources(*data, list, paths, count, vocab, err);
    if (ok && (*data)->source_count == 0) ok = fail_empty(*data, name, err);
    return finish(data, ok && make_corpora(*data, split, name, err) && check_bytes(*data, vocab, name, err));
}

bool tokens_open(tokens **data, const char *const *paths, size_t count, const bpe *table, int64_t vocab,
                 int64_t context, tokens_split split, error *err)
{
    *data = NULL;
    if (count == 0) return fail(err, ERROR_USAGE, "no data: name text files, folders or token files");
    file_list list = {0};
    bool ok = true;
    for (size_t i = 0; ok && i < count; i++)
        ok = is_input(paths[i]) ? file_list_append(&list, paths[i], 0, err)
                                : file_list_add(&list, paths[i], err);
    ok = ok && open_list(data, &list, paths, count, table, vocab, context, split, err);
    file_list_free(&list);
    return ok;
}

void tokens_close(tokens *data)
{
    if (data == NULL) return;
    for (size_t i = 0; i < data->source_count; i++) token_source_close(&data->sources[i]);
    free(data->sources);
    free(data->first_skipped);
    free(data->train.spans);
    free(data->validation.spans);
    free(data);
}

size_t tokens_skipped(const tokens *data, const char **first)
{
    *first = data->first_skipped;
    return data->skipped;
}

tokens_held tokens_validation_kind(const tokens *data)
{
    return data->held;
}

size_t tokens_file_count(const tokens *data)
{
    return data->source_count;
}

const char *tokens_validation_file(const tokens *data, size_t place)
{
    for (size_t i = 0; data->held == TOKENS_HELD_NAMED && i < data->source_count; i++)
        if (data->sources[i].validates && place-- == 0) return data->sources[i].path;
    return NULL;
}

size_t tokens_inflated(const tokens *data)
{
    size_t count = 0;
    for (size_t i = 0; i < data->source_count; i++) count += data->sources[i].inflated;
    return count;
}

size_t tokens_doubted(const tokens *data, text_doubt doubt, const char **first)
{
    size_t count = 0;
    *first = NULL;
    for (size_t i = data->source_count; i-- > 0;)
        if (data->sources[i].text && data->sources[i].doubt == doubt) {
            *first = data->sources[i].path;
            count++;
        }
    return count;
}

bool tokens_are_text(const tokens *data)
{
    return data->sources[0].text;
}

bool tokens_are_bytes(const tokens *data)
{
    return data->sources[0].text && data->table == NULL;
}

int64_t tokens_bytes(const tokens *data, const int32_t *ids, int64_t count)
{
    if (data->sources[0].width == 1) return count;
    int64_t bytes = 0;
    for (int64_t i = 0; data->table != NULL && i < count; i++) {
        size_t length;
        bpe_bytes(data->table, ids[i], &length);
        bytes += (int64_t)length;
    }
    return bytes;
}

int64_t tokens_train_count(const tokens *data)
{
    return data->train.total;
}

int64_t tokens_validation_count(const tokens *data)
{
    return data->validation.total;
}

int64_t tokens_all_count(const tokens *data)
{
    int64_t all = 0;
    for (size_t i = 0; i < data->source_count; i++) all += data->sources[i].count;
    return all;
}

/* ---- the mark of a text ---- */

/* At equal distances, the first at the beginning and the last at the end. Of a short corpus all tokens. */
static uint64_t corpus_checksum(const corpus *s, uint64_t sum)
{
    enum { PLACES = 256, RUN = 64 };
    const int64_t run = s->total < RUN ? s->total : RUN, all = (s->total + RUN - 1) / RUN;
    const int64_t places = all < PLACES ? all : PLACES;
    for (int64_t i = 0; i < places; i++) {
        int32_t ids[RUN];
        corpus_copy(s, places > 1 ? i * (s->total - run) / (places - 1) : 0, run, ids);
        for (int64_t k = 0; k < run; k++) sum = random_bits(sum, (uint64_t)ids[k]);
    }
    return sum;
}

tokens_mark tokens_identify(const tokens *data)
{
    return (tokens_mark){.train = data->train.total,
                         .validation = data->validation.total,
                         .checksum = corpus_checksum(&data->validation, corpus_checksum(&data->train, 0))};
}

/* ---- batches ---- */

static void copy_window(const corpus *s, int64_t position, int64_t count, int32_t *inputs, int32_t *targets)
{
    corpus_copy(s, position, count, inputs);
    corpus_copy(s, position + 1, count, targets);
}

/* Element `index` of a random permutation of 0..count-1. A Feistel network permutes the numbers below the
 * next power of four. It is applied repeatedly until the result is below count (less than four times on
 * average). */
static uint64_t permuted(uint64_t index, uint64_t count, uint64_t key)
{
    int half = 1;
    while (half < 31 && (uint64_t)1 << 2 * half < count) half++;
    uint64_t mask = ((uint64_t)1 << half) - 1;
    do {
        uint64_t left = index >> half, right = index & mask;
        for (uint64_t turn = 0; turn < 6; turn++) {
            uint64_t next = left ^ (random_bits(key + turn, right) & mask);
            left = right;
            right = next;
        }
        index = left << half | right;
    } while (index >= count);
    return index;
}

/* Where sample number `sample` starts. An epoch has one window less than the corpus has room for, so that the
 * start of the first window can vary. */
static int64_t sample_position(const tokens *data, uint64_t seed, uint64_t sample)
{
    uint64_t total = (uint64_t)data->train.total, context = (uint64_t)data->context;
    uint64_t windows = total / context > 1 ? total / context - 1 : 1;
    uint64_t slack = total - 1 - windows * context;
    uint64_t key = random_bits(seed, sample / windows); // of the epoch
    uint64_t start = random_bits(key, 0) % (slack + 1);
    return (int64_t)(start + permuted(sample % windows, windows, key) * context);
}

void tokens_batch(const tokens *data, uint64_t seed, uint64_t step, int64_t batch, int32_t *inputs,
                  int32_t *targets)
{
    tokens_rows(data, seed, step, batch, 0, batch, inputs, targets);
}

void tokens_rows(const tokens *data, uint64_t seed, uint64_t step, int64_t batch, int64_t first, int64_t rows,
                 int32_t *inputs, int32_t *targets)
{
    assert(data->train.total > data->context);
    for (int64_t row = 0; row < rows; row++) {
        int64_t position = sample_position(data, seed, step * (uint64_t)batch + (uint64_t)(first + row));
        copy_window(&data->train, position, data->context, inputs + row * data->context,
                    targets + row * data->context);
    }
}

int64_t tokens_windows(const tokens *data)
{
    return (data->validation.total - 1) / data->context;
}

int64_t tokens_rest(const tokens *data)
{
    return (data->validation.total - 1) % data->context;
}

void tokens_window(const tokens *data, int64_t first, int64_t count, int32_t *inputs, int32_t *targets)
{
    assert(first >= 0 && count >= 0 && count <= tokens_windows(data) - first);
    for (int64_t i = 0; i < count; i++)
        copy_window(&data->validation, (first + i) * data->context, data->context, inputs + i * data->context,
                    targets + i * data->context);
}

void tokens_rest_window(const tokens *data, int32_t *inputs, int32_t *targets)
{
    copy_window(&data->validation, tokens_windows(data) * data->context, tokens_rest(data), inputs, targets);
}
