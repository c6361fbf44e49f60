/* Reader of safetensors.h: checks the whole file once, then gives pointers into the mapping. */
#include "train/files/safetensors.h"

#include "train/files/file.h"
#include "train/files/safetensors_format.h"
#include "train/files/safetensors_index.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

typedef struct entry {
    tensor t;
    int64_t begin, end; // bytes from the end of the header of its shard
    size_t shard;
} entry;

typedef struct shard {
    file_map map;   // zero when the bytes are the caller's
    json_t *header; // owns the names and the metadata
} shard;

struct safetensors {
    char *name; // the path, for messages
    entry *entries;
    size_t count;
    shard *shards;
    size_t shard_count;
};

/* ---- one tensor of a header ---- */

static bool parse_dtype(const json_t *value, tensor_dtype *dtype, error *err)
{
    const char *text = json_string_value(value);
    if (text == NULL) return fail(err, ERROR_RUNTIME, "dtype is missing or not a string");
    for (int i = 0; i < TENSOR_DTYPES; i++) {
        *dtype = (tensor_dtype)i;
        if (strcmp(text, tensor_dtype_name(*dtype)) == 0) return true;
    }
    return fail(err, ERROR_RUNTIME, "dtype \"%.32s\" is not supported", text);
}

static bool parse_size(const json_t *value, const char *what, int64_t *out, error *err)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return fail(err, ERROR_RUNTIME, "%s must hold integers of at least 0 only", what);
    *out = json_integer_value(value);
    return true;
}

static bool parse_shape(const json_t *value, tensor *t, error *err)
{
    if (!json_is_array(value)) return fail(err, ERROR_RUNTIME, "shape is missing or not an array");
    if (json_array_size(value) > TENSOR_MAX_RANK)
        return fail(err, ERROR_RUNTIME, "shape has %zu dimensions, at most %d are supported",
                    json_array_size(value), TENSOR_MAX_RANK);
    t->rank = (int)json_array_size(value);
    for (int i = 0; i < t->rank; i++)
        if (!parse_size(json_array_get(value, (size_t)i), "shape", &t->shape[i], err)) return false;
    return true;
}

static bool parse_offsets(const json_t *value, entry *e, size_t data_size, error *err)
{
    if (!json_is_array(value) || json_array_size(value) != 2)
        return fail(err, ERROR_RUNTIME, "data_offsets is missing or not an array of two");
    if (!parse_size(json_array_get(value, 0), "data_offsets", &e->begin, err) ||
        !parse_size(json_array_get(value, 1), "data_offsets", &e->end, err))
        return false;
    if (e->begin > e->end || (uint64_t)e->end > data_size)
        return fail(err, ERROR_RUNTIME, "data_offsets [%lld, %lld] are outside the %zu bytes of data",
                    (long long)e->begin, (long long)e->end, data_size);
    return true;
}

static bool parse_tensor(const json_t *value, entry *e, const unsigned char *data, size_t data_size,
                         error *err)
{
    if (!json_is_object(value)) return fail(err, ERROR_RUNTIME, "its description is not an object");
    if (json_object_size(value) != 3)
        return fail(err, ERROR_RUNTIME, "has other keys than dtype, shape, data_offsets");
    if (!parse_dtype(json_object_get(value, "dtype"), &e->t.dtype, err) ||
        !parse_shape(json_object_get(value, "shape"), &e->t, err) ||
        !parse_offsets(json_object_get(value, "data_offsets"), e, data_size, err))
        return false;
    int64_t elements, bytes;
    if (!tensor_size(&e->t, &elements, &bytes))
        return fail(err, ERROR_RUNTIME, "its bytes do not fit into 63 bits");
    if (bytes != e->end - e->begin)
        return fail(err, ERROR_RUNTIME, "shape and dtype make %lld bytes, data_offsets %lld",
                    (long long)bytes, (long long)(e->end - e->begin));
    e->t.data = data + e->begin;
    return true;
}

/* ---- a whole header ---- */

static bool check_metadata(json_t *metadata, error *err)
{
    const char *key;
    json_t *value;
    if (!json_is_object(metadata)) return fail(err, ERROR_RUNTIME, SAFETENSORS_METADATA " is not an object");
    json_object_foreach(metadata, key, value)
    {
        if (!json_is_string(value))
            return fail(err, ERROR_RUNTIME, SAFETENSORS_METADATA ": the value of \"%.128s\" is not a string",
                        key);
    }
    return true;
}

