/* Ranks on a GPU that fail, or that have to wait: W contexts with W windows in the memory of one GPU. What
 * the CPU backend has in tests/test_ep_failures.c. */
#define _GNU_SOURCE /* for ep_case.h */
#define TEST_ON_CUDA
#include "tests/ep_case.h"

static const int64_t uneven[EP_MOST] = {137, 0, 64, 5, 140, 1, 20, 9};

static ep_case *make_failing(const smoe_layer *layer, uint32_t timeout_ms)
{
    ep_case *c = ep_make(layer, uneven, 1);
    c->timeout_ms = timeout_ms;
    ep_copy_inputs(c);
    return c;
}

/* The status of every rank from `first` on is PEER, and its text has these words; O is NaN, and so are the
 * gradients if a backward came next. */
static void assert_failed(const ep_case *c, int first, const char *words)
{
    for (int r = first; r < c->layer.ranks; r++) {
        assert_int_equal(smoe_ep_status(c->ep[r]), SMOE_ERROR_PEER);
        if (!strstr(smoe_last_error(c->contexts[r]), words))
            fail_msg("rank %d: '%s' is not in: %s", r, words, smoe_last_error(c->contexts[r]));
        for (int64_t i = c->first[r]; i < c->first[r + 1]; i++)
            for (int64_t j = 0; j < c->layer.hidden; j++)
                assert_true(isnan(ep_value(ep_w_row(c, EP_OUT, i), SMOE_TYPE_BF16, j)));
    }
}

static void assert_nan(const ep_case *c, int rank, ep_tensor_id id, int64_t rows)
{
    const ep_tensor *t = &c->w.at[id];
    const char *at = ep_part(c, rank, id);
    for (int64_t i = 0; i < rows * t->row_bytes / ep_element(t->type); i++)
        if (!isnan(ep_value(at, t->type, i)))
            fail_msg("%s of rank %d: element %lld is not NaN", ep_names[id], rank, (long long)i);
}

static void zero(const ep_case *c)
{
    for (int id = EP_OUT; id <= EP_DB2; id++)
        if (id <= EP_DS || id >= EP_DW1)
            memset(c->w.at[id].data, 0, (size_t)(c->w.at[id].rows * c->w.at[id].row_bytes));
}

/* Ranks 1, 2 and 3 call; rank 0 never does. */
static void a_rank_that_never_comes_is_named(void **state)
{
    (void)state;
    smoe_layer layer = ep_describe(4, 8, 2, SMOE_TYPE_BF16);
    layer.waves = 2;
    ep_case *c = make_failing(&layer, 60);
    for (int r = 0; r < 4; r++) ep_join(c, r, 1);
    zero(c);
    for (int r = 1; r < 4; r++) ep_run_rank(c, r, 1);
    ep_settle();
    assert_failed(c, 1, "call 1: rank ");
    assert_failed(c, 1, "waited 60 ms for the start of the call of rank 0");
    for (int r = 1; r < 4; r++) {
        const smoe_layer mine = ep_layer(c, r);
        const smoe_backward_args b = ep_backward_args(c, r);
        assert_int_equal(smoe_layer_backward(c->contexts[r], &mine, &b, NULL), SMOE_ERROR_PEER);
        ep_settle();
        assert_nan(c, r, EP_DX, c->tokens[r]);
        assert_nan(c, r, EP_DS, c->tokens[r]);
        for (int id = EP_DW1; id <= EP_DB2; id++) assert_nan(c, r, (ep_tensor_id)id, 2);
    }
    ep_run_rank(c, 0, 1); /* too late: it learns why the others gave up */
    ep_settle();
    assert_failed(c, 0, "waited 60 ms for the start of the call of rank 0");
    ep_free(c);
}

