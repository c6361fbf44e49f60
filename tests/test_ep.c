/* Layers with ranks on the CPU, compared with the same layer without ranks: as threads, as processes, and in
 * lockstep in one thread; and with delays at every flag. */
#define _GNU_SOURCE /* for ep_case.h */
#include "src/activations.h"
#include "src/cpu/ep_cpu.h"
#include "tests/ep_capacity.h"
#include "tests/ep_pair.h"

#include <time.h>

#define COUNT(array) (int)(sizeof(array) / sizeof((array)[0]))

/* ---- Delays: the linker puts these between the calls of a layer and its flags ---- */

/* Which ranks wait a while at every flag: bit r for rank r. One slow rank shows what the others do too early,
 * one fast rank what it does too early itself. */
static atomic_int slow_ranks;

void __real_moe_cpu_ep_signal(smoe_ep *ep, int rank, moe_ep_flag flag, uint64_t mark);
int __real_moe_cpu_ep_wait(smoe_ep *ep, int source, moe_ep_flag flag, uint64_t mark);
void __wrap_moe_cpu_ep_signal(smoe_ep *ep, int rank, moe_ep_flag flag, uint64_t mark);
int __wrap_moe_cpu_ep_wait(smoe_ep *ep, int source, moe_ep_flag flag, uint64_t mark);

/* 0 to 2 ms, another time at every flag */
static void delay(const smoe_ep *ep, int other, moe_ep_flag flag, uint64_t mark)
{
    if (!(atomic_load(&slow_ranks) >> ep->rank & 1)) return;
    uint64_t state = mark * 1000 + (uint64_t)(ep->rank * 100 + other * 10 + (int)flag);
    const struct timespec nap = {0, (long)((ep_random(&state) + 1.0f) * 1e6f)};
    nanosleep(&nap, NULL);
}

void __wrap_moe_cpu_ep_signal(smoe_ep *ep, int rank, moe_ep_flag flag, uint64_t mark)
{
    delay(ep, rank, flag, mark);
    __real_moe_cpu_ep_signal(ep, rank, flag, mark);
}

int __wrap_moe_cpu_ep_wait(smoe_ep *ep, int source, moe_ep_flag flag, uint64_t mark)
{
    const int there = __real_moe_cpu_ep_wait(ep, source, flag, mark);
    delay(ep, source, flag, mark + 1);
    return there;
}

/* ---- Equal to the layer without ranks ---- */

static const int64_t uneven[EP_MOST] = {137, 0, 64, 5, 140, 1, 20, 9};

static void check_threads(const smoe_layer *layer, const int64_t *tokens, int biases, int steps)
{
    ep_case *c = ep_make(layer, tokens, biases);
    ep_copy_inputs(c);
    ep_run_g(c);
    ep_run_threads(c, steps);
    int failed = 0;
    for (int r = 0; r < layer->ranks; r++) {
        if (c->status[r] != SMOE_OK) print_error("rank %d: %s\n", r, smoe_last_error(c->contexts[r]));
        failed |= c->status[r] != SMOE_OK;
    }
    assert_false(failed);
    ep_assert_same(c);
    ep_free(c);
}

static void threads_give_the_layers_bits(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 8; ranks *= 2)
        for (int64_t topk = 1; topk <= 16; topk += 5)
            for (int bf16 = 0; bf16 < 2; bf16++) {
                smoe_layer layer = ep_describe(ranks, 16, topk, bf16 ? SMOE_TYPE_BF16 : SMOE_TYPE_F32);
                layer.waves = bf16 ? 1 : 4;
                layer.chunks = bf16 ? 2 : 1;
                check_threads(&layer, uneven, bf16, 1);
            }
}

static void every_number_of_waves_gives_the_same_bits(void **state)
{
    (void)state;
    for (int waves = 0; waves <= 8; waves = waves ? 2 * waves : 1) {
        smoe_layer layer = ep_describe(4, 8, 3, SMOE_TYPE_F32);
        layer.waves = waves;
        check_threads(&layer, uneven, 0, 2);
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
        smoe_layer layer = ep_describe(2, 6, 2, SMOE_TYPE_F32);
        layer.activation = activations[i];
        layer.layout = i % 2 ? SMOE_LAYOUT_INTERLEAVED : SMOE_LAYOUT_CONCATENATED;
        check_threads(&layer, uneven, 1, 1);
    }
}

