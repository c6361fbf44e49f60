/* Any bytes as a model.safetensors.index.json. An index that is accepted must name only files of its own
 * folder, and each once. */
#include "tests/fuzz/fuzz.h"
#include "train/files/safetensors_index.h"

#include <string.h>

bool fuzz_accepts(const uint8_t *bytes, size_t size)
{
    safetensors_index index;
    error err = {0};
    if (!safetensors_index_parse(&index, bytes, size, "fuzz", &err)) {
        PROMISE(err.code == ERROR_RUNTIME && err.text[0] != '\0');
        PROMISE(index.shards == NULL && index.entries == NULL && index.json == NULL);
        return false;
    }
    PROMISE(index.shard_count <= index.count && (index.shard_count > 0) == (index.count > 0));
    for (size_t i = 0; i < index.shard_count; i++) {
        const char *name = index.shards[i];
        PROMISE(name[0] != '\0' && name[0] != '.' && strchr(name, '/') == NULL);
        PROMISE(i == 0 || strcmp(index.shards[i - 1], name) < 0);
    }
    for (size_t i = 0; i < index.count; i++)
        PROMISE(index.entries[i].tensor != NULL && index.entries[i].shard < index.shard_count);
    safetensors_index_close(&index);
    return true;
}