/* Rank 3 ends after a whole step, so that nothing is NaN by itself. */
static void a_rank_that_stops_is_named(void **state)
{
    (void)state;
    const smoe_layer layer = ep_describe(4, 8, 2, SMOE_TYPE_BF16);
    ep_case *c = make_failing(&layer, 60);
    ep_run_lockstep(c, 1);
    zero(c);
    for (int r = 0; r < 3; r++) ep_run_rank(c, r, 1);
    for (int r = 0; r < 3; r++) {
        const smoe_layer mine = ep_layer(c, r);
        const smoe_backward_args b = ep_backward_args(c, r);
        ep_settle();
        assert_int_equal(smoe_layer_backward(c->contexts[r], &mine, &b, NULL), SMOE_ERROR_PEER);
        if (!strstr(smoe_last_error(c->contexts[r]),
                    "call 3: rank 0 waited 60 ms for the start of the call of "))
            fail_msg("%s", smoe_last_error(c->contexts[r]));
        ep_settle();
        assert_nan(c, r, EP_OUT, c->tokens[r]);
        assert_nan(c, r, EP_DX, c->tokens[r]);
        assert_nan(c, r, EP_DS, c->tokens[r]);
        for (int id = EP_DW1; id <= EP_DB2; id++) assert_nan(c, r, (ep_tensor_id)id, 2);
    }
    ep_free(c);
}

/* Rank 0 has computed the gradients of its weights when it gives up. */
static void sums_that_do_not_come_leave_no_gradient(void **state)
{
    (void)state;
    const smoe_layer layer = ep_describe(2, 8, 2, SMOE_TYPE_BF16);
    ep_case *c = make_failing(&layer, 60);
    for (int r = 0; r < 2; r++) ep_join(c, r, 1);
    ep_forward_lockstep(c, NULL, 1);
    ep_settle();
    zero(c);
    const smoe_layer layers[2] = {ep_layer(c, 0), ep_layer(c, 1)};
    const smoe_backward_args b[2] = {ep_backward_args(c, 0), ep_backward_args(c, 1)};
    assert_int_equal(smoe_ep_dispatch_backward(c->contexts[1], &layers[1], &b[1], NULL), SMOE_OK);
    smoe_layer_backward(c->contexts[0], &layers[0], &b[0], NULL);
    ep_settle();
    assert_int_equal(smoe_ep_status(c->ep[0]), SMOE_ERROR_PEER);
    if (!strstr(smoe_last_error(c->contexts[0]), "call 2: rank 0 waited 60 ms for the sums of rank 1"))
        fail_msg("%s", smoe_last_error(c->contexts[0]));
    assert_nan(c, 0, EP_DX, c->tokens[0]);
    assert_nan(c, 0, EP_DS, c->tokens[0]);
    for (int id = EP_DW1; id <= EP_DB2; id++) assert_nan(c, 0, (ep_tensor_id)id, 4);
    ep_free(c);
}

static void an_abort_ends_the_wait(void **state)
{
    (void)state;
    const smoe_layer layer = ep_describe(2, 8, 2, SMOE_TYPE_BF16);
    ep_case *c = make_failing(&layer, 20000);
    for (int r = 0; r < 2; r++) ep_join(c, r, 1);
    smoe_ep_abort(c->ep[0]);
    ep_run_rank(c, 0, 1);
    ep_run_rank(c, 1, 1);
    ep_settle();
    assert_failed(c, 0, "call 1: rank 0 was stopped by smoe_ep_abort");
    ep_free(c);
}

