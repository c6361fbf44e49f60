/* Times a layer whose experts are spread over GPUs (smoe_ep.h):
 *
 *   time_ep GPUS T,d,n,E,K[,WAVES[,zipf]]...
 *
 * T is that of a GPU, and each GPU is a thread of this process, with peer access. "alone" is what a GPU
 * computes without ranks, on all of its SMs: the same ids and its own experts, for the tokens of all GPUs. Of
 * each pass the time is that of the slowest GPU, the median of REPEATS means over LAUNCHES launches. share:
 * alone / with ranks. With T of at most 256 the launches are those of a CUDA graph, GRAPH_LAUNCHES of them,
 * because the GPUs' threads do not start at the same time. Every dS is compared with that of "alone", bit for
 * bit. With TIME_EP_STAGES in the environment it also prints when each stage of rank 0 begins, in the stream
 * of the calls; in a graph no kernel then starts early. */
#define _GNU_SOURCE
#include "bench/median.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <smoe_ep.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    MOST = 8,
    MOMENTS = 256,
    REPEATS = 5,
    LAUNCHES = 4,
    GRAPH_TOKENS = 256,
    GRAPH_LAUNCHES = 32,
    PATTERN = 1 << 22
};

typedef struct shape {
    int64_t tokens, hidden, intermediate, experts, topk, waves, zipf;
} shape;

/* Moments of one pass. */
typedef struct timeline {
    int on, in_graph, count;
    smoe_stage stages[MOMENTS];
    cudaEvent_t events[MOMENTS];
} timeline;

/* One layer on one GPU: with ranks, or alone. */
typedef struct job {
    smoe_layer layer;
    smoe_context *context;
    smoe_forward_args forward;
    smoe_backward_args backward;
    cudaGraphExec_t graph[2];
    timeline *line;
} job;

typedef struct shared {
    int ranks;
    shape s;
    pthread_barrier_t barrier;
    void *windows[MOST];
    int32_t *ids[MOST];    /* (T, K) of each rank, host */
    float *ds[MOST];       /* the same shape, with ranks */
    double ms[2][2][MOST]; /* job, pass, rank: of one repeat */
    double medians[2][2];
    long long different, compared, bytes;
} shared;

typedef struct rank {
    shared *all;
    int number;
} rank;

static void die(const char *what, const char *why)
{
    fprintf(stderr, "time_ep: %s: %s\n", what, why);
    _exit(3); /* several ranks may fail at once, and only one thread may call exit */
}

static void cuda(cudaError_t status, const char *what)
{
    if (status != cudaSuccess) die(what, cudaGetErrorString(status));
}

static void must(const job *j, smoe_status status)
{
    if (status != SMOE_OK) die("smoe", smoe_last_error(j->context));
}

static void *device_bytes(size_t bytes)
{
    void *p;
    cuda(cudaMalloc(&p, bytes ? bytes : 256), "cudaMalloc");
    return p;
}

/* `count` bf16 of `scale`, copies of a pattern, which begins at another place for another `seed`. */
static void fill(void *to, int64_t count, float scale, int64_t seed)
{
    uint16_t *pattern = malloc(2 * PATTERN);
    uint64_t state = 1;
    for (int64_t i = 0; i < PATTERN; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        const float v = scale * (float)((double)(state >> 40) / (1 << 23) - 1.0);
        uint32_t bits;
        memcpy(&bits, &v, sizeof bits);
        pattern[(i + seed * 77777) % PATTERN] = (uint16_t)(bits >> 16);
    }
    for (int64_t at = 0; at < count; at += PATTERN) {
        const int64_t some = count - at < PATTERN ? count - at : PATTERN;
        if (at == 0)
            cuda(cudaMemcpy(to, pattern, (size_t)some * 2, cudaMemcpyHostToDevice), "copy");
        else
            cuda(cudaMemcpy((uint16_t *)to + at, to, (size_t)some * 2, cudaMemcpyDeviceToDevice), "copy");
    }
    free(pattern);
}

static void *filled(int64_t count, float scale, int64_t seed)
{
    void *p = device_bytes((size_t)count * 2);
    fill(p, count, scale, seed);
    return p;
}

