/* Contexts: their creation and its errors, their use in several threads, and the CPU backend in a forked
 * process and with little address space. */
#define _DEFAULT_SOURCE /* fork, alarm, setrlimit */
#include <smoe.h>

#include <omp.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

static void contexts_are_created_or_refused(void **state)
{
    (void)state;
    smoe_destroy(NULL);
    assert_int_equal(smoe_create(NULL, NULL), SMOE_ERROR_ARGUMENT);
    assert_string_equal(smoe_last_error(NULL), "");
    assert_int_equal(smoe_supports(NULL, NULL), SMOE_ERROR_ARGUMENT);

    char text[256] = "";
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.error_text = text;
    options.error_size = sizeof text;
    smoe_context *context = (smoe_context *)&options;
    options.backend = (smoe_backend)5;
    assert_int_equal(smoe_create(&context, &options), SMOE_ERROR_ARGUMENT);
    assert_null(context);
    assert_non_null(strstr(text, "backend is 5"));
    options.backend = SMOE_BACKEND_CPU;
    options.check_offsets = 2;
    assert_int_equal(smoe_create(&context, &options), SMOE_ERROR_ARGUMENT);
    assert_non_null(strstr(text, "check_offsets is 2, it must be 0 or 1"));
    options.check_offsets = 0;
    options.threads = -1;
    assert_int_equal(smoe_create(&context, &options), SMOE_ERROR_ARGUMENT);
    assert_non_null(strstr(text, "threads is -1"));
    options.threads = INT32_MAX;
    assert_int_equal(smoe_create(&context, &options), SMOE_ERROR_ARGUMENT);
    assert_non_null(strstr(text, "threads is 2147483647"));
    assert_non_null(strstr(text, "512"));
    options.threads = 0;
    options.struct_size = 0;
    assert_int_equal(smoe_create(&context, &options), SMOE_ERROR_ARGUMENT);
}

/* With a usable driver this creates a context of the CUDA backend, else it must fail with a message. */
static void a_cuda_context_needs_a_driver(void **state)
{
    (void)state;
    char text[256] = "";
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.backend = SMOE_BACKEND_CUDA;
    options.error_text = text;
    options.error_size = sizeof text;
    smoe_context *context;
    const smoe_status status = smoe_create(&context, &options);
    if (status == SMOE_OK) {
        smoe_destroy(context);
        return;
    }
    assert_true(status == SMOE_ERROR_UNSUPPORTED || status == SMOE_ERROR_DEVICE);
    assert_non_null(strstr(text, "smoe_create: "));
    assert_null(context);
}

/* ---- A layer with its memory ---- */

enum { T = 600, D = 64, N = 32, E = 4 };

typedef struct layer_memory {
    smoe_layer layer;
    smoe_forward_args forward;
    smoe_backward_args backward;
    float *out, *dx, *dw1, *dw2, *drouter_weight; /* one block of `bytes` bytes that starts at out */
    size_t bytes;
} layer_memory;

static void *memory(size_t bytes)
{
    void *p = aligned_alloc(256, (bytes + 255) / 256 * 256);
    assert_non_null(p);
    return p;
}

static float *numbers(size_t count, unsigned seed)
{
    float *v = memory(count * sizeof *v);
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        v[i] = (float)(seed >> 8) / 16777216.0f - 0.5f;
    }
    return v;
}

/* A layer with buffers as large as this context needs them, which depends on its threads. */
static layer_memory make_layer(smoe_context *context)
{
    layer_memory m = {.layer = SMOE_LAYER_INIT};
    m.layer.tokens = T, m.layer.hidden = D, m.layer.intermediate = N, m.layer.experts = E, m.layer.topk = 2;
    m.layer.dtype = SMOE_TYPE_F32;
    smoe_sizes sizes = SMOE_SIZES_INIT;
    assert_int_equal(smoe_query_sizes(context, &m.layer, &sizes), SMOE_OK);
    m.bytes = sizeof(float) * (2 * T * D + E * 2 * N * D + E * D * N + E * D);
    m.out = memory(m.bytes);
    memset(m.out, 0xff, m.bytes);
    m.dx = m.out + T * D, m.dw1 = m.dx + T * D, m.dw2 = m.dw1 + E * 2 * N * D;
    m.drouter_weight = m.dw2 + E * D * N;
    smoe_forward_args f = SMOE_FORWARD_ARGS_INIT;
    f.x = numbers(T * D, 1), f.router_weight = numbers(E * D, 2), f.logits = numbers(T * E, 3);
    f.w1 = numbers(E * 2 * N * D, 4), f.w2 = numbers(E * D * N, 5), f.out = m.out;
    f.saved = memory(f.saved_size = sizes.saved_buffer_bytes);
    f.scratch = memory(f.scratch_size = sizes.scratch_forward_bytes);
    smoe_backward_args b = SMOE_BACKWARD_ARGS_INIT;
    b.x = f.x, b.router_weight = f.router_weight, b.logits = f.logits, b.w1 = f.w1, b.w2 = f.w2;
    b.saved = f.saved, b.saved_size = f.saved_size, b.dout = numbers(T * D, 6);
    b.dx = m.dx, b.dw1 = m.dw1, b.dw2 = m.dw2, b.drouter_weight = m.drouter_weight;
    b.scratch = memory(b.scratch_size = sizes.scratch_backward_bytes);
    m.forward = f, m.backward = b;
    return m;
}

