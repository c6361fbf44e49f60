/* The timing of work on an asynchronous device, tested with a pretended stream: what is timed and what is
 * not, in which order, and the statistics of the times. Also the arithmetic of the reference on a GPU (called
 * yardstick in the code), and the inputs. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#undef fail // a macro of the program

#include "cli/bench/data.h"
#include "cli/bench/samples.h"
#include "cli/bench/sustained.h"
#include "cli/bench/yardstick_cuda.h"
#include "cli/support/costs.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- A pretended stream, which counts milliseconds ---- */

typedef struct fake {
    double now;   // the stream's time in ms
    int befores;  // number of untimed parts of jobs so far
    int launches; // number of jobs so far
    int fails_at; // number of the launch that fails; 0: none
    bool marks_fail, sync_fails;
} fake;

static fake stream;
static double *marked;

static void *fake_open(int marks)
{
    return marked = calloc((size_t)marks, sizeof *marked);
}

static void fake_close(void *state)
{
    free(state);
}

static bool fake_mark(void *state, int index, void *given)
{
    assert_ptr_equal(given, &stream);
    ((double *)state)[index] = stream.now;
    stream.now += 100; // shows when a time goes over more than its own two marks
    return !stream.marks_fail;
}

static double fake_ms(void *state, int from, int to)
{
    return ((double *)state)[to] - ((double *)state)[from] - 100;
}

static bool fake_sync(void)
{
    return !stream.sync_fails;
}

static const clock_kind fake_clock = {fake_open, fake_close, fake_mark, fake_ms};
static const device fake_device = {.name = "fake", .sync = fake_sync};

/* The n-th launch takes n milliseconds, and the untimed part before it 1000. */
static bool fake_before(void *user, error *err)
{
    (void)user;
    (void)err;
    stream.befores++;
    stream.now += 1000;
    return true;
}

static bool fake_launch(void *user, error *err)
{
    stream.launches++;
    stream.now += stream.launches;
    stage_clock_on_stage(user, SMOE_STAGE_UP, 0, &stream); // must not be counted
    return stream.launches != stream.fails_at || fail(err, ERROR_RUNTIME, "launch %d", stream.launches);
}

static bool measure(bool with_before, double *ms, error *err)
{
    stage_clock clock;
    assert_true(stage_clock_open(&clock, &fake_clock));
    const sustained how = {&clock, &fake_device, &stream, 7};
    const sustained_job job = {with_before ? fake_before : NULL, fake_launch, &clock};
    const bool good = sustained_time(&how, &job, 5, ms, err);
    assert_int_equal(clock.count, 0);
    assert_false(clock.paused);
    stage_clock_close(&clock);
    return good;
}

/* Two launches show that one takes 2 ms. Two more are for the 7 ms of settling. The launches after them
 * count. */
static void only_settled_launches_count(void **state)
{
    (void)state;
    for (int with_before = 0; with_before < 2; with_before++) {
        double ms[6] = {0, 0, 0, 0, 0, -1};
        error err = {0};
        stream = (fake){0};
        assert_true(measure(with_before, ms, &err));
        for (int i = 0; i < 5; i++) assert_true(ms[i] == 2 + 2 + i + 1);
        assert_true(ms[5] == -1);
        assert_int_equal(stream.launches, 2 + 2 + 5);
        assert_int_equal(stream.befores, with_before ? 2 + 2 + 5 : 0);
    }
}

static void failures_end_the_timing(void **state)
{
    (void)state;
    double ms[5];
    for (int at = 1; at <= 9; at++) { // in the warm-up, while it settles, while it counts
        error err = {0};
        char want[32];
        stream = (fake){.fails_at = at};
        assert_false(measure(false, ms, &err));
        snprintf(want, sizeof want, "launch %d", at);
        assert_string_equal(err.text, want);
        assert_int_equal(stream.launches, at);
    }
    error err = {0};
    stream = (fake){.marks_fail = true};
    assert_false(measure(false, ms, &err));
    assert_non_null(strstr(err.text, "mark of time"));
    stream = (fake){.sync_fails = true};
    assert_false(measure(false, ms, &err));
    assert_non_null(strstr(err.text, "reported an error"));
}

static void expect_turns(sustained_turns turns, int rounds, int launches)
{
    assert_int_equal(turns.rounds, rounds);
    assert_int_equal(turns.launches, launches);
}

/* The rounds that fit into the given time, half of which is for settling; a given number of repeats; the
 * least and the largest number of both. */
static void turns_fit_into_the_time(void **state)
{
    (void)state;
    expect_turns(sustained_take_turns(7, 20, 100, 0, 250), 35, 5);
    expect_turns(sustained_take_turns(7, 200, 100, 0, 250), 23, 1);
    expect_turns(sustained_take_turns(0.1, 200, 100, 0, 250), 2, 1);
    expect_turns(sustained_take_turns(-1, 20, 100, 0, 250), 2, 5);
    expect_turns(sustained_take_turns(1000, 0.01, 100, 0, 250), 64, 250);
    expect_turns(sustained_take_turns(7, 0, 100, 0, 250), 64, 250);
    expect_turns(sustained_take_turns(7, 20, 100, 1, 250), 2, 1);
    expect_turns(sustained_take_turns(7, 20, 100, 7, 250), 2, 4);
    expect_turns(sustained_take_turns(7, 20, 100, 1000, 250), 4, 250);
    expect_turns(sustained_take_turns(7, 20, 100, 1001, 250), 5, 201);
}

