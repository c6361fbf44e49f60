/* See data.h. */
#include "cli/lm/data.h"

#include <stdio.h>

static void show_doubts(const tokens *data)
{
    static const char *const what[TEXT_DOUBTS] = {
        [TEXT_BINARY] = "no text (it has a byte 0): all its bytes are read",
        [TEXT_NOT_UTF8] = "not UTF-8 (Latin-1? convert it with iconv): its bytes are read as they are",
        [TEXT_JSON] = "JSON: its keys, quotes and braces are read as text too"};
    for (int doubt = TEXT_FINE + 1; doubt < TEXT_DOUBTS; doubt++) {
        const char *first;
        const size_t count = tokens_doubted(data, (text_doubt)doubt, &first);
        if (count > 0) fprintf(stderr, "warning: %s is %s", first, what[doubt]);
        if (count > 1) fprintf(stderr, "; so are %zu other files", count - 1);
        if (count > 0) fputc('\n', stderr);
    }
}

void show_files(const tokens *data)
{
    static const char *const held[] = {
        [TOKENS_HELD_TAILS] = ", the last 5% of each file", [TOKENS_HELD_FILES] = ", every 20th file"};
    const tokens_held kind = tokens_validation_kind(data);
    const size_t files = tokens_file_count(data), inflated = tokens_inflated(data);
    fprintf(stderr, "reads %zu %s%s", files, tokens_are_text(data) ? "text" : "token file",
            files == 1 ? "" : "s");
    if (inflated > 0) fprintf(stderr, " (%zu inflated from .gz)", inflated);
    if (tokens_are_text(data)) fputs(tokens_are_bytes(data) ? ", a byte a token" : ", encoded", stderr);
    fprintf(stderr, ": %lld tokens to train on", (long long)tokens_train_count(data));
    if (tokens_validation_count(data) > 0)
        fprintf(stderr, ", %lld to validate on%s", (long long)tokens_validation_count(data),
                kind == TOKENS_HELD_TAILS || kind == TOKENS_HELD_FILES ? held[kind] : "");
    fputc('\n', stderr);
}

void show_skipped(const tokens *data)
{
    const char *first;
    const size_t count = tokens_skipped(data, &first);
    if (count == 1) fprintf(stderr, "1 binary file is left out of the folders: %s\n", first);
    if (count > 1)
        fprintf(stderr, "%zu binary files are left out of the folders, the first: %s\n", count, first);
    show_doubts(data);
}

/* At most SHOWN of them by name. */
static void show_named(const tokens *data)
{
    enum { SHOWN = 4 };
    size_t count = 0;
    while (tokens_validation_file(data, count)) count++;
    fprintf(stderr, "%s %zu of %zu token files, by name:",
            tokens_validation_count(data) > 0 ? "validates on" : "does not train on", count,
            tokens_file_count(data));
    for (size_t i = 0; i < count && i < SHOWN; i++)
        fprintf(stderr, "%s %s", i ? "," : "", tokens_validation_file(data, i));
    if (count > SHOWN) fprintf(stderr, " and %zu more", count - SHOWN);
    fputc('\n', stderr);
}

void show_validation(const tokens *data)
{
    const tokens_held held = tokens_validation_kind(data);
    if (held == TOKENS_HELD_NAMED)
        show_named(data);
    else if (held != TOKENS_HELD_NONE && !tokens_are_text(data))
        fprintf(stderr,
                "warning: no token file is for validation by its name (val, valid or validation, as in "
                "data_val_000.bin); validates on %s\n",
                held == TOKENS_HELD_FILES ? "every 20th file" : "the last 5% of each file");
}
