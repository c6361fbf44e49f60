/* A folder for each test that writes files. folder_setup makes the folder and stores its path in *state;
 * folder_teardown removes it with all its contents. Define _DEFAULT_SOURCE before including this header. */
#ifndef TESTS_FOLDER_H
#define TESTS_FOLDER_H

#include <fts.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static inline int folder_setup(void **state)
{
    const char *parent = getenv("TMPDIR");
    char path[4096];
    snprintf(path, sizeof path, "%s/smoe-test-XXXXXX", parent != NULL ? parent : "/tmp");
    *state = mkdtemp(path) == NULL ? NULL : strdup(path);
    return *state == NULL ? -1 : 0;
}

static inline int folder_teardown(void **state)
{
    char *roots[] = {*state, NULL};
    FTS *walk = fts_open(roots, FTS_PHYSICAL | FTS_NOCHDIR, NULL);
    for (FTSENT *entry; walk != NULL && (entry = fts_read(walk)) != NULL;)
        if (entry->fts_info != FTS_D) remove(entry->fts_accpath);
    if (walk != NULL) fts_close(walk);
    free(*state);
    return 0;
}

/* Writes FOLDER/name to `path`, a buffer of the caller, and returns it. */
static inline const char *in_folder(char path[4096], void **state, const char *name)
{
    snprintf(path, 4096, "%s/%s", (const char *)*state, name);
    return path;
}

/* Writes a file with the C library alone, not with the code under test. */
static inline void put_file(const char *path, const void *bytes, size_t size)
{
    FILE *f = fopen(path, "wb");
    if (f == NULL || fwrite(bytes, 1, size, f) != size || fclose(f) != 0) {
        perror(path);
        abort();
    }
}

#endif
