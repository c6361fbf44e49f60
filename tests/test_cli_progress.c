/* Progress of `smoe train` and `smoe eval`: the loss and the rate that are shown are those of the last steps;
 * without a terminal there is a line for each line of the log; validations show how far they are. And the
 * units of the results. */
#define _DEFAULT_SOURCE
#include "tests/cli_case.h"

#include "base/clock.h"
#include "cli/lm/progress.h"

#include <fcntl.h>
#include <math.h>

/* What the functions write to stderr between the two calls. */
static int begin_capture(void **state)
{
    char path[4096];
    const int kept = dup(STDERR_FILENO),
              file = open(in_folder(path, state, "errors"), O_CREAT | O_TRUNC | O_RDWR, 0600);
    fflush(stderr);
    dup2(file, STDERR_FILENO);
    close(file);
    return kept;
}

static void end_capture(void **state, int kept, char *text, size_t size)
{
    char path[4096];
    fflush(stderr);
    dup2(kept, STDERR_FILENO);
    close(kept);
    FILE *file = fopen(in_folder(path, state, "errors"), "r");
    text[fread(text, 1, size - 1, file)] = '\0';
    fclose(file);
}

static void the_average_is_of_the_last_steps(void **state)
{
    (void)state;
    average a = {0};
    assert_true(isnan(average_of(&a)));
    average_add(&a, 8);
    assert_true(fabs(average_of(&a) - 8) < 1e-12);
    for (int i = 0; i < 5; i++) average_add(&a, 4);
    assert_true(average_of(&a) > 4 && average_of(&a) < 4.7); // with the first value at its full weight 7.1
    for (int i = 0; i < 1000; i++) average_add(&a, 3);
    assert_true(fabs(average_of(&a) - 3) < 1e-9);
}

/* The loss falls fast at first: 8, then 4. The first line of the log is their mean. */
static void the_shown_loss_and_rate_are_those_of_the_log(void **state)
{
    char text[4096];
    const log_line line = {.loss = 4.4, .tokens_per_s = 80};
    train_report r = {
        .progress = 0.5, .tokens_per_s = 100, .val_loss = NAN, .validated = NAN, .remaining = 70};
    progress p = progress_start();
    p.terminal = true;
    for (int i = 0; i < 10; i++) {
        p.shown = i < 9 ? 1e30 : 0; // draws only the last
        r.step = i + 1;
        r.loss = i == 0 ? 8 : 4;
        const int kept = begin_capture(state);
        progress_show(&p, &r);
        end_capture(state, kept, text, sizeof text);
    }
    const char *loss = strstr(text, "loss ");
    assert_non_null(loss);
    assert_true(strtod(loss + 5, NULL) < 4.4);
    assert_non_null(strstr(text, "[############............]  50%  step 10  loss 4."));
    assert_non_null(strstr(text, "nats  100 tokens/s  1:10 left"));
    p.terminal = false;
    r.line = &line;
    const int kept = begin_capture(state);
    progress_show(&p, &r);
    end_capture(state, kept, text, sizeof text);
    assert_string_equal(text, " 50%  step 10  loss 4.400 nats  80 tokens/s  1:10 left\n");
    r.bytes = true;
    const int again = begin_capture(state);
    progress_show(&p, &r);
    end_capture(state, again, text, sizeof text);
    assert_string_equal(text, " 50%  step 10  loss 6.348 bits/byte  80 tokens/s  1:10 left\n");
    const log_line lossy = {.loss = 4.4, .f8 = {.amax = 1.5e4, .zeros = 0.15, .subnormals = 0.05}};
    r.line = &lossy;
    const int warned = begin_capture(state);
    progress_show(&p, &r);
    end_capture(state, warned, text, sizeof text);
    assert_non_null(strstr(text, "\nwarning: 20 % of the elements of A are too small for fp8"));
    assert_non_null(strstr(text, "beside others of up to 1.5e+04: "));
}

