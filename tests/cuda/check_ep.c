/* Layers with ranks on a GPU, compared with the same layer without ranks: W contexts with W windows in the
 * memory of one GPU, in lockstep. What the CPU backend has in tests/test_ep.c. */
#define _GNU_SOURCE /* for ep_case.h */
#define TEST_ON_CUDA
#include "src/activations.h"
#include "tests/ep_capacity.h"
#include "tests/ep_pair.h"

#define COUNT(array) (int)(sizeof(array) / sizeof((array)[0]))

static const int64_t uneven[EP_MOST] = {137, 0, 64, 5, 140, 1, 20, 9};

static void check_lockstep(const smoe_layer *layer, const int64_t *tokens, int biases, int steps)
{
    ep_case *c = ep_make(layer, tokens, biases);
    c->timeout_ms = 1000; /* what a wait would need is there before each call */
    ep_copy_inputs(c);
    ep_run_g(c);
    for (int i = 0; i < steps; i++) ep_run_lockstep(c, 1);
    ep_assert_same(c);
    ep_free(c);
}

/* ---- Equal to the layer without ranks ---- */

static void lockstep_gives_the_layers_bits(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 8; ranks *= 2)
        for (int64_t topk = 1; topk <= 16; topk += ranks == 4 ? 5 : 15) {
            smoe_layer layer = ep_describe(ranks, 16, topk, SMOE_TYPE_BF16);
            layer.waves = 1;
            layer.chunks = topk == 6 ? 2 : 1;
            check_lockstep(&layer, uneven, topk > 1, 1);
        }
}

static void every_number_of_waves_gives_the_same_bits(void **state)
{
    (void)state;
    for (int waves = 0; waves <= 8; waves = waves ? 2 * waves : 1)
        for (int ranks = 1; ranks <= 4; ranks *= 2) { /* with two ranks and K = 4 rows travel by copies */
            smoe_layer layer = ep_describe(ranks, 8, ranks == 2 ? 4 : 3, SMOE_TYPE_BF16);
            layer.waves = waves;
            layer.chunks = waves == 4 ? 2 : 1;
            check_lockstep(&layer, uneven, waves > 1, 1);
        }
}

static void all_activations_give_the_layers_bits(void **state)
{
    (void)state;
    static const smoe_activation activations[] = {
#define LISTED(enumerator, name, shape, curve) enumerator,
        MOE_ACTIVATIONS(LISTED)
#undef LISTED
    };
    for (int i = 0; i < COUNT(activations); i++) {
        smoe_layer layer = ep_describe(2, 6, 2, SMOE_TYPE_BF16);
        layer.activation = activations[i];
        layer.layout = i % 2 ? SMOE_LAYOUT_INTERLEAVED : SMOE_LAYOUT_CONCATENATED;
        check_lockstep(&layer, uneven, 1, 1);
    }
}

static void ranks_route_from_logits(void **state)
{
    (void)state;
    for (int score = 0; score < 3; score++) {
        smoe_layer layer = ep_describe(4, 12, 3, SMOE_TYPE_BF16);
        layer.entry = SMOE_ENTRY_FROM_LOGITS;
        layer.score = (smoe_score)score;
        check_lockstep(&layer, uneven, 1, 2);
    }
}

/* The router's term of dX, and dWr, whose sum over the ranks is G's. */
static void check_router(smoe_score score, int ranks)
{
    smoe_layer layer = ep_describe(ranks, 12, 3, SMOE_TYPE_BF16);
    layer.entry = SMOE_ENTRY_FROM_LOGITS;
    layer.score = score;
    ep_case *c = ep_make(&layer, uneven, 0);
    const int64_t count = layer.experts * layer.hidden;
    const ep_tensor router = {ep_memory(c, 2 * count), 2 * layer.hidden, layer.experts, SMOE_TYPE_BF16};
    ep_fill(&router, 0.2f, 5);
    c->router = router.data;
    for (int r = 0; r <= EP_MOST; r++) c->drouter[r] = ep_memory(c, 2 * count);
    ep_copy_inputs(c);
    ep_run_g(c);
    ep_run_lockstep(c, 1);
    ep_assert_same(c);
    double error = 0.0, size = 0.0;
    for (int64_t i = 0; i < count; i++) {
        const double want = ep_value(c->drouter[EP_MOST], SMOE_TYPE_BF16, i);
        double sum = 0.0;
        for (int r = 0; r < ranks; r++) sum += ep_value(c->drouter[r], SMOE_TYPE_BF16, i);
        error += (sum - want) * (sum - want);
        size += want * want;
    }
    assert_true(size > 0.0 && sqrt(error / size) < 6e-3);
    ep_free(c);
}

