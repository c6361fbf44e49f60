/* See data.h. */
#include "cli/model/data.h"

#include <stdio.h>

void show_skipped(const tokens *data)
{
    const char *first;
    const size_t count = tokens_skipped(data, &first);
    if (count == 1) fprintf(stderr, "1 binary file is left out of the folders: %s\n", first);
    if (count > 1)
        fprintf(stderr, "%zu binary files are left out of the folders, the first: %s\n", count, first);
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
