/* Updates of the weights. Updates during the backward and after it must give the same bits, also in resumed
 * runs. If a loss or gradient is not finite, no checkpoint may be written any more. */
#define _DEFAULT_SOURCE
#include "train/run/log.h"
#include "train_case.h"

#include <cblas.h>
#include <math.h>
#include <omp.h>

static void resume_with(const place *p, double clip)
{
    train_settings s = settings_of(p);
    s.clip = clip;
    train_result whole, part;
    char other[128];
    snprintf(other, sizeof other, "%s/other", p->folder);
    omp_set_num_threads(1); // the first run has one thread, the second two: the bits must be equal
    train_ok(&s, &whole);
    omp_set_num_threads(2);
    s.out = other;
    train_stopped(&s, 7, &part); // between two log lines: the sum of the losses must be restored too
    assert_int_equal(part.step, 7);
    s.resume = true;
    train_ok(&s, &part);
    assert_int_equal(part.step, 20);
    assert_true(part.validation.loss == whole.validation.loss);
    assert_true(part.loss == whole.loss);
    assert_same_checkpoints(p->out, other);
    assert_true(whole.loss < 5.0); // below ln 256: it learned something
    train_ok(&s, &part);           // resuming a finished run must change nothing
    assert_same_checkpoints(p->out, other);
    omp_set_num_threads(1);
}

static void resume_gives_the_same_bits(void **state)
{
    resume_with(*state, 1.0);
}

static void resume_without_clipping_gives_the_same_bits(void **state)
{
    resume_with(*state, 0.0);
}

/* Without clipping each layer is updated during the backward. A clipping limit that is never reached forces
 * the update of all layers after the backward. Weights and moments must be equal bit for bit, and the norms
 * equal except for the order of their sums. The sizes leave gaps between the tensors, and layers have
 * different tensors whose gradients use the same memory. */
static void updates_in_the_backward_give_the_same_bits(void **state)
{
    place *p = *state;
    for (int variant = 0; variant < 4; variant++) {
        train_settings s = settings_of(p);
        train_result result;
        log_line *lines[2];
        size_t count[2];
        char out[2][128], path[PATH_BYTES];
        error err = {0};
        s.logs = s.steps = 5;
        s.config.hidden = 24;
        s.config.experts = 5;
        s.config.layers = 3;
        s.config.tied = variant % 2;
        s.config.dense_layers = variant < 3 ? variant : 3;
        s.config.dense_intermediate = variant ? 12 : 0;
        s.config.shared_intermediate = variant == 1 ? 4 : 0;
        for (int i = 0; i < 2; i++) {
            s.clip = i ? 1e9 : 0;
            s.out = out[i];
            snprintf(out[i], sizeof out[i], "%s/variant%d-%d", p->folder, variant, i);
            train_ok(&s, &result);
            snprintf(path, sizeof path, "%s/train.jsonl", out[i]);
            if (!log_read(path, &lines[i], &count[i], &err)) fail_msg("%s", err.text);
        }
        assert_same_checkpoints(out[0], out[1]);
        assert_int_equal(count[0], count[1]);
        assert_int_equal(count[0], 5);
        for (size_t l = 0; l < count[0]; l++) {
            assert_true(lines[0][l].loss == lines[1][l].loss);
            assert_true(lines[0][l].grad_norm > 0.1);
            assert_float_equal(lines[0][l].grad_norm / lines[1][l].grad_norm, 1, 1e-6);
        }
        free(lines[0]), free(lines[1]);
    }
}

/* The learning rate is so large that the weights overflow. */
static void stop_with(const place *p, double clip)
{
    train_settings s = settings_of(p);
    char path[PATH_BYTES], name[PATH_BYTES];
    error err = {0};
    s.clip = clip;
    s.lr = 1e38;
    s.warmup = 0.0;
    train_result result;
    assert_false(train_run(&s, NULL, NULL, &result, &err));
    assert_int_equal(err.code, ERROR_RUNTIME);
    assert_non_null(strstr(err.text, "the loss of step 2 is")); // not its gradient, which is checked later
    assert_non_null(strstr(err.text, "last good checkpoint"));
    err = (error){0};
    assert_true(checkpoint_find(p->out, name, sizeof name, &err));
    model m;
    assert_true(model_create(&m, NULL, &s.config, &(model_options){.sequences = 1}, &err));
    assert_true(checkpoint_load_weights(name, &m, NULL, &err));
    for (size_t i = 0; i < m.weights.layout.total; i++) assert_true(isfinite(m.weights.host[i]));
    model_destroy(&m);
    snprintf(path, sizeof path, "%s/train.jsonl", p->out);
    assert_int_equal(access(path, R_OK), 0);
    assert_int_equal(count_folders(p->out), 1);
    assert_int_equal(access_in(p->out, "step-0000000"), 0);
}

static void a_loss_that_is_not_finite_stops_the_run(void **state)
{
    stop_with(*state, 1.0);
}

/* The step that fails has already updated the weights of some layers. */
static void a_loss_that_is_not_finite_stops_the_run_without_clipping(void **state)
{
    stop_with(*state, 0.0);
}

/* A gradient that is not finite, of a finite loss. */
static void a_gradient_that_is_not_finite_stops_the_run(void **state)
{
    place *p = *state;
    for (int clips = 0; clips < 2; clips++) {
        train_settings s = settings_of(p);
        error err = {0};
        train_result result;
        char out[128];
        snprintf(out, sizeof out, "%s/clip%d", p->folder, clips);
        s.out = out;
        s.clip = clips;
        s.routing.balance_coefficient = INFINITY; // the load-balance loss is not part of the reported loss
        assert_false(train_run(&s, NULL, NULL, &result, &err));
        assert_int_equal(err.code, ERROR_RUNTIME);
        if (!strstr(err.text, "the gradient's norm of step 1 is")) fail_msg("%s", err.text);
        assert_int_equal(count_folders(out), 1);
        assert_int_equal(access_in(out, "step-0000000"), 0);
    }
}

int main(void)
{
    openblas_set_num_threads(1);
    omp_set_num_threads(1); // the models are so small that a second thread would only wait
#define RUN(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        RUN(resume_gives_the_same_bits),
        RUN(resume_without_clipping_gives_the_same_bits),
        RUN(updates_in_the_backward_give_the_same_bits),
        RUN(a_loss_that_is_not_finite_stops_the_run),
        RUN(a_loss_that_is_not_finite_stops_the_run_without_clipping),
        RUN(a_gradient_that_is_not_finite_stops_the_run),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