static void the_routers_gradients_are_right(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks += 3) {
        check_router(SMOE_SCORE_TOPK_SOFTMAX, ranks); /* dlogits are sparse */
        check_router(SMOE_SCORE_SOFTMAX_TOPK, ranks); /* and dense */
    }
}

/* More slots than a CTA of the plan takes; and rows of more columns than a warp takes at a time. */
static void many_slots_and_columns_are_taken(void **state)
{
    (void)state;
    static const int64_t tokens[] = {137, 0, 64, 1050};
    smoe_layer layer = ep_describe(4, 8, 3, SMOE_TYPE_BF16);
    layer.max_tokens = 1100;
    check_lockstep(&layer, tokens, 0, 1);
    layer.waves = 1; /* too many for the plan in one launch */
    check_lockstep(&layer, tokens, 0, 1);
    layer.hidden = 1096;
    layer.max_tokens = 140;
    layer.waves = 2;
    check_lockstep(&layer, uneven, 0, 1);
}

/* So many column tiles that an expert's row tiles are taken in another order (schedule/work_order.h); each
 * wave has several row tiles. */
static void many_column_tiles_keep_their_order(void **state)
{
    (void)state;
    static const int64_t tokens[] = {520, 300};
    smoe_layer layer = ep_describe(2, 2, 2, SMOE_TYPE_BF16);
    layer.waves = 2;
    layer.max_tokens = 520;
    layer.intermediate = 1160; /* up */
    check_lockstep(&layer, tokens, 0, 1);
    layer.intermediate = 40;
    layer.hidden = 2312; /* down, dx_rows */
    check_lockstep(&layer, tokens, 0, 1);
}

/* The core that keeps weights in shared memory computes down and dx_rows, from the lists of pieces. */
static void stationary_weights_give_the_layers_bits(void **state)
{
    (void)state;
    smoe_layer layer = ep_describe(2, 6, 3, SMOE_TYPE_BF16);
    layer.waves = 2;
    layer.hidden = 256;
    layer.intermediate = 64;
    check_lockstep(&layer, uneven, 0, 1);
}

static void inference_gives_the_same_output(void **state)
{
    (void)state;
    smoe_layer layer = ep_describe(4, 8, 2, SMOE_TYPE_BF16);
    layer.inference = 1;
    check_lockstep(&layer, uneven, 1, 3);
}

/* The kernels for few rows run in both. With so many columns several warps share a row that travels. */
static void few_rows_give_the_layers_bits(void **state)
{
    (void)state;
    static const int64_t tokens[] = {3, 0, 1, 4};
    for (int64_t topk = 1; topk <= 4; topk += 3) {
        smoe_layer layer = ep_describe(4, 16, topk, SMOE_TYPE_BF16);
        layer.max_tokens = 4;
        check_lockstep(&layer, tokens, 1, 2);
        layer.hidden = 1096;
        check_lockstep(&layer, tokens, 1, 2);
    }
}

