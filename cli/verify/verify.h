/* `smoe verify`: the checks that the cases of harness/cases.h go through, and the report they write to. */
#ifndef CLI_VERIFY_H
#define CLI_VERIFY_H

#include "cli/support/kernels.h"
#include "cli/support/table.h"
#include "harness/cases.h"
#include "harness/device.h"

/* The report: a line for each tensor, or the worst line of each case. */
typedef struct verify_line {
    const char *tensor;
    double error, limit;
    bool ok;
    const char *note; /* or NULL */
} verify_line;

typedef struct verify_report {
    table *table;
    bool every_tensor;
    int64_t passed, failed, skipped; /* lines that passed and failed, cases that were skipped */
    const char *name, *dtype;        /* of the case that runs */
    verify_line worst;               /* the line that passed with the error nearest to its limit */
    char worst_note[96];             /* a copy of its note, which may be freed before the case ends */
    bool any, any_failed;            /* of this case */
} verify_report;

typedef struct verify {
    const device *on;
    smoe_kernels kernels;
    int32_t gpu; // its number
    smoe_context *context;
    int32_t threads;
    uint64_t seed;
    int64_t repeats; // of the cases that repeat beside copies
    int64_t again;   // how often every comparison runs again
    verify_report report;
} verify;

/* Runs the case with this layer (its own, completed, with a storage type) and reports. */
typedef void verify_check(verify *v, const layer_case *c, const smoe_layer *layer);

/* One for each case_check. */
verify_check check_compare, check_bits, check_gradients, check_support, check_repeats, check_isolation,
    check_nan_logits, check_bias_update, check_saved_bytes;

/* Another number of chunks, without dlogits and drouter_bias, and from a CUDA graph: the same bits. */
verify_check check_other_ways;

/* ---- The report: begin, lines or one skip, end ---- */

void report_begin(verify_report *report, const char *name, const char *dtype);
void report_line(verify_report *report, verify_line line);
void report_skip(verify_report *report, const char *reason);
void report_end(verify_report *report);

#endif