/* K different experts for every token: uniform, or with Zipf weights. */
static int32_t *make_ids(const shape *s, int seed)
{
    int32_t *ids = malloc((size_t)(s->tokens * s->topk) * sizeof *ids);
    double *limits = malloc((size_t)s->experts * sizeof *limits), sum = 0.0;
    for (int64_t e = 0; e < s->experts; e++)
        limits[e] = sum += s->zipf ? 1.0 / (double)(1 + e * 37 % s->experts) : 1.0;
    uint64_t state = (uint64_t)seed + 99;
    for (int64_t i = 0; i < s->tokens * s->topk; i++) {
        int again = 1;
        while (again) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            const double at = (double)(state >> 11) / 9007199254740992.0 * sum;
            int64_t low = 0, high = s->experts - 1;
            while (low < high) {
                const int64_t half = (low + high) / 2;
                if (limits[half] <= at)
                    low = half + 1;
                else
                    high = half;
            }
            again = 0;
            for (int64_t k = i / s->topk * s->topk; k < i; k++) again |= ids[k] == low;
            ids[i] = (int32_t)low;
        }
    }
    free(limits);
    return ids;
}

/* ---- Jobs ---- */

static void *upload(const void *from, size_t bytes)
{
    void *p = device_bytes(bytes);
    cuda(cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice), "copy");
    return p;
}

static float *ones(int64_t count)
{
    float *host = malloc((size_t)count * 4);
    for (int64_t i = 0; i < count; i++) host[i] = 0.25f;
    float *p = upload(host, (size_t)count * 4);
    free(host);
    return p;
}

/* Buffers and arguments that follow from the layer. x and dO of source s are pattern s and s + 100. */
static void make_job(job *j, const shared *all, int first_source, int sources, const int32_t *ids,
                     const void *const weights[2], void *const gradients[2])
{
    const smoe_layer *l = &j->layer;
    smoe_sizes sizes = SMOE_SIZES_INIT;
    must(j, smoe_query_sizes(j->context, l, &sizes));
    const int64_t count = all->s.tokens * l->hidden, pairs = l->tokens * l->topk;
    char *x = device_bytes((size_t)(sources * count) * 2),
         *dout = device_bytes((size_t)(sources * count) * 2);
    for (int i = 0; i < sources; i++) {
        fill(x + i * count * 2, count, 1.0f, first_source + i);
        fill(dout + i * count * 2, count, 1.0f, first_source + i + 100);
    }
    smoe_forward_args f = SMOE_FORWARD_ARGS_INIT;
    smoe_backward_args b = SMOE_BACKWARD_ARGS_INIT;
    const uint64_t forward = sizes.scratch_forward_bytes, backward = sizes.scratch_backward_bytes;
    f.x = x, f.topk_ids = upload(ids, (size_t)pairs * 4), f.topk_weights = ones(pairs);
    f.w1 = weights[0], f.w2 = weights[1];
    f.out = device_bytes((size_t)(l->tokens * l->hidden) * 2);
    f.saved = device_bytes(f.saved_size = sizes.saved_buffer_bytes);
    f.scratch = device_bytes(f.scratch_size = forward > backward ? forward : backward);
    b.x = x, b.topk_ids = f.topk_ids, b.w1 = f.w1, b.w2 = f.w2, b.dout = dout;
    b.dx = device_bytes((size_t)(l->tokens * l->hidden) * 2), b.dw1 = gradients[0], b.dw2 = gradients[1];
    b.dtopk_weights = device_bytes((size_t)pairs * 4);
    b.saved = f.saved, b.saved_size = f.saved_size, b.scratch = f.scratch, b.scratch_size = f.scratch_size;
    j->forward = f, j->backward = b;
}

static smoe_layer describe(const shape *s)
{
    smoe_layer l = SMOE_LAYER_INIT;
    l.tokens = s->tokens, l.hidden = s->hidden, l.intermediate = s->intermediate, l.experts = s->experts;
    l.topk = s->topk, l.entry = SMOE_ENTRY_FROM_TOPK, l.index_type = SMOE_TYPE_I32;
    l.gradient_type = SMOE_TYPE_BF16;
    return l;
}

/* The ids of all tokens that are experts of `owner`, counted from its first. */
static int32_t *local_ids(const shared *all, int owner, int64_t topk)
{
    const shape *s = &all->s;
    const int64_t each = s->experts / all->ranks, tokens = s->tokens * all->ranks;
    int32_t *ids = malloc((size_t)(tokens * topk) * sizeof *ids);
    for (int64_t t = 0; t < tokens; t++) {
        int64_t found = 0;
        for (int64_t k = 0; k < s->topk; k++) {
            const int64_t e = all->ids[t / s->tokens][t % s->tokens * s->topk + k] - owner * each;
            if (e >= 0 && e < each) ids[t * topk + found++] = (int32_t)e;
        }
        while (found < topk) ids[t * topk + found++] = -1;
    }
    return ids;
}

