/* See skipped.h. */
#include "cli/model/skipped.h"

#include <stdio.h>

void show_skipped(const tokens *data)
{
    const char *first;
    const size_t count = tokens_skipped(data, &first);
    if (count == 1) fprintf(stderr, "1 binary file is left out of the folders: %s\n", first);
    if (count > 1)
        fprintf(stderr, "%zu binary files are left out of the folders, the first: %s\n", count, first);
}
