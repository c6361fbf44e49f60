/* Times of work on a device that computes behind the host's back, at the clocks it keeps up: the same work
 * again and again, first untimed until the device has settled, then with a mark before and after every
 * launch. */
#ifndef CLI_SUSTAINED_H
#define CLI_SUSTAINED_H

#include "base/error.h"
#include "cli/support/stage_clock.h"

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

/* ---- Jobs that take turns ---- */

/* `rounds` rounds with `launches` timed launches of every job in each. */
typedef struct sustained_turns {
    int rounds, launches;
} sustained_turns;

enum { SUSTAINED_LEAST_ROUNDS = 2, SUSTAINED_MOST_ROUNDS = 64 };

/* So that all of it takes about `seconds` when one launch of everything takes `step_ms` and what settles in a
 * round `settle_ms`; a round is to be half of each, for short rounds are many: a card at its power limit
 * swings about it within a second, and jobs that are to be compared must see the same of the swing. `repeats`
 * (0: as time allows) launches in all instead, rounded up to whole rounds. At least 1, at most `most` a
 * round. */
sustained_turns sustained_take_turns(double seconds, double step_ms, double settle_ms, int64_t repeats,
                                     int most);

#endif
