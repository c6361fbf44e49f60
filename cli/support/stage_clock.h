/* Times of the stages of a step. Marks are set on the stream as the work is enqueued (the library's on_stage
 * callback sets those of the stages) and read after the step. A mark is the monotonic clock on the CPU, and
 * on a GPU an event that the stream passes. */
#ifndef CLI_STAGE_CLOCK_H
#define CLI_STAGE_CLOCK_H

#include "harness/device.h"

enum { STAGE_COUNT = 13, CLOCK_MARKS = 4096, CLOCK_SPANS = CLOCK_MARKS / 2 };

/* 0..STAGE_COUNT-1 in the order of smoe_stage, and back. */
int stage_index(smoe_stage stage);
smoe_stage stage_at(int index);

/* A kind of marks. */
typedef struct clock_kind {
    void *(*open)(int marks); // NULL when there is no memory
    void (*close)(void *state);
    bool (*mark)(void *state, int index, void *stream); // when the stream's work so far is done
    double (*ms)(void *state, int from, int to); // valid when the stream has passed both; otherwise NaN
} clock_kind;

extern const clock_kind clock_cpu;
#ifdef SMOE_HAVE_CUDA
extern const clock_kind clock_cuda; // clock_cuda.c
#endif

/* How time is measured on a device. */
const clock_kind *clock_of(const device *on);

typedef struct stage_clock {
    const clock_kind *kind;
    void *state;
    bool paused; // stages set no marks: their calls are captured in a graph, or not timed
    void (*on_end)(void *user, int stage); // called at the end of every stage, even without marks; or NULL
    void *on_end_user;
    int marks;
    struct {
        int stage, from, to; // marks
    } spans[CLOCK_SPANS];
    int count;
    bool full;   // there were more stages than room
    bool failed; // a mark could not be set
} stage_clock;

bool stage_clock_open(stage_clock *clock, const clock_kind *kind);
void stage_clock_close(stage_clock *clock);

void stage_clock_reset(stage_clock *clock);

/* Sets a mark on the stream and returns its number. */
int stage_clock_mark(stage_clock *clock, void *stream);

/* The on_stage callback; `user` is the clock. */
void stage_clock_on_stage(void *user, smoe_stage stage, int end, void *stream);

double stage_clock_ms(const stage_clock *clock, int from, int to);

/* ms[STAGE_COUNT]: adds what each stage took since the reset, in all of its calls. */
void stage_clock_add(const stage_clock *clock, double *ms);

#endif
