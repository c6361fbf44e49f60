/* Times of work on a device that computes behind the host's back, at the clocks it keeps up: the same work
 * again and again, first untimed until the device has settled, then with a mark before and after every
 * launch. */
#ifndef CLI_SUSTAINED_H
#define CLI_SUSTAINED_H

#include "cli/stage_clock.h"
#include "train/error.h"

typedef struct sustained_job {
    bool (*before)(void *user, error *err); // put on the stream ahead of every launch, not timed; or NULL
    bool (*launch)(void *user, error *err); // puts the work on the stream
    void *user;
} sustained_job;

typedef struct sustained {
    stage_clock *clock; // paused meanwhile, and reset
    const device *on;
    void *stream;
    double settle_ms; // of untimed launches
} sustained;

/* A launch has two marks, and all launches of one call are enqueued before the first is read. */
enum { SUSTAINED_MOST = CLOCK_MARKS / 2, SUSTAINED_SETTLE_MOST = 20000 };

/* ms[launches], launches <= SUSTAINED_MOST: from mark to mark, the marks one behind the other on the stream.
 */
bool sustained_time(const sustained *how, const sustained_job *job, int launches, double *ms, error *err);

/* Launches in each of `rounds` rounds so that all of them take about `seconds` when one of everything takes
 * `step_ms`; `repeats` (0: as time allows) in all, rounded up to whole rounds. At least 2, at most `most`. */
int sustained_launches(double seconds, double step_ms, int64_t repeats, int rounds, int most);

#endif
