/* See sustained.h. */
#include "cli/bench/sustained.h"

#include <limits.h>
#include <math.h>

static bool launch_once(const sustained_job *job, error *err)
{
    return (!job->before || job->before(job->user, err)) && job->launch(job->user, err);
}

/* A number of launches between marks, into ms[launches]. */
static bool time_launches(const sustained *how, const sustained_job *job, int launches, double *ms,
                          error *err)
{
    stage_clock_reset(how->clock);
    for (int i = 0; i < launches; i++) {
        if (job->before && !job->before(job->user, err)) return false;
        stage_clock_mark(how->clock, how->stream);
        if (!job->launch(job->user, err)) return false;
        stage_clock_mark(how->clock, how->stream);
    }
    if (!how->on->sync()) return fail(err, ERROR_RUNTIME, "the device reported an error");
    if (how->clock->full || how->clock->failed)
        return fail(err, ERROR_RUNTIME, "the device could not set a mark of time");
    for (int i = 0; i < launches; i++) {
        ms[i] = stage_clock_ms(how->clock, 2 * i, 2 * i + 1);
        if (isnan(ms[i])) return fail(err, ERROR_RUNTIME, "the device could not tell a time");
    }
    return true;
}

/* The first launch warms up; the second says how many it takes to settle. They count, but were waited for:
 * one more at least. */
static bool settle(const sustained *how, const sustained_job *job, error *err)
{
    enum { GUESSES = 2 };
    double guess[GUESSES] = {0};
    if (!time_launches(how, job, GUESSES, guess, err)) return false;
    const double last = guess[GUESSES - 1],
                 wanted = last > 0 ? ceil(how->settle_ms / last) : SUSTAINED_SETTLE_MOST,
                 more = wanted > 0 ? fmax(wanted - GUESSES, 1) : 0;
    for (int i = 0; i < SUSTAINED_SETTLE_MOST && i < more; i++)
        if (!launch_once(job, err)) return false;
    return true;
}

bool sustained_time(const sustained *how, const sustained_job *job, int launches, double *ms, error *err)
{
    const bool before = how->clock->paused;
    how->clock->paused = true;
    const bool good = settle(how, job, err) && time_launches(how, job, launches, ms, err);
    how->clock->paused = before;
    return good;
}

static int within(double value, int least, int most)
{
    return value <= least ? least : value >= most ? most : (int)value;
}

sustained_turns sustained_take_turns(double seconds, double step_ms, double settle_ms, int64_t repeats,
                                     int most)
{
    sustained_turns turns;
    if (repeats > 0) {
        turns.rounds = within(ceil((double)repeats / most), SUSTAINED_LEAST_ROUNDS, INT_MAX);
        turns.launches = within(ceil((double)repeats / turns.rounds), 1, most);
        return turns;
    }
    turns.launches = within(settle_ms / step_ms, 1, most);
    turns.rounds = within(1e3 * seconds / (settle_ms + turns.launches * step_ms), SUSTAINED_LEAST_ROUNDS,
                          SUSTAINED_MOST_ROUNDS);
    return turns;
}
