/* Writer of safetensors.h: the header from the sorted tensors, then their bytes, to a file that is renamed at
 * the end. */
#include "train/files/file.h"
#include "train/files/safetensors.h"
#include "train/files/safetensors_format.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

static int by_size_and_name(const void *a, const void *b)
{
    const tensor *x = *(const tensor *const *)a, *y = *(const tensor *const *)b;
    size_t m = tensor_dtype_size(x->dtype), n = tensor_dtype_size(y->dtype);
    if (m != n) return m > n ? -1 : 1;
    return strcmp(x->name, y->name);
}

/* {"dtype": .., "shape": [..], "data_offsets": [begin, end]}; NULL without memory. */
static json_t *describe(const tensor *t, int64_t begin, int64_t end)
{
    json_t *shape = json_array();
    for (int i = 0; i < t->rank; i++) json_array_append_new(shape, json_integer(t->shape[i]));
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", tensor_dtype_name(t->dtype), "shape", shape,
                     "data_offsets", (json_int_t)begin, (json_int_t)end);
}

static bool add_metadata(json_t *header, const safetensors_pair *metadata, size_t pairs, error *err)
{
    if (pairs == 0) return true;
    json_t *object = json_object();
    bool ok = true;
    for (size_t i = 0; ok && i < pairs; i++)
        if (json_object_set_new(object, metadata[i].key, json_string(metadata[i].value)) != 0)
            ok = fail(err, ERROR_RUNTIME, "metadata %.128s is not UTF-8", metadata[i].key);
    return json_object_set_new(header, SAFETENSORS_METADATA, object) == 0 && ok;
}

static bool add_tensor(json_t *header, const tensor *t, int64_t *at, error *err)
{
    int64_t elements, bytes;
    if (t->rank < 0 || t->rank > TENSOR_MAX_RANK)
        return fail(err, ERROR_RUNTIME, "tensor %.128s has rank %d, at most %d is allowed", t->name, t->rank,
                    TENSOR_MAX_RANK);
    if (!tensor_size(t, &elements, &bytes) || bytes > INT64_MAX - *at)
        return fail(err, ERROR_RUNTIME, "tensor %.128s: its bytes do not fit into 63 bits", t->name);
    if (strcmp(t->name, SAFETENSORS_METADATA) == 0 || json_object_get(header, t->name) != NULL)
        return fail(err, ERROR_RUNTIME, "tensor %.128s: the name is reserved or occurs twice", t->name);
    if (json_object_set_new(header, t->name, describe(t, *at, *at + bytes)) != 0)
        return fail(err, ERROR_RUNTIME, "tensor %.128s: the name is not UTF-8", t->name);
    *at += bytes;
    return true;
}

static json_t *build_header(const tensor *const *sorted, size_t count, const safetensors_pair *metadata,
                            size_t pairs, error *err)
{
    json_t *header = json_object();
    int64_t at = 0;
    bool ok = add_metadata(header, metadata, pairs, err);
    for (size_t i = 0; ok && i < count; i++) ok = add_tensor(header, sorted[i], &at, err);
    if (ok) return header;
    json_decref(header);
    return NULL;
}

/* Length, header and spaces up to the alignment of the data. */
static bool write_header(file_writer **writer, const char *text, error *err)
{
    static const char spaces[SAFETENSORS_ALIGN + 1] = "        ";
    size_t length = strlen(text),
           padding = (SAFETENSORS_ALIGN - length % SAFETENSORS_ALIGN) % SAFETENSORS_ALIGN;
    unsigned char prefix[SAFETENSORS_PREFIX];
    for (int i = 0; i < SAFETENSORS_PREFIX; i++)
        prefix[i] = (unsigned char)((uint64_t)(length + padding) >> 8 * i);
    return file_writer_write(writer, prefix, sizeof prefix, err) &&
           file_writer_write(writer, text, length, err) && file_writer_write(writer, spaces, padding, err);
}

/* The tensors of a call, in the order of the file, and where their bytes come from. */
typedef struct contents {
    const tensor *tensors, **sorted;
    size_t count;
    const safetensors_pair *metadata;
    size_t pairs;
    safetensors_source source;
    void *user;
    size_t most;
} contents;

static bool write_tensor(file_writer **writer, const contents *c, const tensor *t, error *err)
{
    int64_t elements, bytes;
    tensor_size(t, &elements, &bytes);
    if (!c->source) return file_writer_extend(writer, (size_t)bytes, err);
    for (size_t from = 0; from < (size_t)bytes; from += c->most) {
        const size_t left = (size_t)bytes - from, size = left < c->most ? left : c->most;
        const void *piece = c->source(c->user, (size_t)(t - c->tensors), from, size, err);
        if (piece == NULL) {
            file_writer_abort(writer);
            return false;
        }
        if (!file_writer_write(writer, piece, size, err)) return false;
    }
    return true;
}

static bool write_file(const char *path, const char *text, const contents *c, error *err)
{
    file_writer *writer;
    if (!file_writer_open(&writer, path, err) || !write_header(&writer, text, err)) return false;
    for (size_t i = 0; i < c->count; i++)
        if (!write_tensor(&writer, c, c->sorted[i], err)) return false;
    return file_writer_commit(&writer, err);
}

static bool write_sorted(const char *path, const contents *c, error *err)
{
    error reason;
    json_t *header = build_header(c->sorted, c->count, c->metadata, c->pairs, &reason);
    if (header == NULL) return fail(err, ERROR_RUNTIME, "%s: %s", path, reason.text);
    char *text = json_dumps(header, JSON_COMPACT);
    json_decref(header);
    if (text == NULL) return fail(err, ERROR_RUNTIME, "%s: out of memory", path);
    bool ok = strlen(text) <= SAFETENSORS_MAX_HEADER - SAFETENSORS_ALIGN;
    ok = ok ? write_file(path, text, c, err)
            : fail(err, ERROR_RUNTIME, "%s: header of %zu bytes, at most %d are allowed", path, strlen(text),
                   SAFETENSORS_MAX_HEADER);
    free(text);
    return ok;
}

bool safetensors_write_from(const char *path, const tensor *tensors, size_t count,
                            const safetensors_pair *metadata, size_t pairs, safetensors_source source,
                            void *user, size_t most, error *err)
{
    const tensor **sorted = malloc((count + 1) * sizeof *sorted);
    if (sorted == NULL) return fail(err, ERROR_RUNTIME, "%s: out of memory", path);
    for (size_t i = 0; i < count; i++) sorted[i] = &tensors[i];
    if (count > 0) qsort(sorted, count, sizeof *sorted, by_size_and_name);
    const contents c = {tensors, sorted, count, metadata, pairs, source, user, most};
    bool ok = write_sorted(path, &c, err);
    free(sorted);
    return ok;
}

static const void *from_memory(void *user, size_t index, size_t from, size_t size, error *err)
{
    const tensor *const *tensors = user;
    (void)size, (void)err;
    return (const char *)(*tensors)[index].data + from;
}

bool safetensors_write(const char *path, const tensor *tensors, size_t count,
                       const safetensors_pair *metadata, size_t pairs, error *err)
{
    return safetensors_write_from(path, tensors, count, metadata, pairs, from_memory, &tensors, SIZE_MAX,
                                  err);
}
