/* Says on stderr what `smoe train` and `smoe eval` do with the files that were given. */
#ifndef CLI_DATA_H
#define CLI_DATA_H

#include "train/data/tokens.h"

/* The binary files of folders that were left out. */
void show_skipped(const tokens *data);

/* The token files that are for validation; a warning if no name says which are. Nothing for texts. */
void show_validation(const tokens *data);

#endif
