/* See alone.h. */
#include "cli/bench/alone.h"

#ifdef SMOE_HAVE_CUDA
#include "cli/bench/samples.h"

#include <math.h>

enum { MOST_SAMPLES = 200, LEAST_SAMPLES = 5, MOST_TIMES = 20 };
static const double ENOUGH_MS = 0.5; // of one graph; its own launch is then below 1 % of this time
static const double SAMPLED_MS = 60; // of one kernel, after it has settled

typedef struct alone {
    const cuda_graph *graph;
    void *stream;
} alone;

static bool job_alone(void *user, error *err)
{
    const alone *a = user;
    return cuda_graph_launch(a->graph, a->stream) ||
           fail(err, ERROR_RUNTIME, "a graph could not be launched");
}

/* *ms: one of the `times` runs in a row that a job consists of, the median of `count` jobs. */
static bool time_job(const sustained_job *job, int times, const sustained *how, int count, double *ms,
                     error *err)
{
    double samples[MOST_SAMPLES];
    if (!sustained_time(how, job, count, samples, err)) return false;
    *ms = summarize(samples, (size_t)count).median / times;
    return true;
}

/* The same for a graph of so many runs. Frees the graph. */
static bool time_graph(cuda_graph *graph, int times, const sustained *how, int count, double *ms, error *err)
{
    alone user = {graph, how->stream};
    const sustained_job job = {NULL, job_alone, &user};
    const bool good = time_job(&job, times, how, count, ms, err);
    cuda_graph_free(graph);
    return good;
}

/* The same for a launch of the pass. */
static bool time_times(const cuda_graph *pass, int which, int times, const sustained *how, int count,
                       double *ms, error *err)
{
    cuda_graph *graph = cuda_graph_alone(pass, which, times);
    if (!graph) return fail(err, ERROR_RUNTIME, "launch %d of the pass cannot be run by itself", which);
    return time_graph(graph, times, how, count, ms, err);
}

/* How many runs in a row take ENOUGH_MS, and how many such graphs take SAMPLED_MS. */
static int times_of(double ms)
{
    return ms > 0 ? (int)fmin(ceil(ENOUGH_MS / ms), MOST_TIMES) : MOST_TIMES;
}

static int count_of(double graph_ms)
{
    const double wanted = graph_ms > 0 ? SAMPLED_MS / graph_ms : MOST_SAMPLES;
    return (int)fmax(fmin(wanted, MOST_SAMPLES), LEAST_SAMPLES);
}

static bool run_before(const cuda_graph *pass, int which, const sustained *how, const sustained_job *before,
                       error *err)
{
    if (!before->launch(before->user, err)) return false;
    if (which == 0) return true;
    cuda_graph *graph = cuda_graph_before(pass, which);
    const bool good = graph && cuda_graph_launch(graph, how->stream) && how->on->sync();
    cuda_graph_free(graph);
    return good || fail(err, ERROR_RUNTIME, "the pass cannot be run as far as its launch %d", which);
}

static bool time_launch(const cuda_graph *pass, int which, const sustained *how, const sustained_job *before,
                        double *ms, error *err)
{
    const sustained at_once = {how->clock, how->on, how->stream, 0};
    if (!run_before(pass, which, how, before, err) ||
        !time_times(pass, which, 1, &at_once, LEAST_SAMPLES, ms, err))
        return false;
    const int times = times_of(*ms);
    return time_times(pass, which, times, how, count_of(*ms * times), ms, err);
}

void bench_count_launches(const cuda_graph *pass, bench_result *result)
{
    result->counted = cuda_graph_launches(pass) > 0;
    for (int i = 0; i < cuda_graph_launches(pass); i++) {
        const int stage = cuda_graph_stage(pass, i);
        if (stage >= 0) result->launches[stage]++;
    }
}

bool bench_time_alone(const cuda_graph *pass, const sustained *how, const sustained_job *before,
                      bench_result *result, error *err)
{
    result->timed_alone = cuda_graph_launches(pass) > 0;
    for (int i = 0; i < cuda_graph_launches(pass); i++) {
        const int stage = cuda_graph_stage(pass, i);
        double ms = 0;
        if (!time_launch(pass, i, how, before, &ms, err)) return false;
        if (stage >= 0) result->alone[stage] += ms;
    }
    return true;
}

/* Enqueues copies of so many bytes. */
typedef struct copies {
    const cuda_yardstick *yardstick;
    uint64_t bytes;
    int times;
} copies;

static bool job_copies(void *user, error *err)
{
    const copies *c = user;
    for (int i = 0; i < c->times; i++)
        if (!cuda_yardstick_copy(c->yardstick, c->bytes, err)) return false;
    return true;
}

static bool time_recorded(copies *c, const sustained *how, int count, double *ms, error *err)
{
    cuda_graph *graph = cuda_graph_begin(how->stream);
    if (!graph) return fail(err, ERROR_RUNTIME, "the stream does not record a graph");
    const bool good = job_copies(c, err);
    if (cuda_graph_end(graph, how->stream) && good) return time_graph(graph, c->times, how, count, ms, err);
    cuda_graph_free(graph);
    return good ? fail(err, ERROR_RUNTIME, "the copy could not be recorded as a graph") : false;
}

/* In a graph, where a large copy moves at two thirds of the speed, and enqueued, where a short one has gaps:
 * the faster. */
bool bench_time_copy_alone(const cuda_yardstick *yardstick, smoe_stage stage, const sustained *how,
                           bench_result *result, error *err)
{
    const int index = stage_index(stage), times = times_of(result->alone[index]);
    const int count = count_of(result->alone[index] * times);
    copies user = {yardstick, (uint64_t)(stage_bytes(&yardstick->layer, stage) / 2), times};
    const sustained_job enqueued = {NULL, job_copies, &user};
    double ms, recorded;
    if (user.bytes > CUDA_COPY_BYTES) return true;
    if (!time_job(&enqueued, times, how, count, &ms, err) ||
        !time_recorded(&user, how, count, &recorded, err))
        return false;
    result->alone_copy[index] = fmin(ms, recorded);
    return true;
}
#endif
