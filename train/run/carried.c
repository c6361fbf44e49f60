/* See carried.h. */
#define _POSIX_C_SOURCE 200809L
#include "train/run/carried.h"

#include <assert.h>
#include <string.h>
#include <sys/stat.h>

static const char *const names[] = {
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
};
static_assert(sizeof names / sizeof names[0] == CARRIED_FILES, "a name for each file");

/* Missing and empty files are left out. */
static bool open_file(file_map *map, const char *folder, const char *name, error *err)
{
    char path[FILE_PATH_BYTES];
    struct stat about;
    if (!file_join(path, folder, name, err)) return false;
    return stat(path, &about) != 0 || about.st_size == 0 || file_map_open(map, path, err);
}

bool carried_open(carried *c, const char *checkpoint, const tokenizer *words, error *err)
{
    *c = (carried){0};
    bool done = open_file(&c->config, checkpoint, "config.json", err);
    for (int i = 0; done && i < CARRIED_FILES; i++)
        if (!tokenizer_writes(words, names[i])) done = open_file(&c->files[i], checkpoint, names[i], err);
    if (!done) carried_close(c);
    return done;
}

void carried_change_tokens(carried *c)
{
    c->other_tokens = true;
    for (int i = 0; i < CARRIED_FILES; i++) file_map_close(&c->files[i]);
}

void carried_close(carried *c)
{
    file_map_close(&c->config);
    carried_change_tokens(c);
}

bool carried_has_tokenizer(const carried *c)
{
    return c->files[0].data != NULL;
}

bool carried_save(const carried *c, const char *folder, error *err)
{
    char path[FILE_PATH_BYTES];
    for (int i = 0; i < CARRIED_FILES; i++)
        if (c->files[i].data != NULL && (!file_join(path, folder, names[i], err) ||
                                         !file_write(path, c->files[i].data, c->files[i].size, err)))
            return false;
    return true;
}
