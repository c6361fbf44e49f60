/* The caller may want any subset of the gradients. A gradient must have the same bits as in a backward that
 * computes all gradients. Arguments that only the other gradients need are NULL, and only the stages that the
 * wanted gradients need may run. On the CPU every subset is tested. On a GPU, or the emulator: no gradient,
 * each alone, all but one, and those with frozen weights. The gradients must also have the same bits if the
 * backward runs on another thread than the forward. TEST_DEVICE in the environment: the number of the GPU. */
#include <smoe.h>

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#ifdef TEST_ON_CUDA
#include "cuda/gpu.h"
#include "cuda/open_cuda.h"
#endif

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

enum gradient { DX, DW1, DB1, DW2, DB2, DWR, DBR, DLOGITS, DS, GRADIENTS };
static const char *const names[GRADIENTS] = {"dx",           "dw1",     "db1", "dw2", "db2", "drouter_weight",
                                             "drouter_bias", "dlogits", "dS"};

#ifdef TEST_ON_CUDA
static int test_device(void)
{
    const char *number = getenv("TEST_DEVICE");
    return number ? atoi(number) : 0;
}
#endif

/* ---- Memory that the backend can read ---- */

static void *make_bytes(size_t bytes)
{
#ifdef TEST_ON_CUDA
    return gpu_alloc(bytes).memory;
#else
    void *p = aligned_alloc(256, (bytes + 255) / 256 * 256);
    assert_non_null(p);
    memset(p, 0xff, bytes);
    return p;
#endif
}

static void free_bytes(void *p)
{
#ifdef TEST_ON_CUDA
    if (p) CHECK_CUDA(cudaFree((char *)p - CANARY_BYTES));
#else
    free(p);
#endif
}

static void poison(void *p, size_t bytes)
{
#ifdef TEST_ON_CUDA
    CHECK_CUDA(cudaMemset(p, 0xff, bytes));
#else
    memset(p, 0xff, bytes);
#endif
}

static void copy_out(void *to, const void *from, size_t bytes)
{
#ifdef TEST_ON_CUDA
    CHECK_CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
#else
    memcpy(to, from, bytes);
#endif
}

static void *copy_in(const void *from, size_t bytes)
{
    void *p = make_bytes(bytes);
#ifdef TEST_ON_CUDA
    CHECK_CUDA(cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice));
#else
    memcpy(p, from, bytes);
#endif
    return p;
}

/* Numbers of about 0.5 to 1, either sign, scaled by a power of two; exact in bf16. */
static void *make_numbers(size_t count, smoe_type type, int exponent, uint32_t seed)
{
    uint32_t *wide = malloc(count * sizeof *wide);
    uint16_t *narrow = malloc(count * sizeof *narrow);
    assert_true(wide && narrow);
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        narrow[i] = (uint16_t)((seed >> 31) << 15 | (uint32_t)(126 + exponent) << 7 | (seed >> 24 & 0x7f));
        wide[i] = (uint32_t)narrow[i] << 16;
    }
    void *made = type == SMOE_TYPE_F32 ? copy_in(wide, 4 * count) : copy_in(narrow, 2 * count);
    free(wide), free(narrow);
    return made;
}

/* ---- A layer ---- */

/* What a case varies. */
typedef struct gradient_case {
    const char *name;
    smoe_entry entry;
    smoe_type dtype;
    smoe_activation activation;
    smoe_score score;
    int32_t renormalize, accumulate, reuse_saved, chunks;
    int biases, router_weight;
    smoe_rounding rounding;
    float balance;
} gradient_case;

typedef struct layer_run {
    smoe_layer layer;
    smoe_context *context;
    smoe_forward_args forward;
    smoe_backward_args backward; /* with all gradients */
    void *saved_after;           /* host copy of `saved` after the forward */
    void *given[16];
    int given_count;
    void *gradient[GRADIENTS]; /* NULL: the layer has none */
    size_t bytes[GRADIENTS];
    void *full[GRADIENTS]; /* host copies of the gradients of a backward that computes all */
    unsigned stages;       /* the stages that ran: bit number stage / 10 */
} layer_run;

/* The CPU backend passes any stream pointer to on_stage, so the test uses it for its own data. */
#ifdef TEST_ON_CUDA
#define STREAM_OF(run) ((void)(run), NULL)
#else
#define STREAM_OF(run) ((void *)(run))
#endif

static void on_stage(void *user, smoe_stage stage, int end, void *stream)
{
    layer_run *run = user;
    if (!end) run->stages |= 1u << (int)stage / 10;
    if (stream != STREAM_OF(run))
        fail_msg("stage %s was told another stream than the call", smoe_stage_string(stage));
}

