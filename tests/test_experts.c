/* The experts forward and backward through the public API: against the fp64 oracle, exactly on small
 * integers, and the promises of smoe.h: the same bits for any number of threads and chunks, accumulation,
 * experts without rows, NaN that stays where the mathematics puts it, buffers' limits. */
#include "layer_run.h"

#include "src/activations.h"

static smoe_layer make_layer(smoe_entry entry, smoe_type dtype, smoe_activation activation, int64_t tokens,
                             int64_t hidden, int64_t intermediate, int64_t experts, int64_t topk)
{
    smoe_layer layer = SMOE_LAYER_INIT;
    layer.tokens = tokens;
    layer.hidden = hidden;
    layer.intermediate = intermediate;
    layer.experts = experts;
    layer.topk = entry == SMOE_ENTRY_FROM_ROWS ? 1 : topk;
    layer.dtype = dtype;
    layer.gradient_type = dtype;
    layer.activation = activation;
    layer.entry = entry;
    return layer;
}

/* ---- Accuracy ---- */

/* The error of the run, of each tensor by its norm, may be 1.5 times what storage alone costs (the oracle
 * rounded where an implementation may store), beside a floor for f32 arithmetic, and has an absolute limit.
 */
static void compare(const layer_run *run, const references *exact, const references *rounded)
{
    const double limit = run->layer.dtype == SMOE_TYPE_BF16 ? 5e-3 : 5e-6;
    tensor tensors[RUN_TENSORS], stored[RUN_TENSORS];
    run_tensors(run, exact, tensors);
    run_tensors(run, rounded, stored);
    for (int i = 0; i < RUN_TENSORS; i++) {
        if (!tensors[i].want) continue;
        double *got = tensor_values(&tensors[i]);
        const double error = oracle_relative_error(got, tensors[i].want, tensors[i].count);
        const double storage = oracle_relative_error(stored[i].want, tensors[i].want, tensors[i].count);
        free(got);
        const smoe_layer *l = &run->layer;
        if (error > limit || error > 1.5 * storage + 1.5e-6)
            fail_msg(
                "%s: relative error %.3g, storage alone %.3g (entry %d, dtype %d, activation %d, layout %d)",
                tensors[i].name, error, storage, (int)l->entry, (int)l->dtype, (int)l->activation,
                (int)l->layout);
    }
}

/* dS in the padded rows, pads 0; only from logits */
static void compare_ds(const layer_run *run, const references *r)
{
    if (run->layer.entry != SMOE_ENTRY_FROM_LOGITS) return;
    const float *got = run->result.drow_weights.data;
    const size_t padded = (size_t)run->sizes.padded_rows;
    double *want = oracle_alloc(padded, sizeof *want), *values_ = oracle_alloc(padded, sizeof *values_);
    for (int64_t i = 0; i < r->forward.rows; i++) want[r->forward.row_padded[i]] = r->backward.ds[i];
    for (size_t i = 0; i < padded; i++) values_[i] = got[i];
    assert_true(oracle_relative_error(values_, want, padded) <
                (run->layer.dtype == SMOE_TYPE_BF16 ? 5e-3 : 5e-6));
    for (size_t i = 0; i < padded; i++) assert_true(want[i] != 0.0 || got[i] == 0.0f);
    free(want), free(values_);
}

static void check_against_oracle(const smoe_layer *layer, run_options options)
{
    layer_run run = run_make(layer, options);
    run_forward(&run);
    buffer_poison(&run.result.out);
    run_forward(&run);
    run_backward(&run);
    references exact = run_oracle(&run, false), rounded = run_oracle(&run, true);
    assert_int_equal(exact.forward.undecided, 0);
    compare(&run, &exact, &rounded);
    compare_ds(&run, &exact);
    references_free(&exact), references_free(&rounded);
    run_free(&run);
}

#define VALUE(enumerator, name, shape, curve) enumerator,
static const smoe_activation activations[] = {MOE_ACTIVATIONS(VALUE)};
#undef VALUE

