/* What tests/python/test_tokenize.py compares with: `bpe_encode TABLE < text > tokens` writes uint16 tokens,
 * and what it took to standard error as one JSON object. Exit status 0, 2 (usage), 3 (a table or text that
 * cannot be read). */
#define _POSIX_C_SOURCE 200809L
#include "base/clock.h"
#include "train/data/bpe.h"
#include "train/files/file.h"

#include <stdio.h>
#include <stdlib.h>

/* All of standard input; NULL when there is no memory. */
static unsigned char *read_input(size_t *size)
{
    size_t room = 1 << 20;
    unsigned char *text = malloc(room);
    for (*size = 0; text != NULL;) {
        size_t got = fread(text + *size, 1, room - *size, stdin);
        *size += got;
        if (*size < room) return text;
        unsigned char *more = realloc(text, room *= 2);
        if (more == NULL) free(text);
        text = more;
    }
    return NULL;
}

static int encode(const bpe *table, const unsigned char *text, size_t size)
{
    uint16_t *tokens = malloc(size * sizeof *tokens + 1);
    if (tokens == NULL) return 3;
    double started = clock_seconds();
    size_t count = bpe_encode(table, text, size, tokens);
    double seconds = clock_seconds() - started;
    fprintf(stderr, "{\"bytes\": %zu, \"tokens\": %zu, \"seconds\": %.6f}\n", size, count, seconds);
    bool written = fwrite(tokens, sizeof *tokens, count, stdout) == count && fflush(stdout) == 0;
    free(tokens);
    return written ? 0 : 3;
}

int main(int argc, char **argv)
{
    error err = {0};
    file_map map = {0};
    bpe table = {0};
    if (argc != 2) {
        fprintf(stderr, "usage: %s TABLE < text > tokens\n", argv[0]);
        return 2;
    }
    if (!file_map_open(&map, argv[1], &err) || !bpe_parse(&table, map.data, map.size, argv[1], &err)) {
        fprintf(stderr, "%s\n", err.text);
        file_map_close(&map);
        return 3;
    }
    size_t size;
    unsigned char *text = read_input(&size);
    int status = text != NULL ? encode(&table, text, size) : 3;
    free(text);
    bpe_free(&table);
    file_map_close(&map);
    return status;
}