static void launch(job *j, int pass, cudaStream_t stream)
{
    if (j->graph[pass])
        cuda(cudaGraphLaunch(j->graph[pass], stream), "cudaGraphLaunch");
    else if (pass)
        must(j, smoe_layer_backward(j->context, &j->layer, &j->backward, stream));
    else
        must(j, smoe_layer_forward(j->context, &j->layer, &j->forward, stream));
}

static void capture(job *j, int pass, cudaStream_t stream)
{
    cudaGraph_t graph;
    j->graph[pass] = NULL;
    cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    launch(j, pass, stream);
    cuda(cudaStreamEndCapture(stream, &graph), "capture");
    cudaGraphExec_t ready;
    cuda(cudaGraphInstantiate(&ready, graph, 0), "cudaGraphInstantiate");
    j->graph[pass] = ready;
}

static double time_pass(rank *me, job *j, int pass, cudaStream_t stream, cudaEvent_t const events[2])
{
    const int launches = j->graph[pass] ? GRAPH_LAUNCHES : LAUNCHES;
    float ms;
    cuda(cudaStreamSynchronize(stream), "before a pass");
    pthread_barrier_wait(&me->all->barrier);
    cuda(cudaEventRecord(events[0], stream), "event");
    for (int i = 0; i < launches; i++) launch(j, pass, stream);
    cuda(cudaEventRecord(events[1], stream), "event");
    cuda(cudaStreamSynchronize(stream), "a pass");
    cuda(cudaEventElapsedTime(&ms, events[0], events[1]), "event");
    pthread_barrier_wait(&me->all->barrier);
    return ms / (float)launches;
}

static void time_jobs(rank *me, job jobs[2], cudaStream_t stream)
{
    shared *all = me->all;
    double times[2][2][REPEATS];
    cudaEvent_t events[2];
    for (int i = 0; i < 2; i++) cuda(cudaEventCreate(&events[i]), "event");
    for (int repeat = -1; repeat < REPEATS; repeat++) { /* the first is not counted */
        for (int i = 0; i < 2; i++)
            for (int pass = 0; pass < 2; pass++)
                all->ms[i][pass][me->number] = time_pass(me, &jobs[i], pass, stream, events);
        pthread_barrier_wait(&all->barrier);
        for (int i = 0; i < 2 && repeat >= 0; i++)
            for (int pass = 0; pass < 2; pass++) {
                double slowest = 0.0;
                for (int r = 0; r < all->ranks; r++)
                    if (all->ms[i][pass][r] > slowest) slowest = all->ms[i][pass][r];
                times[i][pass][repeat] = slowest;
            }
        pthread_barrier_wait(&all->barrier);
    }
    if (me->number == 0)
        for (int i = 0; i < 2; i++)
            for (int pass = 0; pass < 2; pass++)
                all->medians[i][pass] = middle_of(times[i][pass], REPEATS).median;
}

/* dS of the pairs whose experts this rank has. */
static void compare(rank *me, const job *alone)
{
    shared *all = me->all;
    const shape *s = &all->s;
    const int64_t each = s->experts / all->ranks, pairs = alone->layer.tokens * alone->layer.topk;
    float *ds = malloc((size_t)pairs * 4);
    long long different = 0, compared = 0;
    cuda(cudaMemcpy(ds, alone->backward.dtopk_weights, (size_t)pairs * 4, cudaMemcpyDeviceToHost), "copy");
    for (int64_t t = 0; t < alone->layer.tokens; t++) {
        int64_t found = 0;
        for (int64_t k = 0; k < s->topk; k++) {
            const int64_t at = t % s->tokens * s->topk + k;
            if (all->ids[t / s->tokens][at] / each != me->number) continue;
            different += !!memcmp(&ds[t * alone->layer.topk + found++], &all->ds[t / s->tokens][at], 4);
            compared++;
        }
    }
    free(ds);
    pthread_barrier_wait(&all->barrier);
    for (int r = 0; r < all->ranks; r++) {
        if (r == me->number) all->different += different, all->compared += compared;
        pthread_barrier_wait(&all->barrier);
    }
}

static void join(rank *me, job *j)
{
    shared *all = me->all;
    smoe_sizes sizes = SMOE_SIZES_INIT;
    must(j, smoe_query_sizes(j->context, &j->layer, &sizes));
    all->windows[me->number] = device_bytes(sizes.window_bytes);
    all->bytes = (long long)sizes.window_bytes;
    cuda(cudaMemset(all->windows[me->number], 0, sizes.window_bytes), "cudaMemset");
    cuda(cudaDeviceSynchronize(), "cudaMemset");
    pthread_barrier_wait(&all->barrier);
    smoe_ep *ep;
    smoe_ep_options options = SMOE_EP_OPTIONS_INIT;
    options.rank = me->number, options.timeout_ms = 10000, options.windows = all->windows;
    must(j, smoe_ep_create(&ep, j->context, &j->layer, &options));
    j->forward.ep = j->backward.ep = ep;
    pthread_barrier_wait(&all->barrier); /* allocations may wait for kernels, and these for this rank */
}

