/* Training runs on a small text. A resumed run must give the bits of an uninterrupted run, files that a
 * killed run leaves must do no harm, the log must continue at the checkpoint, and each kind of bad input must
 * have its error. */
#define _DEFAULT_SOURCE
#include "train_case.h"

#include "train/files/file.h"
#include "train/files/safetensors.h"
#include "train/model/params.h"
#include "train/run/checkpoint.h"
#include "train/run/log.h"
#include "train/run/sample.h"
#include "train/run/schedule.h"

#include <cblas.h>
#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <omp.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

/* A batch of 4 sequences in 1, 2 and 4 micro-batches: the losses of the runs must agree. */
static void micro_batches_train_alike(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result whole, parts;
    char out[PATH_BYTES];
    s.batch = 4;
    s.routing.rounding = SMOE_ROUNDING_NONE;
    s.routing.balance_coefficient = 0; // no mean over tokens
    train_ok(&s, &whole);
    for (s.parts = 2; s.parts <= 4; s.parts *= 2) {
        snprintf(out, sizeof out, "%s/parts%d", p->folder, (int)s.parts);
        s.out = out;
        train_ok(&s, &parts);
        assert_int_equal(parts.tokens, whole.tokens);
        assert_float_equal(parts.loss, whole.loss, 1e-3);
        assert_float_equal(parts.validation.loss, whole.validation.loss, 1e-3);
    }
    s.parts = 3;
    s.out = p->text;
    train_fails(&s, ERROR_USAGE, "--micro-batches is 3, which does not divide the batch of 4");
}

/* A run with micro-batches must resume bit for bit. The random numbers of SR-f depend on step and
 * micro-batch. */
static void micro_batches_resume(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result whole, part;
    char other[128];
    snprintf(other, sizeof other, "%s/other", p->folder);
    s.batch = 4;
    s.parts = 2;
    train_ok(&s, &whole);
    s.out = other;
    train_stopped(&s, 7, &part);
    assert_int_equal(part.step, 7);
    s.resume = true;
    train_ok(&s, &part);
    assert_true(part.validation.loss == whole.validation.loss);
    assert_same_checkpoints(p->out, other);
}

/* A run that starts with the weights of another and moments of zero must begin with that run's loss. */
static void a_run_starts_from_a_checkpoint(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result first, second;
    char out[PATH_BYTES];
    train_ok(&s, &first);
    snprintf(out, sizeof out, "%s/second", p->folder);
    s.from = p->out;
    s.out = out;
    s.steps = 1;
    s.lr = 0.0;
    train_ok(&s, &second);
    assert_int_equal(second.step, 1);
    assert_true(second.validation.loss == first.validation.loss);
    s.config.experts = 8;
    s.out = p->text;
    train_fails(&s, ERROR_USAGE, "other sizes or settings");
}

static void log_goes_on_where_the_checkpoint_was(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result result;
    char path[PATH_BYTES];
    log_line *lines, *again;
    size_t count, count_again;
    error err = {0};
    train_ok(&s, &result);
    snprintf(path, sizeof path, "%s/train.jsonl", p->out);
    assert_true(log_read(path, &lines, &count, &err));
    // what a run leaves that was killed after step 10: lines after its checkpoint, the last one incomplete
    FILE *file = fopen(path, "a");
    fprintf(file, "{\"step\":21,\"tokens\":1,\"loss\":1.0}\n{\"step\":22,\"tok");
    fclose(file);
    char command[2 * PATH_BYTES];
    snprintf(command, sizeof command, "cd '%s' && rm -rf step-0000020 && ln -sfn step-0000010 latest",
             p->out);
    assert_int_equal(system(command), 0);
    s.resume = true;
    train_ok(&s, &result);
    assert_true(log_read(path, &again, &count_again, &err));
    assert_int_equal(count, count_again);
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(lines[i].step, again[i].step);
        assert_int_equal(lines[i].tokens, again[i].step * 3 * 16);
        assert_true(lines[i].loss == again[i].loss);
        assert_true(lines[i].lr == again[i].lr && lines[i].grad_norm == again[i].grad_norm);
        assert_true(lines[i].val_loss == again[i].val_loss ||
                    (isnan(lines[i].val_loss) && isnan(again[i].val_loss)));
        assert_float_equal(lines[i].bits_per_byte, lines[i].loss / log(2), 1e-6);
    }
    assert_int_equal(lines[count - 1].step, 20);
    assert_true(isfinite(lines[count - 1].val_loss));
    free(lines);
    free(again);
}

