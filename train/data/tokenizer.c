/* See tokenizer.h. The files stay mapped, so they stay readable even if they are replaced by a rename or
 * removed. */
#define _POSIX_C_SOURCE 200809L
#include "train/data/tokenizer.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char *const names[TOKENIZER_FILES] = {"bpe.txt", "tokenizer.json", "tokenizer_config.json"};

bool tokenizer_open(tokenizer *t, const char *path, error *err)
{
    const char *slash = strrchr(path, '/');
    int folder = slash ? (int)(slash + 1 - path) : 0;
    *t = (tokenizer){0};
    bool done = file_map_open(&t->files[0], path, err) &&
                bpe_parse(&t->table, t->files[0].data, t->files[0].size, path, err);
    for (int i = 1; done && i < TOKENIZER_FILES; i++) {
        char beside[FILE_PATH_BYTES];
        if (snprintf(beside, sizeof beside, "%.*s%s", folder, path, names[i]) >= (int)sizeof beside)
            done = fail(err, ERROR_USAGE, "%s: the path is too long", path);
        else
            done = access(beside, F_OK) != 0 || file_map_open(&t->files[i], beside, err);
    }
    if (!done) tokenizer_close(t);
    return done;
}

void tokenizer_close(tokenizer *t)
{
    bpe_free(&t->table);
    for (int i = 0; i < TOKENIZER_FILES; i++) file_map_close(&t->files[i]);
}

bool tokenizer_find(tokenizer *t, const char *checkpoint, int64_t vocab, error *err)
{
    char path[FILE_PATH_BYTES];
    *t = (tokenizer){0};
    if (!file_join(path, checkpoint, "bpe.txt", err)) return false;
    if (access(path, F_OK) != 0) return true;
    if (!tokenizer_open(t, path, err)) return false;
    if (t->table.tokens <= vocab) return true;
    fail(err, ERROR_RUNTIME, "%s: the tokenizer has %lld tokens, the model's vocabulary %lld", path,
         (long long)t->table.tokens, (long long)vocab);
    tokenizer_close(t);
    return false;
}

/* Appends `"CHARACTER":BYTE` to JSON and returns its new length. A byte-level BPE of Transformers has a byte
 * as a character: a printable one of Latin-1 as itself, the others, in their order, from U+0100 on. */
static size_t put_byte(char *json, size_t length, int byte, int *others)
{
    const bool printable = (byte > ' ' && byte < 127) || (byte > 160 && byte != 173);
    const int character = printable ? byte : 256 + (*others)++;
    json[length++] = '"';
    if (character == '"' || character == '\\') json[length++] = '\\';
    if (character > 127) json[length++] = (char)(0xc0 | character >> 6);
    json[length++] = (char)(character > 127 ? 0x80 | (character & 63) : character);
    return length + (size_t)sprintf(json + length, "\":%d%s", byte, byte < 255 ? "," : "");
}

/* A BPE without merges, whose tokens are the bytes. */
static bool save_bytes(const char *folder, error *err)
{
    static const char head[] =
        "{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\"added_tokens\":[],\"normalizer\":null,"
        "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true,"
        "\"use_regex\":false},\"post_processor\":null,\"decoder\":{\"type\":\"ByteLevel\","
        "\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":false},\"model\":{\"type\":\"BPE\","
        "\"dropout\":null,\"unk_token\":null,\"continuing_subword_prefix\":null,"
        "\"end_of_word_suffix\":null,\"fuse_unk\":false,\"byte_fallback\":false,\"vocab\":{",
                      tail[] = "},\"merges\":[]}}\n",
                      config[] = "{\"tokenizer_class\":\"PreTrainedTokenizerFast\",\"clean_up_tokenization_"
                                 "spaces\":false}\n";
    char path[FILE_PATH_BYTES], json[sizeof head + 256 * 16 + sizeof tail];
    size_t length = sizeof head - 1;
    int others = 0;
    memcpy(json, head, length);
    for (int byte = 0; byte < 256; byte++) length = put_byte(json, length, byte, &others);
    memcpy(json + length, tail, sizeof tail - 1);
    length += sizeof tail - 1;
    return file_join(path, folder, "tokenizer.json", err) && file_write(path, json, length, err) &&
           file_join(path, folder, "tokenizer_config.json", err) &&
           file_write(path, config, sizeof config - 1, err);
}

bool tokenizer_writes(const tokenizer *t, const char *name)
{
    for (int i = 0; i < TOKENIZER_FILES; i++)
        if (t->files[i].data && strcmp(names[i], name) == 0) return true;
    return false;
}

bool tokenizer_save(const tokenizer *t, const char *folder, error *err)
{
    bool done = !t->bytes || save_bytes(folder, err);
    for (int i = 0; done && i < TOKENIZER_FILES; i++) {
        char path[FILE_PATH_BYTES];
        done = !t->files[i].data || (file_join(path, folder, names[i], err) &&
                                     file_write(path, t->files[i].data, t->files[i].size, err));
    }
    return done;
}

bool tokenizer_same(const tokenizer *a, const tokenizer *b)
{
    const file_map *x = &a->files[0], *y = &b->files[0];
    return x->size == y->size && (x->size == 0 || memcmp(x->data, y->data, x->size) == 0);
}
