/* See safetensors_index.h. */
#include "train/files/safetensors_index.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

static int by_name(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Is this the name of a file in the folder of the index, not hidden and without a path to another folder? */
static bool is_file_name(const char *text)
{
    return text != NULL && text[0] != '\0' && text[0] != '.' && strchr(text, '/') == NULL;
}

/* Reads every tensor, and its file name into `shards`, which is not sorted yet. */
static bool list_entries(safetensors_index *index, json_t *weights, error *err)
{
    const char *key;
    json_t *value;
    json_object_foreach(weights, key, value)
    {
        const char *file = json_string_value(value);
        if (!is_file_name(file))
            return fail(err, ERROR_RUNTIME, "weight_map: the value of \"%.128s\" is not a file name", key);
        index->shards[index->count] = file;
        index->entries[index->count++].tensor = key;
    }
    return true;
}

static void sort_shards(safetensors_index *index)
{
    if (index->count > 0) qsort(index->shards, index->count, sizeof *index->shards, by_name);
    for (size_t i = 0; i < index->count; i++)
        if (i == 0 || strcmp(index->shards[i], index->shards[index->shard_count - 1]) != 0)
            index->shards[index->shard_count++] = index->shards[i];
}

static void place_entries(safetensors_index *index, const json_t *weights)
{
    for (size_t i = 0; i < index->count; i++) {
        const char *file = json_string_value(json_object_get(weights, index->entries[i].tensor));
        const char **found = bsearch(&file, index->shards, index->shard_count, sizeof file, by_name);
        index->entries[i].shard = (size_t)(found - index->shards);
    }
}

static bool read_root(safetensors_index *index, json_t *root, error *err)
{
    json_t *weights = json_object_get(root, "weight_map");
    if (!json_is_object(weights)) return fail(err, ERROR_RUNTIME, "weight_map is missing or not an object");
    const size_t count = json_object_size(weights);
    index->shards = calloc(count + 1, sizeof *index->shards);
    index->entries = calloc(count + 1, sizeof *index->entries);
    if (index->shards == NULL || index->entries == NULL) return fail(err, ERROR_RUNTIME, "out of memory");
    if (!list_entries(index, weights, err)) return false;
    sort_shards(index);
    place_entries(index, weights);
    return true;
}

bool safetensors_index_parse(safetensors_index *index, const void *text, size_t size, const char *name,
                             error *err)
{
    json_error_t problem;
    error reason;
    *index = (safetensors_index){0};
    json_t *root = json_loadb(text, size, JSON_REJECT_DUPLICATES, &problem);
    if (root == NULL) return fail(err, ERROR_RUNTIME, "%s: line %d: %s", name, problem.line, problem.text);
    index->json = root;
    if (read_root(index, root, &reason)) return true;
    safetensors_index_close(index);
    return fail(err, ERROR_RUNTIME, "%s: %s", name, reason.text);
}

void safetensors_index_close(safetensors_index *index)
{
    free(index->shards);
    free(index->entries);
    json_decref(index->json);
    *index = (safetensors_index){0};
}
