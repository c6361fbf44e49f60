/* See bench_cuda.h. */
#include "cli/bench_cuda.h"

#ifdef SMOE_HAVE_CUDA
#include "cli/cuda_graph.h"
#include "cli/sustained.h"
#include "cli/yardstick_cuda.h"

#include <math.h>
#include <stdlib.h>

enum { ROUNDS = 3, MOST_IN_ROUND = 334, SETTLE_MS = 50 };
_Static_assert((int)MOST_IN_ROUND <= (int)SUSTAINED_MOST, "a round's launches fit between the clock's marks");

typedef struct meter {
    bench_case *c;
    cuda_yardstick yardstick;
    sustained how;
    void *prepare, *forward, *backward; // graphs; NULL where there is nothing to run
    smoe_stage stage;                   // whose GEMMs job_gemm runs
    double *samples;                    // (MOST_IN_ROUND)
} meter;

/* ---- Graphs ---- */

/* Records what `enqueue` puts on the stream; marks of stages would be recorded too, so the clock is paused.
 */
static void *record(bench_case *c, bool (*enqueue)(bench_case *, error *), error *err)
{
    if (!cuda_graph_begin(c->stream)) {
        fail(err, ERROR_RUNTIME, "the stream does not record a graph");
        return NULL;
    }
    c->clock.paused = true;
    const bool good = enqueue(c, err);
    c->clock.paused = false;
    void *graph = cuda_graph_end(c->stream);
    if (graph && good) return graph;
    cuda_graph_free(graph);
    if (good) fail(err, ERROR_RUNTIME, "the pass could not be recorded as a graph");
    return NULL;
}

static bool record_all(meter *m, error *err)
{
    bench_case *c = m->c;
    if (bench_prepared_apart(c) && !(m->prepare = record(c, bench_enqueue_prepare, err))) return false;
    if (!(m->forward = record(c, bench_enqueue_forward, err))) return false;
    return !c->settings.backward || (m->backward = record(c, bench_enqueue_backward, err));
}

static bool launch(const meter *m, void *graph, error *err)
{
    if (!graph || cuda_graph_launch(graph, m->c->stream)) return true;
    return fail(err, ERROR_RUNTIME, "a graph could not be launched");
}

/* ---- Jobs ---- */

static bool before_forward(void *user, error *err)
{
    const meter *m = user;
    return launch(m, m->prepare, err);
}

static bool job_forward(void *user, error *err)
{
    const meter *m = user;
    return launch(m, m->forward, err);
}

static bool job_backward(void *user, error *err)
{
    const meter *m = user;
    return launch(m, m->backward, err);
}

static bool job_gemm(void *user, error *err)
{
    const meter *m = user;
    return cuda_yardstick_gemm(&m->yardstick, m->stage, err);
}

static bool job_copy(void *user, error *err)
{
    const meter *m = user;
    return cuda_yardstick_copy(&m->yardstick, err);
}

static bool time_job(meter *m, bool (*before)(void *, error *), bool (*work)(void *, error *), int launches,
                     error *err)
{
    const sustained_job job = {before, work, m};
    return sustained_time(&m->how, &job, launches, m->samples, err);
}

/* ---- A round: one job after the other, the same number of launches each ---- */

static bool time_passes(meter *m, int launches, bench_times *times, error *err)
{
    if (!time_job(m, before_forward, job_forward, launches, err)) return false;
    for (int i = 0; i < launches; i++) times[i].forward = m->samples[i];
    if (!m->backward) return true;
    if (!time_job(m, NULL, job_backward, launches, err)) return false;
    for (int i = 0; i < launches; i++) times[i].backward = m->samples[i];
    return true;
}

/* One step on the plain stream. A whole pass goes ahead of it, untimed: while the GPU works on that, the host
 * gets all of the step's launches and events into the queue. */
static bool time_one_step(meter *m, double *stage, error *err)
{
    bench_case *c = m->c;
    c->clock.paused = true;
    bool good =
        before_forward(m, err) && job_forward(m, err) && job_backward(m, err) && before_forward(m, err);
    stage_clock_reset(&c->clock);
    c->clock.paused = false;
    good = good && bench_enqueue_forward(c, err) && (!m->backward || bench_enqueue_backward(c, err));
    if (!c->settings.device->sync()) return good && fail(err, ERROR_RUNTIME, "the device reported an error");
    if (!good) return false;
    if (c->clock.full || c->clock.failed)
        return fail(err, ERROR_RUNTIME, "more stages than %d, or the device could not set a mark of time",
                    CLOCK_SPANS);
    stage_clock_add(&c->clock, stage);
    return true;
}

