/* What goes wrong between ranks: options that differ, a rank that is late or dies, an abort, too many rows,
 * calls in another order. Every wait ends, every rank names the rank and the reason, and results are NaN. */
#define _GNU_SOURCE /* for ep_case.h */
#include "src/cpu/ep_cpu.h"
#include "tests/ep_case.h"

#include <time.h>

#define COUNT(array) (int)(sizeof(array) / sizeof((array)[0]))

static const int64_t tokens[EP_MOST] = {60, 17, 140, 8, 1, 2, 3, 4};

/* ---- Time, which passes when the test says so: the linker puts these before waits and clock ---- */

/* Shared by processes. Time stands still until `expected` ranks wait for rank `source` in call `call`, so
 * that nobody else is late, however busy the machine is. Then each look at the clock takes 100 ms. */
static struct pretence {
    uint64_t call;
    int source, expected; /* 0: the clock is real */
    atomic_int waiting;
    _Atomic int64_t ms;
} * pretence;

int __real_moe_cpu_ep_wait(smoe_ep *ep, int source, moe_ep_flag flag, uint64_t mark);
int __real_clock_gettime(clockid_t clock, struct timespec *now);
int __wrap_moe_cpu_ep_wait(smoe_ep *ep, int source, moe_ep_flag flag, uint64_t mark);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now);

int __wrap_moe_cpu_ep_wait(smoe_ep *ep, int source, moe_ep_flag flag, uint64_t mark)
{
    if (source == pretence->source && ep->call == pretence->call) atomic_fetch_add(&pretence->waiting, 1);
    return __real_moe_cpu_ep_wait(ep, source, flag, mark);
}

int __wrap_clock_gettime(clockid_t clock, struct timespec *now)
{
    if (!pretence->expected) return __real_clock_gettime(clock, now);
    const int64_t step = atomic_load(&pretence->waiting) < pretence->expected ? 0 : 100,
                  ms = atomic_fetch_add(&pretence->ms, step);
    *now = (struct timespec){ms / 1000, ms % 1000 * 1000000};
    return 0;
}

static void pretend(uint64_t call, int source, int expected)
{
    pretence->call = call;
    pretence->source = source;
    pretence->expected = expected;
    atomic_store(&pretence->waiting, 0);
}

