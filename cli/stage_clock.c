/* See stage_clock.h. */
#include "cli/stage_clock.h"

#include <assert.h>
#include <time.h>

static_assert(SMOE_STAGE_ROUTER_GEMM == 0 && SMOE_STAGE_ROUTER_BWD == 10 * (STAGE_COUNT - 1),
              "stages are numbered 0, 10, 20, ...");

int stage_index(smoe_stage stage)
{
    return (int)stage / 10;
}

smoe_stage stage_at(int index)
{
    return (smoe_stage)(10 * index);
}

void stage_clock_reset(stage_clock *clock)
{
    clock->marks = clock->count = 0;
    clock->full = false;
}

int stage_clock_mark(stage_clock *clock)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (clock->marks == CLOCK_MARKS) {
        clock->full = true;
        return CLOCK_MARKS - 1;
    }
    clock->mark_ns[clock->marks] = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    return clock->marks++;
}

void stage_clock_on_stage(void *user, smoe_stage stage, int end, void *stream)
{
    (void)stream;
    stage_clock *clock = user;
    const int mark = stage_clock_mark(clock);
    if (!end) {
        if (clock->count == CLOCK_SPANS) {
            clock->full = true;
            return;
        }
        clock->spans[clock->count].stage = stage_index(stage);
        clock->spans[clock->count].from = mark;
        clock->spans[clock->count++].to = mark;
        return;
    }
    for (int i = clock->count - 1; i >= 0; i--)
        if (clock->spans[i].stage == stage_index(stage)) {
            clock->spans[i].to = mark;
            return;
        }
}

double stage_clock_ms(const stage_clock *clock, int from, int to)
{
    return (double)(clock->mark_ns[to] - clock->mark_ns[from]) * 1e-6;
}

void stage_clock_add(const stage_clock *clock, double *ms)
{
    for (int i = 0; i < clock->count; i++)
        ms[clock->spans[i].stage] += stage_clock_ms(clock, clock->spans[i].from, clock->spans[i].to);
}