static void note_stage(void *user, smoe_stage stage, int end, void *stream)
{
    timeline *line = user;
    if (!line->on || end || line->count == MOMENTS) return;
    line->stages[line->count] = stage;
    cudaEventRecordWithFlags(line->events[line->count++], stream,
                             line->in_graph ? cudaEventRecordExternal : cudaEventRecordDefault);
}

/* All ranks call it. */
static void print_stages(rank *me, job *j, int pass, cudaStream_t stream)
{
    timeline *line = j->line;
    const int first = me->number == 0;
    line->in_graph = j->graph[pass] != NULL;
    line->count = 0, line->on = first;
    if (first && line->in_graph) capture(j, pass, stream);
    line->on = first && !line->in_graph;
    pthread_barrier_wait(&me->all->barrier);
    launch(j, pass, stream);
    line->on = 0;
    cuda(cudaStreamSynchronize(stream), "stages");
    pthread_barrier_wait(&me->all->barrier);
    if (line->in_graph) launch(j, pass, stream); /* the first launch of a graph takes longer */
    if (!first) return;
    cudaEvent_t end;
    cuda(cudaEventCreate(&end), "event");
    cuda(cudaEventRecord(end, stream), "event");
    cuda(cudaStreamSynchronize(stream), "stages");
    float ms;
    for (int i = 0; i < line->count; i++) {
        cuda(cudaEventElapsedTime(&ms, line->events[0], line->events[i]), "event");
        printf("%s%s %.3f",
               i      ? ", "
               : pass ? "  backward: "
                      : "  forward: ",
               smoe_stage_string(line->stages[i]), (double)ms);
    }
    cuda(cudaEventElapsedTime(&ms, line->events[0], end), "event");
    printf(", end %.3f\n", (double)ms);
}

static void open_context(job *j, int device)
{
    j->line = calloc(1, sizeof *j->line);
    for (int i = 0; i < MOMENTS; i++) cuda(cudaEventCreate(&j->line->events[i]), "event");
    char text[400] = "";
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.backend = SMOE_BACKEND_CUDA, options.device = device;
    options.error_text = text, options.error_size = sizeof text;
    options.on_stage = note_stage, options.on_stage_user = j->line;
    if (smoe_create(&j->context, &options) != SMOE_OK) die("smoe_create", text);
}

