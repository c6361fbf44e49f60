/* Runs that are stopped after a step, before or in a validation. Resumed, they must have the log and the
 * checkpoints of a run that was not stopped. */
#define _DEFAULT_SOURCE
#include "train_case.h"

#include <cblas.h>
#include <math.h>
#include <omp.h>

static size_t count_lines(const place *p, int64_t step)
{
    log_line *lines;
    size_t found = 0;
    const size_t count = read_log(p->out, &lines);
    for (size_t i = 0; i < count; i++) found += lines[i].step == step;
    free(lines);
    return found;
}

/* Equal, or both NAN */
static void assert_same(double a, double b)
{
    if (!(a == b || (isnan(a) && isnan(b)))) fail_msg("%.17g is not %.17g", a, b);
}

/* All lines, except for what the clock measures. */
static void assert_same_logs(const char *a, const char *b)
{
    log_line *x, *y;
    const size_t count = read_log(a, &x);
    assert_int_equal(read_log(b, &y), count);
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(x[i].step, y[i].step);
        assert_int_equal(x[i].tokens, y[i].tokens);
        assert_same(x[i].loss, y[i].loss);
        assert_same(x[i].bits_per_byte, y[i].bits_per_byte);
        assert_same(x[i].val_loss, y[i].val_loss);
        assert_same(x[i].lr, y[i].lr);
        assert_same(x[i].grad_norm, y[i].grad_norm);
        assert_same(x[i].routing.added, y[i].routing.added);
        assert_same(x[i].routing.dropped, y[i].routing.dropped);
        assert_same(x[i].routing.emptied, y[i].routing.emptied);
        assert_same(x[i].routing.busiest, y[i].routing.busiest);
        assert_true(y[i].tokens_per_s > 0 && isfinite(y[i].tokens_per_s));
        assert_true(y[i].seconds > (i ? y[i - 1].seconds : 0));
    }
    free(x);
    free(y);
}

/* A stop after every step of a run. After steps 5, 10 and 15 it ends a validation. */
static void a_stop_loses_nothing(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result whole, part;
    char out[128];
    train_ok(&s, &whole);
    for (int64_t at = 1; at <= s.steps; at++) {
        snprintf(out, sizeof out, "%s/stop%d", p->folder, (int)at);
        s.out = out;
        s.resume = false;
        train_stopped(&s, at, &part);
        assert_int_equal(part.step, at);
        s.resume = true;
        train_ok(&s, &part);
        assert_same(part.validation.loss, whole.validation.loss);
        assert_same_logs(p->out, out);
        if (at < s.steps) assert_same_checkpoints(p->out, out); // without a step none is written
    }
}

/* A resumed run makes no step before the validation that was stopped, also if it is stopped again. If it is
 * killed after the validation and resumed once more, the line is there once. */
static void a_stopped_validation_stays_due(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result result;
    char out[128], command[2 * PATH_BYTES];
    train_ok(&s, &result);
    snprintf(out, sizeof out, "%s/other", p->folder);
    s.out = out;
    s.checkpoints = 20; // that of step 5 is not overwritten
    s.keep = 20;
    train_stopped(&s, 5, &result);
    s.resume = true;
    train_stopped(&s, 0, &result);
    assert_int_equal(result.step, 5);
    train_stopped(&s, 7, &result);
    assert_int_equal(result.step, 7);
    snprintf(command, sizeof command, "cd '%s' && ln -sfn step-0000005 latest", out);
    assert_int_equal(system(command), 0);
    train_ok(&s, &result);
    assert_same_logs(p->out, out);
}

/* A resumed run without validations writes the line without one. */
static void a_stopped_validation_need_not_be_made(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result result;
    log_line *lines;
    train_stopped(&s, 5, &result);
    s.resume = true;
    s.validations.count = 0;
    train_ok(&s, &result);
    const size_t count = read_log(p->out, &lines);
    assert_int_equal(count, 6); // after steps 4, 5, 8, 12, 16 and 20
    assert_int_equal(lines[1].step, 5);
    assert_true(isfinite(lines[1].loss) && isnan(lines[1].val_loss));
    free(lines);
}

/* A stop after the last step, before or in the last validation. The checkpoint must be complete. The resumed
 * run must compute the validation loss and write the line of the log, once even if it is resumed again. */
static void a_stop_before_the_last_validation(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result result;
    s.logs = 3; // the last step has a line only because it is the last
    train_stopped(&s, 20, &result);
    assert_int_equal(result.step, 20);
    assert_int_equal(access_in(p->out, "step-0000020/state.safetensors"), 0);
    assert_int_equal(count_lines(p, 20), 0);
    s.resume = true;
    train_stopped(&s, 0, &result); // no step is left, the validation is interrupted
    assert_true(result.validation.stopped);
    assert_true(isnan(result.loss)); // the run has written no line
    assert_int_equal(count_lines(p, 20), 0);
    for (int i = 0; i < 2; i++) {
        train_ok(&s, &result);
        assert_true(!result.interrupted && isfinite(result.validation.loss));
        assert_true(isfinite(result.loss));
        assert_int_equal(count_lines(p, 20), 1);
    }
}

/* The last validation is stopped and then made by a resumed run, which makes no step. If the run is then made
 * longer, the log keeps the line with this validation. */
static void a_longer_run_keeps_the_last_validation(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result result;
    char out[128];
    s.logs = 3; // the line of step 20 is there only because the step is the last
    train_ok(&s, &result);
    s.resume = true;
    s.steps = 24;
    train_ok(&s, &result);
    snprintf(out, sizeof out, "%s/other", p->folder);
    s.out = out;
    s.resume = false;
    s.steps = 20;
    train_stopped(&s, 20, &result);
    s.resume = true;
    train_stopped(&s, 0, &result);
    assert_true(result.validation.stopped);
    train_ok(&s, &result);
    const double loss = result.loss;
    train_ok(&s, &result);
    assert_float_equal(result.loss, loss, 1e-7); // of the line that is in the log already
    s.steps = 24;
    train_ok(&s, &result);
    assert_same_logs(p->out, out);
    assert_same_checkpoints(p->out, out);
}

int main(void)
{
    openblas_set_num_threads(1);
    omp_set_num_threads(1); // the models are so small that a second thread would only wait
#define RUN(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        RUN(a_stop_loses_nothing),
        RUN(a_stopped_validation_stays_due),
        RUN(a_stopped_validation_need_not_be_made),
        RUN(a_stop_before_the_last_validation),
        RUN(a_longer_run_keeps_the_last_validation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
