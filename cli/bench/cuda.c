/* See cuda.h. */
#include "cli/bench/cuda.h"

#ifdef SMOE_HAVE_CUDA
#include "base/clock.h"
#include "base/turns.h"
#include "cli/bench/alone.h"
#include "cli/bench/sustained.h"
#include "cli/bench/yardstick_cuda.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST_IN_ROUND = 250, ALONE_SETTLE_MS = 50, HEAT_MS = 1000, AHEAD_MS = 1, MOST_TURNS = 10 };
_Static_assert((int)MOST_IN_ROUND <= (int)SUSTAINED_MOST, "a round's launches fit between the clock's marks");
_Static_assert((int)MOST_TURNS <= (int)TURNS_MOST, "jobs that take turns");

/* A job. It has one turn in each round. */
typedef struct turn {
    bool (*before)(void *, error *), (*work)(void *, error *);
    smoe_stage stage; // of a GEMM
    double scale;     // of its times
    size_t member;    // of bench_times: its offset
} turn;

typedef struct meter {
    bench_case *c;
    int passes; // bench_pass values together
    cuda_yardstick yardstick;
    sustained how;
    cuda_graph *prepare, *forward, *backward, *layer; // NULL where there is nothing to run
    smoe_stage stage;                                 // whose GEMMs job_gemm runs
    int ahead;                                        // untimed steps before a step that is timed by stages
    turn turns[MOST_TURNS];                           // of a round
    int turn_count;
    double *samples; // (MOST_IN_ROUND)
} meter;

/* ---- Graphs ---- */

static void note_stage(void *user, int stage)
{
    cuda_graph_mark(user, stage);
}

/* Records what `enqueue` puts on the stream; marks of time would be recorded too, so the clock is paused. */
static cuda_graph *record(bench_case *c, bool (*enqueue)(bench_case *, error *), error *err)
{
    cuda_graph *graph = cuda_graph_begin(c->stream);
    if (!graph) {
        fail(err, ERROR_RUNTIME, "the stream does not record a graph");
        return NULL;
    }
    c->clock.paused = true;
    c->clock.on_end = note_stage;
    c->clock.on_end_user = graph;
    const bool good = enqueue(c, err);
    c->clock.on_end = NULL;
    c->clock.paused = false;
    if (cuda_graph_end(graph, c->stream) && good) return graph;
    cuda_graph_free(graph);
    if (good) fail(err, ERROR_RUNTIME, "the pass could not be recorded as a graph");
    return NULL;
}

static bool enqueue_layer(bench_case *c, error *err)
{
    return bench_enqueue_forward(c, err) && bench_enqueue_backward(c, err);
}

static bool record_all(meter *m, error *err)
{
    bench_case *c = m->c;
    if (bench_prepared_apart(c) && !(m->prepare = record(c, bench_enqueue_prepare, err))) return false;
    if (!(m->forward = record(c, bench_enqueue_forward, err))) return false;
    if (c->settings.backward && !(m->backward = record(c, bench_enqueue_backward, err))) return false;
    return !(m->passes & PASS_LAYER) || (m->layer = record(c, enqueue_layer, err));
}

static bool launch(const meter *m, const cuda_graph *graph, error *err)
{
    if (!graph || cuda_graph_launch(graph, m->c->stream)) return true;
    return fail(err, ERROR_RUNTIME, "a graph could not be launched");
}

/* ---- Jobs ---- */

static bool job_prepare(void *user, error *err)
{
    const meter *m = user;
    return launch(m, m->prepare, err);
}

static bool job_forward(void *user, error *err)
{
    const meter *m = user;
    return launch(m, m->forward, err);
}

static bool prepare_and_forward(void *user, error *err)
{
    return job_prepare(user, err) && job_forward(user, err);
}

/* A backward that may overwrite H needs another forward each time. */
static bool before_backward(void *user, error *err)
{
    const meter *m = user;
    return !m->c->run.layer.reuse_saved || prepare_and_forward(user, err);
}

static bool job_backward(void *user, error *err)
{
    const meter *m = user;
    return launch(m, m->backward, err);
}