static void reused_memory_and_old_gradients_are_right(void **state)
{
    (void)state;
    smoe_layer layer = ep_describe(2, 8, 2, SMOE_TYPE_BF16);
    layer.reuse_saved = layer.accumulate = 1;
    layer.gradient_type = SMOE_TYPE_F32;
    ep_case *c = ep_make(&layer, uneven, 1);
    for (int i = EP_DW1; i <= EP_DB2; i++) ep_fill(&c->g.at[i], 1.0f, (uint64_t)i);
    ep_copy_inputs(c);
    for (int i = EP_DW1; i <= EP_DB2; i++) ep_copy(c, (ep_tensor_id)i);
    ep_run_g(c);
    ep_run_lockstep(c, 1);
    for (int i = EP_DW1; i <= EP_DB2; i++) ep_assert_bits(c, (ep_tensor_id)i);
    ep_assert_bits(c, EP_DS);
    ep_free(c);
}

static void one_rank_or_one_expert_may_have_all_tokens(void **state)
{
    (void)state;
    for (int experts = 1; experts <= 4; experts += 3) {
        const smoe_layer layer = ep_describe(4, 16, 4, SMOE_TYPE_BF16);
        ep_case *c = ep_make(&layer, uneven, 0);
        const ep_tensor *ids = &c->g.at[EP_IDS];
        for (int64_t i = 0; i < ids->rows * 4; i++) /* the experts 8.. of rank 2; a repeated id is skipped */
            ((int32_t *)(void *)ids->data)[i] = (int32_t)(8 + i % experts);
        ep_copy_inputs(c);
        ep_run_g(c);
        ep_run_lockstep(c, 1);
        ep_assert_same(c);
        ep_free(c);
    }
}

static void run_lockstep(ep_case *c)
{
    c->timeout_ms = 1000; /* what a wait would need is there before each call */
    for (int i = 0; i < 2; i++) ep_run_lockstep(c, 1);
}

static void rows_past_the_capacity_change_no_bits(void **state)
{
    (void)state;
    ep_check_capacities(SMOE_TYPE_BF16, run_lockstep);
}

/* 40 experts of a rank: a slot has more than one word of bits. */
static void many_experts_give_the_layers_bits(void **state)
{
    (void)state;
    smoe_layer layer = ep_describe(2, 80, 40, SMOE_TYPE_BF16);
    layer.max_tokens = 40;
    static const int64_t tokens[] = {40, 33};
    check_lockstep(&layer, tokens, 0, 1);
}

static void rounding_adds_and_drops_pairs(void **state)
{
    (void)state;
    static const smoe_rounding rules[] = {SMOE_ROUNDING_UP, SMOE_ROUNDING_DOWN};
    for (int i = 0; i < COUNT(rules); i++) {
        smoe_layer layer =
            ep_describe(1, 8, 2, SMOE_TYPE_BF16); /* one rank, so that G rounds in the same way */
        layer.entry = SMOE_ENTRY_FROM_LOGITS;
        layer.rounding = rules[i];
        layer.tile = 16;
        check_lockstep(&layer, uneven, 1, 1);
    }
}

static void a_nan_changes_no_other_token(void **state)
{
    (void)state;
    smoe_layer layer = ep_describe(4, 8, 3, SMOE_TYPE_BF16);
    layer.waves = 2;
    static const ep_tensor_id results[] = {EP_OUT, EP_DX};
    for (int i = 0; i < COUNT(results); i++) {
        ep_case *c = ep_make(&layer, uneven, 0);
        const int64_t token = c->first[2] + 3;
        ep_copy_inputs(c);
        ep_run_lockstep(c, 1);
        for (int64_t row = 0; row < c->first[4]; row++)
            memcpy(ep_g_row(c, results[i], row), ep_w_row(c, results[i], row),
                   (size_t)c->g.at[results[i]].row_bytes);
        memset(ep_w_row(c, EP_X, token), 0xFF, 4);
        ep_run_lockstep(c, 1);
        for (int64_t row = 0; row < c->first[4]; row++) {
            const char *is = ep_w_row(c, results[i], row);
            const int same = !memcmp(ep_g_row(c, results[i], row), is, (size_t)c->g.at[results[i]].row_bytes);
            if (row == token)
                assert_true(isnan(ep_value(is, SMOE_TYPE_BF16, 0)));
            else if (!same)
                fail_msg("%s: row %lld has changed", ep_names[results[i]], (long long)row);
        }
        ep_free(c);
    }
}