/* Reads the log of a run without checkpoints and removes it, so that the next run may have the folder. */
static size_t take_log(const char *out, log_line **lines)
{
    char path[PATH_BYTES];
    const size_t count = read_log(out, lines);
    snprintf(path, sizeof path, "%s/train.jsonl", out);
    assert_int_equal(remove(path), 0);
    return count;
}

/* Up must drop no pairs, Down must add none, and plain top-K does neither. The log must have the numbers of
 * the last training step, not of the validation after it, which uses plain top-K. */
static void log_has_what_rounding_did(void **state)
{
    static const smoe_rounding rules[] = {SMOE_ROUNDING_NONE, SMOE_ROUNDING_UP, SMOE_ROUNDING_DOWN};
    place *p = *state;
    train_settings s = settings_of(p);
    train_result result;
    log_line *lines;
    s.checkpoints = 0;
    s.routing.tile = 16; // an expert has 24 rows on average
    for (int i = 0; i < 3; i++) {
        s.routing.rounding = rules[i];
        train_ok(&s, &result);
        const size_t count = take_log(p->out, &lines);
        for (size_t l = 0; l < count; l++) {
            const routing_report *r = &lines[l].routing;
            assert_true(rules[i] == SMOE_ROUNDING_UP ? r->added > 0.02 : r->added == 0);
            assert_true(rules[i] == SMOE_ROUNDING_DOWN ? r->dropped > 0.02 : r->dropped == 0);
            assert_true(r->added < 0.67 && r->dropped < 0.67); // 16 of 24
            assert_true(rules[i] == SMOE_ROUNDING_DOWN ? r->emptied < 1 : r->emptied == 0);
            assert_true(r->busiest >= 1 && r->busiest <= 2); // each expert has at most 48 of 96 pairs
            assert_true(lines[l].seconds > (l ? lines[l - 1].seconds : 0));
        }
        free(lines);
    }
    s.routing.tile = 64; // more than any expert can have: down drops every pair
    train_ok(&s, &result);
    take_log(p->out, &lines);
    assert_true(lines[0].routing.dropped == 1 && lines[0].routing.emptied > 0.5);
    free(lines);
    s.config.dense_layers = s.config.layers; // nothing is routed
    s.config.dense_intermediate = 16;
    train_ok(&s, &result);
    take_log(p->out, &lines);
    assert_true(isnan(lines[0].routing.added) && isnan(lines[0].routing.busiest));
    free(lines);
}

static void read_last_line(const place *p, log_line *last)
{
    log_line *lines;
    const size_t count = read_log(p->out, &lines);
    assert_true(count > 0);
    *last = lines[count - 1];
    free(lines);
}

/* With as many lines, evaluations and checkpoints as steps, every step must have one of each, also if
 * (step / steps) * steps is less than step in double. */
static void every_step_has_what_was_asked(void **state)
{
    enum { STEPS = 22, ROUNDED = 15 };
    place *p = *state;
    train_settings s = settings_of(p);
    train_result result;
    log_line *lines;
    size_t count;
    char path[PATH_BYTES];
    error err = {0};
    assert_true((double)ROUNDED / STEPS * STEPS < ROUNDED);
    s.steps = s.logs = s.validations.count = s.checkpoints = STEPS;
    s.keep = STEPS + 1;
    train_ok(&s, &result);
    snprintf(path, sizeof path, "%s/train.jsonl", p->out);
    if (!log_read(path, &lines, &count, &err)) fail_msg("%s", err.text);
    assert_int_equal(count, STEPS);
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(lines[i].step, i + 1);
        assert_true(isfinite(lines[i].val_loss));
    }
    assert_int_equal(count_folders(p->out), STEPS + 1);
    free(lines);
}

