/* See tokenizer.h. The files stay mapped, so they stay readable even if they are replaced by a rename or
 * removed. */
#define _POSIX_C_SOURCE 200809L
#include "train/tokenizer.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { PATH_BYTES = 4096 };

static const char *const names[TOKENIZER_FILES] = {"bpe.txt", "tokenizer.json", "tokenizer_config.json"};

static bool join(char *path, int length, const char *folder, const char *name, error *err)
{
    if (snprintf(path, PATH_BYTES, "%.*s%s", length, folder, name) < PATH_BYTES) return true;
    return fail(err, ERROR_USAGE, "%s: the path is too long", folder);
}

bool tokenizer_open(tokenizer *t, const char *path, error *err)
{
    const char *slash = strrchr(path, '/');
    int folder = slash ? (int)(slash + 1 - path) : 0;
    *t = (tokenizer){0};
    bool done = file_map_open(&t->files[0], path, err) &&
                bpe_parse(&t->table, t->files[0].data, t->files[0].size, path, err);
    for (int i = 1; done && i < TOKENIZER_FILES; i++) {
        char beside[PATH_BYTES];
        done = join(beside, folder, path, names[i], err) &&
               (access(beside, F_OK) != 0 || file_map_open(&t->files[i], beside, err));
    }
    if (!done) tokenizer_close(t);
    return done;
}

void tokenizer_close(tokenizer *t)
{
    bpe_free(&t->table);
    for (int i = 0; i < TOKENIZER_FILES; i++) file_map_close(&t->files[i]);
}

bool tokenizer_find(tokenizer *t, const char *checkpoint, error *err)
{
    char path[PATH_BYTES];
    *t = (tokenizer){0};
    return join(path, (int)strlen(checkpoint), checkpoint, "/bpe.txt", err) &&
           (access(path, F_OK) != 0 || tokenizer_open(t, path, err));
}

bool tokenizer_save(const tokenizer *t, const char *folder, error *err)
{
    bool done = true;
    for (int i = 0; done && i < TOKENIZER_FILES; i++) {
        char path[PATH_BYTES], name[64];
        snprintf(name, sizeof name, "/%s", names[i]);
        done = !t->files[i].data || (join(path, (int)strlen(folder), folder, name, err) &&
                                     file_write(path, t->files[i].data, t->files[i].size, err));
    }
    return done;
}

bool tokenizer_same(const tokenizer *a, const tokenizer *b)
{
    const file_map *x = &a->files[0], *y = &b->files[0];
    return x->size == y->size && (x->size == 0 || memcmp(x->data, y->data, x->size) == 0);
}
