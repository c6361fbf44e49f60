/* Shared by the tests that run smoe as a program: a folder with texts, the options of a small model, and
 * functions that run the program and look at its output. Define _DEFAULT_SOURCE before including this header.
 */
#ifndef TESTS_CLI_CASE_H
#define TESTS_CLI_CASE_H

#include "base/blas_core.h"
#include "tests/folder.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include <cmocka.h>

enum { OUTPUT_BYTES = 1 << 16 };

/* A test may itself run in a job, whose variables would make every smoe a rank of it. */
__attribute__((constructor)) static void leave_job(void)
{
    static const char *const names[] = {"SMOE_RANK",
                                        "RANK",
                                        "WORLD_SIZE",
                                        "LOCAL_RANK",
                                        "MASTER_ADDR",
                                        "MASTER_PORT",
                                        "TORCHELASTIC_USE_AGENT_STORE",
                                        "SLURM_STEP_NUM_TASKS",
                                        "SLURM_PROCID",
                                        "SLURM_LOCALID",
                                        "SLURM_STEP_NODELIST",
                                        "SLURM_JOB_ID",
                                        "SLURM_STEP_ID",
                                        "OMPI_COMM_WORLD_SIZE",
                                        "OMPI_COMM_WORLD_RANK",
                                        "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "OMPI_COMM_WORLD_LOCAL_SIZE",
                                        "PMIX_NAMESPACE"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) unsetenv(names[i]);
}

#define TINY "--hidden 16 --intermediate 8 --experts 4 --heads 2 --layers 1 --context 16 --batch 2 -q "

enum stream { OUTPUT, ERRORS };

/* Runs PREFIX `smoe ARGUMENTS` in the test's folder and returns the exit status. `output` receives one of its
 * streams. */
static inline int run_for(void **state, const char *prefix, const char *arguments, enum stream stream,
                          char *output)
{
    char command[8192];
    const char *core = blas_core_fault() ? "OPENBLAS_CORETYPE=Haswell" : ""; // or each command would say so
    snprintf(command, sizeof command, "cd '%s' && export OMP_NUM_THREADS=1 %s; %s '%s' %s %s",
             (const char *)*state, core, prefix, SMOE_PROGRAM,
             stream == OUTPUT ? "2>/dev/null" : "2>&1 >/dev/null", arguments);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    const size_t length = fread(output, 1, OUTPUT_BYTES - 1, pipe);
    output[length] = '\0';
    const int status = pclose(pipe);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static inline int run(void **state, const char *prefix, const char *arguments, char *output)
{
    return run_for(state, prefix, arguments, ERRORS, output);
}

static inline void expect(void **state, const char *arguments, int status, const char *message)
{
    static char output[OUTPUT_BYTES];
    const int got = run(state, "", arguments, output);
    if (got != status || !strstr(output, message))
        fail_msg("smoe %s: exit status %d, '%s' instead of %d, '%s'", arguments, got, output, status,
                 message);
}

/* Succeeds without a message. */
static inline void expect_quiet(void **state, const char *arguments)
{
    static char output[OUTPUT_BYTES];
    const int status = run(state, "", arguments, output);
    if (status != 0 || *output) fail_msg("smoe %s: exit status %d, '%s'", arguments, status, output);
}

/* text.txt, empty.txt and the folder `nothing`, which holds an empty file. */
static inline void put_texts(void **state)
{
    enum { BYTES = 8192 };
    char path[4096], text[BYTES];
    for (int i = 0; i < BYTES; i++) text[i] = (char)('a' + i * i % 23);
    put_file(in_folder(path, state, "text.txt"), text, BYTES);
    put_file(in_folder(path, state, "empty.txt"), text, 0);
    snprintf(path, sizeof path, "mkdir '%s/nothing' && : >'%s/nothing/empty'", (const char *)*state,
             (const char *)*state);
    assert_int_equal(system(path), 0);
}

/* A number of the result of `smoe ARGUMENTS --json`; `redirect` redirects its standard input. */
static inline double figure(void **state, const char *arguments, const char *key, const char *redirect)
{
    static char output[OUTPUT_BYTES];
    char whole[1024], quoted[64];
    snprintf(whole, sizeof whole, "%s --json %s", arguments, redirect);
    const int status = run_for(state, "", whole, OUTPUT, output);
    if (status != 0) fail_msg("smoe %s: exit status %d", arguments, status);
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    const char *at = strstr(output, quoted);
    if (!at) fail_msg("smoe %s: '%s' lacks %s", arguments, output, key);
    return strtod(at + strlen(quoted), NULL);
}

#endif