static void differences_are_named_with_both_values(void **state)
{
    (void)state;
    const smoe_layer layer = ep_describe(2, 8, 2, SMOE_TYPE_BF16);
    ep_case *c = make_failing(&layer, 1000);
    for (int r = 0; r < 2; r++) ep_join(c, r, 1);
    for (int i = 0; i < 3; i++)
        for (int r = 0; r < 2; r++) {
            smoe_layer mine = ep_layer(c, r);
            mine.activation = r ? SMOE_ACTIVATION_GEGLU : SMOE_ACTIVATION_SWIGLU;
            const smoe_forward_args f = ep_forward_args(c, r);
            ep_forward_call *const calls[] = {smoe_plan, smoe_ep_dispatch, smoe_experts_forward};
            calls[i](c->contexts[r], &mine, &f, NULL);
        }
    ep_settle();
    char words[100];
    snprintf(words, sizeof words, "call 1: activation is %d on rank 0 and %d on rank 1",
             (int)SMOE_ACTIVATION_SWIGLU, (int)SMOE_ACTIVATION_GEGLU);
    for (int r = 0; r < 2; r++) {
        assert_int_equal(smoe_ep_status(c->ep[r]), SMOE_ERROR_PEER);
        if (!strstr(smoe_last_error(c->contexts[r]), words)) fail_msg("%s", smoe_last_error(c->contexts[r]));
    }
    ep_free(c);
}

static void groups_of_other_sizes_are_named(void **state)
{
    (void)state;
    const smoe_layer layer = ep_describe(2, 8, 2, SMOE_TYPE_BF16);
    ep_case *c = make_failing(&layer, 1000);
    ep_join(c, 0, 1);
    c->layer.hidden = 64;
    ep_join(c, 1, 1);
    c->layer.hidden = 72;
    ep_run_rank(c, 0, 1);
    ep_settle();
    assert_int_equal(smoe_ep_status(c->ep[0]), SMOE_ERROR_PEER);
    if (!strstr(smoe_last_error(c->contexts[0]), "bytes of a row of X is 144 on rank 0 and 128 on rank 1"))
        fail_msg("%s", smoe_last_error(c->contexts[0]));
    ep_free(c);
}

/* Rank 1's next call, which begins while rank 0 still computes its own rows, the last of a forward in waves.
 */
typedef struct early_call {
    ep_case *first, *second;
    int ups; /* of rank 0 */
} early_call;

static void begin_early(void *user, smoe_stage stage, int end, void *stream)
{
    early_call *e = user;
    const smoe_layer was = ep_layer(e->first, 1), is = ep_layer(e->second, 1);
    const smoe_forward_args f = ep_forward_args(e->first, 1), next = ep_forward_args(e->second, 1);
    if (stage != SMOE_STAGE_UP || end || ++e->ups != moe_ep_waves(was.waves)) return;
    assert_int_equal(smoe_ep_collect(e->first->contexts[1], &was, &f, stream), SMOE_OK);
    smoe_ep_dispatch(e->first->contexts[1], &is, &next, stream);
}

/* Rows of another size have other places in a window, also those of rows that rank 0 has yet to read. */
static void rows_of_another_size_wait_for_all_readers(void **state)
{
    (void)state;
    for (int other = 0; other <= 1; other++) {
        smoe_layer layer = ep_describe(2, 8, 3, SMOE_TYPE_BF16);
        layer.waves = 2;
        early_call e = {.first = ep_make(&layer, uneven, 0)};
        ep_case *c = e.first;
        layer.hidden = other ? 64 : layer.hidden;
        e.second = ep_make(&layer, uneven, 0);
        c->timeout_ms = 60;
        ep_copy_inputs(c);
        ep_copy_inputs(e.second);
        for (int r = 0; r < 2; r++) {
            ep_join(c, r, 1);
            e.second->ep[r] = c->ep[r];
        }
        ep_forward_call *const calls[] = {smoe_plan, smoe_ep_dispatch};
        for (int i = 0; i < 2; i++)
            for (int r = 0; r < 2; r++) {
                const smoe_layer mine = ep_layer(c, r);
                const smoe_forward_args f = ep_forward_args(c, r);
                assert_int_equal(calls[i](c->contexts[r], &mine, &f, NULL), SMOE_OK);
            }
        const smoe_layer layers[] = {ep_layer(c, 0), ep_layer(c, 1), ep_layer(e.second, 1)};
        const smoe_forward_args f0 = ep_forward_args(c, 0), f1 = ep_forward_args(c, 1),
                                next = ep_forward_args(e.second, 1);
        assert_int_equal(smoe_plan(c->contexts[1], &layers[2], &next, NULL), SMOE_OK);
        assert_int_equal(smoe_experts_forward(c->contexts[1], &layers[1], &f1, NULL), SMOE_OK);
        c->contexts[0]->on_stage = begin_early;
        c->contexts[0]->on_stage_user = &e;
        assert_int_equal(smoe_experts_forward(c->contexts[0], &layers[0], &f0, NULL), SMOE_OK);
        c->contexts[0]->on_stage = NULL;
        ep_settle();
        assert_int_equal(e.ups, moe_ep_waves(2));
        assert_int_equal(smoe_ep_status(c->ep[1]), other ? SMOE_ERROR_PEER : SMOE_OK);
        if (other && !strstr(smoe_last_error(c->contexts[1]),
                             "call 2: rank 1 waited 60 ms for the end of an earlier call of rank 0"))
            fail_msg("%s", smoe_last_error(c->contexts[1]));
        for (int r = 0; r < 2; r++) e.second->ep[r] = NULL;
        ep_free(e.second);
        ep_free(c);
    }
}

