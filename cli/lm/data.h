/* Says on stderr what `smoe train` and `smoe eval` do with the files that were given. */
#ifndef CLI_DATA_H
#define CLI_DATA_H

#include "train/data/tokens.h"

/* The binary files of folders that were left out; a warning for files that are read as text although they are
 * probably none. */
void show_skipped(const tokens *data);

/* How many files are read, as what, and how many tokens they have. */
void show_files(const tokens *data);

/* The token files that are for validation; a warning if no name says which are. Nothing for texts. */
void show_validation(const tokens *data);

#endif
