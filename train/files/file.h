/* Functions on files: read-only mappings, atomic writes, sorted listings of folders. */
#ifndef TRAIN_FILE_H
#define TRAIN_FILE_H

#include "base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A whole file mapped read-only. If the file is replaced by a rename, the mapping stays readable. If another
 * program shortens the file in place, it does not (smoe never does this). */
typedef struct file_map {
    const unsigned char *data;
    size_t size; // bytes, at least 1
} file_map;

/* Errors: missing, a folder or a device, empty, not readable. */
bool file_map_open(file_map *map, const char *path, error *err);
void file_map_close(file_map *map); // a zeroed map is fine

/* Releases the pages of a range of the mapping from this process's memory. Pages that are only partly in the
 * range stay. A released page is read again when it is used again. The range may lie outside of the
 * mapping. */
void file_map_forget(const file_map *map, const void *from, size_t bytes);

/* Writes a file so that `path` at every moment has either its old contents or all of the new ones, even if
 * the process is killed or the power fails. The bytes are written to PATH.tmp.PID; commit does fsync, rename
 * and fsync of the folder. A failed file_writer_write or _commit has already removed the temporary file and
 * freed the writer, and so does _abort. A kill may leave PATH.tmp.PID behind; it is never read. Two threads
 * must not write the same path at once. A process with a limit on file sizes should ignore SIGXFSZ. Otherwise
 * the kernel kills it before these functions can report an error. */
typedef struct file_writer file_writer;
bool file_writer_open(file_writer **writer, const char *path, error *err);
bool file_writer_write(file_writer **writer, const void *bytes, size_t size, error *err);
bool file_writer_extend(file_writer **writer, size_t bytes, error *err); // by zeros that take no space
bool file_writer_commit(file_writer **writer, error *err);               // frees the writer
void file_writer_abort(file_writer **writer);                            // a NULL writer is fine

/* All three steps for contents in memory. */
bool file_write(const char *path, const void *bytes, size_t size, error *err);

/* Waits until what was written to the file or folder is on the disk. Some file systems have no fsync for
 * folders, and pipes have none (EINVAL); this is no error. On failure errno says why. */
bool file_sync(int descriptor);

enum { FILE_PATH_BYTES = 4096 };

/* FOLDER/NAME, which must fit into path (FILE_PATH_BYTES). */
bool file_join(char *path, const char *folder, const char *name, error *err);

/* Makes the folder and its missing parents. A folder that exists is fine. */
bool file_make_folder(const char *path, error *err);

/* Takes the folder for this process until *descriptor is closed, or the process ends. If another one has it,
 * this is an error. On file systems without locks every process gets it. */
bool file_lock_folder(int *descriptor, const char *path, error *err);

typedef struct file_entry {
    char *path;
    uint64_t size; // bytes, may be 0
} file_entry;

typedef struct file_list {
    file_entry *entries;
    size_t count;
} file_list;

/* Appends to *list (zeroed at first) all regular files under `path`, or `path` itself if it is a file. At
 * each level names are sorted by bytes. Inside a folder two things are skipped: names that start with a dot,
 * and folders of runs, which have a link `latest` to a step-N. Links to files are followed; links to folders
 * only if `path` itself is one. On failure the list is unchanged. */
bool file_list_add(file_list *list, const char *path, error *err);

/* Appends `path` without looking at it. */
bool file_list_append(file_list *list, const char *path, uint64_t size, error *err);
void file_list_free(file_list *list);

#endif