#ifdef TEST_ON_EMULATOR
#include "host/ep_launch.h"

extern void (*emulator_after_cta)(void);
static uint32_t *failed_word; /* of rank 0 */

static void fail_rank_0(void)
{
    *failed_word = 1;
}

/* For few tokens every CTA of collect waits itself. A later one gives up when the first is already done. */
static void no_row_is_a_number_if_a_later_cta_gives_up(void **state)
{
    (void)state;
    static const int64_t full[] = {64, 64};
    smoe_layer layer = ep_describe(2, 8, 2, SMOE_TYPE_BF16);
    layer.max_tokens = 64;
    ep_case *c = ep_make(&layer, full, 0);
    ep_copy_inputs(c);
    ep_run_lockstep(c, 1);
    zero(c);
    moe_ep_window window;
    moe_ep_window_init(&window, &layer);
    failed_word = &((moe_ep_state *)(void *)(c->windows[0] + window.state))->failed;
    ep_forward_call *const calls[] = {smoe_plan, smoe_ep_dispatch, smoe_experts_forward, smoe_ep_collect};
    for (int i = 0; i < 4; i++)
        for (int r = 0; r < 2; r++) {
            const smoe_layer mine = ep_layer(c, r);
            const smoe_forward_args f = ep_forward_args(c, r);
            emulator_after_cta = i == 3 && r == 0 ? fail_rank_0 : NULL;
            assert_int_equal(calls[i](c->contexts[r], &mine, &f, NULL), SMOE_OK);
        }
    emulator_after_cta = NULL;
    assert_nan(c, 0, EP_OUT, 64);
    assert_false(isnan(ep_value(ep_w_row(c, EP_OUT, c->first[1]), SMOE_TYPE_BF16, 0)));
    ep_free(c);
}
#endif

int main(int argc, char **argv)
{
    /* Kernels that wait and those that they wait for are in different queues, and are all loaded before. */
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    smoe_destroy(open_cuda()); /* without a GPU the test is skipped */
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_of_another_size_wait_for_all_readers),
        cmocka_unit_test(a_rank_that_never_comes_is_named),
        cmocka_unit_test(a_rank_that_stops_is_named),
        cmocka_unit_test(sums_that_do_not_come_leave_no_gradient),
        cmocka_unit_test(an_abort_ends_the_wait),
        cmocka_unit_test(differences_are_named_with_both_values),
        cmocka_unit_test(groups_of_other_sizes_are_named),
#ifdef TEST_ON_EMULATOR
        cmocka_unit_test(no_row_is_a_number_if_a_later_cta_gives_up),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
