/* Training on several ranks, as processes on the CPUs: N ranks must give the bits of one rank with N
 * micro-batches, checkpoints must not depend on the number of ranks, and whatever happens to a rank, all must
 * end with one message. */
#include "tests/cli_process.h"

#include "cli/lm/train_options.h"
#include "train/files/safetensors.h"
#include "train/run/log.h"
#include "train/run/train.h"

#include <cblas.h>
#include <dirent.h>
#include <fcntl.h>
#include <math.h>

#define MODEL                                                                                                \
    "--hidden 16 --intermediate 8 --experts 5 --heads 2 --layers 3 --context 16 --batch 8 --logs 4 -q "      \
    "--device cpu "

enum { MOST_WORDS = 64 };

static int set_up(void **state)
{
    if (folder_setup(state) != 0) return -1;
    put_texts(state);
    return 0;
}

/* ---- bits ---- */

/* Trains in this process, with the code for several ranks if `sharded`. */
static void train_here(void **state, const char *arguments, const char *out, bool sharded)
{
    char text[1024], path[4096], *words[MOST_WORDS];
    train_options options;
    train_result result;
    error err = {0};
    int count = 0;
    snprintf(text, sizeof text, "train %s %s/text.txt", arguments, (const char *)*state);
    for (char *word = strtok(text, " "); word; word = strtok(NULL, " ")) words[count++] = word;
    words[count] = NULL;
    assert_true(train_options_parse(&options, count, words, &err));
    options.settings.out = in_folder(path, state, out);
    options.settings.sharded = sharded;
    if (!train_run(&options.settings, NULL, NULL, &result, &err)) fail_msg("%s", err.text);
    free(options.paths);
}

/* The tensors of two files are equal, bit for bit, and in the same order. */
static void assert_same_tensors(void **state, const char *a, const char *b)
{
    char path[4096];
    safetensors *x, *y;
    error err = {0};
    if (!safetensors_open(&x, in_folder(path, state, a), &err) ||
        !safetensors_open(&y, in_folder(path, state, b), &err))
        fail_msg("%s", err.text);
    assert_int_equal(safetensors_count(x), safetensors_count(y));
    for (size_t i = 0; i < safetensors_count(x); i++) {
        const tensor *s = safetensors_at(x, i), *t = safetensors_at(y, i);
        int64_t elements, bytes;
        assert_string_equal(s->name, t->name);
        assert_true(tensor_size(s, &elements, &bytes));
        if (memcmp(s->data, t->data, (size_t)bytes) != 0) fail_msg("%s and %s differ in %s", a, b, s->name);
    }
    safetensors_close(x);
    safetensors_close(y);
}

static void assert_same_runs(void **state, const char *a, const char *b)
{
    static const char *const files[] = {"model.safetensors", "state.safetensors"};
    for (int i = 0; i < 2; i++) {
        char x[128], y[128];
        snprintf(x, sizeof x, "%s/latest/%s", a, files[i]);
        snprintf(y, sizeof y, "%s/latest/%s", b, files[i]);
        assert_same_tensors(state, x, y);
    }
}

static log_line last_line(void **state, const char *out)
{
    char path[4096], name[128];
    log_line *lines, last;
    size_t count;
    error err = {0};
    snprintf(name, sizeof name, "%s/train.jsonl", out);
    if (!log_read(in_folder(path, state, name), &lines, &count, &err)) fail_msg("%s", err.text);
    last = lines[count - 1];
    free(lines);
    return last;
}

static void assert_close_lines(void **state, const char *a, const char *b, double limit)
{
    const log_line x = last_line(state, a), y = last_line(state, b);
    assert_int_equal(x.step, y.step);
    if (!(fabs(x.loss / y.loss - 1) < limit) || !(fabs(x.val_loss / y.val_loss - 1) < limit) ||
        !(fabs(x.grad_norm / y.grad_norm - 1) < limit) ||
        !(fabs(x.bits_per_byte / y.bits_per_byte - 1) < limit))
        fail_msg("loss %.12g, %.12g; validation %.12g, %.12g; norm %.12g, %.12g; bits %.12g, %.12g", x.loss,
                 y.loss, x.val_loss, y.val_loss, x.grad_norm, y.grad_norm, x.bits_per_byte, y.bits_per_byte);
}

/* Options that change what a step does. */
static const char *const kinds[] = {
    "--clip 0",
    "--clip 0 --shared 24 --dense-layers 1 --balance 0.1 --recompute layers",
    "--clip 0 --tied --score sigmoid --bias-rate 0.01 --rounding sr-f --tile 4",
    "--clip 1e9", // scales nothing, but updates and gathers come after the backward
    "--clip 1e9 --compute f8 --intermediate 16",
};

