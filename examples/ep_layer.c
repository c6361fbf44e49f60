/* A layer whose experts are spread over four ranks, forward and backward (smoe_ep.h). Ranks are threads, or
 * with the argument "processes" processes; the windows are shared memory in both cases. Each rank compares
 * its output with that of a layer without ranks.
 *
 *   cc ep_layer.c $(pkg-config --cflags --libs smoe) -lpthread -lm */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include <math.h>
#include <pthread.h>
#include <smoe_ep.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { W = 4, T = 48, D = 64, N = 32, E = 8, K = 2, OWN = E / W };

static void *windows[W]; /* windows[r] is the window of rank r */
static int tokens_of(int rank)
{
    return T - 10 * rank;
}

static void check(smoe_context *context, smoe_status status)
{
    if (status == SMOE_OK) return;
    fprintf(stderr, "%s\n", smoe_last_error(context));
    _exit(3); /* several ranks may fail at once, and only one thread may call exit */
}

/* Aligned to 64 bytes, zero. */
static void *memory(size_t bytes)
{
    void *made = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
    if (!made) _exit(3);
    return memset(made, 0, bytes);
}

/* The same values wherever element `first` + i of a tensor is needed. */
static float *fill(long first, long count, float scale)
{
    float *values = memory((size_t)count * sizeof *values);
    for (long i = 0; i < count; i++) values[i] = scale * sinf(0.7f * (float)((first + i) % 9973));
    return values;
}

static smoe_layer describe(int ranks, int tokens)
{
    smoe_layer layer = SMOE_LAYER_INIT;
    layer.tokens = tokens;
    layer.hidden = D;
    layer.intermediate = N;
    layer.experts = E;
    layer.topk = K;
    layer.dtype = layer.gradient_type = SMOE_TYPE_F32;
    layer.ranks = ranks;
    layer.max_tokens = ranks ? T : 0;
    return layer;
}

/* Runs the layer on the tokens of `rank` with `experts` experts from `first_expert` on. Returns O. */
static float *run(smoe_context *context, const smoe_layer *layer, smoe_ep *ep, int rank, int first_expert,
                  int experts)
{
    smoe_sizes sizes = SMOE_SIZES_INIT;
    check(context, smoe_query_sizes(context, layer, &sizes));
    const int tokens = tokens_of(rank);
    const long w1 = 2L * N * D, w2 = (long)D * N;
    smoe_forward_args f = SMOE_FORWARD_ARGS_INIT;
    f.x = fill(rank * T * D, (long)tokens * D, 1.0f);
    f.logits = fill(rank * T * E + 5, (long)tokens * E, 3.0f);
    f.w1 = fill(first_expert * w1, experts * w1, 0.2f);
    f.w2 = fill(first_expert * w2 + 3, experts * w2, 0.2f);
    float *out = memory(sizeof(float) * (size_t)tokens * D);
    f.out = out;
    f.saved = memory(f.saved_size = sizes.saved_buffer_bytes);
    f.scratch = memory(f.scratch_size = sizes.scratch_forward_bytes);
    f.ep = ep;
    check(context, smoe_layer_forward(context, layer, &f, NULL));

    smoe_backward_args b = SMOE_BACKWARD_ARGS_INIT;
    b.x = f.x;
    b.logits = f.logits;
    b.w1 = f.w1;
    b.w2 = f.w2;
    b.saved = f.saved;
    b.saved_size = f.saved_size;
    b.dout = out; /* the gradient of half the sum of O^2 */
    b.dx = memory(sizeof(float) * (size_t)tokens * D);
    b.dw1 = memory(sizeof(float) * (size_t)(experts * w1));
    b.dw2 = memory(sizeof(float) * (size_t)(experts * w2));
    b.scratch = memory(b.scratch_size = sizes.scratch_backward_bytes);
    b.ep = ep;
    check(context, smoe_layer_backward(context, layer, &b, NULL));
    return out; /* this example frees nothing but contexts and groups */
}

static void *run_rank(void *number)
{
    const int rank = *(const int *)number, tokens = tokens_of(rank);
    smoe_context *context;
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.threads = 1;
    if (smoe_create(&context, &options) != SMOE_OK) _exit(3);

    const smoe_layer layer = describe(W, tokens), whole = describe(0, tokens);
    smoe_ep *ep;
    smoe_ep_options group = SMOE_EP_OPTIONS_INIT;
    group.rank = rank;
    group.windows = windows;
    group.timeout_ms = 20000;
    check(context, smoe_ep_create(&ep, context, &layer, &group));
    const float *out = run(context, &layer, ep, rank, rank * OWN, OWN);
    const float *expected = run(context, &whole, NULL, rank, 0, E);
    float error = 0.0f, largest = 0.0f;
    for (int i = 0; i < tokens * D; i++) {
        error = fmaxf(error, fabsf(out[i] - expected[i]));
        largest = fmaxf(largest, fabsf(expected[i]));
    }
    printf("rank %d: %d tokens, largest output %.3f, largest difference %.1e\n", rank, tokens,
           (double)largest, (double)error);
    if (!(error <= 1e-5f * largest)) _exit(1);
    smoe_ep_destroy(ep);
    smoe_destroy(context);
    return NULL;
}

/* Zeroed memory that later child processes share. All windows are there before any rank starts: this is the
 * barrier that smoe_ep.h asks for. They are freed when the last rank has ended. */
static void make_windows(void)
{
    smoe_context *context;
    if (smoe_create(&context, NULL) != SMOE_OK) _exit(3);
    const smoe_layer layer = describe(W, T);
    smoe_sizes sizes = SMOE_SIZES_INIT;
    check(context, smoe_query_sizes(context, &layer, &sizes));
    for (int r = 0; r < W; r++) {
        windows[r] =
            mmap(NULL, sizes.window_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (windows[r] == MAP_FAILED) _exit(3);
    }
    smoe_destroy(context);
}

int main(int argc, char **argv)
{
    static int ranks[W] = {0, 1, 2, 3};
    pthread_t threads[W];
    pid_t children[W];
    const int processes = argc > 1 && strcmp(argv[1], "processes") == 0;
    int failed = 0;
    make_windows();
    for (int r = 0; r < W; r++) {
        if (!processes) {
            if (pthread_create(&threads[r], NULL, run_rank, &ranks[r])) return 3;
        } else if ((children[r] = fork()) == 0) {
            run_rank(&ranks[r]);
            fflush(stdout);
            _exit(0);
        } else if (children[r] < 0) {
            return 3;
        }
    }
    for (int r = 0; r < W; r++) {
        int how = 0;
        if (processes)
            waitpid(children[r], &how, 0);
        else
            pthread_join(threads[r], NULL);
        failed |= how != 0;
    }
    return failed;
}