static void the_last_validation_is_bounded(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result result;
    s.steps = 1;
    s.validations.last = 100; // of some 500: 7 windows of 16
    train_ok(&s, &result);
    assert_int_equal(result.validation.tokens, 112);
    assert_true(isfinite(result.validation.loss));
}

/* What killed runs leave: a half-written folder, or a complete one to which `latest` does not point yet. */
static void leftovers_of_a_kill_do_not_matter(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result result;
    char command[4 * PATH_BYTES];
    train_ok(&s, &result);
    assert_int_equal(count_folders(p->out), 2); // keep
    snprintf(command, sizeof command,
             "cd '%s' && ln -sfn step-0000010 latest && mkdir step-0000015.tmp && echo x > "
             "step-0000015.tmp/model.safetensors"
             " && : > step-0000020/model.safetensors && ln -s nowhere latest.tmp",
             p->out);
    assert_int_equal(system(command), 0);
    s.resume = true;
    train_ok(&s, &result);
    assert_int_equal(result.step, 20);
    assert_int_equal(count_folders(p->out), 2);
    model m;
    error err = {0};
    char latest[PATH_BYTES + 8];
    snprintf(latest, sizeof latest, "%s/latest", p->out);
    assert_true(model_create(&m, NULL, &s.config, &(model_options){.sequences = 1}, &err));
    assert_true(checkpoint_load_weights(latest, &m, NULL, &err));
    model_destroy(&m);
}

/* `rm -rf out/step-*` leaves the link `latest` without its folder. A new run must not take this for a
 * checkpoint that is already written. */
static void a_link_to_nothing_is_no_checkpoint(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result result;
    char command[PATH_BYTES];
    snprintf(command, sizeof command, "mkdir '%s' && ln -s step-0000000 '%s/latest'", p->out, p->out);
    assert_int_equal(system(command), 0);
    s.keep = 10;
    train_ok(&s, &result);
    assert_int_equal(access_in(p->out, "step-0000000/state.safetensors"), 0);
}

/* Limits the size of files to `bytes`; 0: no limit. A larger write fails with EFBIG, on a full disk with
 * ENOSPC. */
