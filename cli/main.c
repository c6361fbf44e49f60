/* The `smoe` program: finds the subcommand and calls it. */
#include "base/error.h"
#include "cli/support/cli.h"
#include "smoe.h"

#include <cblas.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *does;
    bool sleeps; // its threads sleep while they wait for one another (start_again)
} command;

static const command commands[] = {
    {"train", smoe_cli_train, "train a language model on text files", true},
    {"generate", smoe_cli_generate, "sample text from a checkpoint", true},
    {"eval", smoe_cli_eval, "compute loss and bits per byte of a checkpoint on files", true},
    {"bench", smoe_cli_bench, "measure time and memory of a layer, stage by stage", false},
    {"verify", smoe_cli_verify, "compare the library with an fp64 oracle on this machine", false},
    {"info", smoe_cli_info, "show version and backends; compute FLOPs and memory of a layer or model", false},
};

static void print_help(FILE *to)
{
    fprintf(to, "Usage: smoe COMMAND [OPTION...]\nTrain and measure Mixture-of-Experts layers.\n\n");
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++)
        fprintf(to, "  %-10s %s\n", commands[i].name, commands[i].does);
    fprintf(to, "\n`smoe COMMAND --help` lists a command's options; `smoe --version` prints the version.\n"
                "Exit status: 0 success, 1 a check failed, 2 wrong arguments, 3 run-time failure; 129, 130 "
                "and 143:\n"
                "train was interrupted by HUP, INT or TERM and saved a checkpoint.\n");
}

/* Two libraries read their settings before main. So the program sets them in the environment and starts
 * itself again. If this fails, the program continues without them.
 * - OpenMP's threads spin for milliseconds at every barrier. On a machine with other work they take processor
 *   time from the thread that they wait for, and training was 5 to 10 times slower.
 * - OpenBLAS starts a thread for each processor, and each of them takes a buffer of 128 MiB, or tries forever
 *   if there is no address space for it. The program's threads are OpenMP's, so it needs none of them. */
static void start_again(char **argv, bool sleeps)
{
    const char *blas = getenv("OPENBLAS_NUM_THREADS");
    const bool spins = sleeps && !getenv("GOMP_SPINCOUNT") && !getenv("OMP_WAIT_POLICY"),
               threads = !blas || strcmp(blas, "1") != 0;
    char program[4096];
    const ssize_t length = readlink("/proc/self/exe", program, sizeof program);
    if ((!spins && !threads) || length <= 0 || length >= (ssize_t)sizeof program) return;
    if ((spins && setenv("GOMP_SPINCOUNT", "1000", 1) != 0) || setenv("OPENBLAS_NUM_THREADS", "1", 1) != 0)
        return;
    program[length] = 0;
    execv(program, argv);
}

/* Runs last at every exit, also at argp's for --help and --version. If the command succeeded but its output
 * could not be written (a full disk), the exit status is that of a run-time failure. A command that failed
 * has already said why. */
static void check_output(int status, void *unused)
{
    (void)unused;
    errno = 0;
    const bool flushed = fflush(stdout) == 0;
    if (status != 0 || (flushed && !ferror(stdout))) return;
    fprintf(stderr, "smoe: cannot write to standard output: %s\n",
            errno != 0 ? strerror(errno) : "an earlier write failed");
    _exit(ERROR_RUNTIME);
}

/* If a standard stream is closed, the next file that is opened would get its number, and messages would be
 * written into this file. So the number is taken. Reading or writing it fails, as on the closed stream. */
static void take_standard_streams(void)
{
    for (int stream = 0; stream < 3; stream++)
        if (fcntl(stream, F_GETFD) < 0 && open("/dev/null", stream == 0 ? O_WRONLY : O_RDONLY) < 0)
            _exit(ERROR_RUNTIME);
}

/* Texts and weights are read through mappings of their files. A read past the end of a file that became
 * shorter is this signal, and no call returns an error. */
static void explain_bus_error(int number)
{
    static const char text[] = "smoe: a file that is being read became shorter, or its disk failed\n";
    const ssize_t written = write(STDERR_FILENO, text, sizeof text - 1);
    (void)number, (void)written;
    _exit(ERROR_RUNTIME);
}

int main(int argc, char **argv)
{
    take_standard_streams();
    on_exit(check_output, NULL);
    openblas_set_num_threads(1); // the program's threads are OpenMP's; each calls BLAS by itself
    const char *name = argc > 1 ? argv[1] : "";
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        if (strcmp(name, commands[i].name) != 0) continue;
        start_again(argv, commands[i].sleeps);
        signal(SIGBUS, explain_bus_error);
        signal(SIGCHLD, SIG_DFL); // where it is ignored, a process that smoe starts cannot be waited for
        char title[32];
        snprintf(title, sizeof title, "smoe %s", name);
        argv[1] = title;
        return commands[i].run(argc - 1, argv + 1);
    }
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0 || strcmp(name, "-?") == 0) {
        print_help(stdout);
        return 0;
    }
    if (strcmp(name, "--version") == 0 || strcmp(name, "-V") == 0) {
        printf("smoe %d.%d.%d\n", SMOE_VERSION_MAJOR, SMOE_VERSION_MINOR, SMOE_VERSION_PATCH);
        return 0;
    }
    if (*name) fprintf(stderr, "smoe: '%s' is no command\n", name);
    print_help(stderr);
    return 2;
}
