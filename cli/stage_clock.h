/* Times of the stages of a step. Marks are set on the stream as the work is enqueued (the library's on_stage
 * callback sets those of the stages) and read after the step; on the CPU a mark is the
 * monotonic clock. */
#ifndef CLI_STAGE_CLOCK_H
#define CLI_STAGE_CLOCK_H

#include "cli/device.h"

enum { STAGE_COUNT = 13, CLOCK_MARKS = 4096, CLOCK_SPANS = CLOCK_MARKS / 2 };

/* 0..STAGE_COUNT-1 in the order of smoe_stage, and back. */
int stage_index(smoe_stage stage);
smoe_stage stage_at(int index);

typedef struct stage_clock {
    int64_t mark_ns[CLOCK_MARKS];
    int marks;
    struct {
        int stage, from, to; // marks
    } spans[CLOCK_SPANS];
    int count;
    bool full; // there were more stages than room
} stage_clock;

void stage_clock_reset(stage_clock *clock);

/* Sets a mark and returns its number. */
int stage_clock_mark(stage_clock *clock);

/* The on_stage callback; `user` is the clock. */
void stage_clock_on_stage(void *user, smoe_stage stage, int end, void *stream);

double stage_clock_ms(const stage_clock *clock, int from, int to);

/* ms[STAGE_COUNT]: adds what each stage took since the reset, in all of its calls. */
void stage_clock_add(const stage_clock *clock, double *ms);

#endif
