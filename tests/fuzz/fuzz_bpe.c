/* The input is a table of tokens, a zero byte and a text, or a table alone. A table that is accepted must
 * encode any text to tokens whose bytes are the text; the table itself is used as a text too. */
#include "tests/fuzz/fuzz.h"
#include "train/data/bpe.h"

#include <string.h>

static void check_tokens(const bpe *table)
{
    size_t length;
    for (int64_t token = 0; token < table->tokens; token++) {
        bpe_bytes(table, token, &length);
        PROMISE(token == table->end ? length == 0 : length >= 1 && length <= BPE_WORD);
    }
    PROMISE(table->end == -1 || table->end == table->tokens - 1);
    bpe_bytes(table, -1, &length);
    PROMISE(length == 0);
    bpe_bytes(table, table->tokens, &length);
    PROMISE(length == 0);
}

static void check_text(const bpe *table, const uint8_t *text, size_t size)
{
    uint16_t *tokens = malloc(size * sizeof *tokens + 1); // no larger, so the sanitizer sees a write past it
    PROMISE(tokens != NULL);
    size_t count = bpe_encode(table, text, size, tokens), at = 0;
    PROMISE(count <= size);
    for (size_t i = 0; i < count; i++) {
        size_t length;
        const unsigned char *bytes = bpe_bytes(table, tokens[i], &length);
        PROMISE(length >= 1 && length <= size - at && memcmp(bytes, text + at, length) == 0);
        at += length;
    }
    PROMISE(at == size);
    free(tokens);
}

bool fuzz_accepts(const uint8_t *bytes, size_t size)
{
    bpe table;
    error err = {0};
    const uint8_t *zero = size > 0 ? memchr(bytes, 0, size) : NULL;
    size_t length = zero != NULL ? (size_t)(zero - bytes) : size;
    if (!bpe_parse(&table, bytes, length, "fuzz", &err)) {
        PROMISE(table.slots == NULL && err.code == ERROR_RUNTIME && err.text[0] != '\0');
        return false;
    }
    check_tokens(&table);
    check_text(&table, bytes, length);
    if (zero != NULL) check_text(&table, zero + 1, size - length - 1);
    bpe_free(&table);
    return true;
}