static void two_layers_use_one_group(void **state)
{
    (void)state;
    const ep_pair p = ep_make_pair(SMOE_TYPE_BF16, uneven, 64);
    ep_case *const order[] = {p.first, p.second, p.second, p.first};
    for (int i = 0; i < 8; i++)
        (i % 4 < 2 ? ep_forward_lockstep : ep_backward_lockstep)(order[i % 4], NULL, 1);
    ep_settle();
    ep_compare_pair(p);
}

/* No gradient is asked for. */
static void a_backward_may_want_nothing(void **state)
{
    (void)state;
    for (int waves = 1; waves <= 2; waves++) {
        smoe_layer layer = ep_describe(2, 8, 2, SMOE_TYPE_BF16);
        layer.waves = waves;
        ep_case *c = ep_make(&layer, uneven, 0);
        c->timeout_ms = 1000;
        ep_copy_inputs(c);
        for (int r = 0; r < 2; r++) ep_join(c, r, 1);
        ep_forward_lockstep(c, NULL, 1);
        ep_backward_call *const calls[] = {smoe_ep_dispatch_backward, smoe_experts_backward,
                                           smoe_ep_collect_backward};
        for (int i = 0; i < 3; i++)
            for (int r = 0; r < 2; r++) {
                const smoe_layer mine = ep_layer(c, r);
                smoe_backward_args b = ep_backward_args(c, r);
                b.dx = b.dw1 = b.dw2 = b.dtopk_weights = NULL;
                assert_int_equal(calls[i](c->contexts[r], &mine, &b, NULL), SMOE_OK);
            }
        ep_settle();
        for (int r = 0; r < 2; r++)
            if (smoe_ep_status(c->ep[r]) != SMOE_OK) fail_msg("%s", smoe_last_error(c->contexts[r]));
        ep_free(c);
    }
}

/* ---- Ranks that run at the same time ---- */

#ifndef TEST_ON_EMULATOR
typedef struct late_rank {
    ep_case *c;
    int rank, steps;
} late_rank;

/* A thread and a stream for each rank; between its calls a rank pauses for up to 2 ms. */
static void *run_late_rank(void *user)
{
    const late_rank *t = user;
    ep_case *c = t->c;
    const int r = t->rank;
    const smoe_layer layer = ep_layer(c, r);
    const smoe_forward_args f = ep_forward_args(c, r);
    const smoe_backward_args b = ep_backward_args(c, r);
    uint64_t seed = (uint64_t)r;
    cudaStream_t stream;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return NULL;
    c->status[r] = SMOE_OK;
    for (int step = 0; step < t->steps && c->status[r] == SMOE_OK; step++) {
        usleep((useconds_t)(1000.0f * (1.0f + ep_random(&seed))));
        c->status[r] = smoe_layer_forward(c->contexts[r], &layer, &f, stream);
        usleep((useconds_t)(1000.0f * (1.0f + ep_random(&seed))));
        if (c->status[r] == SMOE_OK) c->status[r] = smoe_layer_backward(c->contexts[r], &layer, &b, stream);
    }
    cudaStreamSynchronize(stream);
    if (c->status[r] == SMOE_OK) c->status[r] = smoe_ep_status(c->ep[r]);
    cudaStreamDestroy(stream);
    return NULL;
}

static void ranks_may_have_streams_of_their_own(void **state)
{
    (void)state;
    for (int waves = 1; waves <= 4; waves *= 2) {
        smoe_layer layer = ep_describe(4, 8, 3, SMOE_TYPE_BF16);
        layer.waves = waves;
        ep_case *c = ep_make(&layer, uneven, 1);
        late_rank ranks[4];
        pthread_t threads[4];
        c->timeout_ms = 5000;
        ep_copy_inputs(c);
        ep_run_g(c);
        for (int r = 0; r < 4; r++) ep_join(c, r, 1);
        for (int r = 0; r < 4; r++) {
            ranks[r] = (late_rank){c, r, 50};
            assert_int_equal(pthread_create(&threads[r], NULL, run_late_rank, &ranks[r]), 0);
        }
        for (int r = 0; r < 4; r++) pthread_join(threads[r], NULL);
        ep_settle();
        for (int r = 0; r < 4; r++)
            if (c->status[r] != SMOE_OK) fail_msg("rank %d: %s", r, smoe_last_error(c->contexts[r]));
        ep_assert_same(c);
        ep_free(c);
    }
}
#endif