/* Every activation, type and layout; entries, biases, gradient types, index types and chunks take turns. */
static void test_all_kinds(void **state)
{
    (void)state;
    int turn = 0;
    for (int a = 0; a < MOE_ACTIVATION_COUNT; a++) {
        for (int dtype = SMOE_TYPE_F32; dtype <= SMOE_TYPE_BF16; dtype++) {
            for (int layout = 0; layout < 2; layout++, turn++) {
                smoe_layer layer =
                    make_layer((smoe_entry)(turn % 3), (smoe_type)dtype, activations[a], 90, 136, 24, 5, 2);
                layer.layout = (smoe_layout)layout;
                layer.gradient_type = turn / 2 % 2 ? SMOE_TYPE_F32 : (smoe_type)dtype;
                layer.index_type = turn % 2 ? SMOE_TYPE_I64 : SMOE_TYPE_I32;
                layer.chunks = 1 << turn % 4;
                const run_options options = {.biases = turn % 2 == 0,
                                             .router_weight = 1,
                                             .no_row_weights = turn % 5 == 0,
                                             .seed = (uint64_t)turn};
                check_against_oracle(&layer, options);
            }
        }
    }
}

/* Several row panels, several tiles of dW, panels of features, a d that is no multiple of 64. */
static void test_many_panels(void **state)
{
    (void)state;
    smoe_layer layer =
        make_layer(SMOE_ENTRY_FROM_TOPK, SMOE_TYPE_F32, SMOE_ACTIVATION_SWIGLU, 600, 72, 40, 3, 2);
    check_against_oracle(&layer, (run_options){.spread = SPREAD_ONE_EXPERT, .biases = 1, .seed = 100});
    layer = make_layer(SMOE_ENTRY_FROM_LOGITS, SMOE_TYPE_BF16, SMOE_ACTIVATION_GEGLU, 500, 72, 40, 2, 2);
    check_against_oracle(&layer, (run_options){.router_weight = 1, .seed = 101});
    for (int layout = 0; layout < 2; layout++) {
        layer = make_layer(SMOE_ENTRY_FROM_ROWS, layout ? SMOE_TYPE_BF16 : SMOE_TYPE_F32,
                           SMOE_ACTIVATION_SWIGLU, 40, 584, 328, 2, 1);
        layer.layout = layout ? SMOE_LAYOUT_INTERLEAVED : SMOE_LAYOUT_CONCATENATED;
        check_against_oracle(&layer, (run_options){.biases = 1, .seed = 102});
    }
}

static void test_smallest(void **state)
{
    (void)state;
    for (int entry = 0; entry < 3; entry++) {
        const smoe_layer layer =
            make_layer((smoe_entry)entry, SMOE_TYPE_F32, SMOE_ACTIVATION_SWIGLU, 1, 8, 8, 1, 1);
        check_against_oracle(&layer, (run_options){.biases = 1, .router_weight = 1, .seed = 11});
    }
}

/* ---- Exactness ---- */

/* Small integers through max(., 0): every sum is exact in f32, so every bit has to be right. The sparse ones
 * keep H, A and Y within the integers that bf16 holds. */
static void check_exact(const smoe_layer *layer, run_options options)
{
    layer_run run = run_make(layer, options);
    run_forward(&run);
    run_backward(&run);
    references want = run_oracle(&run, true);
    tensor tensors[RUN_TENSORS];
    run_tensors(&run, &want, tensors);
    for (int i = 0; i < RUN_TENSORS; i++) {
        if (!tensors[i].want) continue;
        double *got = tensor_values(&tensors[i]);
        const size_t differing = oracle_differing(got, tensors[i].want, tensors[i].count);
        if (differing) fail_msg("%s: %zu of %zu differ", tensors[i].name, differing, tensors[i].count);
        free(got);
    }
    references_free(&want);
    run_free(&run);
}