static bool time_stages(meter *m, int launches, bench_times *times, error *err)
{
    for (int i = 0; i < launches; i++)
        if (!time_one_step(m, times[i].stage, err)) return false;
    return true;
}

static bool time_gemms(meter *m, int launches, bench_times *times, error *err)
{
    static const smoe_stage stages[] = {SMOE_STAGE_UP,  SMOE_STAGE_DOWN,    SMOE_STAGE_DH,
                                        SMOE_STAGE_DW2, SMOE_STAGE_DX_ROWS, SMOE_STAGE_DW1};
    const double scale = cuda_yardstick_scale(&m->c->layer, m->yardstick.rows);
    for (size_t s = 0; s < sizeof stages / sizeof stages[0]; s++) {
        const int index = stage_index(stages[s]);
        if (stages[s] >= SMOE_STAGE_DH && !m->backward) continue;
        m->stage = stages[s];
        if (m->yardstick.gemms && !time_job(m, NULL, job_gemm, launches, err)) return false;
        for (int i = 0; i < launches; i++)
            times[i].dense[index] = m->yardstick.gemms ? scale * m->samples[i] : NAN;
    }
    return true;
}

static bool time_copy(meter *m, int launches, bench_times *times, error *err)
{
    if (!time_job(m, NULL, job_copy, launches, err)) return false;
    for (int i = 0; i < launches; i++) times[i].copy = m->samples[i] / (2.0 * CUDA_COPY_BYTES);
    return true;
}

/* Library and yardstick in turn. */
static bool time_round(meter *m, int launches, bench_times *times, error *err)
{
    return time_gemms(m, launches, times, err) && time_passes(m, launches, times, err) &&
           time_copy(m, launches, times, err) && time_stages(m, launches, times, err);
}

/* About how long one launch of every job takes: a step, its stages behind another, and the GEMMs. */
static bool guess_step(meter *m, double *ms, error *err)
{
    enum { STEPS = 4 };
    bench_times one[2] = {{0}};
    if (!time_passes(m, 2, one, err)) return false;
    *ms = STEPS * (one[1].forward + one[1].backward);
    return true;
}

static bool measure(meter *m, int64_t repeats, double seconds, bench_result *result, error *err)
{
    double step_ms;
    if (!record_all(m, err) || !guess_step(m, &step_ms, err)) return false;
    const int launches = sustained_launches(seconds, step_ms, repeats, ROUNDS, MOST_IN_ROUND);
    result->times = calloc((size_t)launches * ROUNDS, sizeof *result->times);
    if (!result->times) return fail(err, ERROR_RUNTIME, "out of memory for the times");
    for (int round = 0; round < ROUNDS; round++, result->repeats += (size_t)launches)
        if (!time_round(m, launches, result->times + result->repeats, err)) return false;
    return true;
}

bool bench_cuda_times(bench_case *c, int64_t rows, int64_t repeats, double seconds, bench_result *result,
                      error *err)
{
    meter *m = calloc(1, sizeof *m);
    double *samples = malloc(MOST_IN_ROUND * sizeof *samples);
    bool good = m && samples;
    if (good) {
        *m =
            (meter){.c = c, .how = {&c->clock, c->settings.device, c->stream, SETTLE_MS}, .samples = samples};
        good = cuda_yardstick_make(&m->yardstick, c->settings.device, &c->layer, rows, c->settings.backward,
                                   c->w1.data, c->w2.data, c->stream, err) &&
               measure(m, repeats, seconds, result, err);
        cuda_graph_free(m->prepare);
        cuda_graph_free(m->forward);
        cuda_graph_free(m->backward);
        cuda_yardstick_free(&m->yardstick);
    } else {
        fail(err, ERROR_RUNTIME, "out of memory for the times");
    }
    free(samples);
    free(m);
    return good;
}
#endif