/* ---- Graphs ---- */

static void a_graph_may_be_launched_again(void **state)
{
    (void)state;
    for (int waves = 1; waves <= 2; waves++) {
        smoe_layer layer = ep_describe(4, 8, 3, SMOE_TYPE_BF16);
        layer.waves = waves;
        layer.row_capacity = waves == 2 ? 64 : 0; /* nearly all H is computed again */
        ep_case *c = ep_make(&layer, uneven, 1);
        cudaStream_t stream;
        cudaGraph_t graph;
        cudaGraphExec_t ready;
        ep_copy_inputs(c);
        ep_run_g(c);
        for (int r = 0; r < 4; r++) ep_join(c, r, 1);
        assert_int_equal(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
        assert_int_equal(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaSuccess);
        ep_forward_lockstep(c, stream, 1);
        ep_backward_lockstep(c, stream, 1);
        assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaSuccess);
        assert_int_equal(cudaGraphInstantiate(&ready, graph, 0), cudaSuccess);
        for (int i = 0; i < 3; i++) {
            for (int id = EP_OUT; id <= EP_DS; id++)
                memset(c->w.at[id].data, 0xFF, (size_t)(c->w.at[id].rows * c->w.at[id].row_bytes));
            assert_int_equal(cudaGraphLaunch(ready, stream), cudaSuccess);
            ep_settle();
            for (int r = 0; r < 4; r++)
                if (smoe_ep_status(c->ep[r]) != SMOE_OK) fail_msg("%s", smoe_last_error(c->contexts[r]));
            ep_assert_same(c);
        }
        ep_forward_lockstep(c, NULL, 1); /* the device has counted the calls of the graph */
        ep_settle();
        ep_assert_same(c);
        cudaGraphExecDestroy(ready);
        cudaGraphDestroy(graph);
        cudaStreamDestroy(stream);
        ep_free(c);
    }
}

int main(int argc, char **argv)
{
    /* Kernels that wait and those that they wait for are in different queues, and are all loaded before. */
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    smoe_destroy(open_cuda()); /* without a GPU the test is skipped */
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lockstep_gives_the_layers_bits),
        cmocka_unit_test(every_number_of_waves_gives_the_same_bits),
        cmocka_unit_test(all_activations_give_the_layers_bits),
        cmocka_unit_test(ranks_route_from_logits),
        cmocka_unit_test(the_routers_gradients_are_right),
        cmocka_unit_test(many_slots_and_columns_are_taken),
        cmocka_unit_test(many_column_tiles_keep_their_order),
        cmocka_unit_test(stationary_weights_give_the_layers_bits),
        cmocka_unit_test(inference_gives_the_same_output),
        cmocka_unit_test(few_rows_give_the_layers_bits),
        cmocka_unit_test(reused_memory_and_old_gradients_are_right),
        cmocka_unit_test(one_rank_or_one_expert_may_have_all_tokens),
        cmocka_unit_test(rows_past_the_capacity_change_no_bits),
        cmocka_unit_test(many_experts_give_the_layers_bits),
        cmocka_unit_test(rounding_adds_and_drops_pairs),
        cmocka_unit_test(a_nan_changes_no_other_token),
        cmocka_unit_test(two_layers_use_one_group),
        cmocka_unit_test(a_backward_may_want_nothing),
#ifndef TEST_ON_EMULATOR
        cmocka_unit_test(ranks_may_have_streams_of_their_own),
#endif
        cmocka_unit_test(a_graph_may_be_launched_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