static void test_exact_integers(void **state)
{
    (void)state;
    static const smoe_activation exact[] = {SMOE_ACTIVATION_REGLU, SMOE_ACTIVATION_RELU,
                                            SMOE_ACTIVATION_RELU2};
    for (int turn = 0; turn < 24; turn++) {
        const smoe_type dtype = turn % 2 ? SMOE_TYPE_BF16 : SMOE_TYPE_F32;
        const smoe_entry entry = turn / 2 % 2 ? SMOE_ENTRY_FROM_TOPK : SMOE_ENTRY_FROM_ROWS;
        const int64_t hidden = dtype == SMOE_TYPE_BF16 ? 32 : 200, n = dtype == SMOE_TYPE_BF16 ? 8 : 56;
        smoe_layer layer = make_layer(entry, dtype, exact[turn / 4 % 3], 150, hidden, n, 4, 2);
        layer.gradient_type = SMOE_TYPE_F32;
        layer.layout = turn / 12 ? SMOE_LAYOUT_INTERLEAVED : SMOE_LAYOUT_CONCATENATED;
        layer.chunks = 1 << turn % 3;
        check_exact(&layer,
                    (run_options){.values = dtype == SMOE_TYPE_BF16 ? VALUES_SPARSE_INTEGER : VALUES_INTEGER,
                                  .biases = dtype == SMOE_TYPE_F32,
                                  .spread = turn % 5 == 0 ? SPREAD_EMPTY_EXPERTS : SPREAD_EVEN,
                                  .seed = (uint64_t)turn});
    }
}

/* ---- The same bits ---- */

static void assert_same_bits(const layer_run *one, const layer_run *other, const char *what)
{
    const struct {
        const char *name;
        const buffer *one, *other;
    } all[] = {
        {"out", &one->result.out, &other->result.out},
        {"dx", &one->result.dx, &other->result.dx},
        {"dw1", &one->result.dw1, &other->result.dw1},
        {"dw2", &one->result.dw2, &other->result.dw2},
        {"db1", &one->result.db1, &other->result.db1},
        {"db2", &one->result.db2, &other->result.db2},
        {"drouter_weight", &one->result.drouter_weight, &other->result.drouter_weight},
        {"dtopk_weights", &one->result.dtopk_weights, &other->result.dtopk_weights},
        {"drow_weights", &one->result.drow_weights, &other->result.drow_weights},
        {"dlogits", &one->result.dlogits, &other->result.dlogits},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        assert_int_equal(all[i].one->bytes, all[i].other->bytes);
        if (all[i].one->base && memcmp(all[i].one->data, all[i].other->data, all[i].one->bytes) != 0)
            fail_msg("%s: other bits with %s", all[i].name, what);
    }
}

static layer_run run_both(const smoe_layer *layer, run_options options)
{
    layer_run run = run_make(layer, options);
    run_forward(&run);
    run_backward(&run);
    return run;
}

static void check_same_bits(const smoe_layer *layer, run_options options)
{
    static const struct {
        int threads, chunks, reuse_saved;
    } changes[] = {{1, 1, 0}, {3, 1, 1}, {2, 2, 0}, {1, 4, 1}, {3, 8, 0}, {2, 64, 0}};
    layer_run first = run_both(layer, options);
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        smoe_layer changed = *layer;
        changed.chunks = changes[i].chunks;
        changed.reuse_saved = changes[i].reuse_saved;
        options.threads = changes[i].threads;
        layer_run again = run_both(&changed, options);
        char what[64];
        snprintf(what, sizeof what, "%d threads, %d chunks, reuse_saved %d", changes[i].threads,
                 changes[i].chunks, changes[i].reuse_saved);
        assert_same_bits(&first, &again, what);
        run_free(&again);
    }
    run_free(&first);
}

/* Sizes on both sides of OpenBLAS's own path for small products (m n k up to a million or so), a d that ends
 * in a panel of 8 columns. */
static void test_bits_by_threads_and_chunks(void **state)
{
    (void)state;
    const struct {
        int64_t tokens, hidden, intermediate, experts;
    } sizes[] = {{40, 136, 8, 4}, {300, 328, 48, 3}, {400, 200, 264, 2}};
    for (int i = 0; i < 3; i++) {
        for (int dtype = SMOE_TYPE_F32; dtype <= SMOE_TYPE_BF16; dtype++) {
            smoe_layer layer = make_layer(dtype ? SMOE_ENTRY_FROM_LOGITS : SMOE_ENTRY_FROM_TOPK,
                                          (smoe_type)dtype, SMOE_ACTIVATION_SWIGLU, sizes[i].tokens,
                                          sizes[i].hidden, sizes[i].intermediate, sizes[i].experts, 2);
            layer.layout = i % 2 ? SMOE_LAYOUT_INTERLEAVED : SMOE_LAYOUT_CONCATENATED;
            check_same_bits(&layer, (run_options){.biases = 1, .router_weight = 1, .seed = 7});
        }
    }
}