static void ranks_route_from_logits(void **state)
{
    (void)state;
    for (int score = 0; score < 3; score++) {
        smoe_layer layer = ep_describe(4, 12, 3, SMOE_TYPE_F32);
        layer.entry = SMOE_ENTRY_FROM_LOGITS;
        layer.score = (smoe_score)score;
        layer.waves = 2;
        check_threads(&layer, uneven, 1, 2);
    }
}

static void inference_gives_the_same_output(void **state)
{
    (void)state;
    smoe_layer layer = ep_describe(4, 8, 2, SMOE_TYPE_F32);
    layer.inference = 1;
    check_threads(&layer, uneven, 1, 3);
}

static void reused_memory_and_old_gradients_are_right(void **state)
{
    (void)state;
    smoe_layer layer = ep_describe(2, 8, 2, SMOE_TYPE_F32);
    layer.reuse_saved = layer.accumulate = 1;
    ep_case *c = ep_make(&layer, uneven, 1);
    for (int i = EP_DW1; i <= EP_DB2; i++) ep_fill(&c->g.at[i], 1.0f, (uint64_t)i);
    ep_copy_inputs(c);
    for (int i = EP_DW1; i <= EP_DB2; i++) ep_copy(c, (ep_tensor_id)i);
    ep_run_g(c);
    ep_run_threads(c, 1);
    for (int i = EP_DW1; i <= EP_DB2; i++) ep_assert_bits(c, (ep_tensor_id)i);
    ep_assert_bits(c, EP_DS);
    ep_free(c);
}

static void one_rank_or_one_expert_may_have_all_tokens(void **state)
{
    (void)state;
    for (int experts = 1; experts <= 4; experts += 3) {
        const smoe_layer layer = ep_describe(4, 16, 4, SMOE_TYPE_F32);
        ep_case *c = ep_make(&layer, uneven, 0);
        const ep_tensor *ids = &c->g.at[EP_IDS];
        for (int64_t i = 0; i < ids->rows * 4; i++) /* the experts 8.. of rank 2; a repeated id is skipped */
            ((int32_t *)(void *)ids->data)[i] = (int32_t)(8 + i % experts);
        ep_copy_inputs(c);
        ep_run_g(c);
        ep_run_threads(c, 1);
        ep_assert_same(c);
        ep_free(c);
    }
}

static void run_threads(ep_case *c)
{
    ep_run_threads(c, 2);
    for (int r = 0; r < c->layer.ranks; r++) assert_int_equal(c->status[r], SMOE_OK);
}

static void rows_past_the_capacity_change_no_bits(void **state)
{
    (void)state;
    ep_check_capacities(SMOE_TYPE_F32, run_threads);
    ep_check_capacities(SMOE_TYPE_BF16, run_threads);
}

static uint64_t kept_bytes(smoe_context *context, const smoe_layer *layer)
{
    smoe_sizes sizes = SMOE_SIZES_INIT;
    assert_int_equal(smoe_query_sizes(context, layer, &sizes), SMOE_OK);
    return sizes.saved_buffer_bytes;
}

static void a_rank_keeps_at_most_1_3_of_the_layer(void **state)
{
    (void)state;
    static const int64_t shapes[][5] = {{24576, 1536, 256, 128, 8},
                                        {32768, 4096, 512, 128, 8},
                                        {32768, 4096, 2048, 64, 4},
                                        {16384, 2048, 768, 128, 8},
                                        {8192, 7168, 2048, 256, 8}};
    smoe_context *context = ep_context(1);
    for (int i = 0; i < COUNT(shapes); i++) {
        smoe_layer layer = ep_describe(0, shapes[i][3], shapes[i][4], SMOE_TYPE_BF16);
        layer.tokens = shapes[i][0], layer.hidden = shapes[i][1], layer.intermediate = shapes[i][2];
        layer.max_tokens = 0;
        const uint64_t alone = kept_bytes(context, &layer);
        layer.max_tokens = layer.tokens;
        for (layer.ranks = 2; layer.ranks <= 8; layer.ranks *= 2)
            assert_true((double)kept_bytes(context, &layer) <= 1.3 * (double)alone);
    }
    smoe_destroy(context);
}

static void one_thread_may_run_all_ranks(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 8; ranks *= 2)
        for (int logits = 0; logits < 2; logits++) {
            smoe_layer layer = ep_describe(ranks, 8, 2, SMOE_TYPE_F32);
            layer.entry = logits ? SMOE_ENTRY_FROM_LOGITS : SMOE_ENTRY_FROM_TOPK;
            layer.waves = 2;
            ep_case *c = ep_make(&layer, uneven, 1);
            c->timeout_ms = 1000; /* what a wait would need is there before each call */
            ep_copy_inputs(c);
            ep_run_g(c);
            ep_run_lockstep(c, 2);
            ep_assert_same(c);
            ep_free(c);
        }
}

