/* Shared by the tests that signal smoe while it runs: they start it, wait for what it writes, and take its
 * exit status. The waits' limits end a test that would hang; they are far above what a busy machine needs.
 * Define _DEFAULT_SOURCE before including this header. */
#ifndef TESTS_CLI_PROCESS_H
#define TESTS_CLI_PROCESS_H

#include "tests/cli_case.h"

#include "base/clock.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HANG_SECONDS = 120 };

/* Starts `smoe ARGUMENTS` with more variables in its environment; its output and its messages go to two files
 * of the test's folder. */
static inline pid_t start(void **state, const char *environment, const char *arguments, const char *messages)
{
    const pid_t child = fork();
    if (child != 0) return child;
    char command[4096];
    snprintf(command, sizeof command, "cd '%s' && exec env OMP_NUM_THREADS=1 %s '%s' %s >'%s.output' 2>'%s'",
             (const char *)*state, environment, SMOE_PROGRAM, arguments, messages, messages);
    execl("/bin/sh", "sh", "-c", command, (char *)NULL);
    _exit(127);
}

/* The contents of a file of the test's folder; "" if there is none. */
static inline const char *contents(void **state, const char *name)
{
    static char text[OUTPUT_BYTES];
    char path[4096];
    FILE *file = fopen(in_folder(path, state, name), "r");
    text[file ? fread(text, 1, sizeof text - 1, file) : 0] = '\0';
    if (file) fclose(file);
    return text;
}

/* The last line of the messages has this text, and no other is about a rank. */
static inline void assert_message(void **state, const char *name, const char *part)
{
    const char *text = contents(state, name), *found = strstr(text, part),
               *end = found ? strchr(found, '\n') : NULL, *named = strstr(text, "rank ");
    if (!end || end[1] || (named && named < found) || (named && strstr(named + 1, "smoe train: ")))
        fail_msg("'%s', not '%s'", text, part);
}

/* Waits until a file of the folder contains `part`. */
static inline void wait_for(void **state, const char *name, const char *part)
{
    const double end = clock_seconds() + HANG_SECONDS;
    while (!strstr(contents(state, name), part)) {
        if (clock_seconds() > end) fail_msg("no '%s' in %s within %d s", part, name, HANG_SECONDS);
        usleep(20000);
    }
}

/* Waits until the log of the run in `out` has more than `size` bytes, and returns how many. */
static inline long wait_for_log(void **state, const char *out, long size)
{
    char path[4096], name[128];
    const double end = clock_seconds() + HANG_SECONDS;
    struct stat found;
    snprintf(name, sizeof name, "%s/train.jsonl", out);
    while (stat(in_folder(path, state, name), &found) != 0 || found.st_size <= size) {
        if (clock_seconds() > end) fail_msg("%s does not grow within %d s", name, HANG_SECONDS);
        usleep(20000);
    }
    return (long)found.st_size;
}

/* The exit status of a process as a shell has it: 128 + N if signal N ended the process. */
static inline int status_of(pid_t process)
{
    const double end = clock_seconds() + HANG_SECONDS;
    int status;
    while (waitpid(process, &status, WNOHANG) == 0) {
        if (clock_seconds() > end) {
            kill(process, SIGKILL);
            fail_msg("it has not ended within %d s", HANG_SECONDS);
        }
        usleep(20000);
    }
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

#endif