static bool job_layer(void *user, error *err)
{
    const meter *m = user;
    return launch(m, m->layer, err);
}

static bool job_quantize(void *user, error *err)
{
    const meter *m = user;
    return bench_enqueue_quantize(m->c, err);
}

static bool job_step(void *user, error *err)
{
    return prepare_and_forward(user, err) && job_backward(user, err);
}

static bool job_gemm(void *user, error *err)
{
    const meter *m = user;
    return cuda_yardstick_gemm(&m->yardstick, m->stage, err);
}

static bool job_copy(void *user, error *err)
{
    const meter *m = user;
    return cuda_yardstick_copy(&m->yardstick, CUDA_COPY_BYTES, err);
}

static bool time_job(meter *m, bool (*before)(void *, error *), bool (*work)(void *, error *), int launches,
                     error *err)
{
    const sustained_job job = {before, work, m};
    return sustained_time(&m->how, &job, launches, m->samples, err);
}

/* ---- Rounds: one job after the other, the same number of launches each ---- */

/* Is this one of the passes' GEMMs? */
static bool wants_gemm(const meter *m, smoe_stage stage)
{
    return m->passes & (stage < SMOE_STAGE_DH ? ~PASS_BACKWARD : ~PASS_FORWARD);
}

static void add_turn(meter *m, turn job)
{
    m->turns[m->turn_count++] = job;
}

/* The reference GEMMs and the library's passes. */
static void list_turns(meter *m)
{
    static const smoe_stage stages[] = {SMOE_STAGE_UP,  SMOE_STAGE_DOWN,    SMOE_STAGE_DH,
                                        SMOE_STAGE_DW2, SMOE_STAGE_DX_ROWS, SMOE_STAGE_DW1};
    _Static_assert(sizeof stages / sizeof stages[0] + 4 <= MOST_TURNS,
                   "every GEMM, every pass and quantising has a turn");
    const double scale = cuda_yardstick_scale(&m->c->run.layer, m->yardstick.rows);
    for (size_t s = 0; m->yardstick.gemms && s < sizeof stages / sizeof stages[0]; s++)
        if (wants_gemm(m, stages[s]))
            add_turn(m,
                     (turn){NULL, job_gemm, stages[s], scale,
                            offsetof(bench_times, dense) + (size_t)stage_index(stages[s]) * sizeof(double)});
    if (m->passes & PASS_FORWARD)
        add_turn(m, (turn){job_prepare, job_forward, 0, 1.0, offsetof(bench_times, forward)});
    if (m->passes & PASS_BACKWARD)
        add_turn(m, (turn){before_backward, job_backward, 0, 1.0, offsetof(bench_times, backward)});
    if (m->passes & PASS_LAYER)
        add_turn(m, (turn){job_prepare, job_layer, 0, 1.0, offsetof(bench_times, layer)});
    if (m->c->run.layer.compute != SMOE_COMPUTE_STORAGE)
        add_turn(m, (turn){NULL, job_quantize, 0, 1.0, offsetof(bench_times, quantize)});
}

static bool take_turn(meter *m, const turn *job, int launches, bench_times *times, error *err)
{
    m->stage = job->stage;
    if (!time_job(m, job->before, job->work, launches, err)) return false;
    for (int i = 0; i < launches; i++)
        *(double *)((char *)&times[i] + job->member) = job->scale * m->samples[i];
    return true;
}

/* Another order of turns for every problem. */
static uint64_t turns_seed(const smoe_layer *l)
{
    const int64_t sizes[] = {l->tokens, l->hidden, l->intermediate, l->experts, l->topk};
    uint64_t seed = 0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) seed = seed * 31 + (uint64_t)sizes[i];
    return seed;
}

static bool time_round(meter *m, int round, int launches, bench_times *times, error *err)
{
    const uint64_t seed = turns_seed(&m->c->run.layer);
    for (int i = 0; i < m->turn_count; i++)
        if (!take_turn(m, &m->turns[turn_of(seed, round, i, m->turn_count)], launches, times, err))
            return false;
    return true;
}