/* Stages on this stream: several spans of one stage are added up, and too many marks are an error. */
static void spans_of_a_stage_add_up(void **state)
{
    (void)state;
    stage_clock clock;
    double ms[STAGE_COUNT] = {0};
    stream = (fake){0};
    assert_true(stage_clock_open(&clock, &fake_clock));
    for (int i = 0; i < 3; i++) {
        stage_clock_on_stage(&clock, SMOE_STAGE_DOWN, 0, &stream);
        stream.now += 2;
        stage_clock_on_stage(&clock, SMOE_STAGE_DOWN, 1, &stream);
        stage_clock_on_stage(&clock, SMOE_STAGE_COMBINE, 0, &stream);
        stream.now += 0.5;
        stage_clock_on_stage(&clock, SMOE_STAGE_COMBINE, 1, &stream);
    }
    stage_clock_add(&clock, ms);
    assert_true(ms[stage_index(SMOE_STAGE_DOWN)] == 6);
    assert_true(ms[stage_index(SMOE_STAGE_COMBINE)] == 1.5);
    assert_true(ms[stage_index(SMOE_STAGE_UP)] == 0);
    assert_false(clock.full);
    for (int i = 0; i < CLOCK_MARKS; i++) stage_clock_mark(&clock, &stream);
    assert_true(clock.full);
    stage_clock_reset(&clock);
    assert_false(clock.full || clock.failed || clock.count);
    stage_clock_close(&clock);
}

/* ---- Statistics ---- */

static void a_summary_has_median_least_and_p99(void **state)
{
    (void)state;
    double odd[] = {5, 1, 3}, even[] = {4, 1, 3, 2}, unknown[] = {NAN, NAN}, many[200];
    summary s = summarize(odd, 3);
    assert_true(s.median == 3 && s.least == 1 && s.p99 == 5);
    s = summarize(even, 4);
    assert_true(s.median == 2.5 && s.least == 1 && s.p99 == 4);
    for (int i = 0; i < 200; i++) many[i] = 200 - i;
    s = summarize(many, 200);
    assert_true(s.median == 100.5 && s.least == 1 && s.p99 == 198);
    assert_true(isnan(summarize(unknown, 2).median)); // without a yardstick the times are NaN
    assert_true(isnan(summarize(NULL, 0).median));
}

/* ---- The yardstick on paper, and data ---- */

static void the_yardstick_has_the_problems_sizes(void **state)
{
    (void)state;
    smoe_layer layer = SMOE_LAYER_INIT;
    layer.tokens = 32768, layer.hidden = 4096, layer.intermediate = 256, layer.experts = 256, layer.topk = 16;
    const uint64_t rows = 32768 * 16, fixed = CUBLAS_WORKSPACE_BYTES + CUBLAS_OWN_BYTES;
    assert_true(cuda_yardstick_scale(&layer, (int64_t)rows) == 1);
    assert_true(cuda_yardstick_bytes(&layer, (int64_t)rows, false) ==
                2 * rows * (2 * 4096 + 512 + 256) + fixed);
    assert_true(cuda_yardstick_bytes(&layer, (int64_t)rows, true) ==
                2 * rows * (2 * 4096 + 512 + 256 + 256) + fixed);
    assert_true(cuda_yardstick_scale(&layer, 300) == 300.0 / 256);
    assert_true(cuda_yardstick_scale(&layer, 10) == 10.0 / 256); // at least one row for each expert
    layer.activation = SMOE_ACTIVATION_RELU; // no gate: H has n columns; the copy has its least size
    assert_true(cuda_yardstick_bytes(&layer, 256, false) ==
                2 * UINT64_C(1) * CUDA_COPY_BYTES + 2 * 256 * (256 + 256) + fixed);
}

/* All values come from one pattern, but no two parts of the length of a small expert may be equal. */
static void tiled_parts_differ(void **state)
{
    (void)state;
    enum { COUNT = 3 * TILED_VALUES + 1000, EXPERT = 1 << 16 };
    buffer whole, small, plain;
    assert_true(buffer_make(&whole, device_find("cpu"), 2 * (size_t)COUNT));
    assert_true(fill_tiled(&whole, SMOE_TYPE_BF16, COUNT, 1, 9));
    const uint16_t *values = whole.data;
    for (int64_t a = 0; a + EXPERT <= COUNT; a += 16 * EXPERT)
        for (int64_t b = a + EXPERT; b + EXPERT <= COUNT; b += EXPERT)
            assert_int_not_equal(memcmp(values + a, values + b, 64), 0);
    int64_t equal = 0;
    for (int64_t i = 0; i < 1000; i++) equal += values[COUNT - 1 - i] == 0xFFFF; // poison that was left
    assert_int_equal(equal, 0);
    buffer_free(&whole);

    assert_true(buffer_make(&small, device_find("cpu"), 4 * 5000)); // up to a pattern: fill_normal's numbers
    assert_true(buffer_make(&plain, device_find("cpu"), 4 * 5000));
    assert_true(fill_tiled(&small, SMOE_TYPE_F32, 5000, 0.5, 3) &&
                fill_normal(&plain, SMOE_TYPE_F32, 5000, 0.5, 3));
    assert_memory_equal(small.data, plain.data, 4 * 5000);
    buffer_free(&small);
    buffer_free(&plain);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_settled_launches_count),
        cmocka_unit_test(failures_end_the_timing),
        cmocka_unit_test(turns_fit_into_the_time),
        cmocka_unit_test(spans_of_a_stage_add_up),
        cmocka_unit_test(a_summary_has_median_least_and_p99),
        cmocka_unit_test(the_yardstick_has_the_problems_sizes),
        cmocka_unit_test(tiled_parts_differ),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