/* Inference stores A where training stores H; the output is the same. */
static void test_inference(void **state)
{
    (void)state;
    for (int turn = 0; turn < 8; turn++) {
        smoe_layer layer =
            make_layer((smoe_entry)(turn % 3), turn % 2 ? SMOE_TYPE_BF16 : SMOE_TYPE_F32,
                       turn / 4 ? SMOE_ACTIVATION_GELU : SMOE_ACTIVATION_SWIGLU, 300, 136, 40, 3, 2);
        layer.layout = turn % 4 / 2 ? SMOE_LAYOUT_INTERLEAVED : SMOE_LAYOUT_CONCATENATED;
        const run_options options = {.biases = 1, .router_weight = 1, .seed = 31};
        layer_run training = run_make(&layer, options);
        layer.inference = 1;
        layer.chunks = 2;
        layer_run inference = run_make(&layer, options);
        assert_int_equal(inference.sizes.saved_buffer_bytes, 0);
        run_forward(&training);
        run_forward(&inference);
        assert_memory_equal(training.result.out.data, inference.result.out.data, training.result.out.bytes);
        run_free(&training), run_free(&inference);
    }
}

static void test_saved_is_kept(void **state)
{
    (void)state;
    const smoe_layer layer =
        make_layer(SMOE_ENTRY_FROM_TOPK, SMOE_TYPE_BF16, SMOE_ACTIVATION_SWIGLU, 100, 64, 32, 4, 2);
    layer_run run = run_make(&layer, (run_options){.biases = 1, .seed = 5});
    run_forward(&run);
    unsigned char *before = malloc(run.saved.bytes);
    assert_non_null(before);
    memcpy(before, run.saved.data, run.saved.bytes);
    run_backward(&run);
    assert_memory_equal(before, run.saved.data, run.saved.bytes);
    free(before);
    run_free(&run);
}

/* ---- Gradients written and accumulated ---- */

/* Twice into zeros is exactly twice the gradient; without accumulate what was there is gone (it was poison).
 */
static void test_accumulate(void **state)
{
    (void)state;
    for (int turn = 0; turn < 4; turn++) {
        const int64_t hidden = turn ? 72 : 520, n = turn ? 40 : 264; /* several tiles of dW, one bias */
        smoe_layer layer = make_layer(SMOE_ENTRY_FROM_TOPK, turn % 2 ? SMOE_TYPE_BF16 : SMOE_TYPE_F32,
                                      SMOE_ACTIVATION_SWIGLU, 100, hidden, n, 6, 2);
        layer.gradient_type = turn / 2 ? SMOE_TYPE_F32 : layer.dtype;
        layer.layout = turn / 2 ? SMOE_LAYOUT_INTERLEAVED : SMOE_LAYOUT_CONCATENATED;
        const run_options options = {.biases = 1, .spread = SPREAD_EMPTY_EXPERTS, .seed = 77};
        layer_run once = run_both(&layer, options);
        layer.accumulate = 1;
        layer_run twice = run_make(&layer, options);
        buffer *sums[] = {&twice.result.dw1, &twice.result.dw2, &twice.result.db1, &twice.result.db2};
        buffer *gradients[] = {&once.result.dw1, &once.result.dw2, &once.result.db1, &once.result.db2};
        for (int i = 0; i < 4; i++) memset(sums[i]->data, 0, sums[i]->bytes);
        run_forward(&twice);
        run_backward(&twice);
        run_backward(&twice);
        for (int i = 0; i < 4; i++) {
            const size_t count = sums[i]->bytes / oracle_type_bytes(layer.gradient_type);
            double *sum = oracle_alloc(count, sizeof *sum), *gradient = oracle_alloc(count, sizeof *gradient);
            oracle_load(sum, layer.gradient_type, sums[i]->data, count);
            oracle_load(gradient, layer.gradient_type, gradients[i]->data, count);
            for (size_t k = 0; k < count; k++) assert_true(sum[k] == 2.0 * gradient[k]);
            free(sum), free(gradient);
        }
        assert_memory_equal(once.result.dx.data, twice.result.dx.data, once.result.dx.bytes);
        run_free(&once), run_free(&twice);
    }
}

