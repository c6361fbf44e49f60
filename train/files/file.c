/* See file.h. POSIX: mmap, fsync, rename; glibc's fts walks folders, Linux's sync_file_range writes early. */
#define _GNU_SOURCE       1 // as -D_GNU_SOURCE says it
#define _FILE_OFFSET_BITS 64
#include "train/files/file.h"

#include <errno.h>
#include <fcntl.h>
#include <fts.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- mapping ---- */

static bool check_kind(const char *path, const struct stat *info, error *err)
{
    if (S_ISDIR(info->st_mode)) return fail(err, ERROR_RUNTIME, "%s: is a folder, not a file", path);
    if (!S_ISREG(info->st_mode)) return fail(err, ERROR_RUNTIME, "%s: is not a regular file", path);
    return true;
}

static bool map_descriptor(file_map *map, int descriptor, const char *path, error *err)
{
    struct stat info;
    if (fstat(descriptor, &info) != 0) return fail(err, ERROR_RUNTIME, "%s: %s", path, strerror(errno));
    if (!check_kind(path, &info, err)) return false;
    if (info.st_size == 0) return fail(err, ERROR_RUNTIME, "%s: the file is empty", path);
    if ((uintmax_t)info.st_size > SIZE_MAX / 2)
        return fail(err, ERROR_RUNTIME, "%s: %jd bytes do not fit into the address space", path,
                    (intmax_t)info.st_size);
    void *data = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (data == MAP_FAILED) return fail(err, ERROR_RUNTIME, "%s: cannot map: %s", path, strerror(errno));
    *map = (file_map){data, (size_t)info.st_size};
    return true;
}

bool file_map_open(file_map *map, const char *path, error *err)
{
    *map = (file_map){0};
    // O_NONBLOCK: opening a pipe must not wait for its other end; pipes are refused below
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0) return fail(err, ERROR_RUNTIME, "%s: cannot open: %s", path, strerror(errno));
    bool ok = map_descriptor(map, descriptor, path, err);
    close(descriptor);
    return ok;
}

void file_map_close(file_map *map)
{
    if (map->data != NULL) munmap((void *)(uintptr_t)map->data, map->size);
    *map = (file_map){0};
}

void file_map_forget(const file_map *map, const void *from, size_t bytes)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)map->data,
                    at = (uintptr_t)from;
    if (map->data == NULL || at < begin || at - begin > map->size || bytes > map->size - (at - begin)) return;
    const uintptr_t first = (at + page - 1) / page * page, end = (at + bytes) / page * page;
    if (first < end) (void)madvise((void *)first, end - first, MADV_DONTNEED); // read-only: nothing is lost
}

/* ---- atomic writes ---- */

enum { WRITE_BUFFER = 1 << 20, WRITE_EARLY = 1 << 24 };

struct file_writer {
    char *path;
    char *temporary; // path.tmp.PID; NULL until it exists
    FILE *file;
    size_t written; // bytes given
    size_t begun;   // of these, bytes that the disk has begun to write
};

static void writer_free(file_writer **writer)
{
    file_writer *w = *writer;
    if (w == NULL) return;
    if (w->file != NULL) fclose(w->file);
    if (w->temporary != NULL) unlink(w->temporary);
    free(w->temporary);
    free(w->path);
    free(w);
    *writer = NULL;
}

/* Ends the writer after a failure. The message names the file and what failed (errno `number`). */
static bool writer_fail(file_writer **writer, const char *what, int number, error *err)
{
    fail(err, ERROR_RUNTIME, "%s: cannot %s: %s (what was there is unchanged)", (*writer)->path, what,
         strerror(number));
    writer_free(writer);
    return false;
}

static char *temporary_name(const char *path)
{
    size_t size = strlen(path) + 32;
    char *name = malloc(size);
    if (name != NULL) snprintf(name, size, "%s.tmp.%ld", path, (long)getpid());
    return name;
}

static bool writer_create(file_writer **writer, error *err)
{
    file_writer *w = *writer;
    char *name = temporary_name(w->path);
    if (name == NULL) return writer_fail(writer, "write", ENOMEM, err);
    unlink(name); // left by a killed process with the same id
    int descriptor = open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor < 0) {
        int number = errno;
        free(name);
        return writer_fail(writer, "create a temporary file beside it", number, err);
    }
    w->temporary = name;
    w->file = fdopen(descriptor, "w");
    if (w->file == NULL) {
        int number = errno;
        close(descriptor);
        return writer_fail(writer, "write", number, err);
    }
    setvbuf(w->file, NULL, _IOFBF, WRITE_BUFFER);
    return true;
}