/* One step on the plain stream. Whole untimed steps are enqueued before it: while the GPU works on these, the
 * host enqueues all launches and events of this one. */
static bool time_one_step(meter *m, double *stage, error *err)
{
    bench_case *c = m->c;
    bool good = true;
    c->clock.paused = true;
    for (int i = 0; good && i < m->ahead; i++) good = job_step(m, err);
    good = good && job_prepare(m, err);
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

/* The copy, which draws the least power, comes before all else. Of more launches than fit, again the first.
 */
static bool time_copy(meter *m, int launches, bench_times *times, error *err)
{
    const int copies = launches < MOST_IN_ROUND ? launches : MOST_IN_ROUND;
    if (!time_job(m, NULL, job_copy, copies, err)) return false;
    for (int i = 0; i < launches; i++) times[i].copy = m->samples[i % copies] / (2.0 * CUDA_COPY_BYTES);
    return true;
}

static void no_bound(int launches, bench_times *times)
{
    for (int i = 0; i < launches; i++) {
        times[i].copy = NAN;
        for (int s = 0; s < STAGE_COUNT; s++) times[i].dense[s] = NAN;
    }
}

/* Untimed steps: for a while after a job that draws less power, a GPU has a higher clock. */
static bool heat_up(meter *m, error *err)
{
    double ms[1];
    const sustained_job job = {NULL, job_step, m};
    const sustained until_hot = {&m->c->clock, m->c->settings.device, m->c->stream, HEAT_MS};
    return sustained_time(&until_hot, &job, 1, ms, err);
}

/* First the copy; then, in every round, library and reference in turn, and the steps by stages. */
static bool time_rounds(meter *m, sustained_turns turns, bench_times *times, error *err)
{
    no_bound(turns.launches * turns.rounds, times);
    if (!m->c->settings.no_bound && !time_copy(m, turns.launches * turns.rounds, times, err)) return false;
    if (!heat_up(m, err)) return false;
    for (int round = 0; round < turns.rounds; round++, times += turns.launches)
        if (!time_round(m, round, turns.launches, times, err) || !time_stages(m, turns.launches, times, err))
            return false;
    return true;
}

/* ---- How many launches fit ---- */

/* Estimates, from the time of a step, how long one launch of every job takes, the steps by stages included;
 * and how many untimed steps are enqueued before a step that is timed by stages. */
static bool guess_step(meter *m, double *turns_ms, double *all_ms, error *err)
{
    double ms[2];
    const sustained_job job = {NULL, job_step, m};
    const sustained at_once = {&m->c->clock, m->c->settings.device, m->c->stream, 0};
    if (!sustained_time(&at_once, &job, 2, ms, err)) return false;
    const double step = fmin(ms[0], ms[1]),
                 apart = !!(m->passes & PASS_FORWARD) + !!(m->passes & PASS_BACKWARD);
    m->ahead = step > 0 ? (int)fmin(ceil(AHEAD_MS / step), 100) : 1;
    *turns_ms = step * (apart / 2 + !!(m->passes & PASS_LAYER) + !m->c->settings.no_bound);
    *all_ms = *turns_ms + step * (m->ahead + 1);
    return true;
}

/* The host's time to enqueue a pass while the GPU is idle: the least of several calls. */
static bool time_host(meter *m, bench_result *result, error *err)
{
    enum { CALLS = 20 };
    bench_case *c = m->c;
    bool good = true;
    result->host_ms[0] = result->host_ms[1] = INFINITY;
    c->clock.paused = true;
    for (int i = 0; good && i < CALLS; i++) {
        good = job_prepare(m, err) && c->settings.device->sync();
        const double begin = clock_seconds();
        good = good && bench_enqueue_forward(c, err);
        const double between = clock_seconds();
        good = good && (!m->backward || bench_enqueue_backward(c, err));
        const double end = clock_seconds();
        result->host_ms[0] = fmin(result->host_ms[0], 1e3 * (between - begin));
        result->host_ms[1] = fmin(result->host_ms[1], 1e3 * (end - between));
    }
    c->clock.paused = false;
    return c->settings.device->sync() && good;
}

/* Every kernel by itself; for the combines also a copy of as many bytes. */
static bool time_alone(meter *m, bench_result *result, error *err)
{
    const sustained_job before_one = {NULL, job_prepare, m}, before_other = {NULL, prepare_and_forward, m};
    const smoe_stage combines[] = {SMOE_STAGE_COMBINE, SMOE_STAGE_DX};
    const sustained how = {&m->c->clock, m->c->settings.device, m->c->stream, ALONE_SETTLE_MS};
    if (!bench_time_alone(m->forward, &how, &before_one, result, err) ||
        (m->backward && !bench_time_alone(m->backward, &how, &before_other, result, err)))
        return false;
    for (int i = 0; i < 2 && !m->c->settings.no_bound; i++)
        if (result->alone[stage_index(combines[i])] > 0 &&
            !bench_time_copy_alone(&m->yardstick, combines[i], &how, result, err))
            return false;
    return true;
}

static bool measure(meter *m, int64_t repeats, double seconds, bench_result *result, error *err)
{
    double turns_ms, all_ms;
    if (!record_all(m, err) || !guess_step(m, &turns_ms, &all_ms, err)) return false;
    list_turns(m);
    const double settle_ms = m->how.settle_ms * m->turn_count + turns_ms; // the last launch goes beyond it
    const sustained_turns turns =
        sustained_take_turns(seconds - 1e-3 * HEAT_MS, all_ms, settle_ms, repeats, MOST_IN_ROUND);
    result->repeats = (size_t)(turns.rounds * turns.launches);
    result->times = calloc(result->repeats, sizeof *result->times);
    if (!result->times) return fail(err, ERROR_RUNTIME, "out of memory for the times");
    if (!time_rounds(m, turns, result->times, err)) return false;
    bench_count_launches(m->forward, result);
    if (m->backward) bench_count_launches(m->backward, result);
    if (!time_host(m, result, err)) return false;
    // The kernels of scores and rounding add to what memory holds, so a repetition would compute something
    // else.
    return !m->c->settings.alone || m->c->run.layer.rounding != SMOE_ROUNDING_NONE ||
           time_alone(m, result, err);
}

/* ---- A case ---- */

static bool make_yardstick(meter *m, int64_t rows, error *err)
{
    bench_case *c = m->c;
    if (c->settings.no_bound) return true;
    if (!cuda_yardstick_make(&m->yardstick, c->settings.device, &c->run.layer, rows,
                             slot_data(&c->run, SLOT_W1), slot_data(&c->run, SLOT_W2),
                             slot_data(&c->run, SLOT_DW1), c->stream, err))
        return false;
    if (!m->yardstick.gemms)
        fprintf(stderr, "smoe bench: no cuBLAS that starts: there is no reference for the GEMMs\n");
    return true;
}

static void free_meter(meter *m)
{
    cuda_graph *graphs[] = {m->prepare, m->forward, m->backward, m->layer};
    for (size_t i = 0; i < sizeof graphs / sizeof graphs[0]; i++) cuda_graph_free(graphs[i]);
    cuda_yardstick_free(&m->yardstick);
    free(m->samples);
    free(m);
}

bool bench_cuda_times(bench_case *c, int64_t rows, int64_t repeats, double seconds, bench_result *result,
                      error *err)
{
    meter *m = calloc(1, sizeof *m);
    double *samples = malloc(MOST_IN_ROUND * sizeof *samples);
    if (!m || !samples) {
        free(samples);
        free(m);
        return fail(err, ERROR_RUNTIME, "out of memory for the times");
    }
    *m = (meter){.c = c,
                 .passes = result->passes,
                 .how = {&c->clock, c->settings.device, c->stream, 1e3 * c->settings.settle},
                 .samples = samples};
    const bool good = make_yardstick(m, rows, err) && measure(m, repeats, seconds, result, err);
    free_meter(m);
    return good;
}
#endif