static int by_place(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

/* Sorts the entries of one shard by their place in the file. Each must begin where the one before ends, and
 * the last must end at the end of the file. */
static bool check_tiling(entry *entries, size_t count, size_t data_size, error *err)
{
    int64_t at = 0;
    if (count > 0) qsort(entries, count, sizeof *entries, by_place);
    for (size_t i = 0; i < count; i++) {
        const entry *e = &entries[i];
        if (e->begin != at)
            return fail(err, ERROR_RUNTIME,
                        "tensor %.128s begins at byte %lld of the data, %s the one before ends at %lld",
                        e->t.name, (long long)e->begin, e->begin < at ? "overlap:" : "hole:", (long long)at);
        at = e->end;
    }
    if ((uint64_t)at != data_size)
        return fail(err, ERROR_RUNTIME, "the tensors end at byte %lld of the data, which have %zu",
                    (long long)at, data_size);
    return true;
}

static bool parse_entries(safetensors *file, json_t *header, const unsigned char *data, size_t data_size,
                          error *err)
{
    size_t first = file->count, room = first + json_object_size(header);
    entry *entries = realloc(file->entries, (room + 1) * sizeof *entries);
    if (entries == NULL) return fail(err, ERROR_RUNTIME, "out of memory");
    file->entries = entries;
    const char *name;
    json_t *value;
    json_object_foreach(header, name, value)
    {
        error reason;
        if (strcmp(name, SAFETENSORS_METADATA) == 0) {
            if (!check_metadata(value, err)) return false;
            continue;
        }
        entry *e = &entries[file->count++];
        *e = (entry){.t.name = name, .shard = file->shard_count - 1};
        if (!parse_tensor(value, e, data, data_size, &reason))
            return fail(err, ERROR_RUNTIME, "tensor %.128s: %s", name, reason.text);
    }
    return check_tiling(entries + first, file->count - first, data_size, err);
}

static bool header_length(const unsigned char *bytes, size_t size, size_t *length, error *err)
{
    if (size < SAFETENSORS_PREFIX)
        return fail(err, ERROR_RUNTIME, "%zu bytes are too few for a safetensors file", size);
    uint64_t value = 0;
    for (int i = 0; i < SAFETENSORS_PREFIX; i++) value |= (uint64_t)bytes[i] << 8 * i;
    if (value > SAFETENSORS_MAX_HEADER)
        return fail(err, ERROR_RUNTIME,
                    "header of %llu bytes, at most %d are allowed (is this a safetensors file?)",
                    (unsigned long long)value, SAFETENSORS_MAX_HEADER);
    if (value > size - SAFETENSORS_PREFIX)
        return fail(err, ERROR_RUNTIME, "truncated: header of %llu bytes, but %zu are left in the file",
                    (unsigned long long)value, size - SAFETENSORS_PREFIX);
    *length = (size_t)value;
    return true;
}

static bool parse_shard(safetensors *file, shard *s, const unsigned char *bytes, size_t size, error *err)
{
    size_t length = 0;
    json_error_t problem;
    if (!header_length(bytes, size, &length, err)) return false;
    const unsigned char *header = bytes + SAFETENSORS_PREFIX, *data = header + length;
    if (length == 0 || header[0] != '{')
        return fail(err, ERROR_RUNTIME, "the header does not start with '{'");
    s->header = json_loadb((const char *)header, length, JSON_REJECT_DUPLICATES, &problem);
    if (s->header == NULL) return fail(err, ERROR_RUNTIME, "header: %s", problem.text);
    return parse_entries(file, s->header, data, size - SAFETENSORS_PREFIX - length, err);
}

/* ---- a file, or the shards of an index ---- */

static safetensors *file_new(const char *name, size_t shards)
{
    safetensors *file = calloc(1, sizeof *file);
    if (file == NULL) return NULL;
    file->shards = calloc(shards + 1, sizeof *file->shards);
    file->name = malloc(strlen(name) + 1);
    if (file->shards == NULL || file->name == NULL) {
        safetensors_close(file);
        return NULL;
    }
    strcpy(file->name, name);
    return file;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const entry *)a)->t.name, ((const entry *)b)->t.name);
}

/* Finds a name; the entries must have been sorted by sort_names. NULL: not found. */
static const entry *find_entry(const safetensors *file, const char *name)
{
    entry wanted = {.t.name = name};
    return file->count == 0 ? NULL : bsearch(&wanted, file->entries, file->count, sizeof wanted, by_name);
}

static bool sort_names(safetensors *file, error *err)
{
    if (file->count > 0) qsort(file->entries, file->count, sizeof *file->entries, by_name);
    for (size_t i = 1; i < file->count; i++)
        if (by_name(&file->entries[i - 1], &file->entries[i]) == 0)
            return fail(err, ERROR_RUNTIME, "%s: tensor %.128s occurs twice", file->name,
                        file->entries[i].t.name);
    return true;
}

static bool add_shard(safetensors *file, const void *bytes, size_t size, const char *name, error *err)
{
    error reason;
    shard *s = &file->shards[file->shard_count++];
    return parse_shard(file, s, bytes, size, &reason) ||
           fail(err, ERROR_RUNTIME, "%s: %s", name, reason.text);
}

static bool add_file(safetensors *file, const char *path, error *err)
{
    file_map *map = &file->shards[file->shard_count].map; // counted, also for safetensors_close, by add_shard
    if (!file_map_open(map, path, err)) return false;
    return add_shard(file, map->data, map->size, path, err);
}