/* A validation at 100 % of the steps shows its own share. */
static void a_validation_shows_its_own_share(void **state)
{
    char text[4096];
    train_report r = {
        .step = 9, .progress = 1, .tokens_per_s = 100, .val_loss = 2, .validated = 0.4, .loss = 1};
    progress p = progress_start();
    p.terminal = true;
    p.shown = 0;
    average_add(&p.loss, 1);
    int kept = begin_capture(state);
    progress_show(&p, &r);
    progress_end(&p);
    end_capture(state, kept, text, sizeof text);
    assert_non_null(strstr(text, "100%  step 9  loss 1.000 nats  validation 2.000  validating 40%\n"));
    for (int terminal = 0; terminal < 2; terminal++) {
        const char *begin = terminal ? "\r\033[K[##################......]  75%  " : " 75%  ";
        const double before = clock_seconds();
        p = progress_start();
        p.terminal = terminal;
        p.started = p.shown = before - 15;
        kept = begin_capture(state);
        progress_show_pass(&p, 0.75);
        const double after = clock_seconds(), shown = p.shown;
        p.shown += 3600;
        progress_show_pass(&p, 0.8); // too early after the first: nothing
        progress_end(&p);
        end_capture(state, kept, text, sizeof text);
        assert_true(shown >= before && shown <= after);
        int minutes, seconds, end = 0;
        assert_int_equal(strncmp(text, begin, strlen(begin)), 0);
        assert_int_equal(sscanf(text + strlen(begin), "%d:%2d left%n", &minutes, &seconds, &end), 2);
        assert_string_equal(text + strlen(begin) + end, "\n");
        const double left = 60 * minutes + seconds; // a third of the time until now
        assert_true(left >= 5 && left <= (after - before + 15) / 3 + 0.5);
    }
}

static int count(const char *text, const char *part)
{
    int found = 0;
    for (; (text = strstr(text, part)) != NULL; text++) found++;
    return found;
}

/* Without a terminal the log's lines are told; with -q nothing is. A run that is not quiet ends as before. */
static void lines_replace_the_bar_without_a_terminal(void **state)
{
    static char output[OUTPUT_BYTES];
    const char *options =
        "train --hidden 16 --intermediate 8 --experts 4 --heads 2 --layers 1 --context 16 --batch 2 ";
    char command[1024];
    put_texts(state);
    snprintf(command, sizeof command, "%s --steps 40 --logs 8 --evaluations 2 --out run text.txt", options);
    assert_int_equal(run(state, "", command, output), 0);
    assert_int_equal(count(output, " tokens/s"), 8);
    assert_int_equal(count(output, "  step "), 8);
    assert_int_equal(count(output, "  validation "), 5); // from the line of step 20 on
    assert_int_equal(count(output, "\r"), 0);
    assert_non_null(strstr(output, "100%  step 40  loss "));
    snprintf(command, sizeof command, "%s -q --steps 40 --logs 8 --out quiet text.txt", options);
    assert_int_equal(run(state, "", command, output), 0);
    assert_int_equal(count(output, "tokens/s"), 0);
}

/* Results are in units in which they can be read: no memory of a GPU on the CPU, no fractions of a TFLOP/s.
 */
static void results_have_readable_units(void **state)
{
    static char output[OUTPUT_BYTES];
    put_texts(state);
    assert_int_equal(
        run_for(state, "", "train " TINY "--device cpu --steps 2 --out run text.txt", OUTPUT, output), 0);
    assert_null(strstr(output, "device_gb"));
    assert_non_null(strstr(output, "val_loss"));
    assert_int_equal(run_for(state, "", "bench --repeats 1 --thiek 64,32,16,8,2", OUTPUT, output), 0);
    assert_null(strstr(output, "tflops"));
    assert_non_null(strstr(output, "gflops"));
    const char *all = strstr(output, "forward   all");
    double ms[3], rate;
    assert_non_null(all);
    assert_int_equal(sscanf(all, "forward all %lf %lf %lf %lf", &ms[0], &ms[1], &ms[2], &rate), 4);
    const double gflops = 6.0 * 64 * 2 * 16 * 32 / (ms[0] * 1e6);
    assert_true(fabs(rate - gflops) <= 0.006 + 6e-5 / ms[0] * gflops); // both are rounded
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_average_is_of_the_last_steps),
        cmocka_unit_test_setup_teardown(the_shown_loss_and_rate_are_those_of_the_log, folder_setup,
                                        folder_teardown),
        cmocka_unit_test_setup_teardown(a_validation_shows_its_own_share, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(lines_replace_the_bar_without_a_terminal, folder_setup,
                                        folder_teardown),
        cmocka_unit_test_setup_teardown(results_have_readable_units, folder_setup, folder_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