static int make_pretence(void **state)
{
    (void)state;
    pretence = mmap(NULL, sizeof *pretence, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return pretence == MAP_FAILED ? -1 : 0;
}

static ep_case *make(const smoe_layer *layer, uint32_t timeout_ms)
{
    ep_case *c = ep_make(layer, tokens, 0);
    pretend(0, 0, 0);
    c->timeout_ms = timeout_ms;
    ep_copy_inputs(c);
    for (int i = EP_OUT; i < EP_TENSORS; i++) /* the results: no NaN yet */
        if (i <= EP_DS || i >= EP_DW1)
            memset(c->w.at[i].data, 0, (size_t)(c->w.at[i].rows * c->w.at[i].row_bytes));
    return c;
}

static void assert_says(const ep_case *c, int rank, const char *words)
{
    const char *text = smoe_last_error(c->contexts[rank]);
    if (!strstr(text, words)) fail_msg("rank %d says \"%s\", not \"%s\"", rank, text, words);
}

/* All rows of a rank's part are NaN. */
static void assert_nan(const ep_case *c, int rank, ep_tensor_id id, int64_t rows)
{
    const ep_tensor *t = &c->w.at[id];
    const char *part = ep_part(c, rank, id);
    for (int64_t i = 0; i < rows * t->row_bytes / ep_element(t->type); i++)
        if (!isnan(ep_value(part, t->type, i))) fail_msg("%s of rank %d is not all NaN", ep_names[id], rank);
}

static void assert_failed(const ep_case *c, const char *words)
{
    for (int r = 0; r < c->layer.ranks; r++) {
        assert_int_equal(c->status[r], SMOE_ERROR_PEER);
        assert_says(c, r, words);
        assert_int_equal(smoe_ep_status(c->ep[r]), SMOE_ERROR_PEER);
        assert_says(c, r, words);
    }
}

/* ---- Options that differ ---- */

typedef struct difference {
    const char *words; /* with both values */
    void (*change)(smoe_layer *layer);
} difference;

#define CHANGE(name, statement)                                                                              \
    static void name(smoe_layer *layer)                                                                      \
    {                                                                                                        \
        statement;                                                                                           \
    }
CHANGE(more_tokens, layer->max_tokens = 150)
CHANGE(wider, layer->hidden = 80)
CHANGE(more_experts, layer->experts = 16)
CHANGE(more_features, layer->intermediate = 48)
CHANGE(more_waves, layer->waves = 4)
CHANGE(fewer_kept, layer->row_capacity = 64)
CHANGE(other_activation, layer->activation = SMOE_ACTIVATION_GEGLU)
CHANGE(higher_topk, layer->topk = 4)
CHANGE(stored_in_bf16, layer->dtype = layer->gradient_type = SMOE_TYPE_BF16; layer->hidden = 144)
CHANGE(only_inference, layer->inference = 1)
CHANGE(other_entry, layer->entry = SMOE_ENTRY_FROM_LOGITS)
CHANGE(other_gate_limit, layer->gate_limit = 7.5f)
CHANGE(other_limit, layer->up_limit = 8.5f)
CHANGE(other_alpha, layer->gate_alpha = 1.5f)
CHANGE(other_offset, layer->up_offset = 0.5f)
CHANGE(fewer_ranks, layer->ranks = 2)

/* A case of which rank 1 has another layer than the others. Its buffers are those of a case of its own. */
static void run_differing(const smoe_layer *layer, const smoe_layer *other, const char *words)
{
    ep_case *c = make(layer, 20000), *strange = make(other, 20000);
    for (int r = 0; r < layer->ranks; r++) strange->windows[r] = c->windows[r];
    pthread_t threads[EP_MOST];
    ep_thread users[EP_MOST];
    for (int r = 0; r < layer->ranks; r++) ep_join(r == 1 ? strange : c, r, 1);
    for (int r = 0; r < layer->ranks; r++) {
        users[r] = (ep_thread){r == 1 ? strange : c, r, 1};
        assert_int_equal(pthread_create(&threads[r], NULL, ep_thread_main, &users[r]), 0);
    }
    for (int r = 0; r < layer->ranks; r++) pthread_join(threads[r], NULL);
    for (int r = 0; r < layer->ranks; r++) {
        const ep_case *its = r == 1 ? strange : c;
        assert_int_equal(its->status[r], SMOE_ERROR_PEER);
        assert_says(its, r, words);
        assert_says(its, r, "rank 1");
    }
    assert_nan(c, 0, EP_OUT, tokens[0]);
    ep_free(strange);
    ep_free(c);
}

static void every_difference_is_named_with_both_values(void **state)
{
    (void)state;
    static const difference differences[] = {
        {"max_tokens is 1", more_tokens},
        {"bytes of a row of X is ", wider},
        {"experts of each rank is ", more_experts},
        {"intermediate is 4", more_features},
        {"waves is ", more_waves},
        {"rows that are kept (row_capacity) is ", fewer_kept},
        {"activation is ", other_activation},
        {"topk is ", higher_topk},
        {"dtype is ", stored_in_bf16},
        {"training (not inference) is ", only_inference},
        {"entry is ", other_entry},
        {"7.5 on rank 1", other_gate_limit},
        {"8.5 on rank 1", other_limit},
        {"1.5 on rank 1", other_alpha},
        {"0.5 on rank 1", other_offset},
        {"ranks is 4 on rank 0 and 2 on rank 1", fewer_ranks},
    };
    for (int i = 0; i < COUNT(differences); i++) {
        smoe_layer layer = ep_describe(4, 8, 3, SMOE_TYPE_F32);
        layer.waves = 2;
        layer.activation = SMOE_ACTIVATION_SWIGLU_CLAMPED;
        smoe_layer other = layer;
        differences[i].change(&other);
        run_differing(&layer, &other, differences[i].words);
    }
    smoe_layer layer = ep_describe(2, 8, 3, SMOE_TYPE_F32), other = layer;
    other.intermediate = 48;
    run_differing(&layer, &other, "intermediate is 40 on rank 0 and 48 on rank 1");
    layer.entry = SMOE_ENTRY_FROM_LOGITS;
    other = layer;
    other.rounding = SMOE_ROUNDING_UP; /* may add rows to each expert */
    other.tile = 16;
    run_differing(&layer, &other, "most rows from one rank to another is 420 on rank 0 and 480 on rank 1");
}

/* ---- One thread for all ranks, with a difference in one call ---- */

typedef enum what_differs { WANTED_GRADIENTS, PASS } what_differs;

static void run_two(what_differs what, const char *words)
{
    const smoe_layer layer = ep_describe(2, 8, 2, SMOE_TYPE_F32);
    ep_case *c = make(&layer, 20000);
    ep_run_lockstep(c, 1);
    const smoe_layer layers[2] = {ep_layer(c, 0), ep_layer(c, 1)};
    smoe_backward_args b[2] = {ep_backward_args(c, 0), ep_backward_args(c, 1)};
    const smoe_forward_args f = ep_forward_args(c, 1);
    if (what == WANTED_GRADIENTS) b[1].dw2 = NULL;
    assert_int_equal(smoe_ep_dispatch_backward(c->contexts[0], &layers[0], &b[0], NULL), SMOE_OK);
    if (what == PASS)
        assert_int_equal(smoe_ep_dispatch(c->contexts[1], &layers[1], &f, NULL), SMOE_OK);
    else
        assert_int_equal(smoe_ep_dispatch_backward(c->contexts[1], &layers[1], &b[1], NULL), SMOE_OK);
    assert_int_equal(smoe_experts_backward(c->contexts[0], &layers[0], &b[0], NULL), SMOE_ERROR_PEER);
    assert_says(c, 0, words);
    assert_nan(c, 0, EP_DW1, 4);
    assert_nan(c, 0, EP_DW2, 4);
    assert_int_equal(smoe_ep_collect_backward(c->contexts[0], &layers[0], &b[0], NULL), SMOE_ERROR_PEER);
    assert_nan(c, 0, EP_DX, tokens[0]);
    assert_nan(c, 0, EP_DS, tokens[0]);
    if (what == PASS)
        assert_int_equal(smoe_experts_forward(c->contexts[1], &layers[1], &f, NULL), SMOE_ERROR_PEER);
    else
        assert_int_equal(smoe_experts_backward(c->contexts[1], &layers[1], &b[1], NULL), SMOE_ERROR_PEER);
    assert_says(c, 1, words);
    ep_free(c);
}

static void another_call_on_another_rank_is_named(void **state)
{
    (void)state;
    run_two(PASS, "pass (0 forward, 1 backward) is 1 on rank 0 and 0 on rank 1");
    run_two(WANTED_GRADIENTS, "wanted gradients is 23 on rank 0 and 7 on rank 1");
}

/* ---- Late, dead, stopped ---- */

static void a_late_rank_ends_every_wait(void **state)
{
    (void)state;
    const smoe_layer layer = ep_describe(4, 8, 2, SMOE_TYPE_F32);
    ep_case *c = make(&layer, 2000);
    pretend(1, 3, 3);
    for (int r = 0; r < 4; r++) ep_join(c, r, 1);
    pthread_t threads[3];
    ep_thread users[3];
    for (int r = 0; r < 3; r++) {
        users[r] = (ep_thread){c, r, 1};
        assert_int_equal(pthread_create(&threads[r], NULL, ep_thread_main, &users[r]), 0);
    }
    for (int r = 0; r < 3; r++) pthread_join(threads[r], NULL);
    c->status[3] = ep_run_rank(c, 3, 1); /* too late: it learns why the others gave up */
    assert_failed(c, "waited 2000 ms for the start of the call of rank 3");
    for (int r = 0; r < 4; r++) {
        assert_says(c, r, "call 1: rank ");
        assert_nan(c, r, EP_OUT, tokens[r]);
    }
    c->status[0] = ep_run_rank(c, 0, 1); /* and so does every later call, without a wait */
    assert_failed(c, "waited 2000 ms for the start of the call of rank 3");
    ep_free(c);
}

/* Rank 0 has computed the gradients of its weights when it gives up. */
static void sums_that_do_not_come_leave_no_gradient(void **state)
{
    (void)state;
    const smoe_layer layer = ep_describe(2, 8, 2, SMOE_TYPE_F32);
    ep_case *c = make(&layer, 100);
    for (int r = 0; r < 2; r++) ep_join(c, r, 1);
    ep_forward_lockstep(c, NULL, 1);
    const smoe_layer layers[2] = {ep_layer(c, 0), ep_layer(c, 1)};
    const smoe_backward_args b[2] = {ep_backward_args(c, 0), ep_backward_args(c, 1)};
    assert_int_equal(smoe_ep_dispatch_backward(c->contexts[1], &layers[1], &b[1], NULL), SMOE_OK);
    assert_int_equal(smoe_layer_backward(c->contexts[0], &layers[0], &b[0], NULL), SMOE_ERROR_PEER);
    assert_says(c, 0, "call 2: rank 0 waited 100 ms for the sums of rank 1");
    assert_nan(c, 0, EP_DX, tokens[0]);
    assert_nan(c, 0, EP_DS, tokens[0]);
    assert_nan(c, 0, EP_DW1, 4);
    assert_nan(c, 0, EP_DW2, 4);
    ep_free(c);
}

static void a_rank_without_a_group_is_named(void **state)
{
    (void)state;
    const smoe_layer layer = ep_describe(2, 8, 2, SMOE_TYPE_F32);
    ep_case *c = make(&layer, 100);
    ep_join(c, 0, 1);
    assert_int_equal(ep_run_rank(c, 0, 1), SMOE_ERROR_PEER);
    assert_says(c, 0, "rank 0 waited 100 ms for the group of rank 1");
    ep_free(c);
}

/* Rank 2 of three processes ends after its forward, as if it had been killed. */
static void a_process_that_dies_is_named(void **state)
{
    (void)state;
    const smoe_layer layer = ep_describe(4, 8, 2, SMOE_TYPE_F32);
    ep_case *c = make(&layer, 2000);
    pretend(2, 2, 3);
    pid_t children[EP_MOST];
    for (int r = 0; r < 4; r++) {
        children[r] = fork();
        assert_true(children[r] >= 0);
        if (children[r]) continue;
        ep_join(c, r, 1);
        if (r == 2) {
            const smoe_layer mine = ep_layer(c, r);
            const smoe_forward_args f = ep_forward_args(c, r);
            const smoe_status status = smoe_layer_forward(c->contexts[r], &mine, &f, NULL);
            _exit(status == SMOE_OK ? 0 : 1);
        }
        const int failed = ep_run_rank(c, r, 1) == SMOE_ERROR_PEER;
        _exit(failed && strstr(smoe_last_error(c->contexts[r]), "call 2: ") &&
                      strstr(smoe_last_error(c->contexts[r]), "of rank 2")
                  ? 0
                  : 1);
    }
    for (int r = 0; r < 4; r++) {
        int how;
        assert_int_equal(waitpid(children[r], &how, 0), children[r]);
        assert_true(WIFEXITED(how) && WEXITSTATUS(how) == 0);
    }
    for (int r = 0; r < 4; r++)
        if (r != 2) assert_nan(c, r, EP_DX, tokens[r]);
    ep_free(c);
}

static void *abort_a_wait(void *ep)
{
    while (!atomic_load(&pretence->waiting)) sched_yield();
    smoe_ep_abort(ep);
    return NULL;
}

static void an_abort_ends_the_wait_and_tells_the_others(void **state)
{
    (void)state;
    const smoe_layer layer = ep_describe(3, 9, 2, SMOE_TYPE_F32);
    ep_case *c = make(&layer, 20000);
    for (int r = 0; r < 3; r++) ep_join(c, r, 1);
    pretend(1, 1, 0);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, abort_a_wait, c->ep[0]), 0);
    c->status[0] = ep_run_rank(c, 0, 1);
    pthread_join(thread, NULL);
    for (int r = 1; r < 3; r++) c->status[r] = ep_run_rank(c, r, 1);
    assert_failed(c, "call 1: rank 0 was stopped by smoe_ep_abort");
    ep_free(c);
}

