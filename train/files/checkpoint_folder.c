/* See checkpoint_folder.h. All names are relative to an open descriptor of OUT. */
#define _GNU_SOURCE 1 // Linux's renameat2
#include "train/files/checkpoint_folder.h"

#include "train/files/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NAME_BYTES = 64 };

static void name_of(char *name, int64_t step, const char *suffix)
{
    snprintf(name, NAME_BYTES, "step-%07lld%s", (long long)step, suffix);
}

/* Removes the folder `name` and the files in it; a missing one is fine. */
static bool remove_folder(int out, const char *name)
{
    int folder = openat(out, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (folder < 0) return errno == ENOENT;
    DIR *entries = fdopendir(folder);
    if (!entries) {
        close(folder);
        return false;
    }
    struct dirent *entry;
    while ((entry = readdir(entries)))
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            unlinkat(folder, entry->d_name, 0);
    closedir(entries);
    return unlinkat(out, name, AT_REMOVEDIR) == 0;
}

bool checkpoint_folder_name(const char *out, int64_t step, char *folder, error *err)
{
    char name[NAME_BYTES];
    name_of(name, step, ".tmp");
    return file_join(folder, out, name, err);
}

bool checkpoint_folder_begin(const char *out, int64_t step, char *folder, error *err)
{
    char name[NAME_BYTES];
    name_of(name, step, ".tmp");
    if (!checkpoint_folder_name(out, step, folder, err)) return false;
    if (!file_make_folder(out, err)) return false;
    int root = open(out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root < 0) return fail(err, ERROR_RUNTIME, "%s: %s", out, strerror(errno));
    bool done = remove_folder(root, name) && mkdirat(root, name, 0777) == 0;
    if (!done) fail(err, ERROR_RUNTIME, "%s: cannot make the folder: %s", folder, strerror(errno));
    close(root);
    return done;
}

static bool sync_folder(int out, const char *name)
{
    int folder = openat(out, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) return false;
    bool done = file_sync(folder);
    close(folder);
    return done;
}

/* The step that `latest` points to, -1 if there is none or its folder is gone. */
static int64_t latest_step(int out)
{
    char target[NAME_BYTES];
    ssize_t length = readlinkat(out, "latest", target, sizeof target - 1);
    long long step;
    if (length < 0 || faccessat(out, "latest/config.json", F_OK, 0) != 0) return -1;
    target[length] = 0;
    return sscanf(target, "step-%lld", &step) == 1 ? step : -1;
}

static bool point_to(int out, const char *name)
{
    if (unlinkat(out, "latest.tmp", 0) != 0 && errno != ENOENT) return false;
    return symlinkat(name, out, "latest.tmp") == 0 && renameat(out, "latest.tmp", out, "latest") == 0 &&
           file_sync(out);
}

/* If a folder of this step exists and `latest` does not point to it, a killed process has left it, and it is
 * removed. If `latest` points to it, it is this checkpoint, complete. Then it stays, and the new copy is
 * removed. */
static bool rename_and_point(int out, int64_t step)
{
    char made[NAME_BYTES], name[NAME_BYTES];
    name_of(made, step, ".tmp");
    name_of(name, step, "");
    if (latest_step(out) == step) return remove_folder(out, made);
    if (!sync_folder(out, made) || !remove_folder(out, name)) return false;
    return renameat(out, made, out, name) == 0 && file_sync(out) && point_to(out, name);
}

static int by_step(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* The finished checkpoints of OUT in ascending order, at most `most`. Unfinished folders of killed processes
 * are removed at the same time. */
static int64_t list_steps(int out, int64_t *steps, int64_t most)
{
    int again = openat(out, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *entries = again < 0 ? NULL : fdopendir(again);
    struct dirent *entry;
    int64_t count = 0;
    while (entries && (entry = readdir(entries)) && count < most) {
        long long step;
        int end = 0;
        if (sscanf(entry->d_name, "step-%lld%n", &step, &end) != 1) continue;
        if (strcmp(entry->d_name + end, ".tmp") == 0)
            remove_folder(out, entry->d_name);
        else if (entry->d_name[end] == 0)
            steps[count++] = step;
    }
    if (entries) closedir(entries);
    qsort(steps, (size_t)count, sizeof *steps, by_step);
    return count;
}

/* If an old checkpoint cannot be removed, this is no error. */
static void remove_oldest(int out, int64_t keep)
{
    enum { MOST = 1024 };
    int64_t steps[MOST], count = list_steps(out, steps, MOST), latest = latest_step(out);
    char name[NAME_BYTES];
    for (int64_t i = 0; i < count && count - i > keep; i++) {
        if (steps[i] == latest) continue;
        name_of(name, steps[i], "");
        remove_folder(out, name);
    }
}

bool checkpoint_folder_commit(const char *out, int64_t step, int64_t keep, error *err)
{
    int root = open(out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root < 0) return fail(err, ERROR_RUNTIME, "%s: %s", out, strerror(errno));
    bool done = rename_and_point(root, step);
    if (done)
        remove_oldest(root, keep);
    else
        fail(err, ERROR_RUNTIME, "%s: cannot finish the checkpoint of step %lld: %s", out, (long long)step,
             strerror(errno));
    close(root);
    return done;
}

/* Makes a link `name` to itself and exchanges it with the folder `latest` in one step, so `latest` is the
 * checkpoint at every moment. A link that a killed process left is removed first. A file system without this
 * exchange has no `latest` for a moment. */
static bool exchange_latest(int out, const char *name)
{
    unlinkat(out, name, 0); // not if it is a folder
    if (!remove_folder(out, name) || symlinkat(name, out, name) != 0) return false;
    if (renameat2(out, "latest", out, name, RENAME_EXCHANGE) == 0) return file_sync(out);
    return errno == EINVAL && unlinkat(out, name, 0) == 0 && renameat(out, "latest", out, name) == 0 &&
           point_to(out, name);
}

bool checkpoint_folder_relink(const char *out, int64_t step, error *err)
{
    char name[NAME_BYTES];
    struct stat about;
    int root = open(out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root < 0) return fail(err, ERROR_RUNTIME, "%s: %s", out, strerror(errno));
    name_of(name, step, "");
    bool done = fstatat(root, "latest", &about, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISDIR(about.st_mode) ||
                exchange_latest(root, name);
    if (!done)
        fail(err, ERROR_RUNTIME, "%s: latest is a folder and cannot be made a link to %s: %s", out, name,
             strerror(errno));
    close(root);
    return done;
}

void checkpoint_folder_abort(const char *out, int64_t step)
{
    char name[NAME_BYTES];
    name_of(name, step, ".tmp");
    int root = open(out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root < 0) return;
    remove_folder(root, name);
    close(root);
}