/* One rank without micro-batches does the same whether its states are shared out or not; only clipping sums
 * the squares of the norm in another order. */
static void one_rank_changes_nothing(void **state)
{
    train_here(state, MODEL "--steps 4 --checkpoints 1 --clip 0", "whole", false);
    train_here(state, MODEL "--steps 4 --checkpoints 1 --clip 0", "shared", true);
    assert_same_runs(state, "whole", "shared");
    assert_close_lines(state, "whole", "shared", 1e-6);
}

/* N ranks are N micro-batches of one rank, bit for bit: both sum in the same order. Spans of three ranks have
 * tails. */
static void ranks_are_micro_batches(void **state)
{
    enum { KINDS = sizeof kinds / sizeof kinds[0] };
    for (int i = 0; i < 3 * KINDS; i++) {
        const int ranks = 2 + i / KINDS;
        const char *kind = kinds[i % KINDS];
        char here[512], there[512], a[32], b[32];
        snprintf(a, sizeof a, "one%d", i);
        snprintf(b, sizeof b, "many%d", i);
        snprintf(here, sizeof here,
                 MODEL "--batch 12 --steps 4 --checkpoints 1 --evaluations 1 %s --micro-batches %d", kind,
                 ranks);
        snprintf(there, sizeof there,
                 "train --gpus %d -o %s " MODEL
                 "--batch 12 --steps 4 --checkpoints 1 --evaluations 1 %s text.txt",
                 ranks, b, kind);
        train_here(state, here, a, true);
        expect(state, there, 0, "done");
        assert_same_runs(state, a, b);
        assert_close_lines(state, a, b, 1e-6);
    }
}

/* With clipping a step leaves the gathering of its weights to the next, or to a validation. A checkpoint
 * without one is complete all the same, because each rank writes its own parts. */
static void a_checkpoint_has_all_weights(void **state)
{
    const char *options = "--steps 4 --checkpoints 2 --evaluations 0 --clip 1e9";
    char here[512], there[512];
    snprintf(here, sizeof here, MODEL "%s --micro-batches 2", options);
    snprintf(there, sizeof there, "train --gpus 2 -o saved " MODEL "%s text.txt", options);
    train_here(state, here, "kept", true);
    expect(state, there, 0, "done");
    assert_same_runs(state, "kept", "saved");
}

/* The limit of the gradient's norm follows from sums of squares, whose order is another with other ranks. */
static void clipping_is_close(void **state)
{
    const char *options = "--steps 6 --checkpoints 1 --evaluations 1 --clip 0.1 ";
    char here[512], there[512];
    snprintf(here, sizeof here, MODEL "%s --micro-batches 2", options);
    snprintf(there, sizeof there, "train --gpus 2 -o two " MODEL "%s text.txt", options);
    train_here(state, here, "one", true);
    train_here(state, here, "whole", false);
    expect(state, there, 0, "done");
    assert_close_lines(state, "one", "two", 1e-6);
    assert_close_lines(state, "whole", "two", 1e-6);
}

/* A run of four ranks goes on with two, then with one, and is close to one that had four micro-batches
 * always. The same number of ranks gives the same bits, also after a resume. */
static void another_number_of_ranks_resumes(void **state)
{
    const char *sizes =
        MODEL "--checkpoints 3 --keep 9 --evaluations 3 --evaluation-tokens 160 --last-evaluation-tokens 160 "
              "--clip 0 "; // with clipping the first step would gather what the load should have
    char command[512];
    struct {
        int ranks, parts, steps;
        const char *out, *more;
    } runs[] = {{4, 1, 3, "way", ""},          {2, 2, 6, "way", "--resume"}, {1, 4, 9, "way", "--resume"},
                {1, 4, 9, "always", ""},       {4, 1, 9, "four", ""},        {4, 1, 3, "again", ""},
                {4, 1, 9, "again", "--resume"}};
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
        snprintf(command, sizeof command,
                 "train -o %s %s --warmup 0 --end-lr 1 --gpus %d --micro-batches %d --steps %d %s text.txt",
                 runs[i].out, sizes, runs[i].ranks, runs[i].parts, runs[i].steps, runs[i].more);
        expect(state, command, 0, "done");
    }
    assert_close_lines(state, "always", "four", 1e-4);
    assert_close_lines(state, "always", "way", 1e-4);
    assert_same_runs(state, "four", "again");
}