static void *keep(layer_run *run, void *memory)
{
    return run->given[run->given_count++] = memory;
}

static void open_context(layer_run *run)
{
    smoe_context_options options = SMOE_CONTEXT_OPTIONS_INIT;
#ifdef TEST_ON_CUDA
    options.backend = SMOE_BACKEND_CUDA;
    options.device = test_device();
    options.kernels = kernels_of_environment();
#endif
    options.threads = 2;
    options.on_stage = on_stage, options.on_stage_user = run;
    assert_int_equal(smoe_create(&run->context, &options), SMOE_OK);
}

static void must(const layer_run *run, smoe_status status)
{
    if (status != SMOE_OK) fail_msg("%s", smoe_last_error(run->context));
}

static void make_inputs(layer_run *run, const gradient_case *c, const smoe_sizes *sizes)
{
    const smoe_layer *l = &run->layer;
    const size_t t = (size_t)l->tokens, d = (size_t)l->hidden, n = (size_t)l->intermediate;
    const size_t e = (size_t)l->experts, width = l->activation < SMOE_ACTIVATION_SILU ? 2 * n : n;
    smoe_forward_args f = SMOE_FORWARD_ARGS_INIT;
    f.x = keep(run, make_numbers(t * d, l->dtype, 0, 1));
    f.w1 = keep(run, make_numbers(e * width * d, l->dtype, -3, 2));
    f.w2 = keep(run, make_numbers(e * d * n, l->dtype, -2, 3));
    if (c->biases) {
        f.b1 = keep(run, make_numbers(e * width, l->dtype, 0, 4));
        f.b2 = keep(run, make_numbers(e * d, l->dtype, 0, 5));
    }
    if (l->entry == SMOE_ENTRY_FROM_LOGITS) {
        f.logits = keep(run, make_numbers(t * e, SMOE_TYPE_F32, 0, 6));
        if (c->router_weight) {
            f.router_weight = keep(run, make_numbers(e * d, l->dtype, -2, 7));
            f.router_bias = keep(run, make_numbers(e, l->dtype, 0, 8));
        }
    } else if (l->entry == SMOE_ENTRY_FROM_TOPK) {
        int32_t *ids = malloc(sizeof *ids * t * (size_t)l->topk);
        assert_non_null(ids);
        for (size_t i = 0; i < t * (size_t)l->topk; i++)
            ids[i] = (int32_t)(i * 7 % (e + 1)); /* pairs with id E are skipped */
        f.topk_ids = keep(run, copy_in(ids, sizeof *ids * t * (size_t)l->topk));
        f.topk_weights = keep(run, make_numbers(t * (size_t)l->topk, SMOE_TYPE_F32, 0, 9));
        free(ids);
    } else {
        int32_t offsets[65];
        for (size_t i = 0; i <= e; i++) offsets[i] = (int32_t)((t - 5) * i / e);
        f.offsets = keep(run, copy_in(offsets, sizeof *offsets * (e + 1)));
        f.row_weights = keep(run, make_numbers(t, SMOE_TYPE_F32, 0, 10));
    }
    const size_t element = l->dtype == SMOE_TYPE_F32 ? 4 : 2;
    f.out = keep(run, make_bytes(t * d * element));
    f.saved = keep(run, make_bytes(f.saved_size = sizes->saved_buffer_bytes));
    f.scratch = keep(run, make_bytes(f.scratch_size = sizes->scratch_forward_bytes));
    run->forward = f;
    smoe_backward_args b = SMOE_BACKWARD_ARGS_INIT;
    b.x = f.x, b.router_weight = f.router_weight, b.logits = f.logits, b.topk_ids = f.topk_ids;
    b.w1 = f.w1, b.w2 = f.w2, b.b2 = f.b2; /* the others are unused: b1 and the given weights and offsets */
    b.saved = f.saved, b.saved_size = f.saved_size;
    b.dout = keep(run, make_numbers(t * d, l->dtype, 0, 11));
    b.balance_coefficient = c->balance;
    b.scratch = keep(run, make_bytes(b.scratch_size = sizes->scratch_backward_bytes));
    run->backward = b;
}