/* Passes the file to the caller if `ok`, else frees it. */
static bool finish(safetensors **out, safetensors *file, bool ok, error *err)
{
    ok = ok && sort_names(file, err);
    *out = ok ? file : NULL;
    if (!ok) safetensors_close(file);
    return ok;
}

bool safetensors_parse(safetensors **file, const void *bytes, size_t size, const char *name, error *err)
{
    *file = NULL;
    safetensors *f = file_new(name, 1);
    if (f == NULL) return fail(err, ERROR_RUNTIME, "%s: out of memory", name);
    return finish(file, f, add_shard(f, bytes, size, name, err), err);
}

/* Opens PATH's folder / SHARD. */
static bool add_beside(safetensors *file, const char *path, const char *shard_name, error *err)
{
    const char *slash = strrchr(path, '/');
    size_t folder = slash == NULL ? 0 : (size_t)(slash - path) + 1;
    char *name = malloc(folder + strlen(shard_name) + 1);
    if (name == NULL) return fail(err, ERROR_RUNTIME, "%s: out of memory", path);
    memcpy(name, path, folder);
    strcpy(name + folder, shard_name);
    bool ok = add_file(file, name, err);
    free(name);
    return ok;
}

/* Every tensor of the index must be in the shard that the index names for it. Shards are opened in the order
 * of the index. */
static bool check_index(const safetensors *file, const safetensors_index *index, error *err)
{
    for (size_t i = 0; i < index->count; i++) {
        const index_entry *want = &index->entries[i];
        const entry *found = find_entry(file, want->tensor);
        if (found == NULL || found->shard != want->shard)
            return fail(err, ERROR_RUNTIME, "%s: tensor %.128s is missing from %.128s", file->name,
                        want->tensor, index->shards[want->shard]);
    }
    return true;
}

static bool open_shards(safetensors **file, const safetensors_index *index, const char *path, error *err)
{
    safetensors *f = file_new(path, index->shard_count);
    if (f == NULL) return fail(err, ERROR_RUNTIME, "%s: out of memory", path);
    bool ok = true;
    for (size_t i = 0; ok && i < index->shard_count; i++) ok = add_beside(f, path, index->shards[i], err);
    if (!finish(file, f, ok, err)) return false;
    if (check_index(*file, index, err)) return true;
    safetensors_close(*file);
    *file = NULL;
    return false;
}

static bool open_sharded(safetensors **file, const char *path, error *err)
{
    file_map map;
    safetensors_index index;
    if (!file_map_open(&map, path, err)) return false;
    bool ok = safetensors_index_parse(&index, map.data, map.size, path, err);
    file_map_close(&map);
    ok = ok && open_shards(file, &index, path, err);
    safetensors_index_close(&index);
    return ok;
}

static bool ends_with(const char *text, const char *end)
{
    size_t length = strlen(text), tail = strlen(end);
    return length >= tail && strcmp(text + length - tail, end) == 0;
}

bool safetensors_open(safetensors **file, const char *path, error *err)
{
    *file = NULL;
    if (ends_with(path, ".index.json")) return open_sharded(file, path, err);
    safetensors *f = file_new(path, 1);
    if (f == NULL) return fail(err, ERROR_RUNTIME, "%s: out of memory", path);
    return finish(file, f, add_file(f, path, err), err);
}

void safetensors_close(safetensors *file)
{
    if (file == NULL) return;
    for (size_t i = 0; i < file->shard_count; i++) {
        json_decref(file->shards[i].header);
        file_map_close(&file->shards[i].map);
    }
    free(file->shards);
    free(file->entries);
    free(file->name);
    free(file);
}

/* ---- look-up ---- */

void safetensors_forget(const safetensors *file, const tensor *t, int64_t first, int64_t count)
{
    const size_t size = tensor_dtype_size(t->dtype);
    const unsigned char *from = (const unsigned char *)t->data + (size_t)first * size;
    for (size_t i = 0; i < file->shard_count; i++)
        file_map_forget(&file->shards[i].map, from, (size_t)count * size);
}

size_t safetensors_count(const safetensors *file)
{
    return file->count;
}

const tensor *safetensors_at(const safetensors *file, size_t index)
{
    return index < file->count ? &file->entries[index].t : NULL;
}

const tensor *safetensors_find(const safetensors *file, const char *name)
{
    const entry *found = find_entry(file, name);
    return found == NULL ? NULL : &found->t;
}

bool safetensors_get(const safetensors *file, const char *name, const tensor **found, error *err)
{
    *found = safetensors_find(file, name);
    return *found != NULL || fail(err, ERROR_RUNTIME, "%s: tensor %.128s is missing", file->name, name);
}

const char *safetensors_metadata(const safetensors *file, const char *key)
{
    for (size_t i = 0; i < file->shard_count; i++) {
        const json_t *metadata = json_object_get(file->shards[i].header, SAFETENSORS_METADATA);
        const char *value = json_string_value(json_object_get(metadata, key));
        if (value != NULL) return value;
    }
    return NULL;
}