static void free_layer(layer_memory *m)
{
    void *all[] = {m->out,
                   (void *)m->forward.x,
                   (void *)m->forward.router_weight,
                   m->forward.logits,
                   (void *)m->forward.w1,
                   (void *)m->forward.w2,
                   m->forward.saved,
                   m->forward.scratch,
                   (void *)m->backward.dout,
                   m->backward.scratch};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static smoe_context *open_threads(int threads)
{
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.threads = threads;
    smoe_context *context;
    assert_int_equal(smoe_create(&context, &options), SMOE_OK);
    return context;
}

/* ---- From thread to thread ---- */

typedef struct job {
    smoe_context *context;
    layer_memory *m;
    int backward;
    smoe_status status;
} job;

static void *run_job(void *argument)
{
    job *j = argument;
    j->status = j->backward ? smoe_layer_backward(j->context, &j->m->layer, &j->m->backward, NULL)
                            : smoe_layer_forward(j->context, &j->m->layer, &j->m->forward, NULL);
    return NULL;
}

static void run_elsewhere(smoe_context *context, layer_memory *m, int backward)
{
    job j = {context, m, backward, SMOE_ERROR_DEVICE};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, run_job, &j), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    if (j.status != SMOE_OK) print_error("%s\n", smoe_last_error(context));
    assert_int_equal(j.status, SMOE_OK);
}

/* A context that one thread creates, a second uses for the forward and a third for the backward must give the
 * same bits as in one thread. */
static void a_context_moves_between_threads(void **state)
{
    (void)state;
    smoe_context *context = open_threads(2);
    layer_memory here = make_layer(context), moved = make_layer(context);
    assert_int_equal(smoe_layer_forward(context, &here.layer, &here.forward, NULL), SMOE_OK);
    assert_int_equal(smoe_layer_backward(context, &here.layer, &here.backward, NULL), SMOE_OK);
    run_elsewhere(context, &moved, 0);
    run_elsewhere(context, &moved, 1);
    assert_memory_equal(here.out, moved.out, here.bytes);
    free_layer(&here), free_layer(&moved);
    smoe_destroy(context);
}

/* ---- Forks ---- */