static void make_gradients(layer_run *run, const smoe_sizes *sizes)
{
    const smoe_layer *l = &run->layer;
    const smoe_forward_args *f = &run->forward;
    const size_t t = (size_t)l->tokens, d = (size_t)l->hidden, n = (size_t)l->intermediate;
    const size_t e = (size_t)l->experts, width = l->activation < SMOE_ACTIVATION_SILU ? 2 * n : n;
    const size_t element = l->dtype == SMOE_TYPE_F32 ? 4 : 2, g = l->gradient_type == SMOE_TYPE_F32 ? 4 : 2;
    const int router = f->router_weight != NULL;
    const size_t ds[] = {(size_t)sizes->padded_rows, t * (size_t)l->topk, t};
    const size_t bytes[GRADIENTS] = {
        [DX] = t * d * element,
        [DW1] = e * width * d * g,
        [DB1] = f->b1 ? e * width * g : 0,
        [DW2] = e * d * n * g,
        [DB2] = f->b2 ? e * d * g : 0,
        [DWR] = router ? e * d * g : 0,
        [DBR] = router ? e * g : 0,
        [DLOGITS] = f->logits ? 4 * t * e : 0,
        [DS] = 4 * ds[l->entry],
    };
    for (int i = 0; i < GRADIENTS; i++) {
        run->bytes[i] = bytes[i];
        run->gradient[i] = bytes[i] ? make_bytes(bytes[i]) : NULL;
    }
}

/* Sets the gradients before a backward: to numbers with accumulate, else to NaN. */
static void start_gradients(const layer_run *run)
{
    for (int i = 0; i < GRADIENTS; i++) {
        if (!run->bytes[i]) continue;
        poison(run->gradient[i], run->bytes[i]);
        if (!run->layer.accumulate || i == DX || i == DLOGITS || i == DS) continue;
        const smoe_type type = run->layer.gradient_type;
        const size_t count = run->bytes[i] / (type == SMOE_TYPE_F32 ? 4 : 2);
        void *numbers = make_numbers(count, type, 0, 20 + (uint32_t)i), *host = malloc(run->bytes[i]);
        assert_non_null(host);
        copy_out(host, numbers, run->bytes[i]);
#ifdef TEST_ON_CUDA
        CHECK_CUDA(cudaMemcpy(run->gradient[i], host, run->bytes[i], cudaMemcpyHostToDevice));
#else
        memcpy(run->gradient[i], host, run->bytes[i]);
#endif
        free(host), free_bytes(numbers);
    }
}

/* The arguments for some gradients, with NULL for all that none of them needs. */
static smoe_backward_args arguments_for(const layer_run *run, unsigned wanted)
{
    void *g[GRADIENTS];
    for (int i = 0; i < GRADIENTS; i++) g[i] = wanted >> i & 1 ? run->gradient[i] : NULL;
    smoe_backward_args b = run->backward;
    b.dx = g[DX], b.dw1 = g[DW1], b.db1 = g[DB1], b.dw2 = g[DW2], b.db2 = g[DB2];
    b.drouter_weight = g[DWR], b.drouter_bias = g[DBR], b.dlogits = g[DLOGITS];
    if (run->layer.entry == SMOE_ENTRY_FROM_TOPK)
        b.dtopk_weights = g[DS];
    else
        b.drow_weights = g[DS];
    const int router = g[DWR] || g[DBR] || g[DLOGITS] || (g[DX] && b.router_weight);
    const int da = router || g[DS] || g[DX] || g[DW1] || g[DB1] || g[DW2];
    if (!g[DW1] && !g[DWR]) b.x = NULL;
    if (!router) b.logits = NULL;
    if (!g[DX]) b.w1 = NULL;
    if (!da) b.w2 = NULL;
    if (!da && !g[DB2]) b.dout = NULL;
    if (!b.dtopk_weights) b.topk_ids = NULL;
    return b;
}

/* The stages that some gradients need, by the equations of smoe.h. On the CPU A' is computed from the stored
 * H; on a GPU the stage dh writes it. */
static unsigned stages_for(const layer_run *run, unsigned wanted)
{
    const smoe_backward_args b = arguments_for(run, wanted);
    const int router = b.logits != NULL;
    int dh = router || b.dtopk_weights || b.drow_weights || b.dx || b.dw1 || b.db1;
#ifdef TEST_ON_CUDA
    dh = dh || b.dw2;
#endif
    unsigned stages = 0;
    if (dh) stages |= 1u << SMOE_STAGE_DH / 10;
    if (b.dw2 || b.db2) stages |= 1u << SMOE_STAGE_DW2 / 10;
    if (b.dw1 || b.db1) stages |= 1u << SMOE_STAGE_DW1 / 10;
    if (router) stages |= 1u << SMOE_STAGE_ROUTER_BWD / 10;
    if (b.dx) stages |= 1u << SMOE_STAGE_DX_ROWS / 10 | 1u << SMOE_STAGE_DX / 10;
    return stages;
}