static void *run_rank(void *user)
{
    rank *me = user;
    shared *all = me->all;
    const shape *s = &all->s;
    const int64_t each = s->experts / all->ranks, local_topk = s->topk < each ? s->topk : each;
    cuda(cudaSetDevice(me->number), "cudaSetDevice");
    for (int r = 0; r < all->ranks; r++)
        if (r != me->number) {
            const cudaError_t status = cudaDeviceEnablePeerAccess(r, 0);
            if (status != cudaErrorPeerAccessAlreadyEnabled) cuda(status, "cudaDeviceEnablePeerAccess");
            cudaGetLastError();
        }
    job jobs[2] = {{.layer = describe(s)}, {.layer = describe(s)}}; /* with ranks, alone */
    jobs[0].layer.ranks = all->ranks, jobs[0].layer.max_tokens = s->tokens;
    jobs[0].layer.waves = (int32_t)s->waves;
    jobs[1].layer.tokens = s->tokens * all->ranks;
    jobs[1].layer.experts = each, jobs[1].layer.topk = local_topk;
    const int64_t w = each * s->hidden * s->intermediate;
    const void *const weights[] = {filled(2 * w, 0.02f, me->number + 200),
                                   filled(w, 0.02f, me->number + 300)};
    void *const gradients[] = {device_bytes((size_t)w * 4), device_bytes((size_t)w * 2)};
    int32_t *const ids = local_ids(all, me->number, local_topk);
    for (int i = 0; i < 2; i++) open_context(&jobs[i], me->number);
    make_job(&jobs[0], all, me->number, 1, all->ids[me->number], weights, gradients);
    make_job(&jobs[1], all, 0, all->ranks, ids, weights, gradients);
    join(me, &jobs[0]);
    cudaStream_t stream;
    cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    for (int i = 0; i < 2; i++)
        for (int pass = 0; pass < 2; pass++) {
            launch(&jobs[i], pass, stream);
            cuda(cudaStreamSynchronize(stream), "the first pass");
            pthread_barrier_wait(&all->barrier);
            if (s->tokens <= GRAPH_TOKENS) capture(&jobs[i], pass, stream);
            pthread_barrier_wait(&all->barrier);
        }
    const size_t ds_bytes = (size_t)(s->tokens * s->topk) * 4;
    cuda(cudaMemcpy(all->ds[me->number], jobs[0].backward.dtopk_weights, ds_bytes, cudaMemcpyDeviceToHost),
         "dS");
    must(&jobs[0], smoe_ep_status(jobs[0].forward.ep));
    pthread_barrier_wait(&all->barrier);
    compare(me, &jobs[1]);
    time_jobs(me, jobs, stream);
    for (int i = 0; i < 4 && getenv("TIME_EP_STAGES"); i++) {
        print_stages(me, &jobs[i / 2], i % 2, stream);
        cuda(cudaStreamSynchronize(stream), "stages");
    }
    must(&jobs[0], smoe_ep_status(jobs[0].forward.ep));
    pthread_barrier_wait(&all->barrier);
    smoe_ep_destroy(jobs[0].forward.ep);
    for (int i = 0; i < 2; i++) {
        job *j = &jobs[i];
        void *const buffers[] = {(void *)j->forward.x,
                                 (void *)j->forward.topk_ids,
                                 (void *)j->forward.topk_weights,
                                 j->forward.out,
                                 j->forward.saved,
                                 j->forward.scratch,
                                 (void *)j->backward.dout,
                                 j->backward.dx,
                                 j->backward.dtopk_weights};
        for (size_t k = 0; k < sizeof buffers / sizeof *buffers; k++) cudaFree(buffers[k]);
        smoe_destroy(j->context);
    }
    for (int i = 0; i < 2; i++) cudaFree((void *)weights[i]), cudaFree(gradients[i]);
    pthread_barrier_wait(&all->barrier);
    cudaFree(all->windows[me->number]);
    free(ids);
    return NULL;
}

static void run_shape(int ranks, const char *text)
{
    static shared all;
    pthread_t threads[MOST];
    rank users[MOST];
    char zipf[8] = "";
    all = (shared){.ranks = ranks};
    shape *s = &all.s;
    const int read = sscanf(text, "%ld,%ld,%ld,%ld,%ld,%ld,%7s", &s->tokens, &s->hidden, &s->intermediate,
                            &s->experts, &s->topk, &s->waves, zipf);
    if (read < 5 || s->experts % ranks)
        die(text, "is not T,d,n,E,K[,WAVES[,zipf]] with E a multiple of GPUS");
    s->zipf = !strcmp(zipf, "zipf");
    pthread_barrier_init(&all.barrier, NULL, (unsigned)ranks);
    for (int r = 0; r < ranks; r++) {
        all.ids[r] = make_ids(s, r);
        all.ds[r] = malloc((size_t)(s->tokens * s->topk) * 4);
    }
    for (int r = 0; r < ranks; r++) {
        users[r] = (rank){&all, r};
        if (pthread_create(&threads[r], NULL, run_rank, &users[r])) die("pthread_create", "failed");
    }
    for (int r = 0; r < ranks; r++) {
        pthread_join(threads[r], NULL);
        free(all.ids[r]), free(all.ds[r]);
    }
    pthread_barrier_destroy(&all.barrier);
    const double *ep = all.medians[0], *alone = all.medians[1];
    printf("%-34s %7.3f %7.3f %5.2f  %7.3f %7.3f %5.2f  %5.2f  %6.2f  %lld of %lld\n", text, ep[0], alone[0],
           alone[0] / ep[0], ep[1], alone[1], alone[1] / ep[1], (alone[0] + alone[1]) / (ep[0] + ep[1]),
           (double)all.bytes / 1e9, all.different, all.compared);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    const int ranks = argc > 2 ? atoi(argv[1]) : 0;
    if (ranks < 1 || ranks > MOST)
        return fprintf(stderr, "usage: time_ep GPUS T,d,n,E,K[,WAVES[,zipf]]...\n"), 2;
    /* A kernel that is loaded late could wait for one that waits for another GPU. */
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < ranks) die("GPUs", "not as many are there");
    printf("%d GPUs. ms; window in GB\n%-34s %7s %7s %5s  %7s %7s %5s  %5s  %6s  dS that differ\n", ranks,
           "T,d,n,E,K,waves", "forward", "alone", "share", "bwd", "alone", "share", "both", "window");
    for (int i = 2; i < argc; i++) run_shape(ranks, argv[i]);
    return 0;
}