static void fill_with_negative_zeros(const buffer *b)
{
    for (size_t i = 0; i < b->bytes / sizeof(float); i++) ((float *)b->data)[i] = -0.0f;
}

/* Are all floats of expert e's part of a tensor zeros with this sign? */
static int part_is_zero(const buffer *b, int64_t experts, int64_t e, int negative)
{
    const size_t each = b->bytes / sizeof(float) / (size_t)experts;
    const float *part = (const float *)b->data + each * (size_t)e;
    for (size_t i = 0; i < each; i++)
        if (part[i] != 0.0f || (signbit(part[i]) != 0) != negative) return 0;
    return 1;
}

/* Experts without rows: zeros when written; when accumulated not touched, which -0 shows: adding 0 gives +0.
 */
static void test_empty_experts(void **state)
{
    (void)state;
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        smoe_layer layer =
            make_layer(SMOE_ENTRY_FROM_TOPK, SMOE_TYPE_F32, SMOE_ACTIVATION_SWIGLU, 100, 72, 24, 7, 2);
        layer.accumulate = accumulate;
        layer_run run =
            run_make(&layer, (run_options){.biases = 1, .spread = SPREAD_EMPTY_EXPERTS, .seed = 3});
        const buffer *all[] = {&run.result.dw1, &run.result.dw2, &run.result.db1, &run.result.db2};
        for (int i = 0; i < 4 && accumulate; i++) fill_with_negative_zeros(all[i]);
        run_forward(&run);
        run_backward(&run);
        for (int64_t e = 0; e < 7; e++) {
            const int empty = e % 3 != 1 && e != 6;
            for (int i = 0; i < 4; i++) assert_int_equal(part_is_zero(all[i], 7, e, accumulate), empty);
        }
        run_free(&run);
    }
    const smoe_layer layer =
        make_layer(SMOE_ENTRY_FROM_ROWS, SMOE_TYPE_BF16, SMOE_ACTIVATION_SILU, 100, 72, 24, 7, 1);
    check_against_oracle(&layer, (run_options){.spread = SPREAD_ONE_EXPERT, .seed = 4});
}

/* Way 2 with every id skipped, way 3 with no row: zeros everywhere. */
static void test_no_rows_at_all(void **state)
{
    (void)state;
    for (int entry = SMOE_ENTRY_FROM_TOPK; entry <= SMOE_ENTRY_FROM_ROWS; entry++) {
        const smoe_layer layer =
            make_layer((smoe_entry)entry, SMOE_TYPE_F32, SMOE_ACTIVATION_SWIGLU, 20, 16, 8, 3, 2);
        layer_run run = run_make(&layer, (run_options){.biases = 1, .seed = 1});
        if (entry == SMOE_ENTRY_FROM_TOPK)
            memset(run.in.topk_ids.data, 0xff, run.in.topk_ids.bytes);
        else
            memset(run.in.offsets.data, 0, run.in.offsets.bytes);
        buffer *indices = entry == SMOE_ENTRY_FROM_TOPK ? &run.in.topk_ids : &run.in.offsets;
        memcpy(indices->copy, indices->data, indices->bytes);
        run_forward(&run);
        run_backward(&run);
        const buffer *all[] = {&run.result.out,           &run.result.dx,          &run.result.dw1,
                               &run.result.dw2,           &run.result.db1,         &run.result.db2,
                               &run.result.dtopk_weights, &run.result.drow_weights};
        for (int i = 0; i < 8; i++)
            if (all[i]->base) assert_true(part_is_zero(all[i], 1, 0, 0));
        run_free(&run);
    }
}

/* ---- NaN stays where it belongs ---- */

static int token_has_nan(const buffer *b, const smoe_layer *l, int64_t token)
{
    const float *row = (const float *)b->data + token * l->hidden;
    for (int64_t i = 0; i < l->hidden; i++)
        if (isnan(row[i])) return 1;
    return 0;
}

static int64_t expert_of(const layer_run *run, int64_t token)
{
    const int64_t e = run->topk_ids[token];
    return e >= 0 && e < run->layer.experts ? e : -1;
}

