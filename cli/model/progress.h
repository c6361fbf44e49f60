/* A line of progress on stderr, redrawn in place. Nothing is shown if stderr is not a terminal. */
#ifndef CLI_PROGRESS_H
#define CLI_PROGRESS_H

#include "train/run/train.h"

typedef struct progress {
    bool terminal;
    double drawn; // the clock when the line was last drawn
    double unit;  // factor from nats to the unit that is shown: 1 / ln 2 for bits per byte
    double loss;  // smoothed
} progress;

progress progress_start(bool bits);

/* A train_observer; user is the progress. */
void progress_show(void *user, const train_report *report);

/* Ends the line, so that later output starts on a new line. */
void progress_end(progress *p);

#endif
