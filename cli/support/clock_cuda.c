/* Marks as events on a CUDA stream. */
#include "cli/support/stage_clock.h"

#ifdef SMOE_HAVE_CUDA
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdlib.h>

typedef struct events {
    int count; // made so far
    cudaEvent_t at[];
} events;

static void close_events(void *state)
{
    events *freed = state;
    for (int i = 0; i < freed->count; i++) (void)cudaEventDestroy(freed->at[i]);
    free(freed);
}

static void *open_events(int marks)
{
    events *made = malloc(sizeof *made + (size_t)marks * sizeof made->at[0]);
    if (!made) return NULL;
    made->count = 0;
    while (made->count < marks && cudaEventCreate(&made->at[made->count]) == cudaSuccess) made->count++;
    if (made->count == marks) return made;
    close_events(made);
    return NULL;
}

static bool mark_event(void *state, int index, void *stream)
{
    return cudaEventRecord(((events *)state)->at[index], stream) == cudaSuccess;
}

static double ms_between(void *state, int from, int to)
{
    const events *all = state;
    float ms = NAN;
    return cudaEventElapsedTime(&ms, all->at[from], all->at[to]) == cudaSuccess ? (double)ms : NAN;
}

const clock_kind clock_cuda = {open_events, close_events, mark_event, ms_between};
#endif
