/* The index of a checkpoint in several safetensors files, model.safetensors.index.json:
 *
 *     {"metadata": {..}, "weight_map": {"tensor name": "file name", ..}}
 *
 * The files must be in the folder of the index: a name with a folder in it is refused. */
#ifndef TRAIN_SAFETENSORS_INDEX_H
#define TRAIN_SAFETENSORS_INDEX_H

#include "base/error.h"

#include <stdbool.h>
#include <stddef.h>

typedef struct index_entry {
    const char *tensor;
    size_t shard; // in 0..shard_count - 1
} index_entry;

typedef struct safetensors_index {
    const char **shards; // file names, sorted, each once
    size_t shard_count;
    index_entry *entries;
    size_t count;
    void *json; // holds the texts
} safetensors_index;

/* `name` stands for the file in messages. On failure *index is zeroed. */
bool safetensors_index_parse(safetensors_index *index, const void *text, size_t size, const char *name,
                             error *err);
void safetensors_index_close(safetensors_index *index); // a zeroed one is fine

#endif
