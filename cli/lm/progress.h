/* Progress on stderr: on a terminal a line that is redrawn in place, else a line now and then. */
#ifndef CLI_PROGRESS_H
#define CLI_PROGRESS_H

#include "train/run/average.h"
#include "train/run/train.h"

typedef struct progress {
    bool terminal;
    double started, shown; // the clock at the start, and when something was shown last
    bool drawn;            // a line without its end is on the terminal
    average loss;
} progress;

progress progress_start(void);

/* A train_observer; user is the progress. Not on a terminal, it writes a line for each line of the log. */
void progress_show(void *user, const train_report *report);

/* Of an evaluation_watch; user is the progress. Not on a terminal, it writes a line every ten seconds. */
void progress_show_pass(void *user, double share);

/* Ends the line, so that later output starts on a new line. */
void progress_end(progress *p);

#endif