static void processes_share_windows(void **state)
{
    (void)state;
    smoe_layer layer = ep_describe(4, 8, 3, SMOE_TYPE_BF16);
    layer.waves = 4;
    ep_case *c = ep_make(&layer, uneven, 1);
    ep_copy_inputs(c);
    pid_t children[EP_MOST];
    for (int r = 0; r < layer.ranks; r++) {
        children[r] = fork();
        assert_true(children[r] >= 0);
        if (children[r] == 0) {
            ep_join(c, r, 1);
            _exit(ep_run_rank(c, r, 3) == SMOE_OK ? 0 : 1);
        }
    }
    for (int r = 0; r < layer.ranks; r++) {
        int how;
        assert_int_equal(waitpid(children[r], &how, 0), children[r]);
        assert_true(WIFEXITED(how) && WEXITSTATUS(how) == 0);
    }
    ep_run_g(c);
    ep_assert_same(c);
    ep_free(c);
}

static void delays_at_every_flag_change_nothing(void **state)
{
    (void)state;
    smoe_layer layer = ep_describe(4, 8, 3, SMOE_TYPE_F32);
    layer.waves = 2;
    atomic_store(&slow_ranks, 15);
    check_threads(&layer, uneven, 1, 4);
    layer.row_capacity = 64;
    check_threads(&layer, uneven, 1, 4);
    atomic_store(&slow_ranks, 0);
}

/* ---- Two layers of one group ---- */

typedef struct two_layers {
    ep_case *first, *second;
    int rank;
} two_layers;

/* As a model does it: the windows hold what the other layer sent last. */
static void *run_two_layers(void *user)
{
    const two_layers *t = user;
    ep_case *const order[] = {t->first, t->second, t->second, t->first};
    smoe_status status = SMOE_OK;
    for (int i = 0; i < 12 && status == SMOE_OK; i++) {
        const ep_case *c = order[i % 4];
        const smoe_layer layer = ep_layer(c, t->rank);
        const smoe_forward_args f = ep_forward_args(c, t->rank);
        const smoe_backward_args b = ep_backward_args(c, t->rank);
        status = i % 4 < 2 ? smoe_layer_forward(c->contexts[t->rank], &layer, &f, NULL)
                           : smoe_layer_backward(c->contexts[t->rank], &layer, &b, NULL);
    }
    t->first->status[t->rank] = status;
    return NULL;
}

static void check_two_layers(int slow, int64_t row_capacity)
{
    const ep_pair p = ep_make_pair(SMOE_TYPE_F32, uneven, row_capacity);
    pthread_t threads[EP_MOST];
    two_layers users[EP_MOST];
    atomic_store(&slow_ranks, slow);
    for (int r = 0; r < 4; r++) {
        users[r] = (two_layers){p.first, p.second, r};
        assert_int_equal(pthread_create(&threads[r], NULL, run_two_layers, &users[r]), 0);
    }
    for (int r = 0; r < 4; r++) pthread_join(threads[r], NULL);
    atomic_store(&slow_ranks, 0);
    for (int r = 0; r < 4; r++)
        if (p.first->status[r] != SMOE_OK) fail_msg("rank %d: %s", r, smoe_last_error(p.first->contexts[r]));
    ep_compare_pair(p);
}

static void two_layers_use_one_group(void **state)
{
    (void)state;
    for (int r = 0; r < 4; r += 3) {
        check_two_layers(1 << r, 64);
        check_two_layers(15 & ~(1 << r), 64);
        check_two_layers(1 << r, 0);
        check_two_layers(15 & ~(1 << r), 0);
    }
}

/* ---- Values ---- */

static int64_t nan_rows(const ep_case *c, ep_tensor_id id)
{
    int64_t rows = 0;
    const ep_tensor *t = &c->g.at[id];
    for (int64_t row = 0; row < t->rows; row++) {
        int nan = 0;
        for (int64_t i = 0; i < t->row_bytes / ep_element(t->type); i++)
            nan |= isnan(ep_value(ep_w_row(c, id, row), t->type, i));
        rows += nan;
    }
    return rows;
}

