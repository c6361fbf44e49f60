/* `smoe verify` must find faults. The linker puts the wrappers below between the tool and the library. Each
 * fault is something that a broken library might do; the exit status must then be 1. Each run is a child
 * process. */
#include "cli/support/cli.h"
#include "harness/buffer.h"
#include "harness/tensors.h"

#include <smoe.h>

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

typedef enum fault {
    NO_FAULT,
    ELEMENT_OFF,      /* one element of out is slightly wrong */
    LEFT_UNWRITTEN,   /* the last row of out is not written */
    PAST_THE_END,     /* the byte after out is written */
    BEFORE_THE_START, /* the byte before scratch is written */
    INPUT_CHANGED,    /* a weight is changed */
    NOT_REPEATABLE,   /* the last bit of an element of dx changes at every second call */
    NOT_ACCUMULATED,  /* dw1 is overwritten instead of added to */
    NEEDS_SCRATCH,    /* the backward reads data that the forward left in its scratch */
    PLAN_WRONG,       /* two rows of the plan are exchanged */
    NAN_SPREADS,      /* a NaN anywhere in x makes the last number of out NaN */
    F8_CHANGED,       /* a quantised weight is changed */
    QUERY_OFF,        /* smoe_query_sizes states one byte less */
    CALL_FAILS
} fault;

static fault wanted;
static const void *forward_scratch;

smoe_status __real_smoe_layer_forward(smoe_context *context, const smoe_layer *layer,
                                      const smoe_forward_args *args, void *stream);
smoe_status __wrap_smoe_layer_forward(smoe_context *context, const smoe_layer *layer,
                                      const smoe_forward_args *args, void *stream);
smoe_status __real_smoe_layer_backward(smoe_context *context, const smoe_layer *layer,
                                       const smoe_backward_args *args, void *stream);
smoe_status __wrap_smoe_layer_backward(smoe_context *context, const smoe_layer *layer,
                                       const smoe_backward_args *args, void *stream);
smoe_status __real_smoe_query_sizes(smoe_context *context, const smoe_layer *layer, smoe_sizes *sizes);
smoe_status __wrap_smoe_query_sizes(smoe_context *context, const smoe_layer *layer, smoe_sizes *sizes);

static bool any_nan(const float *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        if (isnan(values[i])) return true;
    return false;
}

static void swap_rows(smoe_context *context, const smoe_layer *layer, const smoe_forward_args *args)
{
    smoe_plan_view view = SMOE_PLAN_VIEW_INIT;
    smoe_view_plan(context, layer, args, &view);
    int32_t rows[2];
    memcpy(rows, view.row_token, sizeof rows);
    const int32_t swapped[] = {rows[1], rows[0]};
    memcpy((char *)args->saved + ((const char *)view.row_token - (const char *)args->saved), swapped,
           sizeof swapped);
}

smoe_status __wrap_smoe_layer_forward(smoe_context *context, const smoe_layer *layer,
                                      const smoe_forward_args *args, void *stream)
{
    if (wanted == CALL_FAILS) return smoe_layer_backward(context, layer, NULL, stream);
    const smoe_status status = __real_smoe_layer_forward(context, layer, args, stream);
    const int64_t size = layer->tokens * layer->hidden;
    forward_scratch = args->scratch;
    if (layer->dtype != SMOE_TYPE_F32 || status != SMOE_OK) return status;
    float *out = args->out;
    if (wanted == ELEMENT_OFF) out[size / 2] += 0.01f;
    if (wanted == LEFT_UNWRITTEN) memset(out + size - layer->hidden, 0xff, 4 * (size_t)layer->hidden);
    if (wanted == PAST_THE_END) ((char *)out)[4 * size] ^= 1;
    if (wanted == BEFORE_THE_START) ((char *)args->scratch)[-1] ^= 1;
    if (wanted == INPUT_CHANGED) memset((char *)out + ((const char *)args->w1 - (const char *)out), 0, 4);
    if (wanted == F8_CHANGED && args->weights_f8)
        memset((char *)out + ((const char *)args->weights_f8 - (const char *)out), 1, 4);
    if (wanted == PLAN_WRONG) swap_rows(context, layer, args);
    if (wanted == NAN_SPREADS && any_nan(args->x, size)) out[size - 1] = NAN;
    return status;
}

smoe_status __wrap_smoe_layer_backward(smoe_context *context, const smoe_layer *layer,
                                       const smoe_backward_args *args, void *stream)
{
    static int calls;
    const int64_t dw1_size = layer->experts * 2 * layer->intermediate * layer->hidden;
    if (!args) return __real_smoe_layer_backward(context, layer, args, stream);
    if (wanted == NOT_ACCUMULATED && layer->accumulate) memset(args->dw1, 0, 4 * (size_t)dw1_size);
    const smoe_status status = __real_smoe_layer_backward(context, layer, args, stream);
    if (layer->dtype != SMOE_TYPE_F32 || status != SMOE_OK) return status;
    float *dx = args->dx;
    if (wanted == NOT_REPEATABLE && calls++ % 2) dx[0] = nextafterf(dx[0], 0.0f);
    if (wanted == NEEDS_SCRATCH) memcpy(dx, forward_scratch, sizeof *dx);
    return status;
}

