/* The first weights and the learning rate that follow from the sizes of a model: at three sizes the loss
 * starts near that of a guess and falls over the first steps. */
#define _DEFAULT_SOURCE
#include "tests/train_case.h"

#include <math.h>

static void values_follow_from_the_width(void **state)
{
    (void)state;
    const train_settings s = train_settings_default();
    assert_true(s.lr == 0.004 && s.config.initializer_range == 0.1);
    model_config wide = s.config;
    wide.hidden = 16;
    assert_true(train_default_lr(&wide) == 0.004 && train_default_init(&wide) == 0.1);
    wide.hidden = 2048;
    assert_true(train_default_lr(&wide) == 0.000188 && train_default_init(&wide) == 0.0217);
}

static void the_loss_falls_from_the_first_step(void **state)
{
    enum { STEPS = 50, LAST = 10, RUN = 200 }; // the warm-up is 10 steps
    static const struct {
        int64_t hidden, layers, heads;
    } sizes[] = {{96, 3, 4}, {256, 6, 4}, {512, 8, 8}};
    place *p = *state;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        train_settings s = settings_of(p);
        train_result result;
        log_line *lines;
        char out[160];
        double highest = 0.0, end = 0.0;
        snprintf(out, sizeof out, "%s%zu", p->out, i);
        s.out = out;
        s.batch = 2;
        s.steps = s.logs = RUN;
        s.checkpoints = s.validations.count = 0;
        s.routing.rounding = SMOE_ROUNDING_NONE;
        s.config.hidden = sizes[i].hidden;
        s.config.layers = sizes[i].layers;
        s.config.heads = sizes[i].heads;
        s.config.intermediate = 128;
        s.config.context = 32;
        s.config.initializer_range = train_default_init(&s.config);
        s.lr = train_default_lr(&s.config);
        train_stopped(&s, STEPS, &result);
        assert_int_equal(read_log(out, &lines), STEPS);
        for (int k = 0; k < STEPS; k++) {
            highest = fmax(highest, lines[k].loss);
            end += k >= STEPS - LAST ? lines[k].loss / LAST : 0.0;
        }
        if (!(lines[0].loss < log(256) + 1 && highest < lines[0].loss + 0.5 && end < lines[0].loss - 2))
            fail_msg("hidden %lld: first %.2f, highest %.2f, last %.2f", (long long)s.config.hidden,
                     lines[0].loss, highest, end);
        free(lines);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_follow_from_the_width),
        cmocka_unit_test_setup_teardown(the_loss_falls_from_the_first_step, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
