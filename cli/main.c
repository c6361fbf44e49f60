/* The `smoe` program: finds the subcommand and hands over. */
#include "cli/cli.h"
#include "smoe.h"

#include <cblas.h>
#include <stdio.h>
#include <string.h>

typedef struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *does;
} command;

static const command commands[] = {
    {"train", smoe_cli_train, "train a language model on text files"},
    {"generate", smoe_cli_generate, "sample text from a checkpoint"},
    {"eval", smoe_cli_eval, "loss and bits per byte of a checkpoint on files"},
    {"bench", smoe_cli_bench, "times and memory of a layer, stage by stage"},
    {"verify", smoe_cli_verify, "the library against fp64 on this machine"},
    {"info", smoe_cli_info, "version, backends; what a layer costs"},
};

static void print_help(FILE *to)
{
    fprintf(to, "Usage: smoe COMMAND [OPTION...]\nTrain and measure Mixture-of-Experts layers.\n\n");
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++)
        fprintf(to, "  %-10s %s\n", commands[i].name, commands[i].does);
    fprintf(to, "\n`smoe COMMAND --help` lists a command's options; `smoe --version` prints the version.\n"
                "Exit status: 0 ok, 1 a check failed, 2 usage, 3 run-time failure.\n");
}

int main(int argc, char **argv)
{
    openblas_set_num_threads(1); // OpenMP's threads are ours; each calls BLAS for itself
    const char *name = argc > 1 ? argv[1] : "";
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        if (strcmp(name, commands[i].name) != 0) continue;
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