/* ---- Arguments ---- */

static void wrong_arguments_are_named(void **state)
{
    (void)state;
    const smoe_layer layer = ep_describe(2, 8, 2, SMOE_TYPE_F32);
    ep_case *c = make(&layer, 1000);
    smoe_context *context = ep_context(1);
    smoe_ep *ep;
    smoe_ep_options o = SMOE_EP_OPTIONS_INIT;
    smoe_layer l = layer;
#define CREATE_FAILS(status, words)                                                                          \
    do {                                                                                                     \
        assert_int_equal(smoe_ep_create(&ep, context, &l, &o), status);                                      \
        assert_null(ep);                                                                                     \
        if (!strstr(smoe_last_error(context), words)) fail_msg("%s", smoe_last_error(context));              \
        l = layer;                                                                                           \
    } while (0)
    CREATE_FAILS(SMOE_ERROR_ARGUMENT, "windows is NULL");
    char *windows[2] = {c->windows[0], NULL};
    o.windows = (void *const *)windows;
    CREATE_FAILS(SMOE_ERROR_ARGUMENT, "windows[1] is NULL");
    windows[1] = c->windows[0];
    CREATE_FAILS(SMOE_ERROR_ARGUMENT, "windows[0] and windows[1] are the same");
    windows[1] = c->windows[1] + 8;
    CREATE_FAILS(SMOE_ERROR_ALIGNMENT, "windows[1] is ");
    o.rank = 2;
    CREATE_FAILS(SMOE_ERROR_ARGUMENT, "rank is 2, the range is 0 to 1");
    o.rank = 0;
    l.ranks = 73;
    CREATE_FAILS(SMOE_ERROR_SHAPE, "ranks is 73, the range is 0 to 72");
    l.ranks = 3;
    CREATE_FAILS(SMOE_ERROR_SHAPE, "experts is 8, it must be a multiple of ranks (3)");
    l.ranks = 0;
    CREATE_FAILS(SMOE_ERROR_SHAPE, "max_tokens is 140, the range is 0 to 0");
    l.waves = 3;
    CREATE_FAILS(SMOE_ERROR_SHAPE, "waves is 3, it must be 0, 1, 2, 4 or 8");
    l.tokens = 141;
    CREATE_FAILS(SMOE_ERROR_SHAPE, "tokens is 141, the range is 0 to 140");
    l.entry = SMOE_ENTRY_FROM_ROWS;
    CREATE_FAILS(SMOE_ERROR_ARGUMENT, "SMOE_ENTRY_FROM_ROWS");
    l.max_tokens = 0, l.ranks = 0;
    CREATE_FAILS(SMOE_ERROR_SHAPE, "tokens is 0");
#undef CREATE_FAILS
    smoe_destroy(context);
    ep_free(c);
}

