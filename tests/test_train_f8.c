/* Training with fp8 (smoe train --compute): the loss falls as in 16 bits, a killed run gives the same bytes,
 * and what the log says of A. test_cli_ranks has several ranks. */
#define _DEFAULT_SOURCE
#include "train_case.h"

#include "train/run/f8_report.h"

#include <math.h>

static train_settings f8_settings(const place *p, smoe_compute compute, char out[128], const char *name)
{
    train_settings s = settings_of(p);
    snprintf(out, 128, "%s/%s", p->folder, name);
    s.out = out;
    s.config.intermediate = 16;
    s.compute = compute;
    return s;
}

/* The last line of the log of a run with `compute`. */
static log_line train_for(const place *p, smoe_compute compute, const char *name)
{
    char out[128];
    train_settings s = f8_settings(p, compute, out, name);
    train_result result;
    log_line *lines;
    s.steps = 40;
    s.batch = 8;
    train_ok(&s, &result);
    const size_t count = read_log(out, &lines);
    assert_true(lines[0].loss > 1.3 * lines[count - 1].loss); // it falls
    const log_line last = lines[count - 1];
    free(lines);
    return last;
}

static void the_loss_is_near_that_of_16_bits(void **state)
{
    const log_line wide = train_for(*state, SMOE_COMPUTE_STORAGE, "wide");
    assert_true(isnan(wide.f8.loss) && isnan(wide.f8.amax));
    const smoe_compute computes[] = {SMOE_COMPUTE_F8, SMOE_COMPUTE_F8_DGRAD};
    double losses[2];
    for (int i = 0; i < 2; i++) {
        const log_line line = train_for(*state, computes[i], i ? "dgrad" : "f8");
        assert_true(fabs(line.loss / wide.loss - 1) < 0.05);
        assert_true(line.loss != wide.loss); // it is fp8
        assert_true(fabs(line.f8.loss / line.val_loss - 1) < 0.02 && line.f8.loss != line.val_loss);
        assert_true(line.f8.amax > 0 && line.f8.zeros + line.f8.subnormals < F8_REPORT_MOST);
        losses[i] = line.loss;
    }
    assert_true(losses[0] != losses[1]);
}

/* A run is stopped after each of some steps, or is killed after step 10, at which there is a checkpoint. */
static void a_resumed_run_gives_the_same_bytes(void **state)
{
    place *p = *state;
    char whole[128], out[128], command[1024];
    train_settings s = f8_settings(p, SMOE_COMPUTE_F8, whole, "whole");
    train_result result;
    log_line *a, *b;
    train_ok(&s, &result);
    const size_t count = read_log(whole, &a);
    for (int64_t at = 5; at <= 15; at += 5) {
        s = f8_settings(p, SMOE_COMPUTE_F8, out, at == 5 ? "after5" : at == 10 ? "killed" : "after15");
        if (at == 10) {
            snprintf(command, sizeof command,
                     "cp -a %s %s && rm -r %s/step-0000020 && ln -sfn step-0000010 %s/latest", whole, out,
                     out, out);
            assert_int_equal(system(command), 0);
        } else {
            train_stopped(&s, at, &result); // after 5 and 15 in a validation, which is made again
        }
        s.resume = true;
        train_ok(&s, &result);
        assert_same_checkpoints(whole, out);
        assert_int_equal(read_log(out, &b), count);
        for (size_t i = 0; i < count; i++) {
            assert_memory_equal(&a[i].f8, &b[i].f8, sizeof a[i].f8);
            assert_true(a[i].loss == b[i].loss);
        }
        free(b);
    }
    free(a);
}

/* Feature 0 of every expert grows until e4m3 has little left for the others, which share its scale. */
static void large_features_show_in_the_report(void **state)
{
    (void)state;
    enum { TOKENS = 32 };
    const model_config config = {.vocab = 256,
                                 .hidden = 16,
                                 .layers = 1,
                                 .heads = 2,
                                 .experts = 4,
                                 .topk = 2,
                                 .intermediate = 16,
                                 .context = TOKENS,
                                 .groups = 1,
                                 .groups_kept = 1,
                                 .route_scale = 1.0,
                                 .norm_eps = 1e-5,
                                 .rope_theta = 1e4,
                                 .initializer_range = 0.1};
    const model_options options = {.sequences = 1, .use = MODEL_TRAIN, .compute = SMOE_COMPUTE_F8};
    int32_t words[TOKENS];
    for (int i = 0; i < TOKENS; i++) words[i] = i * 37 % 256;
    model m;
    error err = {0};
    if (!model_create(&m, NULL, &config, &options, &err)) fail_msg("%s", err.text);
    param_init(m.weights.host, &m.weights.layout, 3);
    f8_report reports[2];
    for (int i = 0; i < 2; i++) {
        double loss;
        const model_batch batch = {words, words, 1, TOKENS};
        if (!model_loss(&m, &batch, NULL, SMOE_COMPUTE_F8, &loss, &err) ||
            !f8_report_read(&reports[i], &m, TOKENS, &err))
            fail_msg("%s", err.text);
        for (size_t t = 0; t < m.weights.layout.tensor_count; t++) {
            const param_tensor *at = &m.weights.layout.tensors[t];
            if (!strstr(at->name, "gate_proj") && !strstr(at->name, "up_proj")) continue;
            for (int j = 0; j < config.hidden; j++) m.weights.host[at->offset + (size_t)j] *= 1000.0f;
        }
    }
    assert_true(reports[0].zeros + reports[0].subnormals < F8_REPORT_MOST);
    assert_true(reports[1].zeros + reports[1].subnormals > F8_REPORT_MOST);
    assert_true(reports[1].amax > 1e3 * reports[0].amax);
    if (!f8_report_read(&reports[0], &m, 0, &err)) fail_msg("%s", err.text);
    assert_true(isnan(reports[0].zeros));
    model_destroy(&m);
}

static void sizes_that_fp8_lacks_are_refused(void **state)
{
    char out[128];
    train_settings s = f8_settings(*state, SMOE_COMPUTE_F8, out, "refused");
    s.config.intermediate = 24;
    train_fails(&s, ERROR_USAGE, "intermediate is 24, with SMOE_COMPUTE_F8 it must be a multiple of 16");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_loss_is_near_that_of_16_bits, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_resumed_run_gives_the_same_bytes, set_up, tear_down),
        cmocka_unit_test(large_features_show_in_the_report),
        cmocka_unit_test_setup_teardown(sizes_that_fp8_lacks_are_refused, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