/* Weights that all ranks have, and moments of zeros, make the same files for any number of them. */
static void files_do_not_depend_on_the_ranks(void **state)
{
    char command[512], other[1024];
    expect(state, "train -o from " MODEL "--steps 3 --checkpoints 1 --evaluations 0 text.txt", 0, "done");
    for (int ranks = 1; ranks <= 4; ranks *= 2) {
        snprintf(command, sizeof command,
                 "train --from from -o n%d -q --device cpu --batch 8 --gpus %d --steps 1 "
                 "--checkpoints 1 --evaluations 0 text.txt",
                 ranks, ranks);
        expect(state, command, 0, "done");
        if (ranks == 1) continue;
        for (int i = 0; i < 2; i++) {
            const char *name = i ? "state" : "model";
            snprintf(other, sizeof other,
                     "cd '%.400s' && cmp n1/step-0000000/%s.safetensors n%d/step-0000000/%s.safetensors >&2",
                     (const char *)*state, name, ranks, name);
            assert_int_equal(system(other), 0);
        }
    }
}

/* ---- ranks that end ---- */

/* The process of a rank that `parent` has started. */
static pid_t process_of(pid_t parent, int rank)
{
    char path[64], text[1 << 16], wanted[32];
    pid_t found = 0;
    int of;
    DIR *all = opendir("/proc");
    struct dirent *entry;
    const int length = snprintf(wanted, sizeof wanted, "SMOE_RANK=%d", rank) + 1;
    while (!found && (entry = readdir(all))) {
        const pid_t pid = (pid_t)atol(entry->d_name);
        snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
        FILE *file = pid ? fopen(path, "r") : NULL;
        if (!file) continue;
        const bool child = fscanf(file, "%*d %*s %*c %d", &of) == 1 && of == parent;
        fclose(file);
        snprintf(path, sizeof path, "/proc/%d/environ", (int)pid);
        if (!child || !(file = fopen(path, "r"))) continue;
        const size_t size = fread(text, 1, sizeof text, file);
        fclose(file);
        if (memmem(text, size, wanted, (size_t)length)) found = pid;
    }
    closedir(all);
    return found;
}

static pid_t wait_for_process(pid_t parent, int rank)
{
    const double end = clock_seconds() + HANG_SECONDS;
    pid_t found;
    while ((found = process_of(parent, rank)) <= 0) {
        if (clock_seconds() > end) fail_msg("rank %d does not start", rank);
        usleep(1000);
    }
    return found;
}

/* Kills each rank in turn at several moments: three times while the ranks start, three times in a step, and
 * three times most likely while a checkpoint is written. The checkpoints that are there can be read. */
static void a_killed_rank_ends_the_run(void **state)
{
    for (int i = 0; i < 9; i++) {
        char out[32], command[512], message[64];
        const int rank = i % 3, starts = i < 3;
        snprintf(out, sizeof out, "kill%d", i);
        snprintf(command, sizeof command,
                 "train -o %s --gpus 3 " TINY "--batch 6 --device cpu --steps 100000000 --logs "
                 "100000000 --checkpoints %d --evaluations 0 text.txt",
                 out, i < 6 ? 5000000 : 100000000);
        const pid_t run = start(state, "", command, "messages");
        if (!starts) wait_for_log(state, out, 0);
        usleep((useconds_t)(i * 35000));
        kill(wait_for_process(run, rank), SIGKILL);
        assert_int_equal(status_of(run), 3);
        snprintf(message, sizeof message, "smoe train: rank %d: ended by signal 9", rank);
        assert_message(state, "messages", message);
        snprintf(command, sizeof command, "eval --device cpu -c %s text.txt", out);
        if (!starts) expect_quiet(state, command);
    }
}

/* The limit is so long that no other rank of a busy machine is hung, so all runs wait for it together. In the
 * last one two ranks of three hang. */
static void a_hung_rank_is_named(void **state)
{
    static const struct {
        const char *out, *messages;
        int ranks, first, last; // that hang
    } runs[] = {
        {"hung0", "messages0", 2, 0, 0}, {"hung1", "messages1", 2, 1, 1}, {"hung2", "messages2", 3, 0, 1}};
    enum { RUNS = sizeof runs / sizeof runs[0] };
    pid_t started[RUNS];
    for (int i = 0; i < RUNS; i++) {
        char command[512];
        snprintf(command, sizeof command,
                 "train -o %s --gpus %d --peer-timeout 15 " TINY
                 "--batch 6 --device cpu --steps 100000000 --checkpoints 1 --evaluations 0 --logs 100000000 "
                 "text.txt",
                 runs[i].out, runs[i].ranks);
        started[i] = start(state, "", command, runs[i].messages);
    }
    for (int i = 0; i < RUNS; i++) {
        wait_for_log(state, runs[i].out, 0);
        for (int r = runs[i].first; r <= runs[i].last; r++) kill(wait_for_process(started[i], r), SIGSTOP);
    }
    for (int i = 0; i < RUNS; i++) {
        char message[64];
        assert_int_equal(status_of(started[i]), 3);
        snprintf(message, sizeof message, "smoe train: rank %d: no progress for 15 s", runs[i].first);
        assert_message(state, runs[i].messages, message);
    }
}