static void assert_same_row(const buffer *one, const buffer *other, int64_t row, size_t bytes)
{
    assert_memory_equal((const char *)one->data + (size_t)row * bytes,
                        (const char *)other->data + (size_t)row * bytes, bytes);
}

/* Writes a NaN into an f32 input, on purpose. */
static void spoil(buffer *b, int64_t element)
{
    ((float *)b->data)[element] = NAN;
    memcpy(b->copy, b->data, b->bytes);
}

static void assert_other_experts_same(const layer_run *clean, const layer_run *spoiled, int64_t expert)
{
    const buffer *one[] = {&clean->result.dw1, &clean->result.dw2, &clean->result.db1, &clean->result.db2};
    const buffer *other[] = {&spoiled->result.dw1, &spoiled->result.dw2, &spoiled->result.db1,
                             &spoiled->result.db2};
    for (int i = 0; i < 4; i++)
        for (int64_t e = 0; e < clean->layer.experts; e++)
            if (e != expert)
                assert_same_row(one[i], other[i], e, one[i]->bytes / (size_t)clean->layer.experts);
}

typedef enum spoiled_input { SPOILED_X, SPOILED_DOUT, SPOILED_WEIGHT, SPOILED_W1, SPOILED_W2 } spoiled_input;

/* K = 1: one NaN in a token's x, dout or weight, or in an expert's weights. Only that token's rows of O and
 * dX (for weights: those of the expert's tokens), and only that expert's gradients, may change. */
static void check_nan(spoiled_input input)
{
    const smoe_layer layer =
        make_layer(SMOE_ENTRY_FROM_TOPK, SMOE_TYPE_F32, SMOE_ACTIVATION_SWIGLU, 300, 72, 40, 4, 1);
    const run_options options = {.biases = 1, .seed = 21};
    layer_run clean = run_both(&layer, options), run = run_make(&layer, options);
    int64_t token = 17;
    while (expert_of(&run, token) < 0) token++;
    const int64_t expert = expert_of(&run, token);
    if (input == SPOILED_X) spoil(&run.in.x, token * layer.hidden + 3);
    if (input == SPOILED_DOUT) spoil(&run.in.dout, token * layer.hidden + 3);
    if (input == SPOILED_WEIGHT) spoil(&run.in.topk_weights, token);
    if (input == SPOILED_W1) spoil(&run.in.w1, expert * 2 * layer.intermediate * layer.hidden + 5);
    if (input == SPOILED_W2) spoil(&run.in.w2, expert * layer.intermediate * layer.hidden + 5);
    run_forward(&run);
    run_backward(&run);
    const size_t row = (size_t)layer.hidden * sizeof(float);
    const int whole_expert = input == SPOILED_W1 || input == SPOILED_W2;
    for (int64_t t = 0; t < layer.tokens; t++) {
        if (t == token || (whole_expert && expert_of(&run, t) == expert)) continue;
        assert_same_row(&clean.result.out, &run.result.out, t, row);
        assert_same_row(&clean.result.dx, &run.result.dx, t, row);
        assert_same_row(&clean.result.dtopk_weights, &run.result.dtopk_weights, t, sizeof(float));
    }
    assert_int_equal(token_has_nan(&run.result.out, &layer, token), input != SPOILED_DOUT);
    assert_true(token_has_nan(&run.result.dx, &layer, token));
    assert_other_experts_same(&clean, &run, expert);
    run_free(&clean), run_free(&run);
}

static void test_nan_isolation(void **state)
{
    (void)state;
    for (int input = SPOILED_X; input <= SPOILED_W2; input++) check_nan((spoiled_input)input);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_smallest),
        cmocka_unit_test(test_all_kinds),
        cmocka_unit_test(test_many_panels),
        cmocka_unit_test(test_exact_integers),
        cmocka_unit_test(test_bits_by_threads_and_chunks),
        cmocka_unit_test(test_inference),
        cmocka_unit_test(test_saved_is_kept),
        cmocka_unit_test(test_accumulate),
        cmocka_unit_test(test_empty_experts),
        cmocka_unit_test(test_no_rows_at_all),
        cmocka_unit_test(test_nan_isolation),
    };
    return cmocka_run_group_tests_name("experts", tests, NULL, NULL);
}
