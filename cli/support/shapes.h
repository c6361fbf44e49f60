/* The benchmark shapes by suite: docs/shapes.csv, compiled into the program by CMake. */
#ifndef CLI_SHAPES_H
#define CLI_SHAPES_H

#include <stdint.h>

typedef struct bench_shape {
    const char *
        suite; // "paper", "models", "ep", "rounding", "granularity"; "thiek" for shapes from the command line
    const char *name;
    int64_t tokens, hidden, intermediate, experts, topk;
} bench_shape;

/* All shapes in the order of the file; *count is how many. */
const bench_shape *shapes_all(int *count);

#endif