/* reuse_saved overwrites H, so `saved` is restored before every backward. */
static smoe_backward_args prepare_backward(layer_run *run, unsigned wanted)
{
    const smoe_backward_args b = arguments_for(run, wanted);
    start_gradients(run);
    poison(b.scratch, b.scratch_size);
#ifdef TEST_ON_CUDA
    CHECK_CUDA(cudaMemcpy(b.saved, run->saved_after, b.saved_size, cudaMemcpyHostToDevice));
#else
    memcpy(b.saved, run->saved_after, b.saved_size);
#endif
    run->stages = 0;
    return b;
}

static void run_backward(layer_run *run, unsigned wanted)
{
    const smoe_backward_args b = prepare_backward(run, wanted);
    must(run, smoe_layer_backward(run->context, &run->layer, &b, STREAM_OF(run)));
}

/* Checks that every wanted gradient has the bits of the backward that computed all gradients. */
static void compare_gradients(const layer_run *run, const char *name, unsigned wanted, const char *how)
{
    for (int i = 0; i < GRADIENTS; i++) {
        if (!run->bytes[i] || !(wanted >> i & 1)) continue;
        void *got = malloc(run->bytes[i]);
        assert_non_null(got);
        copy_out(got, run->gradient[i], run->bytes[i]);
        const int same = memcmp(got, run->full[i], run->bytes[i]) == 0;
        free(got);
        if (!same) fail_msg("%s, gradients %03x%s: %s has other bits", name, wanted, how, names[i]);
    }
}

static void check_wanted(layer_run *run, const char *name, unsigned wanted)
{
    run_backward(run, wanted);
    if (run->stages != stages_for(run, wanted))
        fail_msg("%s, gradients %03x: stages %x, expected %x", name, wanted, run->stages,
                 stages_for(run, wanted));
    compare_gradients(run, name, wanted, "");
}

static layer_run make_run(const gradient_case *c, layer_run *run)
{
    *run = (layer_run){.layer = SMOE_LAYER_INIT};
    smoe_layer *l = &run->layer;
    l->tokens = 90, l->hidden = 72, l->intermediate = 24, l->experts = 6;
    l->topk = c->entry == SMOE_ENTRY_FROM_ROWS ? 1 : 2;
    l->entry = c->entry, l->dtype = l->gradient_type = c->dtype, l->activation = c->activation;
    l->score = c->score, l->renormalize = c->renormalize, l->accumulate = c->accumulate;
    l->reuse_saved = c->reuse_saved, l->chunks = c->chunks ? c->chunks : 1;
    l->rounding = c->rounding, l->tile = 8;
    open_context(run);
    smoe_sizes sizes = SMOE_SIZES_INIT;
    must(run, smoe_query_sizes(run->context, l, &sizes));
    make_inputs(run, c, &sizes);
    make_gradients(run, &sizes);
    must(run, smoe_layer_forward(run->context, l, &run->forward, STREAM_OF(run)));
    run->saved_after = malloc(sizes.saved_buffer_bytes);
    assert_non_null(run->saved_after);
    copy_out(run->saved_after, run->forward.saved, sizes.saved_buffer_bytes);
    return *run;
}

static void free_run(layer_run *run)
{
    smoe_destroy(run->context);
    for (int i = 0; i < run->given_count; i++) free_bytes(run->given[i]);
    for (int i = 0; i < GRADIENTS; i++) free_bytes(run->gradient[i]), free(run->full[i]);
    free(run->saved_after);
}

/* Runs the forward, and the backward with all gradients, which run->full keeps. Returns a mask of them. */
static unsigned make_full(const gradient_case *c, layer_run *run)
{
    make_run(c, run);
    unsigned all = 0;
    for (int i = 0; i < GRADIENTS; i++) all |= (unsigned)(run->bytes[i] > 0) << i;
    run_backward(run, all);
    for (int i = 0; i < GRADIENTS; i++) {
        if (!run->bytes[i]) continue;
        run->full[i] = malloc(run->bytes[i]);
        assert_non_null(run->full[i]);
        copy_out(run->full[i], run->gradient[i], run->bytes[i]);
    }
    return all;
}

static void check_case(const gradient_case *c)
{
    layer_run run;
    const unsigned all = make_full(c, &run);
#ifdef TEST_ON_CUDA
    check_wanted(&run, c->name, 0);
    check_wanted(&run, c->name, all & ~(1u << DW1 | 1u << DW2 | 1u << DB1 | 1u << DB2)); /* frozen experts */
    check_wanted(&run, c->name, all & ~(1u << DWR | 1u << DBR | 1u << DLOGITS));         /* frozen router */
    for (int i = 0; i < GRADIENTS; i++)
        if (run.bytes[i]) check_wanted(&run, c->name, 1u << i), check_wanted(&run, c->name, all & ~(1u << i));
#else
    for (unsigned wanted = 0; wanted <= all; wanted++)
        if ((wanted & ~all) == 0) check_wanted(&run, c->name, wanted);
#endif
    free_run(&run);
}

