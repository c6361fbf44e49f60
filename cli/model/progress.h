/* A line of progress on stderr, redrawn in place; nothing when stderr is no terminal. */
#ifndef CLI_PROGRESS_H
#define CLI_PROGRESS_H

#include "train/train.h"

typedef struct progress {
    bool terminal;
    double drawn; // the clock when the line was last drawn
    double unit;  // what turns nats into what is shown: 1 / ln 2 for bits per byte
    double loss;  // smoothed
} progress;

progress progress_start(bool bits);

/* A train_observer; user is the progress. */
void progress_show(void *user, const train_report *report);

/* Ends the line, so that what follows starts on its own. */
void progress_end(progress *p);

#endif
