/* `smoe train` and signals: it ends with a checkpoint that can be resumed, and a run that is killed at any
 * moment leaves one that can be evaluated. Each signal follows something that the run has written or read. */
#include "tests/cli_process.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>

/* The thread sanitizer holds signals back until a read returns. */
#if defined(__SANITIZE_THREAD__)
#define LATE_SIGNALS 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define LATE_SIGNALS 1
#endif
#endif
#ifndef LATE_SIGNALS
#define LATE_SIGNALS 0
#endif

#define ENDLESS "--steps 100000000 --logs 100000000 "

/* The run writes a checkpoint after every step, so that most kills happen during a checkpoint. */
static void a_run_killed_at_any_moment_resumes(void **state)
{
    put_texts(state);
    expect(state, "train " TINY "--steps 2 --out run text.txt", 0, "done");
    for (int i = 0; i < 8; i++) {
        char messages[16];
        snprintf(messages, sizeof messages, "messages%d", i);
        const pid_t run = start(
            state, "", "train " TINY "--resume --steps 1000000 --checkpoints 1000000 --out run text.txt",
            messages);
        wait_for(state, messages, "resumed at step");
        usleep((useconds_t)(i * 37000));
        kill(run, SIGKILL);
        assert_int_equal(status_of(run), 128 + SIGKILL);
        expect(state, "eval -c run text.txt", 0, "");
    }
}

/* Signals in the middle of training, and in a last validation that would take minutes: the run must write a
 * checkpoint, end with the signal's exit status, and resume. */
static void signals_end_with_a_checkpoint(void **state)
{
    enum { BYTES = 64 << 20 };
    char path[4096], *text = malloc(BYTES);
    put_texts(state);
    for (int i = 0; i < BYTES; i++) text[i] = (char)('a' + i % 23);
    put_file(in_folder(path, state, "long.txt"), text, BYTES);
    free(text);
    static const struct {
        int signal;
        const char *out, *arguments, *message;
    } cases[] = {
        {SIGINT, "a", ENDLESS "text.txt", "interrupted, go on with --resume: a/{train.jsonl"},
        {SIGTERM, "b", ENDLESS "text.txt", "interrupted, go on with --resume"},
        {SIGHUP, "g", ENDLESS "text.txt", "interrupted, go on with --resume"},
        {SIGINT, "c", "--steps 1 --last-evaluation-tokens 1e9 long.txt", "go on with --resume"},
        {SIGTERM, "d", "--json --steps 1 --last-evaluation-tokens 1e9 long.txt", "go on with --resume"},
        {SIGINT, "e", ENDLESS "--checkpoints 0 text.txt", "no checkpoint was saved: e/"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *out = cases[i].out;
        char arguments[256], messages[16];
        snprintf(arguments, sizeof arguments, "train " TINY "--out %s %s", out, cases[i].arguments);
        snprintf(messages, sizeof messages, "%s.messages", out);
        const pid_t run = start(state, "", arguments, messages);
        wait_for(state, messages, "new run: ");
        if (strstr(arguments, ENDLESS))
            wait_for_log(state, out, 0);
        else
            usleep(500000); // the step ends before that, but if not, the same must happen
        kill(run, cases[i].signal);
        const int status = status_of(run);
        const char *said = contents(state, messages);
        if (status != 128 + cases[i].signal || !strstr(said, cases[i].message))
            fail_msg("%s: exit status %d, '%s'", arguments, status, said);
    }
    assert_null(strstr(contents(state, "e.messages"), "latest")); // it writes no checkpoints
    // No line has a loss yet, and the validation that was stopped has no tokens.
    assert_non_null(strstr(contents(state, "d.messages.output"), "\"loss\":null"));
    assert_non_null(strstr(contents(state, "d.messages.output"), "\"val_tokens\":0"));
    assert_int_equal(access(in_folder(path, state, "c/step-0000001/state.safetensors"), F_OK), 0);
    expect(state, "eval -c a text.txt", 0, "");
    expect(state, "train " TINY "--resume --steps 1 --last-evaluation-tokens 1000 --out d long.txt", 0,
           "done");
}

/* A run that reads its text from a pipe, and has begun to: more bytes are written than a pipe holds. */
static pid_t start_reader(void **state, int *text)
{
    enum { BYTES = 200000 };
    static char words[BYTES];
    char path[4096];
    put_texts(state);
    memset(words, 'w', sizeof words);
    assert_int_equal(mkfifo(in_folder(path, state, "pipe"), 0600), 0);
    const pid_t run = start(state, "", "train " TINY "--steps 9 --out run - <pipe", "messages");
    *text = open(path, O_WRONLY);
    assert_true(*text >= 0);
    for (ssize_t at = 0, more; at < BYTES; at += more)
        assert_true((more = write(*text, words + at, (size_t)(BYTES - at))) > 0);
    return run;
}

/* `timeout` and some schedulers send a signal to the process and to its group, so that it comes twice. Both
 * are sent while the process is stopped, so that it takes them at once: one is of the process, one of its
 * thread. */
static void a_signal_may_come_twice(void **state)
{
    int text, how;
    char path[4096];
    const pid_t run = start_reader(state, &text);
    kill(run, SIGSTOP);
    assert_int_equal(waitpid(run, &how, WUNTRACED), run);
    assert_true(WIFSTOPPED(how));
    assert_int_equal(kill(run, SIGTERM), 0);
    assert_int_equal(syscall(SYS_tgkill, run, run, SIGTERM), 0);
    kill(run, SIGCONT);
    close(text);
    assert_int_equal(status_of(run), 128 + SIGTERM);
    assert_non_null(strstr(contents(state, "messages"), "go on with --resume"));
    assert_int_equal(access(in_folder(path, state, "run/latest"), F_OK), 0);
}

/* The run cannot end at the first signal, because it waits for more text. */
static void a_later_signal_ends_the_run(void **state)
{
    if (LATE_SIGNALS) skip();
    int text, how;
    char path[4096];
    const double end = clock_seconds() + HANG_SECONDS;
    const pid_t run = start_reader(state, &text);
    while (kill(run, SIGTERM), usleep(200000), waitpid(run, &how, WNOHANG) == 0 && clock_seconds() < end) {
    }
    close(text);
    assert_true(WIFSIGNALED(how) && WTERMSIG(how) == SIGTERM);
    assert_int_equal(access(in_folder(path, state, "run/latest"), F_OK), -1);
}

/* nohup ignores HUP. */
static void an_ignored_hangup_stays_ignored(void **state)
{
    put_texts(state);
    const pid_t run = start(state, "sh -c 'trap \"\" HUP; exec \"$@\"' sh",
                            "train " TINY ENDLESS "--out run text.txt", "messages");
    const long size = wait_for_log(state, "run", 0);
    kill(run, SIGHUP);
    wait_for_log(state, "run", size + 2000); // several more steps
    kill(run, SIGTERM);
    assert_int_equal(status_of(run), 128 + SIGTERM);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(signals_end_with_a_checkpoint, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(a_signal_may_come_twice, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(an_ignored_hangup_stays_ignored, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(a_later_signal_ends_the_run, folder_setup, folder_teardown),
        cmocka_unit_test_setup_teardown(a_run_killed_at_any_moment_resumes, folder_setup, folder_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
