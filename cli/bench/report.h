/* The records of `smoe bench`: one row for a pass, one for each of its stages, and the two sums that matter,
 * "routing" and "gemms". docs/benchmarks.md says what every column means. */
#ifndef CLI_BENCH_REPORT_H
#define CLI_BENCH_REPORT_H

#include "cli/bench/case.h"
#include "cli/bench/check.h"
#include "cli/support/costs.h"
#include "cli/support/table.h"

/* One repeat: milliseconds. */
typedef struct bench_times {
    double forward, backward, layer, quantize;
    double stage[STAGE_COUNT];
    double dense[STAGE_COUNT]; // the yardstick's GEMMs
    double copy;               // a byte of traffic
} bench_times;

typedef enum bench_pass { PASS_FORWARD = 1, PASS_BACKWARD = 2, PASS_LAYER = 4 } bench_pass;

/* All that was measured of one problem. */
typedef struct bench_result {
    const bench_case *c;
    const problem_options *problem;
    const bench_shape *shape;
    table_format format;
    int passes;        // bench_pass values together
    const char *stage; // only the rows of this stage; NULL: all
    bench_times *times;
    size_t repeats;
    pass_bytes peak, predicted;
    bench_errors errors;
    bool counted, timed_alone;      // are the next two known?
    int launches[STAGE_COUNT];      // kernels of each stage in the pass's graph
    double host_ms[2];              // the host enqueues a forward, a backward; known if `counted`
    double alone[STAGE_COUNT];      // ms of those kernels, each by itself
    double alone_copy[STAGE_COUNT]; // ms of a copy of as many bytes, by itself; 0: not timed
} bench_result;

table *bench_table(table_format format, const device *on);

/* The rows of one problem; ALIGNED: under a line that says what it is, and above the sums to look at. */
void bench_report(table *t, const bench_result *result);

#endif