/* Runs a function in a child process, which a signal ends after 30 s. Its exit status must be 0. */
static void in_child(int (*run)(void *), void *argument)
{
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(30);
        _exit(run(argument));
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    if (WIFSIGNALED(status)) fail_msg("the child was ended by signal %d", WTERMSIG(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

typedef struct fork_case {
    smoe_context *two; /* the parent's context with two threads */
    layer_memory *m, *expected;
} fork_case;

static int refuses(smoe_context *context, layer_memory *m)
{
    const smoe_status status = smoe_layer_forward(context, &m->layer, &m->forward, NULL);
    const char *text = smoe_last_error(context);
    return status == SMOE_ERROR_UNSUPPORTED && strstr(text, "smoe_layer_forward: ") &&
           strstr(text, "forked") && strstr(text, "threads = 1");
}

/* The child does not have the parent's OpenMP threads and cannot start some. So a call must fail with the
 * parent's context of two threads and with a new one. */
static int refuse_teams(void *argument)
{
    const fork_case *c = argument;
    if (!refuses(c->two, c->m)) return 1;
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.threads = 2;
    smoe_context *again;
    if (smoe_create(&again, &options) != SMOE_OK) return 2;
    return refuses(again, c->m) ? 0 : 3;
}

static int same_bits(const fork_case *c, smoe_context *context)
{
    const smoe_status status = smoe_layer_forward(context, &c->m->layer, &c->m->forward, NULL);
    return status == SMOE_OK && memcmp(c->m->out, c->expected->out, sizeof(float) * T * D) == 0;
}

static int run_one_thread(void *argument)
{
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.threads = 1;
    smoe_context *one;
    if (smoe_create(&one, &options) != SMOE_OK) return 1;
    return same_bits(argument, one) ? 0 : 2;
}

static int run_new_thread(void *argument)
{
    const fork_case *c = argument;
    job j = {c->two, c->m, 0, SMOE_ERROR_DEVICE};
    pthread_t thread;
    if (pthread_create(&thread, NULL, run_job, &j) || pthread_join(thread, NULL)) return 1;
    return j.status == SMOE_OK && memcmp(c->m->out, c->expected->out, sizeof(float) * T * D) == 0 ? 0 : 2;
}

static int run_first_team(void *argument)
{
    const fork_case *c = argument;
    return same_bits(c, c->two) ? 0 : 1;
}

static void *fork_first(void *argument)
{
    in_child(run_first_team, argument);
    return NULL;
}

static void a_forked_process_computes(void **state)
{
    (void)state;
    if (SANITIZED) skip(); /* sanitizers start no thread in the forked child of a process with threads */
    smoe_context *two = open_threads(2);
    layer_memory expected = make_layer(two), child = make_layer(two);
    fork_case c = {two, &child, &expected};
    assert_int_equal(smoe_layer_forward(two, &expected.layer, &expected.forward, NULL), SMOE_OK);
    in_child(refuse_teams, &c);
    in_child(run_one_thread, &c);
    in_child(run_new_thread, &c);
    /* the thread that forks has not used OpenMP threads yet */
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, fork_first, &c), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(smoe_layer_forward(two, &child.layer, &child.forward, NULL), SMOE_OK);
    assert_memory_equal(child.out, expected.out, sizeof(float) * T * D);
    free_layer(&expected), free_layer(&child);
    smoe_destroy(two);
}

/* ---- Address space ---- */

static size_t address_space(void)
{
    FILE *file = fopen("/proc/self/statm", "r");
    size_t pages = 0;
    const int got = file ? fscanf(file, "%zu", &pages) : 0;
    if (file) fclose(file);
    return got == 1 ? pages * (size_t)sysconf(_SC_PAGESIZE) : 0;
}

static int limit_address_space(size_t left)
{
    const size_t used = address_space();
    const struct rlimit limit = {used + left, used + left};
    return used && setrlimit(RLIMIT_AS, &limit) == 0;
}

static smoe_status create_threads(smoe_context **context, int threads, char text[256])
{
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
    options.threads = threads;
    options.error_text = text, options.error_size = 256;
    return smoe_create(context, &options);
}

/* Less than one buffer of OpenBLAS is left. */
static int refuse_to_create(void *argument)
{
    (void)argument;
    char text[256] = "";
    smoe_context *context;
    if (!limit_address_space((size_t)100 << 20)) return 1;
    if (create_threads(&context, 1, text) != SMOE_ERROR_MEMORY || context) return 2;
    return strstr(text, "smoe_create: ") && strstr(text, "OpenBLAS") && strstr(text, "129 MiB") ? 0 : 3;
}

/* Creating the context must reserve all memory that OpenBLAS needs, so that the calls need no more. */
static int run_without_more(void *argument)
{
    layer_memory *m = argument;
    char text[256] = "";
    smoe_context *context;
    if (create_threads(&context, 4, text) != SMOE_OK) return 1;
    omp_set_dynamic(0);
    int threads = 0; /* starts the OpenMP threads, whose stacks the OpenMP runtime allocates */
#pragma omp parallel num_threads(4) reduction(+ : threads)
    threads++;
    const size_t before = address_space();
    if (threads != 4 || !limit_address_space(0)) return 2;
    if (smoe_layer_forward(context, &m->layer, &m->forward, NULL) != SMOE_OK) return 3;
    if (smoe_layer_backward(context, &m->layer, &m->backward, NULL) != SMOE_OK) return 4;
    return address_space() == before ? 0 : 5;
}

/* Must run first: a child can start OpenMP threads only if this thread has not started any. */
static void little_address_space_is_an_error(void **state)
{
    (void)state;
    if (SANITIZED) skip(); /* sanitizers need much address space */
    in_child(refuse_to_create, NULL);
    smoe_context *four = open_threads(4);
    layer_memory m = make_layer(four);
    smoe_destroy(four);
    in_child(run_without_more, &m);
    free_layer(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(little_address_space_is_an_error), cmocka_unit_test(contexts_are_created_or_refused),
        cmocka_unit_test(a_cuda_context_needs_a_driver),    cmocka_unit_test(a_context_moves_between_threads),
        cmocka_unit_test(a_forked_process_computes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
