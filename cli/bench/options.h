/* The arguments of `smoe bench`. */
#ifndef CLI_BENCH_OPTIONS_H
#define CLI_BENCH_OPTIONS_H

#include "cli/bench/report.h"

enum { MOST_REPEATS = 1000 };

typedef struct bench_options {
    problem_options problem; // one problem at least
    bench_settings settings;
    table_format format;
    const char *stage; // of the rows to write; NULL: all
    int passes;        // bench_pass values together
    int64_t repeats;   // 0: as many as fit in `seconds`
    double seconds;
} bench_options;

/* False for arguments that are refused; the reason is then on stderr, and mostly the program has ended. */
bool bench_parse(bench_options *options, int argc, char **argv);

#endif