bool file_writer_open(file_writer **writer, const char *path, error *err)
{
    *writer = NULL;
    struct stat info;
    if (stat(path, &info) == 0 && !check_kind(path, &info, err)) return false;
    file_writer *w = calloc(1, sizeof *w);
    char *copy = strdup(path);
    if (w == NULL || copy == NULL) {
        free(w);
        free(copy);
        return fail(err, ERROR_RUNTIME, "%s: out of memory", path);
    }
    w->path = copy;
    *writer = w;
    return writer_create(writer, err);
}

/* Lets the disk begin with what was given, so that it works while more is given and the last fsync waits for
 * less. sync_file_range is only a hint: the disk's errors show in fsync too. False if the buffer cannot be
 * flushed, with errno. */
static bool begin_early(file_writer *w)
{
    if (w->written - w->begun < WRITE_EARLY) return true;
    if (fflush(w->file) != 0) return false;
    (void)sync_file_range(fileno(w->file), (off_t)w->begun, (off_t)(w->written - w->begun),
                          SYNC_FILE_RANGE_WRITE);
    w->begun = w->written;
    return true;
}

bool file_writer_write(file_writer **writer, const void *bytes, size_t size, error *err)
{
    if (size > 0 && fwrite(bytes, 1, size, (*writer)->file) != size)
        return writer_fail(writer, "write", errno, err);
    (*writer)->written += size;
    return begin_early(*writer) || writer_fail(writer, "write", errno, err);
}

bool file_writer_extend(file_writer **writer, size_t bytes, error *err)
{
    file_writer *w = *writer;
    w->written += bytes;
    w->begun = w->written;
    return (fflush(w->file) == 0 && ftruncate(fileno(w->file), (off_t)w->written) == 0 &&
            fseeko(w->file, 0, SEEK_END) == 0) ||
           writer_fail(writer, "extend", errno, err);
}

/* The folder of `path`, in memory that the caller frees; NULL if there is none. */
static char *folder_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    if (slash == NULL) return strdup(".");
    return slash == path ? strdup("/") : strndup(path, (size_t)(slash - path));
}

bool file_sync(int descriptor)
{
    return fsync(descriptor) == 0 || errno == EINVAL;
}

/* Makes a rename inside the folder durable. */
static bool sync_folder(const char *path, error *err)
{
    char *folder = folder_of(path);
    if (folder == NULL) return fail(err, ERROR_RUNTIME, "%s: out of memory", path);
    int descriptor = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool ok = descriptor >= 0 && file_sync(descriptor);
    if (!ok)
        fail(err, ERROR_RUNTIME, "%s: written, but its folder cannot be synced: %s", path, strerror(errno));
    if (descriptor >= 0) close(descriptor);
    free(folder);
    return ok;
}

bool file_writer_commit(file_writer **writer, error *err)
{
    file_writer *w = *writer;
    if (fflush(w->file) != 0 || fsync(fileno(w->file)) != 0) return writer_fail(writer, "write", errno, err);
    FILE *file = w->file;
    w->file = NULL;
    if (fclose(file) != 0) return writer_fail(writer, "close", errno, err);
    if (rename(w->temporary, w->path) != 0) return writer_fail(writer, "replace", errno, err);
    free(w->temporary);
    w->temporary = NULL;
    bool ok = sync_folder(w->path, err);
    writer_free(writer);
    return ok;
}

void file_writer_abort(file_writer **writer)
{
    writer_free(writer);
}

bool file_write(const char *path, const void *bytes, size_t size, error *err)
{
    file_writer *writer;
    return file_writer_open(&writer, path, err) && file_writer_write(&writer, bytes, size, err) &&
           file_writer_commit(&writer, err);
}

/* ---- folders ---- */

bool file_join(char *path, const char *folder, const char *name, error *err)
{
    return snprintf(path, FILE_PATH_BYTES, "%s/%s", folder, name) < FILE_PATH_BYTES ||
           fail(err, ERROR_USAGE, "%s/%s: the path is too long", folder, name);
}

static bool make_one_folder(const char *path, error *err)
{
    struct stat info;
    if (mkdir(path, 0777) == 0) return true;
    int number = errno;
    if (stat(path, &info) == 0 && S_ISDIR(info.st_mode)) return true;
    return fail(err, ERROR_RUNTIME, "%s: cannot make the folder: %s", path, strerror(number));
}