static void keep(const ep_case *c, ep_tensor_id id, int64_t first, int64_t end)
{
    for (int64_t row = first; row < end; row++)
        memcpy(ep_g_row(c, id, row), ep_w_row(c, id, row), (size_t)c->g.at[id].row_bytes);
}

static void a_nan_changes_no_other_token(void **state)
{
    (void)state;
    smoe_layer layer = ep_describe(4, 8, 3, SMOE_TYPE_F32);
    ep_case *c = ep_make(&layer, uneven, 0);
    static const ep_tensor_id results[] = {EP_OUT, EP_DX};
    const int64_t token = c->first[2] + 3;
    ep_copy_inputs(c);
    ep_run_threads(c, 1);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(nan_rows(c, results[i]), 0);
        keep(c, results[i], 0, c->first[4]);
    }
    memset(ep_w_row(c, EP_X, token), 0xFF, 4);
    for (int r = 0; r < layer.ranks; r++) {
        ep_leave(c, r);
        memset(c->windows[r], 0, MOE_EP_LINE * MOE_EP_FLAGS * MOE_EP_MAX_RANKS);
    }
    ep_run_threads(c, 1);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(nan_rows(c, results[i]), 1);
        keep(c, results[i], token, token + 1);
        ep_assert_bits(c, results[i]);
    }
    ep_free(c);
}

/* Rounding is that of each rank's tokens: rank r gives what a layer without ranks gives on its tokens. */
static void rounding_is_that_of_each_rank(void **state)
{
    (void)state;
    static const smoe_rounding rules[] = {SMOE_ROUNDING_UP, SMOE_ROUNDING_NR_F, SMOE_ROUNDING_BALANCE_F,
                                          SMOE_ROUNDING_DOWN};
    for (int i = 0; i < COUNT(rules); i++) {
        smoe_layer layer = ep_describe(2, 8, 2, SMOE_TYPE_F32);
        layer.entry = SMOE_ENTRY_FROM_LOGITS;
        layer.rounding = rules[i];
        layer.tile = 16;
        static const int64_t tokens[] = {140, 90};
        ep_case *c = ep_make(&layer, tokens, 1);
        ep_copy_inputs(c);
        ep_run_threads(c, 2);
        smoe_context *context = ep_context(1);
        for (int r = 0; r < 2; r++) {
            smoe_layer alone = ep_layer(c, -1);
            alone.tokens = tokens[r];
            smoe_forward_args f = ep_forward_args(c, -1);
            smoe_backward_args b = ep_backward_args(c, -1);
            f.x = b.x = ep_g_row(c, EP_X, c->first[r]);
            f.logits = ep_g_row(c, EP_LOGITS, c->first[r]);
            b.logits = f.logits;
            f.out = ep_g_row(c, EP_OUT, c->first[r]);
            b.dout = ep_g_row(c, EP_DOUT, c->first[r]);
            b.dx = ep_g_row(c, EP_DX, c->first[r]);
            b.dlogits = ep_g_row(c, EP_DLOGITS, c->first[r]);
            assert_int_equal(smoe_layer_forward(context, &alone, &f, NULL), SMOE_OK);
            assert_int_equal(smoe_layer_backward(context, &alone, &b, NULL), SMOE_OK);
        }
        ep_assert_close(c, EP_OUT, 1e-6);
        ep_assert_close(c, EP_DX, 1e-6);
        ep_assert_close(c, EP_DLOGITS, 1e-6);
        smoe_destroy(context);
        ep_free(c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        /* first: with the thread sanitizer a process forks only while it has one thread */
        cmocka_unit_test(processes_share_windows),
        cmocka_unit_test(threads_give_the_layers_bits),
        cmocka_unit_test(every_number_of_waves_gives_the_same_bits),
        cmocka_unit_test(all_activations_give_the_layers_bits),
        cmocka_unit_test(ranks_route_from_logits),
        cmocka_unit_test(inference_gives_the_same_output),
        cmocka_unit_test(reused_memory_and_old_gradients_are_right),
        cmocka_unit_test(one_rank_or_one_expert_may_have_all_tokens),
        cmocka_unit_test(rows_past_the_capacity_change_no_bits),
        cmocka_unit_test(a_rank_keeps_at_most_1_3_of_the_layer),
        cmocka_unit_test(one_thread_may_run_all_ranks),
        cmocka_unit_test(delays_at_every_flag_change_nothing),
        cmocka_unit_test(two_layers_use_one_group),
        cmocka_unit_test(a_nan_changes_no_other_token),
        cmocka_unit_test(rounding_is_that_of_each_rank),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
