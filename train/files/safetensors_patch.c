/* See safetensors_patch.h. */
#define _GNU_SOURCE 1
#include "train/files/safetensors_patch.h"

#include "train/files/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct safetensors_patch {
    char *path;
    safetensors *file; // the header
    file_map map;      // the same bytes, which say where a tensor's are
    int descriptor;
};

bool safetensors_reserve(const char *path, const tensor *tensors, size_t count,
                         const safetensors_pair *metadata, size_t pairs, error *err)
{
    return safetensors_write_from(path, tensors, count, metadata, pairs, NULL, NULL, 1, err);
}

bool safetensors_patch_open(safetensors_patch **patch, const char *path, error *err)
{
    safetensors_patch *p = *patch = calloc(1, sizeof *p);
    if (!p || !(p->path = strdup(path))) {
        safetensors_patch_abort(patch);
        return fail(err, ERROR_RUNTIME, "%s: out of memory", path);
    }
    p->descriptor = open(path, O_WRONLY | O_CLOEXEC);
    const int why = errno;
    if (p->descriptor >= 0 && file_map_open(&p->map, path, err) &&
        safetensors_parse(&p->file, p->map.data, p->map.size, path, err))
        return true;
    if (p->descriptor < 0) fail(err, ERROR_RUNTIME, "%s: cannot write: %s", path, strerror(why));
    safetensors_patch_abort(patch);
    return false;
}

bool safetensors_patch_write(safetensors_patch *p, const char *name, size_t from, const void *bytes,
                             size_t size, error *err)
{
    const tensor *t;
    if (!safetensors_get(p->file, name, &t, err)) return false;
    off_t at = (off_t)((size_t)((const unsigned char *)t->data - p->map.data) + from);
    for (size_t done = 0; done < size;) {
        const ssize_t wrote =
            pwrite(p->descriptor, (const char *)bytes + done, size - done, at + (off_t)done);
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote <= 0) return fail(err, ERROR_RUNTIME, "%s: cannot write: %s", p->path, strerror(errno));
        done += (size_t)wrote;
    }
    return true;
}

void safetensors_patch_abort(safetensors_patch **patch)
{
    safetensors_patch *p = *patch;
    if (!p) return;
    safetensors_close(p->file);
    file_map_close(&p->map);
    if (p->descriptor >= 0) close(p->descriptor);
    free(p->path);
    free(p);
    *patch = NULL;
}

bool safetensors_patch_commit(safetensors_patch **patch, error *err)
{
    const bool done = file_sync((*patch)->descriptor);
    if (!done) fail(err, ERROR_RUNTIME, "%s: cannot sync: %s", (*patch)->path, strerror(errno));
    safetensors_patch_abort(patch);
    return done;
}