static void limit_files(rlim_t bytes)
{
    struct rlimit limit;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    limit.rlim_cur = bytes ? bytes : limit.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

/* One of the checkpoint's files does not fit: config.json, the weights (59 KB) or the moments (112 KB). */
static void a_full_disk_leaves_no_half_checkpoint(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result result;
    static const struct {
        rlim_t bytes;
        const char *part;
    } cases[] = {{100, "config.json: cannot write"},
                 {10000, "model.safetensors: cannot write"},
                 {80000, "state.safetensors: cannot write"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) { // the first checkpoint
        limit_files(cases[i].bytes);
        train_fails(&s, ERROR_RUNTIME, cases[i].part);
        limit_files(0);
        assert_int_equal(count_folders(p->out), 0);
    }
    train_stopped(&s, 7, &result);
    s.resume = true;
    for (size_t i = 1; i < sizeof cases / sizeof cases[0]; i++) { // a later one: earlier ones must stay
        limit_files(cases[i].bytes);
        train_fails(&s, ERROR_RUNTIME, cases[i].part);
        limit_files(0);
        assert_int_equal(count_folders(p->out), 2);
        assert_int_equal(access_in(p->out, "step-0000010.tmp"), -1);
        assert_int_equal(access_in(p->out, "latest/model.safetensors"), 0);
    }
    train_ok(&s, &result);
    assert_int_equal(result.step, 20);
}

static void bad_input_has_its_error(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p), other = s;
    train_result result;
    s.resume = true;
    train_fails(&s, ERROR_RUNTIME, "no checkpoint");
    s.resume = false;
    train_ok(&s, &result);
    train_fails(&s, ERROR_USAGE, "resume");
    other.resume = true;
    other.config.hidden = 32;
    train_fails(&other, ERROR_USAGE, "other sizes or settings");
    other.config.hidden = 16;
    other.seed = 2;
    train_fails(&other, ERROR_USAGE, "seed");
    other = settings_of(p);
    other.config.heads = 3;
    other.out = p->text; // this error comes before the one that --out is a file
    train_fails(&other, ERROR_USAGE, "hidden_size");
    other.config.heads = 2;
    train_fails(&other, ERROR_RUNTIME, "text.txt");
    const char *missing = "/nonexistent/text";
    other.paths = &missing;
    train_fails(&other, ERROR_RUNTIME, "/nonexistent/text");
}

/* Two runs in one folder would mix their logs and remove each other's checkpoints. */
static void two_runs_do_not_share_a_folder(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result result;
    int lock = -1;
    error err = {0};
    assert_true(file_make_folder(p->out, &err) && file_lock_folder(&lock, p->out, &err));
    train_fails(&s, ERROR_RUNTIME, "out: another run is writing into this folder");
    close(lock);
    train_ok(&s, &result);
    s.resume = true;
    assert_true(file_lock_folder(&lock, p->out, &err));
    train_fails(&s, ERROR_RUNTIME, "out: another run is writing into this folder");
    close(lock);
    train_ok(&s, &result); // the run before has given its folder back
}

static void truncated_checkpoints_are_errors(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result result;
    const char *names[] = {"model.safetensors", "state.safetensors", "config.json"};
    train_ok(&s, &result);
    s.resume = true;
    for (int i = 0; i < 3; i++) {
        char path[PATH_BYTES + 64];
        snprintf(path, sizeof path, "%s/latest/%s", p->out, names[i]);
        assert_int_equal(truncate(path, 100), 0);
        train_fails(&s, ERROR_RUNTIME, names[i]);
        train_settings fresh = settings_of(p);
        char command[PATH_BYTES];
        snprintf(command, sizeof command, "rm -rf '%s'", p->out);
        assert_int_equal(system(command), 0);
        train_ok(&fresh, &result);
    }
}

/* Allocations of exactly this size fail; 0: none fails. */
static size_t failing_size;

void *__real_malloc(size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_malloc(size_t size)
{
    return size > 0 && size == failing_size ? NULL : __real_malloc(size);
}

static bool folders_without_fsync;
static int synced_logs; // calls of fsync for a train.jsonl

int __real_fsync(int descriptor);
int __wrap_fsync(int descriptor);
int __wrap_fsync(int descriptor)
{
    struct stat about;
    char link[64], name[PATH_BYTES];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    const ssize_t length = readlink(link, name, sizeof name - 1);
    name[length > 0 ? length : 0] = '\0';
    synced_logs += strstr(name, "/train.jsonl") != NULL;
    if (!folders_without_fsync || fstat(descriptor, &about) != 0 || !S_ISDIR(about.st_mode))
        return __real_fsync(descriptor);
    errno = EINVAL;
    return -1;
}

/* fsync of a folder fails with EINVAL, as on some file systems. The checkpoints must be written anyway. */
static void folders_need_no_fsync(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result result;
    s.steps = 2;
    folders_without_fsync = true;
    train_ok(&s, &result);
    folders_without_fsync = false;
    assert_int_equal(access_in(p->out, "latest/state.safetensors"), 0);
}

/* The log must be synced before each checkpoint, so that after a loss of power it has all lines before the
 * checkpoint that is resumed. */
static void the_log_is_synced_before_a_checkpoint(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result result;
    synced_logs = 0;
    train_ok(&s, &result);
    assert_int_equal(synced_logs, s.checkpoints); // at the first checkpoint, at step 0, there is no log yet
}

/* An allocation of the batch fails. The undefined-behaviour sanitizer would find arithmetic on NULL. */
static void a_batch_without_memory_is_an_error(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    s.batch = 37;
    failing_size = 2 * 37 * 16 * sizeof(int32_t); // inputs and targets
    train_fails(&s, ERROR_RUNTIME, "a batch of 592 tokens");
    failing_size = 0;
}

static void every_rounding_rule_trains(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result result;
    char out[PATH_BYTES + 16];
    s.steps = 4;
    s.config.shared_intermediate = 8;
    s.config.dense_layers = 1;
    s.config.dense_intermediate = 16;
    for (smoe_rounding rule = SMOE_ROUNDING_NONE; rule <= SMOE_ROUNDING_DOWN; rule++) {
        s.routing.rounding = rule;
        snprintf(out, sizeof out, "%s/rule%d", p->folder, (int)rule);
        s.out = out;
        train_ok(&s, &result);
        assert_true(isfinite(result.validation.loss));
    }
}

static void a_run_by_the_clock_ends_by_it(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result result;
    s.steps = 0;
    s.seconds = 0.2;
    train_ok(&s, &result);
    assert_true(result.step > 0 && result.elapsed >= 0.2);
}

static void schedule_warms_up_and_falls(void **state)
{
    (void)state;
    assert_float_equal(schedule_factor(0.05, 0.1, 0.1), 0.5, 1e-12);
    assert_float_equal(schedule_factor(0.1, 0.1, 0.1), 1.0, 1e-12);
    assert_float_equal(schedule_factor(0.55, 0.1, 0.1), 0.55, 1e-12);
    assert_float_equal(schedule_factor(1.0, 0.1, 0.1), 0.1, 1e-12);
    assert_float_equal(schedule_factor(0.0, 0.0, 0.1), 1.0, 1e-12);
}

/* With a warm-up as long as the run, the last step must have the peak rate. */
static void a_warm_up_may_be_the_whole_run(void **state)
{
    place *p = *state;
    train_settings s = settings_of(p);
    train_result result;
    log_line last;
    s.steps = s.logs = 4;
    s.warmup = 1.0;
    train_ok(&s, &result);
    read_last_line(p, &last);
    assert_float_equal(last.lr, s.lr, 1e-8 * s.lr);
}

static void sampling_follows_the_probabilities(void **state)
{
    (void)state;
    enum { VOCAB = 5, DRAWS = 20000 };
    const float logits[VOCAB] = {logf(0.1f), logf(0.4f), logf(0.2f), logf(0.05f), logf(0.25f)};
    int32_t order[VOCAB];
    int counts[VOCAB] = {0};
    sampler s = {.temperature = 1.0, .top_p = 1.0, .seed = 3};
    for (int i = 0; i < DRAWS; i++) counts[sample_choose(&s, logits, VOCAB, order)]++;
    for (int i = 0; i < VOCAB; i++) assert_float_equal(counts[i] / (double)DRAWS, exp(logits[i]), 0.015);
    s.top_p = 0.6; // 0.4 and 0.25: the least set that reaches it
    memset(counts, 0, sizeof counts);
    for (int i = 0; i < DRAWS; i++) counts[sample_choose(&s, logits, VOCAB, order)]++;
    assert_int_equal(counts[0] + counts[2] + counts[3], 0);
    assert_float_equal(counts[1] / (double)DRAWS, 0.4 / 0.65, 0.015);
    s.temperature = 0.0;
    for (int i = 0; i < 10; i++) assert_int_equal(sample_choose(&s, logits, VOCAB, order), 1);
}

int main(void)
{
    openblas_set_num_threads(1);
    omp_set_num_threads(1); // the models are so small that a second thread would only wait
#define RUN(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        RUN(micro_batches_train_alike),
        RUN(micro_batches_resume),
        RUN(a_run_starts_from_a_checkpoint),
        RUN(log_goes_on_where_the_checkpoint_was),
        RUN(log_has_what_rounding_did),
        RUN(every_step_has_what_was_asked),
        RUN(the_last_validation_is_bounded),
        RUN(leftovers_of_a_kill_do_not_matter),
        RUN(a_link_to_nothing_is_no_checkpoint),
        RUN(a_full_disk_leaves_no_half_checkpoint),
        RUN(bad_input_has_its_error),
        RUN(two_runs_do_not_share_a_folder),
        RUN(truncated_checkpoints_are_errors),
        RUN(a_batch_without_memory_is_an_error),
        RUN(folders_need_no_fsync),
        RUN(the_log_is_synced_before_a_checkpoint),
        RUN(every_rounding_rule_trains),
        RUN(a_run_by_the_clock_ends_by_it),
        RUN(a_warm_up_may_be_the_whole_run),
        cmocka_unit_test(schedule_warms_up_and_falls),
        cmocka_unit_test(sampling_follows_the_probabilities),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