static void calls_in_the_wrong_order_are_named(void **state)
{
    (void)state;
    const smoe_layer layer = ep_describe(2, 8, 2, SMOE_TYPE_F32);
    ep_case *c = make(&layer, 1000);
    for (int r = 0; r < 2; r++) ep_join(c, r, 1);
    smoe_layer mine = ep_layer(c, 0);
    smoe_forward_args f = ep_forward_args(c, 0);
    assert_int_equal(smoe_plan(c->contexts[0], &mine, &f, NULL), SMOE_OK);
    assert_int_equal(smoe_ep_collect(c->contexts[0], &mine, &f, NULL), SMOE_ERROR_ARGUMENT);
    assert_says(c, 0, "has to go on with smoe_ep_dispatch or smoe_ep_dispatch_backward");
    assert_int_equal(smoe_ep_dispatch(c->contexts[0], &mine, &f, NULL), SMOE_OK);
    assert_int_equal(smoe_layer_forward(c->contexts[0], &mine, &f, NULL), SMOE_ERROR_ARGUMENT);
    assert_says(c, 0, "call 1 of the group has to go on with smoe_experts_forward");
    f.ep = c->ep[1];
    assert_int_equal(smoe_experts_forward(c->contexts[0], &mine, &f, NULL), SMOE_ERROR_ARGUMENT);
    assert_says(c, 0, "args->ep was made with another context");
    f.ep = NULL;
    assert_int_equal(smoe_experts_forward(c->contexts[0], &mine, &f, NULL), SMOE_ERROR_ARGUMENT);
    assert_says(c, 0, "args->ep is NULL, but layer->ranks is 2");
    f.ep = c->ep[0];
    mine.max_tokens = 139;
    assert_int_equal(smoe_experts_forward(c->contexts[0], &mine, &f, NULL), SMOE_ERROR_ARGUMENT);
    assert_says(c, 0, "max_tokens is 139, the group was made for 140");
    ep_free(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_process_that_dies_is_named), /* first, as in test_ep.c */
        cmocka_unit_test(every_difference_is_named_with_both_values),
        cmocka_unit_test(another_call_on_another_rank_is_named),
        cmocka_unit_test(a_late_rank_ends_every_wait),
        cmocka_unit_test(sums_that_do_not_come_leave_no_gradient),
        cmocka_unit_test(a_rank_without_a_group_is_named),
        cmocka_unit_test(an_abort_ends_the_wait_and_tells_the_others),
        cmocka_unit_test(wrong_arguments_are_named),
        cmocka_unit_test(calls_in_the_wrong_order_are_named),
    };
    return cmocka_run_group_tests(tests, make_pretence, NULL);
}