/* Here it is every rank, at its start. */
static void a_rank_without_memory_ends_the_run(void **state)
{
    const pid_t run =
        start(state,
              "ASAN_OPTIONS=\"allocator_may_return_null=1 $ASAN_OPTIONS\" "
              "TSAN_OPTIONS=\"allocator_may_return_null=1 $TSAN_OPTIONS\"",

              "train -o none --gpus 2 " TINY "--experts 512 --hidden 4096 --intermediate 1048576 "
              "--device cpu --steps 1 text.txt",
              "messages");
    assert_int_equal(status_of(run), 3);
    const char *text = contents(state, "messages"), *found = strstr(text, "smoe train: rank ");
    if (!found || !strstr(found, ": out of memory: ") || strstr(found + 1, "smoe train: "))
        fail_msg("'%s'", text);
}

/* A stop leaves a checkpoint, and the resumed run has the bits of one that
 * was not stopped. The steps before the stop are not known. Their rate is constant, so that it does not
 * depend on how many follow. */
static void check_stop(void **state, int number)
{
    const char *sizes =
        TINY "--device cpu --gpus 2 --evaluations 0 --checkpoints 1 --warmup 0 --end-lr 1 text.txt";
    char command[512];
    snprintf(command, sizeof command, "train -o stopped --steps 100000000 --logs 100000000 %s", sizes);
    const pid_t run = start(state, "", command, "messages");
    wait_for_log(state, "stopped", 0);
    kill(run, number);
    assert_int_equal(status_of(run), 128 + number);
    assert_message(state, "messages", "interrupted, go on with --resume");
    const long long steps = last_line(state, "stopped").step + 4;
    snprintf(command, sizeof command, "train -o stopped --resume --steps %lld %s", steps, sizes);
    expect(state, command, 0, "done");
    snprintf(command, sizeof command, "train -o whole --steps %lld %s", steps, sizes);
    expect(state, command, 0, "done");
    assert_same_runs(state, "whole", "stopped");
}

static void a_stop_reaches_all_ranks(void **state)
{
    check_stop(state, SIGTERM);
}

static void an_interrupt_reaches_all_ranks(void **state)
{
    check_stop(state, SIGINT);
}

/* Its ranks and gnuplot are waited for although whoever started it ignores SIGCHLD. */
static void an_ignored_signal_of_children_changes_nothing(void **state)
{
    char path[4096];
    const pid_t run = start(state, "env --ignore-signal=CHLD",
                            "train -o ignored --gpus 2 --device cpu --steps 2 " TINY "text.txt", "messages");
    assert_int_equal(status_of(run), 0);
    if (system("gnuplot -V >/dev/null") == 0)
        assert_int_equal(access(in_folder(path, state, "ignored/curve.png"), F_OK), 0);
}

int main(void)
{
    openblas_set_num_threads(1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(one_rank_changes_nothing, set_up, folder_teardown),
        cmocka_unit_test_setup_teardown(ranks_are_micro_batches, set_up, folder_teardown),
        cmocka_unit_test_setup_teardown(a_checkpoint_has_all_weights, set_up, folder_teardown),
        cmocka_unit_test_setup_teardown(clipping_is_close, set_up, folder_teardown),
        cmocka_unit_test_setup_teardown(another_number_of_ranks_resumes, set_up, folder_teardown),
        cmocka_unit_test_setup_teardown(files_do_not_depend_on_the_ranks, set_up, folder_teardown),
        cmocka_unit_test_setup_teardown(a_killed_rank_ends_the_run, set_up, folder_teardown),
        cmocka_unit_test_setup_teardown(a_hung_rank_is_named, set_up, folder_teardown),
        cmocka_unit_test_setup_teardown(a_rank_without_memory_ends_the_run, set_up, folder_teardown),
        cmocka_unit_test_setup_teardown(a_stop_reaches_all_ranks, set_up, folder_teardown),
        cmocka_unit_test_setup_teardown(an_interrupt_reaches_all_ranks, set_up, folder_teardown),
        cmocka_unit_test_setup_teardown(an_ignored_signal_of_children_changes_nothing, set_up,
                                        folder_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