bool file_make_folder(const char *path, error *err)
{
    char *copy = strdup(path);
    if (copy == NULL) return fail(err, ERROR_RUNTIME, "%s: out of memory", path);
    bool ok = true;
    for (char *slash = strchr(copy, '/'); ok && slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        ok = copy[0] == '\0' || make_one_folder(copy, err);
        *slash = '/';
    }
    ok = ok && make_one_folder(copy, err);
    free(copy);
    return ok;
}

bool file_lock_folder(int *descriptor, const char *path, error *err)
{
    *descriptor = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (*descriptor < 0) return fail(err, ERROR_RUNTIME, "%s: cannot open: %s", path, strerror(errno));
    if (flock(*descriptor, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return true;
    close(*descriptor);
    *descriptor = -1;
    return fail(err, ERROR_RUNTIME, "%s: another run is writing into this folder", path);
}

bool file_list_append(file_list *list, const char *path, uint64_t size, error *err)
{
    char *copy = strdup(path);
    file_entry *entries = NULL;
    if (copy != NULL) entries = realloc(list->entries, (list->count + 1) * sizeof *entries);
    if (entries == NULL) {
        free(copy);
        return fail(err, ERROR_RUNTIME, "%s: out of memory", path);
    }
    list->entries = entries;
    entries[list->count++] = (file_entry){copy, size};
    return true;
}

static int by_name(const FTSENT **a, const FTSENT **b)
{
    return strcmp((*a)->fts_name, (*b)->fts_name);
}

/* The folder of a run has a link `latest` to one of its checkpoints (train/run/checkpoint.h). */
static bool is_run(const char *folder)
{
    char link[FILE_PATH_BYTES], target[8];
    return file_join(link, folder, "latest", NULL) && readlink(link, target, sizeof target) > 5 &&
           memcmp(target, "step-", 5) == 0;
}

/* Handles one entry of the walk. */
static bool list_visit(file_list *list, FTS *walk, FTSENT *entry, error *err)
{
    struct stat target;
    if (entry->fts_level > 0 && entry->fts_name[0] == '.') {
        if (entry->fts_info == FTS_D) fts_set(walk, entry, FTS_SKIP);
        return true;
    }
    switch (entry->fts_info) {
    case FTS_F: return file_list_append(list, entry->fts_path, (uint64_t)entry->fts_statp->st_size, err);
    case FTS_D:
        if (entry->fts_level > 0 && is_run(entry->fts_accpath)) fts_set(walk, entry, FTS_SKIP);
        return true;
    case FTS_SL: // a link: the file that it points to counts
    case FTS_SLNONE:
        if (stat(entry->fts_accpath, &target) != 0 && entry->fts_level == 0)
            return fail(err, ERROR_RUNTIME, "%s: cannot read: %s", entry->fts_path, strerror(errno));
        if (stat(entry->fts_accpath, &target) != 0 || !S_ISREG(target.st_mode)) return true;
        return file_list_append(list, entry->fts_path, (uint64_t)target.st_size, err);
    case FTS_DNR:
    case FTS_ERR:
    case FTS_NS:
        return fail(err, ERROR_RUNTIME, "%s: cannot read: %s", entry->fts_path, strerror(entry->fts_errno));
    case FTS_DEFAULT: // a device, pipe or socket: an error if the user named it, skipped inside a folder
        if (entry->fts_level > 0) return true;
        return fail(err, ERROR_RUNTIME, "%s: is neither a file nor a folder", entry->fts_path);
    default: return true;
    }
}

static void list_truncate(file_list *list, size_t count)
{
    while (list->count > count) free(list->entries[--list->count].path);
}

bool file_list_add(file_list *list, const char *path, error *err)
{
    char *copy = strdup(path); // fts wants char *
    char *roots[] = {copy, NULL};
    FTS *walk = copy == NULL ? NULL : fts_open(roots, FTS_PHYSICAL | FTS_COMFOLLOW | FTS_NOCHDIR, by_name);
    if (walk == NULL) {
        int number = errno;
        free(copy);
        return fail(err, ERROR_RUNTIME, "%s: cannot list: %s", path, strerror(number));
    }
    size_t before = list->count;
    bool ok = true;
    errno = 0;
    for (FTSENT *entry; ok && (entry = fts_read(walk)) != NULL; errno = 0)
        ok = list_visit(list, walk, entry, err);
    if (ok && errno != 0) ok = fail(err, ERROR_RUNTIME, "%s: cannot list: %s", path, strerror(errno));
    if (!ok) list_truncate(list, before);
    fts_close(walk);
    free(copy);
    return ok;
}

void file_list_free(file_list *list)
{
    list_truncate(list, 0);
    free(list->entries);
    *list = (file_list){0};
}
