/* See stage_clock.h. */
#include "cli/support/stage_clock.h"

#include <assert.h>
#include <stdint.h>
#include <stdlib.h>
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

/* ---- The monotonic clock ---- */

static void *cpu_open(int marks)
{
    return calloc((size_t)marks, sizeof(int64_t));
}

static void cpu_close(void *state)
{
    free(state);
}

static bool cpu_mark(void *state, int index, void *stream)
{
    struct timespec now;
    int64_t *ns = state;
    (void)stream;
    clock_gettime(CLOCK_MONOTONIC, &now);
    ns[index] = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    return true;
}

static double cpu_ms(void *state, int from, int to)
{
    const int64_t *ns = state;
    return (double)(ns[to] - ns[from]) * 1e-6;
}

const clock_kind clock_cpu = {cpu_open, cpu_close, cpu_mark, cpu_ms};

/* ---- Marks and spans ---- */

const clock_kind *clock_of(const device *on)
{
#ifdef SMOE_HAVE_CUDA
    if (on->backend == SMOE_BACKEND_CUDA) return &clock_cuda;
#endif
    (void)on;
    return &clock_cpu;
}

bool stage_clock_open(stage_clock *clock, const clock_kind *kind)
{
    *clock = (stage_clock){.kind = kind, .state = kind->open(CLOCK_MARKS)};
    return clock->state != NULL;
}

void stage_clock_close(stage_clock *clock)
{
    if (clock->state) clock->kind->close(clock->state);
    clock->state = NULL;
}

void stage_clock_reset(stage_clock *clock)
{
    clock->marks = clock->count = 0;
    clock->full = clock->failed = false;
}

int stage_clock_mark(stage_clock *clock, void *stream)
{
    if (clock->marks == CLOCK_MARKS) {
        clock->full = true;
        return CLOCK_MARKS - 1;
    }
    if (!clock->kind->mark(clock->state, clock->marks, stream)) clock->failed = true;
    return clock->marks++;
}

void stage_clock_on_stage(void *user, smoe_stage stage, int end, void *stream)
{
    stage_clock *clock = user;
    if (end && clock->on_end) clock->on_end(clock->on_end_user, stage_index(stage));
    if (clock->paused) return;
    const int mark = stage_clock_mark(clock, stream);
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
    return clock->kind->ms(clock->state, from, to);
}

void stage_clock_add(const stage_clock *clock, double *ms)
{
    for (int i = 0; i < clock->count; i++)
        ms[clock->spans[i].stage] += stage_clock_ms(clock, clock->spans[i].from, clock->spans[i].to);
}