smoe_status __wrap_smoe_query_sizes(smoe_context *context, const smoe_layer *layer, smoe_sizes *sizes)
{
    const smoe_status status = __real_smoe_query_sizes(context, layer, sizes);
    if (wanted == QUERY_OFF) sizes->saved_bytes--;
    return status;
}

/* The exit status of `smoe verify ...` with a fault. */
static int verify_with(fault wanted_fault, const char *first, const char *second)
{
    fflush(NULL);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        char name[] = "smoe verify", one[64] = "", two[64] = "";
        snprintf(one, sizeof one, "%s", first ? first : "");
        snprintf(two, sizeof two, "%s", second ? second : "");
        char *arguments[] = {name, first ? one : NULL, second ? two : NULL, NULL};
        if (!freopen("/dev/null", "w", stdout) || !freopen("/dev/null", "w", stderr)) _exit(99);
        wanted = wanted_fault;
        exit(smoe_cli_verify(first ? second ? 3 : 2 : 1, arguments));
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void faults_are_seen(void **state)
{
    (void)state;
    const struct {
        const char *only;
        fault fault;
    } cases[] = {
        {"--only=swiglu, biases", ELEMENT_OFF},       {"--only=swiglu, biases", LEFT_UNWRITTEN},
        {"--only=swiglu, biases", PAST_THE_END},      {"--only=swiglu, biases", BEFORE_THE_START},
        {"--only=swiglu, biases", INPUT_CHANGED},     {"--only=same bits, given topk", NOT_REPEATABLE},
        {"--only=accumulate twice", NOT_ACCUMULATED}, {"--only=swiglu, biases", NEEDS_SCRATCH},
        {"--only=swiglu, biases", PLAN_WRONG},        {"--only=NaN in rows", NAN_SPREADS},
        {"--only=gradients, rows", CALL_FAILS},       {"--only=K = 1, E = 1", NOT_REPEATABLE},
        {"--only=saved bytes, rows", QUERY_OFF},      {"--only=swiglu, biases", CALL_FAILS},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        assert_int_equal(verify_with(NO_FAULT, cases[i].only, NULL), 0);
        const int status = verify_with(cases[i].fault, cases[i].only, NULL);
        if (status != 1)
            fail_msg("fault %d with %s: exit status %d", (int)cases[i].fault, cases[i].only, status);
    }
}

static void exit_statuses_are_as_documented(void **state)
{
    (void)state;
    assert_int_equal(verify_with(NO_FAULT, "--only=K = 1, E = 1", "--json"), 0);
    assert_int_equal(verify_with(NO_FAULT, "--only=K = 1, E = 1", "--csv"), 0);
    assert_int_equal(verify_with(NO_FAULT, "--help", NULL), 0);
    assert_int_equal(verify_with(NO_FAULT, "--only=no such case", NULL), 2);
    assert_int_equal(verify_with(NO_FAULT, "--device=abacus", NULL), 2);
    assert_int_equal(verify_with(NO_FAULT, "--seed=x", NULL), 2);
    assert_int_equal(verify_with(NO_FAULT, "--no-such-option", NULL), 2);
    assert_int_equal(verify_with(NO_FAULT, "stray", NULL), 2);
    assert_int_equal(verify_with(NO_FAULT, "--check=speed", NULL), 2);
    assert_int_equal(verify_with(NO_FAULT, "--shard=2/2", NULL), 2);
    assert_int_equal(verify_with(NO_FAULT, "--shard=0/", NULL), 2);
    assert_int_equal(verify_with(NO_FAULT, "--gpu=1", NULL), 3);
    assert_int_equal(verify_with(NO_FAULT, "--check=bits", "--only=K = 1, E = 1"), 0);
    assert_int_equal(verify_with(NO_FAULT, "--check=gradients", "--only=K = 1, E = 1"), 0);
    assert_int_equal(verify_with(NO_FAULT, "--check=support", "--only=layer, sparse K 1"),
                     2); /* --all has it */
    assert_int_equal(verify_with(NO_FAULT, "--all", "--only=layer, sparse K 1"), 0);
}

/* fp8 is computed, and its faults are seen. */
static void fp8_is_verified(void **state)
{
    (void)state;
    static const char *const computes[] = {"--compute=f8", "--compute=f8-dgrad"};
    static const char *const only[] = {"--only=swiglu, biases", "--only=same bits, given topk",
                                       "--only=gradients, given topk", "--only=NaN in rows"};
    for (size_t i = 0; i < COUNT(computes); i++) {
        for (size_t k = 0; k < COUNT(only); k++)
            assert_int_equal(verify_with(NO_FAULT, computes[i], only[k]), 0);
        assert_int_equal(verify_with(F8_CHANGED, computes[i], only[0]), 1);
        assert_int_equal(verify_with(LEFT_UNWRITTEN, computes[i], only[0]), 1);
        assert_int_equal(verify_with(NOT_REPEATABLE, computes[i], only[1]), 1);
        assert_int_equal(verify_with(NAN_SPREADS, computes[i], only[3]), 1);
    }
    assert_int_equal(verify_with(F8_CHANGED, only[0], NULL), 0);
    assert_int_equal(verify_with(NO_FAULT, "--compute=f8", "--only=d = 8, n = 8"), 2); // not in fp8
    assert_int_equal(verify_with(NO_FAULT, "--compute=bf8", NULL), 2);
}

/* Judges tensors with errors of known size. */
static void errors_of_known_size_are_judged(void **state)
{
    (void)state;
    enum { SIZE = 100 };
    double want[SIZE], stored[SIZE], got[SIZE];
    for (int i = 0; i < SIZE; i++) {
        want[i] = 1.0 + i % 7;
        stored[i] = want[i] * (1.0 + (i % 2 ? 1e-3 : -1e-3));
    }
    const tensor want_tensor = {.values = want, .count = SIZE},
                 stored_tensor = {.values = stored, .count = SIZE};
    const tensor got_tensor = {.values = got, .count = SIZE}, fewer = {.values = got, .count = SIZE - 1},
                 none = {0};
    const struct {
        double scale; /* the error, as a multiple of the error that storage makes */
        bool ok;
    } cases[] = {{0.0, true}, {1.0, true}, {1.49, true}, {1.51, false}, {-1.51, false}, {NAN, false}};
    for (size_t c = 0; c < COUNT(cases); c++) {
        for (int i = 0; i < SIZE; i++) got[i] = want[i] + cases[c].scale * (stored[i] - want[i]);
        const verdict v = tensor_judge(TENSOR_OUT, &got_tensor, &want_tensor, &stored_tensor, 5e-3);
        assert_int_equal(v.ok, cases[c].ok);
    }
    for (int i = 0; i < SIZE; i++) got[i] = stored[i];
    assert_false(
        tensor_judge(TENSOR_OUT, &got_tensor, &want_tensor, &stored_tensor, 0.9e-3).ok); /* the cap */
    assert_false(tensor_judge(TENSOR_COUNTS, &got_tensor, &want_tensor, &stored_tensor, 5e-3).ok);
    memcpy(got, want, sizeof got);
    assert_true(tensor_judge(TENSOR_COUNTS, &got_tensor, &want_tensor, &want_tensor, 5e-3).ok);
    got[17] += 1;
    assert_true(tensor_judge(TENSOR_COUNTS, &got_tensor, &want_tensor, &want_tensor, 5e-3).error == 1.0);
    assert_false(tensor_judge(TENSOR_OUT, &fewer, &want_tensor, &stored_tensor, 5e-3).ok);
    assert_false(tensor_judge(TENSOR_OUT, &none, &want_tensor, &stored_tensor, 5e-3).ok);
}

static void bits_are_compared(void **state)
{
    (void)state;
    float zero[] = {0.0f, 1.0f}, minus_zero[] = {-0.0f, 1.0f};
    const tensor a = {.bits = zero, .count = 2, .type = SMOE_TYPE_F32},
                 b = {.bits = minus_zero, .count = 2, .type = SMOE_TYPE_F32};
    const tensor none = {0};
    assert_int_equal(tensor_differing_bits(&a, &a), 0);
    assert_int_equal(tensor_differing_bits(&a, &b), 1);
    assert_int_equal(tensor_differing_bits(&a, &none), -1);
    assert_int_equal(tensor_differing_bits(&none, &none), 0);
}

static void buffers_have_guards_and_poison(void **state)
{
    (void)state;
    const size_t sizes[] = {0, 1, 255, 256, 1000};
    for (size_t i = 0; i < COUNT(sizes); i++) {
        buffer b;
        assert_true(buffer_make(&b, device_find("cpu"), sizes[i]));
        assert_int_equal((uintptr_t)b.data % DEVICE_ALIGN, 0);
        for (size_t k = 0; k < sizes[i]; k++) assert_int_equal(((unsigned char *)b.data)[k], 0xff);
        memset(b.data, 0, sizes[i]);
        assert_true(buffer_intact(&b));
        char *edges[] = {(char *)b.data - 1, (char *)b.data + sizes[i], (char *)b.data - 512,
                         (char *)b.data + sizes[i] + 512};
        for (size_t k = 0; k < COUNT(edges); k++) {
            *edges[k] ^= 4;
            assert_false(buffer_intact(&b));
            *edges[k] ^= 4;
            assert_true(buffer_intact(&b));
        }
        buffer_free(&b);
        buffer_free(&b);
    }
    assert_null(device_find("abacus"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(errors_of_known_size_are_judged),
        cmocka_unit_test(bits_are_compared),
        cmocka_unit_test(buffers_have_guards_and_poison),
        cmocka_unit_test(exit_statuses_are_as_documented),
        cmocka_unit_test(faults_are_seen),
        cmocka_unit_test(fp8_is_verified),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
