/* Runs a fuzz target over the files of a folder, without libFuzzer: `fuzz_NAME FOLDER`. The target must
 * accept files named good-* and refuse files named bad-*. With other files it must only not crash. Exit
 * status 0, 1 (a wrong result), 2 (no files). */
#include "tests/fuzz/fuzz.h"
#include "train/files/file.h"

#include <string.h>

/* Copies the file into memory of exactly its size, so that the sanitizer sees a read past its end. */
static bool run_bytes(const unsigned char *data, size_t size)
{
    uint8_t *bytes = malloc(size > 0 ? size : 1);
    PROMISE(bytes != NULL);
    if (size > 0) memcpy(bytes, data, size);
    bool accepted = fuzz_accepts(bytes, size);
    free(bytes);
    return accepted;
}

static bool run_file(const file_entry *entry)
{
    file_map map = {0};
    error err;
    const char *slash = strrchr(entry->path, '/'), *name = slash != NULL ? slash + 1 : entry->path;
    if (entry->size > 0) PROMISE(file_map_open(&map, entry->path, &err));
    bool accepted = run_bytes(map.data, map.size);
    file_map_close(&map);
    bool wrong = (strncmp(name, "good-", 5) == 0 && !accepted) || (strncmp(name, "bad-", 4) == 0 && accepted);
    if (wrong) printf("%s: %s\n", entry->path, accepted ? "accepted" : "refused");
    return !wrong;
}

int main(int argc, char **argv)
{
    file_list list = {0};
    error err;
    size_t right = 0;
    if (argc != 2 || !file_list_add(&list, argv[1], &err) || list.count == 0) {
        fprintf(stderr, "usage: %s FOLDER: runs the target over its files\n", argv[0]);
        return 2;
    }
    for (size_t i = 0; i < list.count; i++) right += run_file(&list.entries[i]);
    printf("%zu of %zu files as expected\n", right, list.count);
    bool ok = right == list.count;
    file_list_free(&list);
    return ok ? 0 : 1;
}
