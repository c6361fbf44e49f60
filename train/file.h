/* Files as the trainer needs them: read-only mappings, atomic writes, sorted listings of folders. */
#ifndef TRAIN_FILE_H
#define TRAIN_FILE_H

#include "common/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A whole file mapped read-only. What is replaced by rename while it is mapped stays readable; a file that
 * someone else shortens in place does not (nothing of ours does that). */
typedef struct file_map {
    const unsigned char *data;
    size_t size; // bytes, at least 1
} file_map;

/* Errors: missing, a folder or a device, empty, not readable. */
bool file_map_open(file_map *map, const char *path, error *err);
void file_map_close(file_map *map); // a zeroed map is fine

/* The pages of a range of the mapping leave this process's memory, those that are in it only in part stay.
 * They are read again when they are used again. A range outside of the mapping is fine. */
void file_map_forget(const file_map *map, const void *from, size_t bytes);

/* Writes a file so that `path` is at every moment either its old contents or all of the new ones, also across
 * a kill or a loss of power: bytes go to PATH.tmp.PID, commit does fsync, rename and fsync of the folder. A
 * failed file_writer_write or _commit has already removed the temporary file and freed the writer, and so
 * does _abort. A kill may leave PATH.tmp.PID behind; it is never read. Two threads must not write the same
 * path at once. A process that limits file sizes should ignore SIGXFSZ, else the kernel kills it where these
 * functions would report. */
typedef struct file_writer file_writer;
bool file_writer_open(file_writer **writer, const char *path, error *err);
bool file_writer_write(file_writer **writer, const void *bytes, size_t size, error *err);
bool file_writer_commit(file_writer **writer, error *err); // frees the writer
void file_writer_abort(file_writer **writer);              // a NULL writer is fine

/* The three steps above for contents in memory. */
bool file_write(const char *path, const void *bytes, size_t size, error *err);

/* Makes the folder and its missing parents. A folder that exists is fine. */
bool file_make_folder(const char *path, error *err);

typedef struct file_entry {
    char *path;
    uint64_t size; // bytes, may be 0
} file_entry;

typedef struct file_list {
    file_entry *entries;
    size_t count;
} file_list;

/* Appends to *list (zeroed at first) the regular files under `path`, recursively, names sorted by bytes at
 * each level; `path` itself if it is a file. Names that start with a dot are skipped; links to files are
 * followed, links to folders only when they are `path` itself. On failure the list keeps what it had. */
bool file_list_add(file_list *list, const char *path, error *err);

/* Appends `path` as it is. */
bool file_list_append(file_list *list, const char *path, uint64_t size, error *err);
void file_list_free(file_list *list);

#endif
