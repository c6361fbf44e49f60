/* Says on stderr which binary files of folders `smoe train` and `smoe eval` have left out. */
#ifndef CLI_SKIPPED_H
#define CLI_SKIPPED_H

#include "train/data/tokens.h"

void show_skipped(const tokens *data);

#endif