#ifdef TEST_ON_CUDA
#define WIDE SMOE_TYPE_BF16 /* only the CPU backend has f32 */
#else
#define WIDE SMOE_TYPE_F32
#endif

static const gradient_case cases[] = {
    {"softmax, dense dlogits", .dtype = WIDE, .biases = 1, .router_weight = 1},
    {"renormalized, sparse dlogits", .dtype = SMOE_TYPE_BF16, .biases = 1, .router_weight = 1,
     .renormalize = 1, .accumulate = 1},
    {"given logits, rounded, a loss", .dtype = SMOE_TYPE_BF16, .score = SMOE_SCORE_SIGMOID,
     .activation = SMOE_ACTIVATION_RELU2, .rounding = SMOE_ROUNDING_UP, .balance = 0.5f, .reuse_saved = 1},
    {"given top-K", .entry = SMOE_ENTRY_FROM_TOPK, .dtype = WIDE, .biases = 1, .reuse_saved = 1},
    {"given rows", .entry = SMOE_ENTRY_FROM_ROWS, .dtype = SMOE_TYPE_BF16, .chunks = 2},
};

static void test_wanted(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++) check_case(&cases[i]);
}

/* ---- Another thread ---- */

typedef struct job {
    layer_run *run;
    smoe_backward_args arguments;
    int backward;
    smoe_status status;
    int same_device; /* whether the call has not changed the thread's current device */
} job;

static void *run_job(void *argument)
{
    job *j = argument;
    const layer_run *run = j->run;
    int before = 0, after = 0;
#ifdef TEST_ON_CUDA
    cudaGetDevice(&before);
#endif
    j->status = j->backward ? smoe_layer_backward(run->context, &run->layer, &j->arguments, STREAM_OF(run))
                            : smoe_layer_forward(run->context, &run->layer, &run->forward, STREAM_OF(run));
#ifdef TEST_ON_CUDA
    cudaGetDevice(&after);
    if (cudaDeviceSynchronize() != cudaSuccess) j->status = SMOE_ERROR_DEVICE;
#endif
    j->same_device = before == after;
    return NULL;
}

static void run_elsewhere(job j)
{
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, run_job, &j), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    must(j.run, j.status);
    assert_true(j.same_device);
}

/* As in PyTorch's autograd, one thread runs the forward and another the backward, with a context that a third
 * thread has created. The current device of a new thread is 0, which may not be the context's. */
static void test_other_threads(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++) {
        layer_run run;
        const unsigned all = make_full(&cases[i], &run);
        poison(run.forward.scratch, run.forward.scratch_size);
        const smoe_backward_args arguments = prepare_backward(&run, all);
        poison(run.forward.saved, run.forward.saved_size);
        run_elsewhere((job){.run = &run});
        run_elsewhere((job){.run = &run, .arguments = arguments, .backward = 1});
        compare_gradients(&run, cases[i].name, all, ", other threads");
        free_run(&run);
    }
}

#ifdef TEST_ON_CUDA
/* The caller's own code has caused a CUDA error that cudaGetLastError would return. No call of the library
 * may report or clear it. */
static void test_caller_error(void **state)
{
    (void)state;
    layer_run run;
    make_run(&cases[0], &run);
    void *none;
    assert_int_equal(cudaMalloc(&none, (size_t)1 << 60), cudaErrorMemoryAllocation);
    must(&run, smoe_layer_forward(run.context, &run.layer, &run.forward, NULL));
    run.backward.dx = run.gradient[DX], run.backward.db2 = run.gradient[DB2],
    run.backward.dw1 = run.gradient[DW1];
    must(&run, smoe_layer_backward(run.context, &run.layer, &run.backward, NULL));
    assert_int_equal(cudaGetLastError(), cudaErrorMemoryAllocation);
    CHECK_CUDA(cudaDeviceSynchronize());
    free_run(&run);
}
#endif

int main(void)
{
#ifdef TEST_ON_CUDA
    smoe_destroy(open_cuda()); /* without a GPU the program ends here */
    CHECK_CUDA(cudaSetDevice(test_device()));
#endif
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_wanted),
        cmocka_unit_test(test_other_threads),
#ifdef TEST_ON_CUDA
        cmocka_unit_test(test_caller_error),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
